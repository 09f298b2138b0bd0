"""Metrics against a brute-force computation, and results against their schema."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples

from csps.loadgen.results.record import RequestRecord, by_input_length
from csps.loadgen.results.result import LATE_S, RunDescription, read_result, summarize, write_result
from csps.loadgen.workloads.request import RequestObjective, Slo
from csps.protocols.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "loadgen" / "results" / "schema.json").read_text())
MS = 1_000_000


@st.composite
def records_st(draw: st.DrawFn) -> RequestRecord:
    """Draw any way in which a request can end."""
    scheduled = draw(st.integers(0, 50_000 * MS))
    sent = scheduled + draw(st.integers(0, 30 * MS))
    status = draw(st.sampled_from(["completed", "completed", "completed", "failed", "cancelled"]))
    least = 1 if status == "completed" else 0
    gaps = draw(st.lists(st.integers(0, 900 * MS), min_size=least, max_size=6))
    chunks = tuple(int(stamp) for stamp in sent + np.cumsum([0, *gaps])[1:])
    objective = draw(
        st.sampled_from(
            [None, RequestObjective(objective="ttft"), RequestObjective(max_ttft_ms=500.0)]
        )
    )
    return RequestRecord(
        scheduled_ns=scheduled,
        sent_ns=sent,
        chunk_ns=chunks,
        finished_ns=max([sent, *chunks]) + draw(st.integers(0, 5 * MS)),
        input_tokens=draw(st.integers(1, 2_000_000)),
        output_tokens=max(len(chunks), 1),
        status=status,
        error="" if status == "completed" else draw(st.sampled_from(["HTTP 429: x", "HTTP 500"])),
        correct=draw(st.sampled_from([None, True, False])) if status == "completed" else None,
        objective=objective,
    )


def brute(records: list[RequestRecord]) -> dict[str, list[float]]:
    """Return latencies in ms, from the definitions."""
    found: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2el": []}
    for record in records:
        if record.status != "completed":
            continue
        start, stamps = record.scheduled_ns, list(record.chunk_ns)
        found["ttft"].append((stamps[0] - start) / 1e6)
        found["e2el"].append((record.finished_ns - start) / 1e6)
        if record.output_tokens > 1:
            found["tpot"].append(
                (record.finished_ns - stamps[0]) / 1e6 / (record.output_tokens - 1)
            )
        found["itl"] += [(stamps[i + 1] - stamps[i]) / 1e6 for i in range(len(stamps) - 1)]
    return found


def percentile(values: list[float], p: float) -> float:
    """Interpolate linearly between the two neighbors."""
    ordered, place = sorted(values), (len(values) - 1) * p / 100
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


RUN = RunDescription(kind="live", label="test", slo=Slo(ttft=400, tpot=300, e2el=2000))


@settings(max_examples=examples(40))
@given(records=st.lists(records_st(), min_size=1, max_size=30))
def test_metrics_are_those_of_their_definitions(records: list[RequestRecord]) -> None:
    result = summarize(records, RUN)
    for metric, values in brute(records).items():
        if not values:
            assert f"mean_{metric}_ms" not in result
            continue
        assert result[f"mean_{metric}_ms"] == pytest.approx(statistics.fmean(values), abs=1e-5)
        assert result[f"median_{metric}_ms"] == pytest.approx(statistics.median(values), abs=1e-5)
        assert result[f"std_{metric}_ms"] == pytest.approx(statistics.pstdev(values), abs=1e-4)
        for p in (50, 90, 95, 99):
            assert result[f"p{p}_{metric}_ms"] == pytest.approx(percentile(values, p), abs=1e-5)


@settings(max_examples=examples(40))
@given(records=st.lists(records_st(), min_size=1, max_size=30))
def test_counts_rates_and_goodput_are_those_of_their_definitions(
    records: list[RequestRecord],
) -> None:
    result = summarize(records, RUN)
    seconds = max(record.finished_ns for record in records) / 1e9
    done = [record for record in records if record.status == "completed"]
    good = 0
    for record in done:
        latency, first = (
            record.finished_ns - record.scheduled_ns,
            record.chunk_ns[0] - record.scheduled_ns,
        )
        tpot = (latency - first) / max(1, record.output_tokens - 1)
        single = record.output_tokens < 2
        good += first <= 400 * MS and (single or tpot <= 300 * MS) and latency <= 2000 * MS
    tokens = sum(record.output_tokens for record in done)
    assert result["duration"] == pytest.approx(seconds, abs=1e-6)
    if seconds > 1e-3:
        assert result["request_throughput"] == pytest.approx(len(done) / seconds, rel=1e-4)
        assert result["request_goodput"] == pytest.approx(good / seconds, rel=1e-4)
        assert result["output_throughput"] == pytest.approx(tokens / seconds, rel=1e-4)
    assert result["slo_attainment"] == pytest.approx(good / len(records), abs=1e-6)
    assert result["late"] == sum(
        record.sent_ns - record.scheduled_ns > LATE_S * 1e9 for record in records
    )
    ended = result["completed"] + result["failed"] + result["cancelled"]
    assert ended == len(records) == result["num_prompts"]
    assert sum(result["failed_by_reason"].values()) == len(records) - len(done)
    assert set(result["failed_by_reason"]) <= {"HTTP 429", "HTTP 500"}
    known = [record.correct for record in done if record.correct is not None]
    assert result["checked"] == len(known)
    right = pytest.approx(sum(known) / len(known), abs=1e-6) if known else None
    assert result["accuracy"] == right
    at_once = max(
        sum(other.sent_ns <= record.sent_ns < other.finished_ns for other in records)
        for record in records
    )
    assert result["max_concurrent_requests"] == at_once


@settings(max_examples=examples(40))
@given(records=st.lists(records_st(), min_size=1, max_size=30))
def test_parts_add_up_to_the_whole(records: list[RequestRecord]) -> None:
    result = summarize(records, RUN)
    parts = result["by_input_length"]
    assert sum(part["num_prompts"] for part in parts) == len(records)
    for name, its in by_input_length(records):
        low, high = name.split("-") if "-" in name else (name.removeprefix(">"), "inf")
        above = int(low) if name.startswith(">") else int(low) - 1
        assert all(above < record.input_tokens <= float(high) for record in its)
        part = next(part for part in parts if part["input_length"] == name)
        ttfts = brute(its)["ttft"]
        if ttfts:
            assert part["p90_ttft_ms"] == pytest.approx(percentile(ttfts, 90), abs=1e-5)
    with_objective = [record for record in records if record.objective]
    assert sum(part["num_prompts"] for part in result["by_objective"]) == len(with_objective)
    for part in result["by_objective"]:
        own = [
            record
            for record in with_objective
            if record.objective and record.objective.label == part["objective"]
        ]
        met = [record.completed and record.ttft_s <= 0.5 for record in own]
        expected = sum(met) / len(met) if "max_ttft_ms" in part["objective"] else None
        assert part["ttft_bound_met"] == (
            None if expected is None else pytest.approx(expected, abs=1e-6)
        )


@settings(max_examples=examples(40))
@given(records=st.lists(records_st(), min_size=1, max_size=20))
def test_the_series_conserve_requests_and_obey_littles_law(records: list[RequestRecord]) -> None:
    result = summarize(records, RUN)
    series = result["series"]
    assert sum(series["arrived"]) == len(records)
    assert sum(series["completed"]) == result["completed"]
    assert sum(series["failed"]) == result["failed"]
    assert sum(series["chunks"]) == sum(len(record.chunk_ns) for record in records)
    spent_s = sum(record.finished_ns - record.scheduled_ns for record in records) / 1e9
    tolerance = 1e-3 * len(series["running"]) * series["step_s"] + 1e-6
    assert sum(series["running"]) * series["step_s"] == pytest.approx(spent_s, abs=tolerance)


@settings(max_examples=examples(40))
@given(records=st.lists(records_st(), min_size=1, max_size=20))
def test_loongserves_normalized_latencies(records: list[RequestRecord]) -> None:
    result = summarize(records, RUN)
    done = [record for record in records if record.completed]
    if done:
        total = [
            record.e2el_s * 1000 / (record.input_tokens + record.output_tokens) for record in done
        ]
        first = [record.ttft_s * 1000 / record.input_tokens for record in done]
        assert result["mean_normalized_total_latency_ms"] == pytest.approx(
            statistics.fmean(total), abs=1e-5
        )
        assert result["mean_normalized_input_latency_ms"] == pytest.approx(
            statistics.fmean(first), abs=1e-5
        )


@settings(max_examples=examples(40))
@given(records=st.lists(records_st(), max_size=10), detailed=st.booleans())
def test_results_follow_their_schema(
    records: list[RequestRecord], detailed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = RunDescription(
        kind="simulated", label="x", detailed=detailed, slo=RUN.slo if detailed else Slo()
    )
    result = summarize(records, run)
    jsonschema.validate(result, SCHEMA)
    path = tmp_path_factory.mktemp("results") / "new" / "result.json"
    write_result(result, path)
    assert read_result(path) == json.loads(json.dumps(result))
    assert ("itls" in result) is detailed


def test_the_schema_can_refuse() -> None:
    result = summarize([], RUN)
    for changed in (
        {"failed": -1},
        {"kind": "dreamt"},
        {"statuses": ["lost"]},
        {"p99_ttft_ms": "x"},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(result | changed, SCHEMA)
    without = {name: value for name, value in result.items() if name != "ttfts"}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(without, SCHEMA)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "Expecting"),
        ("{}", "is no result of csps"),
        ('{"schema": "csps.results", "schema_version": 99}', "this release reads up to 1"),
        ('{"schema": "csps.results"}', "schema version None"),
    ],
)
def test_an_invalid_result_file_is_rejected(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_result(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tttf:1"], "did you mean 'ttft'"),
        (["ttft"], "ttft:MILLISECONDS"),
        (["tpot:x"], "'tpot:x'"),
    ],
)
def test_a_wrong_slo_is_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Slo.parse(words)


def test_no_slo_is_no_goodput() -> None:
    assert not Slo.parse([])
    result: dict[str, Any] = summarize([], RunDescription(kind="live", label="x"))
    assert "request_goodput" not in result
    assert result["slo_attainment"] is None
