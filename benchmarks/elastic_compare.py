"""Compare LoongServe on real ranks with the simulator calibrated on them: one trace.

    python benchmarks/elastic_compare.py [--instances 4] [--rate 1] [--requests 80] [--json FILE]

`csps profile steps` and `ring`, the attention of several instances, measure the ranks first (with
`--sib FILE` only what is missing there). A deployed server with an elastic gang and the policy
`loongserve` begins with these profiles and receives one trace for calibration. Afterwards its
router's table holds the times of its own steps. The difference between the measured median TTFT and
the one simulated with this table is the time between client and scheduler (`gaps_us.front`). Then
another trace of the same workload and rate goes to the server, several times over, and to the
simulator, whose ranks share as many cores as the machine has. Bounds: the median TTFT within 10 %,
P95 within 20 %, of all passes together.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
PORT = 8123
PROFILE_S = 1800.0
BOUNDS = {"P50": 0.10, "P95": 0.20}
OPTIONS = {"max_batch": 64}
FLOAT_BYTES = 4
WARM_UP_PAUSE_S = 1.5
"""Time after which a prompt of any length has its answer."""
SHORT, LONG = 64, 512
"""Range of tokens of most of the workload's prompts."""
STEPS = (("ulysses", 1, 256), ("ulysses", 1, 1024), ("ring_kv", 2, 2048), ("ring_kv", 2, 8192))
"""(strategy, instances, tokens) of steps shown as profiled and as learned by the server."""


def main() -> None:
    """Print a table and the figures; return 1 if a bound is missed."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        sib = (args.sib or Path(folder) / "sib.sqlite").resolve()
        log = Path(folder) / "decisions"
        settings = _settings(args, sib, log)
        _profile(settings, Path(folder), sib, args)
        known, requests = _trace(args, args.seed + 1), _trace(args, args.seed)
        with deployed(settings, port=PORT):
            _ask(_spaced([args.longest >> shift for shift in range(4)] * 2, WARM_UP_PAUSE_S))
            known_ms = _ask(known)
            learned = {"table": str(_newest(log.with_name(f"{log.name}.tables")))}
            passes_ms = [_ask(requests) for _ in range(args.passes)]
        profiled = {"sib": str(sib)}
        without_ms = _simulated(args, learned, known, front_ms=0.0)
        front_ms = float(np.median(known_ms) - np.median(without_ms))
        simulated_ms = {
            name: _simulated(args, latency, requests, front_ms)
            for name, latency in (("simulated_ms", learned), ("by_profile_ms", profiled))
        }
        steps = _steps(args, profile_ms=profiled, learned_ms=learned)
    rows = [_row(percent, passes_ms, **simulated_ms) for percent in (50, 90, 95)]
    result = {
        "benchmark": "elastic_compare",
        "instances": args.instances,
        "rate": args.rate,
        "requests": args.requests,
        "seed": args.seed,
        "passes": args.passes,
        "front_ms": round(front_ms, 2),
        "beyond_ms": _by_length(known, np.subtract(known_ms, without_ms)),
        "steps": steps,
        "met": all(row["within"] for row in rows if row["TTFT"] in BOUNDS),
    }
    report.publish(result, rows, args.json)
    if not result["met"]:
        sys.exit("missed")


def _trace(args: argparse.Namespace, seed: int) -> FittedRequests:
    size = Size(longest_input=args.longest, longest_output=args.answer)
    arrivals = Arrivals(rate=args.rate)
    return generate(workload("mixed"), args.requests, arrivals=arrivals, seed=seed, size=size)


def _spaced(lengths: Sequence[int], pause_s: float) -> FittedRequests:
    """Return requests that are too far apart to meet."""
    requests = [
        WorkloadRequest(
            arrival_ns=round(number * pause_s * 1e9), input_length=length, output_length=4
        )
        for number, length in enumerate(lengths)
    ]
    return FittedRequests(requests=tuple(requests), cut=0)


def _ask(requests: FittedRequests) -> list[float]:
    """Return milliseconds to each request's first token on the deployed server."""
    answers = uvloop.run(ask_all(PORT, requests.requests, model=NAME))
    return [answer.ttft_s * 1e3 for answer in answers]


