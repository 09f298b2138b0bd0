"""A result in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from csps.loadgen.results.result import Result
from csps.loadgen.results.statistics import LATENCIES

_WIDTH = 60
_TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token after the first",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


def lines(result: Result) -> Iterator[str]:
    """What `vllm bench serve` prints, and what it does not know."""
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
    found = {name.removesuffix(ending): it for name, it in result.items() if name.endswith(ending)}
    if found:
        yield _title(_TITLES[metric], "-")
        names = {f"{name.capitalize()} {metric.upper()} (ms)": it for name, it in found.items()}
        yield from _rows(names)


def _by_length(result: Result) -> Iterator[str]:
    parts = [it for it in result["by_input_length"] if "median_ttft_ms" in it]
    if len(parts) > 1:
        yield _title("TTFT by prompt tokens (ms)", "-")
        for part in parts:
            tail = part.get("p99_ttft_ms", part["median_ttft_ms"])
            numbers = f"median {part['median_ttft_ms']:.1f}, P99 {tail:.1f}"
            yield f"{part['input_length']:<18}{part['num_prompts']:>6} requests  {numbers}"
