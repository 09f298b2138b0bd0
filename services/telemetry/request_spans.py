"""A request's states as OpenTelemetry spans: `queue`, `plan`, `prefill`, `transfer`, `decode`.

They are written when the request ends, from the times at which it changed state: on the way there
nothing is paid for tracing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.util.types import AttributeValue

from csps.protocols.trace_context import ERROR_TYPE
from csps.services.router.running import Running
from csps.services.telemetry.error_type import error_type

_tracer = trace.get_tracer("csps.router")


def record_spans(running: Running) -> None:
    """Write the spans of the last attempt, as children of the span that submitted the request."""
    if not trace.get_current_span(running.context).get_span_context().trace_flags.sampled:
        return
    marks = running.marks
    _record(running, "queue", marks.queued, marks.placed, {})
    _record(running, "plan", marks.placed, marks.launched, _plan_attributes(running))
    _record(running, "prefill", marks.launched, marks.prefilled, _prefill_attributes(running))
    _record(running, "transfer", marks.prefilled, marks.joined, _transfer_attributes(running))
    _record(running, "decode", marks.joined, marks.last_token, _decode_attributes(running))
    for event in running.elastic:
        _record(running, f"elastic.{event.kind}", event.began, event.ended, event.attributes)


def _record(
    running: Running,
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
    span = _tracer.start_span(
        name,
        context=running.context,
        start_time=wall_ns + int(start * 1e9),
        attributes={"gen_ai.request.id": running.generation.request_id, **attributes},
    )
    if end is None:
        end = running.marks.ended or time.monotonic()
        span.set_attribute("csps.interrupted", True)
        if running.error is not None:
            span.set_attribute(ERROR_TYPE, error_type(running.error))
    span.end(end_time=wall_ns + int(max(start, end) * 1e9))


def _plan_attributes(running: Running) -> dict[str, AttributeValue]:
    if (plan := running.plan) is None:
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


def _prefill_attributes(running: Running) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.usage.input_tokens": int(running.generation.prompt.size),
        "csps.attempt": running.timings.attempts,
    }
    if (placement := running.placement) is not None:
        attributes["csps.prefill.group"] = placement.group
        attributes["csps.prefill.bounds"] = placement.bounds
        attributes["csps.prefill.batched_with"] = placement.batched_with
    return attributes


def _transfer_attributes(running: Running) -> dict[str, AttributeValue]:
    if (placement := running.placement) is None:
        return {}
    return {
        "csps.kv_transfer.wait_ms": 1e3 * (running.timings.transfer_wait_s or 0.0),
        "csps.decode.instances": tuple(share.instance for share in placement.shares),
        "csps.decode.tokens": tuple(share.span.length for share in placement.shares),
    }


def _decode_attributes(running: Running) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {"gen_ai.usage.output_tokens": running.timings.tokens}
    if running.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = (running.finish_reason,)
    if running.placement is not None:
        attributes["csps.decode.master"] = running.placement.master
    return attributes
