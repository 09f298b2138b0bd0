"""LoongServe's Figs. 10 and 12 in the simulator: the highest load of each system.

    python benchmarks/loongserve_load.py fig12 --json benchmarks/results/loongserve-fig12.json
    python benchmarks/loongserve_load.py fig10 --json benchmarks/results/loongserve-fig10.json

Fig. 12: the highest rate at which 90 % of the requests meet two bounds. TTFT is at most 25 times
that alone on SP4 TP2, or 15 s if that is more; every further token takes at most 50 ms. Fig. 10:
the highest rate within bounds on mean latency per token, total, input and output. Requests of all
seeds count together: with heavy tails, a single run of a hundred seconds says little. Time is
simulated, so the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from csps.configurator.costs.latency_tables import LOONGSERVE_LWM_7B_A800
from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import load_cluster
from csps.loadgen.simulator.requests import RequestOutcome
from csps.loadgen.simulator.simulate import simulate
from csps.loadgen.workloads.generate import Arrivals, Size, generate
from csps.loadgen.workloads.named import workload


class System(NamedTuple):
    """A serving system."""

    name: str
    cluster: str
    policy: str
    options: dict[str, object]


FEWEST = 200
"""Fewest requests of a run."""
MAX_BATCH = 4096
"""Batch limit that does not bind, because slots limit a batch in the paper's systems."""
TIPPING_TOKENS = 2500
"""Tipping point of prefill batches; the released scripts bound a batch by 5 s of predicted time
instead. Far from this value LoongServe carries less: long batches delay decoding, and short ones
are too many. The static systems hardly change.
"""
ELASTIC = System(
    "LoongServe",
    "loongserve-8",
    "loongserve",
    {
        "max_batch": MAX_BATCH,
        "max_num_ooe": 64,
        "tipping_tokens": TIPPING_TOKENS,
    },
)

STAYING = System(
    "without moves",
    "loongserve-8",
    "loongserve",
    {**ELASTIC.options, "migrate": False},
)
"""LoongServe without moves of decoded KV."""


def _static(name: str, cluster: str, dop: int) -> System:
    options = {"max_batch": MAX_BATCH, "tipping_tokens": TIPPING_TOKENS, "static_dop": dop}
    return System(name, cluster, "loongserve", options)


STATIC = (
    _static("TP8", "loongserve-8-tp8", 1),
    _static("SP4 TP2", "loongserve-8", 4),
    _static("TP2 x 4", "loongserve-8", 1),
)
CHUNKED = System(
    "SplitFuse TP8", "loongserve-8-tp8", "chunked_prefill", {"max_batch": 512, "token_budget": 2048}
)
PAPER_12 = {
    "LoongServe": (1.122, 2.925, 8.757),
    "without moves": (None, None, None),
    "TP8": (0.405, 1.355, 5.723),
    "SP4 TP2": (0.481, 1.478, 5.447),
    "TP2 x 4": (0.360, 1.289, 5.000),
}
"""Published requests/s by Zipf's alpha 1.0, 1.2, 1.4."""
ALPHAS = (1.0, 1.2, 1.4)
TPOT_S, TTFT_S, TIMES = 0.05, 15.0, 25
ALONE = LOONGSERVE_LWM_7B_A800.step(4, 2)

PAPER_10 = {
    "sharegpt": {"LoongServe": 24.866, "TP8": 6.224, "SplitFuse TP8": 22.073},
    "l-eval": {"LoongServe": 2.249, "TP8": 0.753, "SplitFuse TP8": 1.225},
    "lv-eval": {"LoongServe": 0.201, "TP8": 0.024, "SplitFuse TP8": 0.019},
    "mixed": {"LoongServe": 0.516, "TP8": 0.114, "SplitFuse TP8": 0.083},
}
"""Published requests/s that meet all three bounds."""
BOUNDS_MS = {
    "sharegpt": (92, 20, 320),
    "l-eval": (3.5, 1.8, 320),
    "lv-eval": (2.5, 2.5, 365),
    "mixed": (70, 90, 360),
}
"""Bounds on the mean latency per token of prompt and answer, the TTFT per token of the prompt, and
the time per token of the answer.
"""
BUDGETS = {"sharegpt": 256, "l-eval": 2048, "lv-eval": 16384, "mixed": 2048}
OOE = {"sharegpt": 1, "l-eval": 8, "lv-eval": 8, "mixed": 4}


def _tpot_s(outcome: RequestOutcome) -> float:
    generated_tokens = outcome.arrival.output_tokens
    return (outcome.ended_ns - outcome.first_token_ns) / max(1, generated_tokens - 1) / 1e9


