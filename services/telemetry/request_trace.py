"""Trace one request: its `llm_request` span, and a span for each state it passed.

`RequestTrace` is open from the request's first byte to its last token. `record_spans` writes
`queue`, `plan`, `prefill`, `transfer` and `decode` when the request ends, from the times of its
state changes: until then tracing costs nothing.

Attribute names are those of OpenTelemetry's GenAI conventions and of vLLM's traces.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from csps.protocols.core.errors import RequestError
from csps.protocols.rpc import trace_context
from csps.protocols.rpc.trace_context import ERROR_TYPE
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import RequestSpec
from csps.services.requests.story import story
from csps.services.telemetry.observer import guarded


def error_type(error: BaseException) -> str:
    """Return the code that the client receives, or else the name of the exception's class."""
    code = error.code if isinstance(error, RequestError) else None
    return code or type(error).__name__


_TRACER = trace.get_tracer("csps.router")


class RequestTrace:
    """Server span of one request. `with` makes it current; call `end` to close it."""

    def __init__(
        self,
        headers: Mapping[str, str],
        *,
        operation: str,
        client_request_id: str,
        began_ns: int,
        may_ask: bool = True,
    ) -> None:
        """Open the span of a request whose headers were read.

        Args:
            began_ns: time at which its headers were complete (`time.time_ns()`).
            may_ask: True if its client may continue a trace of its own, and so decide whether the
                request is traced and has a timeline. Otherwise a new trace begins.
        """
        context = trace_context.extract(headers if may_ask else {})
        self._span = _TRACER.start_span(
            "llm_request",
            context=context,
            kind=SpanKind.SERVER,
            start_time=began_ns,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "csps",
                "gen_ai.request.id": client_request_id,
            },
        )
        self._child("receive", start_time=began_ns).end()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Time the tokenization of the request in a span of its own."""
        span = self._child("tokenize")
        try:
            yield
        finally:
            span.end()

    def _child(self, name: str, *, start_time: int | None = None) -> trace.Span:
        context = trace.set_span_in_context(self._span)
        return _TRACER.start_span(name, context=context, start_time=start_time)

    def __enter__(self) -> Self:
        self._current = trace.use_span(
            self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False
        )
        self._current.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._current.__exit__(None, None, None)

    def parsed(self, spec: RequestSpec, model: str) -> None:
        """Record a request that was parsed."""
        sampling = spec.sampling
        self._span.set_attributes(
            {
                "gen_ai.request.model": model,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.usage.input_tokens": int(spec.prompt.size),
            }
        )

    def answered(
        self, handle: RequestHandle, *, model: str, response_id: str, reason: str | None
    ) -> None:
        """Record the end of an answer, complete or cancelled."""
        self._span.set_attributes(
            {
                "gen_ai.response.id": response_id,
                "gen_ai.response.model": model,
                "gen_ai.response.finish_reasons": [reason or "cancelled"],
                "gen_ai.usage.output_tokens": handle.timings.tokens,
                **latencies(handle),
                "csps.story": story(handle),
            }
        )
        self._span.set_status(_status(handle))

    def failed(self, error: BaseException) -> None:
        """Record the error of a request without a whole answer."""
        self._span.record_exception(error)
        self._span.set_attribute(trace_context.ERROR_TYPE, error_type(error))
        self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))

    def end(self) -> None:
        """Close the span; later attributes are lost."""
        self._span.end()


def latencies(handle: RequestHandle) -> dict[str, float]:
    """Return the request's times in seconds, as far as they are known."""
    timings = handle.timings
    named = {
        "time_in_queue": timings.queue_s,
        "time_to_first_token": timings.ttft_s,
        "time_in_model_prefill": timings.prefill_s,
        "time_in_model_decode": timings.decode_s,
        "e2e": timings.total_s,
    }
    return {f"gen_ai.latency.{name}": value for name, value in named.items() if value is not None}


