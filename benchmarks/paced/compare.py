"""Compare the live router on paced ranks with the simulator: same requests, times and model.

    python benchmarks/paced/compare.py [--cluster 16] [--policies csps] [--rate 2] [--json FILE]

The live side is the router as a plain process, ranks in another, and a client that sends every
request at its time over HTTP. The difference is what the simulator leaves out: HTTP, parsing,
messages, and other work of the machine. Bounds: 2 % + 5 ms for the mean and P90 of TTFT. P99 has to
lie where the simulator's own lies while a message takes 0.5 to 3 ms: one message more or less
decides which requests share a step. `by_message_ms` is that range of every figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

# Run as a script, the module path starts inside the folder, where `paced` is not a name.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import report

from csps.loadgen.simulator.cluster import ClusterModel
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
NOTICES_MS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
"""Times of a message for which the simulator's P99 is compared."""
POLICY_OPTIONS = {
    "csps": ("spt_tokens=256", "short_tokens=64", "urgent_batch_tokens=128", "max_batch=512"),
    "fixed_sp": ("sp=8", "max_batch=512"),
    "tetris": ("min_chunk=32", "max_batch=512"),
    "context_parallel": ("max_batch=512",),
    "chunked_prefill": ("token_budget=64", "max_batch=64"),
}
"""Options by which policies suit prompts that are shorter by `SMALLER`.

`loongserve` is missing: the paced ranks of an elastic gang compute prompts in iterations only.
"""
ELASTIC = ("chunked_prefill",)
"""Policies on an elastic gang of as many instances: those of a pair would leave its prefill gang
idle.
"""


def main() -> None:
    arguments = _arguments()
    requests = _requests(arguments)
    rows: list[dict[str, Any]] = []
    right = True
    ranks: dict[str, Any] = {}
    for policy in arguments.policies:
        found, answers, ranks[policy] = _compared(policy, arguments.cluster, requests)
        rows += found
        right &= all(
            answer.events == request.output_length
            for answer, request in zip(answers, requests.requests, strict=True)
        )
    result = {
        "benchmark": "paced_compare",
        "cluster": arguments.cluster,
        "rate": arguments.rate,
        "requests": arguments.requests,
        "seed": arguments.seed,
        "tokens_right": right,
        "ranks": ranks,
        "met": all(row["within"] for row in rows if row["within"] is not None),
    }
    report.publish(result, rows, arguments.json)
    if not result["met"]:
        sys.exit("missed")


def _compared(
    policy: str, instances: str, requests: FittedRequests
) -> tuple[list[dict[str, Any]], list[Answer], dict[str, Any]]:
    """Return a policy's rows, its live answers, and the statistics of the paced ranks."""
    name = f"elastic-{instances}" if policy in ELASTIC else instances
    path, options = str(CLUSTERS / f"{name}.yaml"), POLICY_OPTIONS[policy]
    model = load_cluster(path)

    def simulated_ms(cluster: ClusterModel) -> list[float]:
        outcomes = simulate(cluster, policy, options_of(options), requests).outcomes
        return [outcome.ttft_ns / 1e6 for outcome in outcomes]

    expected_ms = simulated_ms(model)
    by_notice_ms = [
        simulated_ms(replace(model, notice_ns=round(notice * 1e6))) for notice in NOTICES_MS
    ]
    tails_ms = [float(np.percentile(found_ms, 99)) for found_ms in by_notice_ms]
    with served(path, policy, *options) as server:
        answers = uvloop.run(ask_all(server.port, requests.requests))
    live_ms = [answer.ttft_s * 1e3 for answer in answers]
    rows = [
        {
            **_row(policy, name, float(figure(live_ms)), float(figure(expected_ms))),
            "by_message_ms": _range([float(figure(found_ms)) for found_ms in by_notice_ms]),
        }
        for name, figure in (
            ("mean", np.mean),
            ("P50", np.median),
            ("P90", lambda ms: np.percentile(ms, 90)),
        )
    ]
    tail_ms = float(np.percentile(live_ms, 99))
    rows.append(
        {
            "policy": policy,
            "TTFT": "P99",
            "live_ms": round(tail_ms, 2),
            "simulated_ms": round(float(np.percentile(expected_ms, 99)), 2),
            "bound_ms": _range(tails_ms),
            "within": min(tails_ms) <= tail_ms <= max(tails_ms),
            "by_message_ms": _range(tails_ms),
        }
    )
    return rows, answers, server.after


def _range(figures_ms: Sequence[float]) -> str:
    return f"{min(figures_ms):.1f} to {max(figures_ms):.1f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--cluster",
        choices=sorted(path.stem for path in CLUSTERS.glob("[0-9]*.yaml")),
        default="16",
        help="instances that prefill",
    )
    parser.add_argument("--policies", nargs="+", choices=POLICY_OPTIONS, default=["csps"])
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
    """Send each request at its time, on a connection of its own, with its objective if it has
    one."""
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
    slo_ms = None if request.slo is None else request.slo.ttft
    headers = b"" if slo_ms is None else b"x-slo-ttft-ms: %d\r\n" % round(slo_ms)
    await asyncio.sleep(at - time.monotonic() - LEAD_S / 2)
    connection = Connection(port)
    await connection.open()
    try:
        # The loop's timers have milliseconds: the last one is spun.
        await asyncio.sleep(at - time.monotonic() - 0.001)
        while time.monotonic() < at:  # noqa: ASYNC110 (no event comes with a time)
            await asyncio.sleep(0)
        answer = await connection.ask_raw(body, headers=headers)
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


def _row(policy: str, name: str, live_ms: float, simulated_ms: float) -> dict[str, Any]:
    bound_ms = RELATIVE * simulated_ms + ABSOLUTE_MS
    return {
        "policy": policy,
        "TTFT": name,
        "live_ms": round(live_ms, 2),
        "simulated_ms": round(simulated_ms, 2),
        "bound_ms": f"{simulated_ms - bound_ms:.1f} to {simulated_ms + bound_ms:.1f}",
        "within": None if name == "P50" else abs(live_ms - simulated_ms) <= bound_ms,
    }


if __name__ == "__main__":
    main()
