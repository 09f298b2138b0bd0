"""What has to be true of a policy's decisions before any of them is applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from operator import attrgetter
from typing import NamedTuple

from csps.protocols.span import Span
from csps.services.scheduling.commands import Share
from csps.services.scheduling.decisions import (
    DecodePlacement,
    PlannedPiece,
    PlannedStep,
    Replan,
    Ride,
    StartPlan,
)
from csps.services.scheduling.decode_slots import coming_slots, decode_slots
from csps.services.scheduling.gangs import Gangs
from csps.services.scheduling.ids import GangId, InstanceId, RequestId, gang_of
from csps.services.scheduling.prefix.index import PrefixIndex
from csps.services.scheduling.prefix.reused import (
    Reused,
    held_by_plan,
    reused_by_plan,
    reused_by_ride,
)
from csps.services.scheduling.requests import Requests
from csps.services.scheduling.shares import (
    bounds_of,
    outside,
    own,
    parts,
    placed_once,
    tokens_on,
    within,
)
from csps.services.scheduling.state import Gang, Pair, Request, Sequence
from csps.services.scheduling.step_shares import (
    Histories,
    chunk_of,
    cut_at_bounds,
    histories_of,
    left_by,
    rows_of,
    slots_of,
)

Slots = dict[InstanceId, int]


class CheckedPlan(NamedTuple):
    """A plan that may be applied, and what was worked out to know that."""

    plan: StartPlan
    pair: Pair
    reused: Reused
    """Where it is computed."""
    held: Reused
    """Where it is only decoded: what is not sent there."""
    histories: list[Histories]
    """Of its steps."""
    steps: list[Slots]
    """Slots of its steps; none in place, where those of its placements are theirs."""
    decode: list[Slots]
    """Slots of its placements."""
    needs: Slots
    """All of them, which have to be empty."""


class CheckedReplan(NamedTuple):
    """The same of the rest of a plan."""

    sequence: Sequence
    replan: Replan
    histories: list[Histories]
    steps: list[Slots]
    left: tuple[Share, ...]
    """Where all of its steps leave what they compute."""

    @property
    def needs(self) -> Slots:
        """Of all its steps."""
        return _sum(self.steps)


class CheckedRide(NamedTuple):
    """The same of a ride."""

    ride: Ride
    gang: Gang
    reused: Reused
    needs: Slots


class PlanChecks:
    """Checks plans that are to be applied together: all are good, or none is applied."""

    def __init__(self, gangs: Gangs, requests: Requests, prefix: PrefixIndex) -> None:
        self._gangs, self._requests, self._prefix = gangs, requests, prefix
        self._slots: Slots = {}
        """Of all plans, with those of kept KV that they use."""
        self._started: dict[RequestId, None] = {}
        self._replanned: dict[RequestId, None] = {}

    def check(
        self, plans: Iterable[StartPlan], rides: Iterable[Ride] = ()
    ) -> list[CheckedPlan | CheckedRide]:
        """Assert that all of them are whole and that their slots are free."""
        checked: list[CheckedPlan | CheckedRide] = [self._check_plan(it) for it in plans]
        checked += [self._check_ride(it) for it in rides]
        for instance, count in self._slots.items():
            it = self._gangs.instances[instance]
            assert count <= it.free_slots, f"{count} slots of {it.free_slots} on {instance}"
        return checked

    def check_replans(self, replans: Iterable[tuple[Sequence, Replan]]) -> list[CheckedReplan]:
        """Assert that the rests of plans are whole; to be called before `check`, which asserts that
        their slots are free."""
        return [self._check_replan(*it) for it in replans]

    def _check_replan(self, sequence: Sequence, replan: Replan) -> CheckedReplan:
        plan, request = sequence.plan, sequence.request
        assert plan is not None, "a plan that is not sent step by step"
        assert not sequence.over, "planned again when it is over"
        assert plan.version == replan.version, "made from another plan"
        assert request.id not in self._replanned, "planned again twice"
        self._replanned[request.id] = None
        held = [it.command for it in plan.steps if it.command is not None]
        assert held, "nothing is left to be planned"
        if not replan.steps:
            return CheckedReplan(sequence, replan, [], [], sequence.left)
        begun = {request.id: held[0].history[0]}
        whole = StartPlan(steps=replan.steps, decode=())
        found, slots = list(histories_of(whole, begun, in_place=False)), []
        pair = Pair(prefill=sequence.prefill, decode=sequence.decode)
        stop = held[0].pieces[0].start
        for step, histories in zip(replan.steps, found, strict=True):
            assert [it.request for it in step.pieces] == [request.id], "another request's"
            assert step.pieces[0].start == stop, "pieces out of order"
            stop += step.pieces[0].length
            self._check_step(step, sequence.prefill.id)
            slots.append(slots_of(step, histories))
            self._check_members(step, histories, slots[-1], whole, pair)
            self._take(slots[-1], sequence.prefill.id)
        assert stop == request.prompt_tokens, "not the whole prompt"
        left = left_by(whole, begun)[request.id] if sequence.left else ()
        return CheckedReplan(sequence, replan, found, slots, left)

    def check_moves(self, moves: Iterable[tuple[Sequence, DecodePlacement]]) -> list[Slots]:
        """Assert that sequences can go where they are to. Returns the slots that each needs."""
        return [self._check_move(*it) for it in moves]

    def _check_move(self, sequence: Sequence, placement: DecodePlacement) -> Slots:
        assert sequence.joined_ns is not None, "moved before it is decoded"
        assert sequence.first_token_ns is not None, "moved before its prompt is computed"
        assert sequence.id in sequence.decode.decoding, "moved when it is over"
        assert not sequence.moves, "moved twice at a time"
        assert not sequence.cached, "what others have computed is moved"
        start, stop = sequence.answer_span
        assert parts(Span(0, start), placement.shares), "not the prompt's positions"
        assert parts(Span(start, stop), placement.answer), "not the answer's positions"
        needs = dict.fromkeys(decode_slots(placement, 0), 0) | coming_slots(sequence, placement)
        self._take(needs, sequence.decode.id)
        return needs

    def _check_plan(self, plan: StartPlan) -> CheckedPlan:
        pair = self._pair(plan)
        reused = reused_by_plan(plan, pair, self._requests.live, self._prefix)
        held = held_by_plan(plan, pair, self._requests.live, self._prefix)
        self._use(reused)
        self._use(held)
        begun = {request: cached.shares for request, cached in reused.items()}
        found = list(histories_of(plan, begun, in_place=pair.in_place))
        steps, decode = [], []
        for step, histories in zip(plan.steps, found, strict=True):
            self._check_step(step, pair.prefill.id)
            slots = {} if pair.in_place else slots_of(step, histories)
            self._check_members(step, histories, slots, plan, pair)
            self._take(slots, pair.prefill.id)
            steps.append(slots)
        lengths = _computed(plan.steps, reused)
        assert len(plan.decode) == len(lengths), "a placement for every request, and no more"
        for placement in plan.decode:
            decode.append(self._check_placement(placement, lengths, pair))
        needs = _sum([*steps, *decode])
        return CheckedPlan(plan, pair, reused, held, found, steps, decode, needs)

    def _use(self, reused: Reused) -> None:
        """Kept KV that is reused is nobody's to take."""
        for cached in reused.values():
            for instance, count in cached.taken.items():
                self._slots[instance] = self._slots.get(instance, 0) + count

    def _pair(self, plan: StartPlan) -> Pair:
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
        assert all(gang_of(it) == gang for it in step.group), "an instance of another gang"
        if any(it.rows for it in pieces):
            _check_rows(step)

    def _check_members(
        self, step: PlannedStep, histories: Histories, slots: Slots, plan: StartPlan, pair: Pair
    ) -> None:
        """Whoever has to do with a piece is in the group, and nobody else."""
        if pair.in_place or any(histories) or not cut_at_bounds(step):
            concerned: Set[InstanceId] = self._concerned(step, histories, plan, pair)
        else:
            concerned = slots.keys()
        group = set(step.group)
        assert concerned <= group, "an instance outside of the group"
        assert concerned == group, "an empty part"

    def _concerned(
        self, step: PlannedStep, histories: Histories, plan: StartPlan, pair: Pair
    ) -> set[InstanceId]:
        """Who computes something of a step, or holds or is to hold KV of its pieces."""
        concerned = {share.instance for rows in rows_of(step) for share in rows}
        placed = {it.request: it.shares for it in plan.decode} if pair.in_place else {}
        for piece, history in zip(step.pieces, histories, strict=True):
            if piece.keep:
                assert not pair.in_place, "KV is kept where it is decoded, and nowhere else"
                _check_keep(piece, history)
            to_lie = piece.keep or within(placed.get(piece.request, ()), chunk_of(piece))
            concerned.update(it.instance for it in (*history, *to_lie))
        return concerned

    def _check_ride(self, ride: Ride) -> CheckedRide:
        gang = gang_of(ride.placement.master)
        pairs = [it for it in self._gangs.pairs if it.decode.id == gang]
        assert pairs, "a ride on no pair"
        assert ride.budget > 0, "a ride that never moves"
        request = self._waiting(ride.placement.request)
        reused = reused_by_ride(ride, self._requests.live, self._prefix)
        self._use(reused)
        widest = max(pairs, key=attrgetter("max_positions"))
        lengths = {request.id: request.prompt_tokens}
        needs = self._check_placement(ride.placement, lengths, widest)
        return CheckedRide(ride, widest.decode, reused, needs)

    def _take(self, slots: Mapping[InstanceId, int], gang: GangId) -> None:
        for instance, count in slots.items():
            assert gang_of(instance) == gang, "an instance of another gang"
            self._slots[instance] = self._slots.get(instance, 0) + count

    def _check_placement(
        self, placement: DecodePlacement, lengths: dict[RequestId, int], pair: Pair
    ) -> Slots:
        request, gang = self._waiting(placement.request), pair.decode.id
        total = request.prompt_tokens + request.output_tokens
        assert total <= pair.max_positions, f"{total} tokens where {pair.max_positions} may be"
        assert request.id not in self._started, f"request {request.id} is started twice"
        self._started[request.id] = None
        assert lengths.get(request.id) == request.prompt_tokens, "not the whole prompt"
        prompt = request.prompt_tokens
        assert placed_once(0, prompt, placement.shares), "the prompt's KV is not placed once"
        assert not placement.answer or placed_once(prompt, total, placement.answer), (
            "the answer's KV is not placed once"
        )
        assert gang_of(placement.master) == gang, "an instance of another gang"
        slots = decode_slots(placement, request.output_tokens)
        self._take(slots, gang)
        return slots

    def _waiting(self, request: RequestId) -> Request:
        found = self._requests.live.get(request)
        assert found is not None, f"request {request} is over"
        assert found.waiting or request in self._replanned, f"request {request} has a place already"
        return found


