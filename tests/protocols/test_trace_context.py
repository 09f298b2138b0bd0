"""W3C trace context as a plain dictionary."""

from __future__ import annotations

import contextvars

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace.span import TraceState

from csps.protocols.rpc import trace_context

SPAN = trace.SpanContext(
    0x0AF7651916CD43DD8448EB211C80319C,
    0xB7AD6B7169203331,
    True,
    trace.TraceFlags(1),
    TraceState([("vendor", "value")]),
)
CARRIER = {
    # The standard's own example.
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=value",
}


def inside_span() -> dict[str, str]:
    otel_context.attach(trace.set_span_in_context(trace.NonRecordingSpan(SPAN)))
    return trace_context.inject()


def test_inject() -> None:
    assert contextvars.copy_context().run(inside_span) == CARRIER


def test_nothing_to_inject() -> None:
    assert trace_context.inject() == {}


def test_attached_is_current_inside_and_gone_outside() -> None:
    with trace_context.attached(CARRIER):
        current = trace.get_current_span().get_span_context()
        assert (current.trace_id, current.span_id) == (SPAN.trace_id, SPAN.span_id)
        assert trace_context.inject() == CARRIER
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_carrier_without_context_detaches_from_the_current_one() -> None:
    with trace_context.attached(CARRIER), trace_context.attached({}):
        assert trace_context.inject() == {}
