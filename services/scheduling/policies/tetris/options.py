"""Options of the policy `tetris`, and the improvement rate by load (Tetris §5.1).

At a light load, prefill dominates the time to the first token, and large groups pay off. The more
requests wait, the more a large group costs the requests behind it. The best rate for each load is
found by simulation (`csps rates`) and looked up by the requests of the last 30 seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from csps.protocols.core.errors import ConfigError, abridged, nearest
from csps.protocols.core.placement import RING_LAYOUTS
from csps.services.scheduling.events.limits import SECOND_NS
from csps.services.scheduling.policies.rounds.decode_overlay import check_least

Records = Sequence[tuple[float, float]]
"""Pairs of requests per second and improvement rate."""
WINDOW_S = 30
"""Seconds over which requests are counted (`SchedulerView.rate_30s`)."""
FIT = "improvement_rates"
"""Name of the fits of a scaling information base that contain records, in JSON."""
UNPROFILED = 0.3
"""Rate without a simulation: the middle of the paper's best rates."""


@dataclass(frozen=True)
class ImprovementRates:
    """Improvement rates by load; a single one without records."""

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
        """Return the rate recorded for the nearest load, the lower of two equally near.

        Args:
            requests: requests that arrived within the window.
        """
        if not self.records:
            return UNPROFILED
        seen = requests / WINDOW_S
        _, rate = min(self.records, key=lambda record: (abs(record[0] - seen), record[0]))
        return rate


AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class TetrisOptions:
    """Options of the policy `tetris`."""

    improvement_rate: float | str = AUTO
    """Share of the time to the first token that a larger group has to save; `auto` looks up the
    load in `improvement_rates`."""
    improvement_rates: Records = ()
    """Pairs of requests per second and the best improvement rate at that load (`csps rates`)."""
    min_chunk: int = 512
    """Tokens of the shortest chunk of a prompt that is cut."""
    chunked: bool = True
    """False to compute every prompt as one chunk."""
    layout: str = "zigzag"
    """Layout of a chunk's rows in a ring."""
    replan_share: float = 0.5
    """Deviation of a plan's predicted end, as a share of its time, that triggers replanning of the
    unsent chunks; 0: never, and all chunks are sent to the ranks at once."""
    launch_ahead_s: float = 1.0
    """Seconds before its predicted start at which a chunk is sent to the ranks, unchangeable."""

    def __post_init__(self) -> None:
        check_least(self, 1, "min_chunk")
        check_least(self, 0, "replan_share", "launch_ahead_s")
        rate = self.improvement_rate
        if isinstance(rate, str):
            if rate != AUTO:
                hint = nearest(rate, [AUTO])
                raise ConfigError(f"option improvement_rate: unknown {abridged(rate)}{hint}")
        elif not 0 <= rate < 1:
            raise ConfigError(f"option improvement_rate must be in [0, 1), not {rate}")
        if self.layout not in RING_LAYOUTS:
            hint = nearest(self.layout, RING_LAYOUTS)
            raise ConfigError(f"option layout: unknown {abridged(self.layout)}{hint}")
        _ = self.rates

    @property
    def ahead_ns(self) -> int | None:
        """Time before its predicted start at which a chunk is sent; None: at once."""
        return round(self.launch_ahead_s * SECOND_NS) if self.replan_share else None

    @property
    def rates(self) -> ImprovementRates:
        """Rates that `auto` looks up."""
        return ImprovementRates(self.improvement_rates)
