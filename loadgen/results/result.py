"""The result of a run: one JSON object, written by load tests, the simulator and benchmarks.

`schema.json` beside this file describes it, and `docs/load-testing.md` explains it. Field names are
those of `vllm bench serve --save-detailed` where it has the field.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

import csps
from csps.loadgen.results.record import (
    DEFAULT_BUCKETS,
    DEFAULT_PERCENTILES,
    LATENCIES,
    RequestRecord,
    attainment,
    by_input_length,
    itl_quantiles_ms,
    latency_fields,
    normalized_fields,
    peak_concurrency,
)
from csps.loadgen.workloads.request import Slo
from csps.protocols.core.errors import ConfigError

MAX_STEPS = 600
_STEPS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)


def series(records: Sequence[RequestRecord], duration_s: float) -> dict[str, Any]:
    """Return counts in equal time steps, for plots.

    The counts are requests that arrived, completed, failed and were under way, and chunks of
    answers. Requests under way are a mean over the step from each request's scheduled start, as in
    Little's law.
    """
    step_s = next((step_s for step_s in _STEPS_S if duration_s / step_s <= MAX_STEPS), _STEPS_S[-1])
    last_s = max([duration_s, *(record.finished_ns / 1e9 for record in records)])
    edges = step_s * np.arange(int(last_s / step_s) + 2)

    def counts(times_ns: Iterable[int]) -> list[int]:
        return [int(count) for count in np.histogram(np.array(list(times_ns)) / 1e9, edges)[0]]

    return {
        "step_s": step_s,
        "arrived": counts(record.scheduled_ns for record in records),
        "completed": counts(record.finished_ns for record in records if record.completed),
        "failed": counts(record.finished_ns for record in records if record.status == "failed"),
        "chunks": counts(ns for record in records for ns in record.chunk_ns),
        "running": [round(float(count), 3) for count in _running(records, edges) / step_s],
    }


def _running(records: Sequence[RequestRecord], edges: np.ndarray) -> np.ndarray:
    """Return the request-seconds in each step."""
    begins, ends = (
        np.sort(np.array([getattr(record, name) for record in records]) / 1e9)
        for name in ("scheduled_ns", "finished_ns")
    )
    running: np.ndarray = np.diff(_elapsed(begins, edges) - _elapsed(ends, edges))
    return running


def _elapsed(times: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return, for each edge, the sum of (edge - time) over all earlier times."""
    passed = np.searchsorted(times, edges)
    sums = np.concatenate([[0.0], np.cumsum(times)])
    elapsed: np.ndarray = passed * edges - sums[passed]
    return elapsed


SCHEMA = "csps.results"
SCHEMA_VERSION = 1
"""Version of the schema. It rises when a field changes its meaning or goes, not for new fields."""
LATE_S = 0.01
"""Seconds behind its schedule from which a request counts as late."""

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """Description of a run for later readers of its numbers."""

    kind: Literal["live", "simulated"]
    label: str
    """Name in a report."""
    model_id: str = ""
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    duration_s: float | None = None
    """Duration of the run. None: until the last request finished."""
    slo: Slo = field(default_factory=Slo)
    percentiles: Sequence[float] = DEFAULT_PERCENTILES
    metrics: Sequence[str] = tuple(LATENCIES)
    """Metrics whose percentiles are reported. Means of all metrics are reported."""
    length_buckets: Sequence[int] = DEFAULT_BUCKETS
    detailed: bool = False
    """True if every gap and every text are stored, besides the columns of requests."""
    facts: dict[str, Any] = field(default_factory=dict)
    """More fields: workload, server, machine, the user's notes."""


def summarize(records: Sequence[RequestRecord], run: RunDescription) -> Result:
    """Return the result of a run.

    Rates are over the whole duration. Shares (within SLO, right answers) are of all requests that
    could count, so that failing fast does not improve them.

    Args:
        records: records in order of scheduled start.
        run: the description of the run.
    """
    last_s = max((record.finished_ns for record in records), default=0) / 1e9
    duration_s = last_s if run.duration_s is None else run.duration_s
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "csps_version": csps.__version__,
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "kind": run.kind,
        "label": run.label,
        "model_id": run.model_id,
        "num_prompts": len(records),
        "request_rate": _finite(run.request_rate),
        "burstiness": _finite(run.burstiness),
        "max_concurrency": run.max_concurrency,
        **run.facts,
        "duration": round(duration_s, 6),
        **_counts(records),
        **_rates(records, run.slo, duration_s),
        **latency_fields(records, run.percentiles, run.metrics),
        **normalized_fields(records),
        "by_input_length": [
            {"input_length": name, **_part(part, run)}
            for name, part in by_input_length(records, run.length_buckets)
        ],
        "by_objective": [
            {"objective": label, **_part(part, run), **_ttft_bound(part)}
            for label, part in _by_objective(records).items()
        ],
        "series": series(records, duration_s),
        "itl_quantiles_ms": itl_quantiles_ms(records),
        **_columns(records),
        **(_details(records) if run.detailed else {}),
    }


