"""Attention of some heads over all rows of a batch, computed in any order of queries and keys.

Shape suffixes: T rows of the batch, h own query heads, g the KV heads that
they read, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from csps.actors.strategies.query_blocks import query_blocks
from csps.actors.strategies.sp_tp_far_keys import FarKeys
from csps.kernels.attention import attention
from csps.kernels.importance import importance
from csps.kernels.merge import merge_into, nothing_seen
from csps.protocols.prefill_job import PrefillPiece


@dataclass(frozen=True)
class HeadBlock:
    """Query heads every one of whose KV heads serves equally many of them; counted from the own."""

    queries: slice
    keys: slice


class RowAttention:
    """The running result of one layer; see `csps.kernels.attention` for masks and positions.

    `attend` may be called with queries and keys in any order, as long as no pair comes twice.
    """

    def __init__(
        self,
        pieces: Sequence[PrefillPiece],
        blocks: Sequence[HeadBlock],
        q_Thd: Tensor,
        k_Tgd: Tensor,
        v_Tgd: Tensor,
        *,
        scale: float,
        far_keys: FarKeys | None = None,
        withdrawn: Set[int] = frozenset(),
    ) -> None:
        """Nothing seen yet.

        Args:
            withdrawn: requests whose outputs stay zeros, whatever they are to attend to.
        """
        self._begins = [0, *accumulate(piece.length for piece in pieces)]
        self._pieces = pieces
        self._blocks = blocks
        self.q_Thd, self.k_Tgd, self.v_Tgd = q_Thd, k_Tgd, v_Tgd
        self._scale = scale
        self._far_keys = far_keys
        self._withdrawn = withdrawn
        self.out_Thd, self.lse_hT = nothing_seen(q_Thd)

    def blocks(self, rows: tuple[int, int], keys: int) -> Iterator[tuple[int, int]]:
        """Rows [start, stop) that are to attend to so many keys, in blocks between which urgent
        jobs may run."""
        start, stop = rows
        for block in query_blocks(self.q_Thd[start:stop], keys):
            yield start + block.start, start + block.stop

    def attend(self, queries: tuple[int, int], keys: tuple[int, int]) -> None:
        """Rows [start, stop) to those of other rows that precede them in their piece."""
        for index in filter(self._wanted, range(len(self._pieces))):
            own = self._clip(index, *queries)
            seen = self._clip(index, keys[0], min(keys[1], own.stop))
            if own and seen:
                self._attend_piece(index, own, seen)

    def importance(self, index: int, window: int) -> Tensor:
        """What a piece's keys receive from its last `window` queries under exact attention, or,
        at 0, from all of them under the attention that was computed. Dropped keys are judged with
        the others, so that they can come back.

        Returns:
            (g, rows of the piece) fp32. Where members share a KV head each judges by its own
            query heads, and for these.
        """
        keys = range(self._begins[index], self._begins[index + 1])
        queries = keys[-window:] if window else keys
        return torch.cat([self._judge(block, queries, keys, window > 0) for block in self._blocks])

    def _judge(self, block: HeadBlock, queries: range, keys: range, exact: bool) -> Tensor:
        rows, columns = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        q_nhd, k_ngd = self.q_Thd[rows, block.queries], self.k_Tgd[columns, block.keys]
        lse_hn = self.lse_hT[block.queries, rows]
        positions = {"q_positions": queries, "k_positions": keys}
        if exact:
            v_ngd = self.v_Tgd[columns, block.keys]
            _, lse_hn = attention(q_nhd, k_ngd, v_ngd, scale=self._scale, **positions)
        return importance(q_nhd, k_ngd, lse_hn, scale=self._scale, **positions)

    def _wanted(self, index: int) -> bool:
        return self._pieces[index].rid not in self._withdrawn

    def _clip(self, index: int, start: int, stop: int) -> range:
        return range(max(start, self._begins[index]), min(stop, self._begins[index + 1]))

    def _attend_piece(self, index: int, queries: range, keys: range) -> None:
        if self._far_keys is None:
            self._attend_rows(queries, keys)
            return
        for own, seen, level in self._far_keys.rectangles(index, queries, keys):
            if level is None:
                self._attend_rows(own, seen)
            else:
                self._attend_kept(own, seen, level)

    def _attend_rows(self, queries: range, keys: range) -> None:
        """Causal; a rectangle where all keys precede all queries."""
        precede = keys.stop <= queries.start
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
                ),
            )

    def _attend_kept(self, queries: range, part: range, level: int) -> None:
        """All queries to those keys of a farther part that the level keeps."""
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


def _readers(block: HeadBlock, keys: slice) -> slice:
    """The query heads of a block that read some of its KV heads."""
    group = (block.queries.stop - block.queries.start) // (block.keys.stop - block.keys.start)
    first = block.queries.start + (keys.start - block.keys.start) * group
    return slice(first, first + (keys.stop - keys.start) * group)
