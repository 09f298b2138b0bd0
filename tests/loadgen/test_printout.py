"""The terminal output of a load test, while it runs and at its end."""

from __future__ import annotations

import io

from csps.loadgen.bench.console import EVERY_S, line, lines, progress
from csps.loadgen.client.client import RequestCounts
from csps.loadgen.results.record import RequestRecord
from csps.loadgen.results.result import RunDescription, summarize
from csps.loadgen.workloads.request import Slo

MS = 1_000_000


def record(number: int, **fields: object) -> RequestRecord:
    values: dict[str, object] = {
        "scheduled_ns": number * MS,
        "sent_ns": number * MS,
        "chunk_ns": ((number + 100) * MS, (number + 120) * MS),
        "finished_ns": (number + 121) * MS,
        "input_tokens": 100 * 10**number,
        "output_tokens": 2,
    }
    return RequestRecord(**(values | fields))  # type: ignore[arg-type]


def test_the_table_has_every_number_and_reason() -> None:
    failed = {"status": "failed", "error": "HTTP 429: busy", "chunk_ns": ()}
    records = [record(0, correct=True), record(1, correct=False), record(2, **failed)]
    run = RunDescription(kind="live", label="x", slo=Slo(ttft=100))
    printed = "\n".join(lines(summarize(records, run)))
    for words in (
        "Successful requests:                      2",
        "Failed requests:                          1",
        "Requests within SLO (%):                  66.67",
        "Right answers (%):                        50.00",
        "Median TTFT (ms):                         100.00",
        "Mean ITL (ms):                            20.00",
        "1-256                  1 requests  median 100.0, P99 100.0",
        "1 x HTTP 429",
    ):
        assert words in printed
    assert "Maximum request concurrency" not in printed


def test_a_run_of_which_nothing_came_is_still_a_table() -> None:
    assert "Successful requests:" in "\n".join(
        lines(summarize([], RunDescription(kind="live", label="x")))
    )


def test_the_line_of_progress() -> None:
    counts = RequestCounts(running=3, completed=10, failed=1, ttfts_s=[0.2] * 5 + [0.4] * 100)
    assert line(counts, 50, 4.0) == (
        "10/50 done, 3 running, 1 failed, 2.50 req/s, TTFT 400 ms (median of 100)"
    )
    assert line(RequestCounts(cancelled=2), 5, 1.0) == (
        "0/5 done, 0 running, 0 failed, 2 cancelled, 0.00 req/s"
    )


async def test_progress_ends_with_its_run() -> None:
    assert EVERY_S > 0
    out = io.StringIO()
    async with progress(RequestCounts(), 5, out):
        pass
    assert out.getvalue() == ""
