"""Run `csps profile steps|links|phases|ring|accuracy`: measure, store the measurements, show
them."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

import torch

from csps.configurator.costs.fitting import LinkMeasurement, fit_link
from csps.configurator.costs.latency import LatencyTable, in_seconds
from csps.configurator.model.scaling_information_base import (
    AccuracyRow,
    FitRow,
    LinkRow,
    ScalingInformationBase,
    SpreadRow,
    StepRow,
)
from csps.configurator.regressors.accuracy import shipped_accuracy
from csps.models.network.spec import read_spec
from csps.protocols.core.command_line import CommandParser
from csps.services.evaluation.local_model import LocalModel
from csps.services.launch import ray_head
from csps.services.launch.deploy_config import DeployConfig, read_config
from csps.services.launch.preflight import check_model
from csps.services.measured.fits import (
    DECODE,
    EXACT,
    FittedPoint,
    fit_rings,
    fit_table,
    fitted_points,
    links_by_kind,
    ring_lines,
)
from csps.services.measured.identity import identity_of
from csps.services.measured.measured_groups import BETWEEN, INSIDE, RACKS, kind_of
from csps.services.measured.scheduler_inputs import LATENCY
from csps.services.profiling.accuracy.chosen_points import ChosenPoints
from csps.services.profiling.accuracy.profile import QUICK as QUICK_POINTS
from csps.services.profiling.accuracy.profile import (
    AccuracyProfile,
    Enumeration,
    accuracy_lines,
    spread_lines,
)
from csps.services.profiling.accuracy.questions import QUESTIONS, ROUND
from csps.services.profiling.links import (
    LOOPBACK,
    QUICK_SIZES,
    SIZES,
    LinkProbe,
    LocalLinkProbe,
    measure_links,
    ranks_here,
)
from csps.services.profiling.phases import measure_overheads, measure_phases, phase_lines
from csps.services.profiling.step_profile import Effort, RingProfile, StepProfile
from csps.services.settings.credentials import cluster_secret
from csps.services.settings.settings import Settings

HEADINGS = {INSIDE: "inside a server", BETWEEN: "between servers", RACKS: "between racks"}


def step_lines(rows: Sequence[StepRow]) -> list[str]:
    """Return lines with measured and fitted times, and with the fit that leaves the point out."""
    lines = []
    for key, points in groupby(fitted_points(rows), key=lambda point: point.key):
        group = list(points)
        title = "decode" if key.strategy == DECODE else f"prefill ({key.strategy})"
        lines += [
            "",
            f"{title}, {key.sp} instance{'s' * (key.sp > 1)}, tp {key.tp}",
            f"{'tokens':>8}{'history':>9}{'batch':>7}{'measured':>12}{'fitted':>12}"
            f"{'error':>8}{'held out':>10}",
            *map(_point_line, group),
            f"  relative error: {_errors(point.fitted / point.seconds - 1 for point in group)}",
            f"  held out:       {_errors(point.held_out / point.seconds - 1 for point in group)}",
        ]
    return lines


def _point_line(point: FittedPoint) -> str:
    error, held_out = point.fitted / point.seconds - 1, point.held_out / point.seconds - 1
    return (
        f"{point.tokens:>8}{point.history:>9}{point.batch:>7}{point.seconds * 1e3:>9.2f} ms"
        f"{point.fitted * 1e3:>9.2f} ms{error:>8.1%}{held_out:>10.1%}"
    )


def _errors(errors: Iterable[float]) -> str:
    sizes = sorted(map(abs, errors))
    return f"median {statistics.median(sizes):.1%}, most {sizes[-1]:.1%}, {len(sizes)} points"


def link_lines(rows: Sequence[LinkRow]) -> list[str]:
    """Return lines with measured medians and fits, and each pair's latency and bandwidth."""
    lines = []
    for kind, measured in links_by_kind(rows).items():
        cost, by_size = fit_link(measured), defaultdict(list)
        for measurement in measured:
            by_size[measurement.size].append(measurement.seconds)
        lines += ["", HEADINGS[kind], f"{'bytes':>10}{'measured':>12}{'fitted':>12}"]
        lines += [
            f"{size:>10}{statistics.median(seconds) * 1e3:>9.3f} ms"
            f"{cost.predict_ns(size) / 1e6:>9.3f} ms"
            for size, seconds in sorted(by_size.items())
        ]
        lines.append(f"  {_speed(measured)}")
        pairs: dict[tuple[str, str], list[LinkRow]] = defaultdict(list)
        for row in rows:
            if row.kind == kind and row.sender:
                pairs[row.sender, row.receiver].append(row)
        lines += [
            f"  {sender} to {receiver}: {_speed(links_by_kind(pair_rows)[kind])}"
            for (sender, receiver), pair_rows in sorted(pairs.items())
        ]
    return lines


