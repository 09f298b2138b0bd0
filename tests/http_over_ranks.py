"""The HTTP API, the request service and two real gangs, all in the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx
from cluster_waits import linked
from fake_service import http_api
from gang_driver import ANSWER_S, SECRET, START_S, GangPlan
from gang_threads import ThreadGang, eventually, started
from live_server import serving

from csps.actors.worker.rank import Rank
from csps.configurator.costs.cost_table import CostTable, Unmeasured
from csps.protocols.attention.plan import StrategyChoices, StrategyQuestions
from csps.protocols.gang.members import GangMembers
from csps.services.cluster.attachment import Cluster
from csps.services.cluster.fencing import MemoryGenerations
from csps.services.cluster.membership import ClusterView, StaticDirectory
from csps.services.deployments.configurator import attention_shape
from csps.services.http.parser_pool import ParserPool
from csps.services.http.request_parser import RequestParser
from csps.services.router.cost_table_service import Configure, CostTableService
from csps.services.router.scheduler_factory import make_reuse
from csps.services.router.service import RequestService
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.deciding.decisions import Policy
from csps.services.scheduling.policies.registry import make_policy
from csps.services.settings.credentials import ApiKeys
from csps.services.settings.settings import KvFilesSettings, KvReuseSettings, Settings
from csps.services.telemetry.load_trace import LoadTrace
from csps.services.telemetry.metrics import Metrics

OPTIONS = {"spt_tokens": 256, "short_tokens": 32, "spread_tokens": 256}


@dataclass(frozen=True, kw_only=True)
class PlacedGang(GangPlan):
    """Ranks at the places that policies tell them apart by."""

    servers: int = 1
    """Servers that share the instances evenly."""

    def rank_fields(self, rank: int) -> dict[str, Any]:
        """Return the rank fields of any gang."""
        server = rank // self.tp * self.servers // self.instances
        return {**super().rank_fields(rank), "location": f"0-{server}-{rank}"}


class StartedGang(Protocol):
    """Facts about a gang that a server needs."""

    plan: GangPlan
    members: GangMembers
    ranks: Sequence[Rank]
    """Those in this process."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server and everything behind it."""

    client: httpx.AsyncClient
    service: RequestService
    costs: CostTableService
    metrics: Metrics
    gangs: Sequence[StartedGang]
    """Prefill and decode gang, or one elastic gang."""

    async def settled(self) -> None:
        """Return whether all slots are free and neither a rank nor the service is broken."""
        ranks = [rank for gang in self.gangs for rank in gang.ranks]
        await eventually(lambda: not any(rank.engine.pool.slots.used for rank in ranks))
        near = [pool.window_slots for rank in ranks if (pool := rank.engine.pool).windowed]
        await eventually(lambda: not any(slots.used for slots in near if slots is not None))
        for rank in ranks:
            rank.check_health()
        self.service.check_health()
        self.service.check_integrity()


