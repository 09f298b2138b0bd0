"""Fits of latency coefficients to measured times, before and while serving.

`NormalEquations` solves small least-squares problems with nonnegative coefficients. `fit_step`,
`fit_decode` and `fit_link` fit profiled times. `Refit` updates a table from the steps of a live
server: recent steps count most, and the first table takes part with a fixed weight, stretched by
how much longer steps of that group take now. So a machine that is slower as a whole is followed at
once, and one that is slower at long histories only where that was observed.

All arithmetic is in plain floats and a fixed order, so that the same measurements give the same
bytes on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from operator import itemgetter

from csps.configurator.costs.latency import (
    ChunkSize,
    DecodeCost,
    LatencyKey,
    LatencyTable,
    LinearDecodeCost,
    LinkCost,
    StepCost,
)
from csps.protocols.core.errors import ConfigError

SINGULAR = 1e-12
"""Smallest scaled Cholesky pivot; a column below it is a combination of the others."""
WEIGHT_EXPONENT = 0.1
"""Exponent of the weight t^0.1 of a relative error: LoongServe's choice. Scheduling depends on
ratios of times, but a short step that is off by a tenth costs less than a long one."""
REGIMES_PAY = 0.5
"""Largest share of the squared error with which a second decode regime is worth its parameters."""
HALF_LIFE = 32
"""Steps of a group shape after which an observation counts half."""
PRIOR_WEIGHT = 4.0
"""Weight of the first table, in observations."""
OUTLIER = 4.0
"""Largest ratio of an observation to its prediction, and of the prediction to the observation; a
process that was suspended says nothing about the machine."""
PRIOR_CHUNKS: tuple[ChunkSize, ...] = tuple(
    (length, history) for length in (256, 2_048, 16_384, 131_072) for history in (0, 4 * length)
)
"""Chunks at which the first table takes part."""


class NormalEquations:
    """Weighted measurements of `value = columns . x`, accumulated as X'WX and X'Wy."""

    def __init__(self, columns: int) -> None:
        self._gram = [[0.0] * columns for _ in range(columns)]
        self._moment = [0.0] * columns

    def add(self, columns: Sequence[float], value: float, weight: float) -> None:
        """Add one measurement; `weight` multiplies its squared error."""
        for i, left in enumerate(columns):
            scaled = weight * left
            self._moment[i] += scaled * value
            row = self._gram[i]
            for j, right in enumerate(columns):
                row[j] += scaled * right

    def decay(self, factor: float) -> None:
        """Scale the weight of all measurements so far."""
        self._moment = [factor * value for value in self._moment]
        self._gram = [[factor * value for value in row] for row in self._gram]

    def plus(self, other: NormalEquations, factor: float = 1.0) -> NormalEquations:
        """Return both sets of measurements together, the values of `other` times `factor`."""
        whole = NormalEquations(len(self._moment))
        whole._moment = [
            mine + factor * theirs for mine, theirs in zip(self._moment, other._moment, strict=True)
        ]
        whole._gram = [
            [mine + theirs for mine, theirs in zip(row, others, strict=True)]
            for row, others in zip(self._gram, other._gram, strict=True)
        ]
        return whole

    def solve(self) -> list[float]:
        """Return the coefficients >= 0 with the least squared error."""
        # The optimum is the unconstrained solution over some subset of the columns. Trying all
        # subsets, 15 for four columns, is exact and simpler than an active-set method.
        best, least = [0.0] * len(self._moment), 0.0
        scales = [math.sqrt(self._gram[i][i]) for i in range(len(self._moment))]
        used = [i for i, scale in enumerate(scales) if scale > 0]
        for size in range(1, len(used) + 1):
            for subset in combinations(used, size):
                solution = self._over(subset, scales)
                if solution is None or min(solution) < 0:
                    continue
                error = -_dot(solution, [self._moment[i] / scales[i] for i in subset])
                if error < least:
                    least, best = error, [0.0] * len(self._moment)
                    for i, value in zip(subset, solution, strict=True):
                        best[i] = value / scales[i]
        return best

    def _over(self, subset: Sequence[int], scales: Sequence[float]) -> list[float] | None:
        """Solve over some columns, scaled; None if one is a combination of the others."""
        matrix = [[self._gram[i][j] / (scales[i] * scales[j]) for j in subset] for i in subset]
        return solve_positive(matrix, [self._moment[i] / scales[i] for i in subset])


def solve_positive(matrix: list[list[float]], right: Sequence[float]) -> list[float] | None:
    """Solve a symmetric positive definite system with a unit diagonal; None if it is singular."""
    size = len(right)
    lower: list[list[float]] = []
    forward: list[float] = []
    for i in range(size):
        row: list[float] = []
        for j in range(i):
            row.append((matrix[i][j] - _dot(row, lower[j][:j])) / lower[j][j])
        pivot = matrix[i][i] - _dot(row, row)
        if pivot < SINGULAR:
            return None
        forward.append((right[i] - _dot(row, forward)) / math.sqrt(pivot))
        lower.append([*row, math.sqrt(pivot)])
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = forward[i]
        for j in range(i + 1, size):
            rest -= lower[j][i] * solution[j]
        solution[i] = rest / lower[i][i]
    return solution


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    # Neither BLAS nor `sum`: their rounding depends on the machine and the version of Python.
    total = 0.0
    for x, y in zip(left, right, strict=True):
        total += x * y
    return total


@dataclass(frozen=True, kw_only=True)
class StepMeasurement:
    """The measured time of one step."""

    chunks: tuple[ChunkSize, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class DecodeMeasurement:
    """The measured time of one decode iteration."""

    batch: int
    context: int
    """Tokens attended to, summed over the batch."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LinkMeasurement:
    """The measured time of one message."""

    size: int
    """Size in bytes."""
    seconds: float


