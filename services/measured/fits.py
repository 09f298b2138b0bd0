"""Fit rows of the scaling information base to the table and the ring rules of the scheduler.

`fit_table` makes the latency table. `fit_rings` makes the rule that chooses between ring pass-KV
and pass-Q, and stores it in the base.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from csps.configurator.costs.fitting import (
    DecodeMeasurement,
    LinkMeasurement,
    StepMeasurement,
    fit_decode,
    fit_link,
    fit_step,
)
from csps.configurator.costs.latency import DecodeCost, LatencyKey, LatencyTable, StepCost
from csps.configurator.model.fits import RingPoint, fit_rule, regret
from csps.configurator.model.scaling_information_base import (
    FitRow,
    LinkRow,
    ScalingInformationBase,
    StepRow,
)
from csps.protocols.attention.plan import RINGS
from csps.protocols.attention.ring_choice import FittedRule, miss_rate, parse_fitted

EXACT = "ulysses"
DECODE = "decode"
Point = tuple[int, int, int]
"""Type of a point: (tokens, history, batch)."""


@dataclass(frozen=True, kw_only=True)
class FittedPoint:
    """A measured point, and what fits predict for it."""

    key: LatencyKey
    tokens: int
    history: int
    batch: int
    seconds: float
    """Least of its measurements."""
    fitted: float
    """Prediction by coefficients fitted to all points."""
    held_out: float
    """Prediction by coefficients fitted to all points but this one."""


def fit_table(name: str, steps: Sequence[StepRow], links: Sequence[LinkRow]) -> LatencyTable:
    """Fit all that was measured; leave out the rest.

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
    """Return every measured point with its predictions, except a key's only point."""
    return [
        FittedPoint(
            key=key,
            tokens=point[0],
            history=point[1],
            batch=point[2],
            seconds=seconds,
            fitted=_predicted(key, points, point),
            held_out=_predicted(
                key, {other: least for other, least in points.items() if other != point}, point
            ),
        )
        for key, points in least_times(steps).items()
        if len(points) > 1
        for point, seconds in sorted(points.items())
    ]


def least_times(steps: Iterable[StepRow]) -> dict[LatencyKey, dict[Point, float]]:
    """Return the least seconds of each point of each kind of step, in order.

    A disturbance only makes a step longer, and is absent when the next step is predicted. Overheads
    of serving itself, which occur every time, are learned by refitting.
    """
    found: dict[tuple[LatencyKey, Point], list[float]] = defaultdict(list)
    for row in steps:
        found[key_of(row), (row.tokens, row.history, row.batch)].append(row.seconds)
    by_key: dict[LatencyKey, dict[Point, float]] = defaultdict(dict)
    for (key, point), seconds in sorted(found.items()):
        by_key[key][point] = min(seconds)
    return by_key


def key_of(row: StepRow) -> LatencyKey:
    """Return what a row measured: strategy and group size."""
    instances = sum(int(count) for count in row.group_shape.split("+"))
    return LatencyKey(strategy=row.strategy, sp=instances, tp=row.tp)


def links_by_kind(links: Iterable[LinkRow]) -> dict[str, list[LinkMeasurement]]:
    """Group measurements by kind of link, oldest first."""
    by_kind: dict[str, list[LinkMeasurement]] = defaultdict(list)
    for row in links:
        by_kind[row.kind].append(LinkMeasurement(size=row.bytes, seconds=row.seconds))
    return by_kind


def _predicted(key: LatencyKey, points: dict[Point, float], point: Point) -> float:
    """Predict the seconds at `point` by a fit to `points`."""
    tokens, history, batch = point
    if key.strategy == DECODE:
        return _fit_iterations(points).predict_ns(batch, batch * history) / 1e9
    return _fit_steps(points).predict_batch_ns([(tokens, history)] * batch) / 1e9


def _fit_steps(points: dict[Point, float]) -> StepCost:
    return fit_step(
        [
            StepMeasurement(chunks=((tokens, history),) * batch, seconds=seconds)
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


RING = "ring"
"""Name of the fits that hold rules."""
CLOSE = 0.03
"""Fraction by which a choice may be slower and still count as good."""

GroupSize = tuple[int, int]
"""Type of a group's size: (instances, ranks of each)."""


def ring_points(rows: Sequence[StepRow]) -> dict[GroupSize, list[RingPoint]]:
    """Return prefills that were measured with both rings, by the size of their group."""
    seconds: dict[tuple[GroupSize, int, int], dict[str, float]] = defaultdict(dict)
    for key, points in least_times(row for row in rows if row.strategy in RINGS).items():
        for (tokens, history, _), least in points.items():
            seconds[(key.sp, key.tp), tokens, history][key.strategy] = least
    by_size: dict[GroupSize, list[RingPoint]] = defaultdict(list)
    for (size, tokens, history), both in sorted(seconds.items()):
        if len(both) == len(RINGS):
            kv_s, q_s = (both[ring] for ring in RINGS)
            by_size[size].append(RingPoint(new=tokens, history=history, kv_s=kv_s, q_s=q_s))
    return by_size


def fit_rings(base: ScalingInformationBase) -> tuple[FittedRule, ...]:
    """Fit the measured rings, and store the fit if it is new."""
    fitted = []
    for (sp, tp), points in ring_points(base.rows(StepRow)).items():
        ring_rule = fit_rule(points)
        if ring_rule is not None:
            fitted.append(FittedRule(sp=sp, tp=tp, rule=ring_rule))
    canonical = json.dumps([asdict(rule) for rule in fitted], sort_keys=True).encode()
    digest = hashlib.sha256(canonical).hexdigest()
    last = base.latest_fit(RING)
    if fitted and (last is None or last.digest != digest):
        date = datetime.now(UTC).isoformat(timespec="seconds")
        base.add(FitRow(name=RING, digest=digest, canonical=canonical, date=date))
    return tuple(fitted)


def fitted_rings(fit: FitRow | None) -> tuple[FittedRule, ...]:
    """Return the rules that `fit_rings` has stored."""
    return () if fit is None else parse_fitted(json.loads(fit.canonical))


def ring_lines(rows: Sequence[StepRow], fitted: Sequence[FittedRule]) -> Iterator[str]:
    """Yield both variants' times, the rule's choice, and the cost of a wrong choice."""
    points = ring_points(rows)
    for size in fitted:
        yield ""
        yield f"rings on {size.sp} instances, tp {size.tp}"
        yield f"{'new':>8}{'history':>9}{'missed':>8}{'pass-KV':>12}{'pass-Q':>12}  chosen"
        lost = [regret(size.rule, point) for point in points[size.sp, size.tp]]
        for point, loss in zip(points[size.sp, size.tp], lost, strict=True):
            wrong = f", {loss:.1%} slower" if loss else ""
            yield (
                f"{point.new:>8}{point.history:>9}{miss_rate(point.new, point.history):>8.1%}"
                f"{point.kv_s * 1e3:>9.2f} ms{point.q_s * 1e3:>9.2f} ms"
                f"  {size.rule.choose(point.new, point.history)}{wrong}"
            )
        rule, good = size.rule, sum(loss <= CLOSE for loss in lost)
        yield (
            f"  h(T, P) = {rule.alpha:.4g} ln T + {rule.beta:.4g} ln(T / (T + P)) "
            f"+ {rule.gamma:.4g}, pass-KV where positive"
        )
        yield f"  the faster one, or within {CLOSE:.0%} of it, at {good} of {len(lost)} points"
