"""What has no deadline of its own and is looked at once in a while."""

from __future__ import annotations

from csps.protocols.errors import GangLost
from csps.services.scheduling.gangs import Gangs
from csps.services.scheduling.limits import SECOND_NS, DeadlineSettings
from csps.services.scheduling.requests import Requests
from csps.services.scheduling.silence import Silence
from csps.services.scheduling.turn import Turn, wire_error


class Watch:
    """Looks at who is silent and at who waits for gangs in vain, while there may be anybody."""

    def __init__(
        self,
        turn: Turn,
        gangs: Gangs,
        requests: Requests,
        silence: Silence,
        deadlines: DeadlineSettings,
    ) -> None:
        self._turn, self._gangs, self._requests = turn, gangs, requests
        self._silence, self._deadlines = silence, deadlines
        self.next_ns: int | None = None
        """When to look again; None if nobody owes anything."""

    def look(self) -> None:
        """If it is time."""
        if self.next_ns is not None and self._turn.now_ns >= self.next_ns:
            self.next_ns = None
            self._silence.check(self._turn.now_ns)
            self._fail_for_want_of_gangs()

    def plan(self) -> None:
        """Somebody may owe something since this turn, or nobody does any more."""
        waits_for_gangs = not self._gangs.pairs and self._requests.admission.waiting
        if not (waits_for_gangs or self._silence.watched):
            self.next_ns = None
        elif self.next_ns is None:
            self.next_ns = self._turn.now_ns + self._deadlines.watch_ns

    def _fail_for_want_of_gangs(self) -> None:
        unready_ns, limit_ns = self._gangs.unready_ns, self._deadlines.gang_recovery_ns
        if unready_ns is None:
            return
        reason = f"no gangs to serve the request for {limit_ns / SECOND_NS:g} s"
        error = wire_error(GangLost(reason))
        for request in list(self._requests.live.values()):
            since_ns = max(unready_ns, request.waiting_since_ns)
            if request.waiting and self._turn.now_ns - since_ns > limit_ns:
                self._requests.fail(request, error)
