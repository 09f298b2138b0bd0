"""Spans in OpenTelemetry's own file format, OTLP-JSON: an `ExportTraceServiceRequest` a line.

As OpenTelemetry's file exporters write it: ids in hex, 64-bit numbers as strings, enumerations as
numbers. `otelcol` reads these files with its `otlpjsonfile` receiver.

The traces of a process in a file, where no OTLP endpoint takes them.
"""

from __future__ import annotations

import json
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

Json = dict[str, Any]


def export_request(spans: Sequence[ReadableSpan]) -> Json:
    """The spans of an export by resource and scope."""
    # By identity: all spans of a process share these objects, and their hashes are made of JSON.
    groups: dict[int, dict[int, list[ReadableSpan]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        groups[id(span.resource)][id(span.instrumentation_scope)].append(span)
    return {"resourceSpans": [_of_resource(list(group.values())) for group in groups.values()]}


def _of_resource(scopes: Sequence[Sequence[ReadableSpan]]) -> Json:
    return {
        "resource": {"attributes": _attributes(scopes[0][0].resource.attributes)},
        "scopeSpans": [
            {"scope": _scope(some[0].instrumentation_scope), "spans": [_span(it) for it in some]}
            for some in scopes
        ],
    }


def _scope(scope: InstrumentationScope | None) -> Json:
    if scope is None:
        return {}
    return {"name": scope.name, **({"version": scope.version} if scope.version else {})}


def _span(span: ReadableSpan) -> Json:
    context, parent = span.get_span_context(), span.parent
    assert context is not None, "only spans that were begun end"
    it: Json = {
        **_ids(context),
        "name": span.name,
        # OTLP numbers from "unspecified" on, the SDK from "internal".
        "kind": span.kind.value + 1,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes),
        "events": [_event(event) for event in span.events],
        "links": [_link(link) for link in span.links],
        "status": {"code": span.status.status_code.value},
    }
    if parent is not None:
        it["parentSpanId"] = trace.format_span_id(parent.span_id)
    if span.status.description:
        it["status"]["message"] = span.status.description
    return it


def _ids(context: SpanContext) -> Json:
    it: Json = {
        "traceId": trace.format_trace_id(context.trace_id),
        "spanId": trace.format_span_id(context.span_id),
    }
    if context.trace_state:
        it["traceState"] = context.trace_state.to_header()
    return it


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
    if isinstance(value, bool):  # before int, of which it is one
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    assert isinstance(value, Sequence), f"OpenTelemetry has no attribute {value!r}"
    return {"arrayValue": {"values": [_value(it) for it in value]}}


MAX_FILE_BYTES = 64 * 1024 * 1024
"""A file that has grown to this becomes `NAME.1`, in place of an older one."""


class SpanFile(SpanExporter):
    """Appends a line of OTLP-JSON for each export."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._max_bytes = max_bytes
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Called by the batch processor on its own thread; a full disk must not stop a server."""
        line = json.dumps(export_request(spans), separators=(",", ":")) + "\n"
        try:
            with self._lock:
                self._rotate()
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line)
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is kept open."""

    def _rotate(self) -> None:
        if self._path.exists() and self._path.stat().st_size > self._max_bytes:
            self._path.replace(self._path.with_name(self._path.name + ".1"))
