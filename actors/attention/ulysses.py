"""SP-NTP, exact: all-to-all over heads, attention, all-to-all back (CSPS §3.2.1; Ulysses).

    q, k, v of own rows, all heads  --first exchange-->  all rows, own heads
    attention over whole sequences, in blocks of queries with yield points between them
    outputs of all rows, own heads  --second exchange--> own rows, all heads

Between the exchanges, members ask for history with all rows of own heads.

Shape suffixes: t rows of this member, T rows of the batch, h heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Collection
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from csps.actors.attention.base.group import HeadSplit, SpGroup
from csps.actors.attention.base.history import History, Messages, WaitExchange, members_by_heads
from csps.actors.attention.base.strategy import ProjectedAttention, Sinks, StoreKv, no_sinks
from csps.actors.attention.base.yield_points import query_blocks
from csps.actors.comm.mesh import Tag
from csps.actors.comm.process_group import Pending
from csps.actors.comm.transfers import Label
from csps.actors.kv_cache.kv_pool import KvPool
from csps.kernels.attention import attention
from csps.kernels.merge import merge_sink, nothing_seen
from csps.protocols.gang.step_messages import PrefillChunk


class Ulysses(ProjectedAttention):
    """Exact sequence-parallel attention of one step on one rank.

    Entered for the duration of the step. A step may be stopped during an exchange, which all
    members have begun by then; leaving the context waits for it.
    """

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
        self._group = group
        self._split = HeadSplit(heads=heads, kv_heads=kv_heads, parts=group.size)
        self._scale, self._sinks = scale, sinks
        self._under_way: list[Pending] = []
        self._history = History(
            group,
            pool,
            members_by_heads(group, self._split),
            group_heads=heads // kv_heads,
            scale=scale,
            begin=self._begin,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            Pending.all(self._under_way).wait()

    def offered(self, layer: int, member: int) -> Collection[int]:
        """See `Strategy`. Other members are offered only to a member that has all KV heads."""
        if self._split.key_count(member) < self._split.kv_heads:
            return ()
        return [other for other in range(self._group.size) if other != member]

    def attend(
        self, layer: int, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, store: StoreKv
    ) -> Tensor:
        """See `ProjectedAttention`."""
        if self._group.size == 1:
            batch = map(self._group.in_batch_order, (q_thd, k_thd, v_thd))
            return self._group.in_member_order(self._batch_attention(layer, *batch))
        timeline = self._group.clock.timeline
        rows, first = self._first_exchange(q_thd, k_thd, v_thd)
        with self._group.clock.communicating(), timeline.phase("first all-to-all", layer=layer):
            first.wait()
        for member in self.offered(layer, self._group.member):
            _, k_nhd, v_nhd = self._parts(rows[self._group.rows_of(member)])
            store(layer, k_nhd, v_nhd, member=member)
        parts = self._parts(self._group.in_batch_order(rows))
        out_thd = self._group.in_member_order(self._batch_attention(layer, *parts))
        with timeline.phase("second all-to-all", layer=layer):
            return self._second_exchange(out_thd, q_thd)

    def _first_exchange(
        self, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor
    ) -> tuple[Tensor, Pending]:
        """Begin to gather all rows of own heads, (T, q heads + 2 KV heads, d), in member order."""
        group, own = self._group, self._group.member
        gathered = q_thd.new_empty(group.total_rows, self._width(own), q_thd.shape[-1])
        sends = [
            (group.peers[member], self._pack(member, q_thd, k_thd, v_thd))
            for member in group.others
        ]
        recvs = [(group.peers[member], gathered[group.rows_of(member)]) for member in group.others]
        pending = group.mesh.exchange(sends, recvs, Tag.FIRST_EXCHANGE)
        gathered[group.rows_of(own)] = self._pack(own, q_thd, k_thd, v_thd)
        return gathered, pending

    def _pack(self, member: int, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor) -> Tensor:
        queries, keys = self._split.queries(member), self._split.keys(member)
        return torch.cat((q_thd[:, queries], k_thd[:, keys], v_thd[:, keys]), dim=1)

    def _width(self, member: int) -> int:
        return self._split.query_count(member) + 2 * self._split.key_count(member)

    def _begin(self, sends: Messages, recvs: Messages, tag: Tag, label: Label) -> WaitExchange:
        """Begin an exchange whose wait counts as communication, like the all-to-alls."""
        clock, pending = self._group.clock, self._group.mesh.exchange(sends, recvs, tag)
        self._under_way.append(pending)

        def wait() -> None:
            with clock.communicating(), clock.timeline.phase(label.phase, layer=label.layer):
                pending.wait()
            self._under_way.remove(pending)

        return wait

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the rows that the first exchange gathered into queries, keys and values."""
        heads = self._split.query_count(self._group.member)
        kv_heads = self._split.key_count(self._group.member)
        q_thd, k_thd, v_thd = torch.split(rows, [heads, kv_heads, kv_heads], dim=1)
        return q_thd, k_thd, v_thd

    def _batch_attention(self, layer: int, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor) -> Tensor:
        """Return the outputs of all rows and own heads (T, h, d), in q's dtype.

        Rows of a cancelled chunk get zeros, on which the following layers can compute.
        """
        asked = self._history.ask(layer, q_thd)
        asked.answer()
        out_thd, lse_ht = nothing_seen(q_thd)
        begin = 0
        for chunk in self._group.step.chunks:
            rows = slice(begin, begin + chunk.length)
            begin += chunk.length
            if self._group.is_active(chunk):
                own = q_thd[rows], k_thd[rows], v_thd[rows]
                self._attend_chunk(layer, chunk, *own, out_thd[rows], lse_ht[:, rows])
        asked.merge_into(out_thd, lse_ht)
        if (sinks_h := self._sinks(layer)) is not None:
            merge_sink(out_thd, lse_ht, sinks_h[self._split.queries(self._group.member)])
        self._group.points.close()
        return out_thd.to(q_thd.dtype)

    def _attend_chunk(
        self,
        layer: int,
        chunk: PrefillChunk,
        q_thd: Tensor,
        k_thd: Tensor,
        v_thd: Tensor,
        out_thd: Tensor,
        lse_ht: Tensor,
    ) -> None:
        """Attend a chunk's rows to each other, block by block, into `out_thd` and `lse_ht`."""
        positions = range(chunk.length)
        for rows in query_blocks(q_thd, len(k_thd)):
            with self._group.clock.timeline.phase("attention", layer=layer):
                for queries, keys in self._split.uniform_runs(self._group.member):
                    out_thd[rows, queries], lse_ht[queries, rows] = attention(
                        q_thd[rows, queries],
                        k_thd[:, keys],
                        v_thd[:, keys],
                        q_positions=positions[rows],
                        k_positions=positions,
                        scale=self._scale,
                    )
            self._group.points.point()

    def _second_exchange(self, out_thd: Tensor, q_thd: Tensor) -> Tensor:
        """Exchange all rows of own heads for own rows of all heads."""
        group = self._group
        parts = [
            out_thd[group.rows_of(group.member)]
            if member == group.member
            else q_thd.new_empty(q_thd.shape[0], self._split.query_count(member), q_thd.shape[-1])
            for member in range(group.size)
        ]
        sends = [(group.peers[m], out_thd[group.rows_of(m)].contiguous()) for m in group.others]
        recvs = [(group.peers[m], parts[m]) for m in group.others]
        with group.clock.communicating():
            group.mesh.exchange(sends, recvs, Tag.SECOND_EXCHANGE).wait()
        return torch.cat(parts, dim=1)
