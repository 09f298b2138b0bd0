"""Terminal output of load tests: a progress line once a second, and the result."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from statistics import median
from typing import Any, TextIO

from csps.loadgen.client.client import RequestCounts
from csps.loadgen.results.record import LATENCIES
from csps.loadgen.results.result import Result

EVERY_S = 1.0
_RECENT = 100
"""Number of last requests whose median TTFT is shown."""


@asynccontextmanager
async def progress(
    counts: RequestCounts, total: int, out: TextIO = sys.stderr
) -> AsyncIterator[None]:
    """Print progress while the body runs: one line on a terminal, else a line every ten seconds."""
    task = asyncio.create_task(_report(counts, total, out))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if out.isatty():
            print(file=out)


async def _report(counts: RequestCounts, total: int, out: TextIO) -> None:
    terminal = out.isatty()
    begin = time.monotonic()
    while True:
        await asyncio.sleep(EVERY_S if terminal else 10 * EVERY_S)
        text = line(counts, total, time.monotonic() - begin)
        print(f"\r{text:<79}" if terminal else text, end="" if terminal else "\n", file=out)
        out.flush()


def line(counts: RequestCounts, total: int, seconds: float) -> str:
    """Return `120/300 done, 14 running, 0 failed, 2.00 req/s, TTFT 350 ms (median of 100)`."""
    recent = counts.ttfts_s[-_RECENT:]
    ttft = f", TTFT {1000 * median(recent):.0f} ms (median of {len(recent)})" if recent else ""
    cancelled = f", {counts.cancelled} cancelled" if counts.cancelled else ""
    return (
        f"{counts.completed}/{total} done, {counts.running} running, {counts.failed} failed"
        f"{cancelled}, {counts.completed / seconds:.2f} req/s{ttft}"
    )


_WIDTH = 60
_TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token after the first",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


def lines(result: Result) -> Iterator[str]:
    """Yield the lines that `vllm bench serve` prints, and further ones."""
    yield _title("Serving benchmark result", "=")
    yield from _rows(
        {
            "Successful requests": result["completed"],
            "Failed requests": result["failed"],
            "Cancelled requests": result["cancelled"],
            "Requests sent late": result["late"],
            "Request rate configured (req/s)": result["request_rate"],
            "Maximum request concurrency": result["max_concurrency"],
            "Duration (s)": result["duration"],
            "Total input tokens": result["total_input"],
            "Total generated tokens": result["total_output"],
            "Request throughput (req/s)": result["request_throughput"],
            "Request goodput (req/s)": result.get("request_goodput"),
            "Requests within SLO (%)": _percent(result["slo_attainment"]),
            "Output token throughput (tok/s)": result["output_throughput"],
            "Total token throughput (tok/s)": result["total_token_throughput"],
            "Peak concurrent requests": result["max_concurrent_requests"],
            "Right answers (%)": _percent(result["accuracy"]),
            "Prompts cut to fit": result.get("prompts_cut"),
            "Client CPU per request (ms)": result.get("client_cpu_ms_per_request"),
        }
    )
    for metric in LATENCIES:
        yield from _latencies(result, metric)
    yield from _by_length(result)
    yield from _probes(result)
    if of_server := result.get("server_metrics"):
        yield _title("The server's own metrics", "-")
        yield from _rows(of_server)
    for reason, count in result["failed_by_reason"].items():
        yield f"{count} x {reason}"
    yield "=" * _WIDTH


def _title(text: str, rule: str) -> str:
    return f"{f' {text} ':{rule}^{_WIDTH}}"


def _rows(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if value is not None:
            shown = f"{value:.2f}" if isinstance(value, float) else value
            yield f"{name + ':':<42}{shown}"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _latencies(result: Result, metric: str) -> Iterator[str]:
    ending = f"_{metric}_ms"
    values = {
        name.removesuffix(ending): value
        for name, value in result.items()
        if name.endswith(ending) and not name.startswith(_PROBE)
    }
    if values:
        yield _title(_TITLES[metric], "-")
        names = {
            f"{name.capitalize()} {metric.upper()} (ms)": value for name, value in values.items()
        }
        yield from _rows(names)


_PROBE = "probe_"


def _probes(result: Result) -> Iterator[str]:
    """Yield what requests of `--probe-request-rate` saw."""
    found = {name: value for name, value in result.items() if name.startswith(_PROBE)}
    if found:
        yield _title("Probes beside the load", "-")
        yield from _rows({name.removeprefix(_PROBE): value for name, value in found.items()})


def _by_length(result: Result) -> Iterator[str]:
    parts = [part for part in result["by_input_length"] if "median_ttft_ms" in part]
    if len(parts) > 1:
        yield _title("TTFT by prompt tokens (ms)", "-")
        for part in parts:
            tail = part.get("p99_ttft_ms", part["median_ttft_ms"])
            numbers = f"median {part['median_ttft_ms']:.1f}, P99 {tail:.1f}"
            yield f"{part['input_length']:<18}{part['num_prompts']:>6} requests  {numbers}"
