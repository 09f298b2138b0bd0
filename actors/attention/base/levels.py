"""Visibility and kept tokens at each level of sparse attention (CSPS §3.2.4).

A *part* is the portion of a chunk that one member computes, if the chunk spans several members.
A chunk inside one member needs no other member. Parts are numbered in batch order, so the parts of
one chunk are adjacent, and so are those of one segment and chunk.

Disjoint levels: at level v a query sees the keys of its level-v segment that precede its
level-(v-1) segment. Parts are contiguous and ordered, so these are all keys of some earlier parts:
a rectangle. Only level 1 is causal inside a part. Nested levels (the paper's wording): at level v a
query sees all keys up to its own in its level-v segment: a rectangle and a triangle of its part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import torch
from torch import Tensor

from csps.actors.comm.layout import local_chunks
from csps.protocols.attention.csa import CsaPlan, kept_tokens
from csps.protocols.core.topology import Segments
from csps.protocols.gang.step_messages import PrefillChunk


@dataclass(frozen=True, kw_only=True)
class LevelPart:
    """The part of a chunk on one of several members."""

    index: int
    member: int
    chunk: int
    rows: slice
    """Rows of the member's local tensors."""
    start: int
    """Position of the first row."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True, kw_only=True)
class Sight:
    """Keys that the queries of one part see at one level: all keys of some earlier parts."""

    part: int
    keys: range
    """Parts that are seen whole."""
    causal: bool = False
    """True if the part also sees itself, causally."""

    @property
    def sources(self) -> range:
        """All parts with keys that are seen; they are adjacent."""
        return range(self.keys.start, self.part + 1) if self.causal else self.keys


def spanning_parts(chunks: Sequence[PrefillChunk], bounds: Sequence[int]) -> tuple[LevelPart, ...]:
    """Return the parts of all chunks that span several members, in batch order."""
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
    """Number of the level, from 1."""
    members: range
    sights: tuple[Sight, ...]
    """Sights in the order of parts, without those that see no key here."""

    @cached_property
    def key_parts(self) -> tuple[int, ...]:
        """Parts whose keys are seen here, ascending."""
        return tuple(sorted({part for sight in self.sights for part in sight.sources}))


@dataclass(frozen=True, kw_only=True)
class LevelGeometry:
    """All levels of one step."""

    parts: tuple[LevelPart, ...]
    levels: tuple[Segments, ...]
    """Segments of each level, level 1 first. A segment is a union of segments of the level
    before."""
    nested: bool = False
    cancelled: frozenset[int] = frozenset()
    """Cancelled chunks, whose parts neither see nor are seen."""

    def segment(self, level: int, member: int) -> SegmentGeometry:
        """Return the geometry of a member's segment at a level."""
        members = self.members(level, member)
        parts = (part for part in self.parts if part.chunk not in self.cancelled)
        sights = (self._sight(level, part) for part in parts if part.member in members)
        seeing = tuple(sight for sight in sights if sight.sources)
        return SegmentGeometry(level=level, members=members, sights=seeing)

    @property
    def local_first_level(self) -> bool:
        """True if every segment of level 1 is a single member."""
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

    def level_between(self, one: int, other: int) -> int:
        """Return the lowest level that has both members in one segment."""
        both = {one, other}
        return next(
            number
            for number, segments in enumerate(self.levels, start=1)
            if any(both.issubset(members) for members in segments)
        )

    def level_of_last_queries(self, part: LevelPart) -> int:
        """Return the level at which the last part of a part's chunk sees it."""
        *_, last = self._chunk_parts(part)
        return self.level_between(part.member, last.member)

    def members(self, level: int, member: int) -> range:
        """Return the members of a member's segment at a level."""
        return next(members for members in self.levels[level - 1] if member in members)


