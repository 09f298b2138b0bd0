"""The phases and counters of a prefill job as OpenTelemetry spans.

    prefill.compute                       one for each rank, with what the job cost it
    └─ prefill.<phase>                    one for each event of the rank's timeline, in its layer,
                                          level and micro-partition

Phases are only noted for jobs whose trace asks for them, the job's own span for all that are
sampled; without a trace, or an SDK, nothing is. `docs/traces.md` says how to look at them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from opentelemetry import trace

from csps.actors.job_clock import JobClock
from csps.actors.sent_bytes import SentBytes
from csps.actors.timeline import TRANSFERS, Event
from csps.protocols.prefill_job import PrefillJob
from csps.protocols.trace_context import NO_SPAN, TraceSpan, span, wants_timeline

RANK, PHASE = "csps.rank", "csps.phase"
LAYER, LEVEL, MICRO = "csps.layer", "csps.level", "csps.micro_partition"
CPU_NS = "csps.cpu_ns"
BYTES = "csps.bytes"
"""Of a transfer, sent by the rank."""
BYTES_SENT = "csps.bytes_sent"
"""To each rank of the gang, in rank order."""
COMMUNICATION_S, EXCHANGE_S = "csps.communication_s", "csps.exchange_s"
"""Waited for exchanges; and exchanges under way, waited for or not."""
PLACING_S, PLACING_STORED_S = "csps.placing_s", "csps.placing_stored_s"
"""What it took to keep new KV elsewhere than it was computed; and of that, storing what came by."""
PLACING_WAITED_S, LAST_LAYER_S = "csps.placing_waited_s", "csps.last_layer_s"
"""Waiting for what did not come by; and the whole last layer, in which nothing does."""
CANCELLED = "csps.cancelled"
"""True where nobody wanted the job's requests any more, and it stopped between two layers."""


@contextmanager
def traced_job(
    job: PrefillJob, clock: JobClock, sent: SentBytes, *, rank: int
) -> Iterator[TraceSpan]:
    """The span of a job on one rank. What the job enters must be left inside of it: transfers
    tell their times when they end."""
    with span("prefill.compute", job.trace, {"csps.job": job.job_id, RANK: rank}):
        # An urgent job without a trace runs inside of the span of the job that it interrupts.
        current = trace.get_current_span() if job.trace else NO_SPAN
        if not current.is_recording():
            yield current
            return
        # Not a new one: the job's strategy has taken hold of this one when it was made.
        clock.timeline.on = wants_timeline(current.get_span_context())
        try:
            yield current
        finally:
            _note_cost(clock, sent)
            emit_spans(clock.timeline.events, rank=rank)


def emit_spans(events: Iterable[Event], *, rank: int) -> None:
    """Each event becomes a span below the current one, at the time at which it happened."""
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


def _note_cost(clock: JobClock, sent: SentBytes) -> None:
    current = trace.get_current_span()
    current.set_attribute(BYTES_SENT, sent.by_rank)
    current.set_attribute(COMMUNICATION_S, clock.communication_s)
    current.set_attribute(EXCHANGE_S, clock.exchange_s)
