"""Goodput of the order by least slack, against first-come order and Medha's relative slack.

    python benchmarks/slo_order.py [--requests 2000] [--seeds 2] [--load 1.2] [--json FILE]
    python benchmarks/slo_order.py --live [--requests 300] [--seeds 1] [--json FILE]

Three traces run in the simulator at 1.2 times of the cluster's capacity, which is what first-come
order serves under twice that load or when all requests come at once. A request's objective is a
multiple of the time of its prompt alone: 40 % ask for 5 times, 40 % for 25 times (and at least
1 s), 20 % for nothing.

`met` is the share of requests with an objective that keep it; `gain` compares with first-come
order. `passed_s` is how much later than a request without an objective any one came that started
before it, at worst: the order itself allows `patience_s`, and short prompts of `csps` and
`context_parallel` may pass more within the preemption budget.

With `--live`, clients ask the router on paced ranks over HTTP, with Tetris' three traces at a
sixteenth of their lengths (`paced/clusters/16.yaml`). In first-come order they send no objectives.
`simulated` is `met` of the simulator for the same requests.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import report
import uvloop
from paced.compare import CLUSTERS, POLICY_OPTIONS, SMALLER, ask_all
from paced.processes import served

from csps.configurator.costs.cost_table import Costs, CostTable
from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import load_cluster
from csps.loadgen.simulator.kernel import SimulationResult
from csps.loadgen.simulator.orders import FIRST_COME, ORDERS
from csps.loadgen.simulator.requests import met
from csps.loadgen.simulator.simulate import options_of, simulate
from csps.loadgen.workloads.generate import Arrivals, Size, generate
from csps.loadgen.workloads.named import workload
from csps.loadgen.workloads.request import FittedRequests, Slo, WorkloadRequest
from csps.services.scheduling.events.limits import QueueLimits

TRACES = (
    ("tetris-16", "tetris-short", ("csps", "context_parallel", "tetris")),
    ("tetris-16", "bookcorpus", ("csps", "context_parallel", "tetris")),
    ("loongserve-8", "mixed", ("loongserve",)),
)
"""Cluster, workload and the policies that it is run with."""
LIVE_TRACES = ("tetris-short", "tetris-medium", "tetris-long")
LIVE_ORDERS = (FIRST_COME, "least_slack")
MULTIPLES = (5.0, 5.0, 25.0, 25.0, None)
LEAST_MS = 1000.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, help="default: 2000, live 300")
    parser.add_argument("--seeds", type=int, help="default: 2, live 1")
    parser.add_argument("--load", type=float, default=1.2)
    parser.add_argument("--live", action="store_true", help="on paced ranks, in real time")
    parser.add_argument(
        "--policies", nargs="+", choices=POLICY_OPTIONS, default=["csps"], help="of --live"
    )
    parser.add_argument(
        "--traces", nargs="+", choices=LIVE_TRACES, default=LIVE_TRACES, help="of --live"
    )
    args = report.with_json_option(parser).parse_args()
    args.requests = args.requests or (300 if args.live else 2000)
    args.seeds = args.seeds or (1 if args.live else 2)
    rows = _live(args) if args.live else _simulated(args)
    facts = {"benchmark": "slo_order", "load": args.load, "requests": args.requests}
    report.publish(facts | {"patience_s": QueueLimits().patience_s}, rows, args.json)


Made = Callable[[float, int], FittedRequests]
"""Makes a trace's requests for a rate and a seed."""


