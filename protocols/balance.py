"""Earlier KV that a step moves before it attends to it (Tetris §4.1).

Of a piece it is said where its history lies (`PrefillPiece.history`) and who keeps what from the
step on (`placement`), which may name earlier positions: so a group that has grown gets even parts
of the history. Each layer's travels before the layer is computed. All ranks derive the same moves
from the step alone, members or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from csps.protocols.placement import KvShare, rests_of
from csps.protocols.prefill_job import PrefillJob, PrefillPiece
from csps.protocols.span import Span, SpanIndex


@dataclass(frozen=True)
class Displaced:
    """Positions of a sequence whose KV changes its instance."""

    rid: int
    span: Span
    source: int
    target: int


def displaced(piece: PrefillPiece) -> Iterator[Displaced]:
    """History of a piece that lies elsewhere than it is to be kept, each position once."""
    keepers = [it for it in piece.placement if it.span.start < piece.start]
    index = SpanIndex(it.span for it in keepers)
    for held in piece.history:
        for number in index.near(held.span):
            kept = keepers[number]
            common = held.span.intersection(kept.span)
            if common.length and kept.instance != held.instance:
                yield Displaced(piece.rid, common, held.instance, kept.instance)


def balanced(job: PrefillJob) -> PrefillJob:
    """The step with its history where it is once it has been moved."""
    return replace(job, pieces=tuple(map(_balanced, job.pieces)))


def _balanced(piece: PrefillPiece) -> PrefillPiece:
    moves = list(displaced(piece))
    if not moves:
        return piece
    rests = rests_of((it.span for it in piece.history), [it.span for it in moves])
    staying = (
        replace(share, span=rest)
        for share, left in zip(piece.history, rests, strict=True)
        for rest in left
    )
    arrived = (KvShare(instance=it.target, span=it.span) for it in moves)
    return replace(piece, history=(*staying, *arrived))
