"""Cost of a Tetris plan: CDSP for one prompt, by the size of the gang.

    python benchmarks/tetris_plans.py [--plans 1000] [--json FILE]

As in Tetris' Table 2: prompts of 4K to 190K tokens on instances that are busy for up to four
seconds, both random, 8 instances on a server, group sizes in powers of two. Latencies are fitted to
the paper's Table 1 up to 16 instances and extrapolated beyond. Figures are microseconds of
processor time, from queue times to chunks with their instances; `single_us` is Alg. 2 alone. The
paper's scheduler is written in C++: 23 to 31 us on average, 45 to 87 at most.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import report

from csps.configurator.costs.latency_tables import TETRIS_LLAMA3_8B_A100
from csps.services.scheduling.policies.tetris.cdsp import Cdsp

SERVER = 8
BUSY_NS = 4_000_000_000
SHORTEST, LONGEST = 4 * 1024, 190 * 1024
MIN_CHUNK = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--plans", type=int, default=1000)
    args = report.with_json_option(parser).parse_args()
    rows = [
        _row(instances, rate, args.plans)
        for instances in (8, 16, 32, 64, 128)
        for rate in (0.0, 0.05, 0.3, 0.75)
    ]
    report.publish({"benchmark": "tetris_plans", "plans": args.plans}, rows, args.json)


def _row(instances: int, rate: float, plans: int) -> dict[str, Any]:
    servers = [min(SERVER, instances)] * max(1, instances // SERVER)
    sizes = [1 << exponent for exponent in range(instances.bit_length())]
    costs = {size: TETRIS_LLAMA3_8B_A100.step(size) for size in sizes}
    chunked = Cdsp(servers, costs, min_chunk=MIN_CHUNK)
    single = Cdsp(servers, costs, chunked=False)
    draw = random.Random(instances)
    took_us, single_us, cut = [], [], 0
    for _ in range(plans):
        length = draw.randint(SHORTEST, LONGEST)
        free_ns = [draw.randint(0, BUSY_NS) for _ in range(instances)]
        begin = time.process_time_ns()
        chunks = chunked.plan(length, free_ns, rate)
        middle = time.process_time_ns()
        single.plan(length, free_ns, rate)
        took_us.append((middle - begin) / 1000)
        single_us.append((time.process_time_ns() - middle) / 1000)
        cut += len(chunks) > 1
    took_us.sort()
    return {
        "instances": instances,
        "rate": rate,
        "mean_us": statistics.fmean(took_us),
        "p50_us": took_us[plans // 2],
        "p99_us": took_us[plans * 99 // 100],
        "max_us": took_us[-1],
        "single_us": statistics.fmean(single_us),
        "in_chunks": cut / plans,
    }


if __name__ == "__main__":
    main()
