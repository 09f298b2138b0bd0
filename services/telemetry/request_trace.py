"""The `llm_request` span of one request: opened by its first byte, closed by its last token.

Attribute names are those of OpenTelemetry's GenAI conventions and of vLLM's traces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from csps.protocols import trace_context
from csps.services.router.generation import Generation
from csps.services.router.running import Running
from csps.services.telemetry.error_type import error_type

_TRACER = trace.get_tracer("csps.router")


class RequestTrace:
    """One SERVER span; entering it makes it current, leaving it leaves it open."""

    def __init__(
        self,
        headers: Mapping[str, str],
        *,
        operation: str,
        request_id: str,
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
                "gen_ai.request.id": request_id,
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

    def accepted(self, generation: Generation, model: str) -> None:
        """The request was read and understood."""
        sampling = generation.sampling
        self._span.set_attributes(
            {
                "gen_ai.request.model": model,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.usage.input_tokens": int(generation.prompt.size),
            }
        )

    def answered(
        self, running: Running, *, model: str, response_id: str, reason: str | None
    ) -> None:
        """The answer is complete, or nobody reads on."""
        self._span.set_attributes(
            {
                "gen_ai.response.id": response_id,
                "gen_ai.response.model": model,
                "gen_ai.response.finish_reasons": [reason or "cancelled"],
                "gen_ai.usage.output_tokens": running.timings.tokens,
                **latencies(running),
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


def latencies(running: Running) -> dict[str, float]:
    """The request's times in seconds, as far as it came."""
    timings = running.timings
    named = {
        "time_in_queue": timings.queue_s,
        "time_to_first_token": timings.ttft_s,
        "time_in_model_prefill": timings.prefill_s,
        "time_in_model_decode": timings.decode_s,
        "e2e": timings.total_s,
    }
    return {f"gen_ai.latency.{name}": value for name, value in named.items() if value is not None}
