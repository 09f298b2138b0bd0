"""Attention of own heads over all rows of a batch, optionally without dropped far keys.

`RowAttention` computes queries and keys in any order. `FarKeys` applies sparse attention to SP-TP
(CSPS §3.2.4). Every member has all rows of its heads, so no bytes are saved and every query is
computed; a query skips the keys of other parts that their level drops. Since every member has all
keys of its heads, it selects the kept ones without an exchange.

Shape suffixes: T rows of the batch, k kept tokens, h own query heads, g the KV heads that they
read, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby

import torch
from torch import Tensor

from csps.actors.attention.base.dropped_mass import DroppedMassTally, mass_without
from csps.actors.attention.base.levels import (
    DropSchedule,
    LevelGeometry,
    LevelPart,
    always_kept_mask,
    kept_counts,
)
from csps.actors.attention.base.yield_points import query_blocks
from csps.kernels.attention import attention
from csps.kernels.importance import covering_counts, gather_kept, importance, select
from csps.kernels.merge import merge_into, nothing_seen
from csps.protocols.gang.step_messages import PrefillChunk


@dataclass(frozen=True)
class HeadBlock:
    """Query and KV heads, equally many queries per KV head, numbered from the first own head."""

    queries: slice
    keys: slice


class RowAttention:
    """Running attention result of one layer.

    `attend` may be called with queries and keys in any order, but only once for each pair.

    Args:
        cancelled: sequences whose outputs remain zero.
        window: positions that a row sees; None for all.
    """

    def __init__(
        self,
        chunks: Sequence[PrefillChunk],
        blocks: Sequence[HeadBlock],
        q_Thd: Tensor,
        k_Tgd: Tensor,
        v_Tgd: Tensor,
        *,
        scale: float,
        far_keys: FarKeys | None = None,
        cancelled: Set[int] = frozenset(),
        window: int | None = None,
    ) -> None:

        self._begins = [0, *accumulate(chunk.length for chunk in chunks)]
        self._chunks = chunks
        self._blocks = blocks
        self.q_Thd, self.k_Tgd, self.v_Tgd = q_Thd, k_Tgd, v_Tgd
        self._scale = scale
        self._far_keys = far_keys
        self._cancelled = cancelled
        self._window = window
        self.out_Thd, self.lse_hT = nothing_seen(q_Thd)

    def blocks(self, rows: tuple[int, int], keys: int) -> Iterator[tuple[int, int]]:
        """Split rows [start, stop) that attend to `keys` keys into blocks between yield points."""
        start, stop = rows
        for block in query_blocks(self.q_Thd[start:stop], keys):
            yield start + block.start, start + block.stop

    def attend(self, queries: tuple[int, int], keys: tuple[int, int]) -> None:
        """Attend rows [start, stop) of queries to the rows of keys that precede them in a chunk."""
        for index in filter(self._is_active, range(len(self._chunks))):
            own = self._clip(index, *queries)
            seen = self._clip(index, keys[0], min(keys[1], own.stop))
            if own and seen:
                self._attend_chunk(index, own, seen)

    def importance(self, index: int, window: int) -> Tensor:
        """Return the importance of a chunk's keys, dropped ones included.

        Args:
            window: number of last queries that score under exact attention; 0 for all queries,
                under the attention that was computed.

        Returns:
            (g, rows of the chunk) fp32. If members share a KV head, each scores by its own query
            heads.
        """
        keys = range(self._begins[index], self._begins[index + 1])
        queries = keys[-window:] if window else keys
        return torch.cat([self._score(block, queries, keys, window > 0) for block in self._blocks])

    def _score(self, block: HeadBlock, queries: range, keys: range, exact: bool) -> Tensor:
        rows, columns = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        q_nhd, k_ngd = self.q_Thd[rows, block.queries], self.k_Tgd[columns, block.keys]
        lse_hn = self.lse_hT[block.queries, rows]
        if exact:
            v_ngd = self.v_Tgd[columns, block.keys]
            _, lse_hn = attention(
                q_nhd, k_ngd, v_ngd, q_positions=queries, k_positions=keys, scale=self._scale
            )
        return importance(
            q_nhd, k_ngd, lse_hn, q_positions=queries, k_positions=keys, scale=self._scale
        )

    def _is_active(self, index: int) -> bool:
        return self._chunks[index].sequence_id not in self._cancelled

    def _clip(self, index: int, start: int, stop: int) -> range:
        return range(max(start, self._begins[index]), min(stop, self._begins[index + 1]))

    def _attend_chunk(self, index: int, queries: range, keys: range) -> None:
        if self._far_keys is None:
            self._attend_rows(queries, keys)
            return
        for own, seen, level in self._far_keys.rectangles(index, queries, keys):
            if level is None:
                self._attend_rows(own, seen)
            else:
                self._attend_kept(own, seen, level)

    def _attend_rows(self, queries: range, keys: range) -> None:
        """Attend causally; without a mask if all keys precede all queries, and without the keys
        that are out of the window of all of them."""
        precede = self._window is None and keys.stop <= queries.start
        if self._window is not None:
            keys = range(max(keys.start, queries.start - self._window + 1), keys.stop)
        if not keys:
            return
        for block in self._blocks:
            self._merge(
                queries,
                block.queries,
                attention(
                    self.q_Thd[queries.start : queries.stop, block.queries],
                    self.k_Tgd[keys.start : keys.stop, block.keys],
                    self.v_Tgd[keys.start : keys.stop, block.keys],
                    q_positions=None if precede else queries,
                    k_positions=None if precede else keys,
                    scale=self._scale,
                    window=self._window,
                ),
            )

    def _attend_kept(self, queries: range, part: range, level: int) -> None:
        """Attend all queries to the keys of a farther part that the level keeps."""
        assert self._far_keys is not None
        for block in self._blocks:
            for heads, k_kgd, v_kgd in self._far_keys.kept(self, part, level, block.keys):
                self._attend_block(queries, _readers(block, heads), k_kgd, v_kgd)

    def _attend_block(self, queries: range, heads: slice, k_ngd: Tensor, v_ngd: Tensor) -> None:
        self._merge(
            queries,
            heads,
            attention(
                self.q_Thd[queries.start : queries.stop, heads],
                k_ngd,
                v_ngd,
                q_positions=None,
                k_positions=None,
                scale=self._scale,
            ),
        )

    def _merge(self, queries: range, heads: slice, part: tuple[Tensor, Tensor]) -> None:
        rows = slice(queries.start, queries.stop)
        merge_into(self.out_Thd[rows, heads], self.lse_hT[heads, rows], *part)


class FarKeys:
    """Kept keys of one layer, gathered on first use.

    Args:
        kv_heads: own KV heads among those of the schedule.
        importance: (g, rows of the chunk) from the layer before, by chunk that spans members;
            empty if the plan scores importance in the layer itself.
    """

    def __init__(
        self,
        parts: FarParts,
        schedule: DropSchedule,
        chunks: Sequence[PrefillChunk],
        *,
        layer: int,
        kv_heads: slice,
        importance: Mapping[int, Tensor],
    ) -> None:
        self._parts = parts
        self._plan = schedule.plan
        self._chunks = chunks
        self._layer, self._heads = layer, kv_heads
        self._kv_heads = len(schedule.kv_heads)
        self._ratios = schedule.head_ratios(layer)[kv_heads]
        coverages = schedule.head_coverages(layer)
        self._coverages = None if coverages is None else coverages[kv_heads]
        self._importance = dict(importance)
        self._kept: dict[tuple[range, int, int], list[tuple[slice, Tensor, Tensor]]] = {}
        self._counts: dict[range, Sequence[Sequence[int]]] = {}
        """Numbers of kept tokens by part, [own KV head][level - 1]."""
        self._dropped: list[tuple[int, slice, Tensor]] = []
        """Mass that the last queries of a chunk do not see: (chunk, own KV heads, (g,))."""

    def rectangles(
        self, chunk: int, queries: range, keys: range
    ) -> Iterator[tuple[range, range, int | None]]:
        """Yield (queries, keys, level) of a chunk's rows.

        The keys are a whole part at that level, or, with level None, rows that are seen causally.
        """
        parts = self._parts.of_chunk(chunk)
        if not parts:
            yield queries, keys, None
        for own in parts:
            rows = _overlap(own, queries)
            for other in parts:
                seen = _overlap(other, range(keys.start, min(keys.stop, rows.stop)))
                if not (rows and seen):
                    continue
                level = self._parts.level(own, other)
                if own == other or level == 1:
                    yield rows, seen, None
                else:
                    assert seen == other, f"keys {seen} are not the whole part {other}"
                    yield rows, other, level

    def kept(
        self, keys: RowAttention, part: range, level: int, heads: slice
    ) -> Sequence[tuple[slice, Tensor, Tensor]]:
        """Return (KV heads that keep equally many, k, v (k, g, d)) of a part at a level."""
        key = part, level, heads.start
        if key not in self._kept:
            self._kept[key] = [
                (run, *self._gather(keys, part, level, count, run))
                for count, run in self._equal_counts(keys, part, level, heads)
            ]
        return self._kept[key]

    def add_dropped(self, tally: DroppedMassTally) -> None:
        """Add the mass that the layer has dropped to a tally, when its attention is complete."""
        for chunk, importance_gt in self._importance.items():
            sequence_id, nothing_g = self._chunks[chunk].sequence_id, importance_gt.sum(dim=1)
            add = partial(tally.add, sequence_id, self._layer, kv_heads=self._kv_heads)
            add(self._heads, dropped_g=torch.zeros_like(nothing_g), total_g=nothing_g)
            for dropped_chunk, run, dropped_g in self._dropped:
                if dropped_chunk == chunk:
                    first = self._heads.start
                    heads = slice(first + run.start, first + run.stop)
                    add(heads, dropped_g=dropped_g, total_g=torch.zeros_like(dropped_g))

    def _equal_counts(
        self, keys: RowAttention, part: range, level: int, heads: slice
    ) -> Iterator[tuple[int, slice]]:
        numbers, counts = range(heads.start, heads.stop), self._counts_of(keys, part)
        for count, run in groupby(numbers, key=lambda head: counts[head][level - 1]):
            members = list(run)
            yield count, slice(members[0], members[-1] + 1)

    def _counts_of(self, keys: RowAttention, part: range) -> Sequence[Sequence[int]]:
        if part not in self._counts:
            level_part = self._parts.parts[part]
            if self._coverages is None:
                self._counts[part] = [
                    kept_counts(self._plan, self._chunks, level_part, ratios)
                    for ratios in self._ratios
                ]
            else:
                counts_gv = covering_counts(
                    self._part_importance(keys, part),
                    torch.tensor(self._coverages, dtype=torch.float64),
                    always_t=self._always(level_part),
                )
                self._counts[part] = counts_gv.tolist()
        return self._counts[part]

    def _gather(
        self, keys: RowAttention, part: range, level: int, count: int, heads: slice
    ) -> tuple[Tensor, Tensor]:
        rows = slice(part.start, part.stop)
        k_tgd, v_tgd = keys.k_Tgd[rows, heads], keys.v_Tgd[rows, heads]
        if count == len(part):
            return k_tgd, v_tgd
        level_part = self._parts.parts[part]
        importance_gt = self._part_importance(keys, part)[heads]
        kept_gk = select(importance_gt, count, always_t=self._always(level_part))
        if level == self._parts.level_of_last_queries(level_part):
            dropped_g = mass_without(importance_gt, kept_gk)
            self._dropped.append((level_part.chunk, heads, dropped_g))
        return gather_kept(k_tgd, kept_gk), gather_kept(v_tgd, kept_gk)

    def _always(self, part: LevelPart) -> Tensor:
        return always_kept_mask(self._plan, self._chunks[part.chunk], part)

    def _part_importance(self, keys: RowAttention, part: range) -> Tensor:
        """Return the importance (g, t) of a part's keys."""
        chunk = self._parts.parts[part].chunk
        first = self._parts.of_chunk(chunk)[0].start
        return self._importance_of(keys, chunk)[:, part.start - first : part.stop - first]

    def _importance_of(self, keys: RowAttention, chunk: int) -> Tensor:
        """Return the importance from the layer before, or from this one."""
        if chunk not in self._importance:
            assert self._plan.importance_layer == "same", (
                f"the layer before has no importance of chunk {chunk}"
            )
            self._importance[chunk] = keys.importance(chunk, self._plan.importance_window)
        return self._importance[chunk]


