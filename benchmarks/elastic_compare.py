"""LoongServe on real ranks against the simulator that was calibrated with as many: one trace.

    python benchmarks/elastic_compare.py [--instances 4] [--rate 1] [--requests 80] [--json FILE]

`csps profile steps` and `ring`, which is how several instances attend, measure the ranks first
(with `--sib FILE` only what is missing there). Requests that come one at a time to a deployed
server, with an elastic gang and the policy `loongserve`, tell what lies between client and
scheduler (`gaps_us.front`): the median of what they take beyond the profile. Then the trace comes
at the same times to the server, and to the simulator with what was measured. Bounds: the median
TTFT within 10 %, P95 within 20 %.
"""

from __future__ import annotations

import argparse
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

from csps.loadgen.simulator.cluster_file import parse_cluster
from csps.loadgen.simulator.requests import Outcome
from csps.loadgen.simulator.simulate import simulate
from csps.loadgen.workloads.arrivals import Arrivals
from csps.loadgen.workloads.generate import Size, generate
from csps.loadgen.workloads.named import workload
from csps.loadgen.workloads.request import Fitted, Request
from csps.models.spec import read_spec

MODEL = Path(__file__).parent.parent / "models" / "needle"
NAME = "needle"
PORT = 8123
PROFILE_S = 1800.0
BOUNDS = {"P50": 0.10, "P95": 0.20}
OPTIONS = {"max_batch": 64}
FLOAT_BYTES = 4
ALONE = (32, 128, 256, 512)
"""Tokens of the prompts that come one at a time."""
ALONE_ROUNDS = 10
PAUSE_S = 0.5
LONG_PAUSE_S = 2.0
"""After which a prompt of any length has its answer."""


def main() -> None:
    """Print a table and the figures; ends with 1 where a bound is missed."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        sib = args.sib or Path(folder) / "sib.sqlite"
        settings = _settings(args, sib.resolve())
        _profile(settings, Path(folder), sib, args)
        drawn = workload("mixed")
        size = Size(longest_input=args.longest, longest_output=args.answer)
        arrivals = Arrivals(rate=args.rate)
        requests = generate(drawn, args.requests, arrivals=arrivals, seed=args.seed, size=size)
        with deployed(settings, port=PORT):
            _ask(_spaced([args.longest >> shift for shift in range(4)] * 2, LONG_PAUSE_S))
            alone = _spaced(ALONE * ALONE_ROUNDS, PAUSE_S)
            alone_ms = _ask(alone)
            live_ms = _ask(requests)
        without = _simulated(args, sib, alone, front_ms=0.0)
        beyond_ms = [live - it.ttft_ns / 1e6 for live, it in zip(alone_ms, without, strict=True)]
        front_ms = float(np.median(beyond_ms))
        expected = _simulated(args, sib, requests, front_ms)
    simulated_ms = [it.ttft_ns / 1e6 for it in expected]
    rows = [
        _row(f"P{percent}", np.percentile(live_ms, percent), np.percentile(simulated_ms, percent))
        for percent in (50, 90, 95)
    ]
    result = {
        "benchmark": "elastic_compare",
        "instances": args.instances,
        "rate": args.rate,
        "requests": args.requests,
        "seed": args.seed,
        "front_ms": round(front_ms, 2),
        "beyond_profile_ms": {
            tokens: round(float(np.median(beyond_ms[at :: len(ALONE)])), 2)
            for at, tokens in enumerate(ALONE)
        },
        "met": all(row["within"] for row in rows if row["TTFT"] in BOUNDS),
    }
    report.publish(result, rows, args.json)
    if not result["met"]:
        sys.exit("missed")


def _spaced(lengths: Sequence[int], pause_s: float) -> Fitted:
    """Requests that come one after the other, too far apart to meet."""
    requests = [
        Request(arrival_ns=round(number * pause_s * 1e9), input_length=length, output_length=4)
        for number, length in enumerate(lengths)
    ]
    return Fitted(requests=tuple(requests), cut=0)


def _ask(requests: Fitted) -> list[float]:
    """Milliseconds to each one's first token on the deployed server."""
    answers = uvloop.run(ask_all(PORT, requests.requests, model=NAME))
    return [it.ttft_s * 1e3 for it in answers]


def _simulated(
    args: argparse.Namespace, sib: Path, requests: Fitted, front_ms: float
) -> tuple[Outcome, ...]:
    cluster = parse_cluster(_cluster(args, sib, front_ms), name="profiled")
    return simulate(cluster, "loongserve", OPTIONS, requests).outcomes


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--longest", type=int, default=8192, help="prompt of the workload")
    parser.add_argument("--answer", type=int, default=32, help="the longest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sib", type=Path, metavar="FILE", help="what was measured before")
    parser.add_argument("--quick", action="store_true", help="measure fewer points")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="measure for so long")
    return report.with_json_option(parser).parse_args()


def _settings(args: argparse.Namespace, sib: Path) -> dict[str, Any]:
    return {
        "model": str(MODEL),
        "served_model_name": NAME,
        "elastic": {"instances": args.instances},
        "scheduling": {"policy": "loongserve", **OPTIONS},
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


def _cluster(args: argparse.Namespace, sib: Path, front_ms: float) -> dict[str, Any]:
    spec = read_spec(MODEL)
    token_bytes = 2 * spec.layers * spec.kv_heads * spec.head_dim * FLOAT_BYTES
    server = {
        "instances": args.instances,
        "permissions": ["prefill", "decode"],
        "kv_slots": 65_536,
    }
    return {
        "servers": [server],
        "latency": {"sib": str(sib)},
        "kv": {"bytes_per_token": token_bytes, "layers": spec.layers},
        "quantum_ms": 50,
        "gaps_us": {"front": front_ms * 1e3},
    }


def _row(name: str, live_ms: float, simulated_ms: float) -> dict[str, Any]:
    bound = BOUNDS.get(name, max(BOUNDS.values()))
    return {
        "TTFT": name,
        "live_ms": round(float(live_ms), 2),
        "simulated_ms": round(float(simulated_ms), 2),
        "difference": round(float(live_ms / simulated_ms - 1), 3),
        "within": bool(abs(live_ms - simulated_ms) <= bound * simulated_ms),
    }


if __name__ == "__main__":
    main()
