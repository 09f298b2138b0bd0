"""The highest load that policies sustain on Tetris' three traces, by simulation.

    python benchmarks/tetris_load.py [--traces short medium long] [--policies ...] [--sigmas 0.8]
                                     [--requests 1500] [--seed 0] [--json FILE]

The cluster is Tetris' for LLaMA3-8B with the fitted times of its Table 1 (`tetris-16`). Prompts are
lognormal, truncated to the lengths that the paper states and with its means; only the spread is
assumed, and may be varied. Answers have one token, so that only prefill is compared. A load is
sustained if the median TTFT is at most 25 times that of a light load, as the paper normalizes. The
light load is 0.1 requests a second, with the policy's own median. Loads are found by bisection, to
1 %.

The same arguments give the same numbers on every machine.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import report

from csps.loadgen.simulator.cluster_file import load_cluster
from csps.loadgen.simulator.rates_command import planner_of, profile, sampler_of
from csps.loadgen.simulator.simulate import simulate
from csps.loadgen.workloads.generate import Arrivals, Size, generate
from csps.loadgen.workloads.named import Constant, TruncatedLognormal, Workload, independent
from csps.services.scheduling.policies.tetris.options import TetrisOptions

K = 1024
LIGHT = 0.1
SLO = 25
TRACES = {"short": (23.6, 4, 95), "medium": (32.8, 8, 142), "long": (50.1, 16, 190)}
"""Mean, shortest and longest prompt, in units of 1,024 tokens."""
UNLIMITED = {"max_batch": 1 << 20}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "fixed_sp 8": ("fixed_sp", {"sp": 8}),
    "fixed_sp 16": ("fixed_sp", {"sp": 16}),
    "loongserve-disagg": ("tetris", {"improvement_rate": 0, "chunked": False}),
    "single-chunk": ("tetris", {"chunked": False}),
    "tetris": ("tetris", {}),
}
CLUSTER = load_cluster("tetris-16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--sigmas", nargs="+", type=float, default=[0.8])
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    args = report.with_json_option(parser).parse_args()
    rows = [
        row for trace in args.traces for sigma in args.sigmas for row in _rows(trace, sigma, args)
    ]
    report.publish(
        {"benchmark": "tetris_load", "requests": args.requests, "seed": args.seed}, rows, args.json
    )


def _rows(trace: str, sigma: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    prompts = workload_of(trace, sigma)
    # Other requests than those that the rates are tried on.
    sampler = sampler_of(prompts, CLUSTER, seed=args.seed + 1000)
    rates = profile(planner_of(CLUSTER, TetrisOptions.min_chunk), sampler)
    rows: list[dict[str, Any]] = []
    for name in args.policies:
        policy, options = POLICIES[name]
        if policy == "tetris" and "improvement_rate" not in options:
            options = {**options, "improvement_rates": rates}
        found = highest_load(prompts, policy, options, args.requests, args.seed)
        rows.append({"trace": trace, "sigma": sigma, "policy": name, **found})
    eight = next((row["max_load"] for row in rows if row["policy"] == "fixed_sp 8"), None)
    return [{**row, "over_sp8": row["max_load"] / eight if eight else None} for row in rows]


def workload_of(trace: str, sigma: float) -> Workload:
    """Return the prompts of a trace, with answers of one token."""
    mean, shortest, longest = TRACES[trace]
    lengths = TruncatedLognormal.with_mean(
        mean=mean * K, sigma=sigma, shortest=shortest * K, longest=longest * K
    )
    return independent(f"tetris-{trace}", lengths, Constant(longest=1), "Tetris")


def highest_load(
    prompts: Workload, policy: str, options: Mapping[str, Any], requests: int, seed: int
) -> dict[str, float]:
    """Return the highest sustained load, and medians at it and at a light one."""

    def p50(rate: float) -> float:
        fitted = generate(
            prompts,
            requests,
            arrivals=Arrivals(rate=rate),
            seed=seed,
            size=Size(positions=CLUSTER.max_positions),
        )
        run = simulate(CLUSTER, policy, {**UNLIMITED, **options}, fitted)
        return statistics.median(outcome.ttft_ns for outcome in run.outcomes) / 1e9

    light = p50(LIGHT)
    rate = bisected(lambda result: p50(result) <= SLO * light)
    return {"max_load": rate, "light_p50_s": light, "p50_s": p50(rate)}


def bisected(sustained: Callable[[float], bool], tolerance: float = 0.01) -> float:
    """Return the highest sustained rate, to a relative tolerance."""
    low, high = 0.5, 1.0
    while sustained(high):
        low, high = high, high * 1.5
    while high / low > 1 + tolerance:
        middle = (low * high) ** 0.5
        if sustained(middle):
            low = middle
        else:
            high = middle
    return low


if __name__ == "__main__":
    main()
