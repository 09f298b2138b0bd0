"""Which KV changes its holder, against owners worked out token by token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
from gang_driver import LAYOUTS, laid_out, prefill_step
from hypothesis import given
from hypothesis import strategies as st

from csps.actors.attention.base.group import SpGroup
from csps.actors.comm.layout import GangLayout
from csps.actors.engine.kv_mover import history_moves, row_moves, stored_of
from csps.actors.timing.timeline import StepClock
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep, rebalanced


def some_of(draw: st.DrawFn, group: list[int]) -> list[int]:
    return draw(st.permutations(group))[: draw(st.integers(1, len(group)))]


def slices(draw: st.DrawFn, start: int, stop: int, group: list[int]) -> tuple[KvSlice, ...]:
    if draw(st.booleans()):
        return laid_out(draw(st.sampled_from(LAYOUTS)), start, stop, some_of(draw, group))
    cuts = sorted({start, stop, *draw(st.lists(st.integers(start, stop), max_size=3))})
    found = [KvSlice(draw(st.sampled_from(group)), a, b) for a, b in pairwise(cuts)]
    return tuple(draw(st.permutations(found)))


@st.composite
def steps(draw: st.DrawFn) -> PrefillStep:
    group = draw(st.permutations(range(4)))[: draw(st.integers(1, 4))]
    chunks, contiguous = [], draw(st.booleans())
    for sequence_id in range(draw(st.integers(1, 3))):
        start, length = draw(st.integers(0, 12)), draw(st.integers(1, 12))
        placed_from = draw(st.sampled_from((None, 0, start)))
        chunks.append(
            PrefillChunk(
                sequence_id=sequence_id,
                start=start,
                length=length,
                rows=()
                if contiguous
                else laid_out(
                    draw(st.sampled_from(LAYOUTS)), start, start + length, some_of(draw, group)
                ),
                history=slices(draw, 0, start, group) if start else (),
                placement=()
                if placed_from is None
                else slices(draw, placed_from, start + length, group),
            )
        )
    total = sum(chunk.length for chunk in chunks)
    inner = draw(st.lists(st.integers(0, total), min_size=len(group) - 1, max_size=len(group) - 1))
    return prefill_step(chunks, group, (0, *sorted(inner), total))


def owners_before(step: PrefillStep) -> dict[int, np.ndarray]:
    """Return, by sequence, the member that holds each position before any move."""
    rows = np.repeat(range(len(step.group)), np.diff(step.bounds))
    owners, begin = {}, 0
    for chunk in step.chunks:
        table = np.full(chunk.start + chunk.length, -1)
        for kv_slice in chunk.history:
            table[kv_slice.span.positions] = step.group.index(kv_slice.instance)
        table[chunk.start :] = rows[begin : begin + chunk.length]
        for kv_slice in chunk.rows:
            table[kv_slice.span.positions] = step.group.index(kv_slice.instance)
        owners[chunk.sequence_id] = table
        begin += chunk.length
    return owners


@given(steps())
def test_exactly_the_kv_placed_elsewhere_moves_and_all_members_agree(step: PrefillStep) -> None:
    layout, after = GangLayout(world_size=4, tp=1), rebalanced(step)
    nothing: Any = None
    groups = [
        SpGroup(cast(Any, nothing), layout, after, member, StepClock())
        for member in range(len(step.group))
    ]
    moves = history_moves(step) + row_moves(groups[0])
    assert all(row_moves(group) == row_moves(groups[0]) for group in groups)
    owners = owners_before(step)
    for chunk, balanced in zip(step.chunks, after.chunks, strict=True):
        expected = owners[chunk.sequence_id].copy()
        for kv_slice in chunk.placement:
            expected[kv_slice.span.positions] = step.group.index(kv_slice.instance)
        moved = owners[chunk.sequence_id].copy()
        for move in moves:
            if move.sequence_id == chunk.sequence_id:
                positions = move.span.positions
                assert (owners[chunk.sequence_id][positions] == move.sender).all()
                assert move.sender != move.receiver
                assert (move.rows is None) == (move.span.stop <= chunk.start)
                if move.rows is not None:
                    own = groups[move.sender].positions[move.rows]
                    assert own.tolist() == list(positions)
                moved[positions] = move.receiver
        assert (moved == expected).all()
        assert_lies(balanced.history, expected[: chunk.start], step)
        changed = int((expected != owners[chunk.sequence_id]).sum())
        assert sum(m.span.length for m in moves if m.sequence_id == chunk.sequence_id) == changed
        for group in groups:
            stored = [part for part in stored_of(group) if part.chunk is balanced]
            positions = sorted(p for part in stored for p in part.span.positions)
            retain = (owners[chunk.sequence_id] == group.member) & (expected == group.member)
            assert positions == [p for p in np.flatnonzero(retain) if p >= chunk.start]


def assert_lies(history: tuple[KvSlice, ...], owners: np.ndarray, step: PrefillStep) -> None:
    """Check that each position lies once, where the owners say."""
    positions = [at for kv_slice in history for at in kv_slice.span.positions]
    assert sorted(positions) == list(range(len(owners)))
    for kv_slice in history:
        assert (owners[kv_slice.span.positions] == step.group.index(kv_slice.instance)).all()
