"""What is told of gangs and of the connections between them, and what it leads to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from csps.services.scheduling import events as ev
from csps.services.scheduling.gangs import Gangs
from csps.services.scheduling.prefix.index import PrefixIndex
from csps.services.scheduling.requests import Requests
from csps.services.scheduling.retries import Retries
from csps.services.scheduling.sequences import Sequences
from csps.services.scheduling.steps import Steps


class GangEvents:
    """Handlers by the kind of event."""

    def __init__(
        self,
        *,
        gangs: Gangs,
        requests: Requests,
        sequences: Sequences,
        steps: Steps,
        retries: Retries,
        prefix: PrefixIndex,
    ) -> None:
        self._gangs, self._requests, self._prefix = gangs, requests, prefix
        self._sequences, self._steps, self._retries = sequences, steps, retries
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            ev.GangUp: self._gang_up,
            ev.GangDown: self._gang_down,
            ev.LinkUp: self._link_up,
            ev.LinkDown: self._link_down,
            ev.Heard: self._heard,
        }

    def _gang_up(self, event: ev.GangUp) -> None:
        gang = self._gangs.up(event)
        self._steps.ledger.add(gang)
        self._sequences.ledger.add(gang)
        self._prefix.add(gang)
        self._paired()

    def _gang_down(self, event: ev.GangDown) -> None:
        if (gang := self._gangs.by_id.get(event.gang)) is None:
            return
        self._gangs.down(gang)
        self._steps.drop(gang)
        self._prefix.drop(gang)
        self._retries.gang_lost(gang, event.reason)

    def _link_up(self, event: ev.LinkUp) -> None:
        self._gangs.link(event.prefill, event.decode)
        self._paired()

    def _link_down(self, event: ev.LinkDown) -> None:
        self._gangs.unlink(event.prefill, event.decode)
        self._retries.link_lost(event.prefill, event.decode, event.reason)

    def _paired(self) -> None:
        """Requests came before the gangs, or have waited for larger ones than these."""
        if self._gangs.pairs:
            self._requests.sort_again()

    def _heard(self, event: ev.Heard) -> None:
        for instance in event.instances:
            self._gangs.hear(instance)
