"""The ranks of an elastic gang on modelled time, as the gang's conductor orders them.

Steps and the stream of rows share these ranks. Who computes when is decided by the state machine
that orders real ranks (`protocols.conductor`): its log is executed here, every entry when it has
come to the head of the line of all its ranks. Entries and reports take no time on their way. Rows
that name no common instance are iterated apart, in groups of their own (`protocols.conducting`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from csps.loadgen.simulator.decode_batch import IterationLog, Jump, Row, filled, states
from csps.loadgen.simulator.step_order import Task
from csps.loadgen.simulator.timeline import Timeline
from csps.protocols.conducting.steps import StepTask
from csps.protocols.conductor import Conductor
from csps.protocols.iteration import fill
from csps.protocols.log_entries import Abort, Change, Entry, Iterate, Place, Run
from csps.services.scheduling.latency import HybridCost

Compute = Callable[[Sequence[int], int, Callable[[], None]], None]
"""Has instances compute what takes so long alone, and calls back at its end (`cores`)."""
STREAM, OWNER = 0, 0
PART_NS = 2_000_000
"""A step can stand still about so often: a block of a layer."""
QUANTUM_PARTS = 64
"""Or so often in a quantum, where that is longer: no step stands still within a long one."""


@dataclass(eq=False, slots=True)
class _Work:
    """An entry in the lines of its ranks."""

    entry: Entry
    ranks: tuple[int, ...]
    begun: bool = False
    done: set[int] = field(default_factory=set)
    """Of a change: ranks that have executed it."""


@dataclass(frozen=True, slots=True)
class _Lease:
    """Iterations under way."""

    work: _Work
    op: Iterate
    began_ns: int
    rows: dict[int, Row]
    finished: list[int]


class ConductedRanks:
    """Steps as a `StepOrder` takes them, and rows as a `DecodeBatch` does, on the same instances.

    Args:
        timeline: the simulated time.
        instances: how many there are.
        hybrid: what iterations of so many instances take.
        quantum_ns: a step computes for about so long before a row has its turn.
        gap_ns: between two iterations.
        compute: how long that takes beside what others compute; None: as long as alone.
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
        hybrid: Callable[[int], HybridCost],
        quantum_ns: int = 0,
        gap_ns: int = 0,
        compute: Compute | None = None,
        finished: Callable[[Row], None],
        started: Callable[[Row], None] = lambda _: None,
        prefilled: Callable[[Row], None] = lambda _: None,
        drawn: Callable[[list[Row]], None] = lambda _: None,
    ) -> None:
        self._timeline, self._hybrid, self._gap_ns = timeline, hybrid, gap_ns
        self._compute = compute or self._alone
        self._finished, self._started = finished, started
        self._prefilled, self._drawn = prefilled, drawn
        self._part_ns = max(PART_NS, quantum_ns // QUANTUM_PARTS)
        self._all = tuple(range(instances))
        self._conductor = Conductor(instances, quantum_ns)
        self._conductor.open_stream(STREAM, self._all)
        self._lines: list[deque[_Work]] = [deque() for _ in range(instances)]
        self._tasks: dict[int, Task] = {}
        self._steps = 0
        self._known: dict[int, Row] = {}
        """Rows that have joined and neither finished nor left."""
        self._logged: dict[int, None] = {}
        """Those of them whose joining is in the log."""
        self._rows: dict[int, Row] = {}
        """Those of them whose joining was executed."""
        self._leaving: dict[int, tuple[Row, Callable[[], None]]] = {}
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
                parts=self._parts(task),
                sequences=task.sequences,
                places=task.places,
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
        self._conductor.join(STREAM, row.sequence, 0, OWNER, ranks=row.ranks)
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
            self._leaving[sequence] = row, left
        else:
            left()

    def drawn_by(self, row: Row) -> int:
        """Tokens that a row has drawn by iterations that decode."""
        return len(row.ends)

    def ends_of(self, row: Row, tokens: int) -> tuple[Row, int, int]:
        """Where in its own log they are."""
        return row, 0, tokens

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
        while any(self._begin(rank) for rank in self._all):
            pass

    def _begin(self, rank: int) -> bool:
        """Execute the next entry of a rank, if it is the next one of all its ranks; whether that
        is done already."""
        line = self._lines[rank]
        if not line or line[0].begun:
            return False
        work = line[0]
        match work.entry.op:  # nobody waits for others
            case Change() as change:
                self._change(line.popleft(), change, rank)
                return True
            case Place() as place:
                self._place(line.popleft(), place, rank)
                return True
        if any(self._lines[it][0] is not work for it in work.ranks):
            return False
        work.begun = True
        match work.entry.op:
            case Run() as run:
                self._run(work, run)
                return False
            case Iterate() as op:
                members = set(work.ranks)
                rows = {
                    sequence: row
                    for sequence, row in self._rows.items()
                    if members.issuperset(row.ranks or self._all)
                }
                self._iterate(_Lease(work, op, self._timeline.now_ns, rows, []), op.n)
                return False
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
        began_ns = self._timeline.now_ns
        until_ns = task.work_ns * run.until // self._parts(task)
        self._compute(
            work.ranks,
            until_ns - task.done_ns,
            lambda: self._ran(work, run, task, until_ns, self._timeline.now_ns - began_ns),
        )

    def _alone(self, _instances: Sequence[int], work_ns: int, done: Callable[[], None]) -> None:
        self._timeline.at(self._timeline.now_ns + work_ns, done)

    def _ran(self, work: _Work, run: Run, task: Task, until_ns: int, took_ns: int) -> None:
        task.longer_ns += took_ns - (until_ns - task.done_ns)
        task.done_ns = until_ns
        self._executed(work)
        leader = min(work.ranks)
        self._conductor.ran(leader, work.entry.seq, run.step, run.until, took_ns)
        if run.until == self._parts(task):
            self._over(run.step)
        self._wake()

    def _over(self, step: int) -> None:
        task = self._tasks.pop(step)
        task.over = True
        task.ended()

    def _parts(self, task: Task) -> int:
        return max(1, task.work_ns // self._part_ns)

    def _change(self, work: _Work, change: Change, rank: int) -> None:
        """A rank executes it; a row joins, or has left, when all that it concerns have."""
        work.done.add(rank)
        for sequence in change.left:
            if (leaving := self._leaving.get(sequence)) is None:
                if work.done.issuperset(self._all):
                    self._rows.pop(sequence, None)
                    self._logged.pop(sequence, None)
            elif work.done.issuperset(leaving[0].ranks or self._all):
                self._rows.pop(sequence, None)
                self._logged.pop(sequence, None)
                del self._leaving[sequence]
                leaving[1]()
        for sequence, _ in change.joined:
            row = self._known.get(sequence)
            if row is None or sequence in self._rows:
                continue
            if work.done.issuperset(row.ranks or self._all):
                self._rows[sequence] = row
                if not row.prefills:
                    row.joined = 0

    def _place(self, work: _Work, place: Place, rank: int) -> None:
        """Whoever has moved the KV comes to it with all others that have."""
        row = self._known.get(place.sequence)
        if row is not None and rank in {*row.ranks, *place.ranks}:
            row.ranks = place.ranks

    # --- iterations ---

    def _iterate(self, lease: _Lease, left: int) -> None:
        """The next iteration of a lease; its end, if it has none or no rows any more."""
        rows = list(lease.rows.values())
        if not left or not rows:
            took_ns = self._timeline.now_ns - lease.began_ns
            self._executed(lease.work)
            finished = tuple(lease.finished)
            leader, seq = lease.work.ranks[0], lease.work.entry.seq
            self._conductor.iterated(leader, seq, STREAM, took_ns, finished)
            self._wake()
            return
        decoding = [it for it in rows if not it.prefills]
        pieces = self._fill(rows) if len(decoding) < len(rows) else []
        for row, _ in pieces:
            if row.begins:
                self._started(row)
        context = sum(it.context + len(it.ends) for it in decoding)
        cost = self._hybrid(len(lease.work.ranks))
        now_ns = self._timeline.now_ns
        jump = filled(now_ns, cost, pieces, len(decoding), context, self._gap_ns)
        self._compute(
            lease.work.ranks,
            jump.end_ns(1) - now_ns,
            lambda: self._iterated(lease, left - 1, jump, decoding, pieces),
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
                row.joined = 0
                first.append(row)
        self._drawn([*decoding, *first])
        for row in first:
            self._prefilled(row)
            if not row.tokens:
                self._end(row, lease)
        for row in decoding:
            row.ends.append(self._timeline.now_ns)
            if len(row.ends) == row.tokens:
                self._end(row, lease)
                self._finished(row)
        self._iterate(lease, left)

    def _end(self, row: Row, lease: _Lease) -> None:
        del lease.rows[row.sequence]
        del self._rows[row.sequence]
        self._known.pop(row.sequence, None)
        lease.finished.append(row.sequence)
