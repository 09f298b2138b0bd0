"""Least squares of a few coefficients, none of which may be negative."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

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
