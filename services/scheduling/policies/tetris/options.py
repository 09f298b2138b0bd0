"""The rate of improvement by load (Tetris §5.1).

At a light load prefill itself is most of the time to the first token, and large groups pay. The
more requests wait, the more a large group costs those behind it. Which rate is best at which load
is found beforehand, by simulation (`csps rates`), and looked up by the requests of the last 30 s.

What `scheduling: {policy: tetris, ...}` may say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from csps.protocols.core.errors import ConfigError, abridged, nearest
from csps.protocols.core.placement import RING_LAYOUTS
from csps.services.scheduling.events.limits import SECOND_NS
from csps.services.scheduling.policies.rounds.decode_overlay import check_least

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


AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class TetrisOptions:
    """Options of Tetris."""

    improvement_rate: float | str = AUTO
    """Share of the time to the first token that a larger group has to save; `auto` follows the load
    by `improvement_rates`."""
    improvement_rates: Records = ()
    """Pairs of requests per second and the best rate of improvement at that load, as `csps rates`
    finds them."""
    min_chunk: int = 512
    """Tokens of the shortest chunk of a prompt that is cut."""
    chunked: bool = True
    """Whether prompts are cut at all; without it every prompt is one chunk."""
    layout: str = "zigzag"
    """Of a chunk's rows where it is computed around a ring."""
    replan_share: float = 0.5
    """A plan is made again for what is left of it when its end, as predicted now, differs by more
    than this share of the time from the one that it was made for; 0: never, and all chunks are sent
    to the ranks at once."""
    launch_ahead_s: float = 1.0
    """Chunks are sent to the ranks so long before they begin, as predicted; then they stay as they
    are."""

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
        """How long before they begin chunks are sent; None: at once."""
        return round(self.launch_ahead_s * SECOND_NS) if self.replan_share else None

    @property
    def rates(self) -> ImprovementRates:
        """What `auto` looks up."""
        return ImprovementRates(self.improvement_rates)
