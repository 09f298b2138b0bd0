"""What one rank did when: the phases of a prefill, which become spans of its trace.

Where the time of one prefill job goes on one rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal[
    "qkv",
    "select",
    "first all-to-all",
    "attention",
    "second all-to-all",
    "merge",
    "importance",
    "linear",
    "mlp",
    "last rows",
    "all-gather",
    "reduce-scatter",
    "importance exchange",
    "history exchange",
    "ring",
    "balancing",
    "placing",
    "kv transfer",
    "wait",
]
"""What a span of time went to. All-to-alls, rings, all-gathers and reduce-scatters are transfers,
which go on beside the others, and so are moves: of history (`balancing`) and of new KV (`placing`)
to where they are kept, and of KV to the gang that decodes it (`kv transfer`). `wait` is the time in
which computing stood still for one."""

TRANSFERS: frozenset[str] = frozenset(
    {
        "first all-to-all",
        "second all-to-all",
        "importance exchange",
        "history exchange",
        "ring",
        "balancing",
        "placing",
        "kv transfer",
        "all-gather",
        "reduce-scatter",
    }
)


@dataclass(frozen=True, slots=True)
class Event:
    """One phase on one rank."""

    name: Phase
    start_ns: int
    """Unix time, so that timelines of several ranks can be laid side by side."""
    end_ns: int
    layer: int | None = None
    level: int | None = None
    """1 is the nearest."""
    micro: int | None = None
    """Micro-partition, from 0."""
    cpu_ns: int = 0
    """Of it on a core, the computing thread alone; 0 for transfers, which have none. With more
    ranks than cores the rest was waiting for one."""
    bytes: int = 0
    """Of a transfer, sent by this rank."""


class PhaseTimeline:
    """Collects events of one job; `Timeline(on=False)` collects nothing at the cost of one call."""

    def __init__(self, *, on: bool) -> None:
        self.on = on
        self.events: list[Event] = []

    def phase(
        self,
        name: Phase,
        *,
        layer: int | None = None,
        level: int | None = None,
        micro: int | None = None,
    ) -> AbstractContextManager[None]:
        """The time inside becomes an event."""
        return self._timed(name, layer, level, micro) if self.on else _NOTHING

    def add(self, event: Event) -> None:
        """Note what was timed elsewhere; called from any thread."""
        if self.on:
            self.events.append(event)

    @contextmanager
    def _timed(
        self, name: Phase, layer: int | None, level: int | None, micro: int | None
    ) -> Iterator[None]:
        start_ns, start_cpu_ns = time.time_ns(), time.thread_time_ns()
        try:
            yield
        finally:
            end_ns, cpu_ns = time.time_ns(), time.thread_time_ns() - start_cpu_ns
            self.events.append(Event(name, start_ns, end_ns, layer, level, micro, cpu_ns))


_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass
class StepClock:
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
    timeline: PhaseTimeline = field(default_factory=lambda: PhaseTimeline(on=False))
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
