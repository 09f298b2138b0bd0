"""From measured rings to the rule that chooses between them, and back out of the base."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from csps.configurator.ring_fit import RingPoint, fit_rule, regret
from csps.configurator.scaling_information_base import FitRow, ScalingInformationBase, StepRow
from csps.protocols.plans import RINGS
from csps.protocols.ring_choice import FittedRule, miss_rate, parse_fitted
from csps.services.profiling.fitting import least_times

RING = "ring"
"""Name of the fits that hold rules."""
CLOSE = 0.03
"""A choice that takes so much longer than the other one is as good."""

Size = tuple[int, int]
"""(instances, ranks of each)."""


def ring_points(rows: Sequence[StepRow]) -> dict[Size, list[RingPoint]]:
    """Prefills that were measured both ways, by the size of their group."""
    seconds: dict[tuple[Size, int, int], dict[str, float]] = defaultdict(dict)
    for key, points in least_times(row for row in rows if row.strategy in RINGS).items():
        for (tokens, history, _), least in points.items():
            seconds[(key.sp, key.tp), tokens, history][key.strategy] = least
    by_size: dict[Size, list[RingPoint]] = defaultdict(list)
    for (size, tokens, history), both in sorted(seconds.items()):
        if len(both) == len(RINGS):
            kv_s, q_s = (both[ring] for ring in RINGS)
            by_size[size].append(RingPoint(new=tokens, history=history, kv_s=kv_s, q_s=q_s))
    return by_size


def fit_rings(base: ScalingInformationBase) -> tuple[FittedRule, ...]:
    """Fit what was measured, and keep it where it is new."""
    fitted = []
    for (sp, tp), points in ring_points(base.rows(StepRow)).items():
        rule = fit_rule(points)
        if rule is not None:
            fitted.append(FittedRule(sp=sp, tp=tp, rule=rule))
    canonical = json.dumps([asdict(it) for it in fitted], sort_keys=True).encode()
    digest = hashlib.sha256(canonical).hexdigest()
    last = base.latest_fit(RING)
    if fitted and (last is None or last.digest != digest):
        date = datetime.now(UTC).isoformat(timespec="seconds")
        base.add(FitRow(name=RING, digest=digest, canonical=canonical, date=date))
    return tuple(fitted)


def fitted_rings(fit: FitRow | None) -> tuple[FittedRule, ...]:
    """What `fit_rings` has kept."""
    return () if fit is None else parse_fitted(json.loads(fit.canonical))


def ring_lines(rows: Sequence[StepRow], fitted: Sequence[FittedRule]) -> Iterator[str]:
    """Both variants' times, which one the rule takes, and what that costs where it is wrong."""
    points = ring_points(rows)
    for it in fitted:
        yield ""
        yield f"rings on {it.sp} instances, tp {it.tp}"
        yield f"{'new':>8}{'history':>9}{'missed':>8}{'pass-KV':>12}{'pass-Q':>12}  chosen"
        lost = [regret(it.rule, point) for point in points[it.sp, it.tp]]
        for point, loss in zip(points[it.sp, it.tp], lost, strict=True):
            wrong = f", {loss:.1%} slower" if loss else ""
            yield (
                f"{point.new:>8}{point.history:>9}{miss_rate(point.new, point.history):>8.1%}"
                f"{point.kv_s * 1e3:>9.2f} ms{point.q_s * 1e3:>9.2f} ms"
                f"  {it.rule.choose(point.new, point.history)}{wrong}"
            )
        rule, good = it.rule, sum(loss <= CLOSE for loss in lost)
        yield (
            f"  h(T, P) = {rule.alpha:.4g} ln T + {rule.beta:.4g} ln(T / (T + P)) "
            f"+ {rule.gamma:.4g}, pass-KV where positive"
        )
        yield f"  the faster one, or within {CLOSE:.0%} of it, at {good} of {len(lost)} points"
