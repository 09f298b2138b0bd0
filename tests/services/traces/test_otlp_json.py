"""Files of OTLP-JSON say what OpenTelemetry's own exporter would send."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, get_current_span

from csps.protocols.core.errors import ConfigError
from csps.protocols.rpc import trace_context
from csps.services.settings.settings import TelemetrySettings
from csps.services.telemetry.traces.span_file import export_request
from csps.services.telemetry.traces.spans import read_spans, traces
from csps.services.telemetry.tracing import make_provider

PARENT = {
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "tracestate": "vendor=7",
}
IDS = ("traceId", "spanId", "parentSpanId")


def some_spans() -> tuple[ReadableSpan, ...]:
    """Return spans of two scopes, with all that a span can have."""
    exporter = InMemorySpanExporter()
    provider = make_provider("csps-test", TelemetrySettings(), exporter, rank=3)
    first, second = provider.get_tracer("first", "1.2"), provider.get_tracer("second")
    context = trace_context.extract(PARENT)
    link = Link(get_current_span(context).get_span_context(), {"why": "batched"})
    with first.start_as_current_span("outer", context=context, kind=SpanKind.SERVER) as outer:
        outer.set_attributes({"a": True, "b": -(2**60), "c": 0.5, "d": "é", "e": (1, 2), "f": ()})
        outer.add_event("turned", {"degrees": 90})
        with second.start_as_current_span("inner", links=[link]) as inner:
            inner.set_status(Status(StatusCode.ERROR, "broken"))
    first.start_span("alone").end()
    provider.shutdown()
    return exporter.get_finished_spans()


def as_protobuf(request: dict[str, Any]) -> ExportTraceServiceRequest:
    """Parse as a receiver does. Protobuf's own JSON has bytes in base 64, OTLP-JSON ids in hex."""

    def with_base64(node: Any) -> Any:
        if isinstance(node, list):
            return [with_base64(child) for child in node]
        if not isinstance(node, dict):
            return node
        return {
            key: base64.b64encode(bytes.fromhex(value)).decode()
            if key in IDS
            else with_base64(value)
            for key, value in node.items()
        }

    return json_format.ParseDict(with_base64(request), ExportTraceServiceRequest())


def without_flags(request: ExportTraceServiceRequest) -> ExportTraceServiceRequest:
    """OTLP-JSON may leave them out."""
    for group in request.resource_spans:
        for scope in group.scope_spans:
            for span in scope.spans:
                span.ClearField("flags")
                for link in span.links:
                    link.ClearField("flags")
    return request


def test_the_json_says_what_the_sdk_would_send() -> None:
    spans = some_spans()
    written = json.loads(json.dumps(export_request(spans)))
    assert as_protobuf(written) == without_flags(encode_spans(spans))


def test_spans_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    spans = some_spans()
    path.write_text(json.dumps(export_request(spans)) + "\n")
    with_parent, alone = traces(read_spans([path]))
    outer, inner = with_parent.spans
    assert (outer.parent_id, inner.parent_id) == ("00f067aa0ba902b7", outer.span_id)
    assert (outer.service, outer.rank, outer.failed, inner.failed) == ("csps-test", 3, False, True)
    told = {key: outer.attributes[key] for key in "abcdef"}
    assert told == {"a": True, "b": -(2**60), "c": 0.5, "d": "é", "e": [1, 2], "f": []}
    assert [span.name for span in alone.spans] == ["alone"]
    assert outer.start_ns == next(span for span in spans if span.name == "outer").start_time


def test_a_line_that_is_being_written_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    line = json.dumps(export_request(some_spans()))
    path.write_text(line + "\n" + line[:50])
    assert len(list(read_spans([path]))) == 3


@pytest.mark.parametrize("line", ["{}", "[1]", "nothing", '{"resourceSpans": [{"scopeSpans": 1}]}'])
def test_what_is_no_otlp_json_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "spans.jsonl"
    path.write_text("\n".join([json.dumps(export_request(some_spans())), line, ""]))
    with pytest.raises(ConfigError, match=r"spans.jsonl:2: not a line of OTLP-JSON"):
        list(read_spans([path]))
