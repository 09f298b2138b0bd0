"""The live state as policies see it."""

from __future__ import annotations

from collections.abc import Sequence as Many

from csps.configurator.costs.cost_table import Costs
from csps.services.scheduling.core.requests import Requests
from csps.services.scheduling.core.steps import UnsentSteps
from csps.services.scheduling.deciding.view import RequestView
from csps.services.scheduling.events.events import GangId
from csps.services.scheduling.state.gangs import Gangs
from csps.services.scheduling.state.prefix_cache import PrefixCache
from csps.services.scheduling.state.state import (
    Cached,
    GangPair,
    Priority,
    Request,
    Round,
    Sequence,
)


class LiveView:
    """A `view.View` that copies nothing."""

    def __init__(
        self,
        this_round: Round,
        gangs: Gangs,
        requests: Requests,
        costs: Costs,
        prefix: PrefixCache,
        held: UnsentSteps,
    ) -> None:
        self._unsent = held
        self._round, self._gangs, self._requests = this_round, gangs, requests
        self._prefix, self.cost = prefix, costs

    @property
    def now_ns(self) -> int:
        return self._round.now_ns

    @property
    def pairs(self) -> Many[GangPair]:
        return self._gangs.pairs

    def waiting(self, priority: Priority) -> Many[Request]:
        return self._requests.queue.waiting(priority)

    @property
    def planned(self) -> Many[Sequence]:
        return self._unsent.sequences

    @property
    def blocked(self) -> Many[Request]:
        return self._requests.blocked

    def blocked_ns(self, request: RequestView) -> int:
        return self._requests.blocked_ns(self._requests.live[request.id])

    def cached(self, request: RequestView, gang: GangId) -> Cached | None:
        return self._prefix.longest(self._requests.live[request.id], gang)

    def rate_30s(self) -> int:
        return self._requests.rate_30s
