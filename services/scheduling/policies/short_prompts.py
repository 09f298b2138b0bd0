"""Which prompts may pass others, under policies with an urgent line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from csps.services.scheduling.policies.option_checks import check_least
from csps.services.scheduling.state import Line
from csps.services.scheduling.view import PairView


@dataclass(frozen=True, kw_only=True)
class ShortPromptOptions:
    """Of policies with an urgent line, which have more of their own. Sizes in tokens."""

    short_tokens: int = 1024
    """Longest prompt that is urgent."""
    urgent_batch_tokens: int = 2048
    """Longest urgent step: the first token of a batch comes when all of it is computed."""
    jobs_per_instance: int = 2
    """Long steps, and urgent ones, that an instance is given at a time."""
    overtaking_s: float = 10.0
    """What a request may be delayed by others that pass it, in seconds."""

    def __post_init__(self) -> None:
        check_least(self, 1, "urgent_batch_tokens", "jobs_per_instance")
        check_least(self, 0, "short_tokens", "overtaking_s")

    @property
    def overtaking_ns(self) -> int:
        """`overtaking_s` in nanoseconds."""
        return round(self.overtaking_s * 1_000_000_000)


def line_of(prompt_tokens: int, short_tokens: int, pairs: Sequence[PairView]) -> Line:
    """Short prompts are urgent, if a single instance of whichever pair can hold them."""
    if prompt_tokens > short_tokens:
        return "long"
    largest = min((pair.prefill.largest for pair in pairs), default=prompt_tokens)
    return "urgent" if prompt_tokens <= largest else "long"
