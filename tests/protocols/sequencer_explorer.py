"""Every order of events of a small gang: the real sequencer, and ranks that do what its log says.

An event is the router's next command, a rank's next `Prepared`, or its next report; each of these
sources is in order, and between them every order is tried. Ranks execute as far as they can at
once: what they do shows only in their reports, whose delivery is an event of its own, so executing
later gives the sequencer no further order. States that are equal, byte for byte, are explored once.

`explored` raises `Broken` with the shortest sequence of events that breaks a rule.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from csps.protocols.sequencer.log_entries import (
    Abort,
    Change,
    EndOwner,
    Free,
    Iterate,
    Iterated,
    LogEntry,
    PlaceSequence,
    RanQuantum,
    RunQuantum,
    Shutdown,
)
from csps.protocols.sequencer.sequencer import Sequencer
from csps.protocols.sequencer.steps import StepSpec

LATEST = 8
"""Entries of the log by which a report may be later than one of another rank. Without a bound, a
sequence whose end one rank reports is iterated by others for as long as the report is under way."""
BATCH = 0
OWNER = 1


class Broken(AssertionError):
    """A rule does not hold in some order of events."""


@dataclass(frozen=True, kw_only=True)
class Join:
    """A sequence joins the batch."""

    sequence: int
    ranks: tuple[int, ...]
    lives: int
    """Iterations after which it is finished."""


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """A sequence is cancelled."""

    sequence: int


Command = StepSpec | Join | Cancel | EndOwner


@dataclass(frozen=True, kw_only=True)
class SmallWorld:
    """What is explored."""

    ranks: int
    commands: tuple[Command, ...]
    """The router's, in order."""
    yield_point_ns: int = 1_000_000
    """Time that a leader reports for each yield point."""
    iteration_ns: int = 1_000_000

    @property
    def steps(self) -> dict[int, StepSpec]:
        return {one.id: one for one in self.commands if isinstance(one, StepSpec)}

    @property
    def joins(self) -> dict[int, Join]:
        return {one.sequence: one for one in self.commands if isinstance(one, Join)}

    @property
    def cancelled(self) -> set[int]:
        return {one.sequence for one in self.commands if isinstance(one, Cancel)}

    @property
    def owner_ends(self) -> bool:
        return any(isinstance(one, EndOwner) for one in self.commands)


@dataclass(slots=True)
class SmallRank:
    """What a rank knows."""

    queue: deque[LogEntry] = field(default_factory=deque)
    stack: list[list[int]] = field(default_factory=list)
    """Steps that have begun, each with the yield point that it has reached."""
    version: int = 0
    members: dict[int, int] = field(default_factory=dict)
    """Iterations of each sequence of the batch."""
    needed: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Ranks that moved sequences need."""
    over: dict[int, str] = field(default_factory=dict)
    """Steps that are finished or aborted."""
    quanta: int = 0
    """Quanta since the batch's last iteration on this rank, as long as a sequence needs it."""
    last_seq: int = 0


@dataclass(slots=True)
class State:
    """A sequencer, its ranks, and what is under way."""

    sequencer: Sequencer
    ranks: list[SmallRank]
    commands: int = 0
    """Commands that the router has sent."""
    prepares: list[int] = field(default_factory=list)
    """Number of steps that each rank has prepared."""
    reports: list[deque[RanQuantum | Iterated]] = field(default_factory=list)


