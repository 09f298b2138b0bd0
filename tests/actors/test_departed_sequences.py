"""A step arrives after one of its sequences has left: nothing of it is stored, and nobody waits.

On a gang that decodes what it prefills, the log of rank 0 may overtake the router's step on its way
to another rank. The slots of the sequence that left may be promised to others by then.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gang_driver import GREEDY, Request, even_slices, laid_out, prefill_step, prompt_of, slices_at
from gang_threads import ThreadCell, elastic_cell
from greedy_reference import greedy_tokens

from csps.protocols.core.placement import KvSlice, Span
from csps.protocols.gang.messages import EvictKv, PrefillDone, RetainKv, SlotsFreed

KV_SLOTS = 120
LENGTH, FIRST_CHUNK = 60, 6
ORIGIN, LEAVING, STAYING, LATER = range(4)


def request_of(sequence_id: int, length: int, instances: list[int]) -> Request:
    return Request(
        sequence_id=sequence_id,
        prompt=prompt_of(length, sequence_id),
        slices=even_slices(length, instances),
        master=instances[-1],
    )


async def overtaken(
    cell: ThreadCell, one: Request, start: int = 0, strategy: str = "ulysses", **fields: Any
) -> tuple[int, Request, Request]:
    """Let the log tell rank 1 that `one` has left before rank 1 has the step that computes it with
    another request, and promise all slots that rank 1 has then. Return the step, the other request
    and the one that has these slots."""
    other = request_of(STAYING, 20, [0, 1])
    await cell.reserve(other)
    rows = {"rows": laid_out("striped", 0, 20, [0, 1])} if "rows" in fields else {}
    chunks = [one.chunk(start, **fields), other.chunk(**rows)]
    tokens = np.concatenate([one.prompt[start:], other.prompt])
    step_id = cell.submit(prefill_step(chunks, [0, 1], strategy=strategy), tokens, ranks=[0])
    cell.cancel(LEAVING)
    await cell.until(lambda: cell.about(SlotsFreed, sequence_id=LEAVING, rank=1))
    slots = cell.ranks[1].engine.pool.slots
    later = request_of(LATER, slots.free - 5, [1])
    await cell.reserve(later)
    assert not slots.free
    cell.submit(cell.steps[step_id], tokens, ranks=[1])
    return step_id, other, later


STRIPED = laid_out("striped", 0, LENGTH, [0, 1])


@pytest.mark.parametrize(
    ("instances", "strategy", "rows"),
    [
        pytest.param([0, 1], "ulysses", (), id="own rows"),
        pytest.param([1], "ulysses", (), id="rows that move here"),
        pytest.param([1], "ring_kv", STRIPED, id="rows that pass by"),
    ],
)
async def test_a_step_waits_for_no_slots_of_a_sequence_that_left(
    tiny_llama: Path, instances: list[int], strategy: str, rows: tuple[KvSlice, ...]
) -> None:
    async with elastic_cell(tiny_llama, 2, kv_slots=KV_SLOTS) as cell:
        one = request_of(LEAVING, LENGTH, instances)
        await cell.reserve(one)
        fields = {"rows": rows} if rows else {}
        step_id, other, later = await overtaken(cell, one, strategy=strategy, **fields)
        await finish(cell, tiny_llama, step_id, other, later)


@pytest.mark.parametrize("strategy", ["ulysses", "ring_kv"])
async def test_history_that_is_gone_with_its_sequence_is_not_missed(
    tiny_llama: Path, strategy: str
) -> None:
    """An earlier step has computed it, and the sequence has left between the two."""
    async with elastic_cell(tiny_llama, 2, kv_slots=KV_SLOTS) as cell:
        one = replace(
            request_of(LEAVING, LENGTH, [0, 1]),
            slices=slices_at([0, 3, FIRST_CHUNK, LENGTH], [0, 1, 0]),
        )
        await cell.reserve(one)
        first = cell.submit(
            prefill_step([one.chunk(0, FIRST_CHUNK)], [0, 1]), one.prompt[:FIRST_CHUNK]
        )
        await cell.prefilled(first)
        history = one.slices[:2]
        step_id, other, later = await overtaken(
            cell, one, FIRST_CHUNK, strategy=strategy, history=history
        )
        await finish(cell, tiny_llama, step_id, other, later)


@pytest.mark.parametrize("holder", [0, 1])
async def test_a_shared_prefix_is_not_moved_to_where_its_sequence_left(
    tiny_llama: Path, holder: int
) -> None:
    """It lies on one rank and is to be decoded from the other."""
    async with elastic_cell(tiny_llama, 2, kv_slots=KV_SLOTS) as cell:
        origin = replace(
            request_of(ORIGIN, FIRST_CHUNK, [holder]),
            sampling=replace(GREEDY, max_tokens=2),
            retain=True,
        )
        await cell.generate(origin, group=[0, 1])
        held = Span(start=0, stop=FIRST_CHUNK)
        assert await cell.retain_or_evict(
            cell.decode, RetainKv(sequence_id=ORIGIN, stop=FIRST_CHUNK)
        ) == len(held.positions)
        one = request_of(LEAVING, LENGTH, [1 - holder])
        one = replace(one, prompt=np.concatenate([origin.prompt, one.prompt[FIRST_CHUNK:]]))
        await cell.reserve(one)
        history = (KvSlice.of(holder, held, ORIGIN),)
        step_id, other, later = await overtaken(cell, one, FIRST_CHUNK, history=history)
        await finish(cell, tiny_llama, step_id, other, later, retained=ORIGIN)


async def finish(
    cell: ThreadCell,
    model: Path,
    step_id: int,
    other: Request,
    later: Request,
    retained: int | None = None,
) -> None:
    """Check that the requests that are left get their tokens, and that all slots come back."""
    await cell.prefilled(step_id)
    assert not any(done.cancelled for done in cell.about(PrefillDone, step_id=step_id))
    cell.submit(prefill_step([later.chunk()], [1]), later.prompt)
    answers = await cell.answer(other, later)
    for request, answer in zip((other, later), answers, strict=True):
        assert answer == greedy_tokens(model, request.prompt.tolist(), len(answer))
    await cell.freed(LEAVING, STAYING, LATER)
    if retained is not None:
        assert await cell.retain_or_evict(cell.decode, EvictKv(sequence_id=retained)) == 0
    cell.check_idle()
