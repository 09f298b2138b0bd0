"""Which of the traces also tell what every rank did when.

The decision lies in the trace's own `tracestate`, where the standard has vendors put theirs: it
travels with the trace to every rank, and a client can make it for a single request. It depends on
the trace id alone, as the SDK's decision to sample does, so that processes which come to it on
their own still agree. A flag in the prefill job would have been a second way for the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import (
    Decision,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from csps.protocols.trace_context import STATE_KEY, TIMELINE


class TimelineSampler(Sampler):
    """Marks `ratio` of all requests, as far as `traces` samples them, for a timeline."""

    def __init__(self, traces: Sampler, ratio: float) -> None:
        self._traces = traces
        self._timelines = TraceIdRatioBased(ratio)

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """As `traces` decides; the mark is inherited by all that lies below."""
        result = self._traces.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )
        timeline = self._timelines.should_sample(None, trace_id, name)
        if {result.decision, timeline.decision} != {Decision.RECORD_AND_SAMPLE}:
            return result
        marked = (result.trace_state or TraceState()).update(STATE_KEY, TIMELINE)
        return SamplingResult(result.decision, result.attributes, marked)

    def get_description(self) -> str:
        """For the SDK's own messages."""
        return f"TimelineSampler{{{self._traces.get_description()},{self._timelines.rate}}}"
