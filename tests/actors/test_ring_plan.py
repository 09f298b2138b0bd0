"""Blocks of a ring against arrays of which query sees which key."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from gang_driver import bounds_of_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from test_rings import Case, cases

from csps.actors.attention.ring.ring_plan import RingBlock, RingPlan, with_history
from csps.protocols.core.placement import place, striped, zigzag
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep

Counts = npt.NDArray[np.int64]


def plan_of(step: PrefillStep) -> RingPlan:
    return RingPlan(step, with_history(step))


def positions(plan: RingPlan, member: int, chunk: int) -> Counts:
    """Return the positions of a member's rows of a chunk."""
    parts = plan.parts[member][chunk]
    return np.concatenate([np.array(part.span.positions) for part in parts] or [np.array([], int)])


def seen(block: RingBlock) -> npt.NDArray[np.bool_]:
    """Return the mask (queries, keys) that a block computes."""
    if block.q_positions is None or block.k_positions is None:
        return np.ones((block.rows, block.key_count), bool)
    return np.array(block.k_positions)[None, :] <= np.array(block.q_positions)[:, None]


@settings(max_examples=examples(100))
@given(cases())
def test_every_pair_that_sees_each_other_is_in_one_block(case: Case) -> None:
    plan = plan_of(case.step)
    for asker in range(plan.size):
        for holder in range(plan.size):
            blocks = plan.blocks(asker, holder)
            for index, rows in enumerate(plan.chunk_rows(asker)):
                queries, keys = positions(plan, asker, index), positions(plan, holder, index)
                count = np.zeros((len(queries), len(keys)), int)
                tokens = plan.history[holder].get(index, 0)
                history = np.zeros(len(queries), int)
                first_key = plan.chunk_rows(holder)[index].start
                for block in blocks.get(index, []):
                    at = slice(block.queries.start - rows.start, block.queries.stop - rows.start)
                    if block.history:
                        history[at] += block.key_count
                        continue
                    of = slice(block.keys.start - first_key, block.keys.stop - first_key)
                    count[at, of] += seen(block)
                assert (count == (keys[None, :] <= queries[:, None])).all()
                assert (history == tokens).all()
                answered = np.zeros(len(queries), int)
                for row_slice in plan.answered(asker, holder).get(index, []):
                    answered[row_slice.start - rows.start : row_slice.stop - rows.start] += 1
                assert (answered == ((count.sum(1) + history) > 0)).all()


def work(step: PrefillStep) -> Counts:
    """Count the pairs of a query and a key that each member computes in all rounds of pass-KV."""
    plan = plan_of(step)
    return np.array(
        [
            sum(
                int(seen(block).sum())
                for holder in range(plan.size)
                for blocks in plan.blocks(member, holder).values()
                for block in blocks
            )
            for member in range(plan.size)
        ]
    )


def step_in(layout: str, lengths: list[int], members: int) -> PrefillStep:
    order = tuple(range(members))
    chunks = [
        PrefillChunk(sequence_id=sequence_id, start=0, length=n)
        for sequence_id, n in enumerate(lengths)
    ]
    bounds = [sum(lengths) * member // members for member in range(members + 1)]
    if layout != "contiguous":
        cut = {"zigzag": zigzag, "striped": striped}[layout]
        chunks = [
            msgspec.structs.replace(chunk, rows=place(order, cut(chunk.length, members)))
            for chunk in chunks
        ]
        bounds = bounds_of_rows(chunks, order)
    return PrefillStep(step_id=1, group=order, bounds=tuple(bounds), chunks=tuple(chunks))


@pytest.mark.parametrize("members", [2, 3, 8])
@pytest.mark.parametrize("lengths", [[2048], [1500, 700, 1100]])
def test_zigzag_and_striped_share_the_work_evenly(members: int, lengths: list[int]) -> None:
    for layout in ("zigzag", "striped"):
        pairs = work(step_in(layout, lengths, members))
        assert pairs.sum() == sum(n * (n + 1) // 2 for n in lengths)
        assert pairs.max() <= 1.02 * pairs.mean()
    pairs = work(step_in("contiguous", [2048], members))
    assert pairs.max() >= 1.4 * pairs.mean()


@settings(max_examples=examples(100))
@given(st.integers(1, 300), st.integers(1, 8))
def test_regular_layouts_take_few_calls(length: int, members: int) -> None:
    """Expect at most one block for each pair of members."""
    for layout in ("contiguous", "zigzag", "striped"):
        plan = plan_of(step_in(layout, [length], members))
        for asker in range(members):
            for holder in range(members):
                blocks = plan.blocks(asker, holder).get(0, [])
                assert len(blocks) <= 1
