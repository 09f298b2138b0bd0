"""The prefill and move steps of a gang: which are prepared, which may start, which have begun."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

T = TypeVar("T")

REMEMBERED = 4096
"""Steps remembered that one side has named and the other has not. Older ones were cancelled, or
their router is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpec:
    """A step, as far as the sequencer needs to know it."""

    id: int
    ranks: tuple[int, ...]
    high_priority: bool
    yield_points: int
    """Last yield point of its exchange program; reaching it ends the step."""
    sequences: tuple[int, ...]
    """Sequences that it computes, or the one whose KV it moves."""
    rows: int = 0
    """Tokens that it computes; 0 if its duration does not depend on them."""
    owner: int
    led_by: int | None = None
    """Rank that reports; None means the lowest rank."""
    places: tuple[int, ...] = ()
    """Ranks that its sequence needs after the step has moved its KV. Empty: the step computes a
    prompt."""
    master: int = 0
    """Instance that samples its sequence's tokens after the move."""

    def __post_init__(self) -> None:
        assert self.ranks
        assert not self.places or len(self.sequences) == 1
        assert self.yield_points >= 1
        assert len(set(self.ranks)) == len(self.ranks)
        assert len(set(self.sequences)) == len(self.sequences)

    @property
    def leader(self) -> int:
        """Rank that reports."""
        return min(self.ranks) if self.led_by is None else self.led_by


class Quantum(NamedTuple):
    """A `RunQuantum` in the log."""

    seq: int
    until: int
    yield_points: int


@dataclass(slots=True, eq=False)
class SequencedStep:
    """A step that is not finished."""

    task: StepSpec
    submission: int
    """Number of steps submitted before it."""
    prepared: set[int] = field(default_factory=set)
    ready: bool = False
    """True once all members have prepared it and it is the oldest step of all its sequences."""
    started: bool = False
    """True once it occupies its ranks."""
    until: int = 0
    """Yield point up to which the log lets it run; 0 before its first quantum."""
    size: int = 0
    """Yield points of its newest quantum."""
    outstanding: deque[Quantum] = field(default_factory=deque)
    """Quanta that its leader has not reported, oldest first."""
    ran_yield_points: int = 0
    ran_ns: int = 0
    cancelled: set[int] = field(default_factory=set)
    newly_cancelled: list[int] = field(default_factory=list)
    """Cancelled sequences that the log does not name yet."""

    @property
    def ending(self) -> bool:
        """True if its last quantum is in the log."""
        return self.until == self.task.yield_points

    def begin_quantum(self, seq: int, until: int) -> None:
        """Record that a log entry lets it run up to a yield point."""
        self.size = until - self.until
        self.outstanding.append(Quantum(seq, until, self.size))
        self.until = until

    def end_quantum(self, nanoseconds: int) -> None:
        """Record that its oldest outstanding quantum has run."""
        self.ran_yield_points += self.outstanding.popleft().yield_points
        self.ran_ns += nanoseconds

    def next_until(self, quantum_ns: int) -> int:
        """Return the yield point that ends its next quantum of about `quantum_ns`."""
        left = self.task.yield_points - self.until
        if not self.ran_yield_points:
            return self.until + max(1, min(self.size, left))
        fit = quantum_ns * self.ran_yield_points // max(self.ran_ns, 1)
        # A quantum at most doubles: the yield points measured so far may be the short ones.
        return self.until + max(1, min(fit, 2 * self.size, left))


