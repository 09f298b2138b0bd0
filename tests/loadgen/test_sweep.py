"""The search for the highest rate that keeps the SLO."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_server import answer_ok, raw_server

from csps.loadgen.bench import sweep
from csps.loadgen.bench.sweep import NORMALIZED, RateSearch, SweepLimits
from csps.loadgen.results.record import RequestRecord
from csps.loadgen.results.result import RunDescription, read_result, summarize
from csps.loadgen.workloads.request import Slo
from csps.protocols.core.errors import ConfigError, FaultError

MS = 1_000_000


@given(capacity=st.floats(0.01, 1000), start=st.floats(0.01, 1000), tolerance=st.floats(0.02, 0.5))
def test_the_search_comes_within_its_tolerance(
    capacity: float, start: float, tolerance: float
) -> None:
    search = RateSearch(start=start, tolerance=tolerance, max_runs=100)
    while (rate := search.next()) is not None:
        assert rate not in search.tried
        search.note(rate, ok=rate <= capacity)
    assert search.met is not None
    assert search.missed is not None
    assert search.met <= capacity < search.missed <= search.met * (1 + tolerance)


@given(capacity=st.floats(0.01, 1000), start=st.floats(0.01, 10), highest=st.floats(10, 100))
def test_the_search_respects_its_bounds(capacity: float, start: float, highest: float) -> None:
    search = RateSearch(start=start, max_runs=9, highest=highest)
    while (rate := search.next()) is not None:
        assert rate <= highest
        search.note(rate, ok=rate <= capacity)
    assert len(search.tried) <= 9


def test_a_lucky_run_above_a_missed_rate_does_not_count() -> None:
    search = RateSearch(start=1)
    for rate, ok in ((1, True), (2, False), (1.5, True), (3, True)):
        search.note(rate, ok=ok)
    assert (search.met, search.missed) == (1.5, 2)


def result(ttft_ms: int, *, failed: int = 0) -> dict[str, Any]:
    """Return ten requests of 100 tokens in and 3 out, 10 ms between tokens."""
    chunks = tuple((ttft_ms + gap) * MS for gap in (0, 10, 20))
    records = [
        RequestRecord(
            scheduled_ns=0,
            sent_ns=0,
            chunk_ns=chunks,
            finished_ns=chunks[-1],
            input_tokens=100,
            output_tokens=3,
            status="failed" if number < failed else "completed",
        )
        for number in range(10)
    ]
    return summarize(records, RunDescription(kind="live", label="x", slo=Slo(ttft=300)))


def test_25_times_the_light_load() -> None:
    limits = SweepLimits.times_light_load(result(40), 25)
    assert limits.most == {
        NORMALIZED[0]: pytest.approx(25 * 60 / 103, abs=1e-4),
        NORMALIZED[1]: pytest.approx(25 * 40 / 100, abs=1e-4),
        NORMALIZED[2]: pytest.approx(25 * 10, abs=1e-4),
    }
    assert not limits.missed_by(result(1000))
    assert "input_latency" in limits.missed_by(result(1010))
    assert "1 of 10 requests did not complete" in limits.missed_by(result(40, failed=1))


def test_a_share_of_requests_within_the_slo() -> None:
    limits = SweepLimits(most={}, attainment=0.9, failed=0.2)
    assert not limits.missed_by(result(200, failed=1))
    assert "80.0% of requests within SLO < 90.0%" in limits.missed_by(result(200, failed=2))
    assert "0.0%" in limits.missed_by(result(301))


def test_a_light_load_that_fails_sets_no_limits() -> None:
    with pytest.raises(FaultError, match="no request of the light load completed"):
        SweepLimits.times_light_load(result(1, failed=10), 25)


async def test_every_run_is_a_file_and_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with raw_server(answer_ok) as server:
        words = ["--base-url", server.url, "--num-prompts", "10", "--light-prompts", "3"]
        words += ["--rates", "200,400", "--result-dir", str(tmp_path), "--disable-tqdm"]
        words += ["--min-duration", "0.05"]
        # Ample: what is tested is not the speed.
        words += ["--goodput", "e2el:60000", "--label", "raw", "--output-len", "3"]
        assert await sweep.Sweep(sweep.parse(words)).run() == 0
    files = {name: read_result(tmp_path / name) for name in os.listdir(tmp_path)}
    assert {
        name: (result["num_prompts"], result["slo_kept"]) for name, result in files.items()
    } == {
        "raw-no-load.json": (3, None),
        "raw-200.000.json": (10, True),
        "raw-400.000.json": (20, True),  # for a twentieth of a second
    }
    printed = capsys.readouterr().out
    assert "raw keeps the SLO up to 400 requests/s" in printed
    assert printed.count("met") == 4  # each row when it is known, and in the table


async def test_no_run_sends_a_prompt_of_another(tmp_path: Path) -> None:
    async with raw_server(answer_ok) as server:
        words = ["--base-url", server.url, "--num-prompts", "5", "--light-prompts", "5"]
        words += ["--rates", "200,200,400", "--result-dir", str(tmp_path), "--disable-tqdm"]
        words += ["--min-duration", "0", "--num-warmups", "5", "--seed", "7"]
        words += ["--dataset-name", "random", "--input-len", "40", "--output-len", "3"]
        words += ["--goodput", "e2el:60000", "--label", "raw", "--max-concurrency", "1"]
        assert await sweep.Sweep(sweep.parse(words)).run() == 0
        prompts = [body["prompt"] for body in server.bodies]
    assert len(prompts) == len(set(prompts)) == 25
    seeds = {read_result(tmp_path / name)["seed"] for name in os.listdir(tmp_path)}
    assert len(seeds) == 3  # a rate that was tried twice has one file
    assert read_result(tmp_path / "raw-no-load.json")["seed"] == 7


async def test_no_rate_that_keeps_the_slo_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with raw_server(answer_ok) as server:
        words = ["--base-url", server.url, "--num-prompts", "4", "--result-dir", str(tmp_path)]
        words += ["--goodput", "ttft:0.000001", "--max-runs", "3", "--disable-tqdm"]
        words += ["--min-duration", "0"]
        assert await sweep.Sweep(sweep.parse(words)).run() == 1
    assert "no rate met the SLO" in capsys.readouterr().out
    assert len(os.listdir(tmp_path)) == 4


async def test_a_trace_cannot_be_swept(tmp_path: Path) -> None:
    async with raw_server(answer_ok) as server:
        words = ["--base-url", server.url, "--dataset-path", str(tmp_path / "x.jsonl")]
        with pytest.raises(ConfigError, match="generates its requests"):
            await sweep.Sweep(sweep.parse(words)).run()
