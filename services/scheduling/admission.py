"""Who may join the line."""

from __future__ import annotations

from collections import deque

from csps.protocols.errors import CspsError, QueueFull
from csps.services.scheduling.fit import Fit
from csps.services.scheduling.limits import SECOND_NS, QueueLimits
from csps.services.scheduling.state import Request
from csps.services.scheduling.turn import Turn

DRAIN_RETRY_AFTER_S = 10.0


class Admission:
    """Counts the line and estimates how fast it moves."""

    RECENT = 32
    """Departures that the pace is estimated from."""

    def __init__(self, turn: Turn, limits: QueueLimits, fit: Fit) -> None:
        self._turn, self._limits, self._fit = turn, limits, fit
        self._departures: deque[int] = deque(maxlen=self.RECENT)
        self.waiting = 0
        """Requests without a place, those that pause before another attempt included."""
        self.waiting_tokens = 0
        """Theirs, prompts and answers together."""
        self.draining = False

    def refusal(self, prompt_tokens: int, output_tokens: int) -> CspsError | None:
        """Why such a request may not come in now, if so."""
        misfit = self._fit.misfit(prompt_tokens, output_tokens)
        return misfit or self.refusal_unread(prompt_tokens + output_tokens)

    def refusal_unread(self, tokens: int = 0) -> QueueFull | None:
        """Why a request must come back later of which no more is known than its tokens.

        An empty line takes everyone: whether a request fits at all is another question.
        """
        limits = self._limits
        if self.draining:
            return QueueFull("the server is shutting down", retry_after_s=DRAIN_RETRY_AFTER_S)
        if self.waiting >= limits.max_waiting:
            reason = f"{self.waiting} requests are waiting"
        elif self.waiting and self.waiting_tokens + tokens > limits.max_waiting_tokens:
            reason = f"{self.waiting_tokens} tokens are waiting"
        else:
            return None
        return QueueFull(reason, retry_after_s=self._retry_after_s())

    def enter(self, request: Request) -> None:
        """The request stands in the line."""
        self.waiting += 1
        self.waiting_tokens += request.prompt_tokens + request.output_tokens

    def leave(self, request: Request, *, started: bool) -> None:
        """The request found a place, or went away."""
        self.waiting -= 1
        self.waiting_tokens -= request.prompt_tokens + request.output_tokens
        if started:
            self._departures.append(self._turn.now_ns)

    def _retry_after_s(self) -> float:
        """When half of the line will be gone at its recent pace; 1 to 60 s, in milliseconds."""
        if len(self._departures) < 2:
            return 1.0
        pace_ns = (self._turn.now_ns - self._departures[0]) // len(self._departures)
        wait_ns = pace_ns * self.waiting // 2
        return min(60 * SECOND_NS, max(SECOND_NS, wait_ns)) // 1_000_000 / 1000
