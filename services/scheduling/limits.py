"""How long things may take, and how many may wait for them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from csps.protocols.errors import ConfigError

SECOND_NS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """How long the line may get, and how often one may stand in it."""

    max_waiting: int = 256
    max_waiting_tokens: int = 4_194_304
    """Prompt and answer tokens of all waiting requests."""
    max_attempts: int = 3
    """Times that a request is tried when the cluster fails under it."""

    def __post_init__(self) -> None:
        if min(self.max_waiting, self.max_waiting_tokens, self.max_attempts) < 1:
            raise ConfigError(f"limits must be positive: {self}")


@dataclass(frozen=True, kw_only=True)
class DeadlineSettings:
    """Nanoseconds, each for a wait that has this name."""

    reserve_ns: int = 10 * SECOND_NS
    """For decode instances to set slots aside."""
    reserve_token_ns: int = 10_000
    """More of it for each token of the prompt."""
    landing_ns: int = 60 * SECOND_NS
    """From the first token of a sequence until all of its KV has landed."""
    landing_token_ns: int = 1_000_000
    """More of it for each token that is transferred: a model of 128 KiB of KV a token over a link
    of 125 MB/s."""
    prefill_silence_ns: int = 180 * SECOND_NS
    """Of the instances that a step runs on, and of those that they wait for: longer than any of
    them computes between two signs of life, which is a part of a layer."""
    decode_silence_ns: int = 120 * SECOND_NS
    """Of a decode gang that owes tokens or slots."""
    gang_recovery_ns: int = 60 * SECOND_NS
    """A request waits so long for gangs to come up."""
    retry_pause_ns: int = SECOND_NS // 4
    """Before a request is tried again on gangs that live. What broke the attempt may be the first
    sign of a gang that dies, and the next attempt on it would be wasted."""
    watch_ns: int = SECOND_NS
    """Between two looks at who is silent."""

    def __post_init__(self) -> None:
        for it in fields(self):
            if getattr(self, it.name) < 0:
                raise ConfigError(f"{it.name} must not be negative")
        if self.watch_ns == 0:
            raise ConfigError("watch_ns must be positive")
