"""One self-contained HTML page of several results: no network, no other file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from csps.loadgen.report import figures
from csps.loadgen.results.result import Result

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.figure import Figure

NOTHING = "-"
"""Text of a cell whose value the result does not have."""
TEMPLATE = Path(__file__).with_name("page.html.jinja")
ROWS = (
    ("requests", "num_prompts", "{:,d}"),
    ("completed", "completed", "{:,d}"),
    ("failed", "failed", "{:,d}"),
    ("cancelled", "cancelled", "{:,d}"),
    ("sent late", "late", "{:,d}"),
    ("prompts cut", "prompts_cut", "{:,d}"),
    ("duration (s)", "duration", "{:,.1f}"),
    ("requests/s", "request_throughput", "{:.3f}"),
    ("goodput (req/s)", "request_goodput", "{:.3f}"),
    ("within SLO", "slo_attainment", "{:.1%}"),
    ("prefill instances busy", "prefill_utilization", "{:.1%}"),
    ("tokens out/s", "output_throughput", "{:,.1f}"),
    ("tokens/s", "total_token_throughput", "{:,.0f}"),
    ("peak concurrency", "max_concurrent_requests", "{:,d}"),
    ("right answers", "accuracy", "{:.1%}"),
    ("client CPU per request (ms)", "client_cpu_ms_per_request", "{:.2f}"),
)
LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("end to end", "e2el"))
FACTS = (
    "kind", "date", "model_id", "backend", "base_url", "workload", "max_input_len", "request_rate",
    "burstiness", "max_concurrency", "loop", "seed", "slo", "slo_kept", "machine", "load_average",
)  # fmt: skip

Table = dict[str, Any]
NamedFigures = list[tuple[str, str, "Figure"]]
"""Name, caption and figure."""


_OF_EVERY_RUN: tuple[tuple[str, str, figures.Draw], ...] = (
    ("ttft-cdf", "Time to first token", figures.cdf_of("ttfts", "TTFT")),
    ("ttft-by-length", "TTFT by prompt length, with medians", figures.ttft_by_length),
    ("e2el-cdf", "End-to-end latency", figures.cdf_of("e2els", "end-to-end latency")),
    ("tpot-cdf", "Time per output token", figures.cdf_of("tpots", "TPOT")),
    ("itl-cdf", "Inter-token latency", figures.itl_cdf),
    ("ttft-over-time", "TTFT over the run", figures.ttft_over_time),
    ("running", "Requests under way", figures.series_of("running", "requests", per_second=False)),
    ("chunks", "Pieces of answers", figures.series_of("chunks", "per second", per_second=True)),
    ("kv-use", "KV slots in use (simulated)", figures.kv_use),
)


def page(results: Sequence[Result], title: str) -> str:
    """Return the HTML page."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    plots = [(caption, figures.svg(figure, name)) for name, caption, figure in draw_all(results)]
    return environment.from_string(TEMPLATE.read_text()).render(
        title=title,
        results=results,
        names=[figures.name(result) for result in results],
        colors=[figures.style(number)["color"] for number in range(len(results))],
        overview=_with_values(_overview(results)),
        lengths=_by_part(results, "by_input_length", "input_length"),
        objectives=_by_part(results, "by_objective", "objective"),
        reasons=_reasons(results),
        facts=_with_values(
            (name, [_shown(result.get(name)) for result in results]) for name in FACTS
        ),
        figures=plots,
        sources=sorted(
            {result["workload_source"] for result in results if result.get("workload_source")}
        ),
    )


def write_page(results: Sequence[Result], path: Path, title: str) -> None:
    """Write the HTML page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(results, title), encoding="utf-8")


def draw_all(results: Sequence[Result]) -> NamedFigures:
    """Return all figures that have data."""
    plans = [*_over_rates(results), *_OF_EVERY_RUN]
    plots = [(name, caption, figures.figure(draw, results)) for name, caption, draw in plans]
    return [plot for plot in plots if plot[2].axes[0].has_data()]


def _over_rates(results: Sequence[Result]) -> Iterator[tuple[str, str, figures.Draw]]:
    """Yield plots over the rate if a label has runs at several rates."""
    if all(len(runs) < 2 for runs in figures.by_label(results).values()):
        return
    yield "ttft-by-rate", "Median TTFT by rate", figures.over_rate("median_ttft_ms", "TTFT (ms)")
    yield "p99-ttft-by-rate", "P99 TTFT by rate", figures.over_rate("p99_ttft_ms", "TTFT (ms)")
    if any(result["slo_attainment"] is not None for result in results):
        draw = figures.over_rate("slo_attainment", "share of requests")
        yield "slo-by-rate", "Requests within SLO by rate", draw


def _overview(results: Sequence[Result]) -> Iterator[tuple[str, list[str]]]:
    for title, field, form in ROWS:
        yield title, [_formatted(result.get(field), form) for result in results]
    for title, metric in LATENCIES:
        for statistic in ("mean", "median", "p90", "p99"):
            field = f"{statistic}_{metric}_ms"
            if any(field in result for result in results):
                short = statistic.upper() if statistic.startswith("p") else statistic
                yield (
                    f"{title} {short} (ms)",
                    [_formatted(result.get(field), "{:,.1f}") for result in results],
                )


def _by_part(results: Sequence[Result], table: str, key: str) -> list[Table]:
    """Return median and P99 of TTFT for each part of each run."""
    names = list(dict.fromkeys(part[key] for result in results for part in result[table]))
    names.sort(key=_first_number)
    parts = [{part[key]: part for part in result[table]} for result in results]
    return [{"name": name, "cells": [_part(of.get(name)) for of in parts]} for name in names]


def _part(part: Table | None) -> str:
    if part is None or "median_ttft_ms" not in part:
        return NOTHING
    tail = part.get("p99_ttft_ms", part["median_ttft_ms"])
    right = "" if part["accuracy"] is None else f", {part['accuracy']:.0%} right"
    return f"{part['median_ttft_ms']:.0f} / {tail:.0f} ({part['completed']}{right})"


def _first_number(name: str) -> tuple[int, str]:
    digits = name.lstrip(">").partition("-")[0]
    return (int(digits), name) if digits.isdigit() else (0, name)


def _reasons(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    names = sorted({reason for result in results for reason in result["failed_by_reason"]})
    return [
        (name, [str(result["failed_by_reason"].get(name, 0)) for result in results])
        for name in names
    ]


def _with_values(rows: Iterable[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Return the rows in which at least one result has a value."""
    return [(title, cells) for title, cells in rows if set(cells) != {NOTHING}]


def _formatted(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)


def _shown(value: Any) -> str:
    if value is None or value == {}:
        return NOTHING
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:g}" for name, number in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
