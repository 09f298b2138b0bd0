"""A step's slots, beside reservations that take theirs at the same time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from gang_driver import Request, even_slices, prefill_step, prompt_of
from gang_threads import elastic_cell, thread_cell
from greedy_reference import greedy_tokens

from csps.actors.engine.pending_steps import PendingSteps
from csps.protocols.core.placement import Span


class Waiting:
    """A step as `PendingSteps` sees it."""

    def __init__(self, number: int, sequence_ids: list[int], fits: bool) -> None:
        self.step_id, self.sequences, self.fits = number, sequence_ids, fits

    def take_slots(self) -> bool:
        return self.fits


def test_a_sequences_steps_take_slots_in_their_order() -> None:
    """Others pass; else the earlier one might wait for what the later one has taken."""
    acknowledged: list[int] = []
    pending = PendingSteps(acknowledged.append)
    first = Waiting(1, [1, 2], fits=False)
    for run in (first, Waiting(2, [2, 3], fits=True), Waiting(3, [3], True), Waiting(4, [4], True)):
        pending.add(cast(Any, run), owner=1)
    assert acknowledged == [4]
    first.fits = True
    pending.slots_freed()
    assert acknowledged == [4, 1, 2, 3]


async def test_a_step_takes_all_slots_or_none(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else takes what was free a moment ago, between two of its sequences."""
    async with thread_cell(tiny_llama, prefill=1, decode=1, kv_slots=64) as cell:
        [rank] = cell.prefill_gang.ranks
        pool = rank.engine.pool
        one, other = (
            Request(
                sequence_id=sequence_id,
                prompt=prompt_of(20, sequence_id),
                slices=even_slices(20, [0]),
            )
            for sequence_id in (1, 2)
        )
        allocate = pool.slots.allocate
        thief = [Span(start=0, stop=40)]

        def stolen(sequence_id: int, spans: Any) -> None:
            allocate(sequence_id, spans)
            if thief:
                allocate(99, [thief.pop()])

        monkeypatch.setattr(pool.slots, "allocate", stolen)
        for request in (one, other):
            await cell.reserve(request)
        step = prefill_step([one.chunk(), other.chunk()], [0])
        cell.submit(step, np.concatenate([one.prompt, other.prompt]))
        await cell.prefill.stats()
        assert pool.slots.used == 40, "the step holds slots while it waits for others"
        pool.slots.free_sequence(99)
        rank.loop._pending_steps.slots_freed()
        answers = await cell.answer(one, other)
        for request, answer in zip((one, other), answers, strict=True):
            assert answer == greedy_tokens(tiny_llama, request.prompt.tolist(), len(answer))
        await cell.freed(1, 2)
        cell.check_idle()


async def test_rows_that_are_stored_elsewhere_take_no_slots(tiny_llama: Path) -> None:
    """LoongServe §4.1: the instance that helps has no room for what it computes."""
    async with elastic_cell(tiny_llama, 2, kv_slots=100) as cell:
        full = Request(
            sequence_id=1, prompt=prompt_of(90, 1), slices=even_slices(90, [0]), master=1
        )
        helped = Request(
            sequence_id=2, prompt=prompt_of(90, 2), slices=even_slices(90, [1]), master=1
        )
        for request in (full, helped):
            await cell.reserve(request)
        cell.submit(prefill_step([full.chunk()], [0]), full.prompt)
        here = even_slices(40, [1])
        cell.submit(prefill_step([helped.chunk(0, 40)], [0, 1]), helped.prompt[:40])
        rest = helped.chunk(40, history=here)
        cell.submit(prefill_step([rest], [1, 0]), helped.prompt[40:])
        answers = await cell.answer(full, helped)
        for request, answer in zip((full, helped), answers, strict=True):
            assert answer == greedy_tokens(tiny_llama, request.prompt.tolist(), len(answer))
        await cell.freed(1, 2)
        cell.check_idle()
