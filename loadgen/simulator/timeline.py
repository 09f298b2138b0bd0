"""Simulated time: a heap ordered by (time, order of insertion), so that ties are no accident."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], object]


class Timeline:
    """What will happen, and when."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Action]] = []
        self._inserted = 0

    def at(self, t_ns: int, action: Action) -> None:
        """Call `action` then. Nothing is ever taken out: who changes its mind ignores the call."""
        assert t_ns >= self.now_ns, f"{t_ns} ns is over, it is {self.now_ns}"
        heapq.heappush(self._heap, (t_ns, self._inserted, action))
        self._inserted += 1

    @property
    def empty(self) -> bool:
        """Nothing will happen any more."""
        return not self._heap

    @property
    def next_ns(self) -> int:
        """When something happens next; only if it is not empty."""
        return self._heap[0][0]

    def step(self) -> int:
        """Go to the next time at which something happens and do all of it; returns that time."""
        self.now_ns = now_ns = self.next_ns
        while self._heap and self._heap[0][0] == now_ns:
            heapq.heappop(self._heap)[2]()
        return now_ns
