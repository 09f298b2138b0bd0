"""What metrics and traces call an error.

The `llm_request` span of one request: opened by its first byte, closed by its last token.

Attribute names are those of OpenTelemetry's GenAI conventions and of vLLM's traces.

A request's states as OpenTelemetry spans: `queue`, `plan`, `prefill`, `transfer`, `decode`.

They are written when the request ends, from the times at which it changed state: on the way there
nothing is paid for tracing.
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


def error_type(error: BaseException) -> str:
    """The code that the client is told, otherwise the name of the exception's class."""
    code = error.code if isinstance(error, RequestError) else None
    return code or type(error).__name__


_TRACER = trace.get_tracer("csps.router")


class RequestTrace:
    """One SERVER span; entering it makes it current, leaving it leaves it open."""

    def __init__(
        self,
        headers: Mapping[str, str],
        *,
        operation: str,
        client_request_id: str,
        began_ns: int,
        may_ask: bool = True,
    ) -> None:
        """The request was read.

        Args:
            began_ns: when its headers had come (`time.time_ns()`).
            may_ask: whether its client may ask for a timeline.
        """
        context = trace_context.extract(headers)
        if not may_ask:
            context = trace_context.without_timeline(context)
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
        """The time inside is spent on making tokens of the request."""
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
        """The request was read and understood."""
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
        """The answer is complete, or nobody reads on."""
        self._span.set_attributes(
            {
                "gen_ai.response.id": response_id,
                "gen_ai.response.model": model,
                "gen_ai.response.finish_reasons": [reason or "cancelled"],
                "gen_ai.usage.output_tokens": handle.timings.tokens,
                **latencies(handle),
            }
        )

    def failed(self, error: BaseException) -> None:
        """There is no answer, or only half of one."""
        self._span.record_exception(error)
        self._span.set_attribute(trace_context.ERROR_TYPE, error_type(error))
        self._span.set_status(Status(StatusCode.ERROR, type(error).__name__))

    def end(self) -> None:
        """Close the span; what is said afterwards is lost."""
        self._span.end()


def latencies(handle: RequestHandle) -> dict[str, float]:
    """The request's times in seconds, as far as it came."""
    timings = handle.timings
    named = {
        "time_in_queue": timings.queue_s,
        "time_to_first_token": timings.ttft_s,
        "time_in_model_prefill": timings.prefill_s,
        "time_in_model_decode": timings.decode_s,
        "e2e": timings.total_s,
    }
    return {f"gen_ai.latency.{name}": value for name, value in named.items() if value is not None}


def record_spans(handle: RequestHandle) -> None:
    """Write the spans of the last attempt, as children of the span that submitted the request."""
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


def _record(
    handle: RequestHandle,
    name: str,
    start: float | None,
    end: float | None,
    attributes: Mapping[str, AttributeValue],
) -> None:
    """One span; nothing for a state that was not reached, an open one ends with the request."""
    if start is None:
        return
    # Marks are of the monotonic clock, spans of the wall clock.
    wall_ns = time.time_ns() - time.monotonic_ns()
    span = _TRACER.start_span(
        name,
        context=handle.context,
        start_time=wall_ns + int(start * 1e9),
        attributes={"gen_ai.request.id": handle.spec.client_request_id, **attributes},
    )
    if end is None:
        end = handle.marks.ended or time.monotonic()
        span.set_attribute("csps.interrupted", True)
        if handle.error is not None:
            span.set_attribute(ERROR_TYPE, error_type(handle.error))
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
        "csps.decode.instances": tuple(share.instance for share in placement.slices),
        "csps.decode.tokens": tuple(share.span.length for share in placement.slices),
    }


def _decode_attributes(handle: RequestHandle) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {"gen_ai.usage.output_tokens": handle.timings.tokens}
    if handle.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = (handle.finish_reason,)
    if handle.placement is not None:
        attributes["csps.decode.master"] = handle.placement.master
    return attributes
