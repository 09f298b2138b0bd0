"""Gain of replanning when steps do not take their predicted times, by simulation.

    python benchmarks/tetris_replan.py [--traces short medium long] [--shares 0 0.05 0.2 0.5]
                                       [--requests 400] [--seeds 0 1 2] [--json FILE]

The cluster is Tetris' for LLaMA3-8B (`tetris-16`) with its traces, each at one load, and answers of
one token. The scheduler predicts steps by the paper's Table 1; the ranks take other times. Either
each request's steps have a factor of their own (lognormal with a mean of one, the same with every
share), or the steps on one of two servers take half as long again. A share of 0 sends all chunks of
a plan at once and never replans.

The same arguments give the same numbers on every machine.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from dataclasses import dataclass, replace
from typing import Any

import report

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import load_cluster
from csps.loadgen.simulator.simulate import simulate
from csps.loadgen.workloads.generate import Arrivals, Size, generate
from csps.loadgen.workloads.named import workload
from csps.protocols.gang.step_messages import PrefillStep
from csps.services.scheduling.events.events import index_of

LOADS = {"short": 4.6, "medium": 3.3, "long": 2.0}
"""Loads in requests a second."""
RATE = 0.5
"""Rate of improvement, the best one at these loads."""


@dataclass(frozen=True, kw_only=True)
class Mispredicted(ClusterModel):
    """A cluster whose steps differ from its table."""

    sigma: float = 0.0
    """Spread of a request's factor."""
    slow_server: float = 1.0
    """Factor of steps in which the first server takes part."""

    def step_ns(self, step: PrefillStep) -> int:
        """Return how long a step takes."""
        (sequence,) = {chunk.sequence_id for chunk in step.chunks}
        # A mean of one, so that no more is to be computed than was predicted.
        factor = math.exp(random.Random(sequence).gauss(-(self.sigma**2) / 2, self.sigma))
        first = self.prefill.instances[0].server
        if any(
            self.prefill.instances[index_of(instance)].server == first for instance in step.group
        ):
            factor *= self.slow_server
        return round(super().step_ns(step) * factor)


MISTAKES: dict[str, dict[str, float]] = {
    "none": {},
    "requests, sigma 0.3": {"sigma": 0.3},
    "requests, sigma 0.6": {"sigma": 0.6},
    "one server 1.5 x": {"slow_server": 1.5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--traces", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.0, 0.05, 0.2, 0.5])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = report.with_json_option(parser).parse_args()
    rows = [
        _row(trace, mistake, share, args)
        for trace in args.traces
        for mistake in MISTAKES
        for share in args.slices
    ]
    about = {"benchmark": "tetris_replan", "requests": args.requests, "seeds": args.seeds}
    report.publish(about, rows, args.json)


def _row(trace: str, mistake: str, share: float, args: argparse.Namespace) -> dict[str, Any]:
    ttfts = [
        ttft
        for seed in args.seeds
        for ttft in ttfts_s(trace, mistake, share, requests=args.requests, seed=seed)
    ]
    return {
        "trace": trace,
        "mispredicted": mistake,
        "replan_share": share,
        "mean_s": round(statistics.fmean(ttfts), 3),
        "p50_s": round(statistics.median(ttfts), 3),
        "p99_s": round(statistics.quantiles(ttfts, n=100)[-1], 3),
    }


def ttfts_s(trace: str, mistake: str, share: float, *, requests: int, seed: int) -> list[float]:
    """Return the seconds to the first token of each request."""
    cluster = mispredicted(replace(load_cluster("tetris-16"), inside=None, between=None), mistake)
    fitted = generate(
        workload(f"tetris-{trace}"),
        requests,
        arrivals=Arrivals(rate=LOADS[trace]),
        seed=seed,
        size=Size(positions=cluster.max_positions, longest_output=1),
    )
    options = {"improvement_rate": RATE, "replan_share": share, "max_batch": 1 << 20}
    return [
        outcome.ttft_ns / 1e9 for outcome in simulate(cluster, "tetris", options, fitted).outcomes
    ]


def mispredicted(cluster: ClusterModel, mistake: str) -> Mispredicted:
    """Return the cluster with ranks that take other times."""
    fields = {
        dataclass_field: getattr(cluster, dataclass_field)
        for dataclass_field in ClusterModel.__dataclass_fields__
    }
    return Mispredicted(**fields, **MISTAKES[mistake])


if __name__ == "__main__":
    main()
