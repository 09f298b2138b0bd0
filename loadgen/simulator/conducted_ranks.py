"""The ranks of an elastic gang on modelled time, as the gang's conductor orders them.

Steps and the stream of rows share these ranks. Who computes when is decided by the state machine
that orders real ranks (`protocols.conductor`): its log is executed here, every entry when it has
come to the head of the line of all its ranks. Entries and reports take no time on their way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from csps.loadgen.simulator.decode_batch import IterationLog, Jump, Row, states
from csps.loadgen.simulator.step_order import Task
from csps.loadgen.simulator.timeline import Timeline
from csps.protocols.conductor import Conductor, StepTask
from csps.protocols.iteration import fill
from csps.protocols.log_entries import Abort, Change, Entry, Iterate, Run
from csps.services.scheduling.latency import FRACTION_BITS, HybridCost

STREAM, OWNER = 0, 0
PART_NS = 2_000_000
"""A step can stand still about so often: a block of a layer."""


@dataclass(eq=False, slots=True)
class _Work:
    """An entry in the lines of its ranks."""

    entry: Entry
    ranks: tuple[int, ...]
    begun: bool = False


@dataclass(frozen=True, slots=True)
class _Lease:
    """Iterations under way."""

    work: _Work
    op: Iterate
    began_ns: int
    finished: list[int]


class ConductedRanks:
    """Steps as a `StepOrder` takes them, and rows as a `DecodeBatch` does, on the same instances.

    Args:
        timeline: the simulated time.
        instances: how many there are.
        hybrid: what iterations take.
        quantum_ns: a step computes for about so long before a row has its turn.
        gap_ns: between two iterations.
        finished: called with each row whose last token was drawn, at the end of the iteration.
        started: called with each rider of whose prompt the first piece begins.
        prefilled: called with each rider that has drawn its first token.
        drawn: called with the rows that an iteration has drawn tokens for, before they go on.
    """

    def __init__(
        self,
        timeline: Timeline,
        instances: int,
        *,
        hybrid: HybridCost,
        quantum_ns: int = 0,
        gap_ns: int = 0,
        finished: Callable[[Row], None],
        started: Callable[[Row], None] = lambda _: None,
        prefilled: Callable[[Row], None] = lambda _: None,
        drawn: Callable[[list[Row]], None] = lambda _: None,
    ) -> None:
        self._timeline, self._hybrid, self._gap_ns = timeline, hybrid, gap_ns
        self._finished, self._started = finished, started
        self._prefilled, self._drawn = prefilled, drawn
        self._conductor = Conductor(instances, quantum_ns)
        self._conductor.open_stream(STREAM, tuple(range(instances)))
        self._lines: list[deque[_Work]] = [deque() for _ in range(instances)]
        self._tasks: dict[int, Task] = {}
        self._steps = 0
        self._known: dict[int, Row] = {}
        """Rows that have joined and neither finished nor left."""
        self._logged: dict[int, None] = {}
        """Those of them whose joining is in the log."""
        self._rows: dict[int, Row] = {}
        """Those of them whose joining was executed."""
        self._leaving: dict[int, Callable[[], None]] = {}
        self._budget = 0
        self._awake = False
        self.log = IterationLog()

    def __len__(self) -> int:
        return len(self._known)

    # --- steps ---

    def submit(self, task: Task) -> None:
        """A step is to be run; its slots are taken."""
        self._steps += 1
        self._tasks[self._steps] = task
        self._conductor.submit(
            StepTask(
                id=self._steps,
                ranks=task.members,
                urgent=task.urgent,
                parts=_parts(task),
                sequences=task.sequences,
                owner=OWNER,
            )
        )
        for rank in task.members:
            self._conductor.prepared(self._steps, rank)
        self._wake()

    def withdraw(self, task: Task) -> None:
        """Nobody wants a step any more: `ended` is called when all its members know."""
        for sequence in task.sequences:
            self._conductor.cancel(sequence)
        self._wake()

    # --- rows ---

    def join(self, row: Row) -> None:
        """Iterate a request from one of the next leases on."""
        self._known[row.sequence] = row
        self._conductor.join(STREAM, row.sequence, 0, OWNER)
        self._wake()

    def ride(self, row: Row, budget: int) -> None:
        """The same for one whose prompt is not computed."""
        self._budget = budget
        self.join(row)

    def leave(self, sequence: int, left: Callable[[], None]) -> None:
        """Take a request out, if it is here; call `left` when no rank iterates it any more."""
        row = self._known.pop(sequence, None)
        self._conductor.cancel(sequence)
        self._wake()
        if row is not None and sequence in self._logged:
            self._leaving[sequence] = left
        else:
            left()

    def drawn_by(self, row: Row) -> int:
        """Tokens that a row has drawn by iterations that decode."""
        return 0 if row.joined < 0 else min(row.tokens, self.log.iterations - row.joined)

    # --- the log ---

    def _wake(self) -> None:
        """Look at what the conductor has appended, when all that happens now has happened."""
        if not self._awake:
            self._awake = True
            self._timeline.at(self._timeline.now_ns, self._read)

    def _read(self) -> None:
        self._awake = False
        for entry, ranks in self._conductor.take():
            if isinstance(entry.op, Change):
                self._logged.update((sequence, None) for sequence, _ in entry.op.joined)
            work = _Work(entry, ranks)
            for rank in ranks:
                self._lines[rank].append(work)
        while any(self._begin(line) for line in self._lines):
            pass

    def _begin(self, line: deque[_Work]) -> bool:
        """Execute the next entry of a rank, if it is the next one of all its ranks; whether that
        is done already."""
        if not line or line[0].begun:
            return False
        work = line[0]
        if any(self._lines[rank][0] is not work for rank in work.ranks):
            return False
        work.begun = True
        match work.entry.op:
            case Run() as run:
                self._run(work, run)
                return False
            case Iterate() as op:
                self._iterate(_Lease(work, op, self._timeline.now_ns, []), op.n)
                return False
            case Change() as change:
                self._change(change)
            case Abort(step):
                self._over(step)
        self._executed(work)
        return True

    def _executed(self, work: _Work) -> None:
        for rank in work.ranks:
            assert self._lines[rank].popleft() is work, "out of order"

    def _run(self, work: _Work, run: Run) -> None:
        task = self._tasks[run.step]
        if task.started_ns < 0:
            task.started_ns = self._timeline.now_ns
            task.started()
        until_ns = task.work_ns * run.until // _parts(task)
        took_ns = until_ns - task.done_ns
        self._timeline.at(
            self._timeline.now_ns + took_ns, lambda: self._ran(work, run, task, took_ns)
        )

    def _ran(self, work: _Work, run: Run, task: Task, took_ns: int) -> None:
        task.done_ns += took_ns
        self._executed(work)
        leader = min(work.ranks)
        self._conductor.ran(leader, work.entry.seq, run.step, run.until, took_ns)
        if run.until == _parts(task):
            self._over(run.step)
        self._wake()

    def _over(self, step: int) -> None:
        task = self._tasks.pop(step)
        task.over = True
        task.ended()

    def _change(self, change: Change) -> None:
        for sequence in change.left:
            self._rows.pop(sequence, None)
            self._logged.pop(sequence, None)
            if (left := self._leaving.pop(sequence, None)) is not None:
                left()
        for sequence, _ in change.joined:
            if (row := self._known.get(sequence)) is not None:
                self._rows[sequence] = row
                if not row.prefills:
                    row.joined = self.log.iterations

    # --- iterations ---

    def _iterate(self, lease: _Lease, left: int) -> None:
        """The next iteration of a lease; its end, if it has none or no rows any more."""
        rows = list(self._rows.values())
        if not left or not rows:
            took_ns = self._timeline.now_ns - lease.began_ns
            self._executed(lease.work)
            finished = tuple(lease.finished)
            self._conductor.iterated(0, lease.work.entry.seq, STREAM, took_ns, finished)
            self._wake()
            return
        decoding = [it for it in rows if not it.prefills]
        pieces = self._fill(rows) if len(decoding) < len(rows) else []
        by_master: dict[int, list[tuple[int, int]]] = {}
        for row, length in pieces:
            by_master.setdefault(row.master, []).append((length, row.computed))
            if not row.computed:
                self._started(row)
        context = sum(it.context + self.log.iterations - it.joined for it in decoding)
        took = self._hybrid.predict_fixed(by_master.values(), len(decoding), context)
        jump = Jump(
            start_ns=self._timeline.now_ns,
            batch=len(decoding),
            first=took + (self._gap_ns << FRACTION_BITS),
            growth=0,
        )
        self._timeline.at(
            jump.end_ns(1), lambda: self._iterated(lease, left - 1, jump, decoding, pieces)
        )

    def _fill(self, rows: list[Row]) -> list[tuple[Row, int]]:
        """Pieces of prompts in the next iteration."""
        lengths = zip(rows, fill(states(rows), self._budget), strict=True)
        return [(row, length) for row, length in lengths if row.prefills and length]

    def _iterated(
        self,
        lease: _Lease,
        left: int,
        jump: Jump,
        decoding: list[Row],
        pieces: list[tuple[Row, int]],
    ) -> None:
        self.log.add(jump, 1)
        first = []
        for row, length in pieces:
            row.computed += length
            if not row.prefills:
                row.joined = self.log.iterations
                first.append(row)
        self._drawn([*decoding, *first])
        for row in first:
            self._prefilled(row)
            if not row.tokens:
                self._end(row, lease)
        for row in decoding:
            if self.log.iterations - row.joined == row.tokens:
                self._end(row, lease)
                self._finished(row)
        self._iterate(lease, left)

    def _end(self, row: Row, lease: _Lease) -> None:
        del self._rows[row.sequence]
        self._known.pop(row.sequence, None)
        lease.finished.append(row.sequence)


def _parts(task: Task) -> int:
    return max(1, task.work_ns // PART_NS)
