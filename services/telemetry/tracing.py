"""Install OpenTelemetry in one process: its name, its sampling, and the destination of spans.

Packages below `services` use only OpenTelemetry's API. A span costs them a look-up until `install`
has run in their process; with `telemetry.enabled: false` nothing is installed.

The trace's own `tracestate` says if a trace has a timeline of every rank. It travels with the trace
to every rank, and a client can set it for a single request. A flag in the prefill step would
duplicate it. The choice depends on the trace id alone, as the SDK's sampling does, so that
processes agree without a message.
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
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import (
    Decision,
    ParentBasedTraceIdRatio,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from csps.actors.timing.timeline import RANK
from csps.protocols.rpc.trace_context import STATE_KEY, TIMELINE, planned_span_id
from csps.services.settings.settings import TelemetrySettings
from csps.services.telemetry.traces.span_file import SpanFile


class TimelineSampler(Sampler):
    """Sampler that marks `ratio` of all requests for a timeline, if `traces` samples them."""

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
        """Decide as `traces` does, and add the mark, which all child spans inherit."""
        result = self._traces.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )
        timeline = self._timelines.should_sample(None, trace_id, name)
        if {result.decision, timeline.decision} != {Decision.RECORD_AND_SAMPLE}:
            return result
        marked = (result.trace_state or TraceState()).update(STATE_KEY, TIMELINE)
        return SamplingResult(result.decision, result.attributes, marked)

    def get_description(self) -> str:
        """Describe the sampler for the SDK's own messages."""
        return f"TimelineSampler{{{self._traces.get_description()},{self._timelines.rate}}}"


class PlannedIdGenerator(RandomIdGenerator):
    """Random ids, but for spans whose id others know already (`trace_context.below`)."""

    def generate_span_id(self) -> int:
        """Return the planned id, or a random one."""
        return planned_span_id.get() or super().generate_span_id()


ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own variables, which the SDK's exporter reads: the first with the whole URL, the
second without `/v1/traces`."""
MAX_QUEUED_SPANS = 32_768
"""Spans waiting for export. A rank's timeline of thousands of spans comes at once, at the end of a
step; the SDK's own 2,048 slots would lose many."""
EXPORT_PERIOD_MS = 1000
"""Short, so that a killed process loses few spans and a trace is visible at once."""


def install(
    service: str, settings: TelemetrySettings, *, rank: int | None = None
) -> Callable[[], None]:
    """Make this process record spans as `service`; return a function that exports the last ones.

    Args:
        rank: rank of the process in its gang.
    """
    if not settings.enabled:
        return lambda: None
    provider = make_provider(service, settings, make_exporter(service, settings), rank=rank)
    trace.set_tracer_provider(provider)
    return provider.shutdown


def make_provider(
    service: str, settings: TelemetrySettings, exporter: SpanExporter, *, rank: int | None = None
) -> TracerProvider:
    """Return a provider that samples requests; a caller's `traceparent` decides before our
    ratio."""
    identity: dict[str, str | int] = {"service.name": service}
    if rank is not None:
        identity[RANK] = rank
    resource = Resource.create({**identity, "openinference.project.name": settings.project})
    sampler = TimelineSampler(ParentBasedTraceIdRatio(settings.sample), settings.timeline_sample)
    provider = TracerProvider(resource=resource, sampler=sampler, id_generator=PlannedIdGenerator())
    provider.add_span_processor(_IdentityStamp(identity))
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter, max_queue_size=MAX_QUEUED_SPANS, schedule_delay_millis=EXPORT_PERIOD_MS
        )
    )
    return provider


def make_exporter(service: str, settings: TelemetrySettings) -> SpanExporter:
    """Export to the OTLP endpoint of the settings or the environment, or else to a file per
    process."""
    if settings.otlp_endpoint is None and not any(map(os.environ.get, ENDPOINTS)):
        return SpanFile(Path(settings.spans_dir) / f"{service}-{os.getpid()}.jsonl")
    # Imported here: it loads an HTTP client and protobuf.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=settings.otlp_endpoint)


class _IdentityStamp(SpanProcessor):
    """Processor that copies service and rank onto each span: some viewers drop resource
    attributes."""

    def __init__(self, identity: Mapping[str, str | int]) -> None:
        self._who = dict(identity)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        span.set_attributes(self._who)
