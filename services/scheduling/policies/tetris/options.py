"""What `scheduling: {policy: tetris, ...}` may say."""

from __future__ import annotations

from dataclasses import dataclass

from csps.protocols.errors import ConfigError, abridged, nearest
from csps.protocols.placement import RING_LAYOUTS
from csps.services.scheduling.limits import SECOND_NS
from csps.services.scheduling.policies.option_checks import check_least
from csps.services.scheduling.policies.tetris.improvement import ImprovementRates, Records

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
