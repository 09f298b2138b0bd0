"""The request service over real ranks, against transformers. A rank to be killed is a process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arbitrary_layout_policy import AnyLayout
from gang_driver import ANSWER_S, SECRET, GangPlan
from gang_threads import ThreadGang, eventually
from paused_ranks import PausedDecodeBatch, PausedSteps
from tiny_checkpoints import reference_tokens

from csps.configurator.costs.cost_table import CostTable, Latencies, Unmeasured
from csps.configurator.costs.latency_tables import SHIPPED
from csps.configurator.model.attention_shape import AttentionShape
from csps.configurator.plan.strategy_rules import StrategyRules
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import StrategyChoices, StrategyQuestions
from csps.protocols.gang.members import GangRole
from csps.protocols.gang.messages import Sampling
from csps.services.cluster.attachment import PAIR, Cluster
from csps.services.cluster.fencing import MemoryGenerations
from csps.services.cluster.membership import ClusterView, StaticDirectory
from csps.services.requests.request_handle import ElasticEvent, RequestHandle
from csps.services.requests.request_spec import RequestSpec
from csps.services.router.cost_table_service import CostTableService
from csps.services.router.service import RequestService
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.deciding.decisions import Policy
from csps.services.scheduling.events.limits import ReuseSettings
from csps.services.scheduling.policies.registry import make_policy
from csps.services.telemetry.observer import NullObserver, RequestObserver


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
    mortal: GangRole | None = None,
    reuse: ReuseSettings | None = None,
    latencies: Latencies | None = None,
    observer: RequestObserver | None = None,
) -> AsyncIterator[Cell]:
    """Yield two prefill and two decode ranks, linked, or other gangs.

    Args:
        mortal: role of the gang whose rank 1 is a process.
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
    cell = Cell(model, directory, service, instances, tp, backends, kv_slots)
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


@pytest.mark.parametrize(
    ("policy", "gangs"),
    [
        *((policy, {}) for policy in POLICIES if policy not in ("loongserve", "tetris")),
        ("chunked_prefill", {"roles": ELASTIC}),
        ("chunked_prefill", {"roles": ELASTIC, "instances": 1, "tp": 2}),
        ("context_parallel", {"roles": ELASTIC, "instances": 3}),
        ("loongserve", {"roles": ELASTIC, "instances": 3}),
        ("loongserve", {"roles": ELASTIC, "instances": 2, "tp": 2}),
    ],
)
async def test_greedy_tokens_equal_transformers_and_all_slots_come_back(
    tiny_llama: Path, policy: str, gangs: dict[str, Any]
) -> None:
    async with real_cell(tiny_llama, policy, **gangs) as cell:
        lengths = (600, 5, 33, 300, 17, 511)
        requests = [cell.submit(length, seed=seed) for seed, length in enumerate(lengths)]
        cancelled = cell.submit(400, max_tokens=500, seed=9)
        async with cancelled:
            await anext(cancelled)
        answers = await asyncio.gather(*map(answer, requests))
        for handle, tokens in zip(requests, answers, strict=True):
            prompt = handle.spec.prompt.tolist()
            assert tokens == reference_tokens(tiny_llama, prompt, 6)
        await cell.settled()


@pytest.mark.parametrize("roles", [PAIR, ELASTIC])
async def test_answers_are_right_in_any_layout(tiny_llama: Path, roles: Sequence[GangRole]) -> None:
    """Prompts run in chunks in any layout, are stored in another one, and take turns at
    answering."""
    async with real_cell(tiny_llama, AnyLayout(7), roles=roles) as cell:
        requests = [cell.submit(length, seed=length) for length in (90, 5, 33, 140, 17, 61)]
        answers = await asyncio.gather(*map(answer, requests))
        for handle, tokens in zip(requests, answers, strict=True):
            prompt = handle.spec.prompt.tolist()
            assert tokens == reference_tokens(tiny_llama, prompt, 6)
        await cell.settled()


