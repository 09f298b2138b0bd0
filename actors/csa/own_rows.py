"""Attention of own rows among themselves: level 1, and pieces that no other member shares.

Shape suffixes: t own rows, k kept tokens, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from csps.actors.csa.kept_rows import KeptRows
from csps.actors.csa.returns import RunningAttention
from csps.actors.csa.routes import Kind, Routes
from csps.actors.levels.geometry import Part
from csps.kernels.attention import attention
from csps.kernels.merge import merge_into, nothing_seen
from csps.protocols.even_share import even_share


class OwnRows:
    """Causal attention inside each local piece, but for those that are exchanged at level 1.

    It needs nobody, so it is what a member computes whenever it would wait: cut into
    micro-partitions of the queries, of which the first ones, with few keys, are short.
    """

    def __init__(
        self,
        q_thd: Tensor,
        k_thd: Tensor,
        v_thd: Tensor,
        *,
        pieces: Sequence[slice],
        micro_partitions: int,
        scale: float,
    ) -> None:
        self._q_thd, self._k_thd, self._v_thd = q_thd, k_thd, v_thd
        self._scale = scale
        self._whole = list(pieces) == [slice(0, len(q_thd))] and micro_partitions == 1
        self._running = None if self._whole else RunningAttention(*nothing_seen(q_thd))
        self._cuts = [
            [(rows, even_share(rows.stop - rows.start, micro_partitions, micro)) for rows in pieces]
            for micro in range(micro_partitions)
        ]
        self.done = 0
        """Micro-partitions that have been computed."""

    @property
    def left(self) -> int:
        """Micro-partitions to come."""
        return len(self._cuts) - self.done

    @property
    def running(self) -> RunningAttention:
        """Outputs and LSEs so far; what is not computed has LSE -inf."""
        if self._running is None:
            self._running = RunningAttention(*nothing_seen(self._q_thd))
        return self._running

    def attend_next(self) -> None:
        """Compute one micro-partition."""
        for rows, share in self._cuts[self.done]:
            queries = slice(rows.start + share.start, rows.start + share.stop)
            keys = slice(rows.start, queries.stop)
            out_thd, lse_ht = attention(
                self._q_thd[queries],
                self._k_thd[keys],
                self._v_thd[keys],
                q_positions=share,
                k_positions=range(share.stop),
                scale=self._scale,
            )
            if self._whole:
                self._running = RunningAttention(out_thd, lse_ht)
            else:
                self.running.out_thd[queries], self.running.lse_ht[:, queries] = out_thd, lse_ht
        self.done += 1


def attend_own_levels(
    running: RunningAttention, rows: KeptRows, routes: Routes, *, scale: float
) -> None:
    """The nested reading: at each farther level own kept rows see each other once more.

    For comparison only, so head by head.
    """
    for part in rows.parts.values():
        for level in range(2, len(routes.geometry.levels) + 1):
            for head in range(routes.kv_heads):
                _attend_kept(running, rows, routes, part, level, head, scale)


def _attend_kept(
    running: RunningAttention,
    rows: KeptRows,
    routes: Routes,
    part: Part,
    level: int,
    head: int,
    scale: float,
) -> None:
    queries = slice(head * routes.group, (head + 1) * routes.group)
    q_rows = _kept(rows, routes, part, level, "queries", queries)
    k_rows = _kept(rows, routes, part, level, "keys", slice(head, head + 1))
    k_kgd, v_kgd = rows.kv_tge[k_rows, head : head + 1].chunk(2, dim=-1)
    out_khd, lse_hk = attention(
        rows.q_thd[q_rows, queries],
        k_kgd,
        v_kgd,
        q_positions=q_rows,
        k_positions=k_rows,
        scale=scale,
    )
    merge_into(running.out_thd[:, queries], running.lse_ht[queries], out_khd, lse_hk, q_rows[None])


def _kept(
    rows: KeptRows, routes: Routes, part: Part, level: int, kind: Kind, heads: slice
) -> Tensor:
    """(k,) own rows of a part's kept tokens at a level, for heads of one KV head."""
    begin = int(part.rows.start)
    count = routes.segment(level, part.member).count(kind, part.index, heads)
    order = rows.order(kind, part.index, heads)
    if order is None:
        return torch.arange(begin, begin + count, device=rows.q_thd.device)
    return order.of(rows.kv_heads(kind, heads), slice(0, count))[0].add(begin)
