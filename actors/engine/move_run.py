"""One move of a sequence's KV on one rank: all layers, block by block, while the sequence decodes.

First the sequence's master tells how far the sequence is. The KV that it has then moves in blocks
of tokens, one layer at a time. Between two blocks the move may pause, and the sequence keeps
decoding where it is. At the end the log stops the sequence; its last tokens follow in one go, with
the state that its next master needs. The log's next entry then has all ranks iterate the sequence
at its new place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from csps.actors.attention.base.engine import Engine
from csps.actors.comm.layout import GangLayout
from csps.actors.comm.mesh import ControlTag, Tag
from csps.actors.comm.process_group import PEER_DEADLINE
from csps.actors.engine.pending_steps import LogProgress, StepAborted
from csps.actors.engine.reservations import BatchSequence
from csps.actors.kv_cache.slot_allocator import OutOfSlots
from csps.actors.sampling.token_sampler import TokenSampler
from csps.actors.timing.device_pace import wait_for_device
from csps.actors.timing.timeline import StepClock
from csps.protocols.core.placement import Span
from csps.protocols.gang.step_messages import InstanceTransfer, MoveSequence, SequenceMoved
from csps.protocols.rpc.trace_context import begin, below
from csps.protocols.sequencer.log_entries import RunQuantum

_log = logging.getLogger(__name__)

BLOCK_TOKENS = 4096
"""Tokens of one pair of instances and one layer between two yield points of a move."""


@dataclass(frozen=True)
class SequenceProgress:
    """Progress of a sequence, as its master knows it."""

    next: int
    token: int
    index: int
    over: bool


class MoveRun:
    """A move from its arrival to its end."""

    def __init__(
        self,
        engine: Engine,
        message: MoveSequence,
        *,
        sequence_of: Callable[[int], BatchSequence],
        wanted: Callable[[], bool],
        sampler: TokenSampler | None,
        next_run: Callable[[MoveRun], tuple[int, RunQuantum] | None],
    ) -> None:
        """Args:
        sequence_of: returns a sequence of the decode batch by its id.
        wanted: returns whether the sequence has not left here.
        sampler: sampler of the sequence if this instance becomes its master; None otherwise.
        next_run: as in `LogProgress`.
        """
        self.message = message
        self.clock = StepClock()
        self.cancelled = False
        self.sampler = sampler
        self.state: SequenceProgress | None = None
        """Progress of the sequence at the end of the move."""
        wait = partial(wait_for_device, engine.device)
        self.log_progress = LogProgress(partial(next_run, self), self.clock.yielding, wait)
        self._engine, self._sequence_of, self._wanted = engine, sequence_of, wanted
        self._transfers = tuple(message.transfers())
        self._rounds = rounds_of(self._transfers)
        self._total = move_points(message, engine.spec.layers)
        self.leads = engine.rank == leader_of(message, engine.layout)
        self._took_slots = False
        self._sent_bytes = self._received = 0

    @property
    def step_id(self) -> int:
        """Return the id by which the log names the move."""
        return self.message.step_id

    @property
    def sequences(self) -> tuple[int, ...]:
        """Return the one sequence that moves."""
        return (self.message.sequence_id,)

    # --- slots ---------------------------------------------------------------------------------

    def _spans(self, *, sender: int | None = None, receiver: int | None = None) -> list[Span]:
        return [
            transfer.span
            for transfer in self._transfers
            if transfer.sender == sender or transfer.receiver == receiver
        ]

    def take_slots(self) -> bool:
        """Take the slots of all KV that moves here, or none; return whether it has them."""
        slots, sequence_id = self._engine.pool.slots, self.message.sequence_id
        spans = self._spans(receiver=self._engine.instance)
        # The slots of a sequence that has left belong to others already; the log is about to drop
        # its move. Slots that the sequence still has here are about to be moved away by its step.
        if not self._wanted() or any(slots.runs(sequence_id, span) for span in spans):
            return False
        try:
            slots.allocate(sequence_id, spans)
        except OutOfSlots:
            return False
        self._took_slots = True
        return True

    def free_slots(self) -> None:
        """Free the slots of a move that does not come to its end."""
        if self._took_slots:
            self._free(self._spans(receiver=self._engine.instance))

    def release_sources(self) -> None:
        """Free the slots of KV that lies elsewhere now."""
        self._free(self._spans(sender=self._engine.instance))

    def _free(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self._engine.pool.slots.free_span(self.message.sequence_id, span)

    # --- the engine thread ---------------------------------------------------------------------

    def carry_out(self) -> None:
        """Move all blocks; return when the log has let the move come to its end, or has stopped
        it."""
        self.clock.started = time.monotonic()
        traced = begin(
            "row.move",
            below(self.message.trace, "decode", self.message.sequence_id),
            {"csps.rank": self._engine.rank, "csps.job": self.step_id},
        )
        _log.debug("move step %d of sequence %d begins", self.step_id, self.message.sequence_id)
        try:
            self._carry_out()
        except StepAborted:
            self.cancelled = True
            self.free_slots()
        finally:
            wait_for_device(self._engine.device)
            self.clock.finished = time.monotonic()
            traced.set_attribute("csps.tokens", self._received)
            traced.set_attribute("csps.bytes_sent", self._sent_bytes)
            traced.set_attribute("csps.cancelled", self.cancelled)
            traced.end()

    def _carry_out(self) -> None:
        layers = range(self._engine.spec.layers)
        self.log_progress.reach(0)
        known = Span(0, self._send_state().next)
        point = 1
        for block_index in range(self._rounds):
            rows = slice(block_index * BLOCK_TOKENS, (block_index + 1) * BLOCK_TOKENS)
            block = [transfer.part(rows).within(known) for transfer in self._transfers]
            for layer in layers:
                self.log_progress.reach(point)
                self._exchange(block, [layer])
                point += 1
        self.state = self._send_state()
        since = Span(known.stop, self.state.next)
        self._exchange([transfer.within(since) for transfer in self._transfers], layers)
        self._send_answered(self.state.index)
        self.log_progress.end(self._total)

    def moved(self) -> SequenceMoved:
        """Return the notification for the router."""
        clock = self.clock
        return SequenceMoved(
            sequence_id=self.message.sequence_id,
            rank=self._engine.rank,
            tokens=self._received,
            sent_bytes=self._sent_bytes,
            seconds=clock.finished - clock.started - clock.yielded_s,
        )

    # --- exchanges -----------------------------------------------------------------------------

    def _exchange(self, transfers: Sequence[InstanceTransfer], layers: Sequence[int]) -> None:
        """Move these positions in some layers."""
        here, sequence_id, pool = self._engine.instance, self.message.sequence_id, self._engine.pool
        moving = [transfer for transfer in transfers if transfer.span.length]
        outgoing = [transfer for transfer in moving if transfer.sender == here]
        incoming = [transfer for transfer in moving if transfer.receiver == here]
        sends = [
            (self._peer(transfer.receiver), self._read(transfer.span, layers))
            for transfer in outgoing
        ]
        shape = (pool.kv_heads, pool.width)
        buffers = [
            pool.k.new_empty(len(layers), 2, transfer.span.length, *shape) for transfer in incoming
        ]
        recvs = [
            (self._peer(transfer.sender), buffer)
            for transfer, buffer in zip(incoming, buffers, strict=True)
        ]
        with self.clock.communicating():
            self._engine.mesh.exchange(sends, recvs, Tag.KV_MOVE).wait()
        for transfer, buffer in zip(incoming, buffers, strict=True):
            for layer, (k_thd, v_thd) in zip(layers, buffer, strict=True):
                pool.write(layer, sequence_id, transfer.span, k_thd, v_thd)
        if layers[-1] == self._engine.spec.layers - 1:
            self._received += sum(transfer.span.length for transfer in incoming)
        self._sent_bytes += sum(tensor.nbytes for _, tensor in sends)

    def _read(self, span: Span, layers: Sequence[int]) -> Tensor:
        """Return (layers, 2, t, h, d)."""
        pool, sequence_id = self._engine.pool, self.message.sequence_id
        return torch.stack([torch.stack(pool.read(layer, sequence_id, span)) for layer in layers])

    def _send_state(self) -> SequenceProgress:
        """Send the sequence's progress from its master to all other members."""
        words = torch.zeros(4, dtype=torch.int64)
        master = self.message.before.master
        if self._engine.instance == master:
            sequence = self._sequence_of(self.message.sequence_id)
            words = torch.tensor(
                [sequence.next, sequence.token, sequence.index, sequence.over], dtype=torch.int64
            )
            others = [instance for instance in self.message.instances if instance != master]
            self._send(words, others)
        else:
            self._recv(words, master)
        following, token, index, over = words.tolist()
        return SequenceProgress(following, token, index, bool(over))

    def _send_answered(self, count: int) -> None:
        """Send the next master the answer's tokens, where its sampler has to know them."""
        before, after = self.message.before.master, self.message.after.master
        if before == after:
            return
        words = torch.zeros(count, dtype=torch.int64)
        if self._engine.instance == before:
            sampler = self._sequence_of(self.message.sequence_id).sampler
            if sampler is not None and sampler.remembers:
                # Only an instance's first rank samples: the others know no tokens to send.
                known = torch.tensor(sampler.answered, dtype=torch.int64)
                words[: len(known)] = known
                self._send(words, [after])
        elif self.sampler is not None and self.sampler.remembers:
            self._recv(words, before)
            self.sampler.catch_up(words.tolist())

    def _send(self, words: Tensor, instances: Sequence[int]) -> None:
        mesh = self._engine.mesh
        pending = [
            mesh.send(words, self._peer(instance), ControlTag.ROW_STATE) for instance in instances
        ]
        for sending in pending:
            sending.wait(PEER_DEADLINE)

    def _recv(self, words: Tensor, instance: int) -> None:
        self._engine.mesh.recv(words, self._peer(instance), ControlTag.ROW_STATE).wait(
            PEER_DEADLINE
        )

    def _peer(self, instance: int) -> int:
        return self._engine.layout.rank_of(instance, self._engine.tp_rank)


def rounds_of(transfers: Iterable[InstanceTransfer]) -> int:
    """Return the number of blocks of the longest transfer; all pairs move one of theirs at a
    time."""
    return max((-(-transfer.span.length // BLOCK_TOKENS) for transfer in transfers), default=0)


def move_points(message: MoveSequence, layers: int) -> int:
    """Return the last yield point of a move; alike at all ranks, members or not."""
    return 1 + rounds_of(message.transfers()) * layers


def leader_of(message: MoveSequence, layout: GangLayout) -> int:
    """Return the rank that reports how long the blocks take: one that moves most."""
    longest = max(message.transfers(), key=lambda transfer: transfer.span.length, default=None)
    instance = message.before.master if longest is None else longest.sender
    return layout.rank_of(instance, 0)
