"""Fits of non-negative coefficients, and of the empirical rule for rings (Context Parallelism App.
D).

The rule is the line h(T, P) = 0 in the plane of ln T and ln(T / (T + P)) that separates points at
which pass-KV was faster from points at which pass-Q was. It is fitted by logistic regression. Each
point is weighted by how much faster one variant was: where both take as long, either is right. The
paper does not say how it fitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from math import log

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from csps.protocols.attention.ring_choice import EmpiricalRule, miss_rate

Floats = NDArray[np.float64]


def nonnegative_fit(
    features_nk: Floats, seconds_n: Floats, whole_n: Floats | None = None
) -> Floats:
    """Return (k,) non-negative coefficients with the least sum of squared relative errors.

    Args:
        features_nk: features of each measurement; a column of zeros gets the coefficient 0.
        seconds_n: measured seconds, positive.
        whole_n: seconds to which errors are relative, if `seconds_n` are only a part; None: those.
    """
    if whole_n is None:
        whole_n = seconds_n
    weighted_nk, target_n = features_nk / whole_n[:, None], seconds_n / whole_n
    # Without scaling, columns of bytes squared would cost columns of ones their precision.
    scale_k = np.abs(weighted_nk).max(axis=0)
    usable = np.flatnonzero(scale_k > 0)
    best_k, least = np.zeros(features_nk.shape[1]), float("inf")
    # Trying every subset of features is exact, and with so few of them as fast as an iteration.
    for count in range(1, len(usable) + 1):
        for chosen in combinations(usable.tolist(), count):
            part_nk = weighted_nk[:, chosen] / scale_k[list(chosen)]
            found, *_ = np.linalg.lstsq(part_nk, target_n, rcond=None)
            if (found < 0).any():
                continue
            error = float(((part_nk @ found - target_n) ** 2).sum())
            if error < least:
                least = error
                best_k = np.zeros(features_nk.shape[1])
                best_k[list(chosen)] = found / scale_k[list(chosen)]
    return best_k


RIDGE = 1e-3
"""Weight that keeps coefficients finite where a line separates all points, as is usual, and
where all points lie on a line, as at a fixed context length."""
STEPS, ENOUGH = 100, 1e-10
"""Newton's method: largest number of steps, and the change that ends it."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RingPoint:
    """A prefill that was measured with both variants."""

    new: int
    history: int
    kv_s: float
    q_s: float

    @property
    def gain(self) -> float:
        """Logarithm of pass-Q's time over pass-KV's; negative where pass-Q is faster."""
        return log(self.q_s / self.kv_s)


def fit_rule(points: Iterable[RingPoint]) -> EmpiricalRule | None:
    """Return the rule that loses least on these points; None if no point's variants differ."""
    found = [point for point in points if point.gain]
    if not found:
        return None
    terms = np.array(
        [[log(point.new), log(miss_rate(point.new, point.history))] for point in found]
    )
    gains = np.array([point.gain for point in found])
    middle, spread = terms.mean(axis=0), terms.std(axis=0)
    spread[spread == 0] = 1.0
    scaled = np.column_stack([(terms - middle) / spread, np.ones(len(found))])
    weights = np.abs(gains) / np.abs(gains).mean()
    slopes = _regressed(scaled, (gains > 0).astype(np.float64), weights)
    alpha, beta = slopes[:2] / spread
    gamma = slopes[2] - alpha * middle[0] - beta * middle[1]
    return EmpiricalRule(alpha=float(alpha), beta=float(beta), gamma=float(gamma))


def _regressed(terms: Array, faster: Array, weights: Array) -> Array:
    """Return the slopes of a weighted logistic regression with a ridge, by Newton's method."""
    slopes, ridge = np.zeros(terms.shape[1]), RIDGE * np.eye(terms.shape[1])
    for _ in range(STEPS):
        chance = 1 / (1 + np.exp(-np.clip(terms @ slopes, -50, 50)))
        gradient = terms.T @ (weights * (chance - faster)) + ridge @ slopes
        curvature = (terms * (weights * chance * (1 - chance))[:, None]).T @ terms + ridge
        change = np.linalg.solve(curvature, gradient)
        slopes = slopes - change
        if np.abs(change).max() < ENOUGH:
            break
    return slopes


def regret(rule: EmpiricalRule, point: RingPoint) -> float:
    """Return the relative extra time of the rule's choice over the faster variant."""
    seconds = {"ring_kv": point.kv_s, "ring_q": point.q_s}
    return seconds[rule.choose(point.new, point.history)] / min(seconds.values()) - 1
