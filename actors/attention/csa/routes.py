"""Routes of the first all-to-all at each level, and the attention that its receiver computes.

The r-th member of a segment of n owns heads [rH/n, (r+1)H/n) of it (CSPS §3.2.4). For these heads
it receives the queries of all parts that see a key there, and the keys and values of all parts that
are seen. Both are split into micro-partitions, which arrive as

    Q 0, KV 0, KV 1, …, KV M-1, Q 1, …, Q M-1

The first two travel together. So the first queries are computed progressively while keys arrive,
and every later micro-partition of queries is finished when it arrives. Alternating both, as in the
paper's figure, would finish all queries only with the last keys.

Routes follow from the plan alone, so no sizes or indices are sent. Tokens that a member received
for a nearer level are not sent again for a farther one (consolidation); kept sets are nested
prefixes (`csps.actors.attention.csa.kept_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Literal

from csps.actors.attention.base.group import HeadSplit
from csps.actors.attention.base.levels import LevelGeometry, LevelPart, SegmentGeometry, Sight
from csps.protocols.core.placement import even_share

Kind = Literal["queries", "keys"]
"""Kind of rows that are sent; keys include their values."""


@dataclass(frozen=True)
class OwnedHeads:
    """Heads that are sent and computed together, with equally many queries per KV head."""

    queries: slice
    keys: slice
    key_buffer: int
    """Index of the owner's key buffer with these KV heads."""


@dataclass(frozen=True)
class RouteStep:
    """One micro-partition of a level's first all-to-all."""

    kind: Kind
    micro: int

    @property
    def query_micro(self) -> int:
        """Micro-partition of the queries that are computed when this step has arrived."""
        return self.micro if self.kind == "queries" else 0


@dataclass(frozen=True)
class SendSlice:
    """Tokens of one part for some heads, sent to the owner of the heads."""

    kind: Kind
    part: int
    heads: slice
    tokens: slice
    """Range in the part's order of kept tokens."""
    block: int
    """Index of the owner's buffer."""
    rows: slice
    """Rows of that buffer."""
    reused_from: int | None
    """Level for which the owner received these tokens before, or None."""


@dataclass(frozen=True)
class Rectangle:
    """One attention call: rows of a query buffer against rows of a key buffer."""

    block: int
    queries: slice
    keys: slice
    causal: bool
    """True if the last query sees all keys, and each query before it one key less."""


@dataclass(frozen=True)
class HeadCounts:
    """Tokens that each part keeps at each level, for every local KV head."""

    kept: tuple[tuple[tuple[int, ...], ...], ...]
    """Number of tokens, [part][KV head][level - 1]."""
    parts: tuple[LevelPart, ...]
    drop_queries: bool

    def of(self, kind: Kind, part: int, level: int, kv_head: int) -> int:
        """Return the number of queries or keys of a part at a level."""
        if kind == "queries" and not self.drop_queries:
            return self.parts[part].length
        return self.kept[part][kv_head][level - 1]

    def boundaries(self) -> list[int]:
        """Return the KV heads whose numbers of kept tokens differ from the head before."""
        heads = range(1, len(self.kept[0]) if self.kept else 0)
        return [h for h in heads if any(part[h] != part[h - 1] for part in self.kept)]


