"""Which KV changes its holder, against owners worked out token by token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
from gang_driver import LAYOUTS, job_of, laid_out
from hypothesis import given
from hypothesis import strategies as st

from csps.actors.attention.base.group import SpGroup
from csps.actors.comm.layout import GangLayout
from csps.actors.engine.kv_mover import history_moves, row_moves, stored_of
from csps.actors.timing.timeline import StepClock
from csps.protocols.core.placement import KvSlice, Span
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep, rebalanced


def some_of(draw: st.DrawFn, group: list[int]) -> list[int]:
    return draw(st.permutations(group))[: draw(st.integers(1, len(group)))]


def slices(draw: st.DrawFn, start: int, stop: int, group: list[int]) -> tuple[KvSlice, ...]:
    if draw(st.booleans()):
        return laid_out(draw(st.sampled_from(LAYOUTS)), start, stop, some_of(draw, group))
    cuts = sorted({start, stop, *draw(st.lists(st.integers(start, stop), max_size=3))})
    found = [
        KvSlice(instance=draw(st.sampled_from(group)), span=Span(start=a, stop=b))
        for a, b in pairwise(cuts)
    ]
    return tuple(draw(st.permutations(found)))


@st.composite
def jobs(draw: st.DrawFn) -> PrefillStep:
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
    return job_of(chunks, group, (0, *sorted(inner), total))


def owners_before(job: PrefillStep) -> dict[int, np.ndarray]:
    """By request: the member that holds each position before any move."""
    rows = np.repeat(range(len(job.group)), np.diff(job.bounds))
    owners, begin = {}, 0
    for chunk in job.chunks:
        table = np.full(chunk.start + chunk.length, -1)
        for share in chunk.history:
            table[share.span.positions] = job.group.index(share.instance)
        table[chunk.start :] = rows[begin : begin + chunk.length]
        for share in chunk.rows:
            table[share.span.positions] = job.group.index(share.instance)
        owners[chunk.sequence_id] = table
        begin += chunk.length
    return owners


@given(jobs())
def test_exactly_the_kv_placed_elsewhere_moves_and_all_members_agree(job: PrefillStep) -> None:
    layout, after = GangLayout(world_size=4, tp=1), rebalanced(job)
    nothing: Any = None
    groups = [
        SpGroup(cast(Any, nothing), layout, after, member, StepClock())
        for member in range(len(job.group))
    ]
    moves = history_moves(job) + row_moves(groups[0])
    assert all(row_moves(group) == row_moves(groups[0]) for group in groups)
    owners = owners_before(job)
    for chunk, settled in zip(job.chunks, after.chunks, strict=True):
        expected = owners[chunk.sequence_id].copy()
        for share in chunk.placement:
            expected[share.span.positions] = job.group.index(share.instance)
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
        assert_lies(settled.history, expected[: chunk.start], job)
        changed = int((expected != owners[chunk.sequence_id]).sum())
        assert sum(m.span.length for m in moves if m.sequence_id == chunk.sequence_id) == changed
        for group in groups:
            stored = [part for part in stored_of(group) if part.chunk is settled]
            positions = sorted(p for part in stored for p in part.span.positions)
            retain = (owners[chunk.sequence_id] == group.member) & (expected == group.member)
            assert positions == [p for p in np.flatnonzero(retain) if p >= chunk.start]


def assert_lies(history: tuple[KvSlice, ...], owners: np.ndarray, job: PrefillStep) -> None:
    """Each position once, where the owners are."""
    positions = [at for share in history for at in share.span.positions]
    assert sorted(positions) == list(range(len(owners)))
    for share in history:
        assert (owners[share.span.positions] == job.group.index(share.instance)).all()
