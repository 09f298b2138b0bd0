"""What one step sends, of all that its rank does meanwhile.

The phases and counters of a prefill job as OpenTelemetry spans.

    prefill.compute                       one for each rank, with what the job cost it
    └─ prefill.<phase>                    one for each event of the rank's timeline, in its layer,
                                          level and micro-partition

Phases are only noted for jobs whose trace asks for them, the job's own span for all that are
sampled; without a trace, or an SDK, nothing is. `docs/traces.md` says how to look at them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Who reads traces needs the names of their attributes, and not torch.
    from csps.actors.comm.mesh import Mesh
from collections.abc import Iterable

from opentelemetry import trace

from csps.actors.timing.timeline import TRANSFERS, Event, StepClock
from csps.protocols.gang.step_messages import PrefillStep
from csps.protocols.rpc.trace_context import NO_SPAN, TraceSpan, span, wants_timeline


class SentBytes:
    """By receiving rank, without what is sent while the step stands still."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._others = list(mesh.bytes_sent)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is sent inside is not of the step."""
        before = list(self._mesh.bytes_sent)
        try:
            yield
        finally:
            sent = zip(self._others, self._mesh.bytes_sent, before, strict=True)
            self._others = [others + now - then for others, now, then in sent]

    @property
    def by_rank(self) -> tuple[int, ...]:
        """Since it was made, in rank order of the gang."""
        return tuple(
            now - others for now, others in zip(self._mesh.bytes_sent, self._others, strict=True)
        )


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
def traced_step(
    step: PrefillStep, clock: StepClock, sent: SentBytes, *, rank: int
) -> Iterator[TraceSpan]:
    """The span of a job on one rank. What the job enters must be left inside of it: transfers
    tell their times when they end."""
    with span("prefill.compute", step.trace, {"csps.job": step.step_id, RANK: rank}):
        # An urgent job without a trace runs inside of the span of the job that it interrupts.
        current = trace.get_current_span() if step.trace else NO_SPAN
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


def _note_cost(clock: StepClock, sent: SentBytes) -> None:
    current = trace.get_current_span()
    current.set_attribute(BYTES_SENT, sent.by_rank)
    current.set_attribute(COMMUNICATION_S, clock.communication_s)
    current.set_attribute(EXCHANGE_S, clock.exchange_s)
