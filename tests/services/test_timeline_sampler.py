"""Test which requests have a timeline: decided once where the trace starts, and then the same
everywhere."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from csps.protocols.rpc import trace_context
from csps.services.settings.settings import TelemetrySettings
from csps.services.telemetry.tracing import make_provider

IDS = [int(part / 64 * 2**64) for part in range(1, 64)]
"""Trace ids that divide the space of which a ratio takes the lower part."""


def provider(sample: float = 1.0, timeline_sample: float = 0.0) -> TracerProvider:
    settings = TelemetrySettings(sample=sample, timeline_sample=timeline_sample)
    return make_provider("csps-test", settings, InMemorySpanExporter())


def context_of(traces: TracerProvider, carrier: dict[str, str]) -> trace.SpanContext:
    """Return the context of a span that a process starts for a received message."""
    tracer = traces.get_tracer("test")
    return tracer.start_span("it", context=trace_context.extract(carrier)).get_span_context()


def carrier_of(context: trace.SpanContext) -> dict[str, str]:
    """Return what the process sends on."""
    with trace.use_span(trace.NonRecordingSpan(context)):
        return trace_context.inject()


def client(trace_id: int, *, sampled: bool = True, state: str | None = None) -> dict[str, str]:
    carrier = {"traceparent": f"00-{trace_id:032x}-{9:016x}-{int(sampled):02}"}
    return carrier if state is None else {**carrier, "tracestate": state}


def with_timeline(traces: TracerProvider, ids: Iterable[int]) -> list[int]:
    return [
        identifier
        for identifier in ids
        if trace_context.wants_timeline(context_of(traces, client(identifier)))
    ]


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, 0), (0.25, 15), (0.5, 31), (1.0, 63)])
def test_the_ratio_takes_its_share_of_the_traces(ratio: float, expected: int) -> None:
    assert len(with_timeline(provider(timeline_sample=ratio), IDS)) == expected


def test_processes_agree_and_a_larger_ratio_keeps_what_a_smaller_one_took() -> None:
    taken = with_timeline(provider(timeline_sample=0.25), IDS)
    assert with_timeline(provider(timeline_sample=0.25), IDS) == taken
    assert set(taken) < set(with_timeline(provider(timeline_sample=0.5), IDS))


def test_every_rank_follows_the_routers_decision() -> None:
    """Even ranks whose own ratio would say otherwise."""
    router, ranks = provider(timeline_sample=1.0), [provider(), provider(timeline_sample=0.5)]
    carrier = carrier_of(context_of(router, {}))
    assert carrier["tracestate"] == "csps=timeline"
    assert all(trace_context.wants_timeline(context_of(rank, carrier)) for rank in ranks)


def test_spans_inside_a_process_inherit_it() -> None:
    tracer = provider(timeline_sample=1.0).get_tracer("test")
    with tracer.start_as_current_span("outer"), tracer.start_as_current_span("inner") as inner:
        assert trace_context.wants_timeline(inner.get_span_context())


def test_a_client_asks_for_one_request() -> None:
    router, rank = provider(sample=0.0), provider(sample=0.0)
    carrier = carrier_of(context_of(router, client(IDS[-1], state="vendor=7,csps=timeline")))
    assert trace_context.wants_timeline(context_of(rank, carrier))
    assert not with_timeline(router, IDS)


def test_another_vendors_state_is_preserved() -> None:
    context = context_of(provider(timeline_sample=1.0), client(7, state="vendor=7"))
    assert carrier_of(context)["tracestate"] == "csps=timeline,vendor=7"


@pytest.mark.parametrize("state", [None, "csps=timeline"])
def test_no_timeline_without_a_trace(state: str | None) -> None:
    carrier = client(7, sampled=False, state=state)
    assert not trace_context.wants_timeline(context_of(provider(timeline_sample=1.0), carrier))
    assert not trace_context.wants_timeline(trace.INVALID_SPAN_CONTEXT)


class GatedExporter(InMemorySpanExporter):
    """Takes its time until the gate opens, as a collector far away does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        assert self.gate.wait(60)
        return super().export(spans)


def test_a_long_timeline_is_exported_whole() -> None:
    """All of its spans come at once, faster than any exporter takes them."""
    exporter, count = GatedExporter(), 10_000
    traces = make_provider("csps-test", TelemetrySettings(), exporter)
    tracer = traces.get_tracer("test")
    for _ in range(count):
        tracer.start_span("phase").end()
    exporter.gate.set()
    traces.shutdown()
    assert len(exporter.get_finished_spans()) == count