@dataclass(frozen=True, kw_only=True)
class DropSchedule:
    """Drop ratios of a plan, with its exceptions, for the KV heads of one rank.

    Raises:
        ConfigError: the plan has ratios per KV head, but not for every KV head of the model.
    """

    plan: CsaPlan
    layers: int
    """Layers of the model."""
    kv_heads: range
    """KV heads of this rank, numbered over the whole model."""
    total_kv_heads: int
    """KV heads of the model."""
    windowed: frozenset[int] = frozenset()
    """Layers with a sliding window. They see nothing far, so they drop nothing."""

    def __post_init__(self) -> None:
        self.plan.check_kv_heads(self.total_kv_heads)

    def head_ratios(self, layer: int) -> tuple[tuple[float, ...], ...]:
        """Return the ratios of each local KV head at levels 1 .. N_v."""
        levels = range(1, self.plan.levels + 1)
        # The first layer that sees all tokens has none before it that could score importance, and
        # tokens that matter in the last layer differ from those in earlier layers (CSPS §3.2.4).
        if self._is_exact(layer):
            return tuple((0.0,) * len(levels) for _ in self.kv_heads)
        group = self.plan.layer_group(layer)
        return tuple(
            tuple(group.drop_ratio(level, head) for level in levels) for head in self.kv_heads
        )

    def head_coverages(self, layer: int) -> tuple[tuple[float, ...], ...] | None:
        """Return the coverages of each local KV head at levels 1 .. N_v; None if `head_ratios`
        hold."""
        group = self.plan.layer_group(layer)
        if not group.coverages or self._is_exact(layer):
            return None
        levels = range(1, self.plan.levels + 1)
        coverages = tuple(
            tuple(group.coverage(level, head) for level in levels) for head in self.kv_heads
        )
        return coverages if any(share < 1.0 for shares in coverages for share in shares) else None

    def drops(self, layer: int) -> bool:
        """Return True if a layer drops tokens."""
        if self.head_coverages(layer) is not None:
            return True
        return any(ratio for ratios in self.head_ratios(layer) for ratio in ratios)

    def narrows(self, layer: int) -> bool:
        """Return True if decode sees only the tokens that the layer kept.

        The answer is the same for the heads of every rank, so all KV of a layer is sent alike.
        """
        if not self.plan.decode_kept_only or self._is_exact(layer):
            return False
        return self.plan.layer_group(layer).drops

    def micro_partitions(self, layer: int) -> tuple[int, ...]:
        """Return the number of micro-partitions (M) at levels 1 .. N_v."""
        group = self.plan.layer_group(layer)
        return tuple(group.micro(level) for level in range(1, self.plan.levels + 1))

    def after(self, layer: int) -> int:
        """Return the next layer that sees all tokens, for which this one scores their
        importance."""
        return next(number for number in count(layer + 1) if number not in self.windowed)

    def _is_exact(self, layer: int) -> bool:
        first, last = self.after(-1), self.layers - 1
        return layer in self.windowed or layer == first or layer >= last


def always_kept(plan: CsaPlan, chunk: PrefillChunk, part: LevelPart) -> tuple[range, range]:
    """Return the rows of a part that are never dropped: sinks and tail of the prompt."""
    sinks = range(max(0, min(part.length, plan.sinks - part.start)))
    if not chunk.last:
        return sinks, range(0)
    end = chunk.start + chunk.length
    first = max(sinks.stop, end - plan.tail - part.start)
    return sinks, range(min(first, part.length), part.length)


def always_kept_mask(plan: CsaPlan, chunk: PrefillChunk, part: LevelPart) -> Tensor:
    """Return which rows of a part are never dropped, (t,) bool on the host."""
    always_t = torch.zeros(part.length, dtype=torch.bool)
    for rows in always_kept(plan, chunk, part):
        always_t[rows.start : rows.stop] = True
    return always_t


def kept_counts(
    plan: CsaPlan, chunks: Sequence[PrefillChunk], part: LevelPart, ratios: Sequence[float]
) -> tuple[int, ...]:
    """Return how many tokens a part keeps at each level, for the ratios of one KV head.

    The numbers never ascend.
    """
    always = sum(map(len, always_kept(plan, chunks[part.chunk], part)))
    return tuple(kept_tokens(part.length, ratio, always) for ratio in ratios)
