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

from csps.actors.attention.base.group import SpGroup, spans_on
from csps.actors.comm.layout import LocalChunk
from csps.actors.comm.mesh import Tag
from csps.actors.comm.transfers import Label, PendingTransfer, Transfers
from csps.actors.kv_cache.kv_pool import KvPool
from csps.actors.timing.timeline import Phase
from csps.protocols.core.placement import Span, SpanIndex, rest_of
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep, rebalanced_kv

Offered = Callable[[int], Collection[int]]
"""(member) -> other members whose rows' KV comes by it in a layer."""
OwnKv = tuple[Tensor, Tensor]
"""k_thd and v_thd of own rows."""


@dataclass(frozen=True)
class KvMove:
    """One span of one request's KV that changes its member."""

    sequence_id: int
    span: Span
    sender: int
    receiver: int
    rows: slice | None = None
    """Of what the source computes; None if it has held them since an earlier step."""


def history_moves(step: PrefillStep) -> list[KvMove]:
    """Moves of what lies elsewhere when the job begins, in the order in which every member sees
    them."""
    member = step.group.index
    return [
        KvMove(it.sequence_id, it.span, member(it.sender), member(it.receiver))
        for chunk in step.chunks
        for it in rebalanced_kv(chunk)
    ]


def row_moves(group: SpGroup) -> list[KvMove]:
    """Moves of what the job computes, in the order in which every member sees them."""
    return [move for chunk in group.step.chunks for move in _row_moves(group, chunk)]


def _row_moves(group: SpGroup, chunk: PrefillChunk) -> Iterator[KvMove]:
    members = {instance: number for number, instance in enumerate(group.step.group)}
    index = SpanIndex(it.span for it in chunk.placement)
    for sender, parts in enumerate(group.parts):
        for part in (it for it in parts if it.chunk is chunk):
            for kv_slice in (chunk.placement[it] for it in index.near(part.span)):
                receiver, common = members[kv_slice.instance], part.span.intersection(kv_slice.span)
                if receiver != sender and common.length:
                    yield KvMove(
                        chunk.sequence_id, common, sender, receiver, part.within(common).rows
                    )


def stored_of(group: SpGroup) -> tuple[LocalChunk, ...]:
    """Own rows whose KV takes slots here: what no placement gives to others, and what is sent to a
    decode gang, from the pool, which may take longer than the step."""
    return tuple(it for part in group.local for it in _stored(part, group.step.group[group.member]))


def _stored(part: LocalChunk, instance: int) -> Iterator[LocalChunk]:
    placement = part.chunk.placement
    if part.chunk.destinations or not placement:
        yield part
        return
    own = (part.span.intersection(span) for span in spans_on(placement, instance))
    for span in (*own, *rest_of(part.span, (kv_slice.span for kv_slice in placement))):
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
        moves: Sequence[KvMove],
        transfers: Transfers,
        phase: Phase,
    ) -> None:
        self._group, self._pool = group, pool
        self._transfers, self._phase = transfers, phase
        instance = group.step.group[group.member]
        self._retained = {
            chunk.sequence_id: spans_on(chunk.placement, instance) for chunk in group.step.chunks
        }
        self._sent = {chunk.sequence_id for chunk in group.step.chunks if chunk.destinations}
        self._outgoing = [move for move in moves if move.sender == group.member]
        self._incoming = [move for move in moves if move.receiver == group.member]
        self._under_way: tuple[int, PendingTransfer, list[tuple[KvMove, Tensor]]] | None = None
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
        return [(move.sequence_id, move.span) for move in self._incoming]

    def start(
        self, layer: int, own: OwnKv | None = None, offered: Offered = nothing_offered
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

    def _start(self, layer: int, own: OwnKv | None, offered: Offered) -> None:
        outgoing = [it for it in self._outgoing if not _comes_by(it, offered)]
        incoming = [it for it in self._incoming if not _comes_by(it, offered)]
        if not outgoing and not incoming:
            return
        peers = self._group.peers
        sends = [(peers[it.receiver], self._read(layer, it, own)) for it in outgoing]
        self.sent_bytes += sum(tensor.nbytes for _, tensor in sends)
        buffers = [(move, self._buffer(move)) for move in incoming]
        recvs = [(peers[move.sender], buffer) for move, buffer in buffers]
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
                self._pool.write(layer, move.sequence_id, move.span, buffer[0], buffer[1])

    def take(self, layer: int, member: int, rows: OwnKv) -> None:
        """Store what another member's rows, all of which have come by, are to leave here."""
        k_thd, v_thd = rows
        for move in self._incoming:
            if move.sender == member:
                with self.storing.counted():
                    k, v = k_thd[move.rows], v_thd[move.rows]
                    self._pool.write(layer, move.sequence_id, move.span, k, v)

    def release_sources(self) -> None:
        """Free what now lies elsewhere. What is still being sent to a decode gang stays in its
        slots, which are pinned (`TransferTracker.pin`), and nobody's afterwards. Other rows that are
        computed here have none, and those that the row's own move may have taken here meanwhile,
        as its KV has landed, are not the step's."""
        for move in self._outgoing:
            if move.rows is not None and move.sequence_id not in self._sent:
                continue
            for span in rest_of(move.span, self._retained[move.sequence_id]):
                self._pool.slots.free_span(move.sequence_id, span)

    def _read(self, layer: int, move: KvMove, own: OwnKv | None) -> Tensor:
        if move.rows is None:
            return torch.stack(self._pool.read(layer, move.sequence_id, move.span))
        assert own is not None, "rows move out of the layer's tensors"
        return torch.stack([x_thd[move.rows] for x_thd in own])

    def _buffer(self, move: KvMove) -> Tensor:
        shape = (2, move.span.length, self._pool.kv_heads, self._pool.head_dim)
        return self._pool.k.new_empty(shape)


def _comes_by(move: KvMove, offered: Offered) -> bool:
    return move.rows is not None and move.sender in offered(move.receiver)