@pytest.mark.parametrize(
    "gangs",
    [
        {"instances": 3},
        pytest.param({"instances": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
async def test_sequences_may_move_all_the_time(tiny_llama: Path, gangs: dict[str, Any]) -> None:
    """KV, KV holders and masters change while tokens are sampled; the tokens do not."""
    events: list[ElasticEvent] = []
    observer = NullObserver()
    observer.elastic = events.append  # type: ignore[method-assign]
    policy = AnyLayout(7, moves=True)
    async with real_cell(tiny_llama, policy, roles=ELASTIC, observer=observer, **gangs) as cell:
        requests = [cell.submit(n, max_tokens=40, seed=n) for n in (90, 5, 33)]
        cancelled = cell.submit(100, max_tokens=1500, seed=9)
        async with cancelled:
            await eventually(lambda: cancelled.state == "decoding")
            requests.append(cell.submit(60, max_tokens=40, seed=60))
            await eventually(lambda: any(event.kind == "migrate" for event in cancelled.elastic))
        answers = await asyncio.gather(*map(answer, requests))
        for handle, tokens in zip(requests, answers, strict=True):
            prompt = handle.spec.prompt.tolist()
            assert tokens == reference_tokens(tiny_llama, prompt, 40)
        migrated = [event for event in events if event.kind == "migrate"]
        assert len(migrated) > 2
        assert all(event.sent_bytes and event.tokens and event.seconds for event in migrated)
        await cell.settled()


@pytest.mark.slow
async def test_loongserve_moves_sequences_off_a_decoding_instance(tiny_llama: Path) -> None:
    """All instances decode, and a waiting prompt takes longer than the move."""
    events: list[ElasticEvent] = []
    observer = NullObserver()
    observer.elastic = events.append  # type: ignore[method-assign]
    policy = make_policy("loongserve", POLICIES["loongserve"])
    shape: dict[str, Any] = {"roles": ELASTIC, "instances": 2, "latencies": SHIPPED}
    async with real_cell(tiny_llama, policy, observer=observer, **shape) as cell:
        requests = []
        for seed in range(4):
            requests.append(cell.submit(30 + seed, max_tokens=250, seed=seed))
            await eventually(lambda: requests[-1].state in ("decoding", "finished"))
        requests.append(cell.submit(200, max_tokens=10, seed=9))
        answers = await asyncio.gather(*map(answer, requests))
        for handle, tokens in zip(requests, answers, strict=True):
            prompt, count = handle.spec.prompt.tolist(), len(tokens)
            assert count == handle.spec.sampling.max_tokens
            assert tokens == reference_tokens(tiny_llama, prompt, count)
        assert any(event.kind == "migrate" for event in events)
        await cell.settled()


async def test_prompts_with_one_token_answers_free_all_slots(tiny_llama: Path) -> None:
    async with real_cell(tiny_llama) as cell:
        requests = [cell.submit(length, max_tokens=1, seed=length) for length in (5, 100, 400)]
        for handle, tokens in zip(
            requests, await asyncio.gather(*map(answer, requests)), strict=True
        ):
            prompt = handle.spec.prompt.tolist()
            assert tokens == reference_tokens(tiny_llama, prompt, 1)
        await cell.settled()


@pytest.mark.parametrize(
    ("policy", "roles"),
    [("csps", PAIR), ("context_parallel", PAIR), ("context_parallel", ELASTIC)],
)
async def test_sparse_attention_that_drops_nothing_answers_the_same(
    tiny_llama: Path, policy: str, roles: Sequence[GangRole]
) -> None:
    """Requests run on one instance and on two, by each strategy, beside exact requests."""
    options = [
        *(
            CsaSettings(strategy=strategy, drop_ratios=((0.0,),))
            for strategy in ("ntp", "tp", "tp_flat")
        ),
        CsaSettings(levels=1, micro_partitions=((1,),), strategy="ntp"),
        None,
    ]
    async with real_cell(tiny_llama, policy, roles=roles) as cell:
        requests = [
            cell.submit(length, seed=length, csa=csa) for csa in options for length in (5, 20, 511)
        ]
        answers = await asyncio.gather(*map(answer, requests))
        for handle, tokens in zip(requests, answers, strict=True):
            assert handle.plan is not None
            assert handle.plan.attention == handle.spec.attention
            prompt = handle.spec.prompt.tolist()
            assert tokens == reference_tokens(tiny_llama, prompt, 6)
        lossy = cell.submit(511, seed=511, csa=CsaSettings(drop_ratios=((0.9,),), strategy="ntp"))
        assert len(await answer(lossy)) == 6
        await cell.settled()


async def test_decoding_continues_while_a_killed_prefill_gang_is_replaced(tiny_llama: Path) -> None:
    async with real_cell(tiny_llama, mortal="prefill") as cell:
        decoding = cell.submit(200, max_tokens=2000, seed=1)
        await anext(decoding)
        await anext(decoding)
        cell.gangs["prefill"].process(1).kill()
        waiting = cell.submit(500, seed=2)
        await eventually(lambda: not cell.service.ready)
        before = decoding.timings.tokens
        await eventually(lambda: decoding.timings.tokens > before + 10)
        decoding.cancel()
        await cell.start_gang("prefill")
        cell.publish()
        prompt = waiting.spec.prompt.tolist()
        assert await answer(waiting) == reference_tokens(tiny_llama, prompt, 6)
        await cell.settled()


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


@pytest.mark.parametrize("killed", PAIR)
async def test_streams_continue_with_the_same_tokens_when_a_gang_is_killed(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, killed: GangRole
) -> None:
    """Greedy and seeded streams: some decode at that time, one prefills, some wait."""
    async with real_cell(tiny_llama, mortal=killed) as cell:
        wanted = streams(8, first=100, further=60, max_tokens=60)
        undisturbed = await asyncio.gather(*(answer(cell.submit(**options)) for options in wanted))
        requests = [cell.submit(**options) for options in wanted[:4]]
        answers = [asyncio.ensure_future(answer(handle)) for handle in requests]
        await eventually(lambda: sum(handle.timings.tokens > 3 for handle in requests) >= 2)
        steps = PausedSteps(monkeypatch)
        requests += [cell.submit(**options) for options in wanted[4:]]
        answers += [asyncio.ensure_future(answer(handle)) for handle in requests[4:]]
        await steps.begun()
        cell.gangs[killed].process(1).kill()
        steps.go_on.set()
        await cell.start_gang(killed)
        cell.publish()
        assert await asyncio.gather(*answers) == undisturbed
        assert max(handle.timings.attempts for handle in requests) == 2
        await cell.settled()


async def test_answers_and_piggybacked_prefills_continue_when_an_elastic_gang_is_killed(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some decode at that time, some are piggybacked, some wait."""
    async with real_cell(tiny_llama, "chunked_prefill", roles=ELASTIC, mortal="elastic") as cell:
        wanted = streams(8, first=100, further=150, max_tokens=60)
        undisturbed = await asyncio.gather(*(answer(cell.submit(**options)) for options in wanted))
        stream = cell.gangs["elastic"].ranks[0].loop.decode_batch
        paused = PausedDecodeBatch(
            monkeypatch, stream, after=20
        )  # of some eighty that prompts take
        requests = [cell.submit(**options) for options in wanted]
        answers = [asyncio.ensure_future(answer(handle)) for handle in requests]
        await eventually(lambda: any(handle.timings.tokens > 3 for handle in requests))
        assert any(handle.state == "prefill" for handle in requests)
        cell.gangs["elastic"].process(1).kill()
        paused.go_on.set()
        await eventually(lambda: not cell.service.ready)
        await cell.start_gang("elastic")
        cell.publish()
        assert await asyncio.gather(*answers) == undisturbed
        assert max(handle.timings.attempts for handle in requests) == 2
        await cell.settled()
