"""History (KV of earlier chunks) on its way to those who own its heads.

History lies with the instances that the job names, in any order of positions; inside an instance
each tensor-parallel rank holds its KV heads. Every rank that computes gets the heads it owns, from
itself if it can, else from the first rank of the instance that holds them.

Shape suffixes: n tokens of history, 2 keys and values, g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csps.actors.kv_pool import KvPool
from csps.actors.mesh import Tag
from csps.actors.strategies.group import SpGroup, shares_of
from csps.actors.transfers import Label, Transfer, Transfers
from csps.protocols.messages import PrefillPiece


@dataclass(frozen=True, kw_only=True)
class HeadHolder:
    """One rank of the job's group; KV heads are numbered over the whole model."""

    rank: int
    instance: int
    held: range
    """KV heads in its pool."""
    wanted: range
    """KV heads that its queries read."""


@dataclass(frozen=True)
class HistoryUnderWay:
    """One piece's history of own heads, by the rank it comes from."""

    transfer: Transfer
    buffers: dict[int, list[Tensor]]
    """Per instance, of its ranks in order: (n, 2, some g, d)."""

    def arrived(self, transfers: Transfers) -> tuple[Tensor, Tensor]:
        """Wait for it: k and v, (all n, own g, d)."""
        transfers.wait(self.transfer)
        held = torch.cat([torch.cat(parts, dim=2) for parts in self.buffers.values()])
        return held[:, 0], held[:, 1]


class HeadHistory:
    """History of one job's pieces; every rank of the group must know the same `holders`."""

    def __init__(self, group: SpGroup, pool: KvPool, holders: Sequence[HeadHolder]) -> None:
        self._group = group
        self._pool = pool
        self._holders = tuple(holders)
        self._own = next(h for h in self._holders if h.rank == group.mesh.rank)

    def start(self, layer: int, transfers: Transfers) -> dict[int, HistoryUnderWay]:
        """Send what others want of this layer; per piece that has history, what is coming."""
        pieces = enumerate(self._group.job.pieces)
        return {i: self._exchange(layer, p, transfers) for i, p in pieces if p.history}

    def _exchange(self, layer: int, piece: PrefillPiece, transfers: Transfers) -> HistoryUnderWay:
        held = self._held(layer, piece)
        sends = [
            (taker.rank, self._part(held, self._own, taker).contiguous())
            for taker in self._holders
            if taker is not self._own
        ]
        buffers: dict[int, list[Tensor]] = {}
        recvs = []
        for giver in self._holders:
            if giver is self._own:
                buffer = self._part(held, giver, giver)
            else:
                buffer = self._buffer(piece, giver)
                recvs.append((giver.rank, buffer))
            buffers.setdefault(giver.instance, []).append(buffer)
        label = Label(phase="first all-to-all", layer=layer)
        return HistoryUnderWay(transfers.start(sends, recvs, Tag.HISTORY, label), buffers)

    def _part(self, held: Tensor, giver: HeadHolder, taker: HeadHolder) -> Tensor:
        heads = self._heads(giver, taker)
        return held[:, :, heads.start - giver.held.start : heads.stop - giver.held.start]

    def _buffer(self, piece: PrefillPiece, giver: HeadHolder) -> Tensor:
        tokens = sum(span.length for span in shares_of(piece.history, giver.instance))
        heads = len(self._heads(giver, self._own))
        return self._pool.k.new_empty(tokens, 2, heads, self._pool.head_dim)

    def _heads(self, giver: HeadHolder, taker: HeadHolder) -> range:
        """KV heads that one rank sends the other: neighbours, as ranks hold disjoint ranges or,
        where there are fewer heads than ranks, a single one."""
        heads = [head for head in giver.held if head in taker.wanted]
        heads = [head for head in heads if self._giver(giver.instance, head, taker) is giver]
        return (
            range(heads[0], heads[-1] + 1) if heads else range(giver.held.start, giver.held.start)
        )

    def _giver(self, instance: int, head: int, taker: HeadHolder) -> HeadHolder:
        if taker.instance == instance and head in taker.held:
            return taker
        return next(h for h in self._holders if h.instance == instance and head in h.held)

    def _held(self, layer: int, piece: PrefillPiece) -> Tensor:
        """This rank's history of a piece, all its KV heads, (n, 2, g, d)."""
        spans = shares_of(piece.history, self._own.instance)
        runs = [run for span in spans for run in self._pool.view(layer, piece.rid, span)]
        if not runs:
            return self._pool.k.new_empty(0, 2, self._pool.kv_heads, self._pool.head_dim)
        return torch.cat([torch.stack((run.k_thd, run.v_thd), dim=1) for run in runs])
