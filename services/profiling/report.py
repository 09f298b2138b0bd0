"""What `csps profile` prints."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby

from csps.configurator.scaling_information_base import LinkRow, StepRow
from csps.services.profiling.fitting import DECODE, FittedPoint, fitted_points, links_by_kind
from csps.services.profiling.measured_links import BETWEEN, INSIDE
from csps.services.scheduling.latency import LatencyTable, in_seconds
from csps.services.scheduling.latency_fit import LinkMeasurement, fit_link

HEADINGS = {INSIDE: "inside a server", BETWEEN: "between servers"}


def step_lines(rows: Sequence[StepRow]) -> list[str]:
    """Measured beside fitted, and what the fit without a point says about it."""
    lines = []
    for key, points in groupby(fitted_points(rows), key=lambda it: it.key):
        group = list(points)
        what = "decode" if key.strategy == DECODE else f"prefill ({key.strategy})"
        lines += [
            "",
            f"{what}, {key.sp} instance{'s' * (key.sp > 1)}, tp {key.tp}",
            f"{'tokens':>8}{'history':>9}{'batch':>7}{'measured':>12}{'fitted':>12}"
            f"{'error':>8}{'held out':>10}",
            *map(_point_line, group),
            f"  relative error: {_errors(it.fitted / it.seconds - 1 for it in group)}",
            f"  held out:       {_errors(it.held_out / it.seconds - 1 for it in group)}",
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
    """Medians beside fitted; latency and bandwidth, of each kind of link and of each pair."""
    lines = []
    for kind, measured in links_by_kind(rows).items():
        cost, by_size = fit_link(measured), defaultdict(list)
        for it in measured:
            by_size[it.size].append(it.seconds)
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
            f"  {sender} to {receiver}: {_speed(links_by_kind(of_pair)[kind])}"
            for (sender, receiver), of_pair in sorted(pairs.items())
        ]
    return lines


def _speed(measured: Sequence[LinkMeasurement]) -> str:
    cost = fit_link(measured)
    speed = 1e-9 / in_seconds(cost.b) if cost.b else float("inf")
    return f"latency {in_seconds(cost.a) * 1e6:.0f} us, {speed:.3f} GB/s"


def coefficient_lines(table: LatencyTable) -> list[str]:
    """The table in seconds, for reading and for copying into a cluster file."""
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
