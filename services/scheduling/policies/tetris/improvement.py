"""The rate of improvement by load (Tetris §5.1).

At a light load prefill itself is most of the time to the first token, and large groups pay. The
more requests wait, the more a large group costs those behind it. Which rate is best at which load
is found beforehand, by simulation (`csps rates`), and looked up by the requests of the last 30 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from csps.protocols.errors import ConfigError

Records = Sequence[tuple[float, float]]
"""(requests per second, rate of improvement)."""
WINDOW_S = 30
"""In which requests are counted (`view.View.rate_30s`)."""
FIT = "improvement_rates"
"""Name of the fits of a scaling information base that hold records, in JSON."""
UNPROFILED = 0.3
"""Where nothing was simulated: in the middle of what the paper found best."""


@dataclass(frozen=True)
class ImprovementRates:
    """Rates of improvement by load; one for all loads where there are no records."""

    records: Records = ()

    def __post_init__(self) -> None:
        for record in self.records:
            load, rate = record
            if not load > 0 or not 0 <= rate < 1:
                raise ConfigError(
                    "option improvement_rates: pairs of requests per second, above 0, and a rate "
                    f"in [0, 1), not {list(record)}"
                )

    def at(self, requests: int) -> float:
        """The rate that was recorded for the nearest load, the lower one of two as near.

        Args:
            requests: that came within the window.
        """
        if not self.records:
            return UNPROFILED
        seen = requests / WINDOW_S
        return min(self.records, key=lambda it: (abs(it[0] - seen), it[0]))[1]
