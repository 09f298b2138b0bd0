"""Which rate of improvement is best at which load: Tetris' offline profile (§5.1).

Prompts of a workload are planned one after the other, each on the times at which the ones before it
leave the instances, which needs neither scheduler nor events: what the simulator finds for prefill
alone, a hundred times as fast. The rate with the least mean time to the first token wins; of rates
that differ by less than noise does, the lowest, which serves a lull best.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.workloads.arrivals import Arrivals
from csps.loadgen.workloads.generate import Size, generate
from csps.loadgen.workloads.named import Workload
from csps.protocols.topology import Location
from csps.services.scheduling.policies.tetris.cdsp import Cdsp

RATES = tuple(round(0.05 * step, 2) for step in range(1, 16))
"""The paper's range, 0.05 to 0.75."""
LOAD_STEP = 0.5
"""Requests per second from one record to the next."""
REQUESTS = 1000
OVERLOADED = 25.0
"""Mean time to the first token, in multiples of that at the least load, beyond which there is no
need to look: all rates lose then."""


def profile(
    cluster: ClusterModel,
    prompts: Workload,
    *,
    requests: int = REQUESTS,
    seed: int = 0,
    min_chunk: int = 512,
    rates: Sequence[float] = RATES,
) -> list[tuple[float, float]]:
    """(requests per second, best rate), from the least load to one that is too much."""
    planner = planner_of(cluster, min_chunk)
    records: list[tuple[float, float]] = []
    load, least = LOAD_STEP, None
    while True:
        drawn = generate(
            prompts,
            requests,
            arrivals=Arrivals(rate=load),
            seed=seed,
            size=Size(positions=cluster.max_positions),
        ).requests
        arrivals = [(it.arrival_ns, it.input_length) for it in drawn]
        means = [mean_ttft_ns(planner, arrivals, rate) for rate in rates]
        best = min(means)
        chosen = next(rate for rate, mean in zip(rates, means, strict=True) if mean <= best * 1.01)
        records.append((load, chosen))
        least = best if least is None else least
        if best > OVERLOADED * least:
            return records
        load += LOAD_STEP


def planner_of(cluster: ClusterModel, min_chunk: int, *, chunked: bool = True) -> Cdsp:
    """For the prefill instances of a cluster."""
    places = sorted(Location.parse(it.location) for it in cluster.prefill.instances)
    servers = [sum(1 for _ in it) for _, it in groupby(places, key=lambda it: it.server_id)]
    count = len(places)
    sizes = sorted({1 << exponent for exponent in range(count.bit_length())} | {count})
    costs = {size: cluster.table.step(size, cluster.prefill.tp) for size in sizes}
    return Cdsp(servers, costs, min_chunk=min_chunk, chunked=chunked)


def mean_ttft_ns(planner: Cdsp, arrivals: Sequence[tuple[int, int]], rate: float) -> float:
    """Mean time to the first token.

    Args:
        arrivals: (time, prompt tokens), ascending.
    """
    return statistics.fmean(ttfts_ns(planner, arrivals, rate))


def ttfts_ns(planner: Cdsp, arrivals: Sequence[tuple[int, int]], rate: float) -> list[int]:
    """Time to the first token of each prompt."""
    free_ns = [0] * planner.instances
    ttfts = []
    for at_ns, tokens in arrivals:
        waits = [free - at_ns if free > at_ns else 0 for free in free_ns]
        chunks = planner.plan(tokens, waits, rate)
        for chunk in chunks:
            for member in chunk.members:
                free_ns[member] = at_ns + chunk.end_ns
        ttfts.append(chunks[-1].end_ns)
    return ttfts
