"""Arrival processes against the distributions that they are named after, by scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from csps.loadgen.workloads.generate import NS, Arrivals, Ramp

REQUESTS = 20_000
UNLIKELY = 1e-4
"""A p-value under which a test of a fixed seed fails."""


def seconds(arrivals: Arrivals, requests: int = REQUESTS) -> NDArray[np.float64]:
    return arrivals.draw(requests, np.random.default_rng(7)) / NS


def gaps(arrivals: Arrivals) -> NDArray[np.float64]:
    return np.diff(seconds(arrivals), prepend=0.0)


def test_poisson_gaps_are_exponential() -> None:
    found = gaps(Arrivals(rate=40))
    assert stats.kstest(found, stats.expon(scale=1 / 40).cdf).pvalue > UNLIKELY
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 4 / math.sqrt(REQUESTS)


def test_poisson_counts_have_their_mean_for_a_variance() -> None:
    """A stretched sample, as some generators make it, does not have this property."""
    counts = np.histogram(seconds(Arrivals(rate=40)), bins=np.arange(0, 480))[0]
    index = (counts.var(ddof=1) / counts.mean()) * (len(counts) - 1)
    assert UNLIKELY < stats.chi2(len(counts) - 1).cdf(index) < 1 - UNLIKELY


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_gamma_gaps(burstiness: float) -> None:
    found = gaps(Arrivals(rate=5, burstiness=burstiness))
    expected = stats.gamma(burstiness, scale=1 / (5 * burstiness))
    assert stats.kstest(found, expected.cdf).pvalue > UNLIKELY
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_infinite_burstiness_is_even_and_infinite_rate_is_at_once() -> None:
    assert gaps(Arrivals(rate=8, burstiness=math.inf)) == pytest.approx(1 / 8)
    assert not Arrivals().draw(5, np.random.default_rng(0)).any()


@pytest.mark.parametrize(
    ("strategy", "start", "end"),
    [("linear", 1, 9), ("linear", 9, 1), ("linear", 0, 4), ("exponential", 1, 16)],
)
def test_a_ramp_is_an_inhomogeneous_poisson_process(
    strategy: str, start: float, end: float
) -> None:
    """The arrivals, moved to the integral of the intended rate, are Poisson at rate 1."""
    found = seconds(Arrivals(ramp=Ramp(strategy=strategy, start_rps=start, end_rps=end)))  # type: ignore[arg-type]
    if strategy == "linear":
        span = 2 * REQUESTS / (start + end)
        rate = lambda t: start + (end - start) * t / span  # noqa: E731
    else:
        span = REQUESTS * math.log(end / start) / (end - start)
        rate = lambda t: start * (end / start) ** (t / span)  # noqa: E731
    grid = np.linspace(0, span, 200_001)
    middles = (grid[1:] + grid[:-1]) / 2
    integral = np.concatenate([[0], np.cumsum(rate(middles) * (grid[1] - grid[0]))])
    inside = found[found < span]
    assert len(inside) > 0.97 * REQUESTS
    moved = np.diff(np.interp(inside, grid, integral), prepend=0.0)
    assert stats.kstest(moved, stats.expon.cdf).pvalue > UNLIKELY


def test_an_even_ramp_has_its_rates_at_both_ends() -> None:
    ramp = Ramp(strategy="linear", start_rps=2, end_rps=10)
    found = np.diff(seconds(Arrivals(ramp=ramp, burstiness=math.inf), 6000))
    assert 1 / found[:10].mean() == pytest.approx(2, rel=0.05)
    assert 1 / found[-10:].mean() == pytest.approx(10, rel=0.01)
    assert Arrivals(ramp=ramp, burstiness=math.inf).draw(6000, np.random.default_rng())[
        -1
    ] == pytest.approx(6000 / 6 * NS)


@pytest.mark.parametrize("wrong", [{"rate": 0}, {"rate": -1}, {"burstiness": 0}])
def test_an_invalid_rate_is_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Arrivals(**wrong)


@pytest.mark.parametrize("wrong", [("linear", 1, 0), ("exponential", 0, 1), ("linear", -1, 1)])
def test_an_invalid_ramp_is_rejected(wrong: tuple[str, float, float]) -> None:
    with pytest.raises(ValueError, match="ramp"):
        Ramp(strategy=wrong[0], start_rps=wrong[1], end_rps=wrong[2])  # type: ignore[arg-type]
