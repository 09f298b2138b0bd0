"""Compare the live router on paced ranks with the simulator: same requests, times and model.

    python benchmarks/paced/compare.py [--cluster 16] [--rate 2] [--requests 150] [--json FILE]

The live side is the router as a plain process, ranks in another, and a client that sends every
request at its time over HTTP. The difference is what the simulator leaves out: HTTP, parsing,
messages, and other work of the machine. Bounds: 2 % + 5 ms for mean and P99 TTFT.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import uvloop

# Run as a script, the module path starts inside the folder, where `paced` is not a name.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import report

from csps.loadgen.simulator.cluster_file import load_cluster
from csps.loadgen.simulator.simulate import (
    options_of,
    simulate,
)
from csps.loadgen.workloads.generate import (
    Arrivals,
    Size,
    generate,
)
from csps.loadgen.workloads.named import workload
from csps.loadgen.workloads.request import (
    FittedRequests,
    WorkloadRequest,
)
from paced.http_client import Answer, Connection
from paced.processes import served

CLUSTERS = Path(__file__).resolve().parent / "clusters"
SMALLER = 16
"""Factor by which prompts are shorter than the workload's, because the cluster's tokens cost
more.
"""
LONGEST_ANSWER = 24
LEAD_S = 1.0
"""Time from the start of the clock to the first request."""
WORD = 300
RELATIVE, ABSOLUTE_MS = 0.02, 5.0
POLICY_OPTIONS = {
    "csps": ("spt_tokens=256", "short_tokens=64", "urgent_batch_tokens=128", "max_batch=512"),
    "fixed_sp": ("sp=8", "max_batch=512"),
    "chunked_prefill": ("token_budget=64", "max_batch=64"),
}


def main() -> None:
    arguments = _arguments()
    cluster = str(CLUSTERS / f"{arguments.cluster}.yaml")
    options = POLICY_OPTIONS[arguments.policy]
    requests = _requests(arguments)
    expected = simulate(load_cluster(cluster), arguments.policy, options_of(options), requests)
    with served(cluster, arguments.policy, *options) as server:
        answers = uvloop.run(ask_all(server.port, requests.requests))
    simulated_ms = [outcome.ttft_ns / 1e6 for outcome in expected.outcomes]
    live_ms = [answer.ttft_s * 1e3 for answer in answers]
    rows = [
        _row(name, figure(live_ms), figure(simulated_ms))
        for name, figure in (
            ("mean", np.mean),
            ("P50", np.median),
            ("P90", lambda ms: np.percentile(ms, 90)),
            ("P99", lambda ms: np.percentile(ms, 99)),
        )
    ]
    result = {
        "benchmark": "paced_compare",
        "cluster": arguments.cluster,
        "policy": arguments.policy,
        "rate": arguments.rate,
        "requests": arguments.requests,
        "seed": arguments.seed,
        "tokens_right": all(
            answer.events == request.output_length
            for answer, request in zip(answers, requests.requests, strict=True)
        ),
        "ranks": server.after,
        "met": all(row["within"] for row in rows if row["TTFT"] in ("mean", "P99")),
    }
    report.publish(result, rows, arguments.json)
    if not result["met"]:
        sys.exit("missed")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--cluster", choices=sorted(path.stem for path in CLUSTERS.glob("*.yaml")), default="16"
    )
    parser.add_argument("--policy", choices=POLICY_OPTIONS, default="csps")
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    return report.with_json_option(parser).parse_args()


def _requests(arguments: argparse.Namespace) -> FittedRequests:
    prompts = workload("tetris-short")
    size = Size(longest_input=prompts.longest_input // SMALLER, longest_output=LONGEST_ANSWER)
    arrivals = Arrivals(rate=arguments.rate)
    return generate(prompts, arguments.requests, arrivals=arrivals, seed=arguments.seed, size=size)


async def ask_all(
    port: int, requests: Sequence[WorkloadRequest], model: str = "paced"
) -> list[Answer]:
    """Send each request at its time, on a connection of its own."""
    warm_up = Connection(port)
    await warm_up.open()
    for _ in range(10):
        await warm_up.ask_raw(_body(64, 4, model))
    warm_up.close()
    start = time.monotonic() + LEAD_S
    return list(await asyncio.gather(*(_one(port, start, request, model) for request in requests)))


async def _one(port: int, start: float, request: WorkloadRequest, model: str) -> Answer:
    """Send a request at its time; waiting to send counts as latency."""
    at = start + request.arrival_ns / 1e9
    body = _body(request.input_length, request.output_length, model)
    await asyncio.sleep(at - time.monotonic() - LEAD_S / 2)
    connection = Connection(port)
    await connection.open()
    try:
        # The loop's timers have milliseconds: the last one is spun.
        await asyncio.sleep(at - time.monotonic() - 0.001)
        while time.monotonic() < at:  # noqa: ASYNC110 (no event comes with a time)
            await asyncio.sleep(0)
        answer = await connection.ask_raw(body)
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.body!r}")
    answer.sent = at
    return answer


def _body(prompt: int, tokens: int, model: str) -> bytes:
    return json.dumps(
        {
            "model": model,
            "prompt": [WORD] * prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()


def _row(name: str, live: float, simulated: float) -> dict[str, object]:
    return {
        "TTFT": name,
        "live_ms": round(float(live), 2),
        "simulated_ms": round(float(simulated), 2),
        "difference_ms": round(float(live - simulated), 2),
        "bound_ms": round(float(RELATIVE * simulated + ABSOLUTE_MS), 2),
        "within": bool(abs(live - simulated) <= RELATIVE * simulated + ABSOLUTE_MS),
    }


if __name__ == "__main__":
    main()
