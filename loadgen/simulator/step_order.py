"""Who computes what next: a gang's steps in one order, and urgent ones inside long ones.

Much as conductors have it (`protocols/sequencer/sequencer.py`), but without streams: every instance takes the
steps that it is a member of in the order in which they were sent, and a step starts when all its
members have come to it. Urgent steps have an order of their own; they run before whatever has not
started, and inside a long step that has: all members of it stand still at the end of the quantum
under way, because each of its exchanges needs them all. Nothing here knows what a step contains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from csps.loadgen.simulator.timeline import EventTimeline


@dataclass(eq=False, slots=True)
class SimulatedStep:
    """A step on the instances that compute it together."""

    members: tuple[int, ...]
    """Indices of instances."""
    work_ns: int
    """What it takes if nothing interrupts it."""
    high_priority: bool
    started: Callable[[], None]
    ended: Callable[[], None]
    sequences: tuple[int, ...] = ()
    """Whose tokens it computes, or whose KV it moves."""
    places: tuple[int, ...] = ()
    """Of a move: indices of the instances that take part in decoding from then on."""
    started_ns: int = -1
    done_ns: int = 0
    """Work done up to `resumed_ns`, or for good while it stands."""
    slowdown_ns: int = 0
    """By how much it took longer, as others computed on the same cores."""
    resumed_ns: int = -1
    """Since when it runs; -1 while it stands."""
    version: int = 0
    """Version of its next end or halt: earlier ones on the timeline are out of date."""
    preemptors: set[SimulatedStep] = field(default_factory=set)
    """Of a long step: urgent ones that run inside it or wait for it to stand; never iterated."""
    preempted: list[SimulatedStep] = field(default_factory=list)
    """Of an urgent step: those that it runs inside of."""
    awaited: int = 0
    """Of an urgent step: hosts that do not stand yet."""
    over: bool = False


class StepOrder:
    """The steps of one gang.

    Args:
        timeline: the simulated time.
        instances: how many there are.
        quantum_ns: work between two points at which a long step can be interrupted; 0 is anywhere.
    """

    def __init__(self, timeline: EventTimeline, instances: int, quantum_ns: int = 0) -> None:
        self._timeline, self._quantum_ns = timeline, quantum_ns
        self._low_priority: list[deque[SimulatedStep]] = [deque() for _ in range(instances)]
        self._high_priority: list[deque[SimulatedStep]] = [deque() for _ in range(instances)]
        self._running: list[SimulatedStep | None] = [None] * instances
        """Long step under way, standing or not."""
        self._preempting: list[SimulatedStep | None] = [None] * instances
        """Urgent step that runs, or waits for its hosts to stand."""

    def busy(self, instance: int) -> bool:
        """The instance computes something now."""
        inside, running = self._preempting[instance], self._running[instance]
        return (inside is not None and inside.resumed_ns >= 0) or (
            running is not None and running.resumed_ns >= 0
        )

    def submit(self, task: SimulatedStep) -> None:
        """Put a step in line; the order of these calls is the gang's order."""
        queues = self._high_priority if task.high_priority else self._low_priority
        for member in task.members:
            queues[member].append(task)
        self._start_ready(task.members)

    def cancel_step(self, task: SimulatedStep) -> None:
        """End a step that nobody wants any more, now: `ended` is called as ever."""
        if task.over:
            return
        if task.started_ns < 0 and task not in map(self._preempting.__getitem__, task.members):
            for member in task.members:
                (self._high_priority if task.high_priority else self._low_priority)[member].remove(
                    task
                )
        self._end(task)

    # --- starting ---

    def _start_ready(self, members: Sequence[int]) -> None:
        """Start whatever can start on these instances."""
        for member in members:
            self._start_high_priority(member)
        for member in members:
            self._start_low_priority(member)

    def _start_high_priority(self, member: int) -> None:
        queue = self._high_priority[member]
        if not queue:
            return
        task = queue[0]
        if not all(
            self._preempting[it] is None and self._high_priority[it][0] is task
            for it in task.members
        ):
            return
        for it in task.members:
            self._high_priority[it].popleft()
            self._preempting[it] = task
            if (victim := self._running[it]) is not None and victim not in task.preempted:
                task.preempted.append(victim)
        for victim in task.preempted:
            victim.preemptors.add(task)
            task.awaited += self._request_pause(victim)
        if not task.awaited:
            self._run(task)

    def _start_low_priority(self, member: int) -> None:
        queue = self._low_priority[member]
        if not queue:
            return
        task = queue[0]
        for it in task.members:
            free = self._running[it] is None and self._preempting[it] is None
            if not free or self._low_priority[it][0] is not task:
                return
        for it in task.members:
            self._low_priority[it].popleft()
            self._running[it] = task
        self._run(task)

    def _run(self, task: SimulatedStep) -> None:
        """Begin, or go on."""
        now_ns = self._timeline.now_ns
        task.resumed_ns = now_ns
        task.version += 1
        version, end_ns = task.version, now_ns + task.work_ns - task.done_ns
        if task.started_ns < 0:
            task.started_ns = now_ns
            task.started()
        self._timeline.at(end_ns, lambda: self._end(task) if version == task.version else None)

    # --- standing still ---

    def _request_pause(self, victim: SimulatedStep) -> bool:
        """Make a long step stand at the end of its quantum; true if that is still to come."""
        if victim.resumed_ns < 0:
            return False
        if len(victim.preemptors) > 1:
            return True  # somebody has asked already
        done_ns = victim.done_ns + self._timeline.now_ns - victim.resumed_ns
        quantum_ns = self._quantum_ns
        left_ns = -done_ns % quantum_ns if quantum_ns else 0
        if not left_ns:
            self._halt(victim)
            return False
        if done_ns + left_ns < victim.work_ns:
            victim.version += 1
            version = victim.version
            self._timeline.at(
                self._timeline.now_ns + left_ns,
                lambda: self._pause(victim) if version == victim.version else None,
            )
        return True

    def _halt(self, victim: SimulatedStep) -> None:
        victim.done_ns += self._timeline.now_ns - victim.resumed_ns
        victim.resumed_ns = -1
        victim.version += 1

    def _pause(self, victim: SimulatedStep) -> None:
        self._halt(victim)
        self._start_preemptors(victim)
        if not victim.preemptors:  # whoever has asked was withdrawn meanwhile
            self._run(victim)

    def _start_preemptors(self, victim: SimulatedStep) -> None:
        """Those who have waited for `victim` to stand, or to end, wait for it no more."""
        waiting = dict.fromkeys(self._preempting[member] for member in victim.members)
        for task in waiting:
            if task is not None and task in victim.preemptors and task.started_ns < 0:
                task.awaited -= 1
                if not task.awaited:
                    self._run(task)

    # --- ending ---

    def _end(self, task: SimulatedStep) -> None:
        task.over = True
        task.version += 1
        was_paused = task.resumed_ns < 0
        task.resumed_ns = -1
        for member in task.members:
            if self._preempting[member] is task:
                self._preempting[member] = None
            if self._running[member] is task:
                self._running[member] = None
        if task.preemptors and not was_paused:
            self._start_preemptors(task)
        for victim in task.preempted:
            victim.preemptors.discard(task)
        task.ended()
        self._start_ready(task.members)
        for victim in task.preempted:
            if not victim.over and not victim.preemptors and victim.resumed_ns < 0:
                self._run(victim)
