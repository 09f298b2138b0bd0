"""The router's way to the configurator: over RPC, found again after it was replaced."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from csps.configurator.rules import RuleConfigurator
from csps.configurator.shapes import AttentionShape
from csps.protocols.errors import InvalidRequest
from csps.protocols.plans import CsaOptions, Plan, PlanRequest
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
    planner = RuleConfigurator(
        AttentionShape(hidden=64, heads=4, kv_heads=2, head_dim=16, layers=2)
    )

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


async def test_a_plan_and_a_refusal_arrive_as_they_were_made() -> None:
    client = ConfiguratorClient(cast(Any, handle := FakeHandle()), SECRET)
    locations = ("0-0-0", "0-0-1")
    async with configurator(handle):
        ratios = ((0.0,), (0.25, 0.5))
        options = CsaOptions(levels=2, drop_ratios=ratios, strategy="ntp")
        wanted = PlanRequest(prompt_tokens=9, attention="csa", csa=options, locations=locations)
        plan = await client.plan(wanted)
        assert plan.strategy == "csa"
        assert plan.csa is not None
        assert (plan.csa.levels, plan.csa.drop_ratios) == (2, ratios)
        with pytest.raises(InvalidRequest, match="must be 1 to 2") as refused:
            await client.plan(replace(wanted, csa=CsaOptions(levels=3)))
        assert refused.value.param == "csps.levels"
    await client.close()
