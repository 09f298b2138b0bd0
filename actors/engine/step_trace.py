"""The phases and counters of a prefill step as OpenTelemetry spans.

    prefill.compute                       one for each rank, with the step's costs
    └─ prefill.<phase>                    one for each event of the rank's timeline, in its layer,
                                          level and micro-partition

Phases are recorded only for steps whose trace asks for them; the span of the step itself for all
that are sampled. Without a trace, or without an SDK, nothing is recorded. `docs/traces.md` explains
how to view them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import trace

from csps.actors.timing.timeline import TRANSFERS, Event, StepClock
from csps.protocols.gang.step_messages import PrefillStep
from csps.protocols.rpc.trace_context import NO_SPAN, TraceSpan, span, wants_timeline

if TYPE_CHECKING:
    # Readers of traces import this file for the names of attributes; they do without torch.
    from csps.actors.comm.mesh import Mesh


class SentBytes:
    """Bytes that one step sends, by receiving rank, without those sent while the step is paused."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._others = list(mesh.bytes_sent)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude bytes that are sent inside."""
        before = list(self._mesh.bytes_sent)
        try:
            yield
        finally:
            sent = zip(self._others, self._mesh.bytes_sent, before, strict=True)
            self._others = [others + now - then for others, now, then in sent]

    @property
    def by_rank(self) -> tuple[int, ...]:
        """Return the bytes sent since this was made, in rank order of the gang."""
        return tuple(
            now - others for now, others in zip(self._mesh.bytes_sent, self._others, strict=True)
        )


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


@contextmanager
def traced_step(
    step: PrefillStep, clock: StepClock, sent: SentBytes, *, rank: int
) -> Iterator[TraceSpan]:
    """Open the span of a step on one rank. Leave what the step enters inside of it: transfers
    report their times when they end."""
    with span("prefill.compute", step.trace, {"csps.job": step.step_id, RANK: rank}):
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


def emit_spans(events: Iterable[Event], *, rank: int) -> None:
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
