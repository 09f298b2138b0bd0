"""From rows of the scaling information base to the table that a scheduler works with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from csps.configurator.scaling_information_base import LinkRow, StepRow
from csps.services.scheduling.latency import (
    DecodeCost,
    LatencyKey,
    LatencyTable,
    StepCost,
)
from csps.services.scheduling.latency_fit import (
    DecodeMeasurement,
    LinkMeasurement,
    StepMeasurement,
    fit_decode,
    fit_link,
    fit_step,
)

EXACT = "ulysses"
DECODE = "decode"
K = TypeVar("K")
Point = tuple[int, int, int]
"""(tokens, history, batch)."""


@dataclass(frozen=True, kw_only=True)
class FittedPoint:
    """A point that was measured, and what fits say about it."""

    key: LatencyKey
    tokens: int
    history: int
    batch: int
    seconds: float
    """The least of its measurements."""
    fitted: float
    """By coefficients fitted to all points."""
    held_out: float
    """By coefficients fitted to all points but this one."""


def fit_table(name: str, steps: Sequence[StepRow], links: Sequence[LinkRow]) -> LatencyTable:
    """All that the rows tell; what was not measured is left out.

    Raises:
        ConfigError: a measured time is not positive.
    """
    by_key = least_times(steps)
    return LatencyTable(
        name=name,
        exact=EXACT,
        steps=tuple(
            (key, _fit_steps(points)) for key, points in by_key.items() if key.strategy != DECODE
        ),
        decode=tuple(
            (key, _fit_iterations(points))
            for key, points in by_key.items()
            if key.strategy == DECODE
        ),
        links=tuple((kind, fit_link(found)) for kind, found in links_by_kind(links).items()),
    )


def fitted_points(steps: Sequence[StepRow]) -> list[FittedPoint]:
    """Every measured point beside what fits say about it, those without others left out."""
    return [
        FittedPoint(
            key=key,
            tokens=point[0],
            history=point[1],
            batch=point[2],
            seconds=seconds,
            fitted=_predicted(key, points, point),
            held_out=_predicted(
                key, {other: it for other, it in points.items() if other != point}, point
            ),
        )
        for key, points in least_times(steps).items()
        if len(points) > 1
        for point, seconds in sorted(points.items())
    ]


def least_times(steps: Iterable[StepRow]) -> dict[LatencyKey, dict[Point, float]]:
    """Least seconds of each point of each kind of step, in order.

    Whatever disturbs a step only makes it longer, and is not there when the next step is
    predicted; what serving itself adds, every time, is learned by refitting.
    """
    found: dict[tuple[LatencyKey, Point], list[float]] = defaultdict(list)
    for row in steps:
        found[key_of(row), (row.tokens, row.history, row.batch)].append(row.seconds)
    by_key: dict[LatencyKey, dict[Point, float]] = defaultdict(dict)
    for (key, point), seconds in sorted(found.items()):
        by_key[key][point] = min(seconds)
    return by_key


def key_of(row: StepRow) -> LatencyKey:
    """What a row was measured of."""
    instances = sum(int(number) for number in row.group_shape.split("+"))
    return LatencyKey(strategy=row.strategy, sp=instances, tp=row.tp)


def links_by_kind(links: Iterable[LinkRow]) -> dict[str, list[LinkMeasurement]]:
    """Measurements by kind of link, oldest first."""
    by_kind: dict[str, list[LinkMeasurement]] = defaultdict(list)
    for row in links:
        by_kind[row.kind].append(LinkMeasurement(size=row.bytes, seconds=row.seconds))
    return by_kind


def _predicted(key: LatencyKey, points: dict[Point, float], point: Point) -> float:
    """Seconds at `point` by a fit to `points`."""
    tokens, history, batch = point
    if key.strategy == DECODE:
        return _fit_iterations(points).predict_ns(batch, batch * history) / 1e9
    return _fit_steps(points).predict_batch_ns([(tokens, history)] * batch) / 1e9


def _fit_steps(points: dict[Point, float]) -> StepCost:
    return fit_step(
        [
            StepMeasurement(rows=((tokens, history),) * batch, seconds=seconds)
            for (tokens, history, batch), seconds in points.items()
        ]
    )


def _fit_iterations(points: dict[Point, float]) -> DecodeCost:
    return fit_decode(
        [
            DecodeMeasurement(batch=batch, context=batch * history, seconds=seconds)
            for (_, history, batch), seconds in points.items()
        ]
    )
