"""The second all-to-all: outputs and LSEs back to the members whose tokens they are.

Levels and micro-partitions come back in the order in which they were computed, and are merged
into the running result by their LSE (CSPS Eq. 5, shifted by the maximum). A dropped query has no
row, which is the weight 0 of the paper. Outputs travel in the model's dtype, LSEs in fp32.

Shape suffixes: t own rows, n tokens, h query heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from csps.actors.csa.kept_rows import KeptRows
from csps.actors.csa.owned_level import Finished
from csps.actors.csa.routes import HeadBlock, SegmentRoutes
from csps.actors.mesh import Tag
from csps.actors.strategies.group import SpGroup
from csps.actors.transfers import Label, Transfer, Transfers
from csps.kernels.merge import merge_into


@dataclass
class RunningAttention:
    """What own rows have seen so far."""

    out_thd: Tensor
    """fp32, or fp64 for fp64 inputs."""
    lse_ht: Tensor


@dataclass(frozen=True)
class _Parcel:
    """Outputs of one owner for one part and micro-partition of a level."""

    routes: SegmentRoutes
    micro: int
    part: int
    owner: int

    @property
    def blocks(self) -> Iterator[tuple[HeadBlock, slice]]:
        """The owner's blocks, with the tokens that each has outputs for."""
        for block in self.routes.owner(self.owner).query_blocks:
            yield block, self.routes.tokens("queries", self.part, block.queries, self.micro)


class Returns:
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
        self._arriving: list[tuple[Transfer, list[tuple[_Parcel, Tensor]]]] = []
        self._finished: list[Finished] = []

    def send(self, done: Finished) -> None:
        """Start the return of a finished micro-partition."""
        routes, micro = done.routes, done.micro
        own, foreign = self._sorted_parts(routes)
        sends = [
            (self._group.peers[routes.routes.counts.parts[part].member], self._packed(done, part))
            for part in foreign
        ]
        parcels = [
            _Parcel(routes, micro, part, owner)
            for part in own
            for owner in routes.members
            if owner != self._group.member
        ]
        payloads = [(parcel, self._payload(parcel)) for parcel in parcels]
        recvs = [(self._group.peers[parcel.owner], payload) for parcel, payload in payloads]
        label = Label(phase="second all-to-all", layer=self._layer, level=routes.level, micro=micro)
        transfer = self._transfers.start(sends, recvs, Tag.SECOND_EXCHANGE, label)
        self._arriving.append((transfer, payloads))
        self._finished.append(done)

    def merge_all(self, running: RunningAttention) -> None:
        """Merge own outputs, wait for everything on its way, in order, and merge that."""
        timeline = self._transfers.timeline
        with timeline.phase("merge", layer=self._layer):
            for done in self._finished:
                for part in self._sorted_parts(done.routes)[0]:
                    parcel = _Parcel(done.routes, done.micro, part, self._group.member)
                    self._merge(running, parcel, self._outputs(done, part))
        for transfer, payloads in self._arriving:
            self._transfers.wait(transfer)
            label = transfer.label
            with timeline.phase("merge", layer=label.layer, level=label.level, micro=label.micro):
                for parcel, payload in payloads:
                    self._merge(running, parcel, self._views(parcel, payload))

    def _sorted_parts(self, routes: SegmentRoutes) -> tuple[list[int], list[int]]:
        """Parts with outputs here: this member's own, and others'."""
        parts = routes.parts_of("queries")
        own = [part for part in parts if part in self._rows.parts]
        return own, [part for part in parts if part not in self._rows.parts]

    def _outputs(self, done: Finished, part: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(out (n, h, d), lse (h, n)) of a part, by block of this owner."""
        mine = done.routes.owner(self._group.member)
        for block, (out_nhd, lse_hn) in enumerate(zip(done.outs_nhd, done.lses_hn, strict=True)):
            rows = mine.query_rows(block, done.micro)[part]
            yield out_nhd[rows], lse_hn[:, rows]

    def _merge(
        self, running: RunningAttention, parcel: _Parcel, outputs: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        part = self._rows.parts[parcel.part]
        for (block, tokens), (out_nhd, lse_hn) in zip(parcel.blocks, outputs, strict=True):
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

    # --- one message per parcel ----------------------------------------------------------------

    def _packed(self, done: Finished, part: int) -> Tensor:
        parcel = _Parcel(done.routes, done.micro, part, self._group.member)
        payload = self._payload(parcel)
        views = self._views(parcel, payload)
        for (out, lse), (out_nhd, lse_hn) in zip(views, self._outputs(done, part), strict=True):
            out.copy_(out_nhd)
            lse.copy_(lse_hn)
        return payload

    def _payload(self, parcel: _Parcel) -> Tensor:
        """Room for the bytes of a parcel."""
        size = sum(sum(self._sizes(block, tokens)) for block, tokens in parcel.blocks)
        return torch.empty(size, dtype=torch.uint8, device=self._rows.q_thd.device)

    def _views(self, parcel: _Parcel, payload: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(out (n, h, d), lse (h, n)) of each block of a payload."""
        q_thd, begin = self._rows.q_thd, 0
        for block, tokens in parcel.blocks:
            lse_bytes, out_bytes = self._sizes(block, tokens)
            middle, end = begin + lse_bytes, begin + lse_bytes + out_bytes
            heads, count = block.queries.stop - block.queries.start, tokens.stop - tokens.start
            lse_hn = payload[begin:middle].view(self._lse_dtype).view(heads, count)
            out_nhd = payload[middle:end].view(q_thd.dtype).view(count, heads, q_thd.shape[2])
            yield out_nhd, lse_hn
            begin = end

    def _sizes(self, block: HeadBlock, tokens: slice) -> tuple[int, int]:
        """Bytes of LSEs and of outputs; LSEs come first, which keeps their fp32 aligned."""
        rows = (block.queries.stop - block.queries.start) * (tokens.stop - tokens.start)
        q_thd = self._rows.q_thd
        return rows * self._lse_dtype.itemsize, rows * q_thd.shape[2] * q_thd.itemsize
