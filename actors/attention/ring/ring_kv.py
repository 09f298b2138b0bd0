"""Ring pass-KV: keys and values go round, queries stay (CP Alg. 2; LoongServe §4.1; Tetris §4.2).

    k, v of own rows, and of history that goes round  --> the next member, N - 1 times
    attention of own queries to each share while the next one is on its way
    running output and LSE of own rows, fp32

Every member sees the keys and values of all rows, so whoever is to keep them takes them as they
come by: a placement of any kind costs no further message (LoongServe's proactive scale-down), and
no more memory than the shares of one layer that are under way.

History goes round with the new keys and values, as in the paper, where that moves less. Where a
chunk is much shorter than its history, queries, and outputs in return, are fewer bytes than keys
and values (CP Eq. 1), so there the holders are asked as under every strategy (`history`). It is
decided piece by piece, as a batch may have both, and by numbers alone: both ways lie beside the
computing, one behind the ring's attention, the other behind that of the history itself.

Under tensor parallelism ranks of equal place in their instances form a ring of their own, each
with its query heads and the KV heads that those read; KV heads go round more than once where there
are fewer of them than ranks.

Shape suffixes: t rows, k keys, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from torch import Tensor

from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.base.history import (
    History,
    HistoryMember,
    ResidentHistory,
    members_of,
    through,
)
from csps.actors.attention.base.strategy import StoreKv, WithTransfers, attended_layer
from csps.actors.attention.ring.ring import RingAttention, Rounds
from csps.actors.attention.ring.ring_plan import RingBlock, RingPlan, going_round
from csps.actors.kv_cache.kv_pool import KvPool
from csps.kernels.merge import nothing_seen
from csps.models.network.network import Layer
from csps.models.network.rope import Rotary


class RingKv(WithTransfers):
    """Exact attention of one job; one object per job and rank, entered for the job's duration."""

    def __init__(
        self, group: SpGroup, pool: KvPool, *, heads: int, kv_heads: int, scale: float
    ) -> None:
        super().__init__(group)
        self._group = group
        self._heads, self._kv_heads = heads, kv_heads
        sequence_ids = going_round(group.step, heads=heads, kv_heads=kv_heads, dim=pool.head_dim)
        self._plan = RingPlan(group.step, sequence_ids)
        self._attention = RingAttention(group, self._plan, scale)
        self._resident = ResidentHistory(group, pool)
        self._history = History(
            group,
            pool,
            self._members(),
            group_heads=heads // kv_heads,
            scale=scale,
            begin=through(self._transfers),
            asks=lambda chunk: chunk.sequence_id not in sequence_ids,
        )

    def offered(self, layer: int, member: int) -> Collection[int]:
        """See `Strategy`: everyone's rows come by everyone."""
        return [other for other in range(self._group.size) if other != member]

    def attend_layer(
        self, index: int, layer: Layer, x_td: Tensor, rotary: Rotary, store: StoreKv
    ) -> Tensor:
        """The residual stream of own rows (t, hidden) after the layer's attention."""
        return attended_layer(self._group, index, layer, x_td, rotary, store, self.attend)

    def attend(
        self, layer: int, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, store: StoreKv
    ) -> Tensor:
        """Attention output (t, h, d) of this member's rows, in q's dtype."""
        asked = self._history.ask(layer, q_thd)
        rounds = Rounds(self._group, self._transfers, layer, self._share(layer, k_thd, v_thd))
        asked.answer()
        out_thd, lse_ht = nothing_seen(q_thd)
        for source, share in rounds:
            rows = self._plan.rows_of(source)
            if source != self._group.member:
                store(layer, share[0, :rows], share[1, :rows], member=source)
            keys = partial(self._keys, share, source)
            own = self._group.member
            self._attention.attend(layer, own, source, q_thd, keys, out_thd, lse_ht)
        asked.merge_into(out_thd, lse_ht)
        return out_thd.to(q_thd.dtype)

    def _share(self, layer: int, k_thd: Tensor, v_thd: Tensor) -> Tensor:
        """(2, longest share, g, d): keys and values of own rows, then of history that goes round,
        piece by piece."""
        share = k_thd.new_empty(2, self._plan.longest_share, *k_thd.shape[1:])
        kv = [(k_thd, v_thd)]
        chunks = self._group.step.chunks
        kv += [
            self._resident.keys(layer, chunks[index])
            for index in self._plan.history[self._group.member]
        ]
        end = 0
        for keys, values in kv:
            begin, end = end, end + len(keys)
            share[0, begin:end] = keys
            share[1, begin:end] = values
        return share

    def _keys(
        self, share: Tensor, source: int, chunk: int, block: RingBlock
    ) -> tuple[Tensor, Tensor]:
        """What a block attends to, out of a member's share."""
        begin = 0
        if block.history:
            history = self._plan.history[source]
            before = (tokens for index, tokens in history.items() if index < chunk)
            begin = self._plan.rows_of(source) + sum(before)
        keys = slice(begin + block.keys.start, begin + block.keys.stop)
        return share[0, keys], share[1, keys]

    def _members(self) -> list[HistoryMember]:
        return members_of(
            self._group,
            rows=self._plan.chunk_rows,
            heads=lambda member: range(self._heads),
            resident=range(self._kv_heads),
        )
