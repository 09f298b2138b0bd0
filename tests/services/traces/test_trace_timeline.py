"""Test the way of a rank's events to spans, to files of OTLP-JSON, and to a timeline for
Perfetto."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from trace_slices import by_row, crossings

from csps.actors.timing import timeline as engine_export
from csps.actors.timing.timeline import PhaseEvent, SentBytes, StepClock
from csps.protocols.gang.step_messages import PrefillStep
from csps.services.telemetry.traces.perfetto import trace_events
from csps.services.telemetry.traces.span_file import SpanFile
from csps.services.telemetry.traces.spans import RecordedSpan, Trace, read_spans, traces

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-00"}
STATE = {"tracestate": "vendor=7,csps=timeline"}
TIMELINE = {**SAMPLED, **STATE}
MS = 1_000_000
EVENTS = (
    PhaseEvent("qkv", 1 * MS, 2 * MS, 0),
    PhaseEvent("first all-to-all", 2 * MS, 6 * MS, 0, 2, 1),
    PhaseEvent("attention", 2 * MS, 5 * MS, 0, 1, cpu_ns=2 * MS),
    PhaseEvent("wait", 5 * MS, 6 * MS, 0, 2, 1),
)


class Written:
    """A file of this test's spans, and what is read back."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def spans(self) -> list[RecordedSpan]:
        return list(read_spans([self._path])) if self._path.exists() else []

    @property
    def trace(self) -> Trace:
        (one,) = traces(self.spans)
        return one


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Written]:
    """Return spans of this test, with an SDK of its own."""
    path = tmp_path / "spans.jsonl"
    provider = TracerProvider(resource=Resource({"service.name": "csps-prefill"}))
    provider.add_span_processor(SimpleSpanProcessor(SpanFile(path)))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield Written(path)
    provider.shutdown()


def _run_step(carrier: dict[str, str], *, rank: int = 0) -> StepClock:
    """Run a step that does what EVENTS say, if anybody listens."""
    step = PrefillStep(step_id=3, group=(0, 1), bounds=(0, 2, 4), chunks=(), trace=carrier)
    clock, bytes_sent = StepClock(), [7, 7]
    timeline = clock.timeline  # as a strategy keeps it from before the step begins
    sent = SentBytes(bytes_sent)
    with engine_export.traced_step(step, clock, sent, rank=rank):
        for event in EVENTS:
            timeline.add(event)
        bytes_sent[1 - rank] += 1000
        bytes_sent[rank] += 10
        clock.communication_s, clock.exchange_s = 0.001, 0.004
    return clock


def test_phases_are_children_of_their_step_in_the_requests_trace(written: Written) -> None:
    _run_step(TIMELINE)
    step, *phases = sorted(written.spans, key=lambda span: span.is_phase)
    assert step.name == "prefill.compute"
    assert {span.trace_id for span in (step, *phases)} == {TRACE_ID}
    assert {span.parent_id for span in phases} == {step.span_id}
    assert [span.name for span in phases] == [f"prefill.{event.name}" for event in EVENTS]
    assert [(phase.start_ns, phase.end_ns) for phase in phases] == [
        (e.start_ns, e.end_ns) for e in EVENTS
    ]


@pytest.mark.parametrize("carrier", [{}, UNSAMPLED, {**UNSAMPLED, **STATE}])
def test_nothing_is_recorded_of_a_step_that_is_not_sampled(
    carrier: dict[str, str], written: Written
) -> None:
    clock = _run_step(carrier)
    assert not clock.timeline.on
    assert clock.timeline.events == []
    assert written.spans == []


def test_an_untraced_step_inside_a_traced_one_records_nothing(written: Written) -> None:
    """A high-priority step runs inside the span of the step that it preempts."""
    outer = PrefillStep(step_id=2, group=(0, 1), bounds=(0, 2, 4), chunks=(), trace=TIMELINE)
    sent = SentBytes([7, 7])
    with engine_export.traced_step(outer, StepClock(), sent, rank=0):
        inner = _run_step({})
    assert not inner.timeline.on
    (span,) = written.spans
    assert span.attributes["csps.bytes_sent"] == [0, 0]