class FarParts:
    """Parts of chunks that span members, by rows, and the level at which two parts meet."""

    def __init__(self, geometry: LevelGeometry, bounds: Sequence[int]) -> None:
        self.level_of_last_queries = geometry.level_of_last_queries
        self._level_between = geometry.level_between
        self.parts: Mapping[range, LevelPart] = {
            range(bounds[part.member] + part.rows.start, bounds[part.member] + part.rows.stop): part
            for part in geometry.parts
        }
        """Parts by their rows of the batch."""

    def of_chunk(self, chunk: int) -> list[range]:
        """Return the rows of a chunk's parts, ascending; none if one member has all of it."""
        return [rows for rows, part in self.parts.items() if part.chunk == chunk]

    def level(self, queries: range, keys: range) -> int:
        """Return the lowest level that has both parts in one segment."""
        return self._level_between(self.parts[queries].member, self.parts[keys].member)


def _readers(block: HeadBlock, keys: slice) -> slice:
    """Return the query heads of a block that read some of its KV heads."""
    group = (block.queries.stop - block.queries.start) // (block.keys.stop - block.keys.start)
    first = block.queries.start + (keys.start - block.keys.start) * group
    return slice(first, first + (keys.stop - keys.start) * group)


def _overlap(part: range, rows: range) -> range:
    return range(max(part.start, rows.start), min(part.stop, rows.stop))
