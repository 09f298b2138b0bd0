"""The policy `tetris` over real ranks: prompts in three chunks, on one, two and four instances."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gang_driver import ANSWER_S
from gang_threads import eventually
from real_cell import answer, real_cell
from tiny_checkpoints import reference_tokens

from csps.actors.engine.step_run import StepRun
from csps.services.requests.request_handle import RequestHandle
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.policies.tetris.cdsp import Cdsp, CdspChunk

GROUPS = ((0,), (0, 2), (0, 1, 2, 3))
TETRIS = {"improvement_rate": 0.0, "min_chunk": 1}


@pytest.fixture(autouse=True)
def three_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as if the other instances were busy for a while, whatever the machine does."""

    def planned(
        cdsp: Cdsp, length: int, free_ns: Sequence[int], *_: Any, **__: Any
    ) -> list[CdspChunk]:
        cuts = [0, length // 3, 2 * length // 3, length]
        return [
            CdspChunk(start, stop - start, group, 0, 0)
            for start, stop, group in zip(cuts, cuts[1:], GROUPS, strict=False)
            if stop > start
        ]

    monkeypatch.setattr(Cdsp, "plan", planned)


class PausedChunk:
    """The first second chunk that a leader in this process begins, paused."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go_on, self._come = threading.Event(), threading.Event()
        compute = StepRun.compute

        def paused(run: StepRun, *arguments: Any) -> None:
            if run.leads and run.step.chunks[0].start:
                self._come.set()
                assert self.go_on.wait(ANSWER_S), "the test did not resume the chunk"
            compute(run, *arguments)

        patch.setattr(StepRun, "compute", paused)

    async def come(self) -> None:
        assert await asyncio.to_thread(self._come.wait, ANSWER_S)


def check(model: Path, request: RequestHandle, tokens: list[int]) -> None:
    """Check that these are transformers' tokens."""
    assert tokens == reference_tokens(model, request.spec.prompt.tolist(), 6)


async def test_three_chunks_give_the_tokens_of_transformers(tiny_llama: Path) -> None:
    """Another request is cancelled between two chunks."""
    async with real_cell(tiny_llama, make_policy("tetris", TETRIS), instances=4) as cell:
        requests = [cell.submit(length, seed=length) for length in (90, 33)]
        cancelled = cell.submit(300, max_tokens=500, seed=9)
        answers = [asyncio.ensure_future(answer(request)) for request in requests]
        await eventually(lambda: cancelled.state == "prefill")
        cancelled.cancel()
        for request, tokens in zip(requests, await asyncio.gather(*answers), strict=True):
            check(tiny_llama, request, tokens)
        await cell.settled()


@pytest.mark.slow
async def test_a_prefill_gang_that_dies_between_chunks(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request between chunks restarts with a new plan; the decoding one continues."""
    policy = make_policy("tetris", TETRIS)
    async with real_cell(tiny_llama, policy, instances=4, mortal="prefill") as cell:
        decoding = cell.submit(50, max_tokens=2000, seed=1)
        await anext(decoding)
        paused = PausedChunk(monkeypatch)
        between = cell.submit(120, seed=2)
        answered = asyncio.ensure_future(answer(between))
        waiting = asyncio.ensure_future(answer(later := cell.submit(60, seed=3)))
        cancelled = cell.submit(70, seed=4)
        await paused.come()
        cancelled.cancel()
        cell.gangs["prefill"].process(1).kill()
        await eventually(lambda: not cell.service.ready)
        before = decoding.timings.tokens
        await eventually(lambda: decoding.timings.tokens > before + 10)
        decoding.cancel()
        paused.go_on.set()
        await cell.start_gang("prefill")
        cell.publish()
        for request, tokens in ((between, await answered), (later, await waiting)):
            check(tiny_llama, request, tokens)
        assert between.timings.attempts == 2
        await cell.settled()


@pytest.mark.slow
async def test_a_decode_gang_that_dies_while_a_request_holds_its_only_backend(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request with the transfer slot and the one waiting for it restart; a cancelled one
    ends."""
    policy = make_policy("tetris", TETRIS)
    paused = PausedChunk(monkeypatch)
    async with real_cell(tiny_llama, policy, instances=4, backends=1, mortal="decode") as cell:
        between = cell.submit(120, seed=1)
        answered = asyncio.ensure_future(answer(between))
        await paused.come()
        link = cell.gangs["decode"].ranks[0]._kv_link
        await eventually(
            lambda: link._receiver is not None and not link._receiver.transfer_slots.idle
        )
        later, cancelled = cell.submit(60, seed=2), cell.submit(70, seed=3)
        waiting = asyncio.ensure_future(answer(later))
        cell.gangs["decode"].process(1).kill()
        await eventually(lambda: not cell.service.ready)
        cancelled.cancel()
        paused.go_on.set()
        await cell.start_gang("decode")
        cell.publish()
        for request, tokens in ((between, await answered), (later, await waiting)):
            check(tiny_llama, request, tokens)
        assert between.timings.attempts == 2
        await cell.settled()
