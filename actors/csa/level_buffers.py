"""Queries and keys of the heads that one member owns at one level, as they arrive.

Shape suffixes: n tokens, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from csps.actors.csa.kept_rows import KeptRows
from csps.actors.csa.routes import Parcel, Rectangle, SegmentRoutes, Step


class LevelBuffers:
    """One level of one layer on one member."""

    def __init__(self, routes: SegmentRoutes, member: int, rows: KeptRows) -> None:
        self.routes = routes
        self.mine = routes.owner(member)
        self._rows = rows
        self.keys = [self._key_buffer(block) for block in range(len(self.mine.key_blocks))]
        """Per key block (n, g, 2d), all micro-partitions."""
        self.queries = [self._query_buffers(micro) for micro in range(routes.micro_partitions)]
        """Per micro-partition and query block (n, h, d)."""

    def place(self, parcel: Parcel, step: Step) -> Tensor:
        """Where a parcel belongs, contiguous."""
        if parcel.kind == "keys":
            return self.keys[parcel.block][parcel.rows]
        return self.queries[step.micro][parcel.block][parcel.rows]

    def keys_of(self, rectangle: Rectangle) -> tuple[Tensor, Tensor]:
        """Keys and values (n, g, d) of a rectangle, for the KV heads of its block."""
        block = self.mine.query_blocks[rectangle.block]
        begin = self.mine.key_blocks[block.key_buffer].start
        heads = slice(block.keys.start - begin, block.keys.stop - begin)
        k_ngd, v_ngd = self.keys[block.key_buffer][rectangle.keys, heads].chunk(2, dim=-1)
        return k_ngd, v_ngd

    def take_reused(self, step: Step, nearer: Mapping[int, LevelBuffers]) -> None:
        """Copy what arrived for lower levels and is needed here as well.

        Args:
            nearer: lower levels by number, whose data has all arrived.
        """
        for parcel in self.mine.parcels(step):
            if parcel.reused_from is not None and parcel.part not in self._rows.parts:
                nearer[parcel.reused_from]._copy_into(self.place(parcel, step), parcel)

    def _copy_into(self, target: Tensor, parcel: Parcel) -> None:
        for block, heads in enumerate(self.mine.heads(parcel.kind)):
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
            begin = self.mine.key_rows[block][parcel.part].start
            rows = slice(begin + parcel.tokens.start, begin + parcel.tokens.stop)
            yield self.keys[block], rows, parcel.tokens
            return
        heads = self.mine.query_blocks[block].queries
        for micro, buffers in enumerate(self.queries):
            held = self.routes.tokens("queries", parcel.part, heads, micro)
            first, last = max(held.start, parcel.tokens.start), min(held.stop, parcel.tokens.stop)
            if first < last:
                begin = self.mine.query_rows(block, micro)[parcel.part].start - held.start
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
