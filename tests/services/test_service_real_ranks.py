"""The request service over real ranks in processes of their own, against transformers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import reference_tokens

from csps.configurator.shapes import AttentionShape
from csps.configurator.strategy_rules import StrategyRules
from csps.protocols.csa_settings import CsaSettings
from csps.protocols.gang_members import GangMembers, GangRole, RankAddress
from csps.protocols.messages import Sampling
from csps.protocols.plans import StrategyChoices, StrategyQuestions
from csps.services.cluster import Cluster
from csps.services.directory import ClusterView, StaticDirectory
from csps.services.generations import MemoryGenerations
from csps.services.router.cost_book import CostBook
from csps.services.router.service import RequestService
from csps.services.running import Generation, Running
from csps.services.scheduling.cost import CostTable, Unmeasured
from csps.services.scheduling.policies.choice import make_policy
from csps.services.scheduling.scheduler import Scheduler

SECRET = "only for tests"
START_S = 90.0
ANSWER_S = 60.0


@dataclass
class Processes:
    """The ranks of one gang."""

    members: GangMembers
    processes: list[subprocess.Popen[str]]


@dataclass
class Cell:
    """A request service over two real gangs."""

    model: Path
    directory: StaticDirectory
    cluster: Cluster
    service: RequestService
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    async def start_gang(self, role: GangRole, gang_id: str, ranks: int = 2) -> Processes:
        fields = {
            "model_dir": str(self.model),
            "role": role,
            "world_size": ranks,
            "gang_id": gang_id,
            "kv_slots": 4096,
        }
        processes = [self._spawn({**fields, "rank": 0, "location": "0-0-0"})]
        store = (await _line(processes[0]))["store"]
        for rank in range(1, ranks):
            place = {"rank": rank, "location": f"0-0-{rank}"}
            processes.append(self._spawn({**fields, **place, "store": store}))
        found = [(await _line(process))["rpc"] for process in processes]
        addresses = [
            RankAddress(rank=rank, host=host, port=port) for rank, (host, port) in enumerate(found)
        ]
        return Processes(GangMembers(gang_id=gang_id, ranks=tuple(addresses)), processes)

    def _spawn(self, fields: dict[str, Any]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "csps.actors.host_rank", json.dumps(fields)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CSPS_CLUSTER_SECRET": SECRET, "OMP_NUM_THREADS": "1"},
        )
        self.started.append(process)
        return process

    def submit(
        self,
        length: int,
        max_tokens: int = 6,
        seed: int = 0,
        csa: CsaSettings | None = None,
        temperature: float = 0.0,
    ) -> Running:
        prompt = np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)
        sampling = Sampling(temperature=temperature, max_tokens=max_tokens, seed=seed)
        return self.service.submit(
            Generation(
                request_id=f"r{seed}",
                prompt=prompt,
                sampling=sampling,
                attention="exact" if csa is None else "csa",
                csa=csa,
            )
        )

    async def settled(self) -> None:
        """All slots have come back."""
        await until(lambda: not self.service.counts.prefill_kv)
        await until(lambda: not self.service.counts.decode_kv)
        self.service.check_integrity()
        self.service.check_health()


async def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), START_S)
    assert line, f"rank process {process.pid} ended with {process.poll()}"
    fact: dict[str, Any] = json.loads(line)
    return fact


SHAPE = AttentionShape(hidden=64, heads=4, kv_heads=2, head_dim=16, layers=2)


async def by_rules(questions: StrategyQuestions) -> StrategyChoices:
    return StrategyRules(SHAPE).answer(questions)


POLICIES: dict[str, dict[str, Any]] = {
    "csps": {"spt_tokens": 256, "short_tokens": 32, "spread_tokens": 256},
    "fixed_sp": {"sp": 2, "spread_tokens": 256},
}


@asynccontextmanager
async def real_cell(
    model: Path, policy: str = "csps"
) -> AsyncIterator[tuple[Cell, Processes, Processes]]:
    """Two prefill and two decode ranks, linked; the processes end with the test."""
    directory = StaticDirectory()
    cluster = Cluster(
        directory, secret=SECRET.encode(), router_id="test", generations=MemoryGenerations()
    )
    costs = CostBook(CostTable(latencies=Unmeasured()), by_rules)
    scheduler = Scheduler(make_policy(policy, POLICIES[policy]), costs.costs)
    service = RequestService(cluster=cluster, scheduler=scheduler, costs=costs, shape=SHAPE)
    cell = Cell(model, directory, cluster, service)
    try:
        await service.start()
        prefill, decode = await asyncio.gather(
            cell.start_gang("prefill", "p1"), cell.start_gang("decode", "d1")
        )
        directory.publish(ClusterView(prefill=prefill.members, decode=decode.members))
        await until(lambda: service.ready)
        yield cell, prefill, decode
    finally:
        await service.close(0.0)
        for process in cell.started:
            process.kill()
            process.communicate()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(ANSWER_S):
        while not condition():  # noqa: ASYNC110 - ranks in other processes have a say in it
            await asyncio.sleep(0.005)


async def answer(running: Running) -> list[int]:
    async with asyncio.timeout(ANSWER_S):
        return [token.token async for token in running]


@pytest.mark.parametrize("policy", POLICIES)
async def test_greedy_tokens_equal_transformers_and_all_slots_come_back(
    tiny_llama: Path, policy: str
) -> None:
    async with real_cell(tiny_llama, policy) as (cell, _, _):
        lengths = (600, 5, 33, 300, 17, 511)
        requests = [cell.submit(length, seed=seed) for seed, length in enumerate(lengths)]
        cancelled = cell.submit(400, max_tokens=500, seed=9)
        async with cancelled:
            await anext(cancelled)
        answers = await asyncio.gather(*map(answer, requests))
        for running, tokens in zip(requests, answers, strict=True):
            prompt = running.generation.prompt.tolist()
            assert tokens == reference_tokens(tiny_llama, prompt, 6)
        await cell.settled()


async def test_sparse_attention_that_drops_nothing_says_the_same(tiny_llama: Path) -> None:
    """On one instance and on two, by each strategy, beside exact requests."""
    options = [
        *(
            CsaSettings(strategy=strategy, drop_ratios=((0.0,),))
            for strategy in ("ntp", "tp", "tp_flat")
        ),
        CsaSettings(levels=1, micro_partitions=((1,),), strategy="ntp"),
        None,
    ]
    async with real_cell(tiny_llama) as (cell, _, _):
        requests = [
            cell.submit(length, seed=length, csa=csa) for csa in options for length in (5, 20, 511)
        ]
        answers = await asyncio.gather(*map(answer, requests))
        for running, tokens in zip(requests, answers, strict=True):
            assert running.plan is not None
            assert running.plan.attention == running.generation.attention
            prompt = running.generation.prompt.tolist()
            assert tokens == reference_tokens(tiny_llama, prompt, 6)
        lossy = cell.submit(511, seed=511, csa=CsaSettings(drop_ratios=((0.9,),), strategy="ntp"))
        assert len(await answer(lossy)) == 6
        await cell.settled()


async def test_decoding_goes_on_while_a_killed_prefill_gang_is_replaced(tiny_llama: Path) -> None:
    async with real_cell(tiny_llama) as (cell, prefill, decode):
        decoding = cell.submit(200, max_tokens=2000, seed=1)
        await anext(decoding)
        await anext(decoding)
        prefill.processes[1].kill()
        waiting = cell.submit(500, seed=2)
        await until(lambda: not cell.service.ready)
        before = decoding.timings.tokens
        await until(lambda: decoding.timings.tokens > before + 10)
        decoding.cancel()
        replacement = await cell.start_gang("prefill", "p2")
        cell.directory.publish(ClusterView(prefill=replacement.members, decode=decode.members))
        prompt = waiting.generation.prompt.tolist()
        assert await answer(waiting) == reference_tokens(tiny_llama, prompt, 6)
        await cell.settled()


@pytest.mark.parametrize("killed", ["prefill", "decode"])
async def test_streams_go_on_with_the_same_tokens_when_a_gang_is_killed(
    tiny_llama: Path, killed: GangRole
) -> None:
    """Greedy and seeded ones, in every state from waiting to decoding."""
    async with real_cell(tiny_llama) as (cell, prefill, decode):
        wanted = [
            {"length": 100 + 60 * n, "max_tokens": 60, "seed": n, "temperature": n % 2}
            for n in range(8)
        ]
        undisturbed = await asyncio.gather(*(answer(cell.submit(**it)) for it in wanted))
        requests = [cell.submit(**it) for it in wanted]
        answers = [asyncio.ensure_future(answer(running)) for running in requests]
        await until(lambda: sum(running.timings.tokens > 3 for running in requests) >= 2)
        gangs = {"prefill": prefill, "decode": decode}
        gangs[killed].processes[1].kill()
        gangs[killed] = await cell.start_gang(killed, "again")
        cell.directory.publish(
            ClusterView(prefill=gangs["prefill"].members, decode=gangs["decode"].members)
        )
        assert await asyncio.gather(*answers) == undisturbed
        assert max(running.timings.attempts for running in requests) == 2
        await cell.settled()
