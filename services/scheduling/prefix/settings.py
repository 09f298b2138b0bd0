"""What is kept, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass

from csps.protocols.errors import ConfigError

BLOCK_TOKENS = 64
"""Prefixes are found in multiples of it."""


@dataclass(frozen=True, kw_only=True)
class ReuseSettings:
    """How KV outlives its requests."""

    enabled: bool = False
    max_share: float = 0.5
    """Of an instance's slots that KV may take which is kept and in nobody's use."""
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        if not 0 <= self.max_share <= 1:
            raise ConfigError(f"max_share must be between 0 and 1, not {self.max_share}")
        if self.block_tokens < 1:
            raise ConfigError(f"block_tokens must be positive, not {self.block_tokens}")