def fit_step(measurements: Sequence[StepMeasurement]) -> StepCost:
    """Fit the coefficients of one group shape.

    Raises:
        ConfigError: there are no measurements, or one is not positive.
    """
    _check([measurement.seconds for measurement in measurements])
    with_history = any(history for measurement in measurements for _, history in measurement.chunks)
    equations = NormalEquations(4 if with_history else 3)
    for measurement in measurements:
        columns = step_columns(measurement.chunks)
        used = columns if with_history else (columns[0], columns[1], columns[3])
        equations.add(used, measurement.seconds, weight_of(measurement.seconds))
    solution = equations.solve()
    if not with_history:
        # Without history in the measurements, c = 2d: a pair with history costs as much as one of
        # the L^2 / 2 causal pairs of a chunk.
        a, b, d = solution
        return StepCost.of_seconds(a, b, 2 * d, d)
    return StepCost.of_seconds(*solution)


def step_columns(chunks: Iterable[ChunkSize]) -> tuple[float, float, float, float]:
    """Return the factors of a, b, c and d."""
    tokens = with_history = squares = 0
    for length, history in chunks:
        tokens += length
        with_history += length * history
        squares += length * length
    return 1.0, float(tokens), float(with_history), float(squares)


def fit_decode(measurements: Sequence[DecodeMeasurement]) -> DecodeCost:
    """Fit the coefficients of one group shape, in two regimes if the measurements show them.

    Raises:
        ConfigError: there are no measurements, or one is not positive.
    """
    _check([measurement.seconds for measurement in measurements])
    whole, error = _fit_line(measurements)
    batches = sorted({measurement.batch for measurement in measurements})
    best = DecodeCost(small=whole, large=whole, tipping_batch=batches[-1])
    least = error * REGIMES_PAY
    for tipping, _ in pairwise(batches):
        below = [measurement for measurement in measurements if measurement.batch <= tipping]
        above = [measurement for measurement in measurements if measurement.batch > tipping]
        if not (_determines_regime(below) and _determines_regime(above)):
            continue
        (small, small_error), (large, large_error) = _fit_line(below), _fit_line(above)
        if small_error + large_error < least:
            least = small_error + large_error
            best = DecodeCost(small=small, large=large, tipping_batch=tipping)
    return best


def _determines_regime(measurements: Sequence[DecodeMeasurement]) -> bool:
    """Return True if the measurements determine three coefficients, with one to spare."""
    return len({measurement.batch for measurement in measurements}) >= 2 and (
        len({(measurement.batch, measurement.context) for measurement in measurements}) >= 4
    )


