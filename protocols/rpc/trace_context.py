"""W3C trace context across our own wires.

OpenTelemetry's API only: a process without an SDK installed pays one look-up per call.
The carrier is a plain `dict[str, str]` with the standard's names, `traceparent` and `tracestate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

# Not `opentelemetry.propagate`: that one is whatever the environment configures, and the two ends
# of a wire must agree.
_PROPAGATOR = TraceContextTextMapPropagator()

STATE_KEY, TIMELINE = "csps", "timeline"
"""Our entry in `tracestate`. Where a trace begins it is decided whether it also tells the timeline
of every rank; a client that sends `csps=timeline` with a sampled `traceparent` has decided so."""

ERROR_TYPE = "error.type"
"""Attribute of spans that ended in an error."""
TraceSpan = trace.Span
NO_SPAN: TraceSpan = trace.INVALID_SPAN
"""Takes all calls and records nothing."""


def inject() -> dict[str, str]:
    """The current span as a carrier; empty when there is none."""
    if not trace.get_current_span().get_span_context().is_valid:
        return {}
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier


def extract(carrier: Mapping[str, object]) -> Context:
    """The context that `carrier` describes, on an empty one; malformed fields are ignored."""
    fields = {
        name: value
        for name in ("traceparent", "tracestate")
        if isinstance(value := carrier.get(name), str)
    }
    return _PROPAGATOR.extract(fields, context=Context())


def without_timeline(context: Context) -> Context:
    """The same for a client that may not ask for a timeline."""
    span = trace.get_current_span(context).get_span_context()
    if STATE_KEY not in span.trace_state:
        return context
    unmarked = trace.SpanContext(
        span.trace_id,
        span.span_id,
        is_remote=span.is_remote,
        trace_flags=span.trace_flags,
        trace_state=span.trace_state.delete(STATE_KEY),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(unmarked), context)


def wants_timeline(context: trace.SpanContext) -> bool:
    """Whether the trace of a span tells what each rank did when."""
    return context.trace_flags.sampled and context.trace_state.get(STATE_KEY) == TIMELINE


def asks_for_timeline(carrier: Mapping[str, object]) -> bool:
    """`wants_timeline`, of a trace that came with a message."""
    if not carrier:
        return False
    return wants_timeline(trace.get_current_span(extract(carrier)).get_span_context())


@contextmanager
def attached(carrier: Mapping[str, object]) -> Iterator[None]:
    """Make the context of `carrier` current; tasks created inside inherit it."""
    token = otel_context.attach(extract(carrier))
    try:
        yield
    finally:
        otel_context.detach(token)


@contextmanager
def span(
    name: str, carrier: Mapping[str, object], attributes: Mapping[str, str | int | float]
) -> Iterator[None]:
    """A span under the trace that came with a message; nothing at all without one."""
    if not carrier:
        yield
        return
    tracer = trace.get_tracer("csps")
    context = extract(carrier)
    with tracer.start_as_current_span(name, context=context, attributes=dict(attributes)) as it:
        try:
            yield
        except Exception as error:
            it.set_attribute(ERROR_TYPE, type(error).__name__)
            raise


def begin(
    name: str, carrier: Mapping[str, object], attributes: Mapping[str, str | int | float]
) -> TraceSpan:
    """A span that its holder ends, for work that no single block of code does."""
    if not carrier:
        return NO_SPAN
    tracer = trace.get_tracer("csps")
    return tracer.start_span(name, context=extract(carrier), attributes=dict(attributes))
