"""Spans in OpenTelemetry's own file format, OTLP-JSON: an `ExportTraceServiceRequest` a line.

As OpenTelemetry's file exporters write it: ids in hex, 64-bit numbers as strings, enumerations as
numbers. `otelcol` reads these files with its `otlpjsonfile` receiver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext

Json = dict[str, Any]


def export_request(spans: Sequence[ReadableSpan]) -> Json:
    """The spans of an export by resource and scope."""
    # By identity: all spans of a process share these objects, and their hashes are made of JSON.
    groups: dict[int, dict[int, list[ReadableSpan]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        groups[id(span.resource)][id(span.instrumentation_scope)].append(span)
    return {"resourceSpans": [_of_resource(list(it.values())) for it in groups.values()]}


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
