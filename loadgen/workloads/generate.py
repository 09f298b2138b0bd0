"""Generated workloads: arrivals (Poisson, bursty or even, at a constant or changing rate) with
sampled lengths.

Arrivals are sampled at rate 1 and then moved onto the time axis by the inverse of the expected
number of arrivals so far (time rescaling). A ramp of Poisson arrivals is thus an exact
inhomogeneous Poisson process. Arrivals are not stretched afterwards to end at a round time, as some
generators do, because this would make them more regular than stated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from csps.loadgen.workloads.named import Workload
from csps.loadgen.workloads.request import FittedRequests, WorkloadRequest, fit

NS = 1_000_000_000

Nanoseconds = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """A rate that changes over the run and stays at its last value afterwards."""

    strategy: Literal["linear", "exponential"]
    """Growth over time: by requests per second each second, or by percent each second."""
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        if not (0 <= self.start_rps < math.inf and 0 < self.end_rps < math.inf):
            raise ValueError(f"a ramp needs finite rates, its last above 0: {self}")
        if self.strategy == "exponential" and self.start_rps == 0:
            raise ValueError("an exponential ramp cannot start at 0 requests/s")


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """The arrival process of a workload."""

    rate: float = math.inf
    """Requests per second; infinite: all at once. Ignored with a ramp."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier, infinite is
    evenly spaced. The coefficient of variation is burstiness ** -0.5.
    """
    ramp: Ramp | None = None

    def __post_init__(self) -> None:
        if not self.rate > 0 or not self.burstiness > 0:
            raise ValueError(f"rate and burstiness must be above 0: {self}")

    def draw(self, requests: int, rng: np.random.Generator) -> Nanoseconds:
        """Return ascending arrival times from the start, int64 nanoseconds."""
        if self.ramp is None and math.isinf(self.rate):
            return np.zeros(requests, np.int64)
        expected = np.cumsum(self._gaps(requests, rng))
        seconds = expected / self.rate if self.ramp is None else _ramped(self.ramp, expected)
        return np.rint(seconds * NS).astype(np.int64)

    def _gaps(self, requests: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Return the gaps between arrivals at rate 1."""
        if math.isinf(self.burstiness):
            return np.ones(requests)
        return rng.gamma(self.burstiness, 1 / self.burstiness, requests)


def _ramped(ramp: Ramp, expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds until so many arrivals are expected; the ramp ends with the last one."""
    requests, start, end = len(expected), ramp.start_rps, ramp.end_rps
    inside = np.minimum(expected, requests)
    if math.isclose(start, end):
        seconds = inside / end
    elif ramp.strategy == "linear":
        # expected(t) = start t + slope t^2 / 2, over 2 requests / (start + end) seconds
        slope = (end - start) * (start + end) / (2 * requests)
        seconds = 2 * inside / (start + np.sqrt(start**2 + 2 * slope * inside))
    else:
        # expected(t) = start (e^(growth t) - 1) / growth
        growth = (end - start) / requests
        seconds = np.log1p(growth * inside / start) / growth
    return np.asarray(seconds + (expected - inside) / end)


@dataclass(frozen=True, kw_only=True)
class Size:
    """Scaling of a workload for a server that is smaller than the papers'."""

    longest_input: int | None = None
    """Longest prompt after scaling all prompts by one factor. None: as published."""
    shortest_input: int = 1
    """Shortest prompt after scaling."""
    longest_output: int | None = None
    """Longest answer; longer answers are shortened to it. None: as published."""
    positions: int | None = None
    """Positions of the model; longer prompts are cut after scaling. None: no limit."""


def generate(
    workload: Workload,
    requests: int,
    *,
    arrivals: Arrivals,
    seed: int = 0,
    size: Size | None = None,
) -> FittedRequests:
    """Return sampled requests; the same arguments give the same requests.

    Arrivals and lengths have random generators of their own, so another rate leaves the lengths
    unchanged.

    Args:
        requests: number of requests.
        arrivals: the arrival process.
        seed: seed of both generators.
        size: fits the workload to a smaller server.

    Raises:
        ValueError: an answer leaves no position for its prompt.
    """
    size = size or Size()
    lengths_rng, arrivals_rng = np.random.default_rng(seed).spawn(2)
    inputs, outputs = workload.draw(requests, lengths_rng)
    if size.longest_input is not None:
        scaled = np.rint(inputs * (size.longest_input / workload.longest_input))
        inputs = np.maximum(scaled.astype(np.int64), size.shortest_input)
    if size.longest_output is not None:
        outputs = np.minimum(outputs, size.longest_output)
    times = arrivals.draw(requests, arrivals_rng)
    sampled = [
        WorkloadRequest(arrival_ns=time, input_length=length, output_length=answer)
        for time, length, answer in zip(
            times.tolist(), inputs.tolist(), outputs.tolist(), strict=True
        )
    ]
    if size.positions is None:
        return FittedRequests(requests=tuple(sampled), cut=0)
    return fit(sampled, size.positions)
