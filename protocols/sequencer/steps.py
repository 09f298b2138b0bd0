"""The steps of a gang: which are prepared, which may start, which have begun."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

T = TypeVar("T")

REMEMBERED = 4096
"""Steps of which one side has heard and the other has not. What is older nobody will hear of: the
step was given up, or its router is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpec:
    """What the conductor needs to know of a step."""

    id: int
    ranks: tuple[int, ...]
    high_priority: bool
    yield_points: int
    """The last point of its exchange program; reaching it ends the step."""
    sequences: tuple[int, ...]
    """Those that it computes, or the row whose KV it moves."""
    rows: int = 0
    """Tokens that it computes; 0 if that tells nothing of how long it takes."""
    owner: int
    led_by: int | None = None
    """The rank that reports; the lowest one if none is named."""
    places: tuple[int, ...] = ()
    """Ranks that its sequence, a row, concerns when the step has moved its KV; empty: it computes a
    prompt, and moves no row."""

    def __post_init__(self) -> None:
        assert self.ranks
        assert not self.places or len(self.sequences) == 1
        assert self.yield_points >= 1
        assert len(set(self.ranks)) == len(self.ranks)
        assert len(set(self.sequences)) == len(self.sequences)

    @property
    def leader(self) -> int:
        """The rank that reports."""
        return min(self.ranks) if self.led_by is None else self.led_by


class Quantum(NamedTuple):
    """A `Run` in the log."""

    seq: int
    until: int
    yield_points: int


@dataclass(slots=True, eq=False)
class SequencedStep:
    """A step that is not finished."""

    task: StepSpec
    submission: int
    """Steps submitted before it."""
    prepared: set[int] = field(default_factory=set)
    ready: bool = False
    """Prepared by all members, and first with all its sequences."""
    started: bool = False
    """Its ranks are kept for it."""
    until: int = 0
    """Part up to which the log lets it run; 0 before its first quantum."""
    size: int = 0
    """Parts of its newest quantum."""
    outstanding: deque[Quantum] = field(default_factory=deque)
    """Quanta that its leader has not reported, oldest first."""
    ran_yield_points: int = 0
    ran_ns: int = 0
    cancelled: set[int] = field(default_factory=set)
    newly_cancelled: list[int] = field(default_factory=list)
    """Cancelled sequences of which the log says nothing yet."""

    @property
    def ending(self) -> bool:
        """Whether its last quantum is in the log."""
        return self.until == self.task.yield_points

    def next_until(self, quantum_ns: int) -> int:
        """Where its next quantum ends: after about `quantum_ns` by the parts reported so far.

        A quantum has at most twice the parts of the one before, since parts differ and the first
        ones may be the short ones.
        """
        left = self.task.yield_points - self.until
        if not self.ran_yield_points:
            return self.until + max(1, min(self.size, left))
        fit = quantum_ns * self.ran_yield_points // max(self.ran_ns, 1)
        return self.until + max(1, min(fit, 2 * self.size, left))


class SequencedSteps:
    """All steps that are not finished, and the ranks that they keep."""

    def __init__(self, ranks: int) -> None:
        self._all: dict[int, SequencedStep] = {}
        self._submitted = 0
        self._early: dict[int, set[int]] = {}
        """Ranks that have prepared a step which was not submitted yet."""
        self._late: dict[int, int] = {}
        """How many ranks have still to prepare a step that is gone."""
        self._of_sequence: dict[int, list[SequencedStep]] = {}
        self._ready: dict[bool, list[SequencedStep]] = {True: [], False: []}
        """Startable steps that have not started, oldest first, by class."""
        self._running: dict[bool, list[SequencedStep]] = {True: [], False: []}
        """Started steps, oldest first, by class."""
        self._occupant: dict[bool, list[SequencedStep | None]] = {
            high_priority: [None] * ranks for high_priority in (True, False)
        }
        """The started step on each rank, by class."""
        self._may_start = False
        """Whether a step became startable, or one was removed, since the last look."""
        self.wanted = [0] * ranks
        """Started and startable steps on each rank."""
        self._wanted_high_priority = [0] * ranks

    def get(self, step: int) -> SequencedStep | None:
        """A step that is not finished."""
        return self._all.get(step)

    def unprepared(self) -> tuple[int, ...]:
        """Steps that some members have not prepared, oldest first."""
        missing = (it for it in self._all.values() if len(it.prepared) < len(it.task.ranks))
        return tuple(it.task.id for it in missing)

    def of_sequence(self, sequence: int) -> tuple[SequencedStep, ...]:
        """Steps that compute a sequence, oldest first."""
        return tuple(self._of_sequence.get(sequence, ()))

    def of_owner(self, owner: int) -> list[SequencedStep]:
        """Steps of an owner, oldest first."""
        return [step for step in self._all.values() if step.task.owner == owner]

    def running(self) -> Iterator[SequencedStep]:
        """Started steps, urgent ones first, the oldest first."""
        yield from self._running[True]
        yield from self._running[False]

    def on_top(self, rank: int) -> SequencedStep | None:
        """The started step on a rank that no other one may interrupt."""
        return self._occupant[True][rank] or self._occupant[False][rank]

    def interrupted(self, step: SequencedStep) -> bool:
        """Whether a started urgent step is in a long one's way."""
        high_priority = self._occupant[True]
        return not step.task.high_priority and any(
            high_priority[rank] is not None for rank in step.task.ranks
        )

    def interruptible(self, step: SequencedStep) -> bool:
        """Whether an urgent step has one of a long step's ranks, or waits for it."""
        return not step.task.high_priority and any(
            self._wanted_high_priority[r] for r in step.task.ranks
        )

    def add(self, task: StepSpec) -> None:
        """A step was submitted."""
        assert task.id not in self._all, f"step {task.id} was submitted twice"
        step = SequencedStep(task, self._submitted, self._early.pop(task.id, set()))
        self._submitted += 1
        self._all[task.id] = step
        for sequence in task.sequences:
            self._of_sequence.setdefault(sequence, []).append(step)
        self._check_ready(step)

    def refuse(self, task: StepSpec) -> None:
        """A step was submitted that nobody wants any more."""
        self._expect_late(task, self._early.pop(task.id, set()))

    def prepare(self, step_id: int, rank: int) -> None:
        """A rank has prepared a step, which may be submitted later, or be gone."""
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
        """Start what can start. A startable step that cannot keeps younger ones of its class off
        its ranks, or a step on many ranks would wait for ever for all of them at once."""
        if not self._may_start:
            return
        self._may_start = False
        for high_priority in (True, False):
            blocked = {
                r
                for r, occupant in enumerate(self._occupant[high_priority])
                if occupant is not None
            }
            if not high_priority:
                blocked.update(r for r, top in enumerate(self._occupant[True]) if top is not None)
            waiting = self._ready[high_priority]
            started = [step for step in waiting if self._start(step, blocked)]
            if started:
                self._ready[high_priority] = [step for step in waiting if not step.started]

    def _start(self, step: SequencedStep, blocked: set[int]) -> bool:
        """Start a step if none of its ranks is blocked; they are afterwards."""
        step.started = blocked.isdisjoint(step.task.ranks)
        blocked.update(step.task.ranks)
        if step.started:
            insort(self._running[step.task.high_priority], step, key=_submission)
            for rank in step.task.ranks:
                self._occupant[step.task.high_priority][rank] = step
        return step.started

    def remove(self, step: SequencedStep) -> None:
        """A step is finished, or nobody wants it any more."""
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


def _submission(step: SequencedStep) -> int:
    return step.submission