def _speed(measured: Sequence[LinkMeasurement]) -> str:
    cost = fit_link(measured)
    speed = 1e-9 / in_seconds(cost.b) if cost.b else float("inf")
    return f"latency {in_seconds(cost.a) * 1e6:.0f} us, {speed:.3f} GB/s"


def coefficient_lines(table: LatencyTable) -> list[str]:
    """Return the table in seconds, for reading and for copying into a cluster file."""
    lines = ["", f"latency table '{table.name}', digest {table.digest[:12]}"]
    for key, cost in table.steps:
        numbers = _numbers(cost.a, cost.b, cost.c, cost.d)
        lines.append(f"  {key.strategy}, {key.sp} x tp {key.tp}: a, b, c, d = {numbers}")
    for key, decode in table.decode:
        for name, line in (("up to", decode.small), ("above", decode.large)):
            numbers = _numbers(line.a, line.b, line.c)
            lines.append(
                f"  decode, {key.sp} x tp {key.tp}, {name} {decode.tipping_batch} requests: "
                f"a, b, c = {numbers}"
            )
    return lines


def _numbers(*fixed: int) -> str:
    return "[" + ", ".join(f"{in_seconds(number):.4g}" for number in fixed) + "] s"


CLUSTER = "RAY_ADDRESS"
"""Variable that names the Ray cluster of a running server."""
QUICK = Effort(quick=True, rounds=1, iterations=16, limit_s=60.0)


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    arguments = _arguments(argv)
    config = read_config(arguments.config)
    settings = config.settings
    check_model(settings)
    # Accuracy is no time, and links are measured of a server in a cluster: both may run beside one.
    if arguments.what != "accuracy" and not (arguments.what == "links" and CLUSTER in os.environ):
        warn_of_a_server(ray_head.RUN_DIR)
    path = arguments.sib or Path(settings.scaling_information_base)
    identity = identity_of(settings)
    with ScalingInformationBase.create(path, identity) as base:
        try:
            if arguments.what == "steps":
                asyncio.run(StepProfile(base, settings, _effort(arguments), _say).run())
            elif arguments.what == "ring":
                asyncio.run(RingProfile(base, settings, _effort(arguments), _say).run())
            elif arguments.what == "phases":
                _say(f"one rank; measurements are stored in {base.path}")
                asyncio.run(measure_phases(base, settings, quick=arguments.quick))
                asyncio.run(measure_overheads(base, settings, _say, quick=arguments.quick))
            elif arguments.what == "accuracy":
                _accuracy(base, settings, arguments, identity.weights)
            else:
                asyncio.run(_links(base, config, quick=arguments.quick))
        finally:
            # Also after Ctrl-C: measurements are stored, and the next run continues from there.
            _show(base, settings, _fit(base, settings), arguments.what)


def warn_of_a_server(run_dir: Path) -> None:
    """Warn if a server that was started from here runs."""
    if (head := ray_head.find_head(run_dir)) is not None:
        print(
            f"csps: a server was started here and runs (process {head.pid}): measurements "
            "beside it are too long; `csps stop` ends it",
            file=sys.stderr,
        )


async def _links(base: ScalingInformationBase, config: DeployConfig, *, quick: bool) -> None:
    load, sizes = os.getloadavg()[0], QUICK_SIZES if quick else SIZES
    locations, hosts, ends = await _link_ends(config)
    where = "of the running server" if CLUSTER in os.environ else "of this machine"
    _say(f"all pairs of {len(ends)} ranks {where}; measurements are stored in {base.path}")

    def record_pair(first: int, second: int, seconds: dict[int, float]) -> None:
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

    await measure_links(ends, hosts, sizes, record_pair)


async def _link_ends(config: DeployConfig) -> tuple[list[str], list[str], list[LinkProbe]]:
    """Return location, interface and probe of each rank that computes prompts."""
    settings = config.settings
    device = settings.device, settings.prefilling.num_gpus, cluster_secret()
    if CLUSTER not in os.environ:
        locations = ranks_here(settings)
        return (
            locations,
            [LOOPBACK for _ in locations],
            [LocalLinkProbe(*device) for _ in locations],
        )
    # Ray and Serve take seconds to import.
    from csps.services.profiling.server_links import RemoteLinkProbe, server_ranks

    ranks = await server_ranks(config)
    return (
        [rank.location for rank in ranks],
        [rank.host for rank in ranks],
        [RemoteLinkProbe(rank.node_id, *device) for rank in ranks],
    )


