"""Requests that `csps simulate` simulates in a minute of one core, with all costs on.

    python benchmarks/simulator_speed.py [--only NAME ...] [--profile] [--json FILE]

Each row is a policy on a cluster under a named load, at about two thirds of what the cluster
carries. Time is processor time of the simulation alone, so other work of the machine hardly
matters; the best of `--repeats` counts. `bound` is the requests a minute that the row aims at.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from dataclasses import dataclass, field
from typing import Any

import report

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import parse_cluster
from csps.loadgen.simulator.simulate import simulate
from csps.loadgen.workloads.generate import Arrivals, Size, generate
from csps.loadgen.workloads.named import workload

LLAMA3_8B = {
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "layers": 32,
    "intermediate": 14336,
}


def cluster(instances: int, *, elastic: bool) -> ClusterModel:
    """Return as many A100 as given that prefill, and as many that decode, or that do both."""
    per_server = min(8, instances)
    server = {"count": instances // per_server, "instances": per_server, "kv_slots": 400_000}
    permissions = [["prefill", "decode"]] if elastic else [["prefill"], ["decode"]]
    return parse_cluster(
        {
            "servers": [
                {**server, "rack": rack, "permissions": permission}
                for rack, permission in enumerate(permissions)
            ],
            "links": {
                "inside": {"gbps": 2400, "latency_us": 10},
                "between": {"gbps": 800, "latency_us": 20},
            },
            "latency": {
                "published": "tetris-llama3-8b-a100",
                "decode": {
                    1: [1.0e-2, 6.6e-8, 1.6e-4],
                    4: [1.15e-2, 1.65e-8, 4.0e-5],
                },
            },
            "model": LLAMA3_8B,
            "receiving_backends": 16,
            "quantum_ms": 50,
        },
        name=f"{'elastic' if elastic else 'pair'}-{instances}",
    )


@dataclass(frozen=True)
class Row:
    """A policy on a cluster, and the load that it gets."""

    policy: str
    instances: int
    rate: float
    bound: int
    elastic: bool = False
    workload: str = "tetris-short"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.policy}-{'elastic' if self.elastic else 'pair'}-{self.instances}"


CHUNKS = {"token_budget": 2048}
ROWS = [
    Row("csps", 4, 0.5, 50_000),
    Row("fixed_sp", 4, 0.5, 50_000),
    Row("tetris", 4, 0.5, 50_000),
    Row("context_parallel", 4, 0.5, 50_000),
    Row("chunked_prefill", 4, 0.5, 50_000, options=CHUNKS),
    Row("loongserve", 4, 0.5, 50_000, elastic=True),
    Row("context_parallel", 4, 0.5, 50_000, elastic=True),
    Row("chunked_prefill", 4, 0.5, 50_000, elastic=True, options=CHUNKS),
    Row("loongserve", 32, 4.0, 20_000, elastic=True),
    Row("tetris", 128, 30.0, 60_000),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [row.name for row in ROWS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = report.with_json_option(parser).parse_args()
    rows = [
        _measured(row, args.requests, args.repeats, profile=args.profile)
        for row in ROWS
        if row.name in args.only
    ]
    report.publish({"benchmark": "simulator_speed", "requests": args.requests}, rows, args.json)


def _measured(row: Row, requests: int, repeats: int, *, profile: bool) -> dict[str, Any]:
    model = cluster(row.instances, elastic=row.elastic)
    load = generate(
        workload(row.workload),
        requests,
        arrivals=Arrivals(rate=row.rate),
        seed=1,
        size=Size(positions=model.max_positions, longest_output=None),
    )
    seconds = []
    for _ in range(1 if profile else repeats):
        profiler = cProfile.Profile()
        if profile:
            profiler.enable()
        began = time.process_time()
        found = simulate(model, row.policy, row.options, load)
        seconds.append(time.process_time() - began)
        if profile:
            profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    queues = sorted(each.started_ns - each.arrival.at_ns for each in found.outcomes)
    return {
        "run": row.name,
        "requests_a_minute": round(60 * requests / min(seconds)),
        "bound": row.bound,
        "seconds": round(min(seconds), 3),
        "rounds": found.rounds,
        "tokens": found.decoded,
        "median_queue_s": round(queues[len(queues) // 2] / 1e9, 2),
    }


if __name__ == "__main__":
    main()
