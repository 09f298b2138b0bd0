"""Kept tokens of one layer: their order, the rows to send, and the buffers where they arrive.

The kept tokens of a part are ordered so that the kept set of every level is a prefix: tokens of the
farthest level first, then those that only nearer levels keep. The order of keys does not matter to
the rectangles of a level, and outputs return to the member that knows the order. So the data of a
farther level is a slice of a nearer level's, and no index is ever sent.

Shape suffixes: t own rows or tokens of a part, k kept tokens, n tokens of one send slice, h query
heads, g KV heads, d head dim, e = 2d.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csps.actors.attention.base.levels import LevelPart
from csps.actors.attention.csa.routes import (
    Kind,
    OwnedHeads,
    Rectangle,
    RouteStep,
    SegmentRoutes,
    SendSlice,
)
from csps.kernels.importance import select


@dataclass(frozen=True)
class KeptOrder:
    """Kept tokens of one part for adjacent KV heads that keep equally many."""

    heads: slice
    order_gk: Tensor
    """Rows of the part, int64, from `nested_order`."""

    def of(self, heads: slice, tokens: slice) -> Tensor:
        """Return the rows of the part (g, n) for some of the heads."""
        return self.order_gk[heads.start - self.heads.start : heads.stop - self.heads.start, tokens]


class KeptRows:
    """Own queries, keys and values of one layer, by part and in the order of kept tokens.

    A part without an order keeps all tokens; its rows are slices and need no gather.
    """

    def __init__(
        self,
        q_thd: Tensor,
        k_thd: Tensor,
        v_thd: Tensor,
        *,
        parts: Mapping[int, LevelPart],
        drop_queries: bool,
    ) -> None:
        self.q_thd = q_thd
        # Keys and values are sent together: one gather of long rows, one message.
        self.kv_tge = torch.cat((k_thd, v_thd), dim=-1)
        self.parts = parts
        self._group = q_thd.shape[1] // k_thd.shape[1]
        self._orders: Mapping[int, tuple[KeptOrder, ...]] = {}
        self._drop_queries = drop_queries
        self._flat: dict[tuple[int, int], Tensor] = {}

    def restrict(self, orders: Mapping[int, tuple[KeptOrder, ...]]) -> None:
        """Drop the tokens that are in no order of their part."""
        self._orders = orders

    def kept_gt(self, parts: Iterable[int]) -> Tensor:
        """Return which own rows are kept, (g, t) bool, if the given parts drop at level 2."""
        # Level 2 is the nearest level that drops tokens.
        kept_gt = self.kv_tge.new_ones(self.kv_tge.shape[1::-1], dtype=torch.bool)
        for part in parts:
            for order in self._orders.get(part, ()):
                part_kept_gt = kept_gt[order.heads, self.parts[part].rows]
                part_kept_gt.zero_().scatter_(1, order.order_gk, True)
        return kept_gt

    def shape(self, kind: Kind, heads: slice, tokens: slice) -> tuple[int, int, int]:
        """Return the shape of the tensor that `gather` writes."""
        x_thd = self.q_thd if kind == "queries" else self.kv_tge
        return _length(tokens), _length(heads), x_thd.shape[2]

    def gather(self, kind: Kind, part: int, heads: slice, tokens: slice, out: Tensor) -> None:
        """Write (n, h, d) queries or (n, g, 2d) keys and values into a contiguous `out`."""
        x_thd = self.q_thd if kind == "queries" else self.kv_tge
        order = self.order(kind, part, heads)
        if order is None:
            begin = self.parts[part].rows.start
            out.copy_(x_thd[begin + tokens.start : begin + tokens.stop, heads])
            return
        kv_heads = self.kv_heads(kind, heads)
        if kind == "queries" and heads.stop - heads.start < self._group * _length(kv_heads):
            rows_n = order.of(kv_heads, tokens)[0] + self.parts[part].rows.start
            torch.index_select(x_thd[:, heads], 0, rows_n, out=out)
            return
        rows_ng = self._flat_rows(part, order)[tokens, _relative(kv_heads, order.heads)]
        whole = x_thd.view(x_thd.shape[0] * self.kv_tge.shape[1], -1)
        flat = out.view(rows_ng.numel(), whole.shape[1])
        torch.index_select(whole, 0, rows_ng.reshape(-1), out=flat)

    def kept(self, part: int, block: OwnedHeads, tokens: slice) -> Tensor | None:
        """Return the rows of the part (g, n) of some query tokens; None if `tokens` are rows."""
        order = self.order("queries", part, block.queries)
        return None if order is None else order.of(block.keys, tokens)

    def order(self, kind: Kind, part: int, heads: slice) -> KeptOrder | None:
        """Return the order of a part's tokens for the heads of one block; None without one."""
        if kind == "queries" and not self._drop_queries:
            return None
        kv_head = self.kv_heads(kind, heads).start
        for order in self._orders.get(part, ()):
            if order.heads.start <= kv_head < order.heads.stop:
                return order
        return None

    def kv_heads(self, kind: Kind, heads: slice) -> slice:
        """Return the KV heads that query heads read; KV heads are returned as they are."""
        if kind == "keys":
            return heads
        return slice(heads.start // self._group, (heads.stop - 1) // self._group + 1)

    def _flat_rows(self, part: int, order: KeptOrder) -> Tensor:
        """Return a flat index (k, g) into the own rows viewed as (t * g, …)."""
        # Gathering whole rows by a flat index is several times faster than `torch.gather`.
        key = part, order.heads.start
        if key not in self._flat:
            heads, device = order.heads, order.order_gk.device
            kv_heads = torch.arange(heads.start, heads.stop, device=device)
            rows_kg = order.order_gk.T + self.parts[part].rows.start
            self._flat[key] = rows_kg * self.kv_tge.shape[1] + kv_heads
        return self._flat[key]


class LevelBuffers:
    """Queries and keys of the heads that one member owns at one level of one layer."""

    def __init__(self, routes: SegmentRoutes, member: int, rows: KeptRows) -> None:
        self.routes = routes
        self.mine = routes.owner(member)
        self._rows = rows
        self.keys = [self._key_buffer(block) for block in range(len(self.mine.key_blocks))]
        """Keys and values of each key block, (n, g, 2d), all micro-partitions."""
        self.queries = [self._query_buffers(micro) for micro in range(routes.micro_partitions)]
        """Queries by micro-partition and query block, (n, h, d)."""

    def place(self, send_slice: SendSlice, step: RouteStep) -> Tensor:
        """Return the contiguous rows of the buffer into which a send slice is received."""
        if send_slice.kind == "keys":
            return self.keys[send_slice.block][send_slice.rows]
        return self.queries[step.micro][send_slice.block][send_slice.rows]

    def keys_of(self, rectangle: Rectangle) -> tuple[Tensor, Tensor]:
        """Return keys and values (n, g, d) of a rectangle, for the KV heads of its block."""
        block = self.mine.query_blocks[rectangle.block]
        begin = self.mine.key_blocks[block.key_buffer].start
        heads = slice(block.keys.start - begin, block.keys.stop - begin)
        k_ngd, v_ngd = self.keys[block.key_buffer][rectangle.keys, heads].chunk(2, dim=-1)
        return k_ngd, v_ngd

    def take_reused(self, step: RouteStep, nearer: Mapping[int, LevelBuffers]) -> None:
        """Copy send slices that arrived for lower levels and are needed here too.

        Args:
            nearer: lower levels by number, whose data has all arrived.
        """
        for send_slice in self.mine.send_slices(step):
            if send_slice.reused_from is not None and send_slice.part not in self._rows.parts:
                nearer[send_slice.reused_from]._copy_into(self.place(send_slice, step), send_slice)

    def _copy_into(self, target: Tensor, send_slice: SendSlice) -> None:
        for block, heads in enumerate(self.mine.heads(send_slice.kind)):
            begin, end = (
                max(heads.start, send_slice.heads.start),
                min(heads.stop, send_slice.heads.stop),
            )
            if begin >= end:
                continue
            for buffer, rows, tokens in self._stored(send_slice, block):
                into = slice(
                    tokens.start - send_slice.tokens.start, tokens.stop - send_slice.tokens.start
                )
                target[into, begin - send_slice.heads.start : end - send_slice.heads.start] = (
                    buffer[rows, begin - heads.start : end - heads.start]
                )

    def _stored(self, send_slice: SendSlice, block: int) -> Iterator[tuple[Tensor, slice, slice]]:
        """Yield (buffer, its rows, their tokens) of a send slice in one block of this level."""
        if send_slice.kind == "keys":
            begin = self.mine.key_rows[block][send_slice.part].start
            rows = slice(begin + send_slice.tokens.start, begin + send_slice.tokens.stop)
            yield self.keys[block], rows, send_slice.tokens
            return
        heads = self.mine.query_blocks[block].queries
        for micro, buffers in enumerate(self.queries):
            stored = self.routes.tokens("queries", send_slice.part, heads, micro)
            first = max(stored.start, send_slice.tokens.start)
            last = min(stored.stop, send_slice.tokens.stop)
            if first < last:
                begin = self.mine.query_rows(block, micro)[send_slice.part].start - stored.start
                yield buffers[block], slice(begin + first, begin + last), slice(first, last)

    def _key_buffer(self, block: int) -> Tensor:
        heads = self.mine.key_blocks[block]
        tokens = sum(rows.stop - rows.start for rows in self.mine.key_rows[block].values())
        return self._rows.kv_tge.new_empty(
            tokens, heads.stop - heads.start, self._rows.kv_tge.shape[2]
        )

    def _query_buffers(self, micro: int) -> list[Tensor]:
        q_thd, buffers = self._rows.q_thd, []
        for block, heads in enumerate(self.mine.query_blocks):
            rows = self.mine.query_rows(block, micro).values()
            tokens = sum(part.stop - part.start for part in rows)
            width = heads.queries.stop - heads.queries.start
            buffers.append(q_thd.new_empty(tokens, width, q_thd.shape[2]))
        return buffers


def nested_order(
    importance_gt: Tensor, counts: Sequence[int], always: Sequence[range] = ()
) -> Tensor:
    """Order the kept tokens of a part so that each level's are a prefix.

    Args:
        importance_gt: importance of each token for each KV head.
        counts: tokens that each level keeps, never ascending.
        always: tokens kept before all others; no count is below their number.

    Returns:
        order_gk: (g, counts[0]) int64; its first counts[v] columns are the tokens that level v
            keeps, ascending within each step.
    """
    importance_gt = _with_always_kept(importance_gt, always)
    kept_gk = select(importance_gt, counts[0])
    farther = sorted(set(counts[1:]) - {counts[0]}, reverse=True)
    if not farther:
        return kept_gk
    depth_gt = torch.zeros(importance_gt.shape, dtype=torch.int8, device=importance_gt.device)
    for count in farther:
        selected_gk = select(importance_gt, count)
        depth_gt.scatter_add_(1, selected_gk, torch.ones_like(selected_gk, dtype=torch.int8))
    deepest_first = depth_gt.gather(1, kept_gk).argsort(dim=1, descending=True, stable=True)
    return kept_gk.gather(1, deepest_first)


def _with_always_kept(importance_gt: Tensor, always: Sequence[range]) -> Tensor:
    """Give tokens that are always kept infinite importance."""
    importance_gt = importance_gt.clone()
    for rows in always:
        importance_gt[:, rows.start : rows.stop] = torch.inf
    return importance_gt


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _relative(inner: slice, outer: slice) -> slice:
    return slice(inner.start - outer.start, inner.stop - outer.start)
