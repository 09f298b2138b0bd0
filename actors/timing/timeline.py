"""The phases of a prefill step on one rank with their times, and the spans that they become.

    prefill.compute                       one for each rank, with the step's costs
    └─ prefill.<phase>                    one for each event of the rank's timeline, in its layer,
                                          level and micro-partition

Phases are recorded only for steps whose trace asks for them; the span of the step itself for all
that are sampled. Without a trace, or without an SDK, nothing is recorded. `docs/traces.md` explains
how to view them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

from opentelemetry import trace

from csps.protocols.gang.step_messages import PrefillStep
from csps.protocols.rpc.trace_context import NO_SPAN, TraceSpan, below, span, wants_timeline

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
    "window exchange",
    "balancing",
    "placing",
    "kv transfer",
    "wait",
]
"""Kinds of work that take time in a step.

All-to-alls, rings, window exchanges, all-gathers and reduce-scatters are transfers, which go on
beside the others. So are moves of history (`balancing`), of new KV to its holders (`placing`), and
of KV to the gang that decodes it (`kv transfer`). `wait` is time in which computing waited for a
transfer.
"""

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
class PhaseEvent:
    """One phase on one rank."""

    name: Phase
    start_ns: int
    """Unix time, so that timelines of several ranks can be laid side by side."""
    end_ns: int
    layer: int | None = None
    level: int | None = None
    """Number of the level, from 1 for the nearest."""
    micro: int | None = None
    """Index of the micro-partition, from 0."""
    cpu_ns: int = 0
    """Time on a core, of the computing thread alone; 0 for transfers. With more ranks than cores
    the rest was waiting for a core."""
    bytes: int = 0
    """Bytes of a transfer, sent by this rank."""


class PhaseTimeline:
    """Collects events of one step. With `on=False` it collects nothing, at the cost of one call."""

    def __init__(self, *, on: bool) -> None:
        self.on = on
        self.events: list[PhaseEvent] = []

    def phase(
        self,
        name: Phase,
        *,
        layer: int | None = None,
        level: int | None = None,
        micro: int | None = None,
    ) -> AbstractContextManager[None]:
        """Record the time inside as an event."""
        return self._timed(name, layer, level, micro) if self.on else _NOTHING

    def add(self, event: PhaseEvent) -> None:
        """Add an event that was timed elsewhere; from any thread."""
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
            self.events.append(PhaseEvent(name, start_ns, end_ns, layer, level, micro, cpu_ns))


_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass
class StepClock:
    """Seconds since the step was received, by what they were spent on."""

    received: float = field(default_factory=time.monotonic)
    started: float = 0.0
    finished: float = 0.0
    communication_s: float = 0.0
    """Seconds waiting for exchanges inside the group, without those that computing hid."""
    exchange_s: float = 0.0
    """Seconds in which at least one exchange inside the group was under way, hidden or not. On CUDA
    only those count that the host waited for."""
    yielded_s: float = 0.0
    """Seconds in which the log had this rank do something else."""
    last_layer_s: float = 0.0
    """Seconds from the beginning of the last layer, in which nothing circulates, until its moves
    had arrived."""
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
        """Count exchanges beside computing, as (begin, end) in Unix ns; overlapping ones count
        once."""
        before_ns = _union_ns(self._exchanges)
        self._exchanges += spans
        self.exchange_s += (_union_ns(self._exchanges) - before_ns) / 1e9

    @property
    def hidden(self) -> float:
        """Return the fraction of the communication that went on while this rank computed, from 0 to
        1."""
        if not self.exchange_s:
            return 0.0
        return max(0.0, 1.0 - self.communication_s / self.exchange_s)

    @contextmanager
    def yielding(self) -> Iterator[None]:
        """Count the time inside as given to other work."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.yielded_s += time.monotonic() - begin

    def begin_last_layer(self) -> None:
        """Note that all layers before the last one are computed."""
        self._last_layer = time.monotonic() - self.yielded_s

    def end_last_layer(self) -> None:
        """Note that nothing of the step is left to do."""
        self.last_layer_s = time.monotonic() - self.yielded_s - self._last_layer

    @property
    def queue_s(self) -> float:
        """Return the seconds from arrival to the start of computing."""
        return self.started - self.received

    @property
    def compute_s(self) -> float:
        """Return the seconds of computing alone."""
        return self.finished - self.started - self.communication_s - self.yielded_s


