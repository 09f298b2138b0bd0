"""Who computes when on a gang's ranks: the order of its log.

Steps and streams on overlapping groups of ranks share one order, so that no two ranks wait for each
other: each executes what names it, in the log's order, and the oldest entry that is not executed
everywhere can always be executed. What a scheduler decided comes in as events, with what ranks
report; entries come out. There is no clock and no input or output here, nothing is iterated but in
a fixed order, and all numbers are whole: the same calls give the same entries.

A rank has at most a long step, above it an urgent one, and above both an iteration of a stream.
Whatever this waits for is the report of an entry that is in the log already, so it will come: a
stream never waits for a step's report, a step waits for its own and for the leases of streams on
its ranks.
"""

from __future__ import annotations

from csps.protocols.conducting.steps import Quantum, Step, Steps, StepTask
from csps.protocols.conducting.streams import Stream, Streams
from csps.protocols.conducting.turn_order import TurnOrder
from csps.protocols.errors import ProtocolError
from csps.protocols.log_entries import (
    Abort,
    Change,
    EndOwner,
    Entry,
    Free,
    Iterate,
    Iterated,
    Leaving,
    Op,
    Place,
    Prepared,
    Ran,
    Report,
    Run,
    Shutdown,
)
from csps.protocols.span import Span

QUANTUM_NS = 50_000_000
SHORT_ROWS = 4096
"""Steps of up to so many tokens take about as long for each of them: attention is a small part."""


