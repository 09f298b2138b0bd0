"""Least squares of a few coefficients, none of which may be negative.

Fitting the empirical rule between ring pass-KV and ring pass-Q (Context Parallelism App. D).

The line of h(T, P) = 0 in the plane of ln T and ln(T / (T + P)) that separates points at which one
or the other was faster. Logistic regression, each point weighted by how much faster: where both
take as long, either is right. The paper does not say how it fitted.
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
    """(k,) coefficients with the least sum of squared relative errors.

    Every subset of features is tried: with so few that is exact, and needs no iteration.

    Args:
        features_nk: of each measurement; a column without a number other than 0 gets 0.
        seconds_n: measured, positive.
        whole_n: what errors are relative to, where the seconds are only a part; None is these.
    """
    if whole_n is None:
        whole_n = seconds_n
    weighted_nk, wanted_n = features_nk / whole_n[:, None], seconds_n / whole_n
    # Columns of one size: bytes squared beside ones lose their digits.
    scale_k = np.abs(weighted_nk).max(axis=0)
    usable = np.flatnonzero(scale_k > 0)
    best_k, least = np.zeros(features_nk.shape[1]), float("inf")
    for count in range(1, len(usable) + 1):
        for chosen in combinations(usable.tolist(), count):
            part_nk = weighted_nk[:, chosen] / scale_k[list(chosen)]
            found, *_ = np.linalg.lstsq(part_nk, wanted_n, rcond=None)
            if (found < 0).any():
                continue
            error = float(((part_nk @ found - wanted_n) ** 2).sum())
            if error < least:
                least = error
                best_k = np.zeros(features_nk.shape[1])
                best_k[list(chosen)] = found / scale_k[list(chosen)]
    return best_k


RIDGE = 1e-3
"""Keeps coefficients finite where a line separates all points, as it mostly does, or where the
points lie on a line themselves, as they do at a fixed length of context."""
STEPS, ENOUGH = 100, 1e-10
"""Of Newton's method, and the change that ends it."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RingPoint:
    """A prefill that was measured both ways."""

    new: int
    history: int
    kv_s: float
    q_s: float

    @property
    def gain(self) -> float:
        """How much longer pass-Q takes, as a natural logarithm; negative where it is faster."""
        return log(self.q_s / self.kv_s)


def fit_rule(points: Iterable[RingPoint]) -> EmpiricalRule | None:
    """The rule that loses least on these points; None without any whose variants differ."""
    found = [point for point in points if point.gain]
    if not found:
        return None
    terms = np.array([[log(it.new), log(miss_rate(it.new, it.history))] for it in found])
    gains = np.array([it.gain for it in found])
    middle, spread = terms.mean(axis=0), terms.std(axis=0)
    spread[spread == 0] = 1.0
    scaled = np.column_stack([(terms - middle) / spread, np.ones(len(found))])
    weights = np.abs(gains) / np.abs(gains).mean()
    slopes = _regressed(scaled, (gains > 0).astype(np.float64), weights)
    alpha, beta = slopes[:2] / spread
    gamma = slopes[2] - alpha * middle[0] - beta * middle[1]
    return EmpiricalRule(alpha=float(alpha), beta=float(beta), gamma=float(gamma))


def _regressed(terms: Array, faster: Array, weights: Array) -> Array:
    """Weighted logistic regression with a ridge, by Newton's method: convex, so that it ends."""
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
    """How much longer the rule's choice takes than the faster one, relatively."""
    seconds = {"ring_kv": point.kv_s, "ring_q": point.q_s}
    return seconds[rule.choose(point.new, point.history)] / min(seconds.values()) - 1
