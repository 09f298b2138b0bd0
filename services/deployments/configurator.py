"""Serve deployment that fills in the router's cost table: how shall prefills attend?"""

from __future__ import annotations

import asyncio
from typing import Any

from opentelemetry import trace
from ray.serve.handle import DeploymentHandle

from csps.configurator.model.attention_shape import AttentionShape
from csps.configurator.plan.strategy_rules import StrategyRules
from csps.protocols.attention.plan import StrategyChoices, StrategyQuestions
from csps.protocols.rpc.client import RpcClient
from csps.protocols.rpc.schema import pack, unpack
from csps.protocols.rpc.server import Peer, RpcServer
from csps.services.cluster.ray_context import application_name, listen_host
from csps.services.settings.credentials import ClusterSecret
from csps.services.settings.settings import Settings
from csps.services.telemetry import tracing

CONNECT_DEADLINE_S = 10.0
ANSWER_DEADLINE_S = 60.0
"""Of the call. No request waits for it."""
CLOSE_GRACE_S = 1.0

_TRACER = trace.get_tracer("csps.configurator")


class Configurator:
    """Shell around the rules of the `configurator` room.

    It is asked over RPC, like everything else that is not Ray's own business.
    """

    async def __init__(self, settings: Settings, secret: ClusterSecret) -> None:  # type: ignore[misc]
        self._flush_spans = tracing.install("csps-configurator", settings.telemetry)
        self._rules = make_rules(settings, later=settings.configurator.profile_when_idle)
        self._profiling: asyncio.Task[None] | None = None
        if self._rules.waits:
            self._profiling = asyncio.create_task(self._profile(settings))
        self._rpc = RpcServer({"strategies": self._strategies}, secret=secret.value)
        self._address = await self._rpc.start(listen_host(settings))

    async def address(self) -> tuple[str, int]:
        """Where to ask."""
        return self._address

    async def _strategies(self, payload: Any, peer: Peer) -> dict[str, Any]:
        questions = unpack(StrategyQuestions, payload)
        with _TRACER.start_as_current_span("configure") as span:
            span.set_attribute("csps.configurator.buckets", len(questions.asked))
            # Simulating takes seconds, and others ask meanwhile whether this process lives.
            return pack(await asyncio.to_thread(self._rules.answer, questions))

    async def _profile(self, settings: Settings) -> None:
        """Until what is missing was measured, or cannot be."""
        from csps.services.profiling.idle_profile import profile_when_idle

        await profile_when_idle(settings, name=application_name())
        self._rules = await asyncio.to_thread(make_rules, settings)

    async def __del__(self) -> None:
        if self._profiling is not None:
            self._profiling.cancel()
            await asyncio.wait({self._profiling})
        await self._rpc.close(CLOSE_GRACE_S)
        self._flush_spans()


def make_rules(settings: Settings, *, later: bool = False) -> StrategyRules:
    """The rules for the model and for what was profiled.

    Args:
        later: what is missing will be measured.

    Raises:
        CheckpointError: the model's directory does not say.
    """
    # As below.
    from csps.services.measured.attention_options import accuracy_model, predicted_options
    from csps.services.measured.measured_groups import link_ratio

    accuracy = accuracy_model(settings)
    predicted = predicted_options(settings, accuracy)
    return StrategyRules(
        attention_shape(settings),
        link_ratio=link_ratio(settings),
        accuracy=None if isinstance(accuracy, str) else accuracy,
        predicted=None if later and isinstance(predicted, str) else predicted,
    )


def attention_shape(settings: Settings) -> AttentionShape:
    """The sizes of the served model's attention.

    Raises:
        CheckpointError: its directory does not say.
    """
    # The shell is imported to build the application as well, where torch is not needed.
    from csps.models.network.spec import read_spec
    from csps.services.measured.measured_groups import shape_of

    return shape_of(read_spec(settings.model_dir), settings)


class ConfiguratorClient:
    """Asks the configurator, and finds it again after it was replaced."""

    def __init__(self, handle: DeploymentHandle[Configurator], secret: ClusterSecret) -> None:
        self._handle = handle
        self._secret = secret
        self._client: RpcClient | None = None
        self._connecting = asyncio.Lock()

    async def strategies(self, questions: StrategyQuestions) -> StrategyChoices:
        """How requests shall attend, bucket by bucket.

        Raises:
            CspsError: why there is no answer.
        """
        client = await self._connected()
        answer = await client.call("strategies", pack(questions), deadline_s=ANSWER_DEADLINE_S)
        return unpack(StrategyChoices, answer)

    async def connect(self) -> None:
        """Connect before there is anything to ask."""
        await self._connected()

    async def close(self) -> None:
        """Hang up."""
        if self._client is not None:
            await self._client.close()

    async def _connected(self) -> RpcClient:
        async with self._connecting:
            if self._client is None or self._client.closed.done():
                host, port = await self._handle.address.remote()
                self._client = await RpcClient.connect(
                    host,
                    port,
                    secret=self._secret.value,
                    name="router",
                    deadline_s=CONNECT_DEADLINE_S,
                )
            return self._client