class Conductor:
    """Appends to a gang's log. After any number of events, `take` has what they lead to."""

    def __init__(self, ranks: int, quantum_ns: int = QUANTUM_NS) -> None:
        """For a gang of `ranks` ranks; a step computes for about `quantum_ns` at a time."""
        self._ranks = tuple(range(ranks))
        self._quantum_ns = quantum_ns
        self._steps = Steps(ranks)
        self._streams = Streams(ranks)
        self._turns = TurnOrder(ranks, self._steps, self._streams)
        self._row_ns = 0
        """What a token of a short step has taken; 0 before the first one."""
        self._ended: set[int] = set()
        self._closed = False
        self._seq = 0
        self._log: list[tuple[Entry, tuple[int, ...]]] = []

    def take(self) -> list[tuple[Entry, tuple[int, ...]]]:
        """Entries to append now, in order, each with the ranks that execute it."""
        if not self._closed:
            self._steps.start()
            self._empty_streams()
            while self._quanta() or self._lease():
                pass
        log, self._log = self._log, []
        return log

    # Events

    def open_stream(
        self, stream: int, ranks: tuple[int, ...], masters: tuple[int, ...] = ()
    ) -> None:
        """A stream without rows, whose iterations its ranks do together.

        Args:
            masters: ranks that each report every lease; the first one if none is named, where that
                one speaks for all.
        """
        self._streams.open(stream, ranks, masters or ranks[:1])

    def submit(self, task: StepTask) -> None:
        """A step is to be run once its ranks have prepared it, of which they may tell before. One
        that moves a row's KV goes with the row: nothing is moved of what has left."""
        if self._closed or task.owner in self._ended:
            self._steps.refuse(task)
            return
        if task.places:
            stream = self._streams.of_row(task.sequences[0])
            if stream is None:
                self._append(Abort(task.id), task.ranks)
                self._steps.refuse(task)
                return
            if task.sequences[0] in stream.joined:  # ranks look for the row when the step begins
                self._change(stream)
        self._steps.add(task)

    def join(
        self,
        stream: int,
        sequence: int,
        token: int | None,
        owner: int,
        budget: int = 0,
        ranks: tuple[int, ...] = (),
    ) -> None:
        """A sequence becomes a row of a stream; its first iteration is given `token`, or a piece
        of its prompt.

        Args:
            budget: the stream's from now on, unless it is 0.
            ranks: whom the row concerns; all of the stream's if none is named. Rows that have no
                rank in common are iterated apart.
        """
        if not self._closed and owner not in self._ended:
            self._streams.join(stream, sequence, token, owner, budget, ranks)

    def report(self, report: Report) -> None:
        """What a rank reports.

        Raises:
            ProtocolError: it reports what it was not told to do.
        """
        match report:
            case Prepared(rank, step):
                self.prepared(step, rank)
            case Ran(rank, seq, step, part, nanoseconds):
                self.ran(rank, seq, step, part, nanoseconds)
            case Iterated(rank, seq, stream, nanoseconds, finished):
                self.iterated(rank, seq, stream, nanoseconds, finished)
            case Leaving():
                self.shutdown()

    @property
    def unprepared(self) -> tuple[int, ...]:
        """Submitted steps that some of their ranks have not prepared."""
        return self._steps.unprepared()

    def prepared(self, step: int, rank: int) -> None:
        """A rank has a step's tokens, and has taken its slots."""
        self._steps.prepare(step, rank)

    def ran(self, rank: int, seq: int, step: int, part: int, nanoseconds: int) -> None:
        """A step's leader has executed a quantum; nothing if the step was aborted since.

        Raises:
            ProtocolError: it is not the step's oldest quantum, or another rank reports it.
        """
        running = self._steps.get(step)
        if running is None:
            return
        if rank != running.task.leader or not running.outstanding:
            raise ProtocolError(f"rank {rank} reports entry {seq} of step {step} unasked")
        quantum = running.outstanding[0]
        if quantum.seq != seq or part > running.task.parts:
            raise ProtocolError(f"rank {rank} reports entry {seq} of step {step} out of order")
        running.outstanding.popleft()
        running.ran_parts += quantum.parts
        running.ran_ns += nanoseconds
        if quantum.until == running.task.parts:
            self._measured(running)
            self._steps.remove(running)

    def _measured(self, step: Step) -> None:
        if 0 < step.task.rows <= SHORT_ROWS:
            latest = max(1, step.ran_ns // step.task.rows)
            self._row_ns = (3 * self._row_ns + latest) // 4 if self._row_ns else latest

    def iterated(
        self, rank: int, seq: int, stream: int, nanoseconds: int, finished: tuple[int, ...] = ()
    ) -> None:
        """A master has executed a lease. It is over when all of the stream's masters say so; rows
        that finished leave whenever theirs does.

        Raises:
            ProtocolError: the stream has no such master, or no such lease.
        """
        iterating = self._streams.get(stream)
        lease = None if iterating is None else iterating.leases.get(seq)
        if iterating is None or lease is None or rank not in lease.masters:
            raise ProtocolError(f"rank {rank} reports entry {seq} of stream {stream} unasked")
        iterating.measured(seq, nanoseconds)
        for sequence in finished:
            if self._streams.finish(iterating, sequence, seq):
                self._end_moves(sequence)

    def _end_moves(self, sequence: int) -> None:
        """A row has left: its KV is not moved any further."""
        for step in self._steps.of_sequence(sequence):
            if step.task.places and not step.ending:
                self._abort(step)

    def cancel(self, sequence: int) -> None:
        """A sequence is given up: as a row or what is to become one, and in all steps that are
        known. A step that has no other one is aborted, unless its last quantum is on its way."""
        for step in self._steps.of_sequence(sequence):
            if step.ending or sequence in step.cancelled:
                continue
            step.cancelled.add(sequence)
            step.withdrawn.append(sequence)
            if len(step.cancelled) == len(step.task.sequences):
                self._abort(step)
        self._streams.forget(sequence)

    def keep(self, sequence: int, released: tuple[Span, ...]) -> None:
        """A sequence is over, as a row or as what was to become one, and of its KV these spans are
        not kept."""
        if self._closed:
            return
        self._end_moves(sequence)
        self._streams.forget(sequence)
        for stream in self._streams:
            if stream.left:
                self._change(stream)
        self.release(sequence, released)

    def release(self, sequence: int, spans: tuple[Span, ...]) -> None:
        """Some KV of a sequence that is over is not kept any more."""
        if not self._closed:
            self._append(Free(sequence, spans), self._ranks)

    def end_owner(self, owner: int) -> None:
        """All that an owner has submitted is given up, and no more of it is taken. A step whose
        last quantum is on its way still reports."""
        if self._closed or owner in self._ended:
            return
        self._ended.add(owner)
        for step in self._steps.of_owner(owner):
            if not step.until:
                self._steps.remove(step)
            elif not step.ending:
                self._abort(step)
        for stream in self._streams:
            rows = [sequence for sequence, row in stream.rows.items() if row.owner == owner]
            for sequence in rows:
                self._streams.leave(sequence)
            # What the ranks have for the owner's rows goes with the next entry.
            if rows:
                self._change(stream)
        self._append(EndOwner(owner), self._ranks)

    @property
    def closed(self) -> bool:
        """The log has its last entry."""
        return self._closed

    def shutdown(self) -> None:
        """Abort what runs, and append no more."""
        if self._closed:
            return
        for step in tuple(self._steps.running()):
            if step.until and not step.ending:
                self._abort(step)
        self._append(Shutdown(), self._ranks)
        self._closed = True

    # Entries

    def _append(self, op: Op, ranks: tuple[int, ...]) -> int:
        self._seq += 1
        self._log.append((Entry(self._seq, op), ranks))
        return self._seq

    def _abort(self, step: Step) -> None:
        self._append(Abort(step.task.id), step.task.ranks)
        self._steps.remove(step)

    def _quanta(self) -> bool:
        """Give every step a quantum that may have one; whether one had."""
        steps = self._turns.steps()
        for step in steps:
            self._run(step)
        return bool(steps)

    def _run(self, step: Step) -> None:
        until = step.task.parts if self._is_short(step) else step.next_until(self._quantum_ns)
        withdrawn, step.withdrawn = tuple(step.withdrawn), []
        seq = self._append(Run(step.task.id, until, withdrawn), step.task.ranks)
        step.size = until - step.until
        step.outstanding.append(Quantum(seq, until, step.size))
        step.until = until
        self._turns.ran(step, seq)
        if step.ending and step.task.places:
            (row,) = step.task.sequences
            stream = self._streams.place(row, step.task.places)
            self._append(Place(row, stream.rows[row].ranks), stream.ranks)

    def _is_short(self, step: Step) -> bool:
        """Whether all of a step probably is a quantum, as other short ones have shown."""
        rows = step.task.rows
        known = 0 < rows <= SHORT_ROWS and self._row_ns
        return not step.until and bool(known) and rows * self._row_ns <= self._quantum_ns

    def _lease(self) -> bool:
        """Give the group a lease whose turn it is; whether there is one."""
        found = self._turns.group()
        if found is None:
            return False
        group, n = found
        stream = group.stream
        if stream.changed:
            self._change(stream)
        members = group.ranks if len(group.ranks) < len(stream.ranks) else ()
        op = Iterate(stream.id, stream.version, n, members)
        stream.lease(self._append(op, group.ranks), n, group)
        return True

    def _change(self, stream: Stream) -> None:
        stream.version += 1
        joined, left = tuple(stream.joined.items()), tuple(stream.left)
        change = Change(stream.id, stream.version, joined, left, stream.budget)
        seq = self._append(change, stream.ranks)
        for sequence, _ in joined:
            stream.rows[sequence].since = seq
        stream.joined, stream.left = {}, {}

    def _empty_streams(self) -> None:
        """Tell ranks of rows that have left even where no lease follows."""
        for stream in self._streams:
            if stream.stranded:
                self._change(stream)
