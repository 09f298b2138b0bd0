"""`csps trace`: lists requests, shows one in the terminal, writes it for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider

from csps.protocols.core.errors import ConfigError
from csps.protocols.rpc import trace_context
from csps.services.launch.trace_command import main
from csps.services.settings.settings import TelemetrySettings
from csps.services.telemetry.traces.spans import Trace, read_spans, span_files, traces
from csps.services.telemetry.traces.waterfall import waterfall
from csps.services.telemetry.tracing import make_exporter, make_provider

MS = 1_000_000
BEGAN_NS = 1_700_000_000_000_000_000


def provider(service: str, folder: Path, rank: int | None = None) -> TracerProvider:
    settings = TelemetrySettings(spans_dir=str(folder))
    return make_provider(service, settings, make_exporter(service, settings), rank=rank)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two requests; the second also on a rank, with a phase in each of its four layers."""
    folder = tmp_path_factory.mktemp("traces")
    router = provider("csps-router", folder)
    rank = provider("csps-prefill", folder, rank=1)
    for number in (1, 2):
        begin = BEGAN_NS + number * 1000 * MS
        trace_id = f"00-{number:032x}-{9:016x}-01"
        context = trace_context.extract({"traceparent": trace_id})
        request = router.get_tracer("t").start_span(
            "llm_request", context=context, start_time=begin
        )
        request.set_attributes({
            "gen_ai.request.id": f"request-{number}",
            "gen_ai.usage.input_tokens": 100 * number,
            "gen_ai.latency.time_to_first_token": 0.0625,
            "csps.story": [f"Waited {number} s in the queue.", "Prefill on instance 0."],
        })  # fmt: skip
        if number == 2:
            below = trace_context.trace.set_span_in_context(request)
            step = rank.get_tracer("t").start_span(
                "prefill.compute", context=below, start_time=begin + 25 * MS
            )
            in_step = trace_context.trace.set_span_in_context(step)
            for layer in range(4):
                at = begin + (25 + 10 * layer) * MS
                rank.get_tracer("t").start_span(
                    "prefill.attention",
                    context=in_step,
                    start_time=at,
                    attributes={"csps.phase": "attention", "csps.layer": layer},
                ).end(at + 5 * MS)
            step.end(begin + 75 * MS)
        else:
            request.set_attribute("error.type", "queue_full")
        request.end(begin + 100 * MS)
    router.shutdown()
    rank.shutdown()
    return folder


@pytest.fixture
def written(folder: Path) -> list[Trace]:
    return traces(read_spans(span_files(folder)))


def test_the_list_has_a_line_a_request(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["list", "--traces", str(folder)])
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["trace", "began", "prompt", "answer", "TTFT", "all", "request"]
    assert first.split()[3:] == ["100", "-", "62", "ms", "100", "ms", "request-1", "queue_full"]
    assert second.split()[3:] == ["200", "-", "62", "ms", "100", "ms", "request-2"]
    main(["list", "--last", "1", "--traces", str(folder)])
    assert "request-1" not in capsys.readouterr().out


def test_a_waterfall_has_a_bar_where_the_time_went(written: list[Trace]) -> None:
    text = waterfall(written[-1], columns=140)
    title, request, step, phases = text.splitlines()
    assert "request-2" in title
    assert "200 prompt" in title
    assert request.startswith("router         llm_request")
    assert step.startswith("prefill 1        prefill.compute")
    assert "50.0 ms" in step
    assert "prefill.attention x4" in phases
    assert "20.0 ms" in phases
    width = len(request) - request.index("█")
    bar = step[len(request) - width :]
    # A column is about 1 ms: from 25 to 75 of 100 ms.
    assert bar.count(" ") == pytest.approx(0.25 * width, abs=2)
    assert bar.count("█") == pytest.approx(0.5 * width, abs=2)


@pytest.mark.parametrize("wanted", [[], ["request-2"], ["0" * 31 + "2"]])
def test_a_request_is_found_by_its_name_or_its_trace(
    folder: Path, capsys: pytest.CaptureFixture[str], wanted: list[str]
) -> None:
    main(["show", *wanted, "--traces", str(folder)])
    assert "request-2" in capsys.readouterr().out


def test_requests_of_one_trace_are_separate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A client's trace may have several requests, and spans of the client's own that are not
    here."""
    context = trace_context.extract({"traceparent": f"00-{7:032x}-{9:016x}-01"})
    router, rank = provider("csps-router", tmp_path), provider("csps-prefill", tmp_path, rank=0)
    for name in ("first", "second"):
        request = router.get_tracer("t").start_span("llm_request", context=context)
        request.set_attribute("gen_ai.request.id", name)
        below = trace_context.trace.set_span_in_context(request)
        step = rank.get_tracer("t").start_span("prefill.compute", context=below)
        below = trace_context.trace.set_span_in_context(step)
        rank.get_tracer("t").start_span(f"of the {name}", context=below).end()
        step.end()
        request.end()
    router.shutdown()
    rank.shutdown()
    main(["list", "--traces", str(tmp_path)])
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[-1] for row in rows] == ["first", "second"]
    main(["show", "first", "--traces", str(tmp_path)])
    shown = capsys.readouterr().out
    assert shown.count("prefill.compute") == shown.count("of the first") == 1
    assert "second" not in shown


def test_an_ambiguous_name_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="2 requests are called '000'"):
        main(["show", "000", "--traces", str(folder)])
    with pytest.raises(ConfigError, match="no request is called 'other'"):
        main(["show", "other", "--traces", str(folder)])


def test_a_timeline_is_written_for_perfetto(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "timeline.json"
    main(["timeline", "request-2", "--traces", str(folder), "--out", str(out)])
    events = json.loads(out.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 6
    assert {event["ph"] for event in events} == {"X", "M", "s", "f"}


def test_a_folder_without_requests_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no traced request in"):
        main(["list", "--traces", str(tmp_path)])
