"""Records of single requests, and latency statistics.

Records are the same for a server and for the simulator. Statistics have the field names of `vllm
bench serve`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from csps.loadgen.workloads.request import RequestObjective, Slo

Status = Literal["completed", "failed", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """Record of one request. Times are nanoseconds from the start of the run.

    Latencies count from `scheduled_ns`. Otherwise a client that falls behind would hide the time
    that its requests would have waited (coordinated omission).
    """

    scheduled_ns: int
    """Time at which the request was due."""
    sent_ns: int
    """Time at which it was sent."""
    chunk_ns: tuple[int, ...]
    """Arrival time of each chunk of the answer."""
    finished_ns: int
    """Time of the last token, with or without text, or of the error."""
    input_tokens: int
    output_tokens: int
    status: Status = "completed"
    """`failed`: the server rejected it, broke off or took too long. `cancelled`: the client
    cancelled it, or never sent it because the previous turn had failed.
    """
    error: str = ""
    """Reason why it has not completed."""
    correct: bool | None = None
    """True if the answer was right. None: unknown."""
    objective: RequestObjective | None = None
    slo: Slo | None = None
    """The request's own bounds. None: those of the run."""
    text: str = ""
    """Text of the answer."""

    def __post_init__(self) -> None:
        assert self.status != "completed" or self.chunk_ns, (
            "a completed request needs at least one chunk"
        )

    @property
    def completed(self) -> bool:
        """Return whether the whole answer came. Only such requests have latencies."""
        return self.status == "completed"

    @property
    def late_s(self) -> float:
        """Return the time from the scheduled start until it was sent."""
        return (self.sent_ns - self.scheduled_ns) / 1e9

    @property
    def ttft_s(self) -> float:
        """Return the time to the first chunk of the answer."""
        return (self.chunk_ns[0] - self.scheduled_ns) / 1e9

    @property
    def e2el_s(self) -> float:
        """Return the time to the end of the answer."""
        return (self.finished_ns - self.scheduled_ns) / 1e9

    @property
    def tpot_s(self) -> float | None:
        """Return the time per token after the first one, or None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Return the gaps between chunks."""
        return [(b - a) / 1e9 for a, b in zip(self.chunk_ns, self.chunk_ns[1:], strict=False)]

    def meets(self, slo: Slo) -> bool:
        """Return whether the request completed within its own bounds, or within `slo` if it has
        none; a single token has a TPOT of 0.
        """
        if not self.completed:
            return False
        latencies = (self.ttft_s, self.tpot_s or 0.0, self.e2el_s)
        slo = slo if self.slo is None else self.slo
        bounds = (slo.ttft, slo.tpot, slo.e2el)
        return all(
            bound is None or 1000 * latency <= bound
            for latency, bound in zip(latencies, bounds, strict=True)
        )


def attainment(records: Sequence[RequestRecord], slo: Slo) -> float:
    """Return the share of requests within their bounds; failed and cancelled ones count. 0 for
    none.

    Args:
        slo: bounds of requests that bring none of their own.
    """
    met = [record.meets(slo) for record in records]
    return sum(met) / len(met) if met else 0.0


LATENCIES: dict[str, Callable[[RequestRecord], Iterable[float]]] = {
    "ttft": lambda record: [record.ttft_s],
    "tpot": lambda record: [] if record.tpot_s is None else [record.tpot_s],
    "itl": lambda record: record.itl_s,
    "e2el": lambda record: [record.e2el_s],
}
"""Seconds that a completed request adds to each distribution."""
DEFAULT_PERCENTILES = (50.0, 90.0, 95.0, 99.0)
DEFAULT_BUCKETS = (256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
"""Upper bounds of the prompt lengths that are reported separately."""
ITL_QUANTILES = 200


def latency_fields(
    records: Sequence[RequestRecord],
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
    metrics: Iterable[str] = tuple(LATENCIES),
) -> dict[str, float]:
    """Return `mean_ttft_ms`, `p99_itl_ms` and so on, over completed requests; absent without
    data.
    """
    fields: dict[str, float] = {}
    for metric in metrics:
        seconds = [s for record in records if record.completed for s in LATENCIES[metric](record)]
        if seconds:
            fields |= _summary(metric, 1000 * np.array(seconds), percentiles)
    return fields


def _summary(metric: str, ms: np.ndarray, percentiles: Sequence[float]) -> dict[str, float]:
    summary = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std()}
    summary |= {f"p{p:g}": np.percentile(ms, p) for p in percentiles}
    return {f"{name}_{metric}_ms": round(float(value), 6) for name, value in summary.items()}


def normalized_fields(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Return means in ms of LoongServe's latencies: total by tokens in and out, TTFT by tokens in,
    and TPOT.
    """
    done = [record for record in records if record.completed]
    means = {
        "total": [record.e2el_s / (record.input_tokens + record.output_tokens) for record in done],
        "input": [record.ttft_s / record.input_tokens for record in done if record.input_tokens],
        "output": [record.tpot_s for record in done if record.tpot_s is not None],
    }
    return {
        f"mean_normalized_{name}_latency_ms": round(1000 * float(np.mean(values)), 6)
        for name, values in means.items()
        if values
    }


def by_input_length(
    records: Sequence[RequestRecord], bounds: Sequence[int] = DEFAULT_BUCKETS
) -> Iterator[tuple[str, list[RequestRecord]]]:
    """Yield requests by range of prompt lengths, without empty ranges: (`1025-4096`, requests)."""
    edges = [0, *bounds]
    buckets = np.searchsorted(bounds, [record.input_tokens for record in records])
    for bucket in sorted(set(buckets.tolist())):
        beyond = bucket == len(bounds)
        name = f">{edges[-1]}" if beyond else f"{edges[bucket] + 1}-{bounds[bucket]}"
        yield name, [record for record, own in zip(records, buckets, strict=True) if own == bucket]


def itl_quantiles_ms(records: Sequence[RequestRecord]) -> list[float]:
    """Return quantiles of the gaps, evenly spaced in share, for a CDF."""
    seconds = [s for record in records if record.completed for s in record.itl_s]
    if not seconds:
        return []
    shares = np.linspace(0, 1, ITL_QUANTILES + 1)
    return [round(float(value), 4) for value in 1000 * np.quantile(seconds, shares)]


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Return the most requests that were under way at once."""
    events = [(record.sent_ns, 1) for record in records] + [
        (record.finished_ns, -1) for record in records
    ]
    # Ends sort before starts, because an interval does not contain its end.
    changes = [change for _, change in sorted(events)]
    return int(np.cumsum([0, *changes]).max())
