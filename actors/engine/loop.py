"""The engine loop of a rank executes the gang's log, entry by entry.

Prefill steps, decode iterations and moves are entries of one log, in which rank 0's sequencer
interleaves them. A step runs up to the yield point that the log names. There it pauses inside
`_next_run`, which executes further entries until the log resumes the step. High-priority steps and
iterations run inside this call, above the paused step's stack, so a rank holds at most one
low-priority step, one high-priority step and one iteration.

`run` is the body of the engine thread. Other threads call everything else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import torch
from torch import Tensor

from csps.actors.attention.base.engine import Engine
from csps.actors.engine.decode_batch import DecodeBatch
from csps.actors.engine.first_tokens import sample_first_tokens
from csps.actors.engine.kv_lifetime import KvReclaim
from csps.actors.engine.kv_mover import OwnKv
from csps.actors.engine.log_end import LogEnd
from csps.actors.engine.move_run import MoveRun
from csps.actors.engine.pending_steps import LoggedStep, PendingSteps
from csps.actors.engine.step_reports import OutgoingTransfers, ProgressReport, StepReports
from csps.actors.engine.step_run import StepRun
from csps.actors.kv_cache.slot_allocator import NotHeld
from csps.actors.sampling.token_sampler import sampler_of
from csps.protocols.core.errors import CspsError
from csps.protocols.core.placement import Span
from csps.protocols.gang.messages import Notify, ReserveKv
from csps.protocols.gang.step_messages import MoveSequence, PrefillStep
from csps.protocols.sequencer.log_entries import (
    Abort,
    Change,
    EndOwner,
    Free,
    Iterate,
    Iterated,
    LogEntry,
    PlaceSequence,
    Prepared,
    RanQuantum,
    RunQuantum,
    Shutdown,
)

_log = logging.getLogger(__name__)


class Lane(IntEnum):
    """Lanes of exchanges (`Mesh.lane`), by what preempts what. All members number them alike, also
    where nothing is preempted."""

    LOW = 0
    HIGH = 1
    DECODE = 2


class _Ended(Exception):
    """The log has ended."""


class EngineLoop:
    """The work of one rank."""

    def __init__(
        self, engine: Engine, notify: Notify, log: LogEnd, *, in_place: bool = False
    ) -> None:
        """Args:
        in_place: this gang's decode batch decodes what steps compute, without a KV transfer.
        """
        self._engine = engine
        self._in_place = in_place
        self._reports = StepReports(notify, engine.rank)
        self._log = log
        self._pending_steps = PendingSteps(self._acknowledge)
        self._kv = KvReclaim(
            engine,
            self._reports,
            reserved=self._is_reserved,
            slots_freed=self._pending_steps.slots_freed,
        )
        self.decode_batch = DecodeBatch(engine, notify, self._kv.free_sequence)
        self._notify = notify
        self._piggyback_progress = ProgressReport(notify, rank=engine.rank)
        self.outgoing_transfers = OutgoingTransfers(engine, self._reports, on_sent=self._step_sent)
        self._changing = threading.Lock()
        """Lock around the look-up of which of a step's sequences are reserved, and around changes
        of the decode batch that free some."""
        self._running: list[LoggedStep] = []
        """Steps begun and not over, each above the one before."""
        self._moved: dict[int, MoveRun] = {}
        """Moves that are over, by sequence, until the log places the sequence."""

    # --- called from the RPC thread --------------------------------------------------------

    def submit(self, step: PrefillStep, owner: int) -> None:
        """Queue a step if this rank is a member of its group. If some of its history is not here,
        its sequences fail and the step never begins.

        Args:
            owner: the router's attachment; when it ends, the step is dropped.
        """
        if self._engine.instance not in step.group:
            return
        with self._changing:
            try:
                self._kv.enter(step)
            except NotHeld as error:
                self.refuse(step, error)
                return
            reserved, departed = self._reserved(step) if self._in_place else (set(), set())
        progress = ProgressReport(self._notify, rank=self._engine.rank, step_id=step.step_id)
        run = StepRun(
            self._engine,
            step,
            reserved=reserved,
            departed=departed,
            next_run=self._next_run,
            progress=progress.step,
        )
        if not self._pending_steps.add(run, owner):
            self._give_up(run)

    def move(self, message: MoveSequence, owner: int) -> None:
        """Queue a move of a sequence if this rank is a member. A move of a sequence that has left
        is ignored here, and the log drops it.

        Raises:
            InvalidRequest: the sampling parameters do not fit the model.
        """
        if self._engine.instance not in message.instances:
            return
        with self._changing:
            find, sequence_id = self.decode_batch.reservations.find, message.sequence_id
            if find(sequence_id) is None:
                return
            samples_here = message.after.master == self._engine.instance
            begins_here = samples_here and message.before.master != self._engine.instance
            engine = self._engine
            run = MoveRun(
                self._engine,
                message,
                sequence_of=self.decode_batch.sequence,
                wanted=lambda: find(sequence_id) is not None,
                sampler=sampler_of(message.sampler, engine.spec.vocab, engine.grammars)
                if begins_here
                else None,
                next_run=self._next_run,
            )
            if not self._pending_steps.add(run, owner):
                self._give_up(run)

    def reserve(self, request: ReserveKv, owner: int) -> None:
        """Reserve slots for a sequence that this gang decodes; see `Reservations.reserve`."""
        # Retained first: the log may let the sequence leave as soon as it is reserved, and its id
        # would stay although nothing of it is left.
        if request.retain:
            self._kv.retain_at_end(request.sequence_id)
        try:
            self.decode_batch.reservations.reserve(request, owner)
        except CspsError:
            self._kv.unretain(request.sequence_id)
            raise

    def _reserved(self, step: PrefillStep) -> tuple[set[int], set[int]]:
        """Return the sequences of a step whose slots the decode batch has reserved, and those that
        have left it before the step arrived."""
        reserved = {
            chunk.sequence_id for chunk in step.chunks if self._is_reserved(chunk.sequence_id)
        }
        departed = {chunk.sequence_id for chunk in step.chunks if chunk.placement} - reserved
        for sequence_id in departed:
            self._kv.cancel_step_of(sequence_id)
        return reserved, departed

    def _is_reserved(self, sequence_id: int) -> bool:
        return self.decode_batch.reservations.find(sequence_id) is not None

    def refuse(self, step: PrefillStep, error: CspsError) -> None:
        """Report to the router that a step failed; ignored on ranks outside its group."""
        if self._engine.instance not in step.group:
            return
        _log.warning("step %d refused: %s", step.step_id, error)
        for chunk in step.chunks:
            self._reports.failed(chunk.sequence_id, error)
        self._reports.done(step, None)

    def cancel(self, sequence_id: int) -> None:
        """Cancel a sequence: free KV that is idle between two of its steps now, the rest when the
        log says so. An unknown sequence is ignored."""
        _log.debug("cancel sequence %d", sequence_id)
        self.outgoing_transfers.cancel(sequence_id)
        self._kv.cancel(sequence_id)

    def adopt(self, sequence_id: int, spans: Sequence[Span]) -> None:
        """Allocate slots for KV that comes from files; raises as `KvReclaim.adopt`."""
        self._kv.adopt(sequence_id, spans)

    def slots_freed(self) -> None:
        """Retry steps that wait for slots. Called from any thread."""
        self._pending_steps.slots_freed()

    def cancel_all(self) -> None:
        """Cancel all sequences, because the router that asked for them is gone."""
        self._kv.cancel_all()

    @property
    def waiting(self) -> int:
        """Return the number of steps that have not begun."""
        return len(self._pending_steps)

    # --- the engine thread -----------------------------------------------------------------

    def run(self) -> None:
        """Work until the log ends. An exception means that the gang is broken."""
        try:
            with torch.inference_mode():
                while True:
                    self._execute(self._log.next())
        except _Ended:
            return

    def _execute(self, entry: LogEntry) -> None:
        match entry.op:
            case RunQuantum() as quantum:
                self._run(entry.seq, quantum)
            case Iterate() as grant:
                self._iterate(entry.seq, grant)
            case Change() as change:
                with self._changing:
                    self.decode_batch.change(change)
            case Abort(step):
                self._abort(step)
            case EndOwner(owner):
                self._end_owner(owner)
            case Free(sequence, spans):
                self._kv.evict(sequence, spans)
            case PlaceSequence() as place:
                self._place(place)
            case Shutdown():
                raise _Ended

    # --- steps -----------------------------------------------------------------------------

    def _run(self, seq: int, quantum: RunQuantum) -> None:
        """Run a step to its end; entries that resume it are consumed inside."""
        step = self._pending_steps.take(quantum.step)
        _log.debug("step %d begins at log entry %d", quantum.step, seq)
        step.log_progress.begin(seq, quantum)
        if isinstance(step, MoveRun):
            self._move(step)
        else:
            assert isinstance(step, StepRun)
            self._compute(step)

    @contextmanager
    def _on_top(self, step: LoggedStep, lane: Lane) -> Iterator[None]:
        """Register a step as the topmost running one, with exchanges in its lane."""
        self._running.append(step)
        try:
            with self._engine.mesh.lane(lane):
                yield
        finally:
            self._running.pop()

    def _move(self, move: MoveRun) -> None:
        with self._on_top(move, Lane.HIGH):
            move.carry_out()
        if move.cancelled:
            self._pending_steps.slots_freed()
            return
        self._moved[move.message.sequence_id] = move
        self._report_progress(move)

    def _place(self, place: PlaceSequence) -> None:
        """Let a sequence continue at the instances that it was moved to."""
        move = self._moved.pop(place.sequence, None)
        with self._changing:
            self.decode_batch.place(place, move)
        if move is not None:
            self._pending_steps.slots_freed()
            self._reports.moved(move)

    def _compute(self, run: StepRun) -> None:
        with self.outgoing_transfers.of(run) as send:
            with self._on_top(run, Lane.HIGH if run.step.high_priority else Lane.LOW):
                run.compute(send, self._sample_first, self._reports.report_prompt_logprobs)
            self._pending_steps.slots_freed()  # the slots of KV that the step has moved away
            if not run.cancelled:
                self._report_progress(run)
                if self._in_place:
                    self._adopt(run)

    def _adopt(self, run: StepRun) -> None:
        """Hand KV that a step has computed and stored here to the decode batch."""
        for chunk in run.step.chunks:
            for kv_slice in chunk.placement:
                if kv_slice.instance == self._engine.instance:
                    self.decode_batch.reservations.adopt(chunk.sequence_id, kv_slice.span)

    def _next_run(self, run: LoggedStep) -> tuple[int, RunQuantum] | None:
        """Execute log entries until one resumes this step, which has reached its yield point.

        Return the resuming entry with its number in the log, or None if the step is to stop.
        """
        self._report_progress(run)
        while not run.cancelled:
            entry = self._log.next()
            if isinstance(entry.op, RunQuantum) and entry.op.step == run.step_id:
                assert self._running[-1] is run, f"step {run.step_id} resumes below another one"
                return entry.seq, entry.op
            self._execute(entry)
        return None

    def _report_progress(self, run: LoggedStep) -> None:
        if run.leads:
            self._log.report(
                RanQuantum(
                    rank=self._engine.rank,
                    seq=run.log_progress.seq,
                    step=run.step_id,
                    yield_point=run.log_progress.reached,
                    nanoseconds=run.log_progress.ns,
                )
            )

    def _abort(self, step: int) -> None:
        """Abort a step. One that has begun stops when it is on top again, before anything else is
        done for it; all members have posted the exchanges up to this yield point."""
        _log.debug("abort step %d", step)
        for run in self._running:
            if run.step_id == step:
                run.cancelled = True
                return
        if (dropped := self._pending_steps.drop(step)) is not None:
            self._give_up(dropped)

    def _end_owner(self, owner: int) -> None:
        for dropped in self._pending_steps.end_owner(owner):
            self._give_up(dropped)
        with self._changing:
            self.decode_batch.end_owner(owner)

    def _sample_first(
        self,
        run: StepRun,
        x_td: Tensor,
        q_thd: Tensor,
        own: OwnKv,
        answered: Callable[[], None],
    ) -> None:
        fail = self._reports.failed
        self._reports.report_sampled(
            sample_first_tokens(self._engine, run.group, x_td, q_thd, own, answered, fail)
        )

    # --- the decode batch ------------------------------------------------------------------

    def _iterate(self, seq: int, grant: Iterate) -> None:
        begin = time.monotonic_ns()
        finished: list[int] = []
        with self._engine.mesh.lane(Lane.DECODE):
            for _ in range(grant.iterations):
                finished += self.decode_batch.iterate(grant.group)
                if self.decode_batch.piggybacked:
                    self._piggyback_progress.step()
        if self._engine.tp_rank == 0:
            taken_ns = time.monotonic_ns() - begin
            rank = self._engine.rank
            self._log.report(Iterated(rank, seq, grant.batch, taken_ns, tuple(finished)))

    # --- ends ------------------------------------------------------------------------------

    def _step_sent(self, run: StepRun) -> None:
        """Finish a step whose KV has been sent. Called from any thread."""
        self._kv.finalize(run.step, cancelled=run.cancelled)
        self._reports.done(run.step, run)

    def _give_up(self, run: LoggedStep) -> None:
        """Drop a step that never began."""
        run.free_slots()
        if isinstance(run, StepRun):
            self._kv.finalize(run.step, cancelled=True)
            self._reports.done(run.step, None)
        else:
            self._pending_steps.slots_freed()

    def _acknowledge(self, step: int) -> None:
        self._log.report(Prepared(self._engine.rank, step))
