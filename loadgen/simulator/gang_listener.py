"""What simulated gangs tell."""

from __future__ import annotations

from typing import Protocol

from csps.loadgen.simulator.requests import IterationEnds
from csps.services.scheduling.events import AnyEvent
from csps.services.scheduling.ids import RequestId, SequenceId


class GangListener(Protocol):
    """The kernel, as the gangs see it."""

    def tell(self, event: AnyEvent) -> None:
        """An event for the scheduler, now."""

    def tell_later(self, event: AnyEvent) -> None:
        """An event on a rank, of which the scheduler hears when a message has arrived."""

    def started(self, request: RequestId) -> None:
        """A step of the request has begun."""

    def prefilled(self, sequence: SequenceId, request: RequestId) -> None:
        """The first token of a sequence was drawn."""

    def decoded(self, request: RequestId, ends: IterationEnds) -> None:
        """The request has drawn a token at the end of each of these iterations."""

    def finished(self, sequence: SequenceId, request: RequestId) -> None:
        """The last token was drawn."""
