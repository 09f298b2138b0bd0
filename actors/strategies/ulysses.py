"""SP-NTP, exact: all-to-all over heads, attention, all-to-all back (CSPS §3.2.1; Ulysses).

    q, k, v of own rows, all heads  --first exchange-->  all rows, own heads
    attention over whole sequences, in blocks of queries between which urgent jobs may run
    outputs of all rows, own heads  --second exchange--> own rows, all heads

History (KV of earlier chunks) lies with the members that hold it, in any order of positions;
each sends every other the heads that it owns. Shapes: t rows of this member, T rows of the
batch, h heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from csps.actors.kv_pool import KvPool
from csps.actors.mesh import Pending, Tag
from csps.actors.strategies.group import HeadSplit, SpGroup, span_positions
from csps.actors.strategies.query_blocks import query_blocks
from csps.actors.strategies.strategy import Keep
from csps.kernels.attention import attention
from csps.kernels.positions import Positions
from csps.models.network import Layer
from csps.models.rope import Rotary
from csps.protocols.messages import PrefillPiece, Span


class Ulysses:
    """Exact sequence-parallel attention of one job; one object per job and rank."""

    def __init__(
        self, group: SpGroup, pool: KvPool, *, heads: int, kv_heads: int, scale: float
    ) -> None:
        self._group = group
        self._pool = pool
        self._split = HeadSplit(heads=heads, kv_heads=kv_heads, parts=group.size)
        self._scale = scale

    def attend_layer(
        self, index: int, layer: Layer, x_td: Tensor, rotary: Rotary, keep: Keep
    ) -> Tensor:
        """The residual stream of own rows (t, hidden) after the layer's attention."""
        timeline = self._group.clock.timeline
        with timeline.phase("qkv", layer=index):
            q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
        keep(index, k_thd, v_thd)
        out_thd = self.attend(index, q_thd, k_thd, v_thd)
        with timeline.phase("linear", layer=index):
            return layer.attention_output(x_td, out_thd)

    def attend(self, layer: int, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor) -> Tensor:
        """Attention output (t, h, d) of this member's rows, in q's dtype.

        The chunk's own k and v must not yet be among the history in the pool's view: history is
        read by the spans that the job names.
        """
        if self._group.size == 1:
            held = (
                [self._held_history(layer, it)] if self._group.wanted(it) else []
                for it in self._group.job.pieces
            )
            return self._batch_attention(layer, q_thd, k_thd, v_thd, held)
        rows, first = self._first_exchange(q_thd, k_thd, v_thd)
        history, second = self._history_exchange(layer)
        timeline = self._group.clock.timeline
        with self._group.clock.communicating(), timeline.phase("first all-to-all", layer=layer):
            Pending.all((first, second)).wait()
        out_thd = self._batch_attention(layer, *self._parts(rows), history)
        with timeline.phase("second all-to-all", layer=layer):
            return self._second_exchange(out_thd, q_thd)

    def _first_exchange(
        self, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor
    ) -> tuple[Tensor, Pending]:
        """All rows of own heads, (T, own q + 2 own kv, d), q before k before v."""
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

    def _history_exchange(self, layer: int) -> tuple[list[list[Tensor]], Pending]:
        """Per piece, the members' history of own heads as (tokens, 2, kv heads, d)."""
        pieces = self._group.job.pieces
        received = [self._history_buffers(piece) for piece in pieces]
        pending = [
            self._exchange_piece(layer, piece, buffers)
            for piece, buffers in zip(pieces, received, strict=True)
            if piece.history and self._group.wanted(piece)
        ]
        return received, Pending.all(pending)

    def _history_buffers(self, piece: PrefillPiece) -> list[Tensor]:
        lengths = [
            sum(span.length for span in self._group.history_of(piece, member))
            for member in range(self._group.size)
        ]
        shape = (2, self._split.key_count(self._group.member), self._pool.head_dim)
        return [self._pool.k.new_empty(length, *shape) for length in lengths]

    def _exchange_piece(self, layer: int, piece: PrefillPiece, buffers: list[Tensor]) -> Pending:
        group = self._group
        held = self._held_history(layer, piece)
        buffers[group.member].copy_(held[:, :, self._split.keys(group.member)])
        sends = [
            (group.peers[member], held[:, :, self._split.keys(member)].contiguous())
            for member in group.others
        ]
        recvs = [(group.peers[member], buffers[member]) for member in group.others]
        return group.mesh.exchange(sends, recvs, Tag.HISTORY)

    def _held_history(self, layer: int, piece: PrefillPiece) -> Tensor:
        """This member's history of a piece, all local KV heads, (tokens, 2, kv heads, d)."""
        spans = self._group.history_of(piece, self._group.member)
        runs = [run for span in spans for run in self._pool.view(layer, piece.rid, span)]
        if not runs:
            return self._pool.k.new_empty(0, 2, self._pool.kv_heads, self._pool.head_dim)
        return torch.cat([torch.stack((run.k_thd, run.v_thd), dim=1) for run in runs])

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of own heads, out of what the first exchange has gathered."""
        heads = self._split.query_count(self._group.member)
        kv_heads = self._split.key_count(self._group.member)
        q_thd, k_thd, v_thd = torch.split(rows, [heads, kv_heads, kv_heads], dim=1)
        return q_thd, k_thd, v_thd

    def _batch_attention(
        self,
        layer: int,
        q_thd: Tensor,
        k_thd: Tensor,
        v_thd: Tensor,
        history: Iterable[list[Tensor]],
    ) -> Tensor:
        """Outputs of all pieces' rows (t, h, d), in q's dtype; `history` as `_with_history`. Zeros
        for a withdrawn piece, which the layers that follow take like any other numbers."""
        out_thd, begin = q_thd.new_empty(q_thd.shape), 0
        for piece, held in zip(self._group.job.pieces, history, strict=True):
            rows = slice(begin, begin + piece.length)
            begin += piece.length
            if not self._group.wanted(piece):
                out_thd[rows] = 0
                continue
            keys = self._with_history(piece, held, k_thd[rows], v_thd[rows])
            self._attend_piece(layer, piece, q_thd[rows], *keys, out_thd[rows])
        return out_thd

    def _attend_piece(
        self,
        layer: int,
        piece: PrefillPiece,
        q_thd: Tensor,
        k_thd: Tensor,
        v_thd: Tensor,
        k_positions: Positions,
        out_thd: Tensor,
    ) -> None:
        """Into `out_thd`, block by block."""
        for rows in query_blocks(q_thd, len(k_thd)):
            with self._group.clock.timeline.phase("attention", layer=layer):
                out_thd[rows] = self._by_uniform_heads(
                    q_thd[rows], k_thd, v_thd, _chunk_positions(piece)[rows], k_positions
                )
            self._group.give_way()

    def _with_history(
        self, piece: PrefillPiece, held: list[Tensor], k_thd: Tensor, v_thd: Tensor
    ) -> tuple[Tensor, Tensor, Positions]:
        """Keys and values of the history, as the members sent them, before the chunk's own."""
        if not piece.history:
            return k_thd, v_thd, _chunk_positions(piece)
        spans = [s for m in range(self._group.size) for s in self._group.history_of(piece, m)]
        spans.append(Span(start=piece.start, stop=piece.start + piece.length))
        k = torch.cat([part[:, 0] for part in held] + [k_thd])
        v = torch.cat([part[:, 1] for part in held] + [v_thd])
        return k, v, span_positions(spans).to(k.device)

    def _by_uniform_heads(
        self,
        q_thd: Tensor,
        k_thd: Tensor,
        v_thd: Tensor,
        q_positions: Positions,
        k_positions: Positions,
    ) -> Tensor:
        if not q_thd.shape[1]:
            return q_thd.float()
        outs = [
            attention(
                q_thd[:, queries],
                k_thd[:, keys],
                v_thd[:, keys],
                q_positions=q_positions,
                k_positions=k_positions,
                scale=self._scale,
            )[0]
            for queries, keys in self._split.uniform_runs(self._group.member)
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _second_exchange(self, out_thd: Tensor, q_thd: Tensor) -> Tensor:
        """Own rows of all heads, from all rows of own heads."""
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


def _chunk_positions(piece: PrefillPiece) -> range:
    return range(piece.start, piece.start + piece.length)
