"""From measured times to the coefficients of `latency`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from csps.protocols.errors import ConfigError
from csps.services.scheduling.latency import (
    DecodeCost,
    DecodeLine,
    LinkCost,
    Row,
    StepCost,
)
from csps.services.scheduling.least_squares import NormalEquations

WEIGHT_EXPONENT = 0.1
"""A relative error counts for t^0.1: LoongServe's choice. Scheduling lives on ratios of times, but
a short step that is off by a tenth costs less than a long one that is."""
REGIMES_PAY = 0.5
"""Decoding gets a second regime where that leaves at most this share of the squared error."""


@dataclass(frozen=True, kw_only=True)
class StepMeasurement:
    """One step and what it took."""

    rows: tuple[Row, ...]
    """(length, history) of its pieces."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class DecodeMeasurement:
    """One iteration of decoding and what it took."""

    batch: int
    context: int
    """Tokens attended to, summed over the batch."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class LinkMeasurement:
    """One message and what it took."""

    size: int
    """Bytes."""
    seconds: float


def fit_step(measurements: Sequence[StepMeasurement]) -> StepCost:
    """Coefficients of one group shape.

    Where no measurement has history, c = 2d: a pair with history costs what a causal pair inside
    the piece costs, of which there are L^2 / 2.

    Raises:
        ConfigError: there is nothing to fit, or a time that is not positive.
    """
    _check([it.seconds for it in measurements])
    with_history = any(history for it in measurements for _, history in it.rows)
    equations = NormalEquations(4 if with_history else 3)
    for it in measurements:
        columns = step_columns(it.rows)
        kept = columns if with_history else (columns[0], columns[1], columns[3])
        equations.add(kept, it.seconds, weight_of(it.seconds))
    solution = equations.solve()
    if not with_history:
        a, b, d = solution
        return StepCost.of_seconds(a, b, 2 * d, d)
    return StepCost.of_seconds(*solution)


def step_columns(rows: Iterable[Row]) -> tuple[float, float, float, float]:
    """What a, b, c and d are multiplied with."""
    tokens = with_history = squares = 0
    for length, history in rows:
        tokens += length
        with_history += length * history
        squares += length * length
    return 1.0, float(tokens), float(with_history), float(squares)


def fit_decode(measurements: Sequence[DecodeMeasurement]) -> DecodeCost:
    """Coefficients of one group shape, in two regimes where the measurements show them.

    Raises:
        ConfigError: there is nothing to fit, or a time that is not positive.
    """
    _check([it.seconds for it in measurements])
    whole, error = _fit_line(measurements)
    batches = sorted({it.batch for it in measurements})
    best = DecodeCost(small=whole, large=whole, tipping_batch=batches[-1])
    least = error * REGIMES_PAY
    for tipping, _ in pairwise(batches):
        below = [it for it in measurements if it.batch <= tipping]
        above = [it for it in measurements if it.batch > tipping]
        if not (_tells_apart(below) and _tells_apart(above)):
            continue
        (small, small_error), (large, large_error) = _fit_line(below), _fit_line(above)
        if small_error + large_error < least:
            least = small_error + large_error
            best = DecodeCost(small=small, large=large, tipping_batch=tipping)
    return best


def _tells_apart(measurements: Sequence[DecodeMeasurement]) -> bool:
    """Whether a line of its own can be drawn through them, with a measurement to spare."""
    return len({it.batch for it in measurements}) >= 2 and (
        len({(it.batch, it.context) for it in measurements}) >= 4
    )


def _fit_line(measurements: Sequence[DecodeMeasurement]) -> tuple[DecodeLine, float]:
    """The line and its weighted squared error."""
    equations = NormalEquations(3)
    for it in measurements:
        columns = (1.0, float(it.context), float(it.batch))
        equations.add(columns, it.seconds, weight_of(it.seconds))
    line = DecodeLine.of_seconds(*equations.solve())
    error = 0.0
    for it in measurements:
        off = line.predict_ns(it.batch, it.context) / 1e9 - it.seconds
        error += weight_of(it.seconds) * off * off
    return line, error


def fit_link(measurements: Sequence[LinkMeasurement]) -> LinkCost:
    """Latency and time a byte of one kind of link.

    Raises:
        ConfigError: there is nothing to fit, or a time that is not positive.
    """
    _check([it.seconds for it in measurements])
    equations = NormalEquations(2)
    for it in measurements:
        equations.add((1.0, float(it.size)), it.seconds, weight_of(it.seconds))
    return LinkCost.of_seconds(*equations.solve())


def weight_of(seconds: float) -> float:
    """Of a squared error of a measurement that took so long."""
    return float((seconds**WEIGHT_EXPONENT / seconds) ** 2)


def _check(seconds: Sequence[float]) -> None:
    if not seconds:
        raise ConfigError("no measurements to fit")
    if min(seconds) <= 0:
        raise ConfigError("a measured time is not positive")
