"""The command `csps rates`: find Tetris' rate of improvement for each load (§5.1).

Prompts are planned one after the other, each on the times at which earlier prompts leave the
instances. This needs neither scheduler nor events, gives the same times as the simulator for
prefill alone, and is a hundred times as fast. The rate with the least mean TTFT wins. Among rates
that differ by less than noise, the lowest wins, because it serves a lull best.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from csps.configurator.model.scaling_information_base import FitRow, ScalingInformationBase
from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import load_cluster
from csps.loadgen.simulator.simulate import add_trace_options, read_simulable
from csps.loadgen.workloads.generate import Arrivals, Size, generate
from csps.loadgen.workloads.named import WORKLOADS, Workload, workload
from csps.loadgen.workloads.request import fit
from csps.loadgen.workloads.traces import at_rate, with_times
from csps.protocols.core.command_line import CommandParser
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import Location
from csps.services.scheduling.policies.tetris.cdsp import Cdsp, group_sizes
from csps.services.scheduling.policies.tetris.options import FIT, TetrisOptions

RATES = tuple(round(0.05 * step, 2) for step in range(1, 16))
"""The paper's range, 0.05 to 0.75."""
LOAD_STEP = 0.5
"""Requests per second from one record to the next."""
REQUESTS = 1000
OVERLOADED = 25.0
"""Mean TTFT, relative to that at the least load, at which the profile ends. All rates lose then."""
MOST_LOAD = 100.0
"""Load at which the profile ends if no load is too much, as with a trace of a few requests."""
NOISE = 0.01

Prompts = Sequence[tuple[int, int]]
"""(time of arrival, tokens), ascending."""
PromptSampler = Callable[[float], Prompts]
"""Function that returns prompts at so many requests per second."""


def profile(
    planner: Cdsp, sampler: PromptSampler, rates: Sequence[float] = RATES
) -> list[tuple[float, float]]:
    """Return (requests per second, best rate), from a light load to an overload."""
    records: list[tuple[float, float]] = []
    light: float | None = None
    while True:
        load = LOAD_STEP * (len(records) + 1)
        prompts = sampler(load)
        means = [statistics.fmean(ttfts_ns(planner, prompts, rate)) for rate in rates]
        best = min(means)
        chosen = next(
            rate for rate, mean in zip(rates, means, strict=True) if mean <= best * (1 + NOISE)
        )
        records.append((load, chosen))
        light = best if light is None else light
        if best > OVERLOADED * light or load >= MOST_LOAD:
            return records


def sampler_of(
    workload: Workload, cluster: ClusterModel, *, requests: int = REQUESTS, seed: int = 0
) -> PromptSampler:
    """Return a sampler of a workload's prompts, the same ones at all loads."""

    def draw(load: float) -> Prompts:
        fitted = generate(
            workload,
            requests,
            arrivals=Arrivals(rate=load),
            seed=seed,
            size=Size(positions=cluster.max_positions),
        )
        return [(request.arrival_ns, request.input_length) for request in fitted.requests]

    return draw


def planner_of(cluster: ClusterModel, min_chunk: int, *, chunked: bool = True) -> Cdsp:
    """Return a planner for the prefill instances of a cluster."""
    places = sorted(Location.parse(instance.location) for instance in cluster.prefill.instances)
    servers = [
        sum(1 for _ in members)
        for _, members in groupby(places, key=lambda instance: instance.server_id)
    ]
    costs = {
        size: cluster.table.step(size, cluster.prefill.tp) for size in group_sizes(len(places))
    }
    return Cdsp(servers, costs, min_chunk=min_chunk, chunked=chunked)


def ttfts_ns(planner: Cdsp, prompts: Prompts, rate: float) -> list[int]:
    """Return the time to the first token of each prompt."""
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


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    arguments = _arguments(argv)
    cluster = load_cluster(arguments.cluster)
    records = profile(planner_of(cluster, arguments.min_chunk), _sampler(arguments, cluster))
    print("improvement_rates:  # requests per second, and the best rate of improvement")
    for load, rate in records:
        print(f"  - [{load:g}, {rate:g}]")
    if arguments.sib is not None:
        _store(arguments.sib, records)
        print(f"stored in {arguments.sib}")


def _sampler(arguments: argparse.Namespace, cluster: ClusterModel) -> PromptSampler:
    if arguments.trace is None:
        chosen = workload(arguments.workload)
        return sampler_of(chosen, cluster, requests=arguments.requests, seed=arguments.seed)
    requests = with_times(read_simulable(arguments, cluster))[: arguments.requests]

    def draw(load: float) -> Prompts:
        fitted = fit(at_rate(requests, load), cluster.max_positions)
        return [(request.arrival_ns, request.input_length) for request in fitted.requests]

    return draw


def _store(path: Path, records: Sequence[tuple[float, float]]) -> None:
    base = ScalingInformationBase.read(path, None)
    if base is None:
        raise ConfigError(f"there is no {path}; run `csps profile steps` first")
    canonical = json.dumps(records).encode()
    digest = hashlib.sha256(canonical).hexdigest()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    with base:
        base.add(FitRow(name=FIT, digest=digest, canonical=canonical, date=date))


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="csps rates",
        description="Find the best rate of improvement of the policy tetris for every load, for a "
        "cluster and the prompts that it gets (docs/simulator.md).",
    )
    parser.add_argument(
        "--cluster", required=True, help="a cluster that comes with csps, or a file"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--workload", help=f"{', '.join(WORKLOADS)}, zipf:ALPHA")
    add_trace_options(parser, source)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="at each load (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and times (0)")
    parser.add_argument(
        "--min-chunk",
        type=int,
        default=TetrisOptions.min_chunk,
        help="tokens of the shortest chunk of a prompt that is cut (%(default)s)",
    )
    parser.add_argument(
        "--sib", type=Path, metavar="FILE", help="keep them in this scaling information base"
    )
    return parser.parse_args(argv)
