"""Cost of LoongServe's pruned search: its regret against the full search, and the time of both.

    python benchmarks/loongserve_batching.py --cases 300

Requests have 10 to 200K tokens by Zipf's law, instances have random free slots, and times are those
of LWM-7B. Time is processor time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from csps.configurator.costs.latency_tables import LOONGSERVE_LWM_7B_A800
from csps.services.scheduling.policies.loongserve.batching import (
    Objective,
    most_requests,
    plain,
    pruned,
)
from csps.services.scheduling.policies.loongserve.inputs import Eq7, PrefillModel

SLOTS = 210_000


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--instances", type=int, nargs="+", default=[4, 8])
    arguments = parser.parse_args()
    rng = random.Random(1)
    objectives: tuple[Objective, ...] = ("normalised", "sum")
    model = PrefillModel(_eq7)
    print("instances  objective    worse  median  P90   largest regret  splits")
    for instances in arguments.instances:
        for objective in objectives:
            found, splits = [], 0
            for _ in range(arguments.cases):
                lengths, slots = _case(rng, arguments.requests, instances)
                best, quick = (
                    search(lengths, slots, model, objective) for search in (plain, pruned)
                )
                if best is not None and quick is not None:
                    found.append(quick.cost / best.cost - 1)
                    splits += len(best.batches) > 1
            found.sort()
            worse = sum(regret > 1e-9 for regret in found)
            print(
                f"{instances:9}  {objective:11} {worse:4}/{len(found)}  "
                f"{statistics.median(found):6.1%} {found[9 * len(found) // 10]:6.1%} "
                f"{found[-1]:8.1%}        {splits}"
            )
    for instances in (4, 8, 16, 32):
        count = most_requests(instances)
        lengths, slots = _case(rng, count, instances)
        begin = time.process_time()
        plain(lengths, [10**9] * len(slots), model)
        took_ms = (time.process_time() - begin) * 1e3
        print(f"{count} requests on {instances} instances: {took_ms:.1f} ms")


def _eq7(dop: int) -> Eq7:
    alpha, beta, _, gamma = LOONGSERVE_LWM_7B_A800.step(dop, 2).in_ns
    return Eq7(alpha, beta, gamma)


def _case(rng: random.Random, requests: int, instances: int) -> tuple[list[int], list[int]]:
    lengths = sorted((round(10 * 20_000 ** rng.random()) for _ in range(requests)), reverse=True)
    slots = sorted((rng.randrange(SLOTS) for _ in range(instances)), reverse=True)
    return lengths, slots


if __name__ == "__main__":
    main()
