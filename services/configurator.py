"""Serve deployment that answers "how shall this request's prefill attend?"."""

from __future__ import annotations

import asyncio
from typing import Any

from opentelemetry import trace
from ray.serve.handle import DeploymentHandle

from csps.configurator.expected_group import PartitionSizes
from csps.configurator.rules import RuleConfigurator
from csps.configurator.shapes import AttentionShape
from csps.protocols.plans import Plan, PlanRequest
from csps.protocols.rpc_client import RpcClient
from csps.protocols.rpc_server import Peer, RpcServer
from csps.protocols.schema import pack, unpack
from csps.services import telemetry
from csps.services.credentials import ClusterSecret
from csps.services.node import listen_host
from csps.services.settings import Settings

CONNECT_DEADLINE_S = 10.0
PLAN_DEADLINE_S = 5.0
"""Of the call; the dispatcher waits less for advice."""
CLOSE_GRACE_S = 1.0

_TRACER = trace.get_tracer("csps.configurator")


class Configurator:
    """Shell around a planner of the `configurator` room.

    It is asked over RPC, not through its Serve handle: every request waits for its plan, and the
    way through the handle takes milliseconds.
    """

    async def __init__(self, settings: Settings, secret: ClusterSecret) -> None:  # type: ignore[misc]
        self._flush_spans = telemetry.install("csps-configurator", settings.telemetry)
        self._planner = make_configurator(settings)
        self._rpc = RpcServer({"plan": self._plan}, secret=secret.value)
        self._address = await self._rpc.start(listen_host(settings))

    async def address(self) -> tuple[str, int]:
        """Where to ask for plans."""
        return self._address

    def _plan(self, payload: Any, peer: Peer) -> dict[str, Any]:
        with _TRACER.start_as_current_span("configure") as span:
            plan = self._planner.plan(unpack(PlanRequest, payload))
            span.set_attributes(
                {"csps.plan.attention": plan.attention, "csps.plan.strategy": plan.strategy}
            )
        return pack(plan)

    async def __del__(self) -> None:
        await self._rpc.close(CLOSE_GRACE_S)
        self._flush_spans()


def make_configurator(settings: Settings) -> RuleConfigurator:
    """The planner with the sizes of the model, and with those that the operator set.

    Raises:
        CheckpointError: the model's directory does not say.
    """
    prefill = settings.prefill
    return RuleConfigurator(
        attention_shape(settings),
        sizes=PartitionSizes(spt_tokens=prefill.spt_tokens, short_tokens=prefill.short_tokens),
        link_ratio=settings.topology.link_ratio,
    )


def attention_shape(settings: Settings) -> AttentionShape:
    """The sizes of the served model's attention.

    Raises:
        CheckpointError: its directory does not say.
    """
    # The shell is imported to build the application as well, where torch is not needed.
    from csps.models.spec import read_spec

    spec = read_spec(settings.model_dir)
    return AttentionShape(
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        layers=spec.layers,
        lse=1 if settings.dtype == "float32" else 2,
    )


class ConfiguratorClient:
    """Asks the configurator for plans, and finds it again after it was replaced."""

    def __init__(self, handle: DeploymentHandle[Configurator], secret: ClusterSecret) -> None:
        self._handle = handle
        self._secret = secret
        self._client: RpcClient | None = None
        self._connecting = asyncio.Lock()

    async def plan(self, request: PlanRequest) -> Plan:
        """The plan for one request.

        Raises:
            InvalidRequest: it asks for what it cannot have.
            CspsError: why there is none.
        """
        client = await self._connected()
        return unpack(Plan, await client.call("plan", pack(request), deadline_s=PLAN_DEADLINE_S))

    async def connect(self) -> None:
        """Connect ahead of the first request, which would have to wait for it."""
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