class Explorer:
    """Explores the states of one world."""

    def __init__(self, world: SmallWorld) -> None:
        self._world, self._steps, self._joins = world, world.steps, world.joins
        self._preparing = [
            [step for step, spec in self._steps.items() if rank in spec.ranks]
            for rank in range(world.ranks)
        ]
        self.ends = 0
        """States from which nothing more happens."""

    def explore(self, most: int) -> int:
        """Visit every state; return their number.

        Raises:
            Broken: a rule does not hold; the message names the events.
            AssertionError: there are more than `most` states.
        """
        first = self._pack(self._first())
        parents: dict[bytes, tuple[bytes, str]] = {_digest(first): (b"", "")}
        waiting = deque([first])
        while waiting:
            packed = waiting.popleft()
            before = _digest(packed)
            names = list(self._enabled(pickle.loads(packed)))
            self.ends += not names
            for name in names or [""]:
                state: State = pickle.loads(packed)
                try:
                    self._happen(state, name) if name else self._check_end(state)
                except Exception as error:
                    trace = ", ".join([*_events(parents, before), name])
                    raise Broken(f"{error!r} after: {trace}") from error
                after = self._pack(state)
                if (digest := _digest(after)) not in parents:
                    parents[digest] = before, name
                    waiting.append(after)
                    assert len(parents) <= most, f"more than {most} states"
        return len(parents)

    def _first(self) -> State:
        size = self._world.ranks
        sequencer = Sequencer(size)
        sequencer.open_batch(BATCH, tuple(range(size)), tuple(range(size)))
        return State(
            sequencer,
            [SmallRank() for _ in range(size)],
            prepares=[0] * size,
            reports=[deque() for _ in range(size)],
        )

    def _pack(self, state: State) -> bytes:
        return pickle.dumps(state, pickle.HIGHEST_PROTOCOL)

    # Events

    def _enabled(self, state: State) -> Iterator[str]:
        if state.commands < len(self._world.commands):
            yield "command"
        oldest = min((reports[0].seq for reports in state.reports if reports), default=0)
        for rank, preparing in enumerate(self._preparing):
            if state.prepares[rank] < len(preparing):
                yield f"prepared {rank}"
            if state.reports[rank] and state.reports[rank][0].seq <= oldest + LATEST:
                yield f"report {rank}"

    def _happen(self, state: State, name: str) -> None:
        kind, _, number = name.partition(" ")
        if kind == "command":
            self._command(state, self._world.commands[state.commands])
            state.commands += 1
        elif kind == "prepared":
            rank = int(number)
            state.sequencer.prepared(self._preparing[rank][state.prepares[rank]], rank)
            state.prepares[rank] += 1
        else:
            state.sequencer.report(state.reports[int(number)].popleft())
        for entry, ranks in state.sequencer.take():
            for rank in ranks:
                state.ranks[rank].queue.append(entry)
        while self._execute(state):
            pass

    def _command(self, state: State, command: Command) -> None:
        match command:
            case StepSpec():
                state.sequencer.submit(command)
            case Join(sequence=sequence, ranks=ranks):
                state.sequencer.join(BATCH, sequence, 0, OWNER, ranks=ranks)
            case Cancel(sequence=sequence):
                state.sequencer.cancel(sequence)
            case EndOwner(owner):
                state.sequencer.end_owner(owner)

    # Ranks

    def _execute(self, state: State) -> bool:
        """Execute one entry on all its ranks; return False if none can be."""
        for r, rank in enumerate(state.ranks):
            if not rank.queue:
                continue
            entry = rank.queue[0]
            meeting = self._meeting(entry)
            if meeting is None:
                self._executed(rank, entry)
                self._alone(state, r, entry)
                return True
            heads = [state.ranks[other].queue for other in meeting]
            if all(queue and queue[0] == entry for queue in heads):
                for other in meeting:
                    self._executed(state.ranks[other], entry)
                self._together(state, entry, meeting)
                return True
        return False

    def _executed(self, rank: SmallRank, entry: LogEntry) -> None:
        assert rank.last_seq < entry.seq, f"{entry} comes after entry {rank.last_seq}"
        rank.last_seq = entry.seq
        rank.queue.popleft()

    def _meeting(self, entry: LogEntry) -> tuple[int, ...] | None:
        match entry.op:
            case RunQuantum(step):
                return self._steps[step].ranks
            case Iterate(_, _, _, group):
                return group or tuple(range(self._world.ranks))
        return None

    def _alone(self, state: State, r: int, entry: LogEntry) -> None:
        rank = state.ranks[r]
        match entry.op:
            case Change(_, version, joined, left):
                assert version == rank.version + 1, f"{entry} follows version {rank.version}"
                rank.version = version
                for sequence in left:
                    rank.members.pop(sequence, None)
                for sequence, _ in joined:
                    assert sequence not in rank.members
                    rank.members[sequence] = 0
                self._forget_turn(rank, r)
            case Abort(step):
                assert step not in rank.over, f"step {step} is {rank.over[step]} already"
                rank.over[step] = "aborted"
                rank.stack = [frame for frame in rank.stack if frame[0] != step]
            case PlaceSequence(sequence, ranks):
                moves = [step for step in self._steps.values() if step.places]
                (move,) = [step for step in moves if step.sequences == (sequence,)]
                assert r not in move.ranks or rank.over[move.id] == "finished"
                assert sequence in rank.members, f"{entry} places a sequence that has left"
                rank.needed[sequence] = ranks
                rank.members[sequence] = max(
                    other.members.get(sequence, 0) for other in state.ranks
                )
                self._forget_turn(rank, r)
            case EndOwner():
                assert not rank.members, f"{rank.members} have not left"
                assert not rank.stack, f"{rank.stack} were not aborted"
            case Free() | Shutdown():
                pass

    def _forget_turn(self, rank: SmallRank, r: int) -> None:
        if not any(r in self._needed(rank, sequence) for sequence in rank.members):
            rank.quanta = 0

    def _needed(self, rank: SmallRank, sequence: int) -> tuple[int, ...]:
        return rank.needed.get(sequence, self._joins[sequence].ranks)

    def _together(self, state: State, entry: LogEntry, ranks: tuple[int, ...]) -> None:
        match entry.op:
            case RunQuantum(step, until):
                self._quantum(state, entry, self._steps[step], until)
            case Iterate(_, version, iterations):
                self._iterate(state, entry, version, iterations, ranks)

    def _quantum(self, state: State, entry: LogEntry, step: StepSpec, until: int) -> None:
        reached = set()
        for r in step.ranks:
            rank = state.ranks[r]
            assert step.id not in rank.over, f"step {step.id} is {rank.over[step.id]}"
            if all(frame[0] != step.id for frame in rank.stack):
                done = self._preparing[r][: state.prepares[r]]
                assert step.id in done, f"rank {r} has no slots for step {step.id}"
                below = [self._steps[frame[0]].high_priority for frame in rank.stack]
                assert below in ([], [False] if step.high_priority else []), (
                    f"step {step.id} begins above {rank.stack}"
                )
                rank.stack.append([step.id, 0])
            top = rank.stack[-1]
            assert top[0] == step.id, f"step {step.id} is not on top of {rank.stack}"
            assert top[1] < until <= step.yield_points
            reached.add(until - top[1])
            top[1] = until
            if until == step.yield_points:
                rank.stack.pop()
                rank.over[step.id] = "finished"
            if any(r in self._needed(rank, sequence) for sequence in rank.members):
                rank.quanta += 1
                assert rank.quanta <= 1, f"rank {r}: two quanta before the batch's next iteration"
        (yield_points,) = reached
        time_ns = yield_points * self._world.yield_point_ns
        report = RanQuantum(step.leader, entry.seq, step.id, until, time_ns)
        state.reports[step.leader].append(report)

    def _iterate(
        self, state: State, entry: LogEntry, version: int, iterations: int, ranks: tuple[int, ...]
    ) -> None:
        for r in ranks:
            rank = state.ranks[r]
            assert rank.version == version, f"{entry} comes at version {rank.version}"
            iterated = [s for s in rank.members if set(self._needed(rank, s)) <= set(ranks)]
            assert iterated, f"{entry} iterates nothing on rank {r}"
            assert all(
                sequence in iterated or set(self._needed(rank, sequence)).isdisjoint(ranks)
                for sequence in rank.members
            ), f"{entry} iterates part of a group"
            rank.quanta = 0
            finished = []
            for sequence in iterated:
                before = rank.members[sequence]
                rank.members[sequence] += iterations
                lives = self._joins[sequence].lives
                master = min(self._needed(rank, sequence)) == r
                if master and before < lives <= rank.members[sequence]:
                    finished.append(sequence)
            time_ns = iterations * self._world.iteration_ns
            state.reports[r].append(Iterated(r, entry.seq, BATCH, time_ns, tuple(finished)))

    # Rules at the end

    def _check_end(self, state: State) -> None:
        """Check that nothing waits for ever, and that all members agree."""
        for r, rank in enumerate(state.ranks):
            assert not rank.queue, f"rank {r} waits before {rank.queue[0]}: deadlock"
            assert not rank.stack, f"rank {r} never ends {rank.stack}"
            assert not rank.members, f"sequences {set(rank.members)} never leave rank {r}"
        assert not state.sequencer.unprepared
        for step in self._steps.values():
            ends = {state.ranks[r].over.get(step.id) for r in step.ranks}
            assert len(ends) == 1, f"step {step.id} ends differently: {ends}"
            excused = self._world.owner_ends or step.places
            excused = excused or self._world.cancelled.issuperset(step.sequences)
            assert ends == {"finished"} or excused, f"step {step.id} is {ends}"


def _events(parents: dict[bytes, tuple[bytes, str]], at: bytes) -> list[str]:
    """Return the events that lead to a state."""
    events = []
    while at:
        at, event = parents[at]
        events.append(event)
    return events[-2::-1]


def _digest(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=12).digest()