@asynccontextmanager
async def served(
    model_dir: Path,
    *,
    kv_slots: int = 2048,
    window_slots: int = 0,
    prefill_tp: int = 1,
    prefill_servers: int = 1,
    policy: str = "csps",
    options: dict[str, Any] | None = None,
    configure: Configure | None = None,
    reuse: bool = False,
    kv_files: Path | None = None,
    token_ns: int = Unmeasured.token_ns,
    overrides: dict[str, Any] | None = None,
    keys: Sequence[str] = (),
    elastic: bool = False,
    load_trace: LoadTrace | None = None,
) -> AsyncIterator[Served]:
    """Serve the checkpoint as `tiny` with two prefill instances and two decode ranks, or with an
    elastic gang of three instances; without a configurator all attention is exact. With `kv_files`,
    the KV of prompts survives the gangs. `token_ns` is the predicted time to compute a token. Of
    the decode gang, layers with a window have `window_slots`, if these are not 0.
    """
    files_path = None if kv_files is None else str(kv_files)
    async with AsyncExitStack() as stack:
        plan = partial(
            PlacedGang,
            model_dir=str(model_dir),
            model_overrides=overrides or {},
            kv_slots=kv_slots,
        )
        prefill_plan = partial(
            plan, tp=prefill_tp, servers=prefill_servers, kv_files_path=files_path
        )
        gangs: tuple[ThreadGang, ...]
        if elastic:
            gangs = (ThreadGang(prefill_plan(role="elastic", instances=3)),)
        else:
            prefill = ThreadGang(prefill_plan(role="prefill", instances=2))
            decode = plan(role="decode", instances=2, window_slots=window_slots)
            gangs = prefill, ThreadGang(decode)
        await stack.enter_async_context(started(*gangs))
        settings = Settings(
            model=str(model_dir),
            model_overrides=overrides or {},
            served_model_name="tiny",
            kv_reuse=KvReuseSettings(
                enabled=reuse, files=KvFilesSettings(path=files_path) if files_path else None
            ),
        )
        yield await stack.enter_async_context(
            served_by(
                gangs,
                settings,
                policy=make_policy(policy, OPTIONS if options is None else options),
                configure=configure,
                token_ns=token_ns,
                keys=keys,
                load_trace=load_trace,
            )
        )


@asynccontextmanager
async def served_by(
    gangs: Sequence[StartedGang],
    settings: Settings,
    *,
    policy: Policy,
    configure: Configure | None = None,
    token_ns: int = Unmeasured.token_ns,
    keys: Sequence[str] = (),
    load_trace: LoadTrace | None = None,
) -> AsyncIterator[Served]:
    """Serve with gangs that have started, wherever their ranks are."""
    async with AsyncExitStack() as stack:
        costs = CostTableService(
            CostTable(latencies=Unmeasured(token_ns=token_ns)), configure or _silent
        )
        metrics = Metrics("tiny")
        scheduler = Scheduler(policy, costs.costs, reuse=make_reuse(settings))
        service = await stack.enter_async_context(
            _service(gangs, scheduler, costs, settings, metrics, load_trace)
        )
        parser = RequestParser(settings)
        parser_pool = ParserPool(parser.body_parser)
        stack.push_async_callback(parser_pool.close)
        api = http_api(
            parser, service, parser_pool=parser_pool, keys=ApiKeys(keys), metrics=metrics
        )
        url = await stack.enter_async_context(serving(api.app()))
        client = httpx.AsyncClient(base_url=url, timeout=ANSWER_S)
        await stack.enter_async_context(client)
        if configure is not None:
            await eventually(lambda: bool(costs.costs.table.buckets))
        yield Served(
            client=client,
            service=service,
            costs=costs,
            metrics=metrics,
            gangs=gangs,
        )


@asynccontextmanager
async def _service(
    gangs: Sequence[StartedGang],
    scheduler: Scheduler,
    costs: CostTableService,
    settings: Settings,
    metrics: Metrics,
    load_trace: LoadTrace | None,
) -> AsyncIterator[RequestService]:
    view = ClusterView(**{gang.plan.role: gang.members for gang in gangs})
    cluster = Cluster(
        StaticDirectory(view),
        secret=SECRET,
        router_id="test",
        generations=MemoryGenerations(),
        roles=[gang.plan.role for gang in gangs],
    )
    shape = attention_shape(settings)
    service = RequestService(
        cluster=cluster,
        scheduler=scheduler,
        costs=costs,
        shape=shape,
        observer=metrics,
        load_trace=load_trace,
    )
    try:
        await service.start()
        async with asyncio.timeout(START_S):
            if len(gangs) > 1:
                await linked(cluster, START_S)
            await eventually(lambda: service.ready)
        yield service
    finally:
        await service.close(0.0)


async def _silent(questions: StrategyQuestions) -> StrategyChoices:
    raise LookupError("no configurator in this test")
