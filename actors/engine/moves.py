"""Moving KV to where a step's placement wants it, layer by layer.

Covers proactive scale-down (LoongServe §4.1: the members of the smaller group keep what the plan
gives them) and balancing history over a group that grew (Tetris §4.1). Whoever holds or keeps KV is
a member of the job's group, if need be one without rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from csps.actors.kv_pool import KvPool
from csps.actors.layout import LocalPiece
from csps.actors.mesh import Tag
from csps.actors.strategies.group import SpGroup, shares_of
from csps.actors.timeline import Phase
from csps.actors.transfers import Label, Transfer, Transfers
from csps.protocols.balance import displaced
from csps.protocols.placement import rest_of
from csps.protocols.prefill_job import PrefillJob, PrefillPiece
from csps.protocols.span import Span, SpanIndex

Offered = Callable[[int], Collection[int]]
"""(member) -> other members whose rows' KV comes by it in a layer."""
Rows = tuple[Tensor, Tensor]
"""k_thd and v_thd of own rows."""


@dataclass(frozen=True)
class Move:
    """One span of one request's KV that changes its member."""

    rid: int
    span: Span
    source: int
    target: int
    rows: slice | None = None
    """Of what the source computes; None if it has held them since an earlier step."""


def history_moves(job: PrefillJob) -> list[Move]:
    """Moves of what lies elsewhere when the job begins, in the order in which every member sees
    them."""
    member = job.group.index
    return [
        Move(it.rid, it.span, member(it.source), member(it.target))
        for piece in job.pieces
        for it in displaced(piece)
    ]


def row_moves(group: SpGroup) -> list[Move]:
    """Moves of what the job computes, in the order in which every member sees them."""
    return [move for piece in group.job.pieces for move in _row_moves(group, piece)]


def _row_moves(group: SpGroup, piece: PrefillPiece) -> Iterator[Move]:
    members = {instance: number for number, instance in enumerate(group.job.group)}
    index = SpanIndex(it.span for it in piece.placement)
    for source, parts in enumerate(group.parts):
        for part in (it for it in parts if it.piece is piece):
            for share in (piece.placement[it] for it in index.near(part.span)):
                target, common = members[share.instance], part.span.intersection(share.span)
                if target != source and common.length:
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


def nothing_offered(member: int) -> Collection[int]:
    """All that moves is sent."""
    return ()


@dataclass
class Spent:
    """Of this rank's engine thread."""

    seconds: float = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """The time inside."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began


class KvMover:
    """Carries out moves, one layer's at a time, beside computing.

    What is computed here and kept elsewhere never has slots here: it leaves from the layer's
    tensors.

    Args:
        moves: all members' alike.
        phase: as which the timeline shows them.
    """

    def __init__(
        self,
        group: SpGroup,
        pool: KvPool,
        moves: Sequence[Move],
        transfers: Transfers,
        phase: Phase,
    ) -> None:
        self._group, self._pool = group, pool
        self._transfers, self._phase = transfers, phase
        instance = group.job.group[group.member]
        self._staying = {it.rid: shares_of(it.placement, instance) for it in group.job.pieces}
        self._sent = {it.rid for it in group.job.pieces if it.destinations}
        self._outgoing = [move for move in moves if move.source == group.member]
        self._incoming = [move for move in moves if move.target == group.member]
        self._under_way: tuple[int, Transfer, list[tuple[Move, Tensor]]] | None = None
        self.sent_bytes = 0
        self.storing = Spent()
        """What came by anyway."""
        self.moving = Spent()
        """What did not: reading, sending, awaiting and storing it."""
        self.waiting = Spent()
        """Of that, until it had arrived and left."""

    @property
    def seconds(self) -> float:
        """All that keeping takes."""
        return self.storing.seconds + self.moving.seconds

    @property
    def incoming(self) -> list[tuple[int, Span]]:
        """What will arrive, by request; its slots must be there."""
        return [(move.rid, move.span) for move in self._incoming]

    def start(
        self, layer: int, own: Rows | None = None, offered: Offered = nothing_offered
    ) -> None:
        """Begin to move a layer, when the one before has been stored; all members do at the same
        part.

        Args:
            own: needed where rows move.
            offered: what comes by anyway (`Strategy.offered`), which `take` is given.
        """
        self.finish()
        if self._outgoing or self._incoming:
            with self.moving.counted():
                self._start(layer, own, offered)

    def _start(self, layer: int, own: Rows | None, offered: Offered) -> None:
        outgoing = [it for it in self._outgoing if not _comes_by(it, offered)]
        incoming = [it for it in self._incoming if not _comes_by(it, offered)]
        if not outgoing and not incoming:
            return
        peers = self._group.peers
        sends = [(peers[it.target], self._read(layer, it, own)) for it in outgoing]
        self.sent_bytes += sum(tensor.nbytes for _, tensor in sends)
        buffers = [(move, self._buffer(move)) for move in incoming]
        recvs = [(peers[move.source], buffer) for move, buffer in buffers]
        label = Label(phase=self._phase, layer=layer)
        transfer = self._transfers.start(sends, recvs, Tag.KV_MOVE, label)
        self._under_way = layer, transfer, buffers

    def finish(self) -> None:
        """Wait for the layer under way, if any, and store what arrived."""
        if self._under_way is None:
            return
        layer, transfer, buffers = self._under_way
        self._under_way = None
        with self.moving.counted():
            with self.waiting.counted():
                self._transfers.complete(transfer)
            for move, buffer in buffers:
                self._pool.write(layer, move.rid, move.span, buffer[0], buffer[1])

    def take(self, layer: int, member: int, rows: Rows) -> None:
        """Store what another member's rows, all of which have come by, are to leave here."""
        k_thd, v_thd = rows
        for move in self._incoming:
            if move.source == member:
                with self.storing.counted():
                    k, v = k_thd[move.rows], v_thd[move.rows]
                    self._pool.write(layer, move.rid, move.span, k, v)

    def release_sources(self) -> None:
        """Free what now lies elsewhere. What is still being sent to a decode gang stays in its
        slots, which are pinned (`Delivery.pin`), and nobody's afterwards. Other rows that are
        computed here have none, and those that the row's own move may have taken here meanwhile,
        as its KV has landed, are not the step's."""
        for move in self._outgoing:
            if move.rows is not None and move.rid not in self._sent:
                continue
            for span in rest_of(move.span, self._staying[move.rid]):
                self._pool.slots.free_span(move.rid, span)

    def _read(self, layer: int, move: Move, own: Rows | None) -> Tensor:
        if move.rows is None:
            return torch.stack(self._pool.read(layer, move.rid, move.span))
        assert own is not None, "rows move out of the layer's tensors"
        return torch.stack([x_thd[move.rows] for x_thd in own])

    def _buffer(self, move: Move) -> Tensor:
        shape = (2, move.span.length, self._pool.kv_heads, self._pool.head_dim)
        return self._pool.k.new_empty(shape)


def _comes_by(move: Move, offered: Offered) -> bool:
    return move.rows is not None and move.source in offered(move.target)
