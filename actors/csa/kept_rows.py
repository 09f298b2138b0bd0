"""One layer's own queries, keys and values, by part and in the order of kept tokens.

Shape suffixes: t own rows, n tokens of one parcel, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from csps.actors.csa.routes import HeadBlock, Kind
from csps.actors.levels.geometry import Part


@dataclass(frozen=True)
class KeptOrder:
    """The kept tokens of one part for neighbouring KV heads that keep equally many."""

    heads: slice
    order_gk: Tensor
    """int64 rows of the part, from `nested_order`."""

    def of(self, heads: slice, tokens: slice) -> Tensor:
        """(g, n) rows of the part, for some of the heads."""
        return self.order_gk[heads.start - self.heads.start : heads.stop - self.heads.start, tokens]


class KeptRows:
    """Gathers what is sent, and says where outputs belong.

    A part without an order keeps all tokens where they are: those are slices, not gathers.
    """

    def __init__(
        self,
        q_thd: Tensor,
        k_thd: Tensor,
        v_thd: Tensor,
        *,
        parts: Mapping[int, Part],
        drop_queries: bool,
    ) -> None:
        self.q_thd = q_thd
        # Keys and values travel together: one gather of long rows, one message.
        self.kv_tge = torch.cat((k_thd, v_thd), dim=-1)
        self.parts = parts
        self._group = q_thd.shape[1] // k_thd.shape[1]
        self._orders: Mapping[int, tuple[KeptOrder, ...]] = {}
        self._drop_queries = drop_queries
        self._flat: dict[tuple[int, int], Tensor] = {}

    def keep(self, orders: Mapping[int, tuple[KeptOrder, ...]]) -> None:
        """Drop what is in no order of its part from now on."""
        self._orders = orders

    def kept_gt(self, parts: Iterable[int]) -> Tensor:
        """(g, t) bool: own rows without those that some parts drop at level 2, their nearest level
        that drops."""
        kept_gt = self.kv_tge.new_ones(self.kv_tge.shape[1::-1], dtype=torch.bool)
        for part in parts:
            for order in self._orders.get(part, ()):
                of_part = kept_gt[order.heads, self.parts[part].rows]
                of_part.zero_().scatter_(1, order.order_gk, True)
        return kept_gt

    def shape(self, kind: Kind, heads: slice, tokens: slice) -> tuple[int, int, int]:
        """Of what `gather` writes."""
        x_thd = self.q_thd if kind == "queries" else self.kv_tge
        return _length(tokens), _length(heads), x_thd.shape[2]

    def gather(self, kind: Kind, part: int, heads: slice, tokens: slice, out: Tensor) -> None:
        """Write (n, h, d) queries or (n, g, 2d) keys and values into `out`, which is contiguous."""
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

    def kept(self, part: int, block: HeadBlock, tokens: slice) -> Tensor | None:
        """(g, n) rows of the part that some query tokens are; None where they are the slice."""
        order = self.order("queries", part, block.queries)
        return None if order is None else order.of(block.keys, tokens)

    def order(self, kind: Kind, part: int, heads: slice) -> KeptOrder | None:
        """The order of a part's tokens for heads of one block."""
        if kind == "queries" and not self._drop_queries:
            return None
        kv_head = self.kv_heads(kind, heads).start
        for order in self._orders.get(part, ()):
            if order.heads.start <= kv_head < order.heads.stop:
                return order
        return None

    def kv_heads(self, kind: Kind, heads: slice) -> slice:
        """KV heads that some query heads read, or KV heads as they are."""
        if kind == "keys":
            return heads
        return slice(heads.start // self._group, (heads.stop - 1) // self._group + 1)

    def _flat_rows(self, part: int, order: KeptOrder) -> Tensor:
        """(k, g) rows of the own rows seen as (t * g, …): whole rows of one flat index are
        gathered several times faster than by `torch.gather`, element by element."""
        key = part, order.heads.start
        if key not in self._flat:
            heads, device = order.heads, order.order_gk.device
            kv_heads = torch.arange(heads.start, heads.stop, device=device)
            rows_kg = order.order_gk.T + self.parts[part].rows.start
            self._flat[key] = rows_kg * self.kv_tge.shape[1] + kv_heads
        return self._flat[key]


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _relative(inner: slice, outer: slice) -> slice:
    return slice(inner.start - outer.start, inner.stop - outer.start)
