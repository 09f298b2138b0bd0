"""Moving a chunk's KV to where the job's placement wants it, layer by layer.

Covers proactive scale-down (LoongServe §4.1: the members of the smaller group keep what the plan
gives them) and rebalancing history over a group that grew (Tetris §4.2). Whoever holds or keeps
KV is a member of the job's group, if need be one without rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from csps.actors.kv_pool import KvPool
from csps.actors.layout import LocalPiece
from csps.actors.mesh import Pending, Tag
from csps.actors.strategies.group import SpGroup, shares_of
from csps.protocols.placement import rest_of
from csps.protocols.prefill_job import PrefillPiece
from csps.protocols.span import Span

Offered = Callable[[int], Collection[int]]
"""(member) -> other members whose rows' KV comes by it in a layer."""


@dataclass(frozen=True)
class Move:
    """One span of one request's KV that changes its member."""

    rid: int
    span: Span
    source: int
    target: int
    rows: slice | None
    """Of what the source computes; None if it has held them since an earlier step."""


def moves_of(group: SpGroup) -> list[Move]:
    """All moves of a job, in the order in which every member sees them."""
    return [move for piece in group.job.pieces for move in _piece_moves(group, piece)]


def _piece_moves(group: SpGroup, piece: PrefillPiece) -> Iterator[Move]:
    if not piece.placement:
        return
    for source in range(group.size):
        computed = [part for part in group.parts[source] if part.piece is piece]
        for share in piece.placement:
            target = group.job.group.index(share.instance)
            if target == source:
                continue
            for span in group.history_of(piece, source):
                if (common := span.intersection(share.span)).length:
                    yield Move(piece.rid, common, source, target, None)
            for part in computed:
                if (common := part.span.intersection(share.span)).length:
                    yield Move(piece.rid, common, source, target, part.within(common).rows)


def stored_of(group: SpGroup) -> tuple[LocalPiece, ...]:
    """Own rows whose KV takes slots here: what no placement gives to others, and what is sent to a
    decode gang, from the pool, which may take longer than the step."""
    return tuple(it for part in group.local for it in _stored(part, group.job.group[group.member]))


def _stored(part: LocalPiece, instance: int) -> Iterator[LocalPiece]:
    placement = part.piece.placement
    if part.piece.destinations or not placement:
        yield part
        return
    own = (part.span.intersection(span) for span in shares_of(placement, instance))
    for span in (*own, *rest_of(part.span, (it.span for it in placement))):
        if span.length:
            yield part.within(span)


class KvMover:
    """Carries out a job's moves; the exchange of a layer overlaps the computing of the next.

    What is computed here and kept elsewhere never has slots here: it leaves from the layer's
    tensors.
    """

    def __init__(self, group: SpGroup, pool: KvPool) -> None:
        self._group, self._pool = group, pool
        moves = moves_of(group)
        instance = group.job.group[group.member]
        self._staying = {it.rid: shares_of(it.placement, instance) for it in group.job.pieces}
        self._outgoing = [move for move in moves if move.source == group.member]
        self._incoming = [move for move in moves if move.target == group.member]
        self._under_way: tuple[int, Pending, list[tuple[Move, Tensor]]] | None = None

    @property
    def incoming(self) -> list[tuple[int, Span]]:
        """What will arrive, by request; its slots must be there."""
        return [(move.rid, move.span) for move in self._incoming]

    def start(self, layer: int, k_thd: Tensor, v_thd: Tensor, offered: Offered) -> None:
        """Begin to move a layer.

        Args:
            k_thd, v_thd: of own rows.
            offered: what comes by anyway (`Strategy.offered`), which `take` is given.
        """
        self.finish()
        outgoing = [it for it in self._outgoing if not _comes_by(it, offered)]
        incoming = [it for it in self._incoming if not _comes_by(it, offered)]
        if not outgoing and not incoming:
            return
        peers = self._group.peers
        sends = [(peers[it.target], self._read(layer, it, k_thd, v_thd)) for it in outgoing]
        buffers = [(move, self._buffer(move)) for move in incoming]
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

    def take(self, layer: int, member: int, k_thd: Tensor, v_thd: Tensor) -> None:
        """Store what another member's rows, all of which have come by, are to leave here."""
        for move in self._incoming:
            if move.source == member and move.rows is not None:
                rows = move.rows
                self._pool.write(layer, move.rid, move.span, k_thd[rows], v_thd[rows])

    def release_sources(self) -> None:
        """Free what now lies elsewhere."""
        for move in self._outgoing:
            for span in rest_of(move.span, self._staying[move.rid]):
                self._pool.free_span(move.rid, span)

    def _read(self, layer: int, move: Move, k_thd: Tensor, v_thd: Tensor) -> Tensor:
        if move.rows is not None:
            return torch.stack((k_thd[move.rows], v_thd[move.rows]))
        return torch.stack(self._pool.read(layer, move.rid, move.span))

    def _buffer(self, move: Move) -> Tensor:
        shape = (2, move.span.length, self._pool.kv_heads, self._pool.head_dim)
        return self._pool.k.new_empty(shape)


def _comes_by(move: Move, offered: Offered) -> bool:
    return move.rows is not None and move.source in offered(move.target)
