"""Which KV changes its holder, against owners worked out token by token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
from gang_cell import LAYOUTS, job_of, laid_out
from hypothesis import given
from hypothesis import strategies as st

from csps.actors.engine.moves import history_moves, row_moves, stored_of
from csps.actors.job_clock import JobClock
from csps.actors.layout import GangLayout
from csps.actors.strategies.group import SpGroup
from csps.protocols.balance import balanced
from csps.protocols.placement import KvShare
from csps.protocols.prefill_job import PrefillJob, PrefillPiece
from csps.protocols.span import Span


def some_of(draw: st.DrawFn, group: list[int]) -> list[int]:
    return draw(st.permutations(group))[: draw(st.integers(1, len(group)))]


def shares(draw: st.DrawFn, start: int, stop: int, group: list[int]) -> tuple[KvShare, ...]:
    if draw(st.booleans()):
        return laid_out(draw(st.sampled_from(LAYOUTS)), start, stop, some_of(draw, group))
    cuts = sorted({start, stop, *draw(st.lists(st.integers(start, stop), max_size=3))})
    found = [
        KvShare(instance=draw(st.sampled_from(group)), span=Span(start=a, stop=b))
        for a, b in pairwise(cuts)
    ]
    return tuple(draw(st.permutations(found)))


@st.composite
def jobs(draw: st.DrawFn) -> PrefillJob:
    group = draw(st.permutations(range(4)))[: draw(st.integers(1, 4))]
    pieces, contiguous = [], draw(st.booleans())
    for rid in range(draw(st.integers(1, 3))):
        start, length = draw(st.integers(0, 12)), draw(st.integers(1, 12))
        placed_from = draw(st.sampled_from((None, 0, start)))
        pieces.append(
            PrefillPiece(
                rid=rid,
                start=start,
                length=length,
                rows=()
                if contiguous
                else laid_out(
                    draw(st.sampled_from(LAYOUTS)), start, start + length, some_of(draw, group)
                ),
                history=shares(draw, 0, start, group) if start else (),
                placement=()
                if placed_from is None
                else shares(draw, placed_from, start + length, group),
            )
        )
    total = sum(piece.length for piece in pieces)
    inner = draw(st.lists(st.integers(0, total), min_size=len(group) - 1, max_size=len(group) - 1))
    return job_of(pieces, group, (0, *sorted(inner), total))


def owners_before(job: PrefillJob) -> dict[int, np.ndarray]:
    """By request: the member that holds each position before any move."""
    rows = np.repeat(range(len(job.group)), np.diff(job.bounds))
    owners, begin = {}, 0
    for piece in job.pieces:
        table = np.full(piece.start + piece.length, -1)
        for share in piece.history:
            table[share.span.positions] = job.group.index(share.instance)
        table[piece.start :] = rows[begin : begin + piece.length]
        for share in piece.rows:
            table[share.span.positions] = job.group.index(share.instance)
        owners[piece.rid] = table
        begin += piece.length
    return owners


@given(jobs())
def test_exactly_what_is_placed_elsewhere_moves_and_all_members_agree(job: PrefillJob) -> None:
    layout, after = GangLayout(world_size=4, tp=1), balanced(job)
    nothing: Any = None
    groups = [
        SpGroup(cast(Any, nothing), layout, after, member, JobClock())
        for member in range(len(job.group))
    ]
    moves = history_moves(job) + row_moves(groups[0])
    assert all(row_moves(group) == row_moves(groups[0]) for group in groups)
    owners = owners_before(job)
    for piece, settled in zip(job.pieces, after.pieces, strict=True):
        expected = owners[piece.rid].copy()
        for share in piece.placement:
            expected[share.span.positions] = job.group.index(share.instance)
        moved = owners[piece.rid].copy()
        for move in moves:
            if move.rid == piece.rid:
                positions = move.span.positions
                assert (owners[piece.rid][positions] == move.source).all()
                assert move.source != move.target
                assert (move.rows is None) == (move.span.stop <= piece.start)
                if move.rows is not None:
                    own = groups[move.source].positions[move.rows]
                    assert own.tolist() == list(positions)
                moved[positions] = move.target
        assert (moved == expected).all()
        assert_lies(settled.history, expected[: piece.start], job)
        changed = int((expected != owners[piece.rid]).sum())
        assert sum(m.span.length for m in moves if m.rid == piece.rid) == changed
        for group in groups:
            stored = [it for it in stored_of(group) if it.piece is settled]
            positions = sorted(p for it in stored for p in it.span.positions)
            stays = (owners[piece.rid] == group.member) & (expected == group.member)
            assert positions == [p for p in np.flatnonzero(stays) if p >= piece.start]


def assert_lies(history: tuple[KvShare, ...], owners: np.ndarray, job: PrefillJob) -> None:
    """Each position once, where the owners are."""
    positions = [at for share in history for at in share.span.positions]
    assert sorted(positions) == list(range(len(owners)))
    for share in history:
        assert (owners[share.span.positions] == job.group.index(share.instance)).all()