@pytest.mark.parametrize("state", [{}, {"tracestate": "csps=other,vendor=timeline"}])
def test_a_trace_without_a_timeline_has_only_the_steps_costs(
    state: dict[str, str], written: Written
) -> None:
    clock = _run_step({**SAMPLED, **state})
    assert (clock.timeline.on, clock.timeline.events) == (False, [])
    (step,) = written.spans
    assert step.name == "prefill.compute"
    assert step.attributes["csps.bytes_sent"] == [10, 1000]


def test_a_step_that_fails_records_the_error(written: Written) -> None:
    step = PrefillStep(step_id=3, group=(0,), bounds=(0, 2), chunks=(), trace=SAMPLED)
    sent = SentBytes([7, 7])
    with (
        pytest.raises(KeyError),
        engine_export.traced_step(step, StepClock(), sent, rank=0),
    ):
        raise KeyError("no such layer")
    (span,) = written.spans
    assert (span.failed, span.attributes["error.type"]) == (True, "KeyError")


def test_the_timeline_has_the_phases_of_both_ranks(written: Written) -> None:
    _run_step(TIMELINE, rank=0)
    _run_step(TIMELINE, rank=1)
    events = json.loads(json.dumps(trace_events(written.trace)))
    rows = by_row(events)
    assert {process for process, _ in rows} == {"prefill rank 0", "prefill rank 1"}
    for rank in (0, 1):
        compute = rows[f"prefill rank {rank}", "compute"]
        assert [event["name"] for event in compute] == ["qkv", "attention", "wait"]
        # Microseconds, as the format wants them, after the first span's beginning.
        (exchange,) = rows[f"prefill rank {rank}", "first all-to-all"]
        assert (exchange["ts"], exchange["dur"]) == (1000, 4000)
        assert exchange["args"] == {"layer": 0, "level": 2, "micro": 1, "bytes": 0}
        assert [row["name"] for row in rows[f"prefill rank {rank}", "jobs"]] == ["prefill.compute"]


def span(
    name: str, start: int, end: int, service: str = "csps-router", **more: Any
) -> RecordedSpan:
    """Milliseconds."""
    rank: Mapping[str, Any] = {"csps.rank": more["rank"]} if "rank" in more else {}
    return RecordedSpan(
        name=name,
        trace_id=TRACE_ID,
        span_id=more.get("id", name),
        parent_id=more.get("parent"),
        start_ns=start * MS,
        end_ns=end * MS,
        failed=False,
        attributes={"service.name": service, **rank},
    )


def test_spans_of_a_service_that_cross_are_on_several_rows() -> None:
    spans = (
        span("request", 0, 9),
        span("queue", 0, 2),
        span("prefill", 2, 6),
        span("attach", 4, 8),
        span("last", 9, 10),
    )
    events = trace_events(Trace(spans))
    assert crossings(events) == []
    assert {
        row: [event["name"] for event in row_events] for row, row_events in by_row(events).items()
    } == {
        ("router", "spans"): ["request", "queue", "prefill", "last"],
        ("router", "spans 2"): ["attach"],
    }


def test_arrows_lead_from_process_to_process() -> None:
    """Expect arrows to spans started in other processes, and from each rank's prefill to the
    receiver of its KV."""
    spans = (
        span("llm_request", 0, 100),
        span("queue", 0, 10, parent="llm_request"),
        span("kv.landing", 11, 61, "csps-decode", parent="llm_request", rank=0),
        *(
            span(
                "prefill.compute",
                12,
                50 + rank,
                "csps-prefill",
                parent="llm_request",
                rank=rank,
                id=f"p{rank}",
            )
            for rank in (0, 1)
        ),
    )
    events = trace_events(Trace(spans))
    names = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    ends: dict[int, dict[str, tuple[str, float]]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]][event["ph"]] = (names[event["pid"]], event["ts"])
    arrows = sorted((*end["s"], *end["f"]) for end in ends.values())
    assert arrows == [
        ("prefill rank 0", 49_999, "decode rank 0", 60_999),
        ("prefill rank 1", 50_999, "decode rank 0", 60_999),
        ("router", 11_000, "decode rank 0", 11_000),
        ("router", 12_000, "prefill rank 0", 12_000),
        ("router", 12_000, "prefill rank 1", 12_000),
    ]
    for end in ends.values():
        assert end["s"][1] <= end["f"][1]