def _newest(tables: Path) -> Path:
    """Return the newest table of the router."""
    return max(tables.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def _simulated(
    args: argparse.Namespace, latency: dict[str, str], requests: FittedRequests, front_ms: float
) -> list[float]:
    """Return milliseconds to each request's first token in the simulation."""
    cluster = _cluster(args, latency, front_ms)
    outcomes = simulate(cluster, "loongserve", OPTIONS, requests).outcomes
    return [outcome.ttft_ns / 1e6 for outcome in outcomes]


def _by_length(requests: FittedRequests, beyond_ms: Sequence[float]) -> dict[str, float]:
    """Return medians of short prompts, of most, and of long ones."""
    lengths = np.array([request.input_length for request in requests.requests])
    ranges = {f"<{SHORT}": (0, SHORT), f"<{LONG}": (SHORT, LONG), f">={LONG}": (LONG, math.inf)}
    return {
        name: round(float(np.median(np.array(beyond_ms)[(lengths >= low) & (lengths < high)])), 2)
        for name, (low, high) in ranges.items()
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--passes", type=int, default=2, help="of the trace that is compared")
    parser.add_argument("--longest", type=int, default=8192, help="prompt of the workload")
    parser.add_argument("--answer", type=int, default=32, help="the longest")
    parser.add_argument("--seed", type=int, default=0, help="the trace before has the next one")
    parser.add_argument("--sib", type=Path, metavar="FILE", help="what was measured before")
    parser.add_argument("--quick", action="store_true", help="measure fewer points")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="measure for so long")
    return report.with_json_option(parser).parse_args()


def _settings(args: argparse.Namespace, sib: Path, log: Path) -> dict[str, Any]:
    return {
        "model": str(MODEL),
        "served_model_name": NAME,
        "elastic": {"instances": args.instances},
        "scheduling": {"policy": "loongserve", "log": str(log), **OPTIONS},
        "scaling_information_base": str(sib),
    }


def _profile(settings: dict[str, Any], folder: Path, sib: Path, args: argparse.Namespace) -> None:
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(serve_config(settings, PORT)))
    for what in ("steps", "ring"):
        command = [sys.executable, "-m", "csps.cli", "profile", what]
        command += ["--config", str(config), "--sib", str(sib)]
        command += ["--quick"] if args.quick else []
        command += ["--limit", str(args.limit)] if args.limit is not None else []
        subprocess.run(command, check=True, timeout=PROFILE_S)


def _cluster(args: argparse.Namespace, latency: dict[str, str], front_ms: float) -> ClusterModel:
    spec = read_spec(MODEL)
    token_bytes = 2 * spec.layers * spec.kv_heads * spec.head_dim * FLOAT_BYTES
    server = {
        "instances": args.instances,
        "permissions": ["prefill", "decode"],
        "kv_slots": 65_536,
        "cores": os.cpu_count(),
    }
    data = {
        "servers": [server],
        "latency": latency,
        "kv": {"bytes_per_token": token_bytes, "layers": spec.layers},
        "quantum_ms": 50,
        "gaps_us": {"front": front_ms * 1e3},
    }
    return parse_cluster(data, name="machine")


def _steps(args: argparse.Namespace, **tables: dict[str, str]) -> dict[str, dict[str, float]]:
    """Return milliseconds of some steps by each table."""
    models = {name: _cluster(args, latency, 0.0) for name, latency in tables.items()}
    return {
        f"{strategy}, {sp} x {tokens}": {
            name: round(model.table.step(sp, 1, strategy).predict_ns(tokens) / 1e6, 2)
            for name, model in models.items()
        }
        for strategy, sp, tokens in STEPS
    }


def _row(
    percent: int, live: list[list[float]], *, simulated_ms: list[float], by_profile_ms: list[float]
) -> dict[str, Any]:
    """Return the row of one percentile; `live` has one value per pass."""
    name = f"P{percent}"
    bound = BOUNDS.get(name, max(BOUNDS.values()))
    live_ms, found_ms, profile_ms = (
        float(np.percentile(latencies, percent))
        for latencies in (live, simulated_ms, by_profile_ms)
    )
    return {
        "TTFT": name,
        "live_ms": round(live_ms, 2),
        "simulated_ms": round(found_ms, 2),
        "difference": round(live_ms / found_ms - 1, 3),
        "within": abs(live_ms - found_ms) <= bound * found_ms,
        "by_profile_ms": round(profile_ms, 2),
        "pass_ms": [round(float(np.percentile(latency, percent)), 2) for latency in live],
    }


if __name__ == "__main__":
    main()
