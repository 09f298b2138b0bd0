"""What has to be done at a set time, unless it is called off before."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, order=True)
class Timer:
    """An action and its time. Of several due, the one that was set first comes first."""

    at_ns: int
    number: int
    action: Callable[[], None] = field(compare=False)
    off: bool = field(default=False, compare=False)


class Timers:
    """A heap of timers. One that was called off stays in it until it is due, or until such ones
    are the majority: most requests end long before their deadlines."""

    MINORITY = 64
    """Timers that may be off without a look at how many are not."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._count = 0
        self._off = 0

    def __len__(self) -> int:
        """Timers that are on."""
        return len(self._heap) - self._off

    @property
    def next_ns(self) -> int | None:
        """When the next one is due."""
        while self._heap and self._heap[0].off:
            self._pop()
        return self._heap[0].at_ns if self._heap else None

    def at(self, at_ns: int, action: Callable[[], None]) -> Timer:
        """Have something done then."""
        self._count += 1
        timer = Timer(at_ns, self._count, action)
        heapq.heappush(self._heap, timer)
        return timer

    def call_off(self, timer: Timer | None) -> None:
        """Forget a timer; one that was due or is off already may be named again."""
        if timer is None or timer.off:
            return
        timer.off = True
        self._off += 1
        if self._off > max(self.MINORITY, len(self._heap) // 2):
            self._heap = [it for it in self._heap if not it.off]
            heapq.heapify(self._heap)
            self._off = 0

    def run_due(self, now_ns: int) -> None:
        """Do what is due, also what that makes due at once."""
        while self._heap and self._heap[0].at_ns <= now_ns:
            timer = self._pop()
            if not timer.off:
                timer.off = True  # before the action, which may call it off
                timer.action()

    def _pop(self) -> Timer:
        timer = heapq.heappop(self._heap)
        self._off -= timer.off
        return timer
