"""The running result of own rows: the second all-to-all, and attention of own rows to each other.

Outputs and LSEs return to the members of the tokens (output all-to-all), level by level and
micro-partition by micro-partition as they are computed. They are merged by LSE into the running
result (CSPS Eq. 5, shifted by the maximum). A dropped query has no row, which is weight 0 in the
paper. Outputs are sent in the model's dtype, LSEs in fp32.

Shape suffixes: t own rows, n tokens, k kept tokens, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.base.levels import LevelPart
from csps.actors.attention.csa.kept_rows import KeptRows
from csps.actors.attention.csa.level_attention import FinishedQueries
from csps.actors.attention.csa.routes import Kind, OwnedHeads, Routes, SegmentRoutes
from csps.actors.comm.mesh import Tag
from csps.actors.comm.transfers import Label, PendingTransfer, Transfers
from csps.kernels.attention import attention
from csps.kernels.merge import merge_into, nothing_seen
from csps.protocols.core.placement import even_share


@dataclass
class RunningAttention:
    """Attention of own rows over the keys seen so far."""

    out_thd: Tensor
    """Output, fp32, or fp64 for fp64 inputs."""
    lse_ht: Tensor


@dataclass(frozen=True)
class _OutputSlice:
    """Outputs of one owner for one part and micro-partition of a level."""

    routes: SegmentRoutes
    micro: int
    part: int
    owner: int

    @property
    def blocks(self) -> Iterator[tuple[OwnedHeads, slice]]:
        """Blocks of the owner, with the tokens for which each has outputs."""
        for block in self.routes.owner(self.owner).query_blocks:
            yield block, self.routes.tokens("queries", self.part, block.queries, self.micro)


class OutputAllToAll:
    """The second all-to-all of one layer on one member."""

    def __init__(
        self,
        group: SpGroup,
        rows: KeptRows,
        transfers: Transfers,
        *,
        layer: int,
    ) -> None:
        self._group = group
        self._rows = rows
        self._transfers = transfers
        self._layer = layer
        self._lse_dtype = torch.promote_types(rows.q_thd.dtype, torch.float32)
        self._arriving: list[tuple[PendingTransfer, list[tuple[_OutputSlice, Tensor]]]] = []
        self._finished: list[FinishedQueries] = []

    def send(self, done: FinishedQueries) -> None:
        """Begin to send the outputs of a finished micro-partition, and to receive own ones."""
        routes, micro = done.routes, done.micro
        own, foreign = self._sorted_parts(routes)
        sends = [
            (self._group.peers[routes.routes.counts.parts[part].member], self._pack(done, part))
            for part in foreign
        ]
        send_slices = [
            _OutputSlice(routes, micro, part, owner)
            for part in own
            for owner in routes.members
            if owner != self._group.member
        ]
        payloads = [(send_slice, self._payload(send_slice)) for send_slice in send_slices]
        recvs = [(self._group.peers[send_slice.owner], payload) for send_slice, payload in payloads]
        label = Label(phase="second all-to-all", layer=self._layer, level=routes.level, micro=micro)
        transfer = self._transfers.start(sends, recvs, Tag.SECOND_EXCHANGE, label)
        self._arriving.append((transfer, payloads))
        self._finished.append(done)

    def merge_all(self, running: RunningAttention) -> None:
        """Merge the outputs computed here, then those of other owners as they arrive, in order."""
        timeline = self._transfers.timeline
        with timeline.phase("merge", layer=self._layer):
            for done in self._finished:
                for part in self._sorted_parts(done.routes)[0]:
                    send_slice = _OutputSlice(done.routes, done.micro, part, self._group.member)
                    self._merge(running, send_slice, self._outputs(done, part))
        for transfer, payloads in self._arriving:
            self._transfers.wait(transfer)
            label = transfer.label
            with timeline.phase("merge", layer=label.layer, level=label.level, micro=label.micro):
                for send_slice, payload in payloads:
                    self._merge(running, send_slice, self._views(send_slice, payload))

    def _sorted_parts(self, routes: SegmentRoutes) -> tuple[list[int], list[int]]:
        """Return the parts with outputs here: own parts, and parts of others."""
        parts = routes.parts_of("queries")
        own = [part for part in parts if part in self._rows.parts]
        return own, [part for part in parts if part not in self._rows.parts]

    def _outputs(self, done: FinishedQueries, part: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (out (n, h, d), lse (h, n)) of a part, by block of this owner."""
        mine = done.routes.owner(self._group.member)
        for block, (out_nhd, lse_hn) in enumerate(zip(done.outs_nhd, done.lses_hn, strict=True)):
            rows = mine.query_rows(block, done.micro)[part]
            yield out_nhd[rows], lse_hn[:, rows]

    def _merge(
        self,
        running: RunningAttention,
        send_slice: _OutputSlice,
        outputs: Iterable[tuple[Tensor, Tensor]],
    ) -> None:
        part = self._rows.parts[send_slice.part]
        for (block, tokens), (out_nhd, lse_hn) in zip(send_slice.blocks, outputs, strict=True):
            kept_gn = self._rows.kept(part.index, block, tokens)
            rows = part.rows
            if kept_gn is None:
                rows = slice(rows.start + tokens.start, rows.start + tokens.stop)
            merge_into(
                running.out_thd[rows, block.queries],
                running.lse_ht[block.queries, rows],
                out_nhd.to(running.out_thd.dtype),
                lse_hn,
                kept_gn,
            )

    # --- one message per output slice ----------------------------------------------------------

    def _pack(self, done: FinishedQueries, part: int) -> Tensor:
        send_slice = _OutputSlice(done.routes, done.micro, part, self._group.member)
        payload = self._payload(send_slice)
        views = self._views(send_slice, payload)
        for (out, lse), (out_nhd, lse_hn) in zip(views, self._outputs(done, part), strict=True):
            out.copy_(out_nhd)
            lse.copy_(lse_hn)
        return payload

    def _payload(self, send_slice: _OutputSlice) -> Tensor:
        """Allocate the bytes of an output slice."""
        size = sum(sum(self._sizes(block, tokens)) for block, tokens in send_slice.blocks)
        return torch.empty(size, dtype=torch.uint8, device=self._rows.q_thd.device)

    def _views(self, send_slice: _OutputSlice, payload: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views (out (n, h, d), lse (h, n)) of each block of a payload."""
        q_thd, begin = self._rows.q_thd, 0
        for block, tokens in send_slice.blocks:
            lse_bytes, out_bytes = self._sizes(block, tokens)
            middle, end = begin + lse_bytes, begin + lse_bytes + out_bytes
            heads, count = block.queries.stop - block.queries.start, tokens.stop - tokens.start
            lse_hn = payload[begin:middle].view(self._lse_dtype).view(heads, count)
            out_nhd = payload[middle:end].view(q_thd.dtype).view(count, heads, q_thd.shape[2])
            yield out_nhd, lse_hn
            begin = end

    def _sizes(self, block: OwnedHeads, tokens: slice) -> tuple[int, int]:
        """Return the bytes of LSEs and of outputs."""
        # LSEs come first in a payload, which keeps them aligned.
        rows = (block.queries.stop - block.queries.start) * (tokens.stop - tokens.start)
        q_thd = self._rows.q_thd
        return rows * self._lse_dtype.itemsize, rows * q_thd.shape[2] * q_thd.itemsize


class OwnRows:
    """Causal attention inside each local chunk, without those that are exchanged at level 1.

    It needs no other member, so a member computes it whenever it would wait, by micro-partitions
    of the queries. The first ones have few keys and are short.
    """

    def __init__(
        self,
        q_thd: Tensor,
        k_thd: Tensor,
        v_thd: Tensor,
        *,
        chunks: Sequence[slice],
        micro_partitions: int,
        scale: float,
    ) -> None:
        self._q_thd, self._k_thd, self._v_thd = q_thd, k_thd, v_thd
        self._scale = scale
        self._whole = list(chunks) == [slice(0, len(q_thd))] and micro_partitions == 1
        self._running = None if self._whole else RunningAttention(*nothing_seen(q_thd))
        self._cuts = [
            [(rows, even_share(rows.stop - rows.start, micro_partitions, micro)) for rows in chunks]
            for micro in range(micro_partitions)
        ]
        self.done = 0
        """Number of micro-partitions that are computed."""

    @property
    def left(self) -> int:
        """Number of micro-partitions that remain."""
        return len(self._cuts) - self.done

    @property
    def running(self) -> RunningAttention:
        """Outputs and LSEs so far; rows that are not computed have LSE -inf."""
        if self._running is None:
            self._running = RunningAttention(*nothing_seen(self._q_thd))
        return self._running

    def attend_next(self) -> None:
        """Compute one micro-partition."""
        for rows, part in self._cuts[self.done]:
            queries = slice(rows.start + part.start, rows.start + part.stop)
            keys = slice(rows.start, queries.stop)
            out_thd, lse_ht = attention(
                self._q_thd[queries],
                self._k_thd[keys],
                self._v_thd[keys],
                q_positions=part,
                k_positions=range(part.stop),
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
    """Attend own kept rows to each other once more at each farther level (nested levels)."""
    # Head by head, which is slow: nested levels serve for comparison only.
    for part in rows.parts.values():
        for level in range(2, len(routes.geometry.levels) + 1):
            for head in range(routes.kv_heads):
                _attend_kept(running, rows, routes, part, level, head, scale)


def _attend_kept(
    running: RunningAttention,
    rows: KeptRows,
    routes: Routes,
    part: LevelPart,
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
    rows: KeptRows, routes: Routes, part: LevelPart, level: int, kind: Kind, heads: slice
) -> Tensor:
    """Return the own rows (k,) of a part's kept tokens at a level, for heads of one KV head."""
    begin = int(part.rows.start)
    count = routes.segment(level, part.member).count(kind, part.index, heads)
    order = rows.order(kind, part.index, heads)
    if order is None:
        return torch.arange(begin, begin + count, device=rows.q_thd.device)
    return order.of(rows.kv_heads(kind, heads), slice(0, count))[0].add(begin)
