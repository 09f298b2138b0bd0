"""Ring pass-Q: queries rotate, keys and values do not move (CP Alg. 3).

    q of own rows  --> the next member, N - 1 times
    attention of each shard of queries to own new keys and history, while the next is on its way
    (out, LSE) of others' rows  --all-to-all--> their members, merged there

Positions are not sent, because they follow from the step. A member sends no answer for queries that
see none of its keys. History needs no exchange of its own, because the queries pass its holders.

Partial results are fp32 until the end. Answers contain outputs in the model's dtype and LSEs in
fp32. Under tensor parallelism, the ranks of equal tp rank form a ring, each with its query heads.

Shape suffixes: t rows, n rows that see something, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import torch
from torch import Tensor

from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.base.history import ResidentHistory
from csps.actors.attention.base.strategy import (
    OverlappingStrategy,
    ProjectedAttention,
    Sinks,
    StoreKv,
    no_sinks,
)
from csps.actors.attention.ring.ring import RingAttention, Rounds, padded
from csps.actors.attention.ring.ring_plan import RingBlock, RingPlan, with_history
from csps.actors.comm.mesh import Tag
from csps.actors.comm.transfers import Label
from csps.actors.kv_cache.kv_pool import KvPool
from csps.kernels.merge import merge_into, merge_sink, nothing_seen

PartialOutput = tuple[Tensor, Tensor]
"""Output (t, h, d) and LSE (h, t)."""


class RingQ(ProjectedAttention, OverlappingStrategy):
    """Exact attention of one step on one rank; entered for the duration of the step."""

    def __init__(
        self, group: SpGroup, pool: KvPool, *, scale: float, sinks: Sinks = no_sinks
    ) -> None:
        super().__init__(group)
        self._group, self._sinks = group, sinks
        self._plan = RingPlan(group.step, with_history(group.step))
        self._attention = RingAttention(group, self._plan, scale)
        self._resident = ResidentHistory(group, pool)

    def offered(self, layer: int, member: int) -> Collection[int]:
        """See `Strategy`. Keys and values do not move."""
        return ()

    def attend(
        self, layer: int, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, store: StoreKv
    ) -> Tensor:
        """See `ProjectedAttention`."""
        own, plan = self._group.member, self._plan
        keys = partial(self._keys, layer, k_thd, v_thd)
        partials: dict[int, PartialOutput] = {}
        shard = padded(q_thd, plan.longest_rows)
        for source, q_shard in Rounds(self._group, self._transfers, layer, shard):
            q_source = q_shard[: plan.rows_of(source)]
            partials[source] = nothing_seen(q_source)
            self._attention.attend(layer, source, own, q_source, keys, *partials[source])
        out_thd, lse_ht = partials.pop(own)
        self._merge_answers(layer, partials, q_thd, out_thd, lse_ht)
        if (sinks_h := self._sinks(layer)) is not None:
            merge_sink(out_thd, lse_ht, sinks_h)
        return out_thd.to(q_thd.dtype)

    def _keys(
        self, layer: int, k_thd: Tensor, v_thd: Tensor, chunk: int, block: RingBlock
    ) -> tuple[Tensor, Tensor]:
        if not block.history:
            return k_thd[block.keys], v_thd[block.keys]
        return self._resident.keys(layer, self._group.step.chunks[chunk])

    # --- answers -------------------------------------------------------------------------------

    def _merge_answers(
        self,
        layer: int,
        partials: dict[int, PartialOutput],
        q_thd: Tensor,
        out_thd: Tensor,
        lse_ht: Tensor,
    ) -> None:
        """Send others their partial results; merge those of own rows into the running result."""
        peers, own = self._group.peers, self._group.member
        sends = [
            (peers[asker], self._pack(asker, q_thd, *part)) for asker, part in partials.items()
        ]
        payloads = {holder: self._payload(own, holder, q_thd) for holder in self._group.others}
        transfer = self._transfers.start(
            sends,
            [(peers[holder], payload) for holder, payload in payloads.items()],
            Tag.SECOND_EXCHANGE,
            Label(phase="second all-to-all", layer=layer),
        )
        self._transfers.wait(transfer)
        with self._group.clock.timeline.phase("merge", layer=layer):
            for holder, payload in payloads.items():
                for rows, out_nhd, lse_hn in self._views(own, holder, payload, q_thd):
                    merge_into(out_thd[rows], lse_ht[:, rows], out_nhd, lse_hn)

    def _rows(self, asker: int, holder: int) -> list[slice]:
        """Return the asker's rows for which the holder has an answer.

        All members leave out the same cancelled chunks.
        """
        chunks = self._group.step.chunks
        return [
            rows
            for index, slices in self._plan.answered(asker, holder).items()
            for rows in slices
            if self._group.is_active(chunks[index])
        ]

    def _pack(self, asker: int, q_thd: Tensor, out_thd: Tensor, lse_ht: Tensor) -> Tensor:
        payload = self._payload(asker, self._group.member, q_thd)
        for rows, out_nhd, lse_hn in self._views(asker, self._group.member, payload, q_thd):
            out_nhd.copy_(out_thd[rows])
            lse_hn.copy_(lse_ht[:, rows])
        return payload

    def _payload(self, asker: int, holder: int, q_thd: Tensor) -> Tensor:
        """Allocate the bytes of the holder's answers to the asker."""
        rows = sum(row.stop - row.start for row in self._rows(asker, holder))
        lse_bytes, out_bytes = _bytes_of_a_row(q_thd)
        return torch.empty(rows * (lse_bytes + out_bytes), dtype=torch.uint8, device=q_thd.device)

    def _views(
        self, asker: int, holder: int, payload: Tensor, q_thd: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (rows, out (n, h, d), lse (h, n)), views of a payload."""
        answered = self._rows(asker, holder)
        heads, dim = q_thd.shape[1:]
        lse_bytes, _ = _bytes_of_a_row(q_thd)
        total = sum(rows.stop - rows.start for rows in answered)
        # All LSEs come first, which keeps them aligned.
        lses = payload[: total * lse_bytes].view(_lse_dtype(q_thd)).view(-1)
        outs_nhd = payload[total * lse_bytes :].view(q_thd.dtype).view(total, heads, dim)
        begin = 0
        for rows in answered:
            end = begin + rows.stop - rows.start
            lse_hn = lses[begin * heads : end * heads].view(heads, end - begin)
            yield rows, outs_nhd[begin:end], lse_hn
            begin = end


def _lse_dtype(q_thd: Tensor) -> torch.dtype:
    return torch.promote_types(q_thd.dtype, torch.float32)


def _bytes_of_a_row(q_thd: Tensor) -> tuple[int, int]:
    """Return the bytes of a row's LSEs and of its outputs, all heads."""
    heads, dim = q_thd.shape[1:]
    return heads * _lse_dtype(q_thd).itemsize, heads * dim * q_thd.itemsize
