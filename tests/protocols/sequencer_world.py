"""A gang in events of discrete time: ranks that execute their projections of a log, in rendezvous.

`Ranks` knows nothing of the sequencer. Members of a step wait for each other at every yield point,
those of a batch at every iteration. A rank does one thing at a time, and nests steps in a stack as
a rank's one thread does. `World` adds a sequencer and delays all messages.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from random import Random

from csps.protocols.sequencer.log_entries import (
    Abort,
    Change,
    EndOwner,
    Iterate,
    Iterated,
    LogEntry,
    PlaceSequence,
    Prepared,
    RanQuantum,
    Report,
    RunQuantum,
    Shutdown,
    pack_entries,
    pack_reports,
    unpack_entries,
    unpack_reports,
)
from csps.protocols.sequencer.sequencer import Sequencer
from csps.protocols.sequencer.steps import StepSpec

QUANTUM = 50
"""Times are in milliseconds."""
NS = 1_000_000
DEEPEST = 3


class Deadlock(AssertionError):
    """No event is planned, but work is left."""


class Clock:
    """Events by time; of one time, in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._planned = count()

    def after(self, delay: int, then: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._planned), then))

    def run(self) -> None:
        """Run until no event is planned."""
        while self._heap:
            self.now, _, then = heapq.heappop(self._heap)
            then()


@dataclass(frozen=True)
class TimedStep:
    """A step, and the time of each of its yield points at each member."""

    task: StepSpec
    yield_point_ms: int


@dataclass(frozen=True)
class BatchSpec:
    """A decode batch: its ranks, and the time of an iteration."""

    ranks: tuple[int, ...]
    iteration_time: int


@dataclass
class Frame:
    """A step on a rank's stack."""

    timed: TimedStep
    yield_point: int = 0
    aborted: bool = False


