"""Moving KV to where a step's placement wants it, layer by layer.

Covers proactive scale-down (LoongServe §4.1: the members of the smaller group store what the plan
gives them) and balancing history over a group that grew (Tetris §4.1). Every KV holder is a member
of the step's group, if need be one without rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence, Set
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
"""Function (member) that returns the other members whose rows' KV passes it in a layer anyway."""
OwnKv = tuple[Tensor, Tensor]
"""Keys and values (k_thd, v_thd) of the own rows."""


@dataclass(frozen=True)
class KvMove:
    """A span of one sequence's KV that moves from one member to another."""

    sequence_id: int
    span: Span
    sender: int
    receiver: int
    rows: slice | None = None
    """Rows that the sender computes in this step; None if the KV is from an earlier step."""


def history_moves(step: PrefillStep) -> list[KvMove]:
    """Return the moves of history that lies elsewhere when the step begins, in one order at all
    members."""
    member = step.group.index
    return [
        KvMove(move.sequence_id, move.span, member(move.sender), member(move.receiver))
        for chunk in step.chunks
        for move in rebalanced_kv(chunk)
    ]


def row_moves(group: SpGroup) -> list[KvMove]:
    """Return the moves of KV that the step computes, in one order at all members."""
    return [move for chunk in group.step.chunks for move in _row_moves(group, chunk)]


def _row_moves(group: SpGroup, chunk: PrefillChunk) -> Iterator[KvMove]:
    members = {instance: number for number, instance in enumerate(group.step.group)}
    slices = SpanIndex(kv_slice.span for kv_slice in chunk.placement)
    for sender, parts in enumerate(group.parts):
        for part in (part for part in parts if part.chunk is chunk):
            for kv_slice in (chunk.placement[index] for index in slices.near(part.span)):
                receiver, common = members[kv_slice.instance], part.span.intersection(kv_slice.span)
                if receiver != sender and common.length:
                    yield KvMove(
                        chunk.sequence_id, common, sender, receiver, part.within(common).rows
                    )


def stored_of(group: SpGroup) -> tuple[LocalChunk, ...]:
    """Return the own rows whose KV takes slots here: rows that no placement gives to others, and
    rows that are sent to a decode gang, because they leave from the pool and perhaps after the
    step."""
    instance = group.step.group[group.member]
    return tuple(stored for part in group.local for stored in _stored(part, instance))


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
    """Return no members: all KV that moves is sent."""
    return ()


@dataclass
class Spent:
    """Time of this rank's engine thread."""

    seconds: float = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Add the time inside."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - began


class KvMover:
    """Carries out moves beside computing, one layer's at a time.

    KV that is computed here and stored elsewhere never takes slots here: it is sent from the
    layer's tensors.

    Args:
        moves: alike at all members.
        phase: name of the moves in the timeline.
        departed: sequences of which this member stores nothing. Their KV arrives nevertheless,
            because other members may send it.
    """

    def __init__(
        self,
        group: SpGroup,
        pool: KvPool,
        moves: Sequence[KvMove],
        transfers: Transfers,
        phase: Phase,
        departed: Set[int] = frozenset(),
    ) -> None:
        self._group, self._pool = group, pool
        self._departed = departed
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
        """Time for storing KV that passed anyway."""
        self.moving = Spent()
        """Time for reading, sending, awaiting and storing the other KV."""
        self.waiting = Spent()
        """Time of this spent waiting for sends and receives."""

    @property
    def seconds(self) -> float:
        """Return the time that all moves took."""
        return self.storing.seconds + self.moving.seconds

    @property
    def incoming(self) -> list[tuple[int, Span]]:
        """Return what will arrive and be stored, by sequence; its slots must be there."""
        return [(move.sequence_id, move.span) for move in self._incoming if self._wants(move)]

    def _wants(self, move: KvMove) -> bool:
        return move.sequence_id not in self._departed

    def start(
        self, layer: int, own: OwnKv | None = None, offered: Offered = nothing_offered
    ) -> None:
        """Begin to move a layer after storing the one before. All members do so at the same point.

        Args:
            own: needed where rows move.
            offered: members whose rows pass anyway (`Strategy.offered`); `take` gets these.
        """
        self.finish()
        if self._outgoing or self._incoming:
            with self.moving.counted():
                self._start(layer, own, offered)

    def _start(self, layer: int, own: OwnKv | None, offered: Offered) -> None:
        outgoing = [move for move in self._outgoing if not _comes_by(move, offered)]
        incoming = [move for move in self._incoming if not _comes_by(move, offered)]
        if not outgoing and not incoming:
            return
        peers = self._group.peers
        sends = [(peers[move.receiver], self._read(layer, move, own)) for move in outgoing]
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
                if self._wants(move):
                    self._pool.write(layer, move.sequence_id, move.span, *buffer)

    def take(self, layer: int, member: int, rows: OwnKv) -> None:
        """Store those of another member's rows that belong here, after all of its rows have
        passed."""
        k_thd, v_thd = rows
        for move in self._incoming:
            if move.sender == member and self._wants(move):
                with self.storing.counted():
                    k, v = k_thd[move.rows], v_thd[move.rows]
                    self._pool.write(layer, move.sequence_id, move.span, k, v)

    def release_sources(self) -> None:
        """Free what now lies elsewhere. Slots that are still being sent to a decode gang are pinned
        (`TransferTracker.pin`) and become free afterwards."""
        for move in self._outgoing:
            # Rows that are computed here and stored elsewhere never had slots. Slots that their
            # sequence may have taken here meanwhile, after its KV was received, are not the step's.
            if move.rows is not None and move.sequence_id not in self._sent:
                continue
            for span in rest_of(move.span, self._retained[move.sequence_id]):
                self._pool.slots.free_span(move.sequence_id, span)

    def _read(self, layer: int, move: KvMove, own: OwnKv | None) -> Tensor:
        if move.rows is None:
            return torch.stack(self._pool.read(layer, move.sequence_id, move.span))
        assert own is not None, f"layer {layer}: rows move without the layer's tensors"
        return torch.stack([self._pool.stored(x_thd[move.rows]) for x_thd in own])

    def _buffer(self, move: KvMove) -> Tensor:
        shape = (2, move.span.length, self._pool.kv_heads, self._pool.width)
        return self._pool.k.new_empty(shape)


def _comes_by(move: KvMove, offered: Offered) -> bool:
    return move.rows is not None and move.sender in offered(move.receiver)