class SegmentRoutes:
    """The traffic of one segment at one level."""

    def __init__(self, routes: Routes, segment: SegmentGeometry, micro_partitions: int) -> None:
        self.routes = routes
        self.segment = segment
        self.level = segment.level
        self.members = segment.members
        self.micro_partitions = micro_partitions
        self._split = HeadSplit(
            heads=routes.heads, kv_heads=routes.kv_heads, parts=len(segment.members)
        )
        self._owners: dict[int, OwnerRoutes] = {}

    def owner(self, member: int) -> OwnerRoutes:
        """Return what one member of the segment receives and computes."""
        if member not in self._owners:
            self._owners[member] = OwnerRoutes(self, member)
        return self._owners[member]

    def owned(self, kind: Kind, member: int) -> slice:
        """Return the heads that a member owns in this segment."""
        index = member - self.members.start
        return self._split.queries(index) if kind == "queries" else self._split.keys(index)

    def parts_of(self, kind: Kind) -> tuple[int, ...]:
        """Return the parts whose queries, or keys, take part."""
        if kind == "keys":
            return self.segment.key_parts
        return tuple(sight.part for sight in self.segment.sights)

    def count(self, kind: Kind, part: int, heads: slice) -> int:
        """Return the number of tokens of a part for the heads of one block."""
        group = self.routes.group if kind == "queries" else 1
        return self.routes.counts.of(kind, part, self.level, heads.start // group)

    def tokens(self, kind: Kind, part: int, heads: slice, micro: int) -> slice:
        """Return the tokens of a part in one micro-partition."""
        tokens = even_share(self.count(kind, part, heads), self.micro_partitions, micro)
        return slice(tokens.start, tokens.stop)

    @cached_property
    def steps(self) -> tuple[RouteStep, ...]:
        """Steps of the first all-to-all, in order; none if no part sees another."""
        if not self.segment.sights:
            return ()
        micros = range(self.micro_partitions)
        keys = (RouteStep("keys", micro) for micro in micros)
        return (
            RouteStep("queries", 0),
            *keys,
            *(RouteStep("queries", micro) for micro in micros[1:]),
        )


class OwnerRoutes:
    """Rows that one member receives at one level, their buffers, and the attention over them."""

    def __init__(self, segment: SegmentRoutes, member: int) -> None:
        self.member = member
        self._segment = segment
        self._group = segment.routes.group
        self._send_slices: dict[RouteStep, tuple[SendSlice, ...]] = {}
        self._rectangles: dict[RouteStep, tuple[Rectangle, ...]] = {}

    # --- heads -------------------------------------------------------------------------------

    @cached_property
    def key_blocks(self) -> tuple[slice, ...]:
        """KV heads of each key buffer."""
        # Split where the numbers of kept tokens change and where nearer levels' heads end, so
        # that each block is sent, or copied from a nearer level, as a whole.
        points = [*self._segment.routes.counts.boundaries(), *self._nearer_ends("keys")]
        return tuple(_cut(self._segment.owned("keys", self.member), points))

    @cached_property
    def query_blocks(self) -> tuple[OwnedHeads, ...]:
        """Query heads of each query buffer, with the KV heads that they read."""
        points = [keys.start * self._group for keys in self.key_blocks]
        points += self._nearer_ends("queries")
        return tuple(
            self._block(queries)
            for rough in _cut(self._segment.owned("queries", self.member), points)
            for queries in _uniform(rough, self._group)
        )

    def heads(self, kind: Kind) -> tuple[slice, ...]:
        """Return the heads of each buffer."""
        if kind == "keys":
            return self.key_blocks
        return tuple(block.queries for block in self.query_blocks)

    def _block(self, queries: slice) -> OwnedHeads:
        keys = slice(queries.start // self._group, (queries.stop - 1) // self._group + 1)
        buffer = next(i for i, block in enumerate(self.key_blocks) if block.stop > keys.start)
        return OwnedHeads(queries, keys, buffer)

    def _nearer_ends(self, kind: Kind) -> list[int]:
        nearer = self._segment.routes.nearer(self._segment.level, self.member)
        owned = [segment.owned(kind, self.member) for segment in nearer]
        return [end for heads in owned for end in (heads.start, heads.stop)]

    # --- buffers -----------------------------------------------------------------------------

    @cached_property
    def key_rows(self) -> tuple[dict[int, slice], ...]:
        """Rows of each part, by key buffer."""
        # Micro-partitions of a part are adjacent, so adjacent parts are one slice when complete.
        return tuple(
            _end_to_end(
                (part, self._segment.count("keys", part, heads))
                for part in self._segment.parts_of("keys")
            )
            for heads in self.key_blocks
        )

    def query_rows(self, block: int, micro: int) -> dict[int, slice]:
        """Return the rows of each part in the buffer of one block and micro-partition."""
        heads = self.query_blocks[block].queries
        lengths = []
        for part in self._segment.parts_of("queries"):
            tokens = self._segment.tokens("queries", part, heads, micro)
            lengths.append((part, tokens.stop - tokens.start))
        return _end_to_end(lengths)

    def send_slices(self, step: RouteStep) -> tuple[SendSlice, ...]:
        """Return the send slices that fill the buffers in one step, in the order of sending."""
        if step not in self._send_slices:
            self._send_slices[step] = tuple(
                self._send_slice(step, part, block)
                for part in self._segment.parts_of(step.kind)
                for block in range(len(self.heads(step.kind)))
            )
        return self._send_slices[step]

    def _send_slice(self, step: RouteStep, part: int, block: int) -> SendSlice:
        heads = self.heads(step.kind)[block]
        tokens = self._segment.tokens(step.kind, part, heads, step.micro)
        if step.kind == "keys":
            begin = self.key_rows[block][part].start + tokens.start
        else:
            begin = self.query_rows(block, step.micro)[part].start
        return SendSlice(
            kind=step.kind,
            part=part,
            heads=heads,
            tokens=tokens,
            block=block,
            rows=slice(begin, begin + tokens.stop - tokens.start),
            reused_from=self._reused_from(step.kind, part, heads),
        )

    def _reused_from(self, kind: Kind, part: int, heads: slice) -> int | None:
        """Return the farthest nearer level with these heads, which has the fewest extra tokens."""
        levels = [
            nearer.level
            for nearer in self._segment.routes.nearer(self._segment.level, self.member)
            if part in nearer.parts_of(kind) and _inside(heads, nearer.owned(kind, self.member))
        ]
        return max(levels, default=None)

    # --- attention ---------------------------------------------------------------------------

    def rectangles(self, step: RouteStep) -> tuple[Rectangle, ...]:
        """Return the attention calls that become possible when a step has arrived."""
        if step not in self._rectangles:
            self._rectangles[step] = tuple(
                rectangle
                for block in range(len(self.query_blocks))
                for rectangle in self._block_rectangles(step, block)
                if rectangle.queries.start < rectangle.queries.stop
            )
        return self._rectangles[step]

    def whole_rectangles(self, micro: int) -> Iterator[Rectangle]:
        """Yield the calls of one micro-partition of queries against all keys."""
        for block in range(len(self.query_blocks)):
            yield from self._against_all(block, micro)

    def _block_rectangles(self, step: RouteStep, block: int) -> Iterator[Rectangle]:
        if step.kind == "keys" and self._segment.micro_partitions > 1:
            return self._against_new(block, step.micro)
        if step == RouteStep("queries", 0):
            return iter(())  # no key has arrived yet
        return self._against_all(block, step.micro)

    def _against_all(self, block: int, micro: int) -> Iterator[Rectangle]:
        """Yield calls of one micro-partition of queries against all keys.

        Sights of the same keys share a call.
        """
        heads = self.query_blocks[block]
        query_rows, key_rows = self.query_rows(block, micro), self.key_rows[heads.key_buffer]
        for sights in _same_keys(self._segment.segment.sights):
            first, last = sights[0], sights[-1]
            begin, end = key_rows[last.sources[0]].start, key_rows[last.sources[-1]].stop
            if last.causal:
                tokens = self._segment.tokens("queries", last.part, heads.queries, micro)
                end = key_rows[last.part].start + tokens.stop
            queries = slice(query_rows[first.part].start, query_rows[last.part].stop)
            yield Rectangle(block, queries, slice(begin, end), last.causal)

    def _against_new(self, block: int, micro: int) -> Iterator[Rectangle]:
        """Yield calls of query micro-partition 0 against the keys of one micro-partition."""
        heads = self.query_blocks[block]
        query_rows, key_rows = self.query_rows(block, 0), self.key_rows[heads.key_buffer]
        for sights in _same_keys(self._segment.segment.sights):
            first, last = sights[0], sights[-1]
            queries = slice(query_rows[first.part].start, query_rows[last.part].stop)
            for part in last.sources:
                own = last.causal and part == last.part
                if own and micro:
                    continue  # these keys are later than the first queries
                tokens = self._segment.tokens("keys", part, heads.keys, micro)
                begin = key_rows[part].start
                keys = slice(begin + tokens.start, begin + tokens.stop)
                yield Rectangle(block, queries, keys, own)


class Routes:
    """Routes of all levels of one layer, for all members."""

    def __init__(
        self,
        geometry: LevelGeometry,
        counts: HeadCounts,
        *,
        heads: int,
        kv_heads: int,
        micro_partitions: Sequence[int],
    ) -> None:
        self.geometry = geometry
        self.counts = counts
        self.heads, self.kv_heads = heads, kv_heads
        self.group = heads // kv_heads
        """Number of query heads of a KV head."""
        self._micro = tuple(micro_partitions)
        self._segments: dict[tuple[int, range], SegmentRoutes] = {}

    @property
    def exchanged_levels(self) -> range:
        """Levels whose segments have several members."""
        first = 2 if self.geometry.local_first_level else 1
        return range(first, len(self.geometry.levels) + 1)

    def segment(self, level: int, member: int) -> SegmentRoutes:
        """Return the segment of a member at a level."""
        key = level, self.geometry.members(level, member)
        if key not in self._segments:
            geometry = self.geometry.segment(level, member)
            self._segments[key] = SegmentRoutes(self, geometry, self._micro[level - 1])
        return self._segments[key]

    def nearer(self, level: int, member: int) -> list[SegmentRoutes]:
        """Return a member's segments at lower levels, nearest first."""
        return [self.segment(lower, member) for lower in self.exchanged_levels if lower < level]


def _cut(whole: slice, points: Iterable[int]) -> Iterator[slice]:
    """Split a slice at the points inside it."""
    inside = sorted({point for point in points if whole.start < point < whole.stop})
    if whole.start < whole.stop:
        yield from (slice(a, b) for a, b in pairwise([whole.start, *inside, whole.stop]))


def _uniform(queries: slice, group: int) -> Iterator[slice]:
    """Split query heads into runs with equally many of them per KV head."""
    # Grouped-query attention cannot compute two query heads of one KV head and one of the next.
    if queries.start % group == 0 and queries.stop % group == 0:
        yield queries
    else:
        yield from _cut(queries, range(0, queries.stop, group))


def _inside(inner: slice, outer: slice) -> bool:
    return bool(outer.start <= inner.start and inner.stop <= outer.stop)


def _end_to_end(lengths: Iterable[tuple[int, int]]) -> dict[int, slice]:
    rows, end = {}, 0
    for part, length in lengths:
        rows[part] = slice(end, end + length)
        end += length
    return rows


def _same_keys(sights: Sequence[Sight]) -> Iterator[list[Sight]]:
    """Yield runs of adjacent sights of the same keys; a causal sight is a run of its own."""

    def seen(sight: Sight) -> tuple[range, int | None]:
        return sight.sources, sight.part if sight.causal else None

    for _, run in groupby(sights, key=seen):
        yield list(run)
