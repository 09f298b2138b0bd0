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
from itertools import accumulate, groupby

import torch
from torch import Tensor

from csps.actors.attention.base.levels import (
    DropSchedule,
    LevelGeometry,
    LevelPart,
    always_kept,
    kept_counts,
)
from csps.actors.attention.base.yield_points import query_blocks
from csps.kernels.attention import attention
from csps.kernels.importance import gather_kept, importance, select
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
        self._ratios = schedule.head_ratios(layer)[kv_heads]
        self._importance = dict(importance)
        self._kept: dict[tuple[range, int, int], list[tuple[slice, Tensor, Tensor]]] = {}

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
                (run, *self._gather(keys, part, count, run))
                for count, run in self._equal_counts(part, level, heads)
            ]
        return self._kept[key]

    def _equal_counts(self, part: range, level: int, heads: slice) -> Iterator[tuple[int, slice]]:
        numbers = range(heads.start, heads.stop)
        for count, run in groupby(numbers, key=lambda head: self._count(part, level, head)):
            members = list(run)
            yield count, slice(members[0], members[-1] + 1)

    def _count(self, part: range, level: int, head: int) -> int:
        counts = kept_counts(self._plan, self._chunks, self._parts.parts[part], self._ratios[head])
        return counts[level - 1]

    def _gather(
        self, keys: RowAttention, part: range, count: int, heads: slice
    ) -> tuple[Tensor, Tensor]:
        rows = slice(part.start, part.stop)
        k_tgd, v_tgd = keys.k_Tgd[rows, heads], keys.v_Tgd[rows, heads]
        if count == len(part):
            return k_tgd, v_tgd
        level_part = self._parts.parts[part]
        first = self._parts.of_chunk(level_part.chunk)[0].start
        columns = slice(part.start - first, part.stop - first)
        importance_gt = self._importance_of(keys, level_part.chunk)[heads, columns]
        always_t = torch.zeros(len(part), dtype=torch.bool)
        for run in always_kept(self._plan, self._chunks[level_part.chunk], level_part):
            always_t[run.start : run.stop] = True
        kept_gk = select(importance_gt, count, always_t=always_t)
        return gather_kept(k_tgd, kept_gk), gather_kept(v_tgd, kept_gk)

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
        self._levels = geometry.levels
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
        members = {self.parts[queries].member, self.parts[keys].member}
        together = (
            number
            for number, segments in enumerate(self._levels, start=1)
            if any(members.issubset(segment) for segment in segments)
        )
        return next(together)


def _readers(block: HeadBlock, keys: slice) -> slice:
    """Return the query heads of a block that read some of its KV heads."""
    group = (block.queries.stop - block.queries.start) // (block.keys.stop - block.keys.start)
    first = block.queries.start + (keys.start - block.keys.start) * group
    return slice(first, first + (keys.stop - keys.start) * group)


def _overlap(part: range, rows: range) -> range:
    return range(max(part.start, rows.start), min(part.stop, rows.stop))
