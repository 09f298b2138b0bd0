"""The line of requests without a place."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import replace

from csps.services.scheduling.state import WaitingRequest


class WaitingQueue:
    """Waiting requests in order of admission.

    A request that returns after a fault carries its old number and so stands where it stood:
    before everyone who came after it.
    """

    def __init__(self) -> None:
        self._requests: list[WaitingRequest] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> tuple[WaitingRequest, ...]:
        """Everyone, first come first."""
        return tuple(self._requests)

    def push(self, request: WaitingRequest) -> None:
        """Join the line at the place that the request's number gives it."""
        bisect.insort(self._requests, request, key=lambda waiting: waiting.number)

    def discard(self, number: int) -> None:
        """Leave the line without having been served; whoever is not in it may leave as well."""
        self._requests = [waiting for waiting in self._requests if waiting.number != number]

    def take(self, numbers: Iterable[int]) -> None:
        """These were given a place; the older ones left behind were overtaken."""
        taken = set(numbers)
        placed = [waiting for waiting in self._requests if waiting.number in taken]
        assert len(placed) == len(taken), "only who waits can be placed"
        self._requests = [
            _overtaken(waiting, placed) for waiting in self._requests if waiting.number not in taken
        ]


def _overtaken(waiting: WaitingRequest, placed: list[WaitingRequest]) -> WaitingRequest:
    tokens = sum(other.tokens for other in placed if other.number > waiting.number)
    if not tokens:
        return waiting
    return replace(waiting, overtaken_tokens=waiting.overtaken_tokens + tokens)