def _fit_line(measurements: Sequence[DecodeMeasurement]) -> tuple[LinearDecodeCost, float]:
    """Fit one regime; return it with its weighted squared error."""
    equations = NormalEquations(3)
    for measurement in measurements:
        columns = (1.0, float(measurement.context), float(measurement.batch))
        equations.add(columns, measurement.seconds, weight_of(measurement.seconds))
    cost = LinearDecodeCost.of_seconds(*equations.solve())
    error = 0.0
    for measurement in measurements:
        off = cost.predict_ns(measurement.batch, measurement.context) / 1e9 - measurement.seconds
        error += weight_of(measurement.seconds) * off * off
    return cost, error


def fit_link(measurements: Sequence[LinkMeasurement]) -> LinkCost:
    """Fit latency and time per byte of one kind of link.

    Raises:
        ConfigError: there are no measurements, or one is not positive.
    """
    _check([measurement.seconds for measurement in measurements])
    equations = NormalEquations(2)
    for measurement in measurements:
        equations.add(
            (1.0, float(measurement.size)), measurement.seconds, weight_of(measurement.seconds)
        )
    return LinkCost.of_seconds(*equations.solve())


def weight_of(seconds: float) -> float:
    """Return the weight of the squared error of a measurement."""
    return float((seconds**WEIGHT_EXPONENT / seconds) ** 2)


def _check(seconds: Sequence[float]) -> None:
    if not seconds:
        raise ConfigError("no measurements to fit")
    if min(seconds) <= 0:
        raise ConfigError(f"a measured time is not positive: {min(seconds)} s")


class Refit:
    """A latency table and the measurements since."""

    def __init__(self, table: LatencyTable) -> None:
        self._table = table
        self._seen: dict[LatencyKey, _KeyRefit] = {}

    def observe(self, key: LatencyKey, chunks: Sequence[ChunkSize], took_ns: int) -> None:
        """Add the measured time of a step.

        Raises:
            ConfigError: the table has no entry for the strategy and `tp`.
        """
        if took_ns <= 0 or not chunks:
            return
        if key not in self._seen:
            base = self._table.step(key.sp, key.tp, key.strategy)
            self._seen[key] = _KeyRefit(base)
        self._seen[key].observe(chunks, took_ns)

    def table(self) -> LatencyTable:
        """Return the first table with the observed groups refitted."""
        steps = dict(self._table.steps)
        steps.update((key, refit.cost()) for key, refit in self._seen.items())
        return replace(self._table, steps=tuple(sorted(steps.items(), key=itemgetter(0))))


class _KeyRefit:
    """The refit of one key."""

    def __init__(self, base: StepCost) -> None:
        self._base = base
        self._fading = 0.5 ** (1.0 / HALF_LIFE)
        self._lately = NormalEquations(4)
        self._ratio_sum = self._ratio_weight = PRIOR_WEIGHT
        self._prior = NormalEquations(4)
        for length, history in PRIOR_CHUNKS:
            seconds = max(1, base.predict_ns(length, history)) / 1e9
            weight = weight_of(seconds) * PRIOR_WEIGHT / len(PRIOR_CHUNKS)
            self._prior.add(step_columns([(length, history)]), seconds, weight)

    @property
    def _stretch(self) -> float:
        """Ratio of recent step times to the first table's."""
        return self._ratio_sum / self._ratio_weight

    def observe(self, chunks: Sequence[ChunkSize], took_ns: int) -> None:
        """Add a step; `cost` solves later."""
        base_ns = max(1, self._base.predict_batch_ns(chunks))
        expected_ns = base_ns * self._stretch
        took = min(max(float(took_ns), expected_ns / OUTLIER), expected_ns * OUTLIER)
        self._lately.decay(self._fading)
        self._lately.add(step_columns(chunks), took / 1e9, weight_of(took / 1e9))
        self._ratio_sum = self._fading * self._ratio_sum + took / base_ns
        self._ratio_weight = self._fading * self._ratio_weight + 1.0

    def cost(self) -> StepCost:
        """Return the coefficients that fit now."""
        return StepCost.of_seconds(*self._lately.plus(self._prior, self._stretch).solve())
