"""Write a process's spans to a file in OTLP-JSON, if no OTLP endpoint receives them.

A line is an `ExportTraceServiceRequest`, as OpenTelemetry's file exporters write it: ids in hex,
64-bit numbers as strings, enumerations as numbers. `otelcol` reads these files with its
`otlpjsonfile` receiver.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext

_log = logging.getLogger(__name__)

Json = dict[str, Any]


def export_request(spans: Sequence[ReadableSpan]) -> Json:
    """Return the spans of an export, grouped by resource and scope."""
    # By identity: all spans of a process share these objects, and their hashes encode JSON.
    groups: dict[int, dict[int, list[ReadableSpan]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        groups[id(span.resource)][id(span.instrumentation_scope)].append(span)
    return {"resourceSpans": [_resource_spans(list(group.values())) for group in groups.values()]}


def _resource_spans(scopes: Sequence[Sequence[ReadableSpan]]) -> Json:
    return {
        "resource": {"attributes": _attributes(scopes[0][0].resource.attributes)},
        "scopeSpans": [
            {
                "scope": _scope(spans[0].instrumentation_scope),
                "spans": [_span(span) for span in spans],
            }
            for spans in scopes
        ],
    }


def _scope(scope: InstrumentationScope | None) -> Json:
    if scope is None:
        return {}
    return {"name": scope.name, **({"version": scope.version} if scope.version else {})}


def _span(span: ReadableSpan) -> Json:
    context, parent = span.get_span_context(), span.parent
    assert context is not None, f"span {span.name} ended without a context"
    encoded: Json = {
        **_ids(context),
        "name": span.name,
        # OTLP counts from "unspecified", the SDK from "internal".
        "kind": span.kind.value + 1,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes),
        "events": [_event(event) for event in span.events],
        "links": [_link(link) for link in span.links],
        "status": {"code": span.status.status_code.value},
    }
    if parent is not None:
        encoded["parentSpanId"] = trace.format_span_id(parent.span_id)
    if span.status.description:
        encoded["status"]["message"] = span.status.description
    return encoded


def _ids(context: SpanContext) -> Json:
    ids: Json = {
        "traceId": trace.format_trace_id(context.trace_id),
        "spanId": trace.format_span_id(context.span_id),
    }
    if context.trace_state:
        ids["traceState"] = context.trace_state.to_header()
    return ids


def _event(event: Event) -> Json:
    return {
        "timeUnixNano": str(event.timestamp),
        "name": event.name,
        "attributes": _attributes(event.attributes),
    }


def _link(link: Link) -> Json:
    ids = _ids(link.context)
    ids.pop("traceState", None)  # the SDK's own exporters leave it out as well
    return {**ids, "attributes": _attributes(link.attributes)}


def _attributes(attributes: Mapping[str, Any] | None) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in (attributes or {}).items()]


def _value(value: Any) -> Json:
    if isinstance(value, bool):  # a bool is also an int
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    assert isinstance(value, Sequence), f"attribute {value!r} is not a type of OpenTelemetry's"
    return {"arrayValue": {"values": [_value(element) for element in value]}}


MAX_FILE_BYTES = 64 * 1024 * 1024
"""Size at which a file becomes `NAME.1`, in place of an older one."""


class SpanFile(SpanExporter):
    """Exporter that appends a line of OTLP-JSON for each export."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._max_bytes = max_bytes
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append the spans; the batch processor calls this on its own thread."""
        line = json.dumps(export_request(spans), separators=(",", ":")) + "\n"
        try:
            with self._lock:
                self._rotate()
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line)
        except OSError as error:
            # A full disk must not stop a server.
            _log.debug("%d spans lost: cannot write %s: %s", len(spans), self._path, error)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Do nothing: no file stays open."""

    def _rotate(self) -> None:
        if self._path.exists() and self._path.stat().st_size > self._max_bytes:
            self._path.replace(self._path.with_name(self._path.name + ".1"))
