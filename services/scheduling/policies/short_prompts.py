"""Which prompts may pass others, under policies with an urgent line."""

from __future__ import annotations

from collections.abc import Sequence

from csps.services.scheduling.state import Line
from csps.services.scheduling.view import PairView


def line_of(prompt_tokens: int, short_tokens: int, pairs: Sequence[PairView]) -> Line:
    """Short prompts are urgent, if a single instance of whichever pair can hold them."""
    if prompt_tokens > short_tokens:
        return "long"
    largest = min((pair.prefill.largest for pair in pairs), default=prompt_tokens)
    return "urgent" if prompt_tokens <= largest else "long"
