"""Compare deployed servers of several policies with the simulator, on loads held out from it.

    python benchmarks/live_compare.py [--policies csps tetris] [--requests 300] [--json FILE]

For each policy a server of the included model is deployed, and its times are learned at one rate:
`csps profile steps` and `ring` measure the ranks first (with `--sib FOLDER` only what is missing
there), then a trace for calibration goes to the server, whose router's table holds the times of its
own steps afterwards. The difference between the measured median TTFT and the one simulated with
this table is the time between client and scheduler (`gaps_us.front`).

Then another trace, at another rate and with other lengths, goes to the server three times, and to
the simulator, for which nothing is fitted any more. Bounds, of all passes together: the median of
TTFT and of TPOT within 10 %, or within the spread of the passes if that is larger, P95 within 20 %.
Rows are printed policy by policy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import report
import uvloop
import yaml
from deployed import deployed, serve_config
from paced.compare import ask_all

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import parse_cluster
from csps.loadgen.simulator.simulate import simulate
from csps.loadgen.workloads.generate import Arrivals, Size, generate
from csps.loadgen.workloads.named import workload
from csps.loadgen.workloads.request import FittedRequests, WorkloadRequest
from csps.models.network.spec import read_spec

MODEL = Path(__file__).parent.parent / "models" / "needle"
NAME = "needle"
PROFILE_S = 1800.0
MEDIAN_BOUND = 0.10
BOUNDS = {50: MEDIAN_BOUND, 95: 0.20, 99: None}
"""Bounds on percentiles, relative to the simulation. None: shown only."""
FLOAT_BYTES = 4
WARM_UP_PAUSE_S = 1.5
"""Time after which a prompt of any length has its answer."""
LINK = {"gbps": 31, "latency_us": 34, "shared": True}
"""Link between two gangs of one machine, as in `local.yaml`."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server with one policy."""

    policy: str
    elastic: bool
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def gangs(self) -> dict[str, Any]:
        """Settings of its gangs. A pair has a rank more than the machine has cores."""
        if self.elastic:
            return {"elastic": {"instances": 2}}
        return {"prefill": {"instances": 2}, "decode": {"instances": 1}}

    @property
    def servers(self) -> list[dict[str, Any]]:
        """Servers of a cluster file."""
        if self.elastic:
            both = ["prefill", "decode"]
            cores = os.cpu_count()
            return [{"instances": 2, "permissions": both, "kv_slots": 65_536, "cores": cores}]
        return [
            {"instances": 2, "permissions": ["prefill"], "kv_slots": 40_960},
            {"instances": 1, "permissions": ["decode"], "kv_slots": 65_536},
        ]


SERVERS = {
    server.policy: server
    for server in (
        Server(policy="csps", elastic=False),
        Server(policy="tetris", elastic=False),
        Server(policy="chunked_prefill", elastic=True, options={"token_budget": 128}),
        Server(policy="context_parallel", elastic=True),
        Server(policy="loongserve", elastic=True),
    )
}
MAX_BATCH = {"max_batch": 64}


class Times(NamedTuple):
    """Milliseconds of requests."""

    ttft: list[float]
    tpot: list[float]
    """Times per token of answers with more than one token."""


def main() -> None:
    """Print a table and the figures; return 1 if a bound is missed."""
    args = _arguments()
    rows: list[dict[str, Any]] = []
    fronts: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for policy in args.policies:
            found, fronts[policy] = _compared(SERVERS[policy], args, Path(folder))
            print(json.dumps({"policy": policy, "front_ms": fronts[policy], "rows": found}))
            rows += found
    result = {
        "benchmark": "live_compare",
        "requests": args.requests,
        "rate": args.rate,
        "calibration_rate": args.calibration_rate,
        "calibration_requests": args.calibration_requests or args.requests,
        "seed": args.seed,
        "passes": args.passes,
        "front_ms": fronts,
        "met": all(row["within"] for row in rows if row["within"] is not None),
    }
    report.publish(result, rows, args.json)
    if not result["met"]:
        sys.exit("missed")


def _compared(
    server: Server, args: argparse.Namespace, folder: Path
) -> tuple[list[dict[str, Any]], float]:
    """Return the rows of one policy, and the time between client and scheduler in ms."""
    kind = "elastic" if server.elastic else "pair"
    sib = (args.sib or folder).resolve() / f"{kind}.sqlite"
    log = folder / f"{server.policy}-decisions"
    settings = {
        "model": str(MODEL),
        "served_model_name": NAME,
        **server.gangs,
        "scheduling": {"policy": server.policy, "log": str(log), **MAX_BATCH, **server.options},
        "scaling_information_base": str(sib),
    }
    _profile(settings, folder, sib, args)
    known = _trace(
        args, args.calibration_rate, args.seed + 1, args.calibration_requests or args.requests
    )
    held_out = _trace(args, args.rate, args.seed, args.requests)
    with deployed(settings, port=args.port):
        _ask(args.port, _spaced([args.longest >> shift for shift in range(4)] * 2))
        measured = _ask(args.port, known)
        table = _newest(log.with_name(f"{log.name}.tables"))
        passes = [_ask(args.port, held_out) for _ in range(args.passes)]
    learned = _simulated(server, table, known, front_ms=0.0)
    front_ms = max(0.0, float(np.median(measured.ttft) - np.median(learned.ttft)))
    found = _simulated(server, table, held_out, front_ms)
    rows = [
        _row(server.policy, metric, percent, [getattr(each, metric) for each in passes], simulated)
        for metric, simulated in found._asdict().items()
        for percent in BOUNDS
    ]
    return rows, round(front_ms, 2)


