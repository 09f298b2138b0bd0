"""OpenTelemetry for one process: who it is, what is sampled, and where spans go.

Rooms below `services` only use OpenTelemetry's API; until `install` has run in their process, a
span costs them a look-up. With `telemetry.enabled: false` nothing is installed at all.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from csps.services.launch.settings import TelemetrySettings
from csps.services.telemetry.timeline_sampler import TimelineSampler

MAX_FILE_BYTES = 64 * 1024 * 1024
"""A span file that has grown to this becomes `NAME.1`, in place of an older one."""
MAX_QUEUED_SPANS = 32_768
"""Waiting for export. A rank's timeline comes at once, at the end of its job; of thousands of
spans the SDK's own 2,048 places would lose many."""
EXPORT_PERIOD_MS = 1000
"""Short, so that a killed process takes little with it and a person sees the trace at once."""


def install(service: str, settings: TelemetrySettings) -> Callable[[], None]:
    """Make this process record spans as `service`; call the answer to write out the last ones."""
    if not settings.enabled:
        return lambda: None
    provider = make_provider(service, settings, make_exporter(service, settings))
    trace.set_tracer_provider(provider)
    return provider.shutdown


def make_provider(
    service: str, settings: TelemetrySettings, exporter: SpanExporter
) -> TracerProvider:
    """A provider that samples by request: a caller's `traceparent` decides before our ratio."""
    resource = Resource.create(
        {"service.name": service, "openinference.project.name": settings.project}
    )
    sampler = TimelineSampler(ParentBasedTraceIdRatio(settings.sample), settings.timeline_sample)
    provider = TracerProvider(resource=resource, sampler=sampler)
    provider.add_span_processor(_ServiceName(service))
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter, max_queue_size=MAX_QUEUED_SPANS, schedule_delay_millis=EXPORT_PERIOD_MS
        )
    )
    return provider


def make_exporter(service: str, settings: TelemetrySettings) -> SpanExporter:
    """OTLP over HTTP to the configured endpoint, otherwise a file of this process's own."""
    if settings.otlp_endpoint is None:
        return SpanFile(Path(settings.spans_dir) / f"{service}-{os.getpid()}.jsonl")
    # Imported only here: it brings a HTTP client and protobuf into the process.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=settings.otlp_endpoint)


class _ServiceName(SpanProcessor):
    """Copies the service's name onto each span: some trace viewers drop resource attributes."""

    def __init__(self, service: str) -> None:
        self._service = service

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        span.set_attribute("service.name", self._service)


class SpanFile(SpanExporter):
    """Appends one JSON object a span to a file; see `span_record` for its fields."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._max_bytes = max_bytes
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Called by the batch processor on its own thread; a full disk must not stop a server."""
        lines = "".join(json.dumps(span_record(span)) + "\n" for span in spans)
        try:
            with self._lock:
                self._rotate()
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(lines)
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is kept open."""

    def _rotate(self) -> None:
        if self._path.exists() and self._path.stat().st_size > self._max_bytes:
            self._path.replace(self._path.with_name(self._path.name + ".1"))


def span_record(span: ReadableSpan) -> dict[str, Any]:
    """A finished span as JSON data: ids in hex as in `traceparent`, times in Unix nanoseconds."""
    context, parent = span.get_span_context(), span.parent
    assert context is not None
    return {
        "name": span.name,
        "trace_id": trace.format_trace_id(context.trace_id),
        "span_id": trace.format_span_id(context.span_id),
        "parent_id": trace.format_span_id(parent.span_id) if parent else None,
        "kind": span.kind.name,
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "status": span.status.status_code.name,
        "description": span.status.description,
        "attributes": dict(span.attributes or {}),
        "events": [
            {
                "name": event.name,
                "at_ns": event.timestamp,
                "attributes": dict(event.attributes or {}),
            }
            for event in span.events
        ],
    }
