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
from test_service_real_ranks import answer, real_cell
from tiny_checkpoints import reference_tokens

from csps.actors.engine.step_run import StepRun
from csps.services.requests.request_handle import RequestHandle
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.policies.tetris.cdsp import Cdsp, CdspChunk

GROUPS = ((0,), (0, 2), (0, 1, 2, 3))
TETRIS = {"improvement_rate": 0.0, "min_chunk": 1}


@pytest.fixture(autouse=True)
def three_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the other instances were busy for a while: whatever the machine has to do."""

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


class HeldChunk:
    """The first second chunk that a leader in this process comes to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go_on, self._come = threading.Event(), threading.Event()
        compute = StepRun.compute

        def held(run: StepRun, *arguments: Any) -> None:
            if run.leads and run.step.chunks[0].start:
                self._come.set()
                assert self.go_on.wait(ANSWER_S), "nobody let the chunk go on"
            compute(run, *arguments)

        patch.setattr(StepRun, "compute", held)

    async def come(self) -> None:
        assert await asyncio.to_thread(self._come.wait, ANSWER_S)


def check(model: Path, request: RequestHandle, tokens: list[int]) -> None:
    """These are transformers' tokens."""
    assert tokens == reference_tokens(model, request.spec.prompt.tolist(), 6)


async def test_three_chunks_give_the_tokens_of_transformers(tiny_llama: Path) -> None:
    """One of them is cancelled between two chunks."""
    async with real_cell(tiny_llama, make_policy("tetris", TETRIS), instances=4) as cell:
        requests = [cell.submit(length, seed=length) for length in (90, 33)]
        cancelled = cell.submit(300, max_tokens=500, seed=9)
        answers = [asyncio.ensure_future(answer(request)) for request in requests]
        await eventually(lambda: cancelled.state == "prefill")
        cancelled.cancel()
        for it, tokens in zip(requests, await asyncio.gather(*answers), strict=True):
            check(tiny_llama, it, tokens)
        await cell.settled()


@pytest.mark.slow
async def test_a_prefill_gang_that_dies_between_chunks(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was between them starts over with a new plan; what is decoded goes on."""
    policy = make_policy("tetris", TETRIS)
    async with real_cell(tiny_llama, policy, instances=4, mortal="prefill") as cell:
        decoding = cell.submit(50, max_tokens=2000, seed=1)
        await anext(decoding)
        held = HeldChunk(monkeypatch)
        between = cell.submit(120, seed=2)
        answered = asyncio.ensure_future(answer(between))
        waiting = asyncio.ensure_future(answer(later := cell.submit(60, seed=3)))
        cancelled = cell.submit(70, seed=4)
        await held.come()
        cancelled.cancel()
        cell.gangs["prefill"].process(1).kill()
        await eventually(lambda: not cell.service.ready)
        before = decoding.timings.tokens
        await eventually(lambda: decoding.timings.tokens > before + 10)
        decoding.cancel()
        held.go_on.set()
        await cell.start_gang("prefill")
        cell.publish()
        for it, tokens in ((between, await answered), (later, await waiting)):
            check(tiny_llama, it, tokens)
        assert between.timings.attempts == 2
        await cell.settled()


@pytest.mark.slow
async def test_a_decode_gang_that_dies_while_a_request_holds_its_only_backend(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever had the turn and whoever waited for it start over; who leaves meanwhile, leaves."""
    policy = make_policy("tetris", TETRIS)
    held = HeldChunk(monkeypatch)
    async with real_cell(tiny_llama, policy, instances=4, backends=1, mortal="decode") as cell:
        between = cell.submit(120, seed=1)
        answered = asyncio.ensure_future(answer(between))
        await held.come()
        link = cell.gangs["decode"].ranks[0]._kv_link
        await eventually(lambda: link._receiver is not None and not link._receiver.transfer_slots.idle)
        later, cancelled = cell.submit(60, seed=2), cell.submit(70, seed=3)
        waiting = asyncio.ensure_future(answer(later))
        cell.gangs["decode"].process(1).kill()
        await eventually(lambda: not cell.service.ready)
        cancelled.cancel()
        held.go_on.set()
        await cell.start_gang("decode")
        cell.publish()
        for it, tokens in ((between, await answered), (later, await waiting)):
            check(tiny_llama, it, tokens)
        assert between.timings.attempts == 2
        await cell.settled()
