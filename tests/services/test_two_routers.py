"""Two routers at the same ranks: one serves, the other stands by, and no stream is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from cluster_waits import linked
from gang_driver import ANSWER_S, GangPlan, prompt_of
from gang_threads import ThreadGang, eventually, thread_gang
from router_process import RouterProcess, greedy, make_router
from tiny_checkpoints import reference_tokens

from csps.protocols.gang import members
from csps.services.cluster.attachment import STANDBY, Cluster
from csps.services.router.service import RequestService

PROMPT = prompt_of(40, 1).tolist()
OTHER = prompt_of(50, 2).tolist()
LASTING = 200
"""Tokens of a stream that lasts for a while."""


@pytest.fixture(autouse=True)
def _leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengthen leases: a busy machine may make a router stand still."""
    monkeypatch.setattr(members, "LIVENESS_TIMEOUT_S", 600.0)


@dataclass
class Ranks:
    """Two gangs, and the routers that attach to them."""

    model: Path
    prefill: ThreadGang
    decode: ThreadGang
    generations: Path
    answer: list[int]
    """Return the answer to `PROMPT`.

    It is computed ahead: computing it later would stop the loop of a router in this process for so
    long that another one takes over.
    """
    started: list[RouterProcess] = field(default_factory=list)

    async def router(self, max_tokens: int) -> RouterProcess:
        """Start a router in its own process, in the middle of its stream."""
        process = RouterProcess(
            self.prefill.members,
            self.decode.members,
            self.generations,
            prompt=PROMPT,
            max_tokens=max_tokens,
        )
        self.started.append(process)
        await process.until("token")
        return process

    @asynccontextmanager
    async def here(self) -> AsyncIterator[tuple[Cluster, RequestService]]:
        """Start a router in this process."""
        cluster, service = make_router(self.prefill.members, self.decode.members, self.generations)
        await service.start()
        try:
            yield cluster, service
        finally:
            await service.close(0.0)

    async def check_serves(self, service: RequestService) -> None:
        """Check that a request is answered correctly."""
        async with asyncio.timeout(ANSWER_S):
            answer = [token.token async for token in greedy(service, OTHER, 6)]
        assert answer == reference_tokens(self.model, OTHER, 6)


@pytest.fixture
async def ranks(tiny_llama: Path, tmp_path: Path) -> AsyncIterator[Ranks]:
    plan = partial(GangPlan, model_dir=str(tiny_llama), instances=2)
    answer = reference_tokens(tiny_llama, PROMPT, LASTING)
    async with (
        thread_gang(plan(role="prefill")) as prefill,
        thread_gang(plan(role="decode")) as decode,
    ):
        made = Ranks(tiny_llama, prefill, decode, tmp_path / "generations", answer)
        try:
            yield made
        finally:
            for process in made.started:
                process.kill()


async def test_a_successor_stands_by_until_the_holders_streams_have_ended(ranks: Ranks) -> None:
    """A redeployment: the old router drains while the new one is running."""
    first = await ranks.router(max_tokens=LASTING)
    async with ranks.here() as (cluster, service):
        await eventually(lambda: STANDBY in cluster.phase)
        waiting = asyncio.create_task(ranks.check_serves(service))
        first.drain()
        # Cut off by a successor that does not wait, it would not say this, nor all tokens.
        await first.until("finished")
        assert first.tokens == ranks.answer
        await linked(cluster, ANSWER_S)
        assert cluster.generation == 2
        await waiting


async def test_the_standby_router_replaces_a_killed_one(ranks: Ranks) -> None:
    first = await ranks.router(max_tokens=LASTING)
    async with ranks.here() as (cluster, service):
        await eventually(lambda: STANDBY in cluster.phase)
        first.kill()
        await linked(cluster, ANSWER_S)
        await ranks.check_serves(service)


@pytest.mark.slow
async def test_a_router_that_stood_still_is_superseded_and_stands_by_itself(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gangs are never split between the two, and the stream that stood still continues."""
    first = await ranks.router(max_tokens=3000)
    first.stand_still()
    async with ranks.here() as (cluster, service):
        with monkeypatch.context() as impatient:
            impatient.setattr(members, "LIVENESS_TIMEOUT_S", 0.0)
            link = await linked(cluster, ANSWER_S)
        stream = greedy(service, PROMPT, LASTING)
        await anext(stream)
        first.go_on()
        standby = f"waiting for a prefill and a decode gang: {STANDBY}"
        assert await first.until("phase", standby) == standby
        async with asyncio.timeout(ANSWER_S):
            tokens = [token.token async for token in stream]
        assert tokens == ranks.answer[1:]
        await ranks.check_serves(service)
        assert cluster.link is link, "nobody has disturbed it"
    while len(first.tokens) < LASTING:
        await first.until("token")
    assert first.tokens[:LASTING] == ranks.answer
