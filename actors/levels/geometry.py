"""Which tokens see which at each level (CSPS §3.2.4), without a tensor.

A *part* is what one member computes of a piece that spans several members. Pieces inside one
member need no other member, and are computed there as they are. Parts are numbered in the order
of the batch, so those of one piece are neighbours, and so are those of one segment and piece.

Disjoint levels: at level v a query sees exactly the keys of its level-v segment that precede its
level-(v-1) segment. As parts are contiguous and ordered, that is all keys of some earlier parts: a
rectangle. Only level 1 is causal inside a part.

Nested levels, the paper's letter: at level v a query sees all keys up to its own in its level-v
segment. All but those of its own part are a rectangle again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from csps.actors.layout import local_pieces
from csps.protocols.prefill_job import PrefillPiece
from csps.protocols.topology import Segments


@dataclass(frozen=True, kw_only=True)
class Part:
    """A member's share of a piece that spans several members."""

    index: int
    member: int
    piece: int
    rows: slice
    """Rows of the member's local tensors."""
    start: int
    """Position of the first row."""

    @property
    def length(self) -> int:
        """Tokens."""
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What the queries of one part see at one level: all keys of some parts that precede it."""

    part: int
    keys: range
    """Parts seen whole."""
    causal: bool = False
    """The part also sees itself, causally."""

    @property
    def sources(self) -> range:
        """All parts that keys come from, neighbours."""
        return range(self.keys.start, self.part + 1) if self.causal else self.keys


def spanning_parts(pieces: Sequence[PrefillPiece], bounds: Sequence[int]) -> tuple[Part, ...]:
    """The parts of all pieces that span several members, in batch order."""
    parts: list[Part] = []
    for member in range(len(bounds) - 1):
        for local in local_pieces(pieces, bounds, member):
            if local.span.length == local.piece.length:
                continue
            piece = next(i for i, piece in enumerate(pieces) if piece is local.piece)
            parts.append(
                Part(
                    index=len(parts),
                    member=member,
                    piece=piece,
                    rows=local.rows,
                    start=local.span.start,
                )
            )
    return tuple(parts)


@dataclass(frozen=True, kw_only=True)
class SegmentGeometry:
    """One segment of one level."""

    level: int
    """From 1."""
    members: range
    sights: tuple[Sight, ...]
    """In the order of parts; those that see nothing here are left out."""

    @cached_property
    def key_parts(self) -> tuple[int, ...]:
        """Parts whose keys somebody sees here, ascending."""
        return tuple(sorted({part for sight in self.sights for part in sight.sources}))


@dataclass(frozen=True, kw_only=True)
class LevelGeometry:
    """All levels of one job."""

    parts: tuple[Part, ...]
    levels: tuple[Segments, ...]
    """Level 1 first; each level's segments are unions of the level's before."""
    nested: bool = False
    withdrawn: frozenset[int] = frozenset()
    """Pieces whose parts neither see nor are seen by anybody."""

    def segment(self, level: int, member: int) -> SegmentGeometry:
        """What goes on in a member's segment at a level."""
        members = self.members(level, member)
        parts = (part for part in self.parts if part.piece not in self.withdrawn)
        sights = (self._sight(level, part) for part in parts if part.member in members)
        seeing = tuple(sight for sight in sights if sight.sources)
        return SegmentGeometry(level=level, members=members, sights=seeing)

    @property
    def local_first_level(self) -> bool:
        """Whether level 1 stays inside each member."""
        return all(len(members) == 1 for members in self.levels[0])

    def _sight(self, level: int, part: Part) -> Sight:
        begin = self.members(level, part.member).start
        end = part.member
        if level > 1 and not self.nested:
            end = self.members(level - 1, part.member).start
        keys = [p.index for p in self._piece_parts(part) if begin <= p.member < end]
        seen = range(keys[0], keys[-1] + 1) if keys else range(part.index, part.index)
        return Sight(part=part.index, keys=seen, causal=level == 1)

    def _piece_parts(self, part: Part) -> Iterator[Part]:
        return (other for other in self.parts if other.piece == part.piece)

    def members(self, level: int, member: int) -> range:
        """A member's segment at a level."""
        return next(members for members in self.levels[level - 1] if member in members)
