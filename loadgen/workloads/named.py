"""The workloads of the papers, by name, sampled from published facts about their lengths.

The data sets themselves are not included: their licenses and sizes forbid it, and a server's speed
depends on lengths. `source` says what is published and what is assumed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from csps.protocols.core.errors import ConfigError, nearest

Tokens = NDArray[np.int64]

_NORMAL = NormalDist()
_Z99 = _NORMAL.inv_cdf(0.99)


class Lengths(Protocol):
    """A distribution of lengths.

    One uniform number makes one length, so that a longer workload begins with the shorter one of
    the same seed.
    """

    @property
    def longest(self) -> int: ...

    def at(self, shares_n: NDArray[np.float64]) -> Tokens:
        """Return the lengths at these quantiles in [0, 1)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A single length."""

    longest: int

    def at(self, shares_n: NDArray[np.float64]) -> Tokens:
        """See `Lengths`."""
        return np.full(len(shares_n), self.longest, np.int64)


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """Lengths in a range, all equally likely."""

    shortest: int
    longest: int

    @classmethod
    def around(cls, middle: int, ratio: float) -> Uniform:
        """Return the range from `1 - ratio` to `1 + ratio` of a length, at least one token."""
        return cls(
            shortest=max(1, math.floor(middle * (1 - ratio))),
            longest=max(1, math.ceil(middle * (1 + ratio))),
        )

    def at(self, shares_n: NDArray[np.float64]) -> Tokens:
        """See `Lengths`."""
        steps = self.longest - self.shortest + 1
        return self.shortest + np.floor(shares_n * steps).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class LogUniform:
    """Lengths for which every doubling is equally likely."""

    shortest: int
    longest: int

    def at(self, shares_n: NDArray[np.float64]) -> Tokens:
        """See `Lengths`."""
        return _whole(self.shortest * (self.longest / self.shortest) ** shares_n)


@dataclass(frozen=True, kw_only=True)
class ClippedLognormal:
    """A lognormal whose tail is moved to the longest length, which preserves the other
    quantiles.
    """

    median: float
    sigma: float
    longest: int

    @classmethod
    def with_quantiles(cls, *, median: float, p99: float, longest: int) -> ClippedLognormal:
        """Return the distribution with this median and 99th percentile."""
        return cls(median=median, sigma=math.log(p99 / median) / _Z99, longest=longest)

    def at(self, shares_n: NDArray[np.float64]) -> Tokens:
        """See `Lengths`."""
        lengths_n = self.median * np.exp(self.sigma * _normal_quantiles(shares_n))
        return np.clip(_whole(lengths_n), 1, self.longest)


@dataclass(frozen=True, kw_only=True)
class TruncatedLognormal:
    """A lognormal that is sampled between two lengths only."""

    median: float
    """Median of the lognormal before truncation."""
    sigma: float
    shortest: int
    longest: int

    @classmethod
    def with_mean(
        cls, *, mean: float, sigma: float, shortest: int, longest: int
    ) -> TruncatedLognormal:
        """Return the distribution with this mean after truncation, which grows with the median.

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
        """Return the mean after truncation, in closed form."""
        low, high = self._bounds
        mass = _mass(low, high)
        if mass <= 0:  # all of it lies beyond one end
            return float(self.shortest if low > 0 else self.longest)
        shifted = _mass(low - self.sigma, high - self.sigma)
        return self.median * math.exp(self.sigma**2 / 2) * shifted / mass

    @cached_property
    def _bounds(self) -> tuple[float, float]:
        """Return shortest and longest in standard deviations from the median."""
        return (
            math.log(self.shortest / self.median) / self.sigma,
            math.log(self.longest / self.median) / self.sigma,
        )

    def at(self, shares_n: NDArray[np.float64]) -> Tokens:
        """See `Lengths`."""
        low, high = map(_NORMAL.cdf, self._bounds)
        lengths_n = self.median * np.exp(
            self.sigma * _normal_quantiles(low + shares_n * (high - low))
        )
        return np.clip(_whole(lengths_n), self.shortest, self.longest)


@dataclass(frozen=True)
class Quantiles:
    """Lengths between measured quantiles, equally likely between two of them."""

    points: tuple[tuple[float, int], ...]
    """(share, length), both ascending from a share of 0 to one of 1."""

    @property
    def longest(self) -> int:
        """Return the length at a share of 1."""
        return self.points[-1][1]

    def at(self, shares_n: NDArray[np.float64]) -> Tokens:
        """See `Lengths`."""
        shares, lengths = zip(*self.points, strict=True)
        return _whole(np.interp(shares_n, shares, lengths))


