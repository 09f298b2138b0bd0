"""Moving a chunk's KV to where the job's placement wants it, layer by layer.

Covers proactive scale-down (LoongServe §4.1: the members of the smaller group keep what the plan
gives them) and rebalancing history over a group that grew (Tetris §4.2). Whoever holds or keeps
KV is a member of the job's group, if need be one without rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from csps.actors.kv_pool import KvPool
from csps.actors.mesh import Pending, Tag
from csps.actors.strategies.group import SpGroup
from csps.protocols.messages import PrefillPiece, Span


@dataclass(frozen=True)
class Move:
    """One span of one request's KV that changes its member."""

    rid: int
    span: Span
    source: int
    target: int


def moves_of(group: SpGroup) -> list[Move]:
    """All moves of a job, in the order in which every member sees them."""
    return [move for piece in group.job.pieces for move in _piece_moves(group, piece)]


def _piece_moves(group: SpGroup, piece: PrefillPiece) -> Iterator[Move]:
    if not piece.placement:
        return
    for source, span in _held(group, piece):
        for share in piece.placement:
            common = span.intersection(share.span)
            target = group.job.group.index(share.instance)
            if common.length and target != source:
                yield Move(piece.rid, common, source, target)


def _held(group: SpGroup, piece: PrefillPiece) -> Iterator[tuple[int, Span]]:
    """(member, span) of the piece's KV before any move: history, then what is computed now."""
    for member in range(group.size):
        for span in group.history_of(piece, member):
            yield member, span
        for part in group.parts[member]:
            if part.piece is piece:
                yield member, part.span


class KvMover:
    """Carries out a job's moves; the exchange of a layer overlaps the computing of the next."""

    def __init__(self, group: SpGroup, pool: KvPool) -> None:
        self._group, self._pool = group, pool
        moves = moves_of(group)
        self._outgoing = [move for move in moves if move.source == group.member]
        self._incoming = [move for move in moves if move.target == group.member]
        self._under_way: tuple[int, Pending, list[tuple[Move, Tensor]]] | None = None

    @property
    def incoming(self) -> list[tuple[int, Span]]:
        """What will arrive, by request; its slots must be there."""
        return [(move.rid, move.span) for move in self._incoming]

    @property
    def outgoing(self) -> list[tuple[int, Span]]:
        """What will lie elsewhere, by request."""
        return [(move.rid, move.span) for move in self._outgoing]

    def start(self, layer: int) -> None:
        """Begin to move a layer whose KV is in the pool of its present holders."""
        self.finish()
        if not self._outgoing and not self._incoming:
            return
        peers = self._group.peers
        sends = [(peers[move.target], self._read(layer, move)) for move in self._outgoing]
        buffers = [(move, self._buffer(move)) for move in self._incoming]
        recvs = [(peers[move.source], buffer) for move, buffer in buffers]
        pending = self._group.mesh.exchange(sends, recvs, Tag.KV_MOVE)
        self._under_way = (layer, pending, buffers)

    def finish(self) -> None:
        """Wait for the layer under way, if any, and store what arrived."""
        if self._under_way is None:
            return
        layer, pending, buffers = self._under_way
        self._under_way = None
        pending.wait()
        for move, buffer in buffers:
            self._pool.write(layer, move.rid, move.span, buffer[0], buffer[1])

    def release_sources(self) -> None:
        """Free what now lies elsewhere."""
        for move in self._outgoing:
            self._pool.free_span(move.rid, move.span)

    def _read(self, layer: int, move: Move) -> Tensor:
        return torch.stack(self._pool.read(layer, move.rid, move.span))

    def _buffer(self, move: Move) -> Tensor:
        shape = (2, move.span.length, self._pool.kv_heads, self._pool.head_dim)
        return self._pool.k.new_empty(shape)
