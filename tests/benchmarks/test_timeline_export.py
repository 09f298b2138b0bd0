"""From a rank's timeline to spans, to files, and to a trace that Perfetto reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import prefill_costs
import pytest
import timeline_export
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from perfetto_rows import by_row, crossings

from csps.actors import timeline_export as engine_export
from csps.actors.job_clock import JobClock
from csps.actors.sent_bytes import SentBytes
from csps.actors.timeline import Event
from csps.protocols.prefill_job import PrefillJob
from csps.services.telemetry.tracing import span_record

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-00"}
STATE = {"tracestate": "vendor=7,csps=timeline"}
TIMELINE = {**SAMPLED, **STATE}
MS = 1_000_000
EVENTS = (
    Event("qkv", 1 * MS, 2 * MS, 0),
    Event("first all-to-all", 2 * MS, 6 * MS, 0, 2, 1),
    Event("attention", 2 * MS, 5 * MS, 0, 1, cpu_ns=2 * MS),
    Event("wait", 5 * MS, 6 * MS, 0, 2, 1),
)


class CountingMesh:
    """As much of a mesh as a job's span reads."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.bytes_sent = [7, 7]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Spans of this test, with an SDK of its own."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def _run_job(carrier: dict[str, str], *, rank: int = 0) -> JobClock:
    """A job that does what EVENTS say, if anybody listens."""
    job = PrefillJob(job_id=3, group=(0, 1), bounds=(0, 2, 4), pieces=(), trace=carrier)
    clock, mesh = JobClock(), CountingMesh(rank)
    timeline = clock.timeline  # as a strategy keeps it from before the job begins
    sent = SentBytes(mesh)  # type: ignore[arg-type]
    with engine_export.traced_job(job, clock, sent, rank=rank):
        for event in EVENTS:
            timeline.add(event)
        mesh.bytes_sent[1 - rank] += 1000
        mesh.bytes_sent[rank] += 10
        clock.communication_s, clock.exchange_s = 0.001, 0.004
    return clock


def _records(exported: InMemorySpanExporter) -> list[timeline_export.Record]:
    return [span_record(span) for span in exported.get_finished_spans()]


def test_events_come_back_from_their_spans(exported: InMemorySpanExporter) -> None:
    _run_job(TIMELINE, rank=0)
    _run_job(TIMELINE, rank=1)
    timelines = timeline_export.timelines(_records(exported))
    assert timelines == {0: list(EVENTS), 1: list(EVENTS)}


def test_phases_lie_below_their_job_in_the_requests_trace(exported: InMemorySpanExporter) -> None:
    _run_job(TIMELINE)
    job, *phases = sorted(_records(exported), key=timeline_export.is_phase)
    assert job["name"] == "prefill.compute"
    assert {span["trace_id"] for span in (job, *phases)} == {TRACE_ID}
    assert {span["parent_id"] for span in phases} == {job["span_id"]}
    assert [span["name"] for span in phases] == [f"prefill.{event.name}" for event in EVENTS]


@pytest.mark.parametrize("carrier", [{}, UNSAMPLED, {**UNSAMPLED, **STATE}])
def test_nothing_is_noted_of_a_job_that_is_not_sampled(
    carrier: dict[str, str], exported: InMemorySpanExporter
) -> None:
    clock = _run_job(carrier)
    assert not clock.timeline.on
    assert clock.timeline.events == []
    assert exported.get_finished_spans() == ()


def test_an_untraced_job_inside_of_a_traced_one_notes_nothing(
    exported: InMemorySpanExporter,
) -> None:
    """An urgent job runs inside of the span of the job that it interrupts."""
    outer = PrefillJob(job_id=2, group=(0, 1), bounds=(0, 2, 4), pieces=(), trace=TIMELINE)
    sent = SentBytes(CountingMesh(0))  # type: ignore[arg-type]
    with engine_export.traced_job(outer, JobClock(), sent, rank=0):
        inner = _run_job({})
    assert not inner.timeline.on
    (record,) = _records(exported)
    assert tuple(record["attributes"]["csps.bytes_sent"]) == (0, 0)


@pytest.mark.parametrize("state", [{}, {"tracestate": "csps=other,vendor=timeline"}])
def test_a_trace_that_asks_for_no_timeline_has_the_jobs_costs_alone(
    state: dict[str, str], exported: InMemorySpanExporter
) -> None:
    clock = _run_job({**SAMPLED, **state})
    assert (clock.timeline.on, clock.timeline.events) == (False, [])
    (job,) = _records(exported)
    assert job["name"] == "prefill.compute"
    assert tuple(job["attributes"]["csps.bytes_sent"]) == (10, 1000)


def test_costs_are_summed_over_the_ranks(exported: InMemorySpanExporter) -> None:
    _run_job(TIMELINE, rank=0)
    _run_job(TIMELINE, rank=1)
    cost = prefill_costs.job_costs(_records(exported), ["0-0-0", "0-1-0"])[TRACE_ID]
    assert cost.attention_s == pytest.approx(0.003)
    assert cost.attention_cpu_s == pytest.approx(0.002)
    assert cost.hidden == pytest.approx(0.75)
    assert (cost.between_bytes, cost.inside_bytes) == (2000, 20)


def test_the_file_is_a_chrome_trace_of_both_ranks(
    exported: InMemorySpanExporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run_job(TIMELINE, rank=0)
    _run_job(TIMELINE, rank=1)
    spans, out = tmp_path / "spans.jsonl", tmp_path / "timeline.json"
    spans.write_text("".join(json.dumps(record) + "\n" for record in _records(exported)))
    monkeypatch.setattr(sys, "argv", ["timeline_export", str(spans), "--out", str(out)])
    assert timeline_export.main() == 0
    events = json.loads(out.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X" and event["pid"] < 2]
    assert len(slices) == 2 * len(EVENTS)
    # Microseconds, as the format wants them; an exchange and what hides it are on two rows.
    by_name = {event["name"]: event for event in slices if event["pid"] == 1}
    assert (by_name["first all-to-all"]["ts"], by_name["first all-to-all"]["dur"]) == (2000, 4000)
    assert by_name["first all-to-all"]["tid"] != by_name["attention"]["tid"]
    assert by_name["attention"]["tid"] == by_name["wait"]["tid"]
    named = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"rank 0", "rank 1"} <= named


def test_spans_of_a_service_that_cross_are_on_several_rows() -> None:
    spans = {
        "request": (0, 9),
        "queue": (0, 2),
        "prefill": (2, 6),
        "attach": (4, 8),
        "last": (9, 10),
    }
    records: list[timeline_export.Record] = [
        {
            "name": name,
            "start_ns": begin * MS,
            "end_ns": end * MS,
            "attributes": {"service.name": "router"},
        }
        for name, (begin, end) in spans.items()
    ]
    trace = timeline_export.trace_events(records)
    assert crossings(trace) == []
    assert {row: [it["name"] for it in its] for row, its in by_row(trace).items()} == {
        ("router", "router"): ["request", "queue", "prefill", "last"],
        ("router", "router 2"): ["attach"],
    }


def test_a_trace_without_phases_is_no_timeline() -> None:
    record = {"trace_id": "a", "attributes": {}, "start_ns": 0}
    with pytest.raises(ValueError, match="no phases"):
        timeline_export.of_one_trace([record])
    with pytest.raises(ValueError, match="no spans of trace b"):
        timeline_export.of_one_trace([record], "b")
    assert timeline_export.of_one_trace([record], "a") == [record]
