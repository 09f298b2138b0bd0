"""Latencies refitted while serving: a table that follows the steps that were measured.

Steps seen lately count most, and what is not seen keeps its shape: the table that serving began
with takes part as measurements of a fixed weight, stretched by how much longer steps of that group
take now. A machine that has become slower as a whole is followed everywhere at once, one that is
slower at long histories only where it was seen.

Pure and in plain floats: the same observations in the same order give the same table, byte for
byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from csps.services.scheduling.latency import LatencyKey, LatencyTable, Row, StepCost
from csps.services.scheduling.latency_fit import step_columns, weight_of
from csps.services.scheduling.least_squares import NormalEquations

HALF_LIFE = 32
"""Steps of a group shape after which an observation counts for half."""
PRIOR_WEIGHT = 4.0
"""Observations that the first table counts for."""
OUTLIER = 4.0
"""An observation counts as at most so many times its prediction, and at least its inverse: a
process that was stopped says nothing about the machine."""
PRIOR_ROWS: tuple[Row, ...] = tuple(
    (length, history) for length in (256, 2_048, 16_384, 131_072) for history in (0, 4 * length)
)
"""Where the first table takes part."""


class Refit:
    """A table, and what was measured since."""

    def __init__(self, table: LatencyTable) -> None:
        self._table = table
        self._seen: dict[LatencyKey, _KeyRefit] = {}

    def observe(self, key: LatencyKey, rows: Sequence[Row], took_ns: int) -> None:
        """Count a step that has ended.

        Raises:
            ConfigError: the table knows neither the strategy nor its neighbours.
        """
        if took_ns <= 0 or not rows:
            return
        if key not in self._seen:
            base = self._table.step(key.sp, key.tp, key.strategy)
            self._seen[key] = _KeyRefit(base)
        self._seen[key].observe(rows, took_ns)

    def table(self) -> LatencyTable:
        """The first table with the groups refitted that were observed."""
        steps = dict(self._table.steps)
        steps.update((key, refit.cost()) for key, refit in self._seen.items())
        return replace(self._table, steps=tuple(sorted(steps.items(), key=lambda it: it[0])))


class _KeyRefit:
    """Coefficients of one key."""

    def __init__(self, base: StepCost) -> None:
        self._base = base
        self._fading = 0.5 ** (1.0 / HALF_LIFE)
        self._lately = NormalEquations(4)
        self._ratio_sum = self._ratio_weight = PRIOR_WEIGHT
        self._prior = NormalEquations(4)
        for length, history in PRIOR_ROWS:
            seconds = max(1, base.predict_ns(length, history)) / 1e9
            weight = weight_of(seconds) * PRIOR_WEIGHT / len(PRIOR_ROWS)
            self._prior.add(step_columns([(length, history)]), seconds, weight)

    @property
    def _stretch(self) -> float:
        """How much longer steps take than they did at first."""
        return self._ratio_sum / self._ratio_weight

    def observe(self, rows: Sequence[Row], took_ns: int) -> None:
        """Count a step; solving waits until somebody wants the result."""
        base_ns = max(1, self._base.predict_batch_ns(rows))
        expected_ns = base_ns * self._stretch
        took = min(max(float(took_ns), expected_ns / OUTLIER), expected_ns * OUTLIER)
        self._lately.decay(self._fading)
        self._lately.add(step_columns(rows), took / 1e9, weight_of(took / 1e9))
        self._ratio_sum = self._fading * self._ratio_sum + took / base_ns
        self._ratio_weight = self._fading * self._ratio_weight + 1.0

    def cost(self) -> StepCost:
        """What fits now."""
        return StepCost.of_seconds(*self._lately.plus(self._prior, self._stretch).solve())
