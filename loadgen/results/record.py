"""What became of one request: the same whether a server or the simulator answered it.

Service level objectives: bounds on a request's latencies.

Latencies of many requests as a few numbers, under the field names of `vllm bench serve`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from csps.loadgen.workloads.request import RequestObjective
from csps.protocols.core.errors import ConfigError, nearest

Status = Literal["completed", "failed", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """Times are nanoseconds from the start of the run; latencies count from `scheduled_ns`.

    A client that falls behind would otherwise hide what its requests would have waited
    (coordinated omission).
    """

    scheduled_ns: int
    """When it was to be sent."""
    sent_ns: int
    """When it was."""
    chunk_ns: tuple[int, ...]
    """When each piece of the answer came."""
    finished_ns: int
    """When its last token came, with or without text, or what ended it instead."""
    input_tokens: int
    output_tokens: int
    status: Status = "completed"
    """`failed`: the server refused it, broke off or took too long. `cancelled`: the client withdrew
    it, or never sent it because the turn before had failed."""
    error: str = ""
    """Why it has not completed."""
    correct: bool | None = None
    """Whether the answer was right; None where nobody knows."""
    objective: RequestObjective | None = None
    text: str = ""
    """Of the answer."""

    def __post_init__(self) -> None:
        assert self.status != "completed" or self.chunk_ns, "an answer comes in pieces"

    @property
    def completed(self) -> bool:
        """Whether the whole answer came; the latencies are of such requests only."""
        return self.status == "completed"

    @property
    def late_s(self) -> float:
        """From its scheduled start until it was sent."""
        return (self.sent_ns - self.scheduled_ns) / 1e9

    @property
    def ttft_s(self) -> float:
        """To the first piece of the answer."""
        return (self.chunk_ns[0] - self.scheduled_ns) / 1e9

    @property
    def e2el_s(self) -> float:
        """To its end."""
        return (self.finished_ns - self.scheduled_ns) / 1e9

    @property
    def tpot_s(self) -> float | None:
        """Per token after the first one; None of a single token."""
        if self.output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Between pieces."""
        return [(b - a) / 1e9 for a, b in zip(self.chunk_ns, self.chunk_ns[1:], strict=False)]


METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Milliseconds that a request's latencies may reach; None is no bound."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> Slo:
        """Of `ttft:2000 tpot:50`.

        Raises:
            ConfigError: a word is no metric with a number.
        """
        bounds: dict[str, float] = {}
        for word in words:
            name, _, milliseconds = word.partition(":")
            if name not in METRICS:
                raise ConfigError(f"unknown goodput metric '{name}'{nearest(name, METRICS)}")
            try:
                bounds[name] = float(milliseconds)
            except ValueError:
                raise ConfigError(f"goodput: expected {name}:MILLISECONDS, got '{word}'") from None
        return cls(**bounds)

    def __bool__(self) -> bool:
        return any(bound is not None for bound in vars(self).values())

    def met_by(self, record: RequestRecord) -> bool:
        """Whether the request completed within all bounds; a single token has a TPOT of 0."""
        if not record.completed:
            return False
        latencies = (record.ttft_s, record.tpot_s or 0.0, record.e2el_s)
        bounds = (self.ttft, self.tpot, self.e2el)
        return all(
            bound is None or 1000 * latency <= bound
            for latency, bound in zip(latencies, bounds, strict=True)
        )

    def attainment(self, records: Iterable[RequestRecord]) -> float:
        """Of all requests, those that failed or were cancelled included; 0 of none."""
        met = [self.met_by(record) for record in records]
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
"""Upper bounds of prompt lengths that are reported apart."""
ITL_QUANTILES = 200


def latency_fields(
    records: Sequence[RequestRecord],
    percentiles: Sequence[float] = DEFAULT_PERCENTILES,
    metrics: Iterable[str] = tuple(LATENCIES),
) -> dict[str, float]:
    """`mean_ttft_ms`, `p99_itl_ms` and so on, of completed requests; absent where there is none."""
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
    """LoongServe's three: latency by tokens in and out, TTFT by tokens in, TPOT; means in ms."""
    done = [record for record in records if record.completed]
    means = {
        "total": [it.e2el_s / (it.input_tokens + it.output_tokens) for it in done],
        "input": [it.ttft_s / it.input_tokens for it in done if it.input_tokens],
        "output": [it.tpot_s for it in done if it.tpot_s is not None],
    }
    return {
        f"mean_normalized_{name}_latency_ms": round(1000 * float(np.mean(values)), 6)
        for name, values in means.items()
        if values
    }


def by_input_length(
    records: Sequence[RequestRecord], bounds: Sequence[int] = DEFAULT_BUCKETS
) -> Iterator[tuple[str, list[RequestRecord]]]:
    """Requests in buckets of prompt lengths, empty ones left out: (`1025-4096`, requests)."""
    edges = [0, *bounds]
    places = np.searchsorted(bounds, [record.input_tokens for record in records])
    for place in sorted(set(places.tolist())):
        beyond = place == len(bounds)
        name = f">{edges[-1]}" if beyond else f"{edges[place] + 1}-{bounds[place]}"
        yield name, [it for it, its in zip(records, places, strict=True) if its == place]


def itl_quantiles_ms(records: Sequence[RequestRecord]) -> list[float]:
    """From the least gap to the greatest, evenly spaced in share; enough to draw a CDF."""
    seconds = [s for record in records if record.completed for s in record.itl_s]
    if not seconds:
        return []
    shares = np.linspace(0, 1, ITL_QUANTILES + 1)
    return [round(float(value), 4) for value in 1000 * np.quantile(seconds, shares)]


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Most requests that were under way at once."""
    events = [(record.sent_ns, 1) for record in records] + [
        (record.finished_ns, -1) for record in records
    ]
    # Those that end come first: an interval does not contain its end.
    changes = [change for _, change in sorted(events)]
    return int(np.cumsum([0, *changes]).max())
