"""What `scheduling: {policy: context_parallel, ...}` may say."""

from __future__ import annotations

from dataclasses import dataclass

from csps.protocols.errors import ConfigError
from csps.services.scheduling.policies.short_prompts import ShortPromptOptions


@dataclass(frozen=True, kw_only=True)
class ContextParallelOptions(ShortPromptOptions):
    """How prompts share a gang."""

    least_saving: float = 0.1
    """Share of the time to the first token that a larger group has to save."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.least_saving < 1:
            raise ConfigError(f"option least_saving must be in [0, 1), not {self.least_saving}")
