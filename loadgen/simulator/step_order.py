"""Who computes what next: a gang's steps in one order, and urgent ones inside long ones.

Much as conductors have it (`protocols/conductor.py`), but without streams: every instance takes the
steps that it is a member of in the order in which they were sent, and a step starts when all its
members have come to it. Urgent steps have an order of their own; they run before whatever has not
started, and inside a long step that has: all members of it stand still at the end of the quantum
under way, because each of its exchanges needs them all. Nothing here knows what a step contains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from csps.loadgen.simulator.timeline import Timeline


@dataclass(eq=False, slots=True)
class Task:
    """A step on the instances that compute it together."""

    members: tuple[int, ...]
    """Indices of instances."""
    work_ns: int
    """What it takes if nothing interrupts it."""
    urgent: bool
    started: Callable[[], None]
    ended: Callable[[], None]
    sequences: tuple[int, ...] = ()
    """Whose tokens it computes, or whose KV it moves."""
    places: tuple[int, ...] = ()
    """Of a move: indices of the instances that take part in decoding from then on."""
    started_ns: int = -1
    done_ns: int = 0
    """Work done up to `resumed_ns`, or for good while it stands."""
    longer_ns: int = 0
    """By how much it took longer, as others computed on the same cores."""
    resumed_ns: int = -1
    """Since when it runs; -1 while it stands."""
    plan: int = 0
    """Version of its next end or halt: earlier ones on the timeline are out of date."""
    guests: set[Task] = field(default_factory=set)
    """Of a long step: urgent ones that run inside it or wait for it to stand; never iterated."""
    hosts: list[Task] = field(default_factory=list)
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

    def __init__(self, timeline: Timeline, instances: int, quantum_ns: int = 0) -> None:
        self._timeline, self._quantum_ns = timeline, quantum_ns
        self._long: list[deque[Task]] = [deque() for _ in range(instances)]
        self._urgent: list[deque[Task]] = [deque() for _ in range(instances)]
        self._running: list[Task | None] = [None] * instances
        """Long step under way, standing or not."""
        self._inside: list[Task | None] = [None] * instances
        """Urgent step that runs, or waits for its hosts to stand."""

    def busy(self, instance: int) -> bool:
        """The instance computes something now."""
        inside, running = self._inside[instance], self._running[instance]
        return (inside is not None and inside.resumed_ns >= 0) or (
            running is not None and running.resumed_ns >= 0
        )

    def submit(self, task: Task) -> None:
        """Put a step in line; the order of these calls is the gang's order."""
        lines = self._urgent if task.urgent else self._long
        for member in task.members:
            lines[member].append(task)
        self._go_on(task.members)

    def withdraw(self, task: Task) -> None:
        """End a step that nobody wants any more, now: `ended` is called as ever."""
        if task.over:
            return
        if task.started_ns < 0 and task not in map(self._inside.__getitem__, task.members):
            for member in task.members:
                (self._urgent if task.urgent else self._long)[member].remove(task)
        self._end(task)

    # --- starting ---

    def _go_on(self, members: Sequence[int]) -> None:
        """Start whatever can start on these instances."""
        for member in members:
            self._start_urgent(member)
        for member in members:
            self._start_long(member)

    def _start_urgent(self, member: int) -> None:
        line = self._urgent[member]
        if not line:
            return
        task = line[0]
        if not all(self._inside[it] is None and self._urgent[it][0] is task for it in task.members):
            return
        for it in task.members:
            self._urgent[it].popleft()
            self._inside[it] = task
            if (host := self._running[it]) is not None and host not in task.hosts:
                task.hosts.append(host)
        for host in task.hosts:
            host.guests.add(task)
            task.awaited += self._ask_to_stand(host)
        if not task.awaited:
            self._run(task)

    def _start_long(self, member: int) -> None:
        line = self._long[member]
        if not line:
            return
        task = line[0]
        for it in task.members:
            free = self._running[it] is None and self._inside[it] is None
            if not free or self._long[it][0] is not task:
                return
        for it in task.members:
            self._long[it].popleft()
            self._running[it] = task
        self._run(task)

    def _run(self, task: Task) -> None:
        """Begin, or go on."""
        now_ns = self._timeline.now_ns
        task.resumed_ns = now_ns
        task.plan += 1
        plan, end_ns = task.plan, now_ns + task.work_ns - task.done_ns
        if task.started_ns < 0:
            task.started_ns = now_ns
            task.started()
        self._timeline.at(end_ns, lambda: self._end(task) if plan == task.plan else None)

    # --- standing still ---

    def _ask_to_stand(self, host: Task) -> bool:
        """Make a long step stand at the end of its quantum; true if that is still to come."""
        if host.resumed_ns < 0:
            return False
        if len(host.guests) > 1:
            return True  # somebody has asked already
        done_ns = host.done_ns + self._timeline.now_ns - host.resumed_ns
        quantum_ns = self._quantum_ns
        left_ns = -done_ns % quantum_ns if quantum_ns else 0
        if not left_ns:
            self._halt(host)
            return False
        if done_ns + left_ns < host.work_ns:
            host.plan += 1
            plan = host.plan
            self._timeline.at(
                self._timeline.now_ns + left_ns,
                lambda: self._stand(host) if plan == host.plan else None,
            )
        return True

    def _halt(self, host: Task) -> None:
        host.done_ns += self._timeline.now_ns - host.resumed_ns
        host.resumed_ns = -1
        host.plan += 1

    def _stand(self, host: Task) -> None:
        self._halt(host)
        self._let_in(host)
        if not host.guests:  # whoever has asked was withdrawn meanwhile
            self._run(host)

    def _let_in(self, host: Task) -> None:
        """Those who have waited for `host` to stand, or to end, wait for it no more."""
        waiting = dict.fromkeys(self._inside[member] for member in host.members)
        for task in waiting:
            if task is not None and task in host.guests and task.started_ns < 0:
                task.awaited -= 1
                if not task.awaited:
                    self._run(task)

    # --- ending ---

    def _end(self, task: Task) -> None:
        task.over = True
        task.plan += 1
        stood = task.resumed_ns < 0
        task.resumed_ns = -1
        for member in task.members:
            if self._inside[member] is task:
                self._inside[member] = None
            if self._running[member] is task:
                self._running[member] = None
        if task.guests and not stood:
            self._let_in(task)
        for host in task.hosts:
            host.guests.discard(task)
        task.ended()
        self._go_on(task.members)
        for host in task.hosts:
            if not host.over and not host.guests and host.resumed_ns < 0:
                self._run(host)
