"""Which rate of improvement is best at which load: Tetris' offline profile (§5.1).

Prompts are planned one after the other, each on the times at which the ones before it leave the
instances, which needs neither scheduler nor events: what the simulator finds for prefill alone, a
hundred times as fast. The rate with the least mean time to the first token wins; of rates that
differ by less than noise does, the lowest, which serves a lull best.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import groupby

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.workloads.arrivals import Arrivals
from csps.loadgen.workloads.generate import Size, generate
from csps.loadgen.workloads.named import Workload
from csps.protocols.topology import Location
from csps.services.scheduling.policies.tetris.cdsp import Cdsp, group_sizes

RATES = tuple(round(0.05 * step, 2) for step in range(1, 16))
"""The paper's range, 0.05 to 0.75."""
LOAD_STEP = 0.5
"""Requests per second from one record to the next."""
REQUESTS = 1000
OVERLOADED = 25.0
"""Mean time to the first token, in multiples of that at the least load, beyond which there is no
need to look: all rates lose then."""
MOST_LOAD = 100.0
"""Where to stop if nothing is too much, as of a trace of a few requests."""
NOISE = 0.01

Prompts = Sequence[tuple[int, int]]
"""(time of arrival, tokens), ascending."""
Drawn = Callable[[float], Prompts]
"""Prompts at so many requests per second."""


def profile(
    planner: Cdsp, drawn: Drawn, rates: Sequence[float] = RATES
) -> list[tuple[float, float]]:
    """(requests per second, best rate), from a light load to one that is too much."""
    records: list[tuple[float, float]] = []
    light: float | None = None
    while True:
        load = LOAD_STEP * (len(records) + 1)
        prompts = drawn(load)
        means = [statistics.fmean(ttfts_ns(planner, prompts, rate)) for rate in rates]
        best = min(means)
        chosen = next(
            rate for rate, mean in zip(rates, means, strict=True) if mean <= best * (1 + NOISE)
        )
        records.append((load, chosen))
        light = best if light is None else light
        if best > OVERLOADED * light or load >= MOST_LOAD:
            return records


def drawn_from(
    workload: Workload, cluster: ClusterModel, *, requests: int = REQUESTS, seed: int = 0
) -> Drawn:
    """Prompts of a workload, the same at all loads."""

    def draw(load: float) -> Prompts:
        fitted = generate(
            workload,
            requests,
            arrivals=Arrivals(rate=load),
            seed=seed,
            size=Size(positions=cluster.max_positions),
        )
        return [(it.arrival_ns, it.input_length) for it in fitted.requests]

    return draw


def planner_of(cluster: ClusterModel, min_chunk: int, *, chunked: bool = True) -> Cdsp:
    """For the prefill instances of a cluster."""
    places = sorted(Location.parse(it.location) for it in cluster.prefill.instances)
    servers = [sum(1 for _ in it) for _, it in groupby(places, key=lambda it: it.server_id)]
    costs = {
        size: cluster.table.step(size, cluster.prefill.tp) for size in group_sizes(len(places))
    }
    return Cdsp(servers, costs, min_chunk=min_chunk, chunked=chunked)


def ttfts_ns(planner: Cdsp, prompts: Prompts, rate: float) -> list[int]:
    """Time to the first token of each prompt."""
    free_ns = [0] * planner.instances
    ttfts = []
    for at_ns, tokens in prompts:
        waits = [free - at_ns if free > at_ns else 0 for free in free_ns]
        chunks = planner.plan(tokens, waits, rate)
        for chunk in chunks:
            for member in chunk.members:
                free_ns[member] = at_ns + chunk.end_ns
        ttfts.append(chunks[-1].end_ns)
    return ttfts
