"""One move of a row's KV on one rank: all layers, block by block, beside the stream that it is in.

First its master tells how far the row is. What it had then moves in blocks of tokens, a layer at a
time, and between two of them the rank does what else the log says: the row goes on where it is.
At the end the log has it stand still, and in one go its last tokens follow, with what its next
master has to know of it; the log's next entry has all ranks iterate it at its new place.
"""

from __future__ import annotations

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
from csps.actors.timing.timeline import StepClock
from csps.protocols.core.placement import Span
from csps.protocols.gang.step_messages import InstanceTransfer, MoveSequence, SequenceMoved
from csps.protocols.rpc.trace_context import begin
from csps.protocols.sequencer.log_entries import RunQuantum

BLOCK_TOKENS = 4096
"""Of one pair of instances and one layer, between two points at which the move can stand still."""


@dataclass(frozen=True)
class SequenceProgress:
    """How far a row is, as its master knows."""

    next: int
    token: int
    index: int
    over: bool


class MoveRun:
    """A move from its arrival to its last part."""

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
        """
        Args:
            row_of: the row of a sequence, as this rank knows it.
            wanted: whether the row has not left here.
            sampler: where it is drawn here from then on, and was not before.
            next_turn: as in `LogProgress`.
        """
        self.message = message
        self.clock = StepClock()
        self.cancelled = False
        self.sampler = sampler
        self.state: SequenceProgress | None = None
        """Of the row at its end."""
        self.log_progress = LogProgress(partial(next_run, self), self.clock.yielding)
        self._engine, self._sequence_of, self._wanted = engine, sequence_of, wanted
        self._transfers = tuple(message.transfers())
        self._rounds = rounds_of(self._transfers)
        self._total = move_points(message, engine.spec.layers)
        self.leads = engine.rank == leader_of(message, engine.layout)
        self._took_slots = False
        self._sent_bytes = self._received = 0

    @property
    def step_id(self) -> int:
        """By which the log names it."""
        return self.message.step_id

    @property
    def sequences(self) -> tuple[int, ...]:
        """The row."""
        return (self.message.sequence_id,)

    # --- slots ---------------------------------------------------------------------------------

    def _spans(self, *, sender: int | None = None, receiver: int | None = None) -> list[Span]:
        return [
            transfer.span
            for transfer in self._transfers
            if transfer.sender == sender or transfer.receiver == receiver
        ]

    def take_slots(self) -> bool:
        """Take the slots of what comes here: all or none, and whether it has them. Those of a row
        that has left are somebody else's already; the log is about to drop its move. What the
        row's step is about to move away may be what this moves back."""
        slots, sequence_id = self._engine.pool.slots, self.message.sequence_id
        spans = self._spans(receiver=self._engine.instance)
        if not self._wanted() or any(slots.runs(sequence_id, span) for span in spans):
            return False
        try:
            slots.allocate(sequence_id, spans)
        except OutOfSlots:
            return False
        self._took_slots = True
        return True

    def free_slots(self) -> None:
        """Free what `take_slots` took, of a move that does not come to its end."""
        if self._took_slots:
            self._free(self._spans(receiver=self._engine.instance))

    def release_sources(self) -> None:
        """Free what lies elsewhere now, or is to."""
        self._free(self._spans(sender=self._engine.instance))

    def _free(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self._engine.pool.slots.free_span(self.message.sequence_id, span)

    # --- the engine thread ---------------------------------------------------------------------

    def carry_out(self) -> None:
        """All parts; returns when the log has let the move come to its end, or stopped it."""
        self.clock.started = time.monotonic()
        traced = begin(
            "row.move",
            self.message.trace,
            {"csps.rank": self._engine.rank, "csps.job": self.step_id},
        )
        try:
            self._carry_out()
        except StepAborted:
            self.cancelled = True
            self.free_slots()
        finally:
            self.clock.finished = time.monotonic()
            traced.set_attribute("csps.tokens", self._received)
            traced.set_attribute("csps.bytes_sent", self._sent_bytes)
            traced.set_attribute("csps.cancelled", self.cancelled)
            traced.end()

    def _carry_out(self) -> None:
        layers = range(self._engine.spec.layers)
        self.log_progress.reach(0)
        known = Span(0, self._send_state().next)
        part = 1
        for number in range(self._rounds):
            rows = slice(number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS)
            block = [transfer.part(rows).within(known) for transfer in self._transfers]
            for layer in layers:
                self.log_progress.reach(part)
                self._exchange(block, [layer])
                part += 1
        self.state = self._send_state()
        since = Span(known.stop, self.state.next)
        self._exchange([transfer.within(since) for transfer in self._transfers], layers)
        self._send_penalties()
        self.log_progress.end(self._total)

    def moved(self) -> SequenceMoved:
        """What the router is told."""
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
        outgoing = [it for it in moving if it.sender == here]
        incoming = [it for it in moving if it.receiver == here]
        sends = [(self._peer(it.receiver), self._read(it.span, layers)) for it in outgoing]
        shape = (pool.kv_heads, pool.head_dim)
        buffers = [pool.k.new_empty(len(layers), 2, it.span.length, *shape) for it in incoming]
        recvs = [
            (self._peer(it.sender), buffer) for it, buffer in zip(incoming, buffers, strict=True)
        ]
        with self.clock.communicating():
            self._engine.mesh.exchange(sends, recvs, Tag.KV_MOVE).wait()
        for it, buffer in zip(incoming, buffers, strict=True):
            for layer, (k_thd, v_thd) in zip(layers, buffer, strict=True):
                pool.write(layer, sequence_id, it.span, k_thd, v_thd)
        if layers[-1] == self._engine.spec.layers - 1:
            self._received += sum(it.span.length for it in incoming)
        self._sent_bytes += sum(tensor.nbytes for _, tensor in sends)

    def _read(self, span: Span, layers: Sequence[int]) -> Tensor:
        """(layers, 2, t, h, d)."""
        pool, sequence_id = self._engine.pool, self.message.sequence_id
        return torch.stack([torch.stack(pool.read(layer, sequence_id, span)) for layer in layers])

    def _send_state(self) -> SequenceProgress:
        """The master tells all other members."""
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

    def _send_penalties(self) -> None:
        """What the sampler of the next master has to remember of the answer."""
        before, after = self.message.before.master, self.message.after.master
        if before == after:
            return
        if self._engine.instance == before:
            sampler = self._sequence_of(self.message.sequence_id).sampler
            if sampler is not None and sampler.penalties is not None:
                self._send(sampler.penalties.counts_v.cpu(), [after])
        elif self.sampler is not None and self.sampler.penalties is not None:
            self._recv(self.sampler.penalties.counts_v, before)

    def _send(self, words: Tensor, instances: Sequence[int]) -> None:
        mesh = self._engine.mesh
        pending = [
            mesh.send(words, self._peer(instance), ControlTag.ROW_STATE) for instance in instances
        ]
        for it in pending:
            it.wait(PEER_DEADLINE)

    def _recv(self, words: Tensor, instance: int) -> None:
        self._engine.mesh.recv(words, self._peer(instance), ControlTag.ROW_STATE).wait(
            PEER_DEADLINE
        )

    def _peer(self, instance: int) -> int:
        return self._engine.layout.rank_of(instance, self._engine.tp_rank)


def rounds_of(transfers: Iterable[InstanceTransfer]) -> int:
    """Blocks of the longest transfer; all pairs move one of theirs at a time."""
    return max((-(-transfer.span.length // BLOCK_TOKENS) for transfer in transfers), default=0)


def move_points(message: MoveSequence, layers: int) -> int:
    """The last part of a move; alike at all ranks, members or not."""
    return 1 + rounds_of(message.transfers()) * layers


def leader_of(message: MoveSequence, layout: GangLayout) -> int:
    """Which rank reports how long the parts take: one that moves most."""
    longest = max(message.transfers(), key=lambda it: it.span.length, default=None)
    instance = message.before.master if longest is None else longest.sender
    return layout.rank_of(instance, 0)
