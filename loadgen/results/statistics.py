"""Latencies of many requests as a few numbers, under the field names of `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from csps.loadgen.results.record import RequestRecord

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
        seconds = [s for it in records if it.completed for s in LATENCIES[metric](it)]
        if seconds:
            fields |= _summary(metric, 1000 * np.array(seconds), percentiles)
    return fields


def _summary(metric: str, ms: np.ndarray, percentiles: Sequence[float]) -> dict[str, float]:
    summary = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std()}
    summary |= {f"p{p:g}": np.percentile(ms, p) for p in percentiles}
    return {f"{name}_{metric}_ms": round(float(value), 6) for name, value in summary.items()}


def normalized_fields(records: Sequence[RequestRecord]) -> dict[str, float]:
    """LoongServe's three: latency by tokens in and out, TTFT by tokens in, TPOT; means in ms."""
    done = [it for it in records if it.completed]
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
    places = np.searchsorted(bounds, [it.input_tokens for it in records])
    for place in sorted(set(places.tolist())):
        beyond = place == len(bounds)
        name = f">{edges[-1]}" if beyond else f"{edges[place] + 1}-{bounds[place]}"
        yield name, [it for it, its in zip(records, places, strict=True) if its == place]


def itl_quantiles_ms(records: Sequence[RequestRecord]) -> list[float]:
    """From the least gap to the greatest, evenly spaced in share; enough to draw a CDF."""
    seconds = [s for it in records if it.completed for s in it.itl_s]
    if not seconds:
        return []
    shares = np.linspace(0, 1, ITL_QUANTILES + 1)
    return [round(float(value), 4) for value in 1000 * np.quantile(seconds, shares)]


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Most requests that were under way at once."""
    events = [(it.sent_ns, 1) for it in records] + [(it.finished_ns, -1) for it in records]
    # Those that end come first: an interval does not contain its end.
    changes = [change for _, change in sorted(events)]
    return int(np.cumsum([0, *changes]).max())
