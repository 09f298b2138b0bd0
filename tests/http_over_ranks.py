"""The HTTP API, the dispatcher and two real gangs, all in the test's own process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from gang_cell import ANSWER_S, SECRET, START_S, GangPlan
from gang_threads import ThreadGang, eventually, thread_gang
from live_server import serving

from csps.protocols.plans import Plan, PlanRequest
from csps.services.cluster import Cluster
from csps.services.credentials import ApiKeys
from csps.services.directory import ClusterView, StaticDirectory
from csps.services.dispatch import Dispatcher
from csps.services.generations import MemoryGenerations
from csps.services.http_app import Api
from csps.services.intake import Intake
from csps.services.metrics import Metrics
from csps.services.planning import Planner
from csps.services.scheduling.decode_placement import DecodeRules
from csps.services.scheduling.spt_policy import SptPolicy, SptRules
from csps.services.settings import Settings

RULES = SptRules(spt_tokens=256, short_tokens=32)


@dataclass(frozen=True, kw_only=True)
class PlacedGang(GangPlan):
    """Ranks at the places that the dispatcher tells them apart by."""

    servers: int = 1
    """That share the instances evenly."""

    def rank_fields(self, rank: int) -> dict[str, Any]:
        """As of any gang."""
        server = rank // self.tp * self.servers // self.instances
        return {**super().rank_fields(rank), "location": f"0-{server}-{rank}"}


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server and everything behind it."""

    client: httpx.AsyncClient
    dispatcher: Dispatcher
    gangs: tuple[ThreadGang, ThreadGang]

    async def settled(self) -> None:
        """All slots have come back, and neither a rank nor the dispatcher is broken."""
        ranks = [rank for gang in self.gangs for rank in gang.ranks]
        await eventually(lambda: not any(rank.engine.pool.used for rank in ranks))
        for rank in ranks:
            rank.check_health()
        self.dispatcher.check_health()
        self.dispatcher.check_integrity()


@asynccontextmanager
async def served(
    model_dir: Path,
    *,
    kv_slots: int = 2048,
    prefill_tp: int = 1,
    prefill_servers: int = 1,
    rules: SptRules = RULES,
    planner: Planner | None = None,
) -> AsyncIterator[Served]:
    """Serves the checkpoint as `tiny` with two prefill instances and two decode ranks; without a
    planner all attention is exact."""
    async with AsyncExitStack() as stack:
        plan = partial(PlacedGang, model_dir=str(model_dir), instances=2, kv_slots=kv_slots)
        prefill_plan = plan(role="prefill", tp=prefill_tp, servers=prefill_servers)
        prefill = await stack.enter_async_context(thread_gang(prefill_plan))
        decode = await stack.enter_async_context(thread_gang(plan(role="decode")))
        dispatcher = await stack.enter_async_context(
            _dispatcher(prefill, decode, rules, planner or _exact)
        )
        api = Api(
            intake=Intake(Settings(model=str(model_dir), served_model_name="tiny")),
            engine=dispatcher,
            keys=ApiKeys([]),
            metrics=Metrics("tiny"),
            max_body_bytes=1_000_000,
        )
        url = await stack.enter_async_context(serving(api.app()))
        client = httpx.AsyncClient(base_url=url, timeout=ANSWER_S)
        await stack.enter_async_context(client)
        yield Served(client=client, dispatcher=dispatcher, gangs=(prefill, decode))


@asynccontextmanager
async def _dispatcher(
    prefill: ThreadGang, decode: ThreadGang, rules: SptRules, planner: Planner
) -> AsyncIterator[Dispatcher]:
    view = ClusterView(prefill=prefill.members, decode=decode.members)
    cluster = Cluster(
        StaticDirectory(view), secret=SECRET, router_id="test", generations=MemoryGenerations()
    )
    policy = SptPolicy(rules, DecodeRules(spread_tokens=256))
    dispatcher = Dispatcher(cluster=cluster, policy=policy, planner=planner)
    try:
        await dispatcher.start()
        await cluster.wait_ready(START_S)
        yield dispatcher
    finally:
        await dispatcher.close(0.0)


async def _exact(request: PlanRequest) -> Plan:
    return Plan(reason="for tests")
