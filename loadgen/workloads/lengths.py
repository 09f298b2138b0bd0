"""Distributions of lengths in tokens, set by what is published about a data set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]

_NORMAL = NormalDist()
_Z99 = _NORMAL.inv_cdf(0.99)


class Lengths(Protocol):
    """A distribution of lengths. One uniform number makes one length, so that a longer workload
    begins with the shorter one of the same seed."""

    @property
    def longest(self) -> int: ...

    def at(self, shares_n: NDArray[np.float64]) -> Tokens:
        """Lengths that these shares of all lengths, in [0, 1), do not exceed."""
        ...


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Every length the same."""

    longest: int

    def at(self, shares_n: NDArray[np.float64]) -> Tokens:
        """As `Lengths`."""
        return np.full(len(shares_n), self.longest, np.int64)


@dataclass(frozen=True, kw_only=True)
class LogUniform:
    """Every doubling as likely as any other."""

    shortest: int
    longest: int

    def at(self, shares_n: NDArray[np.float64]) -> Tokens:
        """As `Lengths`."""
        return _whole(self.shortest * (self.longest / self.shortest) ** shares_n)


@dataclass(frozen=True, kw_only=True)
class ClippedLognormal:
    """A lognormal whose tail is gathered at the longest length, so that its quantiles stay."""

    median: float
    sigma: float
    longest: int

    @classmethod
    def with_quantiles(cls, *, median: float, p99: float, longest: int) -> ClippedLognormal:
        """By its median and its 99th percentile."""
        return cls(median=median, sigma=math.log(p99 / median) / _Z99, longest=longest)

    def at(self, shares_n: NDArray[np.float64]) -> Tokens:
        """As `Lengths`."""
        lengths_n = self.median * np.exp(self.sigma * _normal_quantiles(shares_n))
        return np.clip(_whole(lengths_n), 1, self.longest)


@dataclass(frozen=True, kw_only=True)
class TruncatedLognormal:
    """A lognormal of which only the part between two lengths is drawn."""

    median: float
    """Of the lognormal before it is truncated."""
    sigma: float
    shortest: int
    longest: int

    @classmethod
    def with_mean(
        cls, *, mean: float, sigma: float, shortest: int, longest: int
    ) -> TruncatedLognormal:
        """By its mean after truncation, which grows with the median.

        Raises:
            ValueError: no median gives this mean.
        """
        low, high = math.log(shortest) - 20 * sigma, math.log(longest) + 20 * sigma
        for _ in range(100):
            middle = (low + high) / 2
            tried = cls(median=math.exp(middle), sigma=sigma, shortest=shortest, longest=longest)
            low, high = (middle, high) if tried.mean < mean else (low, middle)
        if not math.isclose(tried.mean, mean, rel_tol=1e-6):
            raise ValueError(f"lengths from {shortest} to {longest} cannot have mean {mean:g}")
        return tried

    @property
    def mean(self) -> float:
        """After truncation, in closed form."""
        low, high = self._bounds
        mass = _mass(low, high)
        if mass <= 0:  # all of it lies beyond one end
            return float(self.shortest if low > 0 else self.longest)
        shifted = _mass(low - self.sigma, high - self.sigma)
        return self.median * math.exp(self.sigma**2 / 2) * shifted / mass

    @cached_property
    def _bounds(self) -> tuple[float, float]:
        """Shortest and longest in standard deviations from the median."""
        return (
            math.log(self.shortest / self.median) / self.sigma,
            math.log(self.longest / self.median) / self.sigma,
        )

    def at(self, shares_n: NDArray[np.float64]) -> Tokens:
        """As `Lengths`."""
        low, high = map(_NORMAL.cdf, self._bounds)
        lengths_n = self.median * np.exp(
            self.sigma * _normal_quantiles(low + shares_n * (high - low))
        )
        return np.clip(_whole(lengths_n), self.shortest, self.longest)


@dataclass(frozen=True, kw_only=True)
class Zipf:
    """Length x with a weight of x ** -alpha."""

    alpha: float
    shortest: int
    longest: int

    @cached_property
    def _cumulated(self) -> NDArray[np.float64]:
        weights = np.arange(self.shortest, self.longest + 1, dtype=np.float64) ** -self.alpha
        cumulated: NDArray[np.float64] = np.cumsum(weights / weights.sum())
        return cumulated

    def at(self, shares_n: NDArray[np.float64]) -> Tokens:
        """As `Lengths`."""
        places = np.searchsorted(self._cumulated, shares_n, side="right")
        return np.minimum(self.shortest + places, self.longest).astype(np.int64)


def _mass(low: float, high: float) -> float:
    """Of the standard normal distribution between two bounds, from whichever tail is nearer."""
    if low > 0:
        low, high = -high, -low
    # erfc, because statistics.NormalDist.cdf is 0 beyond 8 standard deviations
    return (math.erfc(-high / math.sqrt(2)) - math.erfc(-low / math.sqrt(2))) / 2


def _normal_quantiles(shares_n: NDArray[np.float64]) -> NDArray[np.float64]:
    inside = np.clip(shares_n, 1e-12, 1 - 1e-12)
    return np.fromiter(map(_NORMAL.inv_cdf, inside), np.float64, len(inside))


def _whole(lengths_n: NDArray[np.float64]) -> Tokens:
    return np.rint(lengths_n).astype(np.int64)
