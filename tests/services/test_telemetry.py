"""Spans: who writes them, where they go, and that nothing is paid when off."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from csps.protocols.rpc import trace_context
from csps.services.settings.settings import TelemetrySettings
from csps.services.telemetry.traces.span_file import SpanFile
from csps.services.telemetry.traces.spans import read_spans
from csps.services.telemetry.tracing import install, make_exporter, make_provider

PARENT = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
UNSAMPLED = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"}


def test_a_process_writes_its_own_file_and_says_who_it_is(tmp_path: Path) -> None:
    settings = TelemetrySettings(spans_dir=str(tmp_path))
    exporter = make_exporter("csps-test", settings)
    provider = make_provider("csps-test", settings, exporter, rank=1)
    with provider.get_tracer("test").start_as_current_span("it"):
        pass
    provider.shutdown()
    (path,) = tmp_path.glob("csps-test-*.jsonl")
    (span,) = read_spans([path])
    assert (span.service, span.rank) == ("csps-test", 1)


@pytest.mark.parametrize(
    ("environment", "setting", "endpoint"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://env:4318"}, None, "http://env:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://env/x"}, None, "http://env/x"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://env:4318"}, "http://set/y", "http://set/y"),
        ({}, "http://set/y", "http://set/y"),
    ],
)
def test_traces_go_to_the_endpoint_or_to_a_file(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    setting: str | None,
    endpoint: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    exporter = make_exporter("csps-test", TelemetrySettings(otlp_endpoint=setting))
    assert isinstance(exporter, OTLPSpanExporter)
    assert exporter._endpoint == endpoint
    exporter.shutdown()


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
    assert [read_span.name for read_span in read_spans([path])] == ["second"]
    assert [read_span.name for read_span in read_spans([tmp_path / "spans.jsonl.1"])] == ["first"]


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
