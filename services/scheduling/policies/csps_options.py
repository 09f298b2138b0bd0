"""Options of the policy `csps`."""

from __future__ import annotations

from dataclasses import dataclass

from csps.services.scheduling.policies.option_checks import check_least


@dataclass(frozen=True, kw_only=True)
class CspsOptions:
    """Sizes in tokens."""

    spt_tokens: int = 4096
    """Target length of a sequence partition; less where an instance has fewer free slots."""
    short_tokens: int = 1024
    """Longest prompt that is urgent."""
    urgent_batch_tokens: int = 2048
    """Longest urgent step: the first token of a batch comes when all of it is computed."""
    jobs_per_instance: int = 2
    """Long steps, and urgent ones, that an instance is given at a time."""
    overtaking_s: float = 10.0
    """What a request may be delayed by others that pass it, in seconds."""
    look_ahead: int = 64
    """Requests that a round tries in vain before it leaves the rest of the line for the next one.
    It bounds the time of a round; what starts does not count."""
    most_starts: int = 128
    """Requests that a round starts. More wait for the next one, which follows at once: an event
    loop must not stand still while hundreds are placed."""

    def __post_init__(self) -> None:
        check_least(self, 1, "spt_tokens", "urgent_batch_tokens", "jobs_per_instance")
        check_least(self, 1, "look_ahead", "most_starts")
        check_least(self, 0, "short_tokens", "overtaking_s")

    @property
    def overtaking_ns(self) -> int:
        """`overtaking_s` in nanoseconds."""
        return round(self.overtaking_s * 1_000_000_000)
