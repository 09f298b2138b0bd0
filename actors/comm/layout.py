"""Which rank belongs to which instance, and which tokens each member of a group computes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from csps.protocols.core.placement import Span
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep


def name_digest(name: str) -> int:
    """Return 63 bits that stand for a name where only int64 words travel."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, kw_only=True)
class GangLayout:
    """A gang's ranks cut into instances of `tp` ranks: instance i owns ranks [i*tp, (i+1)*tp)."""

    world_size: int
    tp: int

    def __post_init__(self) -> None:
        if self.tp < 1 or self.world_size % self.tp:
            raise ValueError(
                f"{self.world_size} ranks cannot be cut into instances of tp={self.tp}"
            )

    @property
    def instances(self) -> int:
        """Return the number of instances, each with a copy of the weights."""
        return self.world_size // self.tp

    def instance_of(self, rank: int) -> int:
        """Return the instance to which a rank belongs."""
        return rank // self.tp

    def tp_rank_of(self, rank: int) -> int:
        """Return a rank's place inside its instance."""
        return rank % self.tp

    def rank_of(self, instance: int, tp_rank: int) -> int:
        """Return the rank at a place of an instance."""
        return instance * self.tp + tp_rank

    def ranks_of(self, instance: int) -> range:
        """Return all ranks of an instance."""
        return range(instance * self.tp, (instance + 1) * self.tp)

    def ranks_of_all(self, instances: Iterable[int]) -> tuple[int, ...]:
        """Return all ranks of some instances, ascending."""
        return tuple(
            rank for instance in sorted(set(instances)) for rank in self.ranks_of(instance)
        )


@dataclass(frozen=True)
class LocalChunk:
    """The part of a step's chunk that one member of the group computes."""

    chunk: PrefillChunk
    span: Span
    """Positions in the sequence."""
    rows: slice
    """Rows of the member's local tensors."""

    def within(self, span: Span) -> LocalChunk:
        """Return the part with these positions."""
        rows = range(self.rows.start, self.rows.stop, self.rows.step or 1)[self.span.rows_of(span)]
        return LocalChunk(self.chunk, span, slice(rows.start, rows.stop, rows.step))


def computed_by(step: PrefillStep, member: int) -> Iterator[LocalChunk]:
    """Yield what a member computes, in the order of its rows."""
    if step.contiguous:
        yield from local_chunks(step.chunks, step.bounds, member)
        return
    begin = 0
    for chunk in step.chunks:
        for kv_slice in chunk.rows:
            if kv_slice.instance == step.group[member] and kv_slice.span.length:
                end = begin + kv_slice.span.length
                yield LocalChunk(chunk, kv_slice.span, slice(begin, end))
                begin = end


def local_chunks(
    chunks: Sequence[PrefillChunk], bounds: Sequence[int], member: int
) -> Iterator[LocalChunk]:
    """Cut the chunks, laid end to end, at the member's bounds."""
    begin, end = bounds[member], bounds[member + 1]
    offset = 0
    for chunk in chunks:
        lower, upper = max(begin, offset), min(end, offset + chunk.length)
        if lower < upper:
            span = Span(start=chunk.start + lower - offset, stop=chunk.start + upper - offset)
            yield LocalChunk(chunk, span, slice(lower - begin, upper - begin))
        offset += chunk.length
