"""The order of a prefill gang's steps, with high-priority steps inside low-priority ones.

It follows the sequencer of real ranks (`protocols/sequencer/sequencer.py`) without decode batches.
Every instance takes its steps in the order in which they were sent. A step starts when all its
members have come to it. High-priority steps have a queue of their own: they run before every step
that has not started, and preempt a running low-priority step. All members of that step pause at the
end of the quantum under way, because each of its exchanges needs them all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from csps.loadgen.simulator.timeline import EventTimeline, Link

Sends = tuple[tuple[Link, int], ...]
"""Transfers: links, and the bytes on each."""


@dataclass(eq=False, slots=True)
class SimulatedStep:
    """A step on the instances that compute it together."""

    members: tuple[int, ...]
    """Indices of instances."""
    work_ns: int
    """Time that the step takes without interruption."""
    high_priority: bool
    started: Callable[[], None]
    ended: Callable[[], None]
    sequences: tuple[int, ...] = ()
    """Sequences whose tokens it computes or whose KV it moves."""
    places: tuple[int, ...] = ()
    """Indices of the instances that decode the sequence after a move."""
    beside: Sends = ()
    """Bytes that its members exchange while they compute."""
    after: Sends = ()
    """Bytes that they exchange afterwards. The step ends when all have arrived."""
    started_ns: int = -1
    done_ns: int = 0
    """Work done up to `resumed_ns`, or up to the pause."""
    slowdown_ns: int = 0
    """Extra time because other ranks computed on the same cores."""
    resumed_ns: int = -1
    """Time since which it runs; -1 while it is paused."""
    version: int = 0
    """Version of its next end or pause. Earlier ones on the timeline are obsolete."""
    preemptors: set[SimulatedStep] = field(default_factory=set)
    """High-priority steps that run inside this step or wait for its pause; never iterated."""
    preempted: list[SimulatedStep] = field(default_factory=list)
    """Low-priority steps that this step preempts."""
    awaited: int = 0
    """Preempted steps that have not paused yet."""
    over: bool = False
    sending: int = 0
    """Transfers under way."""
    settled: Callable[[], None] | None = None
    """Called when no transfer is under way."""

    def begin(self) -> None:
        """Begin what its members exchange while they compute."""
        self.started()
        self._send(self.beside)

    def settle(self, settled: Callable[[], None]) -> None:
        """Send what is left, now that all is computed; then call `settled`."""
        after, self.after = self.after, ()
        self._send(after)
        if self.sending:
            self.settled = settled
        else:
            settled()

    def _send(self, sends: Sends) -> None:
        self.sending += len(sends)
        for link, size in sends:
            link.send(size, self._arrived)

    def _arrived(self) -> None:
        self.sending -= 1
        if not self.sending and self.settled is not None:
            settled, self.settled = self.settled, None
            settled()


class StepOrder:
    """The steps of one gang.

    Args:
        timeline: the simulated time.
        instances: number of instances.
        quantum_ns: work between two yield points of a low-priority step; 0 means anywhere.
    """

    def __init__(self, timeline: EventTimeline, instances: int, quantum_ns: int = 0) -> None:
        self._timeline, self._quantum_ns = timeline, quantum_ns
        self._low_priority: list[deque[SimulatedStep]] = [deque() for _ in range(instances)]
        self._high_priority: list[deque[SimulatedStep]] = [deque() for _ in range(instances)]
        self._running: list[SimulatedStep | None] = [None] * instances
        """Low-priority step under way or paused, by instance."""
        self._preempting: list[SimulatedStep | None] = [None] * instances
        """High-priority step that runs or waits for a pause, by instance."""

    def busy(self, instance: int) -> bool:
        """Return whether the instance computes something now."""
        inside, running = self._preempting[instance], self._running[instance]
        return (inside is not None and inside.resumed_ns >= 0) or (
            running is not None and running.resumed_ns >= 0
        )

    def submit(self, task: SimulatedStep) -> None:
        """Queue a step; the order of these calls is the gang's order."""
        queues = self._high_priority if task.high_priority else self._low_priority
        for member in task.members:
            queues[member].append(task)
        self._start_ready(task.members)

    def cancel_step(self, task: SimulatedStep) -> None:
        """End a cancelled step now; `ended` is called as usual."""
        if task.over:
            return
        if task.started_ns < 0 and task not in map(self._preempting.__getitem__, task.members):
            for member in task.members:
                (self._high_priority if task.high_priority else self._low_priority)[member].remove(
                    task
                )
        self._end(task)

    def _start_ready(self, members: Sequence[int]) -> None:
        """Start every step that can start on these instances."""
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
            self._preempting[index] is None and self._high_priority[index][0] is task
            for index in task.members
        ):
            return
        for index in task.members:
            self._high_priority[index].popleft()
            self._preempting[index] = task
            if (victim := self._running[index]) is not None and victim not in task.preempted:
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
        for index in task.members:
            free = self._running[index] is None and self._preempting[index] is None
            if not free or self._low_priority[index][0] is not task:
                return
        for index in task.members:
            self._low_priority[index].popleft()
            self._running[index] = task
        self._run(task)

    def _run(self, task: SimulatedStep) -> None:
        """Start or resume a step."""
        now_ns = self._timeline.now_ns
        task.resumed_ns = now_ns
        task.version += 1
        version, end_ns = task.version, now_ns + task.work_ns - task.done_ns
        if task.started_ns < 0:
            task.started_ns = now_ns
            task.begin()
        self._timeline.at(end_ns, lambda: self._computed(task) if version == task.version else None)

    def _computed(self, task: SimulatedStep) -> None:
        """End a step, or wait for what its members exchange, as a step that can be preempted."""
        computed_ns = self._timeline.now_ns

        def settled() -> None:
            if not task.over and task.resumed_ns >= 0:
                task.slowdown_ns += self._timeline.now_ns - computed_ns
                self._end(task)

        task.settle(settled)
        if task.sending and task.preemptors:
            self._pause(task)

    def _request_pause(self, victim: SimulatedStep) -> bool:
        """Request a pause at the next yield point; return whether that is still to come."""
        if victim.resumed_ns < 0:
            return False
        if len(victim.preemptors) > 1:
            return True  # an earlier preemptor has requested the pause
        done_ns = victim.done_ns + self._timeline.now_ns - victim.resumed_ns
        quantum_ns = self._quantum_ns
        computing = done_ns < victim.work_ns or not victim.sending
        left_ns = -done_ns % quantum_ns if quantum_ns and computing else 0
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
        computed_ns = victim.done_ns + self._timeline.now_ns - victim.resumed_ns
        victim.done_ns = min(victim.work_ns, computed_ns)
        victim.resumed_ns = -1
        victim.version += 1

    def _pause(self, victim: SimulatedStep) -> None:
        self._halt(victim)
        self._start_preemptors(victim)
        if not victim.preemptors:  # all preemptors were cancelled meanwhile
            self._run(victim)

    def _start_preemptors(self, victim: SimulatedStep) -> None:
        """Start the preemptors that waited for `victim` to pause or end."""
        waiting = dict.fromkeys(self._preempting[member] for member in victim.members)
        for task in waiting:
            if task is not None and task in victim.preemptors and task.started_ns < 0:
                task.awaited -= 1
                if not task.awaited:
                    self._run(task)

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