def in_time(outcome: RequestOutcome) -> bool:
    """Return whether one request meets Fig. 12's bounds."""
    alone_s = ALONE.predict_ns(outcome.arrival.prompt_tokens) / 1e9
    ttft_s = outcome.ttft_ns / 1e9
    return ttft_s <= max(TIMES * alone_s, TTFT_S) and _tpot_s(outcome) <= TPOT_S


def goodput(outcomes: Sequence[RequestOutcome]) -> bool:
    """Return whether nine requests of ten are in time."""
    return sum(map(in_time, outcomes)) >= 0.9 * len(outcomes)


def means_ms(outcomes: Sequence[RequestOutcome]) -> tuple[float, float, float]:
    """Return Fig. 10's metrics."""
    total = first = output = 0.0
    for outcome in outcomes:
        prompt, answer = outcome.arrival.prompt_tokens, outcome.arrival.output_tokens
        total += (outcome.ended_ns - outcome.due_ns) / 1e6 / (prompt + answer)
        first += outcome.ttft_ns / 1e6 / prompt
        output += _tpot_s(outcome) * 1e3
    count = len(outcomes)
    return total / count, first / count, output / count


def within(name: str) -> Callable[[Sequence[RequestOutcome]], bool]:
    """Return whether Fig. 10's bounds of a workload are met."""
    return lambda outcomes: all(
        found <= bound for found, bound in zip(means_ms(outcomes), BOUNDS_MS[name], strict=True)
    )


def carries(
    system: System,
    name: str,
    rate: float,
    meets: Callable[[Sequence[RequestOutcome]], bool],
    seconds: float,
    seeds: Sequence[int],
) -> bool:
    """Return whether a system meets the bounds at a rate, over all seeds."""
    cluster: ClusterModel = load_cluster(system.cluster)
    requests = max(FEWEST, round(rate * seconds))
    served: list[RequestOutcome] = []
    for seed in seeds:
        fitted = generate(
            workload(name),
            requests,
            arrivals=Arrivals(rate=rate),
            seed=seed,
            size=Size(positions=cluster.max_positions, longest_output=None),
        )
        found = simulate(cluster, system.policy, dict(system.options), fitted)
        if any(outcome.error for outcome in found.outcomes):
            return False
        served += found.outcomes
    return meets(served)


def highest(carries_rate: Callable[[float], bool], guess: float, steps: int) -> float:
    """Return the highest rate that a system carries, by bisection in ratios from a guess."""
    low, high = 0.0, 0.0
    rate = guess
    for _ in range(8):
        if carries_rate(rate):
            low, rate = rate, rate * 1.6
        else:
            high, rate = rate, rate / 1.6
        if low and high:
            break
    if not (low and high):
        return low
    for _ in range(steps):
        middle = (low * high) ** 0.5
        if carries_rate(middle):
            low = middle
        else:
            high = middle
    return low


def main() -> None:
    """Print a line for each system and workload, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figure", choices=("fig10", "fig12"))
    parser.add_argument("--seconds", type=float, default=100, help="of arrivals, at least")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=3, help="of bisection after it is bracketed")
    parser.add_argument("--only", nargs="+", default=[], help="systems")
    parser.add_argument("--workloads", nargs="+", default=[], help="of the figure's")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.figure == "fig12":
        tasks = [
            (system, f"zipf:{alpha}", goodput, PAPER_12[system.name][index])
            for index, alpha in enumerate(ALPHAS)
            for system in (ELASTIC, STAYING, *STATIC)
        ]
    else:
        tasks = [
            (_tuned(system, name), name, within(name), PAPER_10[name][system.name])
            for name in PAPER_10
            for system in (ELASTIC, STATIC[0], CHUNKED)
        ]
    rows = []
    for system, name, meets, paper in tasks:
        if arguments.only and system.name not in arguments.only:
            continue
        if arguments.workloads and name not in arguments.workloads:
            continue
        rate = highest(
            lambda rate: carries(system, name, rate, meets, arguments.seconds, arguments.seeds),  # noqa: B023
            paper or 1.0,
            arguments.steps,
        )
        rows.append(
            {"workload": name, "system": system.name, "rate": round(rate, 4), "paper": paper}
        )
        published = "" if paper is None else f"  paper {paper:7.3f}"
        print(f"{name:10} {system.name:14} {rate:8.3f}{published}", flush=True)
    if arguments.json is not None:
        document = {
            "figure": arguments.figure,
            "seconds": arguments.seconds,
            "seeds": arguments.seeds,
            "bisections": arguments.steps,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


def _tuned(system: System, name: str) -> System:
    """Return a system with the paper's tuning for a workload."""
    options = dict(system.options)
    if system.policy == "chunked_prefill":
        options["token_budget"] = max(BUDGETS[name], int(str(options["max_batch"])))
    elif not options.get("static_dop"):
        options["max_num_ooe"] = OOE[name]
    return system._replace(options=options)


if __name__ == "__main__":
    main()
