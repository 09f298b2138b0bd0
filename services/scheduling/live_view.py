"""The live state as policies see it."""

from __future__ import annotations

from collections.abc import Sequence as Many

from csps.services.scheduling.cost import Costs
from csps.services.scheduling.gangs import Gangs
from csps.services.scheduling.held_steps import HeldSteps
from csps.services.scheduling.ids import GangId
from csps.services.scheduling.prefix.index import PrefixIndex
from csps.services.scheduling.requests import Requests
from csps.services.scheduling.state import Cached, Line, Pair, Request, Sequence
from csps.services.scheduling.turn import Turn
from csps.services.scheduling.view import RequestView


class LiveView:
    """A `view.View` that copies nothing."""

    def __init__(
        self,
        turn: Turn,
        gangs: Gangs,
        requests: Requests,
        costs: Costs,
        prefix: PrefixIndex,
        held: HeldSteps,
    ) -> None:
        self._held = held
        self._turn, self._gangs, self._requests = turn, gangs, requests
        self._prefix, self.cost = prefix, costs

    @property
    def now_ns(self) -> int:
        return self._turn.now_ns

    @property
    def pairs(self) -> Many[Pair]:
        return self._gangs.pairs

    def waiting(self, line: Line) -> Many[Request]:
        return self._requests.queue.line(line)

    @property
    def planned(self) -> Many[Sequence]:
        return self._held.sequences

    @property
    def blocked(self) -> Many[Request]:
        return self._requests.blocked

    def blocked_ns(self, request: RequestView) -> int:
        return self._requests.blocked_ns(self._requests.live[request.id])

    def cached(self, request: RequestView, gang: GangId) -> Cached | None:
        return self._prefix.longest(self._requests.live[request.id], gang)

    def rate_30s(self) -> int:
        return self._requests.rate_30s
