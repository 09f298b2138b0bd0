"""The heads that one member owns at one level: their first all-to-all and their attention.

Shape suffixes: n tokens, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from csps.actors.csa.kept_rows import KeptRows
from csps.actors.csa.routes import Parcel, Rectangle, SegmentRoutes, Step
from csps.actors.mesh import Tag
from csps.actors.strategies.group import SpGroup
from csps.actors.transfers import Label, Transfer, Transfers
from csps.kernels.attention import attention
from csps.kernels.merge import merge_into, nothing_seen


@dataclass(frozen=True)
class Finished:
    """One micro-partition of queries, whose attention at this level is complete."""

    routes: SegmentRoutes
    micro: int
    outs_nhd: tuple[Tensor, ...]
    """Per block of the owner, in the order of its query buffers."""
    lses_hn: tuple[Tensor, ...]


class OwnedLevel:
    """One level of one layer on one member."""

    def __init__(
        self,
        group: SpGroup,
        routes: SegmentRoutes,
        rows: KeptRows,
        *,
        layer: int,
        scale: float,
    ) -> None:
        self.routes = routes
        self._group = group
        self._mine = routes.owner(group.member)
        self._rows = rows
        self._layer = layer
        self._scale = scale
        self.keys = [self._key_buffer(block) for block in range(len(self._mine.key_blocks))]
        """Per key block (n, g, 2d), all micro-partitions."""
        self.queries = [self._query_buffers(micro) for micro in range(routes.micro_partitions)]
        """Per micro-partition and query block (n, h, d)."""
        self._transfers: dict[Step, Transfer] = {}
        self._partial: dict[int, tuple[Tensor, Tensor]] = {}

    # --- first all-to-all --------------------------------------------------------------------

    def begin(self, transfers: Transfers) -> None:
        """Start all of the first all-to-all; own rows are put in place at once."""
        for step in self.routes.steps:
            sends = [
                (self._group.peers[owner], self._gathered(parcel))
                for owner in self.routes.members
                if owner != self._group.member
                for parcel in self.routes.owner(owner).parcels(step)
                if parcel.part in self._rows.parts and parcel.reused_from is None
            ]
            arriving = [p for p in self._mine.parcels(step) if self._arrives(p)]
            recvs = [(self._peer_of(parcel), self._place(parcel, step)) for parcel in arriving]
            label = Label(
                phase="first all-to-all",
                layer=self._layer,
                level=self.routes.level,
                micro=step.micro,
            )
            self._transfers[step] = transfers.start(sends, recvs, Tag.FIRST_EXCHANGE, label)
            for parcel in self._mine.parcels(step):
                if parcel.part in self._rows.parts:
                    self._place(parcel, step).copy_(self._gathered(parcel))

    def _arrives(self, parcel: Parcel) -> bool:
        return parcel.part not in self._rows.parts and parcel.reused_from is None

    def _gathered(self, parcel: Parcel) -> Tensor:
        return self._rows.gather(parcel.kind, parcel.part, parcel.heads, parcel.tokens)

    def _place(self, parcel: Parcel, step: Step) -> Tensor:
        if parcel.kind == "keys":
            return self.keys[parcel.block][parcel.rows]
        return self.queries[step.micro][parcel.block][parcel.rows]

    def _peer_of(self, parcel: Parcel) -> int:
        return self._group.peers[self.routes.routes.counts.parts[parcel.part].member]

    # --- attention ---------------------------------------------------------------------------

    def compute(self, transfers: Transfers, nearer: Mapping[int, OwnedLevel]) -> Iterator[Finished]:
        """Attend as micro-partitions arrive; yields those of the queries as they are finished.

        Args:
            nearer: lower levels by number, whose data has all arrived.
        """
        for step in self.routes.steps:
            transfers.wait(self._transfers[step])
            self._take_reused(step, nearer)
            with transfers.timeline.phase(
                "attention", layer=self._layer, level=self.routes.level, micro=step.micro
            ):
                for rectangle in self._mine.rectangles(step):
                    self._attend(rectangle, step)
            if self._finishes(step):
                yield self._finished(step.query_micro)

    def _take_reused(self, step: Step, nearer: Mapping[int, OwnedLevel]) -> None:
        for parcel in self._mine.parcels(step):
            if parcel.reused_from is not None and parcel.part not in self._rows.parts:
                nearer[parcel.reused_from]._copy_into(self._place(parcel, step), parcel)

    def _copy_into(self, target: Tensor, parcel: Parcel) -> None:
        """Data that arrived for this level and a farther one needs as well."""
        for block, heads in enumerate(self._mine.heads(parcel.kind)):
            begin, end = max(heads.start, parcel.heads.start), min(heads.stop, parcel.heads.stop)
            if begin >= end:
                continue
            for buffer, rows, tokens in self._stored(parcel, block):
                into = slice(tokens.start - parcel.tokens.start, tokens.stop - parcel.tokens.start)
                target[into, begin - parcel.heads.start : end - parcel.heads.start] = buffer[
                    rows, begin - heads.start : end - heads.start
                ]

    def _stored(self, parcel: Parcel, block: int) -> Iterator[tuple[Tensor, slice, slice]]:
        """(buffer, its rows, their tokens) of a parcel's tokens in one block of this level."""
        if parcel.kind == "keys":
            begin = self._mine.key_rows[block][parcel.part].start
            rows = slice(begin + parcel.tokens.start, begin + parcel.tokens.stop)
            yield self.keys[block], rows, parcel.tokens
            return
        heads = self._mine.query_blocks[block].queries
        for micro, buffers in enumerate(self.queries):
            held = self.routes.tokens("queries", parcel.part, heads, micro)
            first, last = max(held.start, parcel.tokens.start), min(held.stop, parcel.tokens.stop)
            if first < last:
                begin = self._mine.query_rows(block, micro)[parcel.part].start - held.start
                yield buffers[block], slice(begin + first, begin + last), slice(first, last)

    def _attend(self, rectangle: Rectangle, step: Step) -> None:
        q_nhd = self.queries[step.query_micro][rectangle.block][rectangle.queries]
        k_ngd, v_ngd = self.keys_of(rectangle)
        sees = len(k_ngd)
        out_nhd, lse_hn = attention(
            q_nhd,
            k_ngd,
            v_ngd,
            q_positions=range(sees - len(q_nhd), sees) if rectangle.causal else None,
            k_positions=range(sees) if rectangle.causal else None,
            scale=self._scale,
        )
        rows, block = rectangle.queries, rectangle.block
        buffer = self.queries[step.query_micro][block]
        if len(q_nhd) == len(buffer) and block not in self._partial:
            self._partial[block] = out_nhd, lse_hn  # one call for all is common: no copy
            return
        if block not in self._partial:
            self._partial[block] = nothing_seen(buffer)
        out, lse = self._partial[block]
        merge_into(out[rows], lse[:, rows], out_nhd, lse_hn)

    def keys_of(self, rectangle: Rectangle) -> tuple[Tensor, Tensor]:
        """Keys and values (n, g, d) of a rectangle, for the KV heads of its block."""
        block = self._mine.query_blocks[rectangle.block]
        begin = self._mine.key_blocks[block.key_buffer].start
        heads = slice(block.keys.start - begin, block.keys.stop - begin)
        k_ngd, v_ngd = self.keys[block.key_buffer][rectangle.keys, heads].chunk(2, dim=-1)
        return k_ngd, v_ngd

    def _finishes(self, step: Step) -> bool:
        if step.kind == "queries":
            return step.micro > 0
        return step.micro == self.routes.micro_partitions - 1

    def _finished(self, micro: int) -> Finished:
        done = [
            self._partial[block] if block in self._partial else nothing_seen(buffer)
            for block, buffer in enumerate(self.queries[micro])
        ]
        self._partial.clear()
        outs, lses = tuple(out for out, _ in done), tuple(lse for _, lse in done)
        return Finished(self.routes, micro, outs, lses)

    # --- buffers -----------------------------------------------------------------------------

    def _key_buffer(self, block: int) -> Tensor:
        heads = self._mine.key_blocks[block]
        tokens = sum(rows.stop - rows.start for rows in self._mine.key_rows[block].values())
        return self._rows.kv_tge.new_empty(
            tokens, heads.stop - heads.start, self._rows.kv_tge.shape[2]
        )

    def _query_buffers(self, micro: int) -> list[Tensor]:
        q_thd, buffers = self._rows.q_thd, []
        for block, heads in enumerate(self._mine.query_blocks):
            rows = self._mine.query_rows(block, micro).values()
            tokens = sum(part.stop - part.start for part in rows)
            width = heads.queries.stop - heads.queries.start
            buffers.append(q_thd.new_empty(tokens, width, q_thd.shape[2]))
        return buffers
