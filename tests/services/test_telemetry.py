"""Spans: who writes them, where they go, and that nothing is paid when off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from csps.protocols import trace_context
from csps.services.launch.settings import TelemetrySettings
from csps.services.telemetry.tracing import SpanFile, install, make_exporter, make_provider

PARENT = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
UNSAMPLED = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"}


def test_a_span_file_has_one_object_a_line(tmp_path: Path) -> None:
    settings = TelemetrySettings(spans_dir=str(tmp_path))
    provider = make_provider("csps-test", settings, make_exporter("csps-test", settings))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("outer", context=trace_context.extract(PARENT)) as outer:
        outer.add_event("turned", {"degrees": 90})
        with tracer.start_as_current_span("inner", attributes={"tokens": (1, 2)}):
            pass
    provider.shutdown()
    (path,) = tmp_path.glob("csps-test-*.jsonl")
    inner, outer_record = map(json.loads, path.read_text().splitlines())
    assert outer_record["trace_id"] == inner["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert outer_record["parent_id"] == "00f067aa0ba902b7"
    assert inner["parent_id"] == outer_record["span_id"]
    assert inner["attributes"] == {"service.name": "csps-test", "tokens": [1, 2]}
    assert outer_record["events"][0]["attributes"] == {"degrees": 90}
    assert outer_record["start_ns"] <= inner["start_ns"] <= inner["end_ns"]


@pytest.mark.parametrize(
    ("sample", "carrier", "recorded"),
    [(0.0, {}, False), (1.0, {}, True), (0.0, PARENT, True), (1.0, UNSAMPLED, False)],
)
def test_the_callers_decision_comes_before_our_ratio(
    sample: float, carrier: dict[str, str], recorded: bool
) -> None:
    exporter = InMemorySpanExporter()
    provider = make_provider("csps-test", TelemetrySettings(sample=sample), exporter)
    span = provider.get_tracer("test").start_span("it", context=trace_context.extract(carrier))
    span.end()
    provider.shutdown()
    assert bool(exporter.get_finished_spans()) is recorded


def test_a_full_file_makes_room_for_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    provider = make_provider("csps-test", TelemetrySettings(), SpanFile(path, max_bytes=10))
    tracer = provider.get_tracer("test")
    for name in ("first", "second"):
        tracer.start_span(name).end()
        provider.force_flush()
    provider.shutdown()
    assert json.loads(path.read_text())["name"] == "second"
    assert json.loads((tmp_path / "spans.jsonl.1").read_text())["name"] == "first"


def test_a_full_disk_does_not_stop_the_server(tmp_path: Path) -> None:
    exporter = SpanFile(tmp_path / "folder" / "spans.jsonl")
    (tmp_path / "folder").rmdir()
    provider = make_provider("csps-test", TelemetrySettings(), exporter)
    provider.get_tracer("test").start_span("it").end()
    assert provider.force_flush()
    provider.shutdown()


def test_off_installs_nothing(tmp_path: Path) -> None:
    settings = TelemetrySettings(enabled=False, spans_dir=str(tmp_path / "traces"))
    install("csps-test", settings)()
    assert not (tmp_path / "traces").exists()
    assert not isinstance(trace.get_tracer_provider(), TracerProvider)
