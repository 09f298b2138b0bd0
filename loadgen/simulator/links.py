"""Links that transfers share equally (processor sharing)."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from csps.loadgen.simulator.timeline import Timeline

NS_PER_S = 1_000_000_000


class Link:
    """A link on which each of n transfers gets 1/n of the bandwidth.

    Every transfer under way has had the same service since it began, so one counter of service is
    enough: a transfer of so many bytes ends when the counter has grown by so many. The counter is
    an integer, in billionths of a byte.

    Args:
        timeline: the simulated time.
        bytes_per_s: of the whole link.
        latency_ns: from the last byte that leaves to its arrival; it takes no bandwidth.
    """

    def __init__(self, timeline: Timeline, *, bytes_per_s: int, latency_ns: int = 0) -> None:
        assert bytes_per_s > 0, "a link without bandwidth"
        self._timeline = timeline
        self._bytes_per_s, self._latency_ns = bytes_per_s, latency_ns
        self._served = 0
        self._served_at_ns = 0
        self._ending: list[tuple[int, int, Callable[[], None]]] = []
        self._begun = 0
        self._planned = 0
        """Version of the next end: earlier ones on the timeline are out of date."""

    @property
    def transfers(self) -> int:
        """Under way now."""
        return len(self._ending)

    def send(self, size: int, arrived: Callable[[], None]) -> None:
        """Begin to send `size` bytes now; `arrived` is called when the last one is there."""
        self._serve()
        end = self._served + size * NS_PER_S
        heapq.heappush(self._ending, (end, self._begun, arrived))
        self._begun += 1
        self._plan()

    def _serve(self) -> None:
        """Bring the counter up to the present."""
        now_ns = self._timeline.now_ns
        if self._ending:
            self._served += self._bytes_per_s * (now_ns - self._served_at_ns) // self.transfers
        self._served_at_ns = now_ns

    def _plan(self) -> None:
        """Put the end that comes next on the timeline."""
        self._planned += 1
        if not self._ending:
            return
        version, left = self._planned, max(0, self._ending[0][0] - self._served)
        wait_ns = -(-left * self.transfers // self._bytes_per_s)
        self._timeline.at(self._timeline.now_ns + wait_ns, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._planned:
            return
        self._serve()
        over: list[Callable[[], None]] = []
        while self._ending and self._ending[0][0] <= self._served:
            over.append(heapq.heappop(self._ending)[2])
        self._plan()
        for arrived in over:
            self._arrive(arrived)

    def _arrive(self, arrived: Callable[[], None]) -> None:
        if not self._latency_ns:
            return arrived()
        return self._timeline.at(self._timeline.now_ns + self._latency_ns, lambda: arrived())