@dataclass(frozen=True, kw_only=True)
class Zipf:
    """Lengths x with weight x ** -alpha."""

    alpha: float
    shortest: int
    longest: int

    @cached_property
    def _cumulated(self) -> NDArray[np.float64]:
        weights = np.arange(self.shortest, self.longest + 1, dtype=np.float64) ** -self.alpha
        cumulated: NDArray[np.float64] = np.cumsum(weights / weights.sum())
        return cumulated

    def at(self, shares_n: NDArray[np.float64]) -> Tokens:
        """See `Lengths`."""
        places = np.searchsorted(self._cumulated, shares_n, side="right")
        return np.minimum(self.shortest + places, self.longest).astype(np.int64)


def _mass(low: float, high: float) -> float:
    """Return the mass of the standard normal between two bounds, computed from the nearer tail."""
    if low > 0:
        low, high = -high, -low
    # erfc, because statistics.NormalDist.cdf is 0 beyond 8 standard deviations
    return (math.erfc(-high / math.sqrt(2)) - math.erfc(-low / math.sqrt(2))) / 2


def _normal_quantiles(shares_n: NDArray[np.float64]) -> NDArray[np.float64]:
    inside = np.clip(shares_n, 1e-12, 1 - 1e-12)
    return np.fromiter(map(_NORMAL.inv_cdf, inside), np.float64, len(inside))


def _whole(lengths_n: NDArray[np.float64]) -> Tokens:
    return np.rint(lengths_n).astype(np.int64)


K = 1000
Pairs = tuple[Tokens, Tokens]
"""Lengths of prompts and of answers."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A distribution of prompt and answer lengths that belong together."""

    name: str
    source: str
    longest_input: int
    draw: Callable[[int, np.random.Generator], Pairs]


def workload(name: str) -> Workload:
    """Return a workload by name; `zipf:1.2` is Zipf with an alpha of 1.2.

    Raises:
        ConfigError: the name is unknown.
    """
    if match := re.fullmatch(r"zipf[:(]?([0-9.]+)\)?", name):
        return zipf(float(match[1]))
    if name not in WORKLOADS:
        raise ConfigError(f"unknown workload '{name}'{nearest(name, [*WORKLOADS, 'zipf:ALPHA'])}")
    return WORKLOADS[name]


def independent(name: str, prompts: Lengths, answers: Lengths, source: str) -> Workload:
    """Return a workload whose answers do not depend on the prompt's length."""

    def draw(requests: int, rng: np.random.Generator) -> Pairs:
        shares = rng.random((requests, 2))
        return prompts.at(shares[:, 0]), answers.at(shares[:, 1])

    return Workload(name=name, source=source, longest_input=prompts.longest, draw=draw)


def random_lengths(input_length: int, output_length: int, range_ratio: float = 0.0) -> Workload:
    """Return a workload whose requests have one size, or sizes around it.

    Args:
        range_ratio: lengths are drawn evenly from (1 - ratio) to (1 + ratio) of the given ones.
    """
    if not range_ratio:
        return independent(
            "random",
            Constant(longest=input_length),
            Constant(longest=output_length),
            "every request of the same size",
        )
    return independent(
        "random",
        Uniform.around(input_length, range_ratio),
        Uniform.around(output_length, range_ratio),
        f"lengths drawn evenly, at most {range_ratio:g} away from the given ones",
    )


def _mixed(name: str, parts: tuple[Workload, ...], source: str) -> Workload:
    """Return a workload that takes each request from one of several, all equally likely."""

    def draw(requests: int, rng: np.random.Generator) -> Pairs:
        chosen = rng.integers(len(parts), size=requests)
        sampled = np.array([part.draw(requests, rng) for part in parts])
        inputs, outputs = sampled[chosen, :, np.arange(requests)].T
        return inputs, outputs

    longest = max(part.longest_input for part in parts)
    return Workload(name=name, source=source, longest_input=longest, draw=draw)


def zipf(alpha: float) -> Workload:
    """Return the workload of LoongServe's Fig. 12: many short prompts, few of up to 200K tokens."""
    prompts = Zipf(alpha=alpha, shortest=10, longest=199_999)

    def draw(requests: int, rng: np.random.Generator) -> Pairs:
        shares = rng.random((requests, 2))
        inputs = prompts.at(shares[:, 0])
        chat, document, fact = (
            answers.at(shares[:, 1]) for answers in (_SHAREGPT_OUT, _LEVAL_OUT, _LVEVAL_OUT)
        )
        beyond = np.where(inputs < _LVEVAL_SHORTEST, document, fact)
        return inputs, np.where(inputs <= _SHAREGPT_IN.longest, chat, beyond)

    return Workload(
        name=f"zipf:{alpha:g}",
        source="LoongServe Fig. 12 and its released script: 10 to 199,999 tokens, weight x^-alpha, "
        "answers of the request of Mixed that is nearest in length (here: ShareGPT's up to its "
        "longest prompt, L-Eval's up to LV-Eval's shortest, LV-Eval's beyond)",
        longest_input=prompts.longest,
        draw=draw,
    )