def _trace(args: argparse.Namespace, rate: float, seed: int, requests: int) -> FittedRequests:
    size = Size(longest_input=args.longest, longest_output=args.answer)
    return generate(workload("mixed"), requests, arrivals=Arrivals(rate=rate), seed=seed, size=size)


def _spaced(lengths: Sequence[int]) -> FittedRequests:
    """Return requests that are too far apart to meet."""
    requests = [
        WorkloadRequest(
            arrival_ns=round(number * WARM_UP_PAUSE_S * 1e9), input_length=length, output_length=4
        )
        for number, length in enumerate(lengths)
    ]
    return FittedRequests(requests=tuple(requests), cut=0)


def _ask(port: int, requests: FittedRequests) -> Times:
    """Send requests to the deployed server at their times."""
    answers = uvloop.run(ask_all(port, requests.requests, model=NAME))
    return Times(
        [answer.ttft_s * 1e3 for answer in answers],
        [
            (answer.last - answer.first) * 1e3 / (request.output_length - 1)
            for answer, request in zip(answers, requests.requests, strict=True)
            if request.output_length > 1
        ],
    )


def _newest(tables: Path) -> Path:
    """Return the newest table of the router."""
    return max(tables.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def _simulated(server: Server, table: Path, requests: FittedRequests, front_ms: float) -> Times:
    options = {**MAX_BATCH, **server.options}
    cluster = _cluster(server, table, front_ms)
    outcomes = simulate(cluster, server.policy, options, requests).outcomes
    return Times(
        [outcome.ttft_ns / 1e6 for outcome in outcomes],
        [
            (outcome.ended_ns - outcome.first_token_ns) / 1e6 / (outcome.generated_tokens - 1)
            for outcome in outcomes
            if outcome.generated_tokens > 1
        ],
    )


def _cluster(server: Server, table: Path, front_ms: float) -> ClusterModel:
    spec = read_spec(MODEL)
    token_bytes = 2 * spec.layers * spec.kv_heads * spec.head_dim * FLOAT_BYTES
    pair = {} if server.elastic else {"links": {"between": LINK}}
    data = {
        "servers": server.servers,
        **pair,
        "latency": {"table": str(table)},
        "kv": {"bytes_per_token": token_bytes, "layers": spec.layers},
        "quantum_ms": 50,
        "gaps_us": {"front": front_ms * 1e3},
    }
    return parse_cluster(data, name="machine")


def _profile(settings: dict[str, Any], folder: Path, sib: Path, args: argparse.Namespace) -> None:
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(serve_config(settings, args.port)))
    for what in ("steps", "ring"):
        command = [sys.executable, "-m", "csps.cli", "profile", what]
        command += ["--config", str(config), "--sib", str(sib)]
        command += ["--quick"] if args.quick else []
        command += ["--limit", str(args.limit)] if args.limit is not None else []
        subprocess.run(command, check=True, timeout=PROFILE_S)


def _row(
    policy: str, metric: str, percent: int, live: Sequence[list[float]], simulated: list[float]
) -> dict[str, Any]:
    """Return the row of one percentile; `live` has the values of each pass."""
    passes_ms = [float(np.percentile(values, percent)) for values in live]
    live_ms = float(np.percentile(np.concatenate(live), percent))
    simulated_ms = float(np.percentile(simulated, percent))
    bound = BOUNDS[percent]
    if bound == MEDIAN_BOUND:
        bound = max(bound, (max(passes_ms) - min(passes_ms)) / simulated_ms)
    return {
        "policy": policy,
        "metric": f"{metric} P{percent}",
        "live_ms": round(live_ms, 2),
        "simulated_ms": round(simulated_ms, 2),
        "difference": round(live_ms / simulated_ms - 1, 3),
        "bound": None if bound is None else round(bound, 3),
        "within": None if bound is None else abs(live_ms / simulated_ms - 1) <= bound,
        "pass_ms": [round(value, 2) for value in passes_ms],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policies", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--rate", type=float, default=1.25, help="of the trace that is compared")
    parser.add_argument("--calibration-rate", type=float, default=0.8)
    parser.add_argument("--requests", type=int, default=300, help="of the trace that is compared")
    parser.add_argument(
        "--calibration-requests", type=int, metavar="N", help="of the one before; default: as many"
    )
    parser.add_argument("--passes", type=int, default=3, help="of the trace that is compared")
    parser.add_argument("--longest", type=int, default=8192, help="prompt of the workload")
    parser.add_argument("--answer", type=int, default=32, help="the longest")
    parser.add_argument("--seed", type=int, default=0, help="the trace before has the next one")
    parser.add_argument("--sib", type=Path, metavar="FOLDER", help="what was measured before")
    parser.add_argument("--port", type=int, default=8123, help="of the servers")
    parser.add_argument("--quick", action="store_true", help="measure fewer points")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="measure for so long")
    return report.with_json_option(parser).parse_args()


if __name__ == "__main__":
    main()
