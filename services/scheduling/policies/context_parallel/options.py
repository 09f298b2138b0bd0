"""What `scheduling: {policy: context_parallel, ...}` may say."""

from __future__ import annotations

from dataclasses import dataclass

from csps.protocols.errors import ConfigError
from csps.services.scheduling.policies.option_checks import check_least


@dataclass(frozen=True, kw_only=True)
class ContextParallelOptions:
    """How prompts share a gang."""

    least_saving: float = 0.1
    """Share of the time to the first token that a larger group has to save."""
    short_tokens: int = 1024
    """Longest prompt that is urgent."""
    urgent_batch_tokens: int = 2048
    """Longest urgent step: the first token of a batch comes when all of it is computed."""
    jobs_per_instance: int = 2
    """Long steps, and urgent ones, that an instance is given at a time."""
    overtaking_s: float = 10.0
    """What a request may be delayed by others that pass it, in seconds."""

    def __post_init__(self) -> None:
        check_least(self, 1, "jobs_per_instance", "urgent_batch_tokens")
        check_least(self, 0, "short_tokens", "overtaking_s")
        if not 0 <= self.least_saving < 1:
            raise ConfigError(f"option least_saving must be in [0, 1), not {self.least_saving}")

    @property
    def overtaking_ns(self) -> int:
        """`overtaking_s` in nanoseconds."""
        return round(self.overtaking_s * 1_000_000_000)
