"""Where the time of one prefill job goes on one rank."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from csps.actors.timeline import Timeline


@dataclass
class JobClock:
    """Seconds since the job was received, by what they were spent on."""

    received: float = field(default_factory=time.monotonic)
    started: float = 0.0
    finished: float = 0.0
    communication_s: float = 0.0
    """Waiting for exchanges inside the group; what computing hid does not count."""
    exchange_s: float = 0.0
    """At least one exchange inside the group was under way, hidden or not. On CUDA only those
    count that the host waited for."""
    yielded_s: float = 0.0
    """What else the log had this rank do before the job went on."""
    last_layer_s: float = 0.0
    """From the beginning of the last layer, in which nothing circulates, until what moved in it had
    arrived."""
    timeline: Timeline = field(default_factory=lambda: Timeline(on=False))
    _last_layer: float = 0.0
    _exchanges: list[tuple[int, int]] = field(default_factory=list)

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Count the time inside as communication that nothing hides."""
        before = self.communication_s
        with self.waiting():
            yield
        self.exchange_s += self.communication_s - before

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for exchanges whose own time is counted elsewhere."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.communication_s += time.monotonic() - begin

    def exchanged(self, spans: Iterable[tuple[int, int]]) -> None:
        """Count exchanges that went on beside computing, from begin to end (Unix, ns), and beside
        one another: at any time once."""
        before_ns = _union_ns(self._exchanges)
        self._exchanges += spans
        self.exchange_s += (_union_ns(self._exchanges) - before_ns) / 1e9

    @property
    def hidden(self) -> float:
        """Share of the communication that went on while this rank computed, from 0 to 1."""
        if not self.exchange_s:
            return 0.0
        return max(0.0, 1.0 - self.communication_s / self.exchange_s)

    @contextmanager
    def yielding(self) -> Iterator[None]:
        """Count the time inside as given to other things."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.yielded_s += time.monotonic() - begin

    def begin_last_layer(self) -> None:
        """All layers before it are computed."""
        self._last_layer = time.monotonic() - self.yielded_s

    def end_last_layer(self) -> None:
        """Nothing is left to do for the job."""
        self.last_layer_s = time.monotonic() - self.yielded_s - self._last_layer

    @property
    def queue_s(self) -> float:
        """From arrival to the start of computing."""
        return self.started - self.received

    @property
    def compute_s(self) -> float:
        """Computing alone."""
        return self.finished - self.started - self.communication_s - self.yielded_s


def _union_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Length of the union of intervals."""
    total, reached = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total