def _accuracy(
    base: ScalingInformationBase,
    settings: Settings,
    arguments: argparse.Namespace,
    weights: str,
) -> None:
    points = QUICK_POINTS if arguments.quick else Enumeration()
    if arguments.lengths:
        points = replace(points, lengths=tuple(sorted(arguments.lengths)))
    if arguments.groups:
        layered = [shape for shape in points.layered_shapes if shape in arguments.groups]
        points = replace(
            points, group_shapes=tuple(arguments.groups), layered_shapes=tuple(layered)
        )
    if arguments.bounds:
        shipped = shipped_accuracy(weights, settings.number_types)
        points = ChosenPoints(
            **vars(points),
            measured=base.rows(AccuracyRow),
            shipped=shipped.support if shipped else None,
            layers=read_spec(settings.model_dir, settings.model_overrides).layers,
            bounds=tuple(arguments.bounds),
        )
    _say(f"the model in this process; measurements are stored in {base.path}")
    limit_s = math.inf if arguments.limit is None else arguments.limit
    model = LocalModel.load(
        settings.model_dir,
        getattr(torch, settings.dtype),
        settings.model_overrides,
        rounds_kv=settings.kv_dtype == "int8",
        fp8=settings.weight_dtype == "fp8",
    )
    rounds = -(-arguments.questions // ROUND)
    AccuracyProfile(base, model, points, _say, limit_s=limit_s, rounds=rounds).run()


def _fit(base: ScalingInformationBase, settings: Settings) -> LatencyTable | None:
    """Fit all measurements and store the coefficients; None without a step of exact attention, from
    which all others are predicted."""
    steps = base.rows(StepRow)
    if not any(row.strategy == EXACT for row in steps):
        return None
    table = fit_table(f"{settings.model_name}, profiled here", steps, base.rows(LinkRow))
    last = base.latest_fit(LATENCY)
    if last is None or last.digest != table.digest:
        base.add(FitRow(name=LATENCY, digest=table.digest, canonical=table.canonical, date=_now()))
    return table


def _show(
    base: ScalingInformationBase, settings: Settings, table: LatencyTable | None, section: str
) -> None:
    if section == "links":
        lines = link_lines(base.rows(LinkRow))
    elif section == "phases":
        lines = list(phase_lines(base, settings))
    elif section == "accuracy":
        layers = read_spec(settings.model_dir, settings.model_overrides).layers
        lines = [
            *accuracy_lines(base.rows(AccuracyRow), layers=layers),
            *spread_lines(base.rows(SpreadRow)),
        ]
    elif section == "ring":
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
    parser = CommandParser(
        prog="csps profile",
        description="Measure the times of steps, links and phases on this machine, with the ranks "
        "of the configured server, which should not run meanwhile; or measure which right answers "
        "sparse attention loses.",
    )
    parser.add_argument("what", choices=("steps", "links", "phases", "ring", "accuracy"))
    parser.add_argument(
        "--config", type=Path, default=Path("config.yaml"), help="default: %(default)s"
    )
    parser.add_argument(
        "--sib",
        type=Path,
        metavar="FILE",
        help="scaling information base; default: the settings' one",
    )
    parser.add_argument("--quick", action="store_true", help="fewer points, a minute")
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="start no measurement after this time"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", metavar="TOKENS", help="lengths of prompts; with accuracy"
    )
    parser.add_argument(
        "--groups",
        type=_group_shape,
        nargs="+",
        metavar="N[+N...]",
        help="instances by server, such as 2 or 2+2; with accuracy",
    )
    parser.add_argument(
        "--bounds",
        type=_bound,
        nargs="+",
        metavar="LOSS",
        help="measure only what these bounds choose by what shorter prompts lost; with accuracy",
    )
    parser.add_argument(
        "--questions",
        type=int,
        default=QUESTIONS,
        help="questions of each kind at most; with accuracy (default: %(default)s)",
    )
    parser.add_argument("--again", action="store_true", help="repeat measurements that are stored")
    return parser.parse_args(argv)


def _group_shape(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*(\+[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected instances by server, such as 2+2")
    return text


def _bound(text: str) -> float:
    if not 0.0 <= (bound := float(text)) <= 1.0:
        raise argparse.ArgumentTypeError(f"{text}: expected a share of answers, from 0 to 1")
    return bound


def _say(line: str) -> None:
    print(line, flush=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