def _counts(records: Sequence[RequestRecord]) -> Result:
    statuses = Counter(record.status for record in records)
    done = [record for record in records if record.completed]
    checked = [record.correct for record in done if record.correct is not None]
    return {
        "completed": statuses["completed"],
        "failed": statuses["failed"],
        "cancelled": statuses["cancelled"],
        "late": sum(record.late_s > LATE_S for record in records),
        "failed_by_reason": _reasons(records),
        "total_input": sum(record.input_tokens for record in done),
        "total_output": sum(record.output_tokens for record in done),
        "checked": len(checked),
        "accuracy": round(sum(checked) / len(checked), 6) if checked else None,
    }


def _reasons(records: Sequence[RequestRecord]) -> dict[str, int]:
    """Return the errors by reason, without the text that servers add to single requests."""
    return dict(
        Counter(record.error.partition(":")[0] for record in records if not record.completed)
    )


def _rates(records: Sequence[RequestRecord], slo: Slo, duration_s: float) -> Result:
    done = [record for record in records if record.completed]
    tokens_in, tokens_out = (
        sum(getattr(record, name) for record in done) for name in ("input_tokens", "output_tokens")
    )
    rates = {
        "request_throughput": len(done),
        "output_throughput": tokens_out,
        "total_token_throughput": tokens_in + tokens_out,
    }
    judged = _judged(records, slo)
    if judged:
        rates["request_goodput"] = sum(record.meets(slo) for record in records)
    per_second = 1 / duration_s if duration_s > 0 else 0.0
    return {
        **{name: round(count * per_second, 6) for name, count in rates.items()},
        "slo": {name: bound for name, bound in vars(slo).items() if bound is not None},
        "slo_attainment": round(attainment(records, slo), 6) if judged else None,
        "max_concurrent_requests": peak_concurrency(records),
    }


def _judged(records: Sequence[RequestRecord], slo: Slo) -> bool:
    """Return whether any request has bounds, of the run or of its own."""
    return bool(slo) or any(record.slo for record in records)


def _part(records: Sequence[RequestRecord], run: RunDescription) -> Result:
    """Return the statistics of some of the requests."""
    counts = _counts(records)
    return {
        "num_prompts": len(records),
        **{name: counts[name] for name in ("completed", "failed", "cancelled", "accuracy")},
        "slo_attainment": round(attainment(records, run.slo), 6)
        if _judged(records, run.slo)
        else None,
        **latency_fields(records, run.percentiles, run.metrics),
    }


def _by_objective(records: Sequence[RequestRecord]) -> dict[str, list[RequestRecord]]:
    parts: dict[str, list[RequestRecord]] = {}
    for record in records:
        if record.objective is not None:
            parts.setdefault(record.objective.label, []).append(record)
    return parts


def _ttft_bound(records: Sequence[RequestRecord]) -> Result:
    """Return the share of requests that met their own bound on TTFT."""
    objective = records[0].objective
    assert objective is not None
    bound = Slo(ttft=objective.max_ttft_ms)
    unbound = [replace(record, slo=None) for record in records]
    return {"ttft_bound_met": round(attainment(unbound, bound), 6) if bound else None}


def _columns(records: Sequence[RequestRecord]) -> Result:
    """Return the columns with a value for each request: seconds, as in vLLM, or null."""

    def seconds(name: str) -> list[float | None]:
        values = [getattr(record, name) if record.completed else None for record in records]
        return [None if value is None else round(value, 7) for value in values]

    return {
        "start_times": [round(record.scheduled_ns / 1e9, 7) for record in records],
        "lateness": [round(record.late_s, 7) for record in records],
        "ttfts": seconds("ttft_s"),
        "tpots": seconds("tpot_s"),
        "e2els": seconds("e2el_s"),
        "input_lens": [record.input_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "statuses": [record.status for record in records],
        "errors": [record.error for record in records],
        "correct": [record.correct for record in records],
    }


def _details(records: Sequence[RequestRecord]) -> Result:
    return {
        "itls": [[round(gap, 7) for gap in record.itl_s] for record in records],
        "generated_texts": [record.text for record in records],
    }


def _finite(rate: float) -> float | str:
    """Return a rate as JSON, which has no infinity; vLLM writes it as a word."""
    return "inf" if math.isinf(rate) else rate


def write_result(result: Result, path: Path) -> None:
    """Write a result as one line of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, allow_nan=False) + "\n")


def read_result(path: Path) -> Result:
    """Read a result that `write_result` wrote.

    Raises:
        ConfigError: the file is no result, or of a later release.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ConfigError(f'{path} is no result of csps: it has no "schema": "{SCHEMA}"')
    version = data.get("schema_version")
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        reads = f"this release reads up to {SCHEMA_VERSION}"
        raise ConfigError(f"{path} has schema version {version}; {reads}")
    return data
