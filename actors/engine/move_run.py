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

from csps.actors.engine.engine import Engine
from csps.actors.engine.log_turns import LogTurns, StepAborted
from csps.actors.engine.rows import Row
from csps.actors.job_clock import JobClock
from csps.actors.layout import GangLayout
from csps.actors.mesh import ControlTag, Tag
from csps.actors.process_group import PEER_DEADLINE
from csps.actors.slot_allocator import OutOfSlots
from csps.actors.token_sampler import TokenSampler
from csps.protocols.log_entries import Run
from csps.protocols.row_move import MoveRow, RowMoved, Transfer
from csps.protocols.span import Span
from csps.protocols.trace_context import begin

BLOCK_TOKENS = 4096
"""Of one pair of instances and one layer, between two points at which the move can stand still."""


@dataclass(frozen=True)
class RowAt:
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
        message: MoveRow,
        *,
        row_of: Callable[[int], Row],
        wanted: Callable[[], bool],
        sampler: TokenSampler | None,
        next_turn: Callable[[MoveRun], tuple[int, Run] | None],
    ) -> None:
        """
        Args:
            row_of: the row of a sequence, as this rank knows it.
            wanted: whether the row has not left here.
            sampler: where it is drawn here from then on, and was not before.
            next_turn: as in `LogTurns`.
        """
        self.message = message
        self.clock = JobClock()
        self.cancelled = False
        self.sampler = sampler
        self.state: RowAt | None = None
        """Of the row at its end."""
        self.turns = LogTurns(partial(next_turn, self), self.clock.yielding)
        self._engine, self._row_of, self._wanted = engine, row_of, wanted
        self._transfers = tuple(message.transfers())
        self._rounds = rounds_of(self._transfers)
        self._total = move_parts(message, engine.spec.layers)
        self.leads = engine.rank == leader_of(message, engine.layout)
        self._took_slots = False
        self._sent_bytes = self._received = 0

    @property
    def number(self) -> int:
        """By which the log names it."""
        return self.message.job_id

    @property
    def sequences(self) -> tuple[int, ...]:
        """The row."""
        return (self.message.rid,)

    # --- slots ---------------------------------------------------------------------------------

    def _spans(self, *, source: int | None = None, target: int | None = None) -> list[Span]:
        return [it.span for it in self._transfers if it.source == source or it.target == target]

    def take_slots(self) -> bool:
        """Take the slots of what comes here: all or none, and whether it has them. Those of a row
        that has left are somebody else's already; the log is about to drop its move. What the
        row's step is about to move away may be what this moves back."""
        slots, rid = self._engine.pool.slots, self.message.rid
        spans = self._spans(target=self._engine.instance)
        if not self._wanted() or any(slots.runs(rid, span) for span in spans):
            return False
        try:
            slots.allocate(rid, spans)
        except OutOfSlots:
            return False
        self._took_slots = True
        return True

    def give_back(self) -> None:
        """Free what `take_slots` took, of a move that does not come to its end."""
        if self._took_slots:
            self._free(self._spans(target=self._engine.instance))

    def release_sources(self) -> None:
        """Free what lies elsewhere now, or is to."""
        self._free(self._spans(source=self._engine.instance))

    def _free(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self._engine.pool.slots.free_span(self.message.rid, span)

    # --- the engine thread ---------------------------------------------------------------------

    def carry_out(self) -> None:
        """All parts; returns when the log has let the move come to its end, or stopped it."""
        self.clock.started = time.monotonic()
        traced = begin(
            "row.move",
            self.message.trace,
            {"csps.rank": self._engine.rank, "csps.job": self.number},
        )
        try:
            self._carry_out()
        except StepAborted:
            self.cancelled = True
            self.give_back()
        finally:
            self.clock.finished = time.monotonic()
            traced.set_attribute("csps.tokens", self._received)
            traced.set_attribute("csps.bytes_sent", self._sent_bytes)
            traced.set_attribute("csps.cancelled", self.cancelled)
            traced.end()

    def _carry_out(self) -> None:
        layers = range(self._engine.spec.layers)
        self.turns.come_to(0)
        known = Span(0, self._tell_state().next)
        part = 1
        for number in range(self._rounds):
            rows = slice(number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS)
            block = [it.part(rows).within(known) for it in self._transfers]
            for layer in layers:
                self.turns.come_to(part)
                self._exchange(block, [layer])
                part += 1
        self.state = self._tell_state()
        since = Span(known.stop, self.state.next)
        self._exchange([it.within(since) for it in self._transfers], layers)
        self._tell_drawn()
        self.turns.end(self._total)

    def moved(self) -> RowMoved:
        """What the router is told."""
        clock = self.clock
        return RowMoved(
            rid=self.message.rid,
            rank=self._engine.rank,
            tokens=self._received,
            sent_bytes=self._sent_bytes,
            seconds=clock.finished - clock.started - clock.yielded_s,
        )

    # --- exchanges -----------------------------------------------------------------------------

    def _exchange(self, transfers: Sequence[Transfer], layers: Sequence[int]) -> None:
        """Move these positions in some layers."""
        here, rid, pool = self._engine.instance, self.message.rid, self._engine.pool
        moving = [it for it in transfers if it.span.length]
        outgoing = [it for it in moving if it.source == here]
        incoming = [it for it in moving if it.target == here]
        sends = [(self._peer(it.target), self._read(it.span, layers)) for it in outgoing]
        shape = (pool.kv_heads, pool.head_dim)
        buffers = [pool.k.new_empty(len(layers), 2, it.span.length, *shape) for it in incoming]
        recvs = [
            (self._peer(it.source), buffer) for it, buffer in zip(incoming, buffers, strict=True)
        ]
        with self.clock.communicating():
            self._engine.mesh.exchange(sends, recvs, Tag.KV_MOVE).wait()
        for it, buffer in zip(incoming, buffers, strict=True):
            for layer, (k_thd, v_thd) in zip(layers, buffer, strict=True):
                pool.write(layer, rid, it.span, k_thd, v_thd)
        if layers[-1] == self._engine.spec.layers - 1:
            self._received += sum(it.span.length for it in incoming)
        self._sent_bytes += sum(tensor.nbytes for _, tensor in sends)

    def _read(self, span: Span, layers: Sequence[int]) -> Tensor:
        """(layers, 2, t, h, d)."""
        pool, rid = self._engine.pool, self.message.rid
        return torch.stack([torch.stack(pool.read(layer, rid, span)) for layer in layers])

    def _tell_state(self) -> RowAt:
        """The master tells all other members."""
        words = torch.zeros(4, dtype=torch.int64)
        master = self.message.before.master
        if self._engine.instance == master:
            row = self._row_of(self.message.rid)
            words = torch.tensor([row.next, row.token, row.index, row.over], dtype=torch.int64)
            others = [it for it in self.message.instances if it != master]
            self._tell(words, others)
        else:
            self._hear(words, master)
        following, token, index, over = words.tolist()
        return RowAt(following, token, index, bool(over))

    def _tell_drawn(self) -> None:
        """What the sampler of the next master has to remember of the answer."""
        before, after = self.message.before.master, self.message.after.master
        if before == after:
            return
        if self._engine.instance == before:
            sampler = self._row_of(self.message.rid).sampler
            if sampler is not None and sampler.penalties is not None:
                self._tell(sampler.penalties.counts_v.cpu(), [after])
        elif self.sampler is not None and self.sampler.penalties is not None:
            self._hear(self.sampler.penalties.counts_v, before)

    def _tell(self, words: Tensor, instances: Sequence[int]) -> None:
        mesh = self._engine.mesh
        told = [mesh.tell(words, self._peer(it), ControlTag.ROW_STATE) for it in instances]
        for it in told:
            it.wait(PEER_DEADLINE)

    def _hear(self, words: Tensor, instance: int) -> None:
        self._engine.mesh.hear(words, self._peer(instance), ControlTag.ROW_STATE).wait(
            PEER_DEADLINE
        )

    def _peer(self, instance: int) -> int:
        return self._engine.layout.rank_of(instance, self._engine.tp_rank)


def rounds_of(transfers: Iterable[Transfer]) -> int:
    """Blocks of the longest transfer; all pairs move one of theirs at a time."""
    return max((-(-it.span.length // BLOCK_TOKENS) for it in transfers), default=0)


def move_parts(message: MoveRow, layers: int) -> int:
    """The last part of a move; alike at all ranks, members or not."""
    return 1 + rounds_of(message.transfers()) * layers


def leader_of(message: MoveRow, layout: GangLayout) -> int:
    """Which rank reports how long the parts take: one that moves most."""
    longest = max(message.transfers(), key=lambda it: it.span.length, default=None)
    instance = message.before.master if longest is None else longest.source
    return layout.rank_of(instance, 0)
