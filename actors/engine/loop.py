"""The engine loop of a rank: it does what the gang's log says, entry by entry.

A step of a prompt and an iteration of the stream are entries of one log, which rank 0's conductor
interleaves. A step that has come as far as it was told to stands still inside `_next_turn`, which
does what else the log says; urgent steps and iterations run there, above its stack, so that a rank
holds at most a long step, an urgent one and an iteration.

`run` is the engine thread's body. Everything else is called from other threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

import torch
from torch import Tensor

from csps.actors.announce import Notify
from csps.actors.engine.departures import Departures
from csps.actors.engine.engine import Engine
from csps.actors.engine.first_tokens import draw_first_tokens
from csps.actors.engine.kv_reclaim import KvReclaim
from csps.actors.engine.log_end import LogEnd
from csps.actors.engine.logged_step import LoggedStep
from csps.actors.engine.move_run import MoveRun
from csps.actors.engine.moves import Rows
from csps.actors.engine.step_desk import StepDesk
from csps.actors.engine.step_reports import StepReports
from csps.actors.engine.step_run import StepRun
from csps.actors.engine.stream import Stream
from csps.actors.progress_report import ProgressReport
from csps.actors.sampler_request import sampler_of
from csps.actors.slot_allocator import NotHeld
from csps.protocols.errors import CspsError
from csps.protocols.log_entries import (
    Abort,
    Change,
    EndOwner,
    Entry,
    Free,
    Iterate,
    Iterated,
    Place,
    Prepared,
    Ran,
    Run,
    Shutdown,
)
from csps.protocols.messages import Reserve
from csps.protocols.prefill_job import PrefillJob
from csps.protocols.row_move import MoveRow

_log = logging.getLogger(__name__)


class Lane(IntEnum):
    """Of exchanges (`Mesh.lane`), by what interrupts what: alike at all members, also where
    nothing is interrupted."""

    LONG = 0
    URGENT = 1
    STREAM = 2


class _Ended(Exception):
    """The log has ended."""


class EngineLoop:
    """One rank's work."""

    def __init__(
        self, engine: Engine, notify: Notify, log: LogEnd, *, in_place: bool = False
    ) -> None:
        """
        Args:
            in_place: what steps compute is decoded by this gang's stream, where it lies.
        """
        self._engine = engine
        self._in_place = in_place
        self._reports = StepReports(notify, engine.rank)
        self._log = log
        self._desk = StepDesk(self._acknowledge)
        self._kv = KvReclaim(
            engine,
            self._reports,
            reserved=self._is_reserved,
            slots_came_back=self._desk.slots_came_back,
        )
        self.stream = Stream(engine, notify, self._kv.let_go)
        self._progress = ProgressReport(notify, rank=engine.rank)
        self.departures = Departures(
            engine, self._reports, progress=self._progress.step, left=self._left
        )
        self._changing = threading.Lock()
        """Held while it is found out which sequences of a step have slots in the stream's name, and
        while the stream lets go of some."""
        self._running: list[LoggedStep] = []
        """Begun and not over, each above the one before."""
        self._moved: dict[int, MoveRun] = {}
        """By row, moves that are over and of which the log is about to say so."""

    # --- called from the RPC thread --------------------------------------------------------

    def submit(self, job: PrefillJob, owner: int) -> None:
        """Put a step in line, if this rank is a member of its group. If some history is not here,
        its sequences fail, and the step never begins.

        Args:
            owner: the router's attachment, at whose end nobody wants it any more.
        """
        if self._engine.instance not in job.group:
            return
        with self._changing:
            try:
                self._kv.enter(job)
            except NotHeld as error:
                self.refuse(job, error)
                return
            reserved = self._reserved(job) if self._in_place else frozenset()
        run = StepRun(
            self._engine,
            job,
            reserved=reserved,
            next_turn=self._next_turn,
            progress=self._progress.step,
        )
        if not self._desk.add(run, owner):
            self._give_up(run)

    def move(self, message: MoveRow, owner: int) -> None:
        """Put a move of a row in line, if this rank is a member. Nothing of a row that has left:
        the log drops the move then.

        Raises:
            InvalidRequest: the sampling parameters do not fit the model.
        """
        if self._engine.instance not in message.instances:
            return
        with self._changing:
            find, rid = self.stream.reservations.find, message.rid
            if (reservation := find(rid)) is None:
                return
            drawn_here = message.after.master == self._engine.instance
            begins_here = drawn_here and message.before.master != self._engine.instance
            request, vocab = reservation.request, self._engine.spec.vocab
            run = MoveRun(
                self._engine,
                message,
                row_of=self.stream.row,
                wanted=lambda: find(rid) is not None,
                sampler=sampler_of(request, vocab) if begins_here else None,
                next_turn=self._next_turn,
            )
            if not self._desk.add(run, owner):
                self._give_up(run)

    def reserve(self, request: Reserve, owner: int) -> None:
        """Set slots aside for a sequence that this gang decodes; see `Reservations.reserve`."""
        self.stream.reservations.reserve(request, owner)
        if request.stays:
            self._kv.stay(request.rid)

    def _reserved(self, job: PrefillJob) -> frozenset[int]:
        """Sequences of a step that have slots in the stream's name."""
        reserved = frozenset(it.rid for it in job.pieces if self._is_reserved(it.rid))
        for piece in job.pieces:
            if piece.placement and piece.rid not in reserved:
                self._kv.given_up(piece.rid)  # the stream has let go of it already
        return reserved

    def _is_reserved(self, rid: int) -> bool:
        return self.stream.reservations.find(rid) is not None

    def refuse(self, job: PrefillJob, error: CspsError) -> None:
        """Tell the router that a step does not get in line; its group has nothing to do with it."""
        if self._engine.instance not in job.group:
            return
        for piece in job.pieces:
            self._reports.failed(piece.rid, error)
        self._reports.done(job, None)

    def cancel(self, rid: int) -> None:
        """Nobody wants a sequence: what lies here between two of its steps can go now, the rest
        goes when the log says so. Harmless for an unknown one."""
        self.departures.withdraw(rid)
        self._kv.cancel(rid)

    def cancel_all(self) -> None:
        """Nobody wants anything: the router that asked for it is gone."""
        self._kv.cancel_all()

    @property
    def waiting(self) -> int:
        """Steps that have not begun."""
        return len(self._desk)

    # --- the engine thread -----------------------------------------------------------------

    def run(self) -> None:
        """Work until the log ends. An exception means that the gang is broken."""
        try:
            with torch.inference_mode():
                while True:
                    self._execute(self._log.next())
        except _Ended:
            return

    def _execute(self, entry: Entry) -> None:
        match entry.op:
            case Run() as turn:
                self._run(entry.seq, turn)
            case Iterate() as lease:
                self._iterate(entry.seq, lease)
            case Change() as change:
                with self._changing:
                    self.stream.change(change)
            case Abort(step):
                self._abort(step)
            case EndOwner(owner):
                self._end_owner(owner)
            case Free(sequence, spans):
                self._kv.release(sequence, spans)
            case Place() as place:
                self._place(place)
            case Shutdown():
                raise _Ended

    # --- steps -----------------------------------------------------------------------------

    def _run(self, seq: int, turn: Run) -> None:
        """Begin a step, and return when it is over: it has all its other turns from inside."""
        step = self._desk.take(turn.step)
        step.turns.begin(seq, turn)
        if isinstance(step, MoveRun):
            self._move(step)
        else:
            assert isinstance(step, StepRun)
            self._compute(step)

    @contextmanager
    def _on_top(self, step: LoggedStep, lane: Lane) -> Iterator[None]:
        """Of all that is under way."""
        self._running.append(step)
        try:
            with self._engine.mesh.lane(lane):
                yield
        finally:
            self._running.pop()

    def _move(self, move: MoveRun) -> None:
        with self._on_top(move, Lane.URGENT):
            move.carry_out()
        if move.cancelled:
            self._desk.slots_came_back()
            return
        self._moved[move.message.rid] = move
        self._report_turn(move)

    def _place(self, place: Place) -> None:
        """A row goes on where it was moved to."""
        move = self._moved.pop(place.sequence, None)
        with self._changing:
            self.stream.place(place, move)
        if move is not None:
            self._desk.slots_came_back()
            self._reports.moved(move)

    def _compute(self, run: StepRun) -> None:
        with self.departures.of(run) as send:
            with self._on_top(run, Lane.URGENT if run.job.urgent else Lane.LONG):
                run.compute(send, self._draw_first)
            self._desk.slots_came_back()  # what was moved away
            if not run.cancelled:
                self._report_turn(run)
                if self._in_place:
                    self._adopt(run)

    def _adopt(self, run: StepRun) -> None:
        """What a step has computed and keeps here is the stream's from now on."""
        for piece in run.job.pieces:
            for share in piece.placement:
                if share.instance == self._engine.instance:
                    self.stream.reservations.adopt(piece.rid, share.span)

    def _next_turn(self, run: LoggedStep) -> tuple[int, Run] | None:
        """A step has come as far as it was told to: do what else the log says until it says
        something about this step. None if it is to be stopped."""
        self._report_turn(run)
        while not run.cancelled:
            entry = self._log.next()
            if isinstance(entry.op, Run) and entry.op.step == run.number:
                assert self._running[-1] is run, "a step goes on below another one"
                return entry.seq, entry.op
            self._execute(entry)
        return None

    def _report_turn(self, run: LoggedStep) -> None:
        if run.leads:
            self._log.report(
                Ran(
                    rank=self._engine.rank,
                    seq=run.turns.seq,
                    step=run.number,
                    part=run.turns.reached,
                    nanoseconds=run.turns.ns,
                )
            )

    def _abort(self, step: int) -> None:
        """Those that have begun stop when they are on top again, before anything else is done for
        them; what was under way at this part all members have posted."""
        for run in self._running:
            if run.number == step:
                run.cancelled = True
                return
        if (dropped := self._desk.drop(step)) is not None:
            self._give_up(dropped)

    def _end_owner(self, owner: int) -> None:
        for dropped in self._desk.end_owner(owner):
            self._give_up(dropped)
        with self._changing:
            self.stream.end_owner(owner)

    def _draw_first(
        self,
        run: StepRun,
        x_td: Tensor,
        q_thd: Tensor,
        own: Rows,
        answered: Callable[[], None],
    ) -> None:
        fail = self._reports.failed
        self._reports.drawn(
            draw_first_tokens(self._engine, run.group, x_td, q_thd, own, answered, fail)
        )

    # --- the stream ------------------------------------------------------------------------

    def _iterate(self, seq: int, lease: Iterate) -> None:
        begin = time.monotonic_ns()
        finished: list[int] = []
        with self._engine.mesh.lane(Lane.STREAM):
            for _ in range(lease.n):
                finished += self.stream.iterate(lease.group)
                if self.stream.rides:
                    self._progress.step()
        if self._engine.tp_rank == 0:
            taken_ns = time.monotonic_ns() - begin
            rank = self._engine.rank
            self._log.report(Iterated(rank, seq, lease.stream, taken_ns, tuple(finished)))

    # --- over ------------------------------------------------------------------------------

    def _left(self, run: StepRun) -> None:
        """Any thread: a step was computed, and its KV has left."""
        self._kv.settle(run.job, cancelled=run.cancelled)
        self._reports.done(run.job, run)

    def _give_up(self, run: LoggedStep) -> None:
        """A step that never began."""
        run.give_back()
        if isinstance(run, StepRun):
            self._kv.settle(run.job, cancelled=True)
            self._reports.done(run.job, None)
        else:
            self._desk.slots_came_back()

    def _acknowledge(self, step: int) -> None:
        self._log.report(Prepared(self._engine.rank, step))