def _union_ns(spans: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of intervals."""
    total, reached = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


class SentBytes:
    """Bytes that one step sends, by receiving rank, without those sent while the step is paused.

    Args:
        sent: bytes that the rank has sent to each other rank, which grow.
    """

    def __init__(self, sent: Sequence[int]) -> None:
        self._sent = sent
        self._others = list(sent)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude bytes that are sent inside."""
        before = list(self._sent)
        try:
            yield
        finally:
            sent = zip(self._others, self._sent, before, strict=True)
            self._others = [others + now - then for others, now, then in sent]

    @property
    def by_rank(self) -> tuple[int, ...]:
        """Return the bytes sent since this was made, in rank order of the gang."""
        return tuple(now - others for now, others in zip(self._sent, self._others, strict=True))


RANK, PHASE = "csps.rank", "csps.phase"
LAYER, LEVEL, MICRO = "csps.layer", "csps.level", "csps.micro_partition"
CPU_NS = "csps.cpu_ns"
BYTES = "csps.bytes"
"""Bytes of a transfer, sent by the rank."""
BYTES_SENT = "csps.bytes_sent"
"""Bytes sent to each rank of the gang, in rank order."""
COMMUNICATION_S, EXCHANGE_S = "csps.communication_s", "csps.exchange_s"
"""Seconds waited for exchanges; and seconds of exchanges under way, waited for or not."""
PLACING_S, PLACING_STORED_S = "csps.placing_s", "csps.placing_stored_s"
"""Time for storing new KV elsewhere than it was computed, and its part for KV that passed
anyway."""
PLACING_WAITED_S, LAST_LAYER_S = "csps.placing_waited_s", "csps.last_layer_s"
"""Seconds waited for KV that did not pass; and seconds of the last layer, in which none passes."""
CANCELLED = "csps.cancelled"
"""True if all sequences of the step were cancelled and it stopped between two layers."""


def step_trace(step: PrefillStep) -> dict[str, str]:
    """Return the carrier for spans of a step: below the prefill of its first sequence."""
    if not (step.trace and step.chunks):
        return step.trace
    return below(step.trace, "prefill", step.chunks[0].sequence_id)


@contextmanager
def traced_step(
    step: PrefillStep, clock: StepClock, sent: SentBytes, *, rank: int
) -> Iterator[TraceSpan]:
    """Open the span of a step on one rank. Leave what the step enters inside of it: transfers
    report their times when they end."""
    attributes = {
        "csps.job": step.step_id,
        RANK: rank,
        "csps.strategy": step.strategy,
        "csps.group": tuple(step.group),
    }
    with span("prefill.compute", step_trace(step), attributes):
        # A step without a trace that preempts another runs inside the other's span.
        current = trace.get_current_span() if step.trace else NO_SPAN
        if not current.is_recording():
            yield current
            return
        # Switch the existing timeline on: the step's strategy refers to it since it was made.
        clock.timeline.on = wants_timeline(current.get_span_context())
        try:
            yield current
        finally:
            _note_cost(clock, sent)
            emit_spans(clock.timeline.events, rank=rank)


def emit_spans(events: Iterable[PhaseEvent], *, rank: int) -> None:
    """Emit each event as a span below the current one, at the time at which it happened."""
    tracer = trace.get_tracer("csps")
    for event in events:
        places = {LAYER: event.layer, LEVEL: event.level, MICRO: event.micro}
        attributes: dict[str, str | int] = {RANK: rank, PHASE: event.name, CPU_NS: event.cpu_ns}
        attributes |= {name: place for name, place in places.items() if place is not None}
        if event.name in TRANSFERS:
            attributes[BYTES] = event.bytes
        phase = tracer.start_span(
            f"prefill.{event.name}", start_time=event.start_ns, attributes=attributes
        )
        phase.end(event.end_ns)


def _note_cost(clock: StepClock, sent: SentBytes) -> None:
    current = trace.get_current_span()
    current.set_attribute(BYTES_SENT, sent.by_rank)
    current.set_attribute(COMMUNICATION_S, clock.communication_s)
    current.set_attribute(EXCHANGE_S, clock.exchange_s)
