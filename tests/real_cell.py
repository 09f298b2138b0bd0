"""The request service over real ranks in the test's own process, under any policy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gang_driver import ANSWER_S, SECRET, GangPlan
from gang_threads import ThreadGang, eventually

from csps.configurator.costs.cost_table import CostTable, Latencies, Unmeasured
from csps.configurator.model.attention_shape import AttentionShape
from csps.configurator.plan.strategy_rules import StrategyRules
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import StrategyChoices, StrategyQuestions
from csps.protocols.gang.members import GangRole
from csps.protocols.gang.messages import Sampling
from csps.services.cluster.attachment import PAIR, Cluster
from csps.services.cluster.fencing import MemoryGenerations
from csps.services.cluster.membership import ClusterView, StaticDirectory
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import PrefixKey, RequestSpec
from csps.services.router.cost_table_service import CostTableService
from csps.services.router.service import RequestService
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.deciding.decisions import Policy
from csps.services.scheduling.events.events import index_of
from csps.services.scheduling.events.limits import ReuseSettings
from csps.services.scheduling.policies.registry import make_policy
from csps.services.telemetry.observer import RequestObserver


@dataclass
class Cell:
    """A request service over two real gangs, which may be replaced."""

    model: Path
    directory: StaticDirectory
    service: RequestService
    instances: int
    tp: int
    backends: int
    """Transfers that a decode rank receives at a time."""
    kv_slots: int
    kv_dtype: str
    weight_dtype: str
    kv_files: Path | None = None
    """Folder in which KV survives its gang."""
    gangs: dict[GangRole, ThreadGang] = field(default_factory=dict)
    started: list[ThreadGang] = field(default_factory=list)
    """Gangs that run now, and those before them."""

    async def start_gang(self, role: GangRole, in_processes: Sequence[int] = ()) -> None:
        """Start a gang, replacing the one before it if there was one."""
        plan = GangPlan(
            model_dir=str(self.model),
            role=role,
            instances=self.instances,
            tp=self.tp,
            kv_receiving_backends=self.backends,
            kv_slots=self.kv_slots,
            kv_files_path=None if self.kv_files is None else str(self.kv_files),
            kv_dtype=self.kv_dtype,
            weight_dtype=self.weight_dtype,
        )
        self.gangs[role] = ThreadGang(plan, in_processes)
        self.started.append(self.gangs[role])
        await self.gangs[role].start()

    def publish(self) -> None:
        """Publish the gangs to the router."""
        members = {role: gang.members for role, gang in self.gangs.items()}
        self.directory.publish(ClusterView(**members))

    def submit(
        self,
        length: int,
        max_tokens: int = 6,
        seed: int = 0,
        csa: CsaSettings | None = None,
        temperature: float = 0.0,
    ) -> RequestHandle:
        prompt = np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)
        sampling = Sampling(temperature=temperature, max_tokens=max_tokens, seed=seed)
        return self.service.submit(
            RequestSpec(
                client_request_id=f"r{seed}",
                prompt=prompt,
                sampling=sampling,
                attention="exact" if csa is None else "csa",
                csa=csa,
            )
        )

    def submit_tokens(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        block: int,
        *,
        owner: bytes = b"owner",
        logprobs: int | None = None,
    ) -> RequestHandle:
        """Submit a prompt whose KV may be cached in blocks, for requests of the same owner."""
        prompt, prefix = np.array(tokens, np.int32), PrefixKey(owner, block)
        return self.service.submit(
            RequestSpec(
                client_request_id="r",
                prompt=prompt,
                sampling=Sampling(temperature=0.0, max_tokens=max_tokens, logprobs=logprobs),
                prefix=prefix,
                hashes=prefix.hashes(prompt),
            )
        )

    async def settled(self) -> None:
        """Wait until all slots are free."""
        await eventually(lambda: not self.service.counts.prefill_kv)
        await eventually(lambda: not self.service.counts.decode_kv)
        ranks = [rank for gang in self.gangs.values() for rank in gang.ranks]
        await eventually(lambda: not any(rank.engine.pool.slots.used for rank in ranks))
        self.service.check_integrity()
        self.service.check_health()


SHAPE = AttentionShape(hidden=64, heads=4, kv_heads=2, head_dim=16, layers=2)


async def by_rules(questions: StrategyQuestions) -> StrategyChoices:
    return StrategyRules(SHAPE).answer(questions)


ELASTIC: tuple[GangRole, ...] = ("elastic",)
POLICIES: dict[str, dict[str, Any]] = {
    "chunked_prefill": {"token_budget": 64, "max_batch": 32, "spread_tokens": 256},
    "context_parallel": {"short_tokens": 32},
    "csps": {"spt_tokens": 256, "short_tokens": 32, "spread_tokens": 256},
    "fixed_sp": {"sp": 2, "spread_tokens": 256},
    "loongserve": {"tipping_tokens": 300, "scale_up_batch": 2, "max_batch": 32},
    "tetris": {"spread_tokens": 256},
}


@asynccontextmanager
async def real_cell(
    model: Path,
    policy: str | Policy = "csps",
    *,
    roles: Sequence[GangRole] = PAIR,
    instances: int = 2,
    tp: int = 1,
    backends: int = 16,
    kv_slots: int = 4096,
    kv_dtype: str = "auto",
    weight_dtype: str = "auto",
    mortal: GangRole | None = None,
    reuse: ReuseSettings | None = None,
    kv_files: Path | None = None,
    latencies: Latencies | None = None,
    observer: RequestObserver | None = None,
) -> AsyncIterator[Cell]:
    """Yield two prefill and two decode ranks, linked, or other gangs.

    Args:
        mortal: role of the gang whose rank 1 is a process.
        kv_files: folder in which KV survives its gang, if `reuse` says so.
        latencies: latencies that the policy assumes.
    """
    directory = StaticDirectory()
    cluster = Cluster(
        directory,
        secret=SECRET,
        router_id="test",
        generations=MemoryGenerations(),
        roles=roles,
    )
    costs = CostTableService(CostTable(latencies=latencies or Unmeasured()), by_rules)
    if isinstance(policy, str):
        policy = make_policy(policy, POLICIES[policy])
    scheduler = Scheduler(policy, costs.costs, reuse=reuse)
    service = RequestService(
        cluster=cluster, scheduler=scheduler, costs=costs, shape=SHAPE, observer=observer
    )
    forms = kv_dtype, weight_dtype
    cell = Cell(model, directory, service, instances, tp, backends, kv_slots, *forms, kv_files)
    try:
        await service.start()
        await asyncio.gather(
            *(cell.start_gang(role, [1] if role == mortal else ()) for role in roles)
        )
        cell.publish()
        await eventually(lambda: service.ready)
        yield cell
    finally:
        await asyncio.gather(*(gang.close() for gang in cell.started))
        await service.close(0.0)


async def answer(handle: RequestHandle) -> list[int]:
    async with asyncio.timeout(ANSWER_S):
        return [token.token async for token in handle]


def streams(count: int, *, first: int, further: int, max_tokens: int) -> list[dict[str, Any]]:
    """Return arguments for `Cell.submit`: greedy and seeded in turns, each prompt `further` tokens
    longer."""
    return [
        {
            "length": first + further * n,
            "max_tokens": max_tokens,
            "seed": n,
            "temperature": n % 2,
        }
        for n in range(count)
    ]


def taken(cell: Cell) -> tuple[dict[Any, int], dict[Any, int]]:
    """Return the taken slots of each instance, by the router's books and in the pools."""
    books, pools = {}, {}
    for instance in cell.service._scheduler._gangs.instances.values():
        gang = instance.gang
        role = "elastic" if gang.may_prefill and gang.may_decode else None
        role = role or ("prefill" if gang.may_prefill else "decode")
        rank = cell.gangs[role].ranks[index_of(instance.id)]
        books[instance.id], pools[instance.id] = instance.used, rank.engine.pool.slots.used
    return books, pools


def evict_everything(cell: Cell) -> None:
    """Evict all that is cached, as a request does that needs every slot."""
    scheduler, execute = cell.service._scheduler, cell.service._driver._execute
    assert execute is not None
    scheduler._round.commands = []
    needed = {at: instance.capacity for at, instance in scheduler._gangs.instances.items()}
    assert not scheduler._prefix.make_room(needed), "nothing is cached"
    execute(scheduler._round.commands)


async def check_pools(cell: Cell) -> None:
    """Check that idle pools hold what the router's books say, and nothing after eviction."""
    await eventually(lambda: not cell.service.counts.running)
    await eventually(lambda: not (cell.service.counts.prefill_kv or cell.service.counts.decode_kv))
    await eventually(lambda: taken(cell)[0] == taken(cell)[1])
    books, _ = taken(cell)
    assert any(books.values())
    evict_everything(cell)
    await cell.settled()
    # Pools are empty before the router has heard of it.
    await eventually(lambda: not any(taken(cell)[0].values()))