@dataclass
class Rank:
    """State of one rank."""

    queue: deque[LogEntry] = field(default_factory=deque)
    busy: bool = False
    stack: list[Frame] = field(default_factory=list)
    executed: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    prepared: set[int] = field(default_factory=set)
    versions: dict[int, int] = field(default_factory=dict)
    sequences: dict[int, dict[int, int]] = field(default_factory=dict)
    """Iterations of each sequence, by batch."""
    placed: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Ranks that moved sequences need."""
    closed: bool = False


class Ranks:
    """Ranks that execute the entries they receive."""

    def __init__(
        self,
        clock: Clock,
        steps: dict[int, TimedStep],
        batches: dict[int, BatchSpec],
        lives: dict[int, int | None],
        size: int,
        needed_ranks: dict[int, tuple[int, ...]],
    ) -> None:
        """Create idle ranks.

        `lives`: iterations after which a sequence is finished; None: it never is. `needed_ranks`:
        the ranks that a sequence needs, where that is not all of its batch's.
        """
        self._clock, self._steps, self._batches, self._lives = clock, steps, batches, lives
        self._needed_ranks = needed_ranks
        self.each = [Rank() for _ in range(size)]
        self.send: Callable[[int, Report], None] = lambda _rank, _report: None
        self.cancelled: dict[tuple[int, int], list[int]] = {}
        """(step, sequence) -> the yield point at which each member learned of it."""
        self.iterations: dict[int, list[tuple[int, int]]] = {}
        """(entry, end) of each iteration at its leader, by batch."""
        self._meeting: dict[tuple[str, int, int], dict[int, Callable[[], None]]] = {}
        self._moved: dict[int, tuple[int, int]] = {}
        """(iterations, batch) of a sequence when its move ended, by step."""
        self._counted: dict[tuple[int, int], dict[int, int]] = {}
        """(entry, iteration) -> earlier iterations of each piggybacked sequence, as the first of
        its ranks knows them."""

    def deliver(self, rank: int, entries: Iterable[LogEntry]) -> None:
        self.each[rank].queue.extend(entries)
        self._advance(rank)

    def check_idle(self) -> None:
        """Check that no rank has work left, or waits for a report."""
        stuck = [r for r, rank in enumerate(self.each) if rank.busy or rank.queue or rank.stack]
        if stuck:
            raise Deadlock(f"ranks {stuck} hang, meeting at {sorted(self._meeting)}")

    def _advance(self, r: int) -> None:
        rank = self.each[r]
        while rank.queue and not rank.busy:
            entry = rank.queue.popleft()
            assert not rank.closed, f"{entry} follows the last entry"
            rank.executed.append(entry.seq)
            match entry.op:
                case RunQuantum():
                    self._run(r, entry, entry.op)
                case Iterate():
                    self._iterate(r, entry, entry.op)
                case Change():
                    self._change(rank, entry.op)
                case Abort(step):
                    self._abort(rank, step)
                case PlaceSequence() as place:
                    self._place(r, place)
                case EndOwner(owner):
                    rank.prepared -= {
                        s for s in rank.prepared if self._steps[s].task.owner == owner
                    }
                case Shutdown():
                    rank.closed = True

    def _meet(
        self, key: tuple[str, int, int], ranks: tuple[int, ...], r: int, then: Callable[[], None]
    ) -> None:
        here = self._meeting.setdefault(key, {})
        here[r] = then
        if len(here) == len(ranks):
            del self._meeting[key]
            for resume in here.values():
                resume()

    def _run(self, r: int, entry: LogEntry, run: RunQuantum) -> None:
        rank, timed = self.each[r], self._steps[run.step]
        if not rank.stack or rank.stack[-1].timed is not timed:
            self._push(rank, timed)
        frame = rank.stack[-1]
        assert not frame.aborted
        assert frame.yield_point < run.until <= timed.task.yield_points
        for sequence in run.cancelled:
            self.cancelled.setdefault((run.step, sequence), []).append(frame.yield_point)
        rank.busy = True
        self._to_yield_point(r, frame, entry, run, self._clock.now)

    def _push(self, rank: Rank, timed: TimedStep) -> None:
        step = timed.task.id
        assert step in rank.prepared, f"step {step} has no slots"
        assert step not in rank.finished + rank.aborted, f"step {step} is over"
        assert all(f.timed is not timed for f in rank.stack), (
            f"step {step} is not on top of the stack"
        )
        assert not rank.stack or (
            timed.task.high_priority and not rank.stack[-1].timed.task.high_priority
        ), f"step {step} begins over one that it may not preempt"
        rank.stack.append(Frame(timed))
        assert len(rank.stack) < DEEPEST

    def _to_yield_point(
        self, r: int, frame: Frame, entry: LogEntry, run: RunQuantum, since: int
    ) -> None:
        if frame.yield_point == run.until:
            self._suspend(r, frame, entry, since)
            return

        def reached() -> None:
            frame.yield_point += 1
            self._to_yield_point(r, frame, entry, run, since)

        task = frame.timed.task
        self._meet(
            ("yield point", run.step, frame.yield_point),
            task.ranks,
            r,
            lambda: self._clock.after(frame.timed.yield_point_ms, reached),
        )

    def _suspend(self, r: int, frame: Frame, entry: LogEntry, since: int) -> None:
        rank, task = self.each[r], frame.timed.task
        if frame.yield_point == task.yield_points:
            rank.finished.append(task.id)
            assert rank.stack.pop() is frame
            self._unwind(rank)
            if task.places:
                self._record_progress(task)
        if r == task.leader:
            took = (self._clock.now - since) * NS
            self.send(r, RanQuantum(r, entry.seq, task.id, frame.yield_point, took))
        self._free(r)

    def _record_progress(self, move: StepSpec) -> None:
        """Record the iterations of a sequence when the first member has moved it.

        Later ones are those of its new ranks; ranks beside the move may know of them already.
        """
        (sequence,) = move.sequences
        known = [
            (sequences[sequence], batch)
            for r in move.ranks
            for batch, sequences in self.each[r].sequences.items()
            if sequence in sequences
        ]
        if known:
            self._moved.setdefault(move.id, max(known))

    def _abort(self, rank: Rank, step: int) -> None:
        assert step not in rank.finished + rank.aborted
        rank.aborted.append(step)
        for frame in rank.stack:
            frame.aborted = frame.aborted or frame.timed.task.id == step
        self._unwind(rank)

    def _unwind(self, rank: Rank) -> None:
        while rank.stack and rank.stack[-1].aborted:
            rank.stack.pop()

    def _iterate(self, r: int, entry: LogEntry, op: Iterate) -> None:
        rank = self.each[r]
        assert self._iterated(r, op), f"{entry} iterates no sequences"
        members = set(self._members(op))
        assert all(
            group <= members or group.isdisjoint(members)
            for group in map(self._ranks_of(r, op.batch), rank.sequences[op.batch])
        ), f"{entry} iterates part of a group"
        assert rank.versions[op.batch] == op.version
        rank.busy = True
        self._iteration(r, entry, op, 0, self._clock.now)

    def _ranks_of(self, r: int, batch: int) -> Callable[[int], set[int]]:
        return lambda sequence: set(self._needed_by(r, sequence, batch))

    def _needed_by(self, r: int, sequence: int, batch: int) -> tuple[int, ...]:
        before = self._needed_ranks.get(sequence, self._batches[batch].ranks)
        return self.each[r].placed.get(sequence, before)

    def _place(self, r: int, place: PlaceSequence) -> None:
        """Continue a sequence whose KV the members have moved; they know its progress from the
        move, the others from the log."""
        rank = self.each[r]
        (moved,) = (
            step
            for step, timed in self._steps.items()
            if timed.task.places and timed.task.sequences == (place.sequence,)
        )
        assert r not in self._steps[moved].task.ranks or moved in rank.finished
        rank.placed[place.sequence] = place.ranks
        if moved in self._moved:
            iterations, batch = self._moved[moved]
            if r in self._steps[moved].task.ranks:
                rank.sequences[batch][place.sequence] = iterations

    def _members(self, op: Iterate) -> tuple[int, ...]:
        return op.group or self._batches[op.batch].ranks

    def _iterated(self, r: int, op: Iterate) -> list[int]:
        """Return the sequences that an entry iterates, as a rank knows them."""
        ranks, members = self._ranks_of(r, op.batch), set(self._members(op))
        return [
            sequence
            for sequence in self.each[r].sequences.get(op.batch, ())
            if ranks(sequence) <= members
        ]

    def _iteration(self, r: int, entry: LogEntry, op: Iterate, i: int, since: int) -> None:
        spec, members = self._batches[op.batch], self._members(op)
        if i == op.iterations:
            self._end_grant(r, entry, op, since)
            return

        def ended() -> None:
            sequences = self.each[r].sequences[op.batch]
            for sequence in self._iterated(r, op):
                sequences[sequence] += 1
            if r == members[0]:
                ends = self.iterations.setdefault(op.batch, [])
                ends.append((entry.seq, self._clock.now))
            self._iteration(r, entry, op, i + 1, since)

        counted = {
            sequence: self.each[r].sequences[op.batch][sequence]
            for sequence in self._iterated(r, op)
            if is_piggybacked(sequence)
        }
        assert self._counted.setdefault((entry.seq, i), counted) == counted, (
            f"ranks cut the prompts of {entry} differently"
        )
        self._meet(
            ("iteration", entry.seq, i),
            members,
            r,
            lambda: self._clock.after(spec.iteration_time, ended),
        )

    def _end_grant(self, r: int, entry: LogEntry, op: Iterate, since: int) -> None:
        """Report a grant; every rank is the master of some sequences."""
        sequences = self.each[r].sequences[op.batch]
        finished = tuple(
            sequence
            for sequence in self._iterated(r, op)
            if (life := self._lives[sequence]) is not None
            and sequences[sequence] - op.iterations < life <= sequences[sequence]
            and self._master(r, sequence, op.batch) == r
        )
        took = (self._clock.now - since) * NS
        self.send(r, Iterated(r, entry.seq, op.batch, took, finished))
        self._free(r)

    def _master(self, r: int, sequence: int, batch: int) -> int:
        ranks = self._needed_by(r, sequence, batch)
        return ranks[sequence % len(ranks)]

    def _change(self, rank: Rank, change: Change) -> None:
        sequences = rank.sequences.setdefault(change.batch, {})
        r = self.each.index(rank)
        for group, iterations in change.iterated:
            ranks = self._ranks_of(r, change.batch)
            for sequence in sequences if r not in group else ():
                sequences[sequence] += iterations * (ranks(sequence) <= set(group))
        for sequence in change.left:
            sequences.pop(sequence, None)
        for sequence, _ in change.joined:
            assert sequence not in sequences
            sequences[sequence] = 0
        rank.versions[change.batch] = rank.versions.get(change.batch, 0) + 1
        assert rank.versions[change.batch] == change.version

    def _free(self, r: int) -> None:
        self.each[r].busy = False
        self._clock.after(0, lambda: self._advance(r))


@dataclass
class Scenario:
    """Requests of the scheduler, with their times."""

    size: int
    steps: dict[int, TimedStep]
    batches: dict[int, BatchSpec]
    lives: dict[int, int | None]
    submits: list[tuple[int, int]] = field(default_factory=list)
    """(time, step)."""
    joins: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(time, batch, sequence, owner)."""
    cancels: list[tuple[int, int]] = field(default_factory=list)
    """(time, sequence)."""
    ends: list[tuple[int, int]] = field(default_factory=list)
    """(time, owner)."""
    needed_ranks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Ranks of sequences that need only some of their batch's ranks."""


