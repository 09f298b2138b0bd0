"""Who may join the line."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from csps.protocols.errors import QueueFull


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """How long the line may get, and how often one may stand in it."""

    max_waiting: int = 256
    max_waiting_tokens: int = 4_194_304
    """Prompt and answer tokens of all waiting requests."""
    max_attempts: int = 3
    """Times a request that has streamed nothing is tried when gangs are lost under it."""

    def __post_init__(self) -> None:
        if min(self.max_waiting, self.max_waiting_tokens, self.max_attempts) < 1:
            raise ValueError(f"limits must be positive: {self}")


class Admission:
    """Counts the line and estimates how fast it moves."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._tokens: dict[int, int] = {}
        self._departures: deque[float] = deque(maxlen=32)

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        return len(self._tokens)

    def check(self, tokens: int) -> None:
        """Raise `QueueFull` if a request of that many tokens must come back later.

        An empty line takes everyone: whether a request fits at all is another question.
        """
        limits = self._limits
        if self.waiting >= limits.max_waiting:
            raise QueueFull(
                f"{self.waiting} requests are waiting", retry_after_s=self._retry_after_s()
            )
        waiting_tokens = sum(self._tokens.values())
        if self._tokens and waiting_tokens + tokens > limits.max_waiting_tokens:
            raise QueueFull(
                f"{waiting_tokens} tokens are waiting", retry_after_s=self._retry_after_s()
            )

    def enter(self, number: int, tokens: int) -> None:
        """The request stands in the line."""
        self._tokens[number] = tokens

    def leave(self, number: int, *, started: bool) -> None:
        """The request found a place, or went away. Leaving twice is the same as once."""
        if self._tokens.pop(number, None) is not None and started:
            self._departures.append(time.monotonic())

    def _retry_after_s(self) -> float:
        """When half of the line will be gone at its recent pace; 1 to 60 s."""
        if len(self._departures) < 2:
            return 1.0
        pace_s = (time.monotonic() - self._departures[0]) / len(self._departures)
        return min(60.0, max(1.0, pace_s * self.waiting / 2))
