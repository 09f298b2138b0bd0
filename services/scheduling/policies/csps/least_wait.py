"""Where a short prompt waits least, for many of them in a round."""

from __future__ import annotations

import heapq

from csps.services.scheduling.policies.prefill_overlay import PrefillOverlay, Spot
from csps.services.scheduling.policies.whole_prompts import UrgentSteps
from csps.services.scheduling.view import RequestView

_Wait = tuple[int, int, int, int, int, Spot]
"""How long an urgent prompt waits on an instance, the least is the best: time of urgent steps, time
that its long steps were delayed by, when it is free, its place, its version, and itself."""


class LeastWait:
    """The instances of a gang, by how long an urgent prompt waits there.

    Args:
        prefill: the instances.
        urgent: what starts on them.
        turn_ns: what a part of a long step costs: about as much as a short prompt.
    """

    def __init__(self, prefill: PrefillOverlay, urgent: UrgentSteps, turn_ns: int) -> None:
        self._prefill, self._urgent, self._turn_ns = prefill, urgent, turn_ns
        self._waits: list[_Wait] | None = None
        self._vain: dict[str, tuple[int, int]] = {}
        """Tokens and time of a prompt of a class that found no instance."""

    def spot(self, request: RequestView, time_ns: int) -> Spot | None:
        """Where an urgent prompt waits least: behind other urgent ones, and for a part of a layer;
        of the instances that admit it.

        Of equal instances the one that was overtaken less since it has long steps: the members of a
        step wait for one another, so it is held up least when all are preempted alike.
        """
        tokens = request.prompt_tokens
        vain = self._vain.get(request.cls)  # slots, turns and budgets only become less in a round
        if vain and tokens >= vain[0] and time_ns >= vain[1]:
            return None
        heap = self._heap()
        unfit: list[_Wait] = []
        found = None
        while heap and found is None:
            *_, version, spot = heap[0]
            if version != spot.version:  # whatever it was given since makes it wait longer
                heapq.heapreplace(heap, self._wait(spot))
            elif self._urgent.admits(spot, request, time_ns):
                found = spot
            else:
                unfit.append(heapq.heappop(heap))
        for wait in unfit:
            heapq.heappush(heap, wait)
        if found is None:
            self._vain[request.cls] = tokens, time_ns
        return found

    def _heap(self) -> list[_Wait]:
        if self._waits is None:
            self._waits = [self._wait(it) for it in self._prefill.spots]
            heapq.heapify(self._waits)
        return self._waits

    def _wait(self, spot: Spot) -> _Wait:
        wait_ns = spot.urgent_ns + (self._turn_ns if spot.long_steps else 0)
        return wait_ns, spot.overtaken_ns, spot.free_at_ns, spot.order, spot.version, spot
