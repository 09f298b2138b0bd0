"""The ranks of an elastic gang on modeled time, in the order of the gang's sequencer.

Steps and the decode batch share these ranks. The state machine that orders real ranks
(`protocols.sequencer`) decides who computes when. Its log is executed here: each entry runs when it
is at the head of the queues of all its ranks. Entries and reports arrive without delay. Members
that share no instance are iterated independently, in groups of their own.

While nothing disturbs a group, its grants follow each other without end, and so do the quanta of a
step that is alone on its ranks. Many of them are executed at once then (`_GrantRun`, `_StepRun`).
What disturbs them stops such a run, and finds the state that single entries would have left.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, islice

from csps.configurator.costs.latency import FRACTION_BITS
from csps.loadgen.simulator.decode_batch import (
    CostOf,
    IterationEnds,
    IterationLog,
    Jump,
    SimulatedMember,
    cursors,
)
from csps.loadgen.simulator.step_order import SimulatedStep
from csps.loadgen.simulator.timeline import EventTimeline
from csps.protocols.sequencer.decode_batches import GRANTS, chunk_lengths
from csps.protocols.sequencer.log_entries import (
    Abort,
    Change,
    Iterate,
    LogEntry,
    PlaceSequence,
    RunQuantum,
)
from csps.protocols.sequencer.sequencer import MOST_QUANTA, Sequencer
from csps.protocols.sequencer.steps import StepSpec

Compute = Callable[[Sequence[int], int, Callable[[], None]], None]
"""Function that lets instances compute work of a given time alone, and calls back at its end
(`Cores.compute`).
"""
BATCH, OWNER = 0, 0
YIELD_POINT_NS = 2_000_000
"""Least time between two yield points of a step, about a block of a layer."""
LONGEST_RUN = 128
"""Iterations computed ahead of time. What stops a group sooner makes the rest useless."""
QUANTUM_YIELD_POINTS = 64
"""Most yield points per quantum. Long quanta have no finer ones, because no step pauses there."""


@dataclass(eq=False, slots=True)
class _QueuedEntry:
    """A log entry in the queues of its ranks."""

    entry: LogEntry
    ranks: tuple[int, ...]
    begun: bool = False
    done: set[int] = field(default_factory=set)
    """Ranks that have executed a `Change`."""


@dataclass(frozen=True, slots=True)
class _Grant:
    """A multi-step decode grant under way."""

    work: _QueuedEntry
    members: dict[int, SimulatedMember]
    began_ns: int
    finished: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _GrantRun:
    """Iterations of consecutive grants of a group that nothing disturbs."""

    grant: _Grant
    """The grant under way at their begin."""
    left: int
    """Its iterations that were left then."""
    batch_members: list[SimulatedMember]
    jump: Jump
    ends: list[int]
    """End of each iteration."""
    stopped: bool = False

    @property
    def end_ns(self) -> int:
        return self.ends[-1]


@dataclass(eq=False, slots=True)
class _StepRun:
    """The quanta that are left of a step which is alone on its ranks."""

    work: _QueuedEntry
    """The quantum under way at their begin."""
    task: SimulatedStep
    began_ns: int
    stopped: bool = False

    @property
    def end_ns(self) -> int:
        return self.began_ns + self.task.work_ns - self.task.done_ns


class SequencedRanks:
    """Ranks that run steps like `StepOrder` and a decode batch like `SimulatedBatches`.

    Args:
        timeline: the simulated time.
        instances: number of instances.
        cost: returns the cost of iterations on some instances.
        quantum_ns: time that a step computes before a decode iteration may run.
        gap_ns: gap between two iterations.
        compute: runs work that shares cores; None: work takes as long as alone.
        finished: called with each member at the end of the iteration of its last token.
        started: called with each piggybacked member when its first chunk begins.
        prefilled: called with each piggybacked member after its first token.
        sampled: called with the members that an iteration sampled tokens for. None: nobody wants
            to know, so that groups may jump over iterations.
    """

    def __init__(
        self,
        timeline: EventTimeline,
        instances: int,
        *,
        cost: CostOf,
        quantum_ns: int = 0,
        gap_ns: int = 0,
        compute: Compute | None = None,
        finished: Callable[[SimulatedMember], None],
        started: Callable[[SimulatedMember], None] = lambda _: None,
        prefilled: Callable[[SimulatedMember], None] = lambda _: None,
        sampled: Callable[[list[SimulatedMember]], None] | None = None,
    ) -> None:
        self._timeline, self._cost, self._gap_ns = timeline, cost, gap_ns
        self._compute = compute or self._alone
        self._may_jump = compute is None and sampled is None
        self._finished, self._started = finished, started
        self._prefilled, self._sampled = prefilled, sampled
        self._yield_point_ns = max(YIELD_POINT_NS, quantum_ns // QUANTUM_YIELD_POINTS)
        self._all = tuple(range(instances))
        self._sequencer = Sequencer(instances, quantum_ns)
        self._sequencer.open_batch(BATCH, self._all)
        self._queues: list[deque[_QueuedEntry]] = [deque() for _ in range(instances)]
        self._tasks: dict[int, SimulatedStep] = {}
        self._steps = 0
        self._known: dict[int, SimulatedMember] = {}
        """Members that have joined and neither finished nor left."""
        self._logged: dict[int, None] = {}
        """Known members whose joining is in the log."""
        self._batch_members: dict[int, SimulatedMember] = {}
        """Known members whose joining was executed."""
        self._leaving: dict[int, tuple[SimulatedMember, Callable[[], None]]] = {}
        self._budget = 0
        self._awake = False
        self._steps_on = [0] * instances
        """Steps on each rank that are not over."""
        self._runs: list[_GrantRun | _StepRun | None] = [None] * instances
        """The run of each rank's group or step."""
        self._changed: set[int] = set()
        """Ranks whose next entry may have changed since they were looked at."""
        self.log = IterationLog()

    def __len__(self) -> int:
        return len(self._known)

    # --- steps ---

    def submit(self, task: SimulatedStep) -> None:
        """Queue a step whose slots are taken."""
        self._stop_runs(task.members)
        self._steps += 1
        self._tasks[self._steps] = task
        for rank in task.members:
            self._steps_on[rank] += 1
        self._sequencer.submit(
            StepSpec(
                id=self._steps,
                ranks=task.members,
                high_priority=task.high_priority,
                yield_points=self._yield_points(task),
                sequences=task.sequences,
                places=task.places,
                owner=OWNER,
            )
        )
        for rank in task.members:
            self._sequencer.prepared(self._steps, rank)
        self._wake()

    def cancel_step(self, task: SimulatedStep) -> None:
        """Cancel a step; `ended` is called when all its members know."""
        self._stop_runs(self._all)
        for sequence in task.sequences:
            self._sequencer.cancel(sequence)
        self._wake()

    # --- rows ---

    def join(self, member: SimulatedMember) -> None:
        """Decode a sequence from one of the next grants on."""
        self._stop_runs(member.ranks or self._all)
        self._known[member.sequence] = member
        self._sequencer.join(BATCH, member.sequence, 0, OWNER, ranks=member.ranks)
        self._wake()

    def piggyback(self, member: SimulatedMember, budget: int) -> None:
        """Prefill a sequence in decode iterations, then decode it."""
        self._budget = budget
        self.join(member)

    def leave(self, sequence: int, left: Callable[[], None]) -> None:
        """Remove a sequence, if present; call `left` when no rank iterates it any more."""
        self._stop_runs(self._all)
        member = self._known.pop(sequence, None)
        self._sequencer.cancel(sequence)
        self._wake()
        if member is not None and sequence in self._logged:
            self._leaving[sequence] = member, left
        else:
            left()

    def generated_by(self, member: SimulatedMember) -> int:
        """Return the tokens that a member has generated in decode iterations."""
        self._stop_runs(member.ranks or self._all)
        return len(member.ends)

    @property
    def decoded_tokens(self) -> int:
        """Return the tokens generated in all iterations, without first tokens of prompts."""
        self._stop_runs(self._all)
        return self.log.tokens()

    def ends_of(self, member: SimulatedMember, tokens: int) -> list[IterationEnds]:
        """Return the times of a member's first tokens."""
        return [IterationEnds(member, 0, tokens)]

    # --- the log ---

    def _wake(self) -> None:
        """Read the sequencer's new entries after all other events of this instant."""
        if not self._awake:
            self._awake = True
            self._timeline.at(self._timeline.now_ns, self._read)

    def _read(self) -> None:
        self._awake = False
        for entry, ranks in self._sequencer.take():
            if isinstance(entry.op, Change):
                self._logged.update((sequence, None) for sequence, _ in entry.op.joined)
            work = _QueuedEntry(entry, ranks)
            for rank in ranks:
                if self._runs[rank] is None:
                    self._queues[rank].append(work)
                    self._changed.add(rank)
                else:
                    self._note(work, rank)
        while self._changed:
            rank = min(self._changed)
            self._changed.discard(rank)
            if self._begin(rank):
                self._changed.add(rank)

    def _begin(self, rank: int) -> bool:
        """Begin the next entry of a rank if it is next on all its ranks; return whether it is
        over.
        """
        queue = self._queues[rank]
        if not queue or queue[0].begun:
            return False
        work = queue[0]
        match work.entry.op:  # these do not wait for other ranks
            case Change() as change:
                self._change(queue.popleft(), change, rank)
                return True
            case PlaceSequence() as place:
                self._place(queue.popleft(), place, rank)
                return True
        if any(self._queues[rank][0] is not work for rank in work.ranks):
            return False
        work.begun = True
        match work.entry.op:
            case RunQuantum() as run:
                self._run(work, run)
                return False
            case Iterate() as op:
                group = set(work.ranks)
                batch_members = {
                    sequence: member
                    for sequence, member in self._batch_members.items()
                    # Groups share no rank, so the first one tells most members apart.
                    if (member.ranks or self._all)[0] in group
                    and group.issuperset(member.ranks or self._all)
                }
                self._iterate(_Grant(work, batch_members, self._timeline.now_ns), op.iterations)
                return False
            case Abort(step):
                self._over(step)
        self._executed(work)
        return True

    def _note(self, work: _QueuedEntry, rank: int) -> None:
        """Execute an entry that does not concern a rank's run."""
        match work.entry.op:
            case Change() as change:
                self._change(work, change, rank)
            case op:
                assert isinstance(op, PlaceSequence), f"{op} on a rank that is in a run"

    def _executed(self, work: _QueuedEntry) -> None:
        for rank in work.ranks:
            assert self._queues[rank].popleft() is work, "out of order"
        self._changed.update(work.ranks)

    def _run(self, work: _QueuedEntry, run: RunQuantum) -> None:
        task = self._tasks[run.step]
        if task.started_ns < 0:
            task.started_ns = self._timeline.now_ns
            task.begin()
        began_ns = self._timeline.now_ns
        if self._is_alone(work, task):
            self._enter(_StepRun(work, task, began_ns), work.ranks)
            return
        until_ns = task.work_ns * run.until // self._yield_points(task)
        self._compute(
            work.ranks,
            until_ns - task.done_ns,
            lambda: self._ran(work, run, task, until_ns, self._timeline.now_ns - began_ns),
        )

    def _is_alone(self, work: _QueuedEntry, task: SimulatedStep) -> bool:
        """Return whether the step's next quanta follow each other until it ends."""
        if not self._may_jump:
            return False
        for rank in work.ranks:
            queue = self._queues[rank]
            # The next quantum is given before this one begins, unless something else may run.
            if self._steps_on[rank] > 1 or len(queue) != MOST_QUANTA:
                return False
            following = queue[1].entry.op
            if not isinstance(following, RunQuantum) or self._tasks[following.step] is not task:
                return False
        return not self._sequencer.iterates(BATCH, work.ranks)

    def _alone(self, _instances: Sequence[int], work_ns: int, done: Callable[[], None]) -> None:
        self._timeline.at(self._timeline.now_ns + work_ns, done)

    def _ran(
        self, work: _QueuedEntry, run: RunQuantum, task: SimulatedStep, until_ns: int, took_ns: int
    ) -> None:
        task.slowdown_ns += took_ns - (until_ns - task.done_ns)
        task.done_ns = until_ns
        computed_ns = self._timeline.now_ns

        def settled() -> None:
            waited_ns = self._timeline.now_ns - computed_ns
            task.slowdown_ns += waited_ns
            self._reported(work, run, task, took_ns + waited_ns)

        if run.until == self._yield_points(task):
            task.settle(settled)
        else:
            settled()

    def _reported(
        self, work: _QueuedEntry, run: RunQuantum, task: SimulatedStep, took_ns: int
    ) -> None:
        self._executed(work)
        leader = min(work.ranks)
        self._sequencer.ran(leader, work.entry.seq, run.step, run.until, took_ns)
        if run.until == self._yield_points(task):
            self._over(run.step)
        self._wake()

    def _over(self, step: int) -> None:
        task = self._tasks.pop(step)
        for rank in task.members:
            self._steps_on[rank] -= 1
        task.over = True
        task.ended()

    def _yield_points(self, task: SimulatedStep) -> int:
        return max(1, task.work_ns // self._yield_point_ns)

    def _change(self, work: _QueuedEntry, change: Change, rank: int) -> None:
        """Execute a change on a rank; it takes effect when all concerned ranks have executed it."""
        work.done.add(rank)
        for sequence in change.left:
            if (leaving := self._leaving.get(sequence)) is None:
                if work.done.issuperset(self._all):
                    self._batch_members.pop(sequence, None)
                    self._logged.pop(sequence, None)
            elif work.done.issuperset(leaving[0].ranks or self._all):
                self._batch_members.pop(sequence, None)
                self._logged.pop(sequence, None)
                del self._leaving[sequence]
                leaving[1]()
        for sequence, _ in change.joined:
            member = self._known.get(sequence)
            if member is None or sequence in self._batch_members:
                continue
            if work.done.issuperset(member.ranks or self._all):
                self._batch_members[sequence] = member
                if not member.prefills:
                    member.joined = 0

    def _place(self, work: _QueuedEntry, place: PlaceSequence, rank: int) -> None:
        """Execute a placement on a rank that has moved the KV."""
        member = self._known.get(place.sequence)
        if member is not None and rank in {*member.ranks, *place.ranks}:
            member.ranks = place.ranks

    # --- iterations ---

    def _iterate(self, grant: _Grant, left: int) -> None:
        """Run the next iteration of a grant, or end it if no iteration or member is left."""
        batch_members = list(grant.members.values())
        if not left or not batch_members:
            took_ns = self._timeline.now_ns - grant.began_ns
            self._executed(grant.work)
            finished = tuple(grant.finished)
            leader, seq = grant.work.ranks[0], grant.work.entry.seq
            self._sequencer.iterated(leader, seq, BATCH, took_ns, finished)
            self._wake()
            return
        decoding = [member for member in batch_members if not member.prefills]
        chunks = self._fill(batch_members) if len(decoding) < len(batch_members) else []
        for member, _ in chunks:
            if member.begins:
                self._started(member)
        context = sum(member.context + len(member.ends) for member in decoding)
        now_ns = self._timeline.now_ns
        cost = self._cost(grant.work.ranks)
        jump = cost.with_chunks(now_ns, chunks, decoding, context, self._gap_ns)
        if not chunks and self._nothing_disturbs(grant, batch_members):
            self._begin_run(_GrantRun(grant, left, decoding, jump, []))
            return
        self._compute(
            grant.work.ranks,
            jump.end_ns(1) - now_ns,
            lambda: self._iterated(grant, left - 1, jump, decoding, chunks),
        )

    def _nothing_disturbs(self, grant: _Grant, batch_members: list[SimulatedMember]) -> bool:
        """Return whether the group's next grants follow each other until a member finishes."""
        if not self._may_jump or grant.finished:
            return False
        for rank in grant.work.ranks:
            queue = self._queues[rank]
            if self._steps_on[rank] or len(queue) != GRANTS:
                return False
            if not isinstance(queue[1].entry.op, Iterate):
                return False
        return self._sequencer.settled(BATCH) and not any(
            member.prefills for member in batch_members
        )

    def _begin_run(self, run: _GrantRun) -> None:
        iterations = min([member.tokens - len(member.ends) for member in run.batch_members])
        times = islice(count(run.jump.first, run.jump.growth), min(iterations, LONGEST_RUN))
        # Each iteration begins at a whole nanosecond.
        took_ns = [time >> FRACTION_BITS for time in times]
        run.ends += list(accumulate(took_ns, initial=run.jump.start_ns))[1:]
        self._enter(run, run.grant.work.ranks)

    # --- runs ---

    def _enter(self, run: _GrantRun | _StepRun, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._runs[rank] = run
        self._timeline.at(run.end_ns, lambda: None if run.stopped else self._settle(run)[1]())

    def _stop_runs(self, ranks: Sequence[int]) -> None:
        """Stop the runs of some ranks. What is under way on them ends as it would."""
        for rank in ranks:
            if (run := self._runs[rank]) is not None:
                self._timeline.at(*self._settle(run))

    def _settle(self, run: _GrantRun | _StepRun) -> tuple[int, Callable[[], None]]:
        """End a run; return when its iteration or quantum under way ends, and what to call then."""
        run.stopped = True
        work = run.work if isinstance(run, _StepRun) else run.grant.work
        for rank in work.ranks:
            self._runs[rank] = None
        return self._settle_step(run) if isinstance(run, _StepRun) else self._settle_grants(run)

    def _settle_step(self, run: _StepRun) -> tuple[int, Callable[[], None]]:
        task, work, yield_points = run.task, run.work, self._yield_points(run.task)
        zero_ns = run.began_ns - task.done_ns

        def end_ns(yield_point: int) -> int:
            return zero_ns + task.work_ns * yield_point // yield_points

        op = work.entry.op
        assert isinstance(op, RunQuantum)
        now_ns = self._timeline.now_ns
        began_ns, quanta = self._sequencer.repeat_quanta(op.step, run.began_ns, end_ns, now_ns)
        queues = [self._queues[rank] for rank in work.ranks]
        if len(quanta) == 1:
            for queue in queues:
                del queue[1]
        for entry, quantum in zip(queues[0], quanta, strict=True):
            entry.entry = LogEntry(entry.entry.seq, quantum)
        task.done_ns = began_ns - zero_ns
        until_ns = end_ns(quanta[0].until) - zero_ns
        took_ns = until_ns - task.done_ns
        return began_ns + took_ns, lambda: self._ran(work, quanta[0], task, until_ns, took_ns)

    def _settle_grants(self, run: _GrantRun) -> tuple[int, Callable[[], None]]:
        under_way = min(bisect_right(run.ends, self._timeline.now_ns), len(run.ends) - 1)
        grant, left, ends = run.grant, run.left, run.ends[:under_way]
        if ends:
            for member in run.batch_members:
                member.ends.extend(ends)
            self.log.add(run.jump, len(ends))
            following = self._queues[grant.work.ranks[0]][1]
            seqs = grant.work.entry.seq, following.entry.seq
            began_ns, left, op = self._sequencer.repeat(BATCH, seqs, grant.began_ns, left, ends)
            following.entry = LogEntry(following.entry.seq, op)
            grant = _Grant(grant.work, grant.members, began_ns, grant.finished)

        def iterated() -> None:
            self._iterated(grant, left - 1, run.jump, run.batch_members, [])

        return run.ends[under_way], iterated

    # --- chunks ---

    def _fill(self, batch_members: list[SimulatedMember]) -> list[tuple[SimulatedMember, int]]:
        """Return the prompt chunks of the next iteration."""
        lengths = zip(
            batch_members, chunk_lengths(cursors(batch_members), self._budget), strict=True
        )
        return [(member, length) for member, length in lengths if member.prefills and length]

    def _iterated(
        self,
        grant: _Grant,
        left: int,
        jump: Jump,
        decoding: list[SimulatedMember],
        chunks: list[tuple[SimulatedMember, int]],
    ) -> None:
        self.log.add(jump, 1)
        first = []
        for member, length in chunks:
            member.computed += length
            if not member.prefills:
                member.joined = 0
                first.append(member)
        if self._sampled is not None:
            self._sampled([*decoding, *first])
        for member in first:
            self._prefilled(member)
            if not member.tokens:
                self._end(member, grant)
        for member in decoding:
            member.ends.append(self._timeline.now_ns)
            if len(member.ends) == member.tokens:
                self._end(member, grant)
                self._finished(member)
        self._iterate(grant, left)

    def _end(self, member: SimulatedMember, grant: _Grant) -> None:
        del grant.members[member.sequence]
        del self._batch_members[member.sequence]
        self._known.pop(member.sequence, None)
        grant.finished.append(member.sequence)
