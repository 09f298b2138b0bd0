"""Which KV changes its holder, against owners worked out token by token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from csps.actors.engine.moves import moves_of
from csps.actors.job_clock import JobClock
from csps.actors.layout import GangLayout
from csps.actors.strategies.group import SpGroup
from csps.protocols.messages import KvShare, PrefillJob, PrefillPiece, Span


def shares(draw: st.DrawFn, start: int, stop: int, group: list[int]) -> tuple[KvShare, ...]:
    cuts = sorted({start, stop, *draw(st.lists(st.integers(start, stop), max_size=3))})
    found = [
        KvShare(instance=draw(st.sampled_from(group)), span=Span(start=a, stop=b))
        for a, b in pairwise(cuts)
    ]
    return tuple(draw(st.permutations(found)))


@st.composite
def jobs(draw: st.DrawFn) -> PrefillJob:
    group = draw(st.permutations(range(4)))[: draw(st.integers(1, 4))]
    pieces = []
    for rid in range(draw(st.integers(1, 3))):
        start, length = draw(st.integers(0, 12)), draw(st.integers(1, 12))
        placed_from = draw(st.sampled_from((None, 0, start)))
        pieces.append(
            PrefillPiece(
                rid=rid,
                start=start,
                length=length,
                history=shares(draw, 0, start, group) if start else (),
                placement=()
                if placed_from is None
                else shares(draw, placed_from, start + length, group),
            )
        )
    total = sum(piece.length for piece in pieces)
    inner = draw(st.lists(st.integers(0, total), min_size=len(group) - 1, max_size=len(group) - 1))
    return PrefillJob(
        job_id=1,
        group=tuple(group),
        bounds=(0, *sorted(inner), total),
        pieces=tuple(pieces),
    )


def owners_before(job: PrefillJob) -> dict[int, np.ndarray]:
    """By request: the member that holds each position before any move."""
    rows = np.repeat(range(len(job.group)), np.diff(job.bounds))
    owners, begin = {}, 0
    for piece in job.pieces:
        table = np.full(piece.start + piece.length, -1)
        for share in piece.history:
            table[share.span.start : share.span.stop] = job.group.index(share.instance)
        table[piece.start :] = rows[begin : begin + piece.length]
        owners[piece.rid] = table
        begin += piece.length
    return owners


@given(jobs())
def test_exactly_what_is_placed_elsewhere_moves_and_all_members_agree(job: PrefillJob) -> None:
    layout = GangLayout(world_size=4, tp=1)
    nothing: Any = None
    groups = [
        SpGroup(cast(Any, nothing), layout, job, member, JobClock())
        for member in range(len(job.group))
    ]
    moves = moves_of(groups[0])
    assert all(moves_of(group) == moves for group in groups)
    owners = owners_before(job)
    for piece in job.pieces:
        expected = owners[piece.rid].copy()
        for share in piece.placement:
            expected[share.span.start : share.span.stop] = job.group.index(share.instance)
        moved = owners[piece.rid].copy()
        for move in moves:
            if move.rid == piece.rid:
                span = slice(move.span.start, move.span.stop)
                assert (owners[piece.rid][span] == move.source).all()
                assert move.source != move.target
                moved[span] = move.target
        assert (moved == expected).all()
        changed = int((expected != owners[piece.rid]).sum())
        assert sum(m.span.length for m in moves if m.rid == piece.rid) == changed


@given(*[st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted)] * 2)
def test_the_intersection_of_spans_is_that_of_their_positions(
    one: list[int], other: list[int]
) -> None:
    common = Span(start=one[0], stop=one[1]).intersection(Span(start=other[0], stop=other[1]))
    positions = set(range(*one)) & set(range(*other))
    assert set(range(common.start, common.stop)) == positions
