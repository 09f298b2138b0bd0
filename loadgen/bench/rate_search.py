"""The highest rate that is good enough, found by trying rates: doubling, then halving the gap."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class RateSearch:
    """Which rate to try next.

    It takes for granted that what is missed at one rate is missed at all higher ones. A run of
    finite length may say otherwise near the limit; the answer is then one of the rates that were
    kept below a missed one.
    """

    start: float
    """Requests per second to try first."""
    tolerance: float = 0.1
    """Stop when the least missed rate is this share above the highest kept one."""
    max_runs: int = 12
    highest: float = math.inf
    """Do not go beyond."""
    tried: dict[float, bool] = field(default_factory=dict)
    """Whether each rate kept the objective."""

    @property
    def kept(self) -> float | None:
        """The highest rate known to be good enough; None if there is none yet."""
        limit = self.missed or math.inf
        return max((rate for rate, ok in self.tried.items() if ok and rate < limit), default=None)

    @property
    def missed(self) -> float | None:
        """The least rate known to be too much."""
        return min((rate for rate, ok in self.tried.items() if not ok), default=None)

    def next(self) -> float | None:
        """The rate to try, or None when there is nothing left to learn."""
        if len(self.tried) >= self.max_runs:
            return None
        kept, missed = self.kept, self.missed
        if kept is None:
            return self.start if missed is None else missed / 2
        if missed is None:
            return None if kept >= self.highest else min(2 * kept, self.highest)
        return None if missed <= kept * (1 + self.tolerance) else math.sqrt(kept * missed)

    def note(self, rate: float, *, ok: bool) -> None:
        """What trying a rate has shown."""
        self.tried[rate] = ok