def _check_rows(step: PlannedStep) -> None:
    counts = dict.fromkeys(step.group, 0)
    for piece in step.pieces:
        assert parts(chunk_of(piece), piece.rows), "rows are not the chunk's positions, each once"
        for instance, tokens in tokens_on(piece.rows).items():
            assert instance in counts, "an instance outside of the group"
            counts[instance] += tokens
    assert step.bounds == bounds_of(list(counts.values())), "bounds are not those of the rows"


def _check_keep(piece: PlannedPiece, history: tuple[Share, ...]) -> None:
    """It has all of the chunk, and may have some of what lies before it."""
    chunk = chunk_of(piece)
    assert parts(chunk, within(piece.keep, chunk)), "the chunk's KV is not kept once"
    assert not any(it.origin for it in piece.keep), "somebody else's KV is kept"
    moved = [Share.of(it.instance, rest) for it in piece.keep for rest in it.span.without(chunk)]
    history = tuple(own(history))
    once = _total(outside(history, moved)) == _total(history) - _total(moved)
    assert once, "what moves is not earlier KV, each position once"


def _sum(needs: Iterable[Slots]) -> Slots:
    sums: Slots = {}
    for slots in needs:
        for instance, count in slots.items():
            sums[instance] = sums.get(instance, 0) + count
    return sums


def _total(shares: Iterable[Share]) -> int:
    return sum(it.tokens for it in shares)


def _computed(steps: Iterable[PlannedStep], reused: Reused) -> dict[RequestId, int]:
    """How far each request is computed; its pieces have to follow one upon another."""
    computed = {request: cached.tokens for request, cached in reused.items()}
    for step in steps:
        for piece in step.pieces:
            assert piece.start == computed.get(piece.request, 0), "pieces out of order"
            assert piece.length > 0, "an empty piece"
            computed[piece.request] = piece.start + piece.length
    return computed
