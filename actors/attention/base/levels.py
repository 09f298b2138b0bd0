"""Which tokens see which at each level (CSPS §3.2.4), without a tensor.

A *part* is what one member computes of a piece that spans several members. Pieces inside one
member need no other member, and are computed there as they are. Parts are numbered in the order
of the batch, so those of one piece are neighbours, and so are those of one segment and piece.

Disjoint levels: at level v a query sees exactly the keys of its level-v segment that precede its
level-(v-1) segment. As parts are contiguous and ordered, that is all keys of some earlier parts: a
rectangle. Only level 1 is causal inside a part.

Nested levels, the paper's letter: at level v a query sees all keys up to its own in its level-v
segment. All but those of its own part are a rectangle again.

How many tokens each part keeps, by layer, level and KV head (CSPS §3.2.4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from csps.actors.comm.layout import local_chunks
from csps.protocols.attention.csa import CsaPlan, kept_tokens
from csps.protocols.core.topology import Segments
from csps.protocols.gang.step_messages import PrefillChunk


@dataclass(frozen=True, kw_only=True)
class LevelPart:
    """A member's share of a piece that spans several members."""

    index: int
    member: int
    chunk: int
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


def spanning_parts(chunks: Sequence[PrefillChunk], bounds: Sequence[int]) -> tuple[LevelPart, ...]:
    """The parts of all pieces that span several members, in batch order."""
    parts: list[LevelPart] = []
    for member in range(len(bounds) - 1):
        for local in local_chunks(chunks, bounds, member):
            if local.span.length == local.chunk.length:
                continue
            chunk = next(i for i, chunk in enumerate(chunks) if chunk is local.chunk)
            parts.append(
                LevelPart(
                    index=len(parts),
                    member=member,
                    chunk=chunk,
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

    parts: tuple[LevelPart, ...]
    levels: tuple[Segments, ...]
    """Level 1 first; each level's segments are unions of the level's before."""
    nested: bool = False
    cancelled: frozenset[int] = frozenset()
    """Pieces whose parts neither see nor are seen by anybody."""

    def segment(self, level: int, member: int) -> SegmentGeometry:
        """What goes on in a member's segment at a level."""
        members = self.members(level, member)
        parts = (part for part in self.parts if part.chunk not in self.cancelled)
        sights = (self._sight(level, part) for part in parts if part.member in members)
        seeing = tuple(sight for sight in sights if sight.sources)
        return SegmentGeometry(level=level, members=members, sights=seeing)

    @property
    def local_first_level(self) -> bool:
        """Whether level 1 stays inside each member."""
        return all(len(members) == 1 for members in self.levels[0])

    def _sight(self, level: int, part: LevelPart) -> Sight:
        begin = self.members(level, part.member).start
        end = part.member
        if level > 1 and not self.nested:
            end = self.members(level - 1, part.member).start
        keys = [p.index for p in self._chunk_parts(part) if begin <= p.member < end]
        seen = range(keys[0], keys[-1] + 1) if keys else range(part.index, part.index)
        return Sight(part=part.index, keys=seen, causal=level == 1)

    def _chunk_parts(self, part: LevelPart) -> Iterator[LevelPart]:
        return (other for other in self.parts if other.chunk == part.chunk)

    def members(self, level: int, member: int) -> range:
        """A member's segment at a level."""
        return next(members for members in self.levels[level - 1] if member in members)


@dataclass(frozen=True, kw_only=True)
class DropSchedule:
    """A plan's ratios, with its exceptions, for the KV heads of one rank.

    Raises:
        ConfigError: ratios per KV head, but not for every one of the model's.
    """

    plan: CsaPlan
    layers: int
    """Of the model."""
    kv_heads: range
    """Of this rank, numbered over the whole model."""
    total_kv_heads: int
    """Of the model."""

    def __post_init__(self) -> None:
        self.plan.check_kv_heads(self.total_kv_heads)

    def head_ratios(self, layer: int) -> tuple[tuple[float, ...], ...]:
        """Per local KV head, its ratios at levels 1 .. N_v.

        The first layer has no layer before it to judge importance, and tokens that matter in the
        last differ from those in the layers before (CSPS §3.2.4): neither drops anything.
        """
        levels = range(1, self.plan.levels + 1)
        if self._is_exact(layer):
            return tuple((0.0,) * len(levels) for _ in self.kv_heads)
        group = self.plan.layer_group(layer)
        return tuple(
            tuple(group.drop_ratio(level, head) for level in levels) for head in self.kv_heads
        )

    def drops(self, layer: int) -> bool:
        """Whether anything is dropped in a layer."""
        return any(ratio for ratios in self.head_ratios(layer) for ratio in ratios)

    def narrows(self, layer: int) -> bool:
        """Whether decode is to see what a layer kept, and no more; alike for the heads of every
        rank, so that all KV of the layer travels in one way."""
        if not self.plan.decode_kept_only or self._is_exact(layer):
            return False
        return any(any(ratios) for ratios in self.plan.layer_group(layer).drop_ratios)

    def micro_partitions(self, layer: int) -> tuple[int, ...]:
        """M of levels 1 .. N_v."""
        group = self.plan.layer_group(layer)
        return tuple(group.micro(level) for level in range(1, self.plan.levels + 1))

    def _is_exact(self, layer: int) -> bool:
        return layer in (0, self.layers - 1)


def always_kept(plan: CsaPlan, chunk: PrefillChunk, part: LevelPart) -> tuple[range, range]:
    """Rows of a part that are never dropped: the prompt's first tokens, and its last ones."""
    sinks = range(max(0, min(part.length, plan.sinks - part.start)))
    if not chunk.last:
        return sinks, range(0)
    end = chunk.start + chunk.length
    first = max(sinks.stop, end - plan.tail - part.start)
    return sinks, range(min(first, part.length), part.length)


def kept_counts(
    plan: CsaPlan, chunks: Sequence[PrefillChunk], part: LevelPart, ratios: Sequence[float]
) -> tuple[int, ...]:
    """Tokens that a part keeps at each level, for one KV head's ratios; never ascending."""
    always = sum(map(len, always_kept(plan, chunks[part.chunk], part)))
    return tuple(kept_tokens(part.length, ratio, always) for ratio in ratios)
