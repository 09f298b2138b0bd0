"""The router's way to the configurator: over RPC, found again after it was replaced."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from csps.configurator.exact import ExactConfigurator
from csps.protocols.plans import Plan, PlanRequest
from csps.protocols.rpc_server import RpcServer
from csps.protocols.schema import pack, unpack
from csps.services.configurator import ConfiguratorClient
from csps.services.credentials import ClusterSecret

SECRET = ClusterSecret(b"a secret of the tests")


class FakeHandle:
    """A Serve handle with one method, which tells a changeable address."""

    def __init__(self) -> None:
        self.listening: tuple[str, int] = ("", 0)
        self.asked = 0

    @property
    def address(self) -> FakeHandle:
        return self

    async def remote(self) -> tuple[str, int]:
        self.asked += 1
        return self.listening


@asynccontextmanager
async def configurator(handle: FakeHandle) -> AsyncIterator[None]:
    planner = ExactConfigurator()

    def plan(payload: Any, _: object) -> dict[str, Any]:
        return pack(planner.plan(unpack(PlanRequest, payload)))

    server = RpcServer({"plan": plan}, secret=SECRET.value)
    handle.listening = await server.start("127.0.0.1")
    try:
        yield
    finally:
        await server.close(0)


async def test_it_asks_for_the_address_once_per_configurator() -> None:
    handle = FakeHandle()
    client = ConfiguratorClient(cast(Any, handle), SECRET)
    request = PlanRequest(prompt_tokens=5)
    for incarnation in (1, 2):
        async with configurator(handle):
            for _ in range(3):
                plan = await client.plan(request)
                assert isinstance(plan, Plan)
                assert plan.attention == "exact"
        assert handle.asked == incarnation
    await client.close()