FIRST_DECODED = 1000
"""First number of a sequence that decodes; those below are prefilled."""


def is_piggybacked(sequence: int) -> bool:
    """Return whether a sequence's prompt is computed by its batch."""
    return sequence % 2 == 1


def random_scenario(
    rng: Random, *, troubled: bool = True, apart: bool = False, moved: bool = False
) -> Scenario:
    """Draw groups, priorities, lengths and times at random.

    Sequences and owners are cancelled where `troubled`, sequences need only some of their batch's
    ranks where `apart`, and other ranks later where `moved`.
    """
    size, span = rng.randint(1, 6), rng.choice((100, 1000, 4000))

    def group() -> tuple[int, ...]:
        return tuple(rng.sample(range(size), rng.randint(1, size)))

    def time() -> int:
        return rng.randrange(span)

    steps = {
        step: TimedStep(
            StepSpec(
                id=step,
                ranks=group(),
                high_priority=rng.random() < 0.5,
                yield_points=rng.randint(1, 12),
                sequences=tuple(rng.sample(range(8), rng.choice((0, 1, 1, 2)))),
                owner=rng.randint(1, 2),
            ),
            rng.randint(1, QUANTUM),
        )
        for step in range(rng.randint(1, 12))
    }
    batches = {
        s: BatchSpec(tuple(sorted(group())), rng.randint(1, 12)) for s in range(rng.randint(0, 3))
    }
    sequences = range(FIRST_DECODED, FIRST_DECODED + rng.randint(1, 6)) if batches else range(0)
    scenario = Scenario(
        size, steps, batches, {s: rng.choice((None, rng.randint(1, 60))) for s in sequences}
    )
    scenario.submits = sorted((time(), step) for step in steps)
    scenario.joins = sorted(
        (time(), rng.choice(list(batches)), sequence, rng.randint(1, 2)) for sequence in sequences
    )
    if apart:
        for _, batch, sequence, _ in scenario.joins:
            whole = batches[batch].ranks
            scenario.needed_ranks[sequence] = tuple(
                sorted(rng.sample(whole, rng.randint(1, len(whole))))
            )
    if moved:
        _add_moves(scenario, rng, span)
    if troubled:
        known = [*range(8), *sequences]
        scenario.cancels = [(time(), rng.choice(known)) for _ in range(rng.randint(0, 4))]
        scenario.ends = [(time(), 2)] if rng.random() < 0.3 else []
    return scenario


