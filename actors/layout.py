"""Which rank belongs to which instance, and which heads and tokens fall to whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from csps.protocols.prefill_job import PrefillJob, PrefillPiece
from csps.protocols.span import Span


@dataclass(frozen=True, kw_only=True)
class GangLayout:
    """A gang's world cut into instances of `tp` ranks: instance i owns [i*tp, (i+1)*tp)."""

    world_size: int
    tp: int

    def __post_init__(self) -> None:
        if self.tp < 1 or self.world_size % self.tp:
            raise ValueError(
                f"{self.world_size} ranks cannot be cut into instances of tp={self.tp}"
            )

    @property
    def instances(self) -> int:
        """Copies of the weights in the gang."""
        return self.world_size // self.tp

    def instance_of(self, rank: int) -> int:
        """The instance a rank belongs to."""
        return rank // self.tp

    def tp_rank_of(self, rank: int) -> int:
        """A rank's place inside its instance."""
        return rank % self.tp

    def rank_of(self, instance: int, tp_rank: int) -> int:
        """The rank at a place of an instance."""
        return instance * self.tp + tp_rank

    def ranks_of(self, instance: int) -> range:
        """All ranks of an instance."""
        return range(instance * self.tp, (instance + 1) * self.tp)

    def ranks_of_all(self, instances: Iterable[int]) -> tuple[int, ...]:
        """All ranks of some instances, ascending."""
        return tuple(rank for it in sorted(set(instances)) for rank in self.ranks_of(it))


@dataclass(frozen=True)
class LocalPiece:
    """A part of a job's piece that one member of the group computes."""

    piece: PrefillPiece
    span: Span
    """Positions in the request."""
    rows: slice
    """Rows of the member's local tensors."""

    def within(self, span: Span) -> LocalPiece:
        """Some of its positions."""
        rows = range(self.rows.start, self.rows.stop, self.rows.step or 1)[self.span.rows_of(span)]
        return LocalPiece(self.piece, span, slice(rows.start, rows.stop, rows.step))


def computed_by(job: PrefillJob, member: int) -> Iterator[LocalPiece]:
    """What a member computes, in the order of its rows."""
    if job.contiguous:
        yield from local_pieces(job.pieces, job.bounds, member)
        return
    begin = 0
    for piece in job.pieces:
        for share in piece.rows:
            if share.instance == job.group[member] and share.span.length:
                end = begin + share.span.length
                yield LocalPiece(piece, share.span, slice(begin, end))
                begin = end


def local_pieces(
    pieces: Sequence[PrefillPiece], bounds: Sequence[int], member: int
) -> Iterator[LocalPiece]:
    """Cut the pieces, laid end to end, at the member's bounds."""
    begin, end = bounds[member], bounds[member + 1]
    offset = 0
    for piece in pieces:
        lower, upper = max(begin, offset), min(end, offset + piece.length)
        if lower < upper:
            span = Span(start=piece.start + lower - offset, stop=piece.start + upper - offset)
            yield LocalPiece(piece, span, slice(lower - begin, upper - begin))
        offset += piece.length
