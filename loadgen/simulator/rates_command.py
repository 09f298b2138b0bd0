"""`csps rates`: find Tetris' rates of improvement for a cluster and its prompts, by simulation."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from csps.configurator.scaling_information_base import FitRow, ScalingInformationBase
from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import load_cluster
from csps.loadgen.simulator.improvement_rates import (
    REQUESTS,
    Drawn,
    Prompts,
    drawn_from,
    planner_of,
    profile,
)
from csps.loadgen.workloads.named import WORKLOADS, workload
from csps.loadgen.workloads.request import fit
from csps.loadgen.workloads.traces import at_rate, read_trace
from csps.protocols.errors import ConfigError
from csps.services.scheduling.policies.tetris.improvement import FIT
from csps.services.scheduling.policies.tetris.options import TetrisOptions


def main(argv: Sequence[str]) -> None:
    """The command."""
    arguments = _arguments(argv)
    cluster = load_cluster(arguments.cluster)
    records = profile(planner_of(cluster, arguments.min_chunk), _drawn(arguments, cluster))
    print("improvement_rates:  # requests per second, and the best rate of improvement")
    for load, rate in records:
        print(f"  - [{load:g}, {rate:g}]")
    if arguments.sib is not None:
        _keep(arguments.sib, records)
        print(f"kept in {arguments.sib}")


def _drawn(arguments: argparse.Namespace, cluster: ClusterModel) -> Drawn:
    if arguments.trace is None:
        chosen = workload(arguments.workload)
        return drawn_from(chosen, cluster, requests=arguments.requests, seed=arguments.seed)
    requests = read_trace(arguments.trace)[: arguments.requests]
    if not requests:
        raise ConfigError(f"{arguments.trace} has no requests")

    def draw(load: float) -> Prompts:
        fitted = fit(at_rate(requests, load), cluster.max_positions)
        return [(it.arrival_ns, it.input_length) for it in fitted.requests]

    return draw


def _keep(path: Path, records: Sequence[tuple[float, float]]) -> None:
    base = ScalingInformationBase.read(path, None)
    if base is None:
        raise ConfigError(f"there is no {path}; run `csps profile steps` first")
    canonical = json.dumps(records).encode()
    digest = hashlib.sha256(canonical).hexdigest()
    date = datetime.now(UTC).isoformat(timespec="seconds")
    with base:
        base.add(FitRow(name=FIT, digest=digest, canonical=canonical, date=date))


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="csps rates",
        description="Find the best rate of improvement of the policy tetris for every load, for a "
        "cluster and the prompts that it gets (docs/simulator.md).",
    )
    parser.add_argument(
        "--cluster", required=True, help="a cluster that comes with csps, or a file"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--workload", help=f"{', '.join(WORKLOADS)}, zipf:ALPHA")
    source.add_argument("--trace", type=Path, help="JSONL with lengths and times (Mooncake's)")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="at each load (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and times (0)")
    parser.add_argument(
        "--min-chunk",
        type=int,
        default=TetrisOptions.min_chunk,
        help="tokens of the shortest chunk of a prompt that is cut (%(default)s)",
    )
    parser.add_argument(
        "--sib", type=Path, metavar="FILE", help="keep them in this scaling information base"
    )
    return parser.parse_args(argv)