def _add_moves(scenario: Scenario, rng: Random, span: int) -> None:
    """Add one move of a sequence at most: the next may begin when the last one is over."""
    for time, batch, sequence, owner in scenario.joins:
        if rng.random() < 0.3:
            continue
        whole, step = scenario.batches[batch].ranks, len(scenario.steps)
        after = rng.sample(whole, rng.randint(1, len(whole)))
        members = tuple({*scenario.needed_ranks.get(sequence, whole), *after})
        task = StepSpec(
            id=step,
            ranks=members,
            high_priority=True,
            yield_points=rng.randint(1, 12),
            sequences=(sequence,),
            owner=owner,
            led_by=rng.choice(members),
            places=tuple(after),
        )
        scenario.steps[step] = TimedStep(task, rng.randint(1, QUANTUM))
        scenario.submits.append((max(0, time + rng.randrange(-10, span)), step))
    scenario.submits.sort()


@dataclass(frozen=True)
class Delays:
    """Longest time that a message is in transit, by kind."""

    entries: int = 0
    steps: int = 0
    """Reports of steps."""
    batches: int = 0
    """Reports of batches."""
    prepares: int = 0


class World:
    """A sequencer, its ranks, and the messages in transit between them."""

    def __init__(self, scenario: Scenario, delays: Delays, rng: Random) -> None:
        self.scenario, self._delays, self._rng = scenario, delays, rng
        self.clock = Clock()
        self.ranks = Ranks(
            self.clock,
            scenario.steps,
            scenario.batches,
            scenario.lives,
            scenario.size,
            scenario.needed_ranks,
        )
        self.ranks.send = self._report
        self.sequencer = Sequencer(scenario.size, quantum_ns=QUANTUM * NS)
        self.log: list[tuple[LogEntry, tuple[int, ...]]] = []
        self._arrives: dict[tuple[str, int], int] = {}

    def run(self) -> None:
        """Run until all is done.

        Raises:
            Deadlock: it never will be.
        """
        scenario, sequencer = self.scenario, self.sequencer
        for batch, spec in scenario.batches.items():
            sequencer.open_batch(batch, spec.ranks, masters=spec.ranks)
        for time, step in scenario.submits:
            self._submit(time, scenario.steps[step].task)
        for time, batch, sequence, owner in scenario.joins:
            ranks = scenario.needed_ranks.get(sequence, ())
            token = None if is_piggybacked(sequence) else 0
            self._at(time, sequencer.join, batch, sequence, token, owner, 0, ranks)
        for time, sequence in scenario.cancels:
            self._at(time, sequencer.cancel, sequence)
        for time, owner in scenario.ends:
            self._at(time, sequencer.end_owner, owner)
        self._at(0, self._end_endless_sequences)
        self.clock.run()
        self.ranks.check_idle()

    def _at(self, delay: int, event: Callable[..., None], *args: object) -> None:
        def happens() -> None:
            event(*args)
            self._take()

        self.clock.after(delay, happens)

    def _submit(self, time: int, task: StepSpec) -> None:
        """Send a step to the sequencer and to each member, each with its own delay."""
        self._at(time, self.sequencer.submit, task)
        for rank in task.ranks:
            self.clock.after(
                time + self._rng.randint(0, self._delays.prepares),
                lambda rank=rank: self._prepare(rank, task),  # type: ignore[misc]
            )

    def _prepare(self, rank: int, task: StepSpec) -> None:
        self.ranks.each[rank].prepared.add(task.id)
        delay = self._rng.randint(0, self._delays.prepares)
        self._at(delay, self.sequencer.prepared, task.id, rank)

    def _end_endless_sequences(self) -> None:
        """Cancel sequences without an end, which are there to starve steps, when no step is
        left."""
        if any(not self.is_over(step) for step in self.scenario.steps):
            self._at(QUANTUM, self._end_endless_sequences)
            assert self.clock.now < 10**6, "a step starves"
        elif any(time > self.clock.now for time, *_ in self.scenario.joins):
            self._at(QUANTUM, self._end_endless_sequences)
        else:
            for sequence, life in self.scenario.lives.items():
                if life is None:
                    self.sequencer.cancel(sequence)

    def is_over(self, step: int) -> bool:
        """Return True if all members have finished or aborted a step, or never began it for an
        ended owner."""
        task = self.scenario.steps[step].task
        members = [self.ranks.each[rank] for rank in task.ranks]
        ended = any(
            owner == task.owner and time <= self.clock.now for time, owner in self.scenario.ends
        )
        return all(
            (ended and all(f.timed.task.id != step for f in rank.stack))
            or step in rank.finished + rank.aborted
            for rank in members
        )

    def _take(self) -> None:
        entries = self.sequencer.take()
        self.log += entries
        for rank in range(self.scenario.size):
            mine = [entry for entry, ranks in entries if rank in ranks]
            if mine:
                frame = pack_entries(mine)
                self._in_order(
                    ("entries", rank),
                    self._delays.entries,
                    lambda rank=rank, frame=frame: self.ranks.deliver(  # type: ignore[misc]
                        rank, unpack_entries(frame)
                    ),
                )

    def _report(self, rank: int, report: Report) -> None:
        assert not isinstance(report, Prepared)
        kind, delay = (
            ("steps", self._delays.steps)
            if isinstance(report, RanQuantum)
            else ("batches", self._delays.batches)
        )
        frame = pack_reports((report,))

        def arrives() -> None:
            for arrived in unpack_reports(frame):
                self.sequencer.report(arrived)
            self._take()

        self._in_order((kind, rank), delay, arrives)

    def _in_order(self, way: tuple[str, int], longest: int, then: Callable[[], None]) -> None:
        """Deliver messages of one connection in their order."""
        arrives = self.clock.now + self._rng.randint(0, longest)
        arrives = self._arrives[way] = max(arrives, self._arrives.get(way, 0))
        self.clock.after(arrives - self.clock.now, then)


def replay(
    scenario: Scenario, projections: list[list[LogEntry]], longest_delay: int, rng: Random
) -> Ranks:
    """Run ranks on a log without a sequencer, each entry after a delay.

    Raises:
        Deadlock: they wait for each other.
    """
    clock = Clock()
    ranks = Ranks(
        clock,
        scenario.steps,
        scenario.batches,
        scenario.lives,
        scenario.size,
        scenario.needed_ranks,
    )
    for r, projection in enumerate(projections):
        ranks.each[r].prepared.update(scenario.steps)
        arrives = 0
        for entry in projection:
            arrives += rng.randint(0, longest_delay)
            clock.after(arrives, lambda r=r, entry=entry: ranks.deliver(r, (entry,)))  # type: ignore[misc]
    clock.run()
    ranks.check_idle()
    return ranks
