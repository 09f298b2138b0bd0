"""Which of the traces also tell what every rank did when.

The decision lies in the trace's own `tracestate`, where the standard has vendors put theirs: it
travels with the trace to every rank, and a client can make it for a single request. It depends on
the trace id alone, as the SDK's decision to sample does, so that processes which come to it on
their own still agree. A flag in the prefill job would have been a second way for the same thing.

OpenTelemetry for one process: who it is, what is sampled, and where spans go.

Rooms below `services` only use OpenTelemetry's API; until `install` has run in their process, a
span costs them a look-up. With `telemetry.enabled: false` nothing is installed at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import (
    Decision,
    ParentBasedTraceIdRatio,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from csps.actors.engine.step_trace import RANK
from csps.protocols.rpc.trace_context import STATE_KEY, TIMELINE
from csps.services.settings.settings import TelemetrySettings
from csps.services.telemetry.traces.span_file import SpanFile


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


ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own variables, which the SDK's exporter reads: the first with the whole URL, the
second without `/v1/traces`."""
MAX_QUEUED_SPANS = 32_768
"""Waiting for export. A rank's timeline comes at once, at the end of its job; of thousands of
spans the SDK's own 2,048 places would lose many."""
EXPORT_PERIOD_MS = 1000
"""Short, so that a killed process takes little with it and a person sees the trace at once."""


def install(
    service: str, settings: TelemetrySettings, *, rank: int | None = None
) -> Callable[[], None]:
    """Make this process record spans as `service`; call the answer to write out the last ones.

    Args:
        rank: of the process in its gang.
    """
    if not settings.enabled:
        return lambda: None
    provider = make_provider(service, settings, make_exporter(service, settings), rank=rank)
    trace.set_tracer_provider(provider)
    return provider.shutdown


def make_provider(
    service: str, settings: TelemetrySettings, exporter: SpanExporter, *, rank: int | None = None
) -> TracerProvider:
    """A provider that samples by request: a caller's `traceparent` decides before our ratio."""
    who: dict[str, str | int] = {"service.name": service}
    if rank is not None:
        who[RANK] = rank
    resource = Resource.create({**who, "openinference.project.name": settings.project})
    sampler = TimelineSampler(ParentBasedTraceIdRatio(settings.sample), settings.timeline_sample)
    provider = TracerProvider(resource=resource, sampler=sampler)
    provider.add_span_processor(_Who(who))
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter, max_queue_size=MAX_QUEUED_SPANS, schedule_delay_millis=EXPORT_PERIOD_MS
        )
    )
    return provider


def make_exporter(service: str, settings: TelemetrySettings) -> SpanExporter:
    """OTLP over HTTP to the endpoint of the settings, or else of the environment; without one a
    file of this process's own."""
    if settings.otlp_endpoint is None and not any(map(os.environ.get, ENDPOINTS)):
        return SpanFile(Path(settings.spans_dir) / f"{service}-{os.getpid()}.jsonl")
    # Imported only here: it brings a HTTP client and protobuf into the process.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=settings.otlp_endpoint)


class _Who(SpanProcessor):
    """Copies the service's name and rank onto each span: some viewers drop resource attributes."""

    def __init__(self, who: Mapping[str, str | int]) -> None:
        self._who = dict(who)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        span.set_attributes(self._who)
