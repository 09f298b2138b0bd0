"""Goodput of the order by least slack, against first-come order and Medha's relative slack.

    python benchmarks/slo_order.py [--requests 2000] [--seeds 2] [--load 1.2] [--json FILE]

Three traces run in the simulator at 1.2 times of the cluster's capacity, which is what first-come
order serves under twice that load or when all requests come at once. A request's objective is a
multiple of the time of its prompt alone: 40 % ask for 5 times, 40 % for 25 times (and at least
1 s), 20 % for nothing.

`met` is the share of requests with an objective that keep it; `gain` compares with first-come
order. `passed_s` is how much later than a request without an objective any one came that started
before it, at worst: the order itself allows `patience_s`, and short prompts of `csps` and
`context_parallel` may pass more within the preemption budget.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from typing import Any

import report

from csps.configurator.costs.cost_table import Costs, CostTable
from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import load_cluster
from csps.loadgen.simulator.kernel import SimulationResult
from csps.loadgen.simulator.orders import ORDERS
from csps.loadgen.simulator.requests import met
from csps.loadgen.simulator.simulate import simulate
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
MULTIPLES = (5.0, 5.0, 25.0, 25.0, None)
LEAST_MS = 1000.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--load", type=float, default=1.2)
    args = report.with_json_option(parser).parse_args()
    rows = [
        row
        for cluster, name, policies in TRACES
        for policy in policies
        for row in _rows(load_cluster(cluster), name, policy, args)
    ]
    facts = {"benchmark": "slo_order", "load": args.load, "requests": args.requests}
    report.publish(facts | {"patience_s": QueueLimits().patience_s}, rows, args.json)


def _rows(
    cluster: ClusterModel, name: str, policy: str, args: argparse.Namespace
) -> list[dict[str, Any]]:
    capacity = _capacity(cluster, name, policy, args.requests)
    met_by: dict[str, list[float]] = {order: [] for order in ORDERS}
    passed_by: dict[str, list[float]] = {order: [] for order in ORDERS}
    for seed in range(args.seeds):
        requests = _with_objectives(
            cluster, _requests(cluster, name, args.requests, args.load * capacity, seed), seed
        )
        for order in ORDERS:
            found = simulate(cluster, policy, {}, requests, order=order)
            met_by[order].append(_met_share(found))
            passed_by[order].append(_passed_s(found))
    first_come = sum(met_by["first_come"]) / args.seeds
    return [
        {
            "cluster": cluster.name,
            "trace": name,
            "policy": policy,
            "rate": round(args.load * capacity, 2),
            "order": order,
            "met": round(sum(met_by[order]) / args.seeds, 4),
            "gain": round(sum(met_by[order]) / args.seeds / max(first_come, 1e-9) - 1, 3),
            "passed_s": round(max(passed_by[order]), 1),
        }
        for order in ORDERS
    ]


def _requests(
    cluster: ClusterModel, name: str, count: int, rate: float, seed: int
) -> FittedRequests:
    return generate(
        workload(name),
        count,
        arrivals=Arrivals(rate=rate),
        seed=seed,
        size=Size(positions=cluster.max_positions),
    )


def _capacity(cluster: ClusterModel, name: str, policy: str, count: int) -> float:
    """Return the requests per second that are served when all wait from the start."""
    rate = float("inf")
    served = []
    for _ in range(2):  # a policy may serve less when all requests come at once
        found = simulate(cluster, policy, {}, _requests(cluster, name, count, rate, 0))
        last_ns = max(outcome.first_token_ns for outcome in found.outcomes)
        served.append(count / (last_ns / 1e9))
        rate = 2 * served[0]
    return max(served)


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
