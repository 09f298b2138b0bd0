"""What has to be true of a policy's decisions before any of them is applied."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from csps.services.scheduling.decisions import DecodePlacement, PlannedStep, Ride, StartPlan
from csps.services.scheduling.gangs import Gangs
from csps.services.scheduling.ids import GangId, InstanceId, RequestId, gang_of
from csps.services.scheduling.requests import Requests
from csps.services.scheduling.state import Pair, Request


class PlanChecks:
    """Checks plans that are to be applied together: all are good, or none is applied."""

    def __init__(self, gangs: Gangs, requests: Requests) -> None:
        self._gangs, self._requests = gangs, requests
        self._slots: dict[InstanceId, int] = {}
        self._started: dict[RequestId, None] = {}

    def check(self, plans: Iterable[StartPlan], rides: Iterable[Ride] = ()) -> None:
        """Assert that all of them are whole and that their slots are free."""
        for plan in plans:
            pair = self.pair(plan)
            for step in plan.steps:
                self._check_step(step, pair.prefill.id)
            lengths = _computed(plan.steps)
            assert len(plan.decode) == len(lengths), "a placement for every request, and no more"
            for placement in plan.decode:
                self._check_placement(placement, lengths, pair)
        for ride in rides:
            self._check_ride(ride)
        for instance, count in self._slots.items():
            it = self._gangs.instances[instance]
            assert count <= it.capacity - it.used, f"{count} slots of {it.free_slots} on {instance}"

    def pair(self, plan: StartPlan) -> Pair:
        """The gangs that a plan uses."""
        prefill = gang_of(plan.steps[0].group[0])
        decode = gang_of(plan.decode[0].master)
        for pair in self._gangs.pairs:
            if pair.prefill.id == prefill and pair.decode.id == decode:
                return pair
        raise AssertionError(f"gangs {prefill} and {decode} are no pair")

    def _check_step(self, step: PlannedStep, gang: GangId) -> None:
        bounds, pieces = step.bounds, step.pieces
        assert len(set(step.group)) == len(step.group) == len(bounds) - 1, "group and bounds"
        assert bounds[0] == 0, "bounds miss the first token"
        assert bounds[-1] == sum([it.length for it in pieces]), "bounds miss tokens"
        assert step.predicted_ns >= 0, "a time before now"
        cls = self._waiting(pieces[0].request).cls
        for piece in pieces[1:]:
            assert self._waiting(piece.request).cls == cls, "requests of several classes in a step"
        start = 0
        for instance, stop in zip(step.group, bounds[1:], strict=True):
            assert start < stop, "an empty part"
            self._take(instance, stop - start, gang)
            start = stop

    def _check_ride(self, ride: Ride) -> None:
        gang = gang_of(ride.placement.master)
        pairs = [it for it in self._gangs.pairs if it.decode.id == gang]
        assert pairs, "a ride on no pair"
        assert ride.budget > 0, "a ride that never moves"
        request = self._waiting(ride.placement.request)
        widest = max(pairs, key=attrgetter("max_positions"))
        self._check_placement(ride.placement, {request.id: request.prompt_tokens}, widest)

    def _take(self, instance: InstanceId, slots: int, gang: GangId) -> None:
        assert gang_of(instance) == gang, "an instance of another gang"
        self._slots[instance] = self._slots.get(instance, 0) + slots

    def _check_placement(
        self, placement: DecodePlacement, lengths: dict[RequestId, int], pair: Pair
    ) -> None:
        request, gang = self._waiting(placement.request), pair.decode.id
        total = request.prompt_tokens + request.output_tokens
        assert total <= pair.max_positions, f"{total} tokens where {pair.max_positions} may be"
        assert request.id not in self._started, f"request {request.id} is started twice"
        self._started[request.id] = None
        assert lengths.get(request.id) == request.prompt_tokens, "not the whole prompt"
        position = 0
        for share in placement.shares:
            assert share.start == position < share.stop, "gaps in the KV"
            position = share.stop
            self._take(share.instance, position - share.start, gang)
        assert position == request.prompt_tokens, "KV without a place"
        self._take(placement.master, request.output_tokens, gang)

    def _waiting(self, request: RequestId) -> Request:
        found = self._requests.live.get(request)
        assert found is not None, f"request {request} is over"
        assert found.waiting, f"request {request} has a place already"
        return found


def _computed(steps: Iterable[PlannedStep]) -> dict[RequestId, int]:
    """How far each request is computed; its pieces have to follow one upon another."""
    computed: dict[RequestId, int] = {}
    for step in steps:
        for piece in step.pieces:
            assert piece.start == computed.get(piece.request, 0), "pieces out of order"
            assert piece.length > 0, "an empty piece"
            computed[piece.request] = piece.start + piece.length
    return computed