def _simulated(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for cluster_name, name, policies in TRACES:
        cluster = load_cluster(cluster_name)
        made = _maker(name, args.requests, Size(positions=cluster.max_positions))
        for policy in policies:
            rate = args.load * _capacity(cluster, policy, {}, args.requests, made)
            found = {
                order: [
                    simulate(cluster, policy, {}, requests, order=order)
                    for requests in _seeds(cluster, made, rate, args.seeds)
                ]
                for order in ORDERS
            }
            rows += _rows(
                {"cluster": cluster.name, "trace": name, "policy": policy, "rate": rate},
                {order: [_met_share(one) for one in results] for order, results in found.items()},
                {
                    order: {"passed_s": round(max(map(_passed_s, results)), 1)}
                    for order, results in found.items()
                },
            )
    return rows


def _live(args: argparse.Namespace) -> list[dict[str, Any]]:
    path = str(CLUSTERS / "16.yaml")
    cluster, rows = load_cluster(path), list[dict[str, Any]]()
    for name in args.traces:
        longest = workload(name).longest_input // SMALLER
        made = _maker(name, args.requests, Size(longest_input=longest, longest_output=1))
        for policy in args.policies:
            options = POLICY_OPTIONS[policy]
            rate = args.load * _capacity(cluster, policy, options_of(options), args.requests, made)
            met_by: dict[str, list[float]] = {order: [] for order in LIVE_ORDERS}
            simulated_by: dict[str, list[float]] = {order: [] for order in LIVE_ORDERS}
            for requests in _seeds(cluster, made, rate, args.seeds):
                for order in LIVE_ORDERS:
                    met_by[order].append(
                        _live_met(path, policy, options, requests, told=order != FIRST_COME)
                    )
                    found = simulate(cluster, policy, options_of(options), requests, order=order)
                    simulated_by[order].append(_met_share(found))
            rows += _rows(
                {"cluster": "paced 16", "trace": name, "policy": policy, "rate": rate},
                met_by,
                {
                    order: {"simulated": round(_mean(shares), 4)}
                    for order, shares in simulated_by.items()
                },
            )
    return rows


def _live_met(
    cluster: str, policy: str, options: Sequence[str], requests: FittedRequests, *, told: bool
) -> float:
    """Return the share of the requests with an objective that keep it on paced ranks.

    Args:
        told: whether the router learns of the objectives.
    """
    asked = requests.requests
    sent = asked if told else tuple(replace(request, slo=None) for request in asked)
    with served(cluster, policy, *options) as server:
        answers = uvloop.run(ask_all(server.port, sent))
    kept = [
        answer.ttft_s * 1e3 <= request.slo.ttft
        for request, answer in zip(asked, answers, strict=True)
        if request.slo is not None and request.slo.ttft is not None
    ]
    return sum(kept) / len(kept)


def _rows(
    about: dict[str, Any], met_by: dict[str, list[float]], more: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row for each order, compared with first-come order."""
    first_come = _mean(met_by[FIRST_COME])
    return [
        {
            **about,
            "rate": round(about["rate"], 2),
            "order": order,
            "met": round(_mean(shares), 4),
            "gain": round(_mean(shares) / max(first_come, 1e-9) - 1, 3),
            **more[order],
        }
        for order, shares in met_by.items()
    ]


def _mean(shares: Sequence[float]) -> float:
    return sum(shares) / len(shares)


def _maker(name: str, count: int, size: Size) -> Made:
    def make(rate: float, seed: int) -> FittedRequests:
        return generate(workload(name), count, arrivals=Arrivals(rate=rate), seed=seed, size=size)

    return make


def _seeds(cluster: ClusterModel, made: Made, rate: float, seeds: int) -> list[FittedRequests]:
    return [_with_objectives(cluster, made(rate, seed), seed) for seed in range(seeds)]


def _capacity(
    cluster: ClusterModel, policy: str, options: dict[str, Any], count: int, made: Made
) -> float:
    """Return the requests per second that are served when all wait from the start."""
    rate = float("inf")
    served_by = []
    for _ in range(2):  # a policy may serve less when all requests come at once
        found = simulate(cluster, policy, options, made(rate, 0))
        last_ns = max(outcome.first_token_ns for outcome in found.outcomes)
        served_by.append(count / (last_ns / 1e9))
        rate = 2 * served_by[0]
    return max(served_by)


def _with_objectives(cluster: ClusterModel, requests: FittedRequests, seed: int) -> FittedRequests:
    rng, costs = random.Random(seed), Costs(CostTable(latencies=cluster.table))
    return replace(
        requests,
        requests=tuple(_with_objective(costs, cluster, one, rng) for one in requests.requests),
    )


def _with_objective(
    costs: Costs, cluster: ClusterModel, request: WorkloadRequest, rng: random.Random
) -> WorkloadRequest:
    multiple = rng.choice(MULTIPLES)
    if multiple is None:
        return request
    alone_ns = _alone_ns(costs, cluster, request.input_length)
    return replace(request, slo=Slo(ttft=max(LEAST_MS, multiple * alone_ns / 1e6)))


def _alone_ns(costs: Costs, cluster: ClusterModel, tokens: int) -> int:
    """Return the least predicted time of a prompt on any group of neighbors."""
    prefill = cluster.prefill
    sizes = [1 << power for power in range(len(prefill.instances).bit_length())]
    return min(costs.exact(size, prefill.tp).predict_ns(tokens) for size in sizes)


def _met_share(found: SimulationResult) -> float:
    asked = [outcome for outcome in found.outcomes if outcome.arrival.promise is not None]
    return sum(map(met, asked)) / len(asked)


def _passed_s(found: SimulationResult) -> float:
    """Return how much later than a request without an objective one came that started before it."""
    started = sorted(found.outcomes, key=lambda outcome: outcome.started_ns)
    latest_ns, worst_ns = 0, 0
    for outcome in started:
        if outcome.arrival.promise is None:
            worst_ns = max(worst_ns, latest_ns - outcome.arrival.at_ns)
        latest_ns = max(latest_ns, outcome.arrival.at_ns)
    return worst_ns / 1e9


if __name__ == "__main__":
    main()
