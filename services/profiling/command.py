"""`csps profile steps|links|phases|ring|accuracy`: measure, keep what was measured, and show it."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from csps.configurator.scaling_information_base import (
    AccuracyRow,
    FitRow,
    LinkRow,
    ScalingInformationBase,
    StepRow,
)
from csps.models.spec import read_spec
from csps.services.evaluation.local_model import LocalModel
from csps.services.launch import ray_head
from csps.services.launch.deploy_config import DeployConfig, read_config
from csps.services.launch.model_check import check_model
from csps.services.launch.settings import Settings
from csps.services.profiling.accuracy.points import QUICK as QUICK_POINTS
from csps.services.profiling.accuracy.points import Enumeration
from csps.services.profiling.accuracy.profile import AccuracyProfile
from csps.services.profiling.accuracy.report import accuracy_lines
from csps.services.profiling.fitting import EXACT, fit_table
from csps.services.profiling.identity import identity_of
from csps.services.profiling.latency_source import LATENCY
from csps.services.profiling.links import (
    LOOPBACK,
    QUICK_SIZES,
    SIZES,
    LinkEnd,
    LocalEnd,
    measure_links,
    ranks_here,
)
from csps.services.profiling.measured_links import kind_of
from csps.services.profiling.overheads import measure_overheads
from csps.services.profiling.phases import measure_phases, phase_lines
from csps.services.profiling.report import coefficient_lines, link_lines, step_lines
from csps.services.profiling.ring_fits import fit_rings, ring_lines
from csps.services.profiling.ring_profile import RingProfile
from csps.services.profiling.step_profile import Effort, StepProfile
from csps.services.scheduling.latency import LatencyTable

CLUSTER = "RAY_ADDRESS"
"""Variable that names the Ray cluster of a server that runs."""
QUICK = Effort(quick=True, rounds=1, iterations=16, limit_s=60.0)


def main(argv: Sequence[str]) -> None:
    """The command."""
    arguments = _arguments(argv)
    config = read_config(arguments.config)
    settings = config.settings
    check_model(settings)
    # Of accuracy no time is measured, and a server in a cluster is what links are measured of.
    if arguments.what != "accuracy" and not (arguments.what == "links" and CLUSTER in os.environ):
        warn_of_a_server(ray_head.RUN_DIR)
    path = arguments.sib or Path(settings.scaling_information_base)
    with ScalingInformationBase.create(path, identity_of(settings)) as base:
        try:
            if arguments.what == "steps":
                asyncio.run(StepProfile(base, settings, _effort(arguments), _say).run())
            elif arguments.what == "ring":
                asyncio.run(RingProfile(base, settings, _effort(arguments), _say).run())
            elif arguments.what == "phases":
                _say(f"one rank; measurements are kept in {base.path}")
                asyncio.run(measure_phases(base, settings, quick=arguments.quick))
                asyncio.run(measure_overheads(base, settings, _say, quick=arguments.quick))
            elif arguments.what == "accuracy":
                _accuracy(base, settings, arguments)
            else:
                asyncio.run(_links(base, config, quick=arguments.quick))
        finally:
            # Also after Ctrl-C: what was measured is kept, and the next run goes on from there.
            _show(base, settings, _fit(base, settings), arguments.what)


def warn_of_a_server(run_dir: Path) -> None:
    """Where one was started from here and runs."""
    if (head := ray_head.recall(run_dir)) is not None:
        print(
            f"csps: a server was started here and runs (process {head.pid}): what is measured "
            "beside it takes longer than it should; `csps stop` ends it",
            file=sys.stderr,
        )


async def _links(base: ScalingInformationBase, config: DeployConfig, *, quick: bool) -> None:
    load, sizes = os.getloadavg()[0], QUICK_SIZES if quick else SIZES
    locations, hosts, ends = await _link_ends(config)
    where = "of the server that runs" if CLUSTER in os.environ else "of this machine"
    _say(f"all pairs of {len(ends)} ranks {where}; measurements are kept in {base.path}")

    def keep(first: int, second: int, seconds: dict[int, float]) -> None:
        sender, receiver = locations[first], locations[second]
        for size, taken in seconds.items():
            base.add(
                LinkRow(
                    kind=kind_of(sender, receiver),
                    sender=sender,
                    receiver=receiver,
                    bytes=size,
                    seconds=taken,
                    load=load,
                    date=_now(),
                )
            )

    await measure_links(ends, hosts, sizes, keep)


async def _link_ends(config: DeployConfig) -> tuple[list[str], list[str], list[LinkEnd]]:
    """Location, interface and end of each rank that computes prompts."""
    settings = config.settings
    device = settings.device, settings.prefilling.num_gpus
    if CLUSTER not in os.environ:
        locations = ranks_here(settings)
        return locations, [LOOPBACK for _ in locations], [LocalEnd(*device) for _ in locations]
    # Ray and Serve take seconds to import.
    from csps.services.profiling.server_links import RemoteEnd, server_ranks

    ranks = await server_ranks(config)
    return (
        [it.location for it in ranks],
        [it.host for it in ranks],
        [RemoteEnd(it.node_id, *device) for it in ranks],
    )


def _accuracy(
    base: ScalingInformationBase, settings: Settings, arguments: argparse.Namespace
) -> None:
    points = QUICK_POINTS if arguments.quick else Enumeration()
    if arguments.lengths:
        points = replace(points, lengths=tuple(sorted(arguments.lengths)))
    _say(f"the model in this process; measurements are kept in {base.path}")
    limit_s = math.inf if arguments.limit is None else arguments.limit
    model = LocalModel.load(settings.model_dir, getattr(torch, settings.dtype))
    AccuracyProfile(base, model, points, _say, limit_s=limit_s).run()


def _fit(base: ScalingInformationBase, settings: Settings) -> LatencyTable | None:
    """Fit all there is and keep the coefficients; None where no step of exact attention was
    measured, by which the others are predicted where they were not."""
    steps = base.rows(StepRow)
    if not any(row.strategy == EXACT for row in steps):
        return None
    table = fit_table(f"{settings.model_name}, profiled here", steps, base.rows(LinkRow))
    last = base.latest_fit(LATENCY)
    if last is None or last.digest != table.digest:
        base.add(FitRow(name=LATENCY, digest=table.digest, canonical=table.canonical, date=_now()))
    return table


def _show(
    base: ScalingInformationBase, settings: Settings, table: LatencyTable | None, what: str
) -> None:
    if what == "links":
        lines = link_lines(base.rows(LinkRow))
    elif what == "phases":
        lines = list(phase_lines(base, settings))
    elif what == "accuracy":
        layers = read_spec(settings.model_dir).layers
        lines = list(accuracy_lines(base.rows(AccuracyRow), layers=layers))
    elif what == "ring":
        lines = list(ring_lines(base.rows(StepRow), fit_rings(base)))
    else:
        lines = [*step_lines(base.rows(StepRow)), *(coefficient_lines(table) if table else [])]
    for line in lines:
        _say(line)


def _effort(arguments: argparse.Namespace) -> Effort:
    effort = QUICK if arguments.quick else Effort()
    chosen = {"again": arguments.again}
    if arguments.limit is not None:
        chosen["limit_s"] = arguments.limit
    return Effort(**{**vars(effort), **chosen})


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="csps profile",
        description="Measure what steps, links and phases take on this machine, with the ranks of "
        "the configured server, which should not run meanwhile; or which right answers sparse "
        "attention loses.",
    )
    parser.add_argument("what", choices=("steps", "links", "phases", "ring", "accuracy"))
    parser.add_argument(
        "--config", type=Path, default=Path("config.yaml"), help="default: %(default)s"
    )
    parser.add_argument(
        "--sib", type=Path, metavar="FILE", help="scaling information base, not the settings' one"
    )
    parser.add_argument("--quick", action="store_true", help="fewer points, a minute")
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="begin nothing new after so long"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", metavar="TOKENS", help="of prompts; with accuracy"
    )
    parser.add_argument("--again", action="store_true", help="also what has been measured")
    return parser.parse_args(argv)


def _say(line: str) -> None:
    print(line, flush=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
