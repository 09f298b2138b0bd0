"""The Serve deployment that fills in the router's cost table, and its client.

The router asks over RPC which strategy prefills of each bucket should use, and how fast it is.
"""

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
from csps.protocols.rpc.tls import Tls
from csps.services.cluster.ray_context import application_name, listen_host
from csps.services.settings.credentials import ClusterSecret
from csps.services.settings.settings import Settings
from csps.services.telemetry import tracing

CONNECT_DEADLINE_S = 10.0
ANSWER_DEADLINE_S = 60.0
"""Deadline for the call. No request waits for it."""
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
        self._rpc = RpcServer(
            {"strategies": self._strategies}, secret=secret.value, tls=settings.load_tls()
        )
        self._address = await self._rpc.start(listen_host(settings))

    async def address(self) -> tuple[str, int]:
        """Return the host and port of the RPC server."""
        return self._address

    async def _strategies(self, payload: Any, peer: Peer) -> dict[str, Any]:
        questions = unpack(StrategyQuestions, payload)
        with _TRACER.start_as_current_span("configure") as span:
            span.set_attribute("csps.configurator.buckets", len(questions.asked))
            # On a thread: simulating takes seconds, and health checks must be answered meanwhile.
            return pack(await asyncio.to_thread(self._rules.answer, questions))

    async def _profile(self, settings: Settings) -> None:
        """Measure what is missing while the machine is idle, then load the rules again."""
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
    """Return the rules for the served model and its profiles.

    Args:
        later: missing profiles will be measured, so predictions wait for them.

    Raises:
        CheckpointError: the model directory does not describe the model.
    """
    # Imported late: `services.app` imports this module where torch is not needed.
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
    """Return the sizes of the served model's attention.

    Raises:
        CheckpointError: the model directory does not describe the model.
    """
    # Imported late: `services.app` imports this module where torch is not needed.
    from csps.models.network.spec import read_spec
    from csps.services.measured.measured_groups import shape_of

    return shape_of(read_spec(settings.model_dir, settings.model_overrides), settings)


class ConfiguratorClient:
    """Asks the configurator, and reconnects after it was replaced."""

    def __init__(
        self, handle: DeploymentHandle[Configurator], secret: ClusterSecret, tls: Tls | None = None
    ) -> None:
        self._handle = handle
        self._secret, self._tls = secret, tls
        self._client: RpcClient | None = None
        self._connecting = asyncio.Lock()

    async def strategies(self, questions: StrategyQuestions) -> StrategyChoices:
        """Return the choices for each question.

        Raises:
            CspsError: the configurator did not answer.
        """
        client = await self._connected()
        answer = await client.call("strategies", pack(questions), deadline_s=ANSWER_DEADLINE_S)
        return unpack(StrategyChoices, answer)

    async def connect(self) -> None:
        """Connect before there is a question."""
        await self._connected()

    async def close(self) -> None:
        """Disconnect."""
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
                    tls=self._tls,
                )
            return self._client