@guarded
def record_spans(handle: RequestHandle) -> None:
    """Write the spans of an attempt that is over, below the span that submitted the request."""
    if not trace.get_current_span(handle.context).get_span_context().trace_flags.sampled:
        return
    marks = handle.marks
    _record(handle, "queue", marks.queued, marks.placed, {})
    _record(handle, "plan", marks.placed, marks.launched, _plan_attributes(handle))
    _record(handle, "prefill", marks.launched, marks.prefilled, _prefill_attributes(handle))
    _record(handle, "transfer", marks.prefilled, marks.joined, _transfer_attributes(handle))
    _record(handle, "decode", marks.joined, marks.last_token, _decode_attributes(handle))
    for event in handle.elastic:
        _record(handle, f"elastic.{event.kind}", event.began, event.ended, event.attributes)


_STATES: tuple[trace_context.State, ...] = ("queue", "plan", "prefill", "transfer", "decode")


def _planned_id(handle: RequestHandle, name: str) -> int | None:
    """Return the id that ranks know a state's span by."""
    request = trace.get_current_span(handle.context).get_span_context()
    for state in _STATES:
        if state == name and handle.sequence_id is not None:
            return trace_context.state_span_id(request.span_id, state, handle.sequence_id)
    return None


def _status(handle: RequestHandle) -> Status:
    """Return how a request or its attempt ended."""
    if handle.error is not None:
        return Status(StatusCode.ERROR, error_type(handle.error))
    if handle.finish_reason in (None, "cancelled"):
        return Status(StatusCode.ERROR, "cancelled")
    return Status(StatusCode.OK)


def _record(
    handle: RequestHandle,
    name: str,
    start: float | None,
    end: float | None,
    attributes: Mapping[str, AttributeValue],
) -> None:
    """Write the span of a state, unless it was not reached; an open one ends with the request."""
    if start is None:
        return
    # Marks are of the monotonic clock, spans of the wall clock.
    wall_ns = time.time_ns() - time.monotonic_ns()
    planned = trace_context.planned_span_id.set(_planned_id(handle, name))
    try:
        span = _TRACER.start_span(
            name,
            context=handle.context,
            start_time=wall_ns + int(start * 1e9),
            attributes={"gen_ai.request.id": handle.spec.client_request_id, **attributes},
        )
    finally:
        trace_context.planned_span_id.reset(planned)
    if end is None:
        end = handle.marks.ended or time.monotonic()
        span.set_attribute("csps.interrupted", True)
        if handle.error is not None:
            span.set_attribute(ERROR_TYPE, error_type(handle.error))
        span.set_status(_status(handle))
    else:
        span.set_status(Status(StatusCode.OK))
    span.end(end_time=wall_ns + int(max(start, end) * 1e9))


def _plan_attributes(handle: RequestHandle) -> dict[str, AttributeValue]:
    if (plan := handle.plan) is None:
        return {}
    predicted = {
        "csps.plan.predicted_ttft_ms": plan.predicted_ttft_ms,
        "csps.plan.predicted_accuracy_loss": plan.predicted_accuracy_loss,
        "csps.plan.bounds_met": plan.bounds_met,
    }
    return {
        "csps.plan.attention": plan.attention,
        "csps.plan.strategy": plan.strategy,
        "csps.plan.reason": plan.reason,
        **{name: value for name, value in predicted.items() if value is not None},
    }


def _prefill_attributes(handle: RequestHandle) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.usage.input_tokens": int(handle.spec.prompt.size),
        "csps.attempt": handle.timings.attempts,
    }
    if (placement := handle.placement) is not None:
        attributes["csps.prefill.group"] = placement.group
        attributes["csps.prefill.bounds"] = placement.bounds
        attributes["csps.prefill.batched_with"] = placement.batched_with
    return attributes


def _transfer_attributes(handle: RequestHandle) -> dict[str, AttributeValue]:
    if (placement := handle.placement) is None:
        return {}
    return {
        "csps.kv_transfer.wait_ms": 1e3 * (handle.timings.transfer_wait_s or 0.0),
        "csps.decode.instances": tuple(kv_slice.instance for kv_slice in placement.slices),
        "csps.decode.tokens": tuple(kv_slice.span.length for kv_slice in placement.slices),
    }


def _decode_attributes(handle: RequestHandle) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {"gen_ai.usage.output_tokens": handle.timings.tokens}
    if handle.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = (handle.finish_reason,)
    if handle.placement is not None:
        attributes["csps.decode.master"] = handle.placement.master
    return attributes
