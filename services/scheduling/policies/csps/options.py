"""Options of the policy `csps`."""

from __future__ import annotations

from dataclasses import dataclass

from csps.services.scheduling.policies.option_checks import check_least
from csps.services.scheduling.policies.short_prompts import ShortPromptOptions


@dataclass(frozen=True, kw_only=True)
class CspsOptions(ShortPromptOptions):
    """Sizes in tokens."""

    spt_tokens: int = 4096
    """Target length of a sequence partition; less where an instance has fewer free slots."""
    look_ahead: int = 64
    """Requests that a round tries in vain before it leaves the rest of the line for the next one.
    It bounds the time of a round; what starts does not count."""
    most_starts: int = 128
    """Requests that a round starts. More wait for the next one, which follows at once: an event
    loop must not stand still while hundreds are placed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "spt_tokens", "look_ahead", "most_starts")