_SHARES = (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1)
_SHAREGPT_TOKENS = (6, 29, 143, 335, 459, 620, 822, 978, 1202, 1502, 1826, 2021, 2238)
_SHAREGPT_ANSWERS = (4, 7, 11, 18, 28, 51, 137, 239, 334, 440, 602, 765, 993)
_SHAREGPT_IN = Quantiles(tuple(zip(_SHARES, _SHAREGPT_TOKENS, strict=True)))
_SHAREGPT_OUT = Quantiles(tuple(zip(_SHARES, _SHAREGPT_ANSWERS, strict=True)))
_LEVAL_OUT = TruncatedLognormal.with_mean(mean=90.7, sigma=1.0, shortest=1, longest=1024)
_LVEVAL_SHORTEST = 15_100
_LVEVAL_OUT = TruncatedLognormal(median=24, sigma=0.6, shortest=1, longest=64)
_TETRIS_OUT = TruncatedLognormal(median=200, sigma=0.7, shortest=16, longest=1024)

_NEEDLEBENCH = independent(
    "needlebench",
    ClippedLognormal.with_quantiles(median=113 * K, p99=995 * K, longest=1000 * K),
    ClippedLognormal.with_quantiles(median=348, p99=572, longest=1024),
    "CSPS Table 2: prompts median 113K, P99 995K, answers 348 and 572. Its standard deviation of "
    "506K cannot be met: no lengths between 0 and 1M have more than 500K",
)
_BOOKCORPUS = independent(
    "bookcorpus",
    ClippedLognormal.with_quantiles(median=97 * K, p99=406 * K, longest=406 * K),
    ClippedLognormal.with_quantiles(median=375, p99=631, longest=1024),
    "CSPS Table 2: prompts median 97K, P99 406K, answers 375 and 631; the lognormal that they set "
    "has 75K for a standard deviation, the table 183K",
)
_SHAREGPT = independent(
    "sharegpt",
    _SHAREGPT_IN,
    _SHAREGPT_OUT,
    "LoongServe: quantiles of the 1,000 requests that its released notebooks print: 6 to 2.2K "
    "tokens, 897 on average, answers below 1,000, 233 on average",
)
_LEVAL = independent(
    "l-eval",
    TruncatedLognormal.with_mean(mean=16.5 * K, sigma=0.9, shortest=2700, longest=210_500),
    _LEVAL_OUT,
    "LoongServe: 2.7K to 210.5K tokens; the mean is about that of L-Eval's tasks, by question; "
    "answers as LongBench's in DistServe, 91 on average; spread assumed",
)
_LVEVAL = independent(
    "lv-eval",
    LogUniform(shortest=_LVEVAL_SHORTEST, longest=497_300),
    _LVEVAL_OUT,
    "LoongServe: 15.1K to 497.3K tokens; LV-Eval: five levels that double, equally many questions, "
    "102K words on average; answers assumed: short, at most 64 tokens",
)
_MIXED = _mixed(
    "mixed", (_SHAREGPT, _LEVAL, _LVEVAL), "LoongServe: ShareGPT, L-Eval and LV-Eval, equal parts"
)


def _tetris(name: str, mean: float, shortest: int, longest: int) -> Workload:
    prompts = TruncatedLognormal.with_mean(
        mean=mean * K, sigma=0.8, shortest=shortest * K, longest=longest * K
    )
    published = f"{shortest}K to {longest}K tokens, {mean:g}K on average"
    source = f"Tetris: {published}; shape and answers assumed (lognormal, median 200)"
    return independent(f"tetris-{name}", prompts, _TETRIS_OUT, source)


WORKLOADS = {
    named.name: named
    for named in (
        _NEEDLEBENCH,
        _BOOKCORPUS,
        _SHAREGPT,
        _LEVAL,
        _LVEVAL,
        _MIXED,
        _tetris("short", 23.6, 4, 95),
        _tetris("medium", 32.8, 8, 142),
        _tetris("long", 50.1, 16, 190),
    )
}
"""Workloads by name. Zipf is missing because its name contains a number; see `workload`."""