class SequencedSteps:
    """All steps that are not finished, and the ranks that they occupy."""

    def __init__(self, ranks: int) -> None:
        self._all: dict[int, SequencedStep] = {}
        self._submitted = 0
        self._early: dict[int, set[int]] = {}
        """Ranks that have prepared a step which is not submitted yet."""
        self._late: dict[int, int] = {}
        """Number of ranks that have still to prepare a step which is gone."""
        self._of_sequence: dict[int, list[SequencedStep]] = {}
        self._ready: dict[bool, list[SequencedStep]] = {True: [], False: []}
        """Startable steps that have not started, oldest first, by priority (True: high)."""
        self._running: dict[bool, list[SequencedStep]] = {True: [], False: []}
        """Started steps, oldest first, by priority."""
        self._occupant: dict[bool, list[SequencedStep | None]] = {
            high_priority: [None] * ranks for high_priority in (True, False)
        }
        """Started step on each rank, by priority."""
        self._may_start = False
        """True if a step became startable, or was removed, since the last `start`."""
        self.wanted = [0] * ranks
        """Number of started and startable steps on each rank."""
        self._wanted_high_priority = [0] * ranks

    def get(self, step: int) -> SequencedStep | None:
        """Return a step that is not finished, or None."""
        return self._all.get(step)

    def unprepared(self) -> tuple[int, ...]:
        """Return the steps that some members have not prepared, oldest first."""
        return tuple(
            step.task.id for step in self._all.values() if len(step.prepared) < len(step.task.ranks)
        )

    def of_sequence(self, sequence: int) -> tuple[SequencedStep, ...]:
        """Return the steps that compute a sequence, oldest first."""
        return tuple(self._of_sequence.get(sequence, ()))

    def of_owner(self, owner: int) -> list[SequencedStep]:
        """Return the steps of an owner, oldest first."""
        return [step for step in self._all.values() if step.task.owner == owner]

    def running(self) -> Iterator[SequencedStep]:
        """Yield started steps, high priority first, then the oldest first."""
        yield from self._running[True]
        yield from self._running[False]

    def on_top(self, rank: int) -> SequencedStep | None:
        """Return the started step on a rank that no other step may preempt."""
        return self._occupant[True][rank] or self._occupant[False][rank]

    def interrupted(self, step: SequencedStep) -> bool:
        """Return True if a started high-priority step occupies a rank of this low-priority one."""
        if step.task.high_priority or not self._running[True]:
            return False
        occupants = self._occupant[True]
        return any(occupants[rank] is not None for rank in step.task.ranks)

    def interruptible(self, step: SequencedStep) -> bool:
        """Return True if a high-priority step has, or waits for, a rank of this low-priority
        one."""
        if step.task.high_priority or not (self._running[True] or self._ready[True]):
            return False
        return any(self._wanted_high_priority[rank] for rank in step.task.ranks)

    def add(self, task: StepSpec) -> None:
        """Add a submitted step."""
        assert task.id not in self._all, f"step {task.id} was submitted twice"
        step = SequencedStep(task, self._submitted, self._early.pop(task.id, set()))
        self._submitted += 1
        self._all[task.id] = step
        for sequence in task.sequences:
            self._of_sequence.setdefault(sequence, []).append(step)
        self._check_ready(step)

    def refuse(self, task: StepSpec) -> None:
        """Reject a submitted step that is no longer wanted."""
        self._expect_late(task, self._early.pop(task.id, set()))

    def prepare(self, step_id: int, rank: int) -> None:
        """Record that a rank has prepared a step, which may be submitted later, or be gone."""
        step = self._all.get(step_id)
        if step is not None:
            step.prepared.add(rank)
            self._check_ready(step)
        elif step_id in self._late:
            self._late[step_id] -= 1
            if not self._late[step_id]:
                del self._late[step_id]
        else:
            _remember(self._early, step_id, {*self._early.get(step_id, ()), rank})

    def start(self) -> None:
        """Start all steps that can start."""
        if not self._may_start:
            return
        self._may_start = False
        for high_priority in (True, False):
            blocked = _occupied(self._occupant[high_priority])
            if not high_priority:
                blocked |= _occupied(self._occupant[True])
            # A startable step that cannot start blocks its ranks for younger steps of its priority.
            # Otherwise a step on many ranks might never find all of them idle at once.
            waiting = self._ready[high_priority]
            started = [step for step in waiting if self._start(step, blocked)]
            if started:
                self._ready[high_priority] = [step for step in waiting if not step.started]

    def _start(self, step: SequencedStep, blocked: set[int]) -> bool:
        """Start a step if none of its ranks is blocked; block all of them."""
        step.started = blocked.isdisjoint(step.task.ranks)
        blocked.update(step.task.ranks)
        if step.started:
            insort(self._running[step.task.high_priority], step, key=_submission)
            for rank in step.task.ranks:
                self._occupant[step.task.high_priority][rank] = step
        return step.started

    def remove(self, step: SequencedStep) -> None:
        """Remove a step that is finished or no longer wanted."""
        del self._all[step.task.id]
        self._may_start = True
        if step.ready:
            self._count(step, -1)
            (self._running if step.started else self._ready)[step.task.high_priority].remove(step)
        if step.started:
            for rank in step.task.ranks:
                self._occupant[step.task.high_priority][rank] = None
        for sequence in step.task.sequences:
            waiting_steps = self._of_sequence[sequence]
            waiting_steps.remove(step)
            if waiting_steps:
                self._check_ready(waiting_steps[0])
            else:
                del self._of_sequence[sequence]
        self._expect_late(step.task, step.prepared)

    def _expect_late(self, task: StepSpec, prepared: set[int]) -> None:
        missing = len(task.ranks) - len(prepared)
        if missing:
            _remember(self._late, task.id, missing)

    def _check_ready(self, step: SequencedStep) -> None:
        if step.ready or len(step.prepared) < len(step.task.ranks):
            return
        if all(self._of_sequence[s][0] is step for s in step.task.sequences):
            step.ready = self._may_start = True
            insort(self._ready[step.task.high_priority], step, key=_submission)
            self._count(step, 1)

    def _count(self, step: SequencedStep, change: int) -> None:
        for rank in step.task.ranks:
            self.wanted[rank] += change
            if step.task.high_priority:
                self._wanted_high_priority[rank] += change


def _remember(known: dict[int, T], step: int, what: T) -> None:
    known[step] = what
    if len(known) > REMEMBERED:
        del known[next(iter(known))]


def _occupied(occupants: list[SequencedStep | None]) -> set[int]:
    return {rank for rank, occupant in enumerate(occupants) if occupant is not None}


def _submission(step: SequencedStep) -> int:
    return step.submission
