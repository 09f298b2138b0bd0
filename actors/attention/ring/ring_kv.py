"""Ring pass-KV: keys and values rotate (CP Alg. 2; LoongServe §4.1; Tetris §4.2).

    k, v of own rows, and of history that rotates  --> the next member, N - 1 times
    attention of own queries to each shard while the next one is on its way
    running output and LSE of own rows, fp32

Every member sees the KV of all rows, so each KV holder stores it as it passes. Any placement costs
no further message (LoongServe's proactive scale-down) and no memory beyond one layer's shards.

The history of a chunk rotates with the new KV, as in the paper, if that moves fewer bytes. If the
chunk is much shorter than its history, queries and outputs are fewer bytes (CP Eq. 1), and members
ask the holders as in other strategies (`history`). Computing hides both ways.

Under tensor parallelism, the ranks of equal tp rank form a ring, each with its query heads and the
KV heads that these read. If there are fewer KV heads than ranks, they rotate in several rings.

Shape suffixes: t rows, k keys, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial

from torch import Tensor

from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.base.history import (
    History,
    HistoryMember,
    ResidentHistory,
    members_of,
    overlapping,
)
from csps.actors.attention.base.strategy import (
    OverlappingStrategy,
    ProjectedAttention,
    Sinks,
    StoreKv,
    no_sinks,
)
from csps.actors.attention.ring.ring import RingAttention, Rounds
from csps.actors.attention.ring.ring_plan import RingBlock, RingPlan, rotating_history
from csps.actors.kv_cache.kv_pool import KvPool
from csps.kernels.merge import merge_sink, nothing_seen

_log = logging.getLogger(__name__)


class RingKv(ProjectedAttention, OverlappingStrategy):
    """Exact attention of one step on one rank; entered for the duration of the step."""

    def __init__(
        self,
        group: SpGroup,
        pool: KvPool,
        *,
        heads: int,
        kv_heads: int,
        scale: float,
        sinks: Sinks = no_sinks,
    ) -> None:
        super().__init__(group)
        self._group, self._sinks = group, sinks
        self._heads, self._kv_heads = heads, kv_heads
        sequence_ids = rotating_history(
            group.step, heads=heads, kv_heads=kv_heads, dim=pool.head_dim
        )
        if sequence_ids:
            _log.debug(
                "step %d: history of sequences %s rotates",
                group.step.step_id,
                sorted(sequence_ids),
            )
        self._plan = RingPlan(group.step, sequence_ids)
        self._attention = RingAttention(group, self._plan, scale)
        self._resident = ResidentHistory(group, pool)
        self._history = History(
            group,
            pool,
            self._members(),
            group_heads=heads // kv_heads,
            scale=scale,
            begin=overlapping(self._transfers),
            asks=lambda chunk: chunk.sequence_id not in sequence_ids,
        )

    def offered(self, layer: int, member: int) -> Collection[int]:
        """See `Strategy`. The KV of all members passes every member."""
        return [other for other in range(self._group.size) if other != member]

    def attend(
        self, layer: int, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, store: StoreKv
    ) -> Tensor:
        """See `ProjectedAttention`."""
        asked = self._history.ask(layer, q_thd)
        rounds = Rounds(self._group, self._transfers, layer, self._shard(layer, k_thd, v_thd))
        asked.answer()
        out_thd, lse_ht = nothing_seen(q_thd)
        for source, shard in rounds:
            rows = self._plan.rows_of(source)
            if source != self._group.member:
                store(layer, shard[0, :rows], shard[1, :rows], member=source)
            keys = partial(self._keys, shard, source)
            own = self._group.member
            self._attention.attend(layer, own, source, q_thd, keys, out_thd, lse_ht)
        asked.merge_into(out_thd, lse_ht)
        if (sinks_h := self._sinks(layer)) is not None:
            merge_sink(out_thd, lse_ht, sinks_h)
        return out_thd.to(q_thd.dtype)

    def _shard(self, layer: int, k_thd: Tensor, v_thd: Tensor) -> Tensor:
        """Return k and v of own rows, then of rotating history, (2, longest shard, g, d)."""
        shard = k_thd.new_empty(2, self._plan.longest_shard, *k_thd.shape[1:])
        end = len(k_thd)
        shard[0, :end], shard[1, :end] = k_thd, v_thd
        for index, tokens in self._plan.history[self._group.member].items():
            begin, end = end, end + tokens
            chunk = self._group.step.chunks[index]
            if self._group.is_active(chunk):  # history of a cancelled sequence may be gone
                shard[0, begin:end], shard[1, begin:end] = self._resident.keys(layer, chunk)
        return shard

    def _keys(
        self, shard: Tensor, source: int, chunk: int, block: RingBlock
    ) -> tuple[Tensor, Tensor]:
        """Return k and v of a block from the shard of a member."""
        begin = 0
        if block.history:
            history = self._plan.history[source]
            before = (tokens for index, tokens in history.items() if index < chunk)
            begin = self._plan.rows_of(source) + sum(before)
        keys = slice(begin + block.keys.start, begin + block.keys.stop)
        return shard[0, keys], shard[1, keys]

    def _members(self) -> list[HistoryMember]:
        return members_of(
            self._group,
            rows=self._plan.chunk_rows,
            heads=lambda member: range(self._heads),
            resident=range(self._kv_heads),
        )
