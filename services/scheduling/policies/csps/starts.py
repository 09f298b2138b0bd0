"""What a round of the policy `csps` has started on a pair of gangs, and what that leaves."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from csps.services.scheduling.decisions import Ride, StartPlan
from csps.services.scheduling.ids import RequestId
from csps.services.scheduling.policies.csps.options import CspsOptions
from csps.services.scheduling.policies.decode_overlay import DecodeOptions, DecodeOverlay, Placed
from csps.services.scheduling.policies.prefill_overlay import PrefillOverlay
from csps.services.scheduling.policies.reuse import Reuses
from csps.services.scheduling.policies.whole_prompts import UrgentSteps, WholePrompts
from csps.services.scheduling.view import CachedView, PairView, RequestView, View


class Verdict(IntEnum):
    """What becomes of a request in a round; the least is the best."""

    STARTS = 0
    WAITS = 1
    """For instances to finish other steps."""
    TOO_LATE = 2
    """It would pass somebody who is blocked for longer than is allowed."""
    BLOCKED = 3
    """There are not slots enough."""


class Starts:
    """Everything that starts on one pair."""

    def __init__(
        self, pair: PairView, view: View, options: CspsOptions, decode: DecodeOptions
    ) -> None:
        self.options, self.cost, self.now_ns = options, view.cost, view.now_ns
        self.prefill = PrefillOverlay(pair.prefill, view.now_ns, options)
        self.decode = DecodeOverlay(pair.decode, decode)
        self.reuses = Reuses(self.prefill, view.cost)
        self.urgent = UrgentSteps(self.prefill, view.cost, options, view.now_ns)
        self._view, self._pair = view, pair
        self._steps: list[WholePrompts] = []
        self._others: list[StartPlan | Ride] = []
        """Of prompts that are computed behind what was kept of them."""
        self._started: dict[RequestId, None] = {}

    def started(self, request: RequestView) -> bool:
        """The request has a place."""
        return request.id in self._started

    def plans(self) -> Iterator[StartPlan | Ride]:
        """All of it."""
        for step in self._steps:
            yield step.plan()
        yield from self._others

    def too_long(self, request: RequestView) -> bool:
        """Another pair may serve it, but not this one."""
        return request.prompt_tokens + request.output_tokens > self._pair.max_positions

    def cached(self, request: RequestView) -> CachedView | None:
        """What the gang that prefills has kept of a prompt."""
        return self._view.cached(request, self._pair.prefill.id)

    def cached_decoding(self, request: RequestView) -> CachedView | None:
        """What the gang that decodes has kept of it."""
        return self._view.cached(request, self._pair.decode.id)

    def place(self, request: RequestView) -> Placed | None:
        """Where a request is decoded; None while there is no room, or never will be."""
        if self.too_long(request):
            return None
        kept = self.cached_decoding(request)
        return self.decode.place_behind(kept, request.prompt_tokens, request.output_tokens)

    def take(self, request: RequestView, placed: Placed) -> None:
        """A request was placed so, and starts."""
        self.decode.take(placed, request.output_tokens)
        self._started[request.id] = None

    def add_step(self, step: WholePrompts) -> None:
        """A step starts, or grows from now on."""
        self._steps.append(step)

    def add(self, plan: StartPlan | Ride) -> None:
        """What follows upon what was kept of a prompt starts."""
        self._others.append(plan)
