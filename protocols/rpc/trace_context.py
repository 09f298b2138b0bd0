"""W3C trace context across the project's own connections.

Only OpenTelemetry's API is used: a process without an SDK pays one look-up per call. The carrier is
a plain `dict[str, str]` with the standard's names, `traceparent` and `tracestate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import Literal

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

# `opentelemetry.propagate` would use whatever the environment configures, but both ends of a
# connection must agree.
_PROPAGATOR = TraceContextTextMapPropagator()

STATE_KEY, TIMELINE = "csps", "timeline"
"""Entry of `tracestate`: `csps=timeline` asks for a timeline of every rank.

The process in which a trace begins decides. A client that sends the entry with a sampled
`traceparent` has decided.
"""

ERROR_TYPE = "error.type"
"""Attribute of spans that ended in an error."""
TraceSpan = trace.Span
SpanAttribute = str | int | float | tuple[int, ...]
NO_SPAN: TraceSpan = trace.INVALID_SPAN
"""Span that accepts all calls and records nothing."""


State = Literal["queue", "plan", "prefill", "transfer", "decode"]
"""States of an attempt at a request, each of which has a span below the request's."""
planned_span_id: ContextVar[int | None] = ContextVar("planned_span_id", default=None)
"""Id that the next span gets, if its process makes ids as `services.telemetry.tracing` does."""


def state_span_id(request_span_id: int, state: State, sequence_id: int) -> int:
    """Return the id of a state's span, which ranks know before the router records the span."""
    named = f"{request_span_id:x}/{state}/{sequence_id}".encode()
    return int.from_bytes(blake2b(named, digest_size=8).digest()) or 1


def below(carrier: Mapping[str, object], state: State, sequence_id: int) -> dict[str, str]:
    """Return a request's carrier for spans below one of its states; an empty one if it is empty or
    malformed."""
    context = trace.get_current_span(extract(carrier)).get_span_context()
    if not context.is_valid:
        return {}
    state_context = trace.SpanContext(
        context.trace_id,
        state_span_id(context.span_id, state, sequence_id),
        is_remote=True,
        trace_flags=context.trace_flags,
        trace_state=context.trace_state,
    )
    found: dict[str, str] = {}
    parent = trace.set_span_in_context(trace.NonRecordingSpan(state_context), Context())
    _PROPAGATOR.inject(found, context=parent)
    return found


def inject() -> dict[str, str]:
    """Return the current span as a carrier; an empty one if there is no span."""
    if not trace.get_current_span().get_span_context().is_valid:
        return {}
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier


def extract(carrier: Mapping[str, object]) -> Context:
    """Return the context that `carrier` describes, ignoring malformed fields."""
    fields = {
        name: value
        for name in ("traceparent", "tracestate")
        if isinstance(value := carrier.get(name), str)
    }
    return _PROPAGATOR.extract(fields, context=Context())


def wants_timeline(context: trace.SpanContext) -> bool:
    """Return True if the trace of a span includes a timeline of every rank."""
    return context.trace_flags.sampled and context.trace_state.get(STATE_KEY) == TIMELINE


def asks_for_timeline(carrier: Mapping[str, object]) -> bool:
    """Return True if the trace that came with a message wants a timeline."""
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
    name: str, carrier: Mapping[str, object], attributes: Mapping[str, SpanAttribute]
) -> Iterator[None]:
    """Record a span in the trace that came with a message; do nothing without one."""
    if not carrier:
        yield
        return
    tracer = trace.get_tracer("csps")
    context = extract(carrier)
    attributes = dict(attributes)
    with tracer.start_as_current_span(name, context=context, attributes=attributes) as current:
        try:
            yield
        except Exception as error:
            current.set_attribute(ERROR_TYPE, type(error).__name__)
            raise


def begin(
    name: str, carrier: Mapping[str, object], attributes: Mapping[str, SpanAttribute]
) -> TraceSpan:
    """Start a span that the caller ends, for work that no single block of code does."""
    if not carrier:
        return NO_SPAN
    tracer = trace.get_tracer("csps")
    return tracer.start_span(name, context=extract(carrier), attributes=dict(attributes))
