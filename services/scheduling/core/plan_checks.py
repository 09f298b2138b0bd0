"""Checks of a policy's decisions before any of them is applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from operator import attrgetter
from typing import NamedTuple

from csps.protocols.core.placement import (
    KvSlice,
    Span,
    bounds_of,
    covers_once,
    outside,
    own,
    placed_once,
    same_placement,
    tokens_on,
    within,
)
from csps.services.scheduling.core.requests import Requests
from csps.services.scheduling.deciding.decisions import (
    DecodePlacement,
    PiggybackPlan,
    PlannedChunk,
    PlannedStep,
    Replan,
    StartPlan,
)
from csps.services.scheduling.deciding.step_layout import (
    Histories,
    cut_at_bounds,
    histories_of,
    rows_of,
    slots_of,
    span_of,
    stored_by,
)
from csps.services.scheduling.events.events import (
    GangId,
    InstanceId,
    RequestId,
    SequenceId,
    gang_of,
)
from csps.services.scheduling.state.gangs import Gangs
from csps.services.scheduling.state.ledger import coming_slots, decode_slots, window_slots
from csps.services.scheduling.state.prefix_cache import PrefixCache
from csps.services.scheduling.state.state import Cached, Gang, GangPair, Request, Sequence

Live = Mapping[RequestId, Request]
Reused = dict[RequestId, Cached]
"""Reused prefixes by request, without requests that compute all of their prompts."""


def reused_by_plan(plan: StartPlan, pair: GangPair, live: Live, prefix: PrefixCache) -> Reused:
    """Return the prefixes that a plan's requests reuse where they are computed: a request whose
    first chunk begins behind its prompt's beginning has the KV before it there."""
    begins: dict[RequestId, int] = {}
    for step in plan.steps:
        for chunk in step.chunks:
            begins.setdefault(chunk.request_id, chunk.start)
    reused = {
        request_id: _cached(live, request_id, pair.prefill.id, start, prefix)
        for request_id, start in begins.items()
        if start
    }
    if pair.in_place:
        for placement in plan.decode:
            here = reused.get(placement.request_id)
            _check_named(_named(placement), here.slices if here else ())
    return reused


def decode_reused_by_plan(
    plan: StartPlan, pair: GangPair, live: Live, prefix: PrefixCache
) -> Reused:
    """Return the prefixes that a plan's requests reuse on a gang that only decodes.

    That gang may have cached more of a prompt than the one that computes it, or less: a placement
    names what is not sent. Where a step samples the only token, nothing is decoded and nothing
    read.
    """
    reused: Reused = {}
    for placement in () if pair.in_place else plan.decode:
        named, request_id = _named(placement), placement.request_id
        if named and request_id in live and live[request_id].output_tokens > 1:
            reused[request_id] = _cached(live, request_id, pair.decode.id, _tokens(named), prefix)
            _check_named(named, reused[request_id].slices)
    return reused


def reused_by_piggyback(plan: PiggybackPlan, live: Live, prefix: PrefixCache) -> Reused:
    """Return the prefix that a piggybacked request reuses, which its placement names."""
    placement = plan.placement
    named = _named(placement)
    if not named:
        return {}
    gang = gang_of(placement.master)
    cached = _cached(live, placement.request_id, gang, _tokens(named), prefix)
    _check_named(named, cached.slices)
    return {placement.request_id: cached}


def _check_named(named: tuple[KvSlice, ...], present: tuple[KvSlice, ...]) -> None:
    """Assert that the placement names the reused KV; another plan of the round may have cut a
    segment."""
    assert named == present or same_placement(named, present), "reused KV lies elsewhere"


def _cached(
    live: Live, request_id: RequestId, gang: GangId, tokens: int, prefix: PrefixCache
) -> Cached:
    request = live.get(request_id)
    assert request is not None, f"request {request_id} is over"
    cached = prefix.longest(request, gang)
    assert cached is not None, "chunks out of order: no prefix is cached"
    if cached.tokens > tokens:
        cached = prefix.beginning(request, gang, tokens)
    assert cached is not None, "chunks out of order: no prefix is cached"
    assert cached.tokens == tokens, "chunks out of order: the cached prefix is shorter"
    return cached


def _named(placement: DecodePlacement) -> tuple[KvSlice, ...]:
    return tuple([kv_slice for kv_slice in placement.slices if kv_slice.source])


def _tokens(slices: Iterable[KvSlice]) -> int:
    return sum(kv_slice.tokens for kv_slice in slices)


Slots = dict[InstanceId, int]


class CheckedPlan(NamedTuple):
    """Plan that may be applied, and what the checks worked out."""

    plan: StartPlan
    pair: GangPair
    reused: Reused
    """Prefixes reused where it is computed."""
    decode_reused: Reused
    """Prefixes reused where it is only decoded: KV that is not sent there."""
    histories: list[Histories]
    """Histories of its steps."""
    steps: list[Slots]
    """Slots of its steps; empty in place, where its placements have them."""
    decode: list[Slots]
    """Slots of its placements."""
    needs: Slots
    """Sum of all slots, which have to be empty."""


class CheckedReplan(NamedTuple):
    """Replan that may be applied, and what the checks worked out."""

    sequence: Sequence
    replan: Replan
    histories: list[Histories]
    steps: list[Slots]
    retained_slices: tuple[KvSlice, ...]
    """Placement of what all its steps compute, if that is retained."""

    @property
    def needs(self) -> Slots:
        """Slots of all its steps."""
        return _sum(self.steps)


class CheckedPiggyback(NamedTuple):
    """Piggyback plan that may be applied."""

    piggyback: PiggybackPlan
    gang: Gang
    reused: Reused
    needs: Slots


class PlanChecks:
    """Checks plans that are applied together: all are sound, or none is applied."""

    def __init__(self, gangs: Gangs, requests: Requests, prefix: PrefixCache) -> None:
        self._gangs, self._requests, self._prefix = gangs, requests, prefix
        self._slots: Slots = {}
        """Slots of all plans, with those of retained KV that they reuse."""
        self._window_slots: Slots = {}
        """Slots of all plans in layers with a window."""
        self._started: dict[RequestId, None] = {}
        self._replanned: dict[RequestId, None] = {}
        self._moved: set[SequenceId] = set()

    def check(
        self, plans: Iterable[StartPlan], piggybacks: Iterable[PiggybackPlan] = ()
    ) -> list[CheckedPlan | CheckedPiggyback]:
        """Assert that all plans are whole and that their slots are free."""
        checked: list[CheckedPlan | CheckedPiggyback] = [self._check_plan(plan) for plan in plans]
        checked += [self._check_piggyback(plan) for plan in piggybacks]
        for instance, count in self._slots.items():
            free = self._gangs.instances[instance].free_slots
            assert count <= free, f"decisions take {count} slots of {free} free ones on {instance}"
        for instance, count in self._window_slots.items():
            master = self._gangs.instances[instance]
            free = master.window_slots - master.window_used
            assert count <= free, (
                f"decisions take {count} slots in layers with a window of {free} on {instance}"
            )
        return checked

    def check_replans(self, replans: Iterable[tuple[Sequence, Replan]]) -> list[CheckedReplan]:
        """Assert that replans are whole. Call it before `check`, which asserts that their slots are
        free."""
        return [self._check_replan(*replan) for replan in replans]

    def _check_replan(self, sequence: Sequence, replan: Replan) -> CheckedReplan:
        plan, request = sequence.plan, sequence.request
        assert plan is not None, f"the steps of sequence {sequence.id} are not sent one by one"
        assert not sequence.over, f"replan of sequence {sequence.id}, which is over"
        assert plan.version == replan.version, (
            f"replan of version {replan.version}, present is {plan.version}"
        )
        assert request.id not in self._replanned, f"two replans of request {request.id}"
        self._replanned[request.id] = None
        unsent = [step.command.step.chunks[0] for step in plan.steps if step.command is not None]
        assert unsent, f"sequence {sequence.id} has no unsent steps"
        if not replan.steps:
            return CheckedReplan(sequence, replan, [], [], sequence.retained_slices)
        begun = {request.id: unsent[0].history}
        whole = StartPlan(steps=replan.steps, decode=())
        found, slots = list(histories_of(whole, begun, in_place=False)), []
        pair = GangPair(prefill=sequence.prefill, decode=sequence.decode)
        stop = unsent[0].start
        for step, histories in zip(replan.steps, found, strict=True):
            assert [chunk.request_id for chunk in step.chunks] == [request.id], (
                f"chunks of other requests than {request.id}"
            )
            assert step.chunks[0].start == stop, "chunks out of order"
            stop += step.chunks[0].length
            self._check_step(step, sequence.prefill.id)
            slots.append(slots_of(step, histories))
            self._check_members(step, histories, slots[-1], whole, pair)
            self._take(slots[-1], sequence.prefill.id)
        assert stop == request.prompt_tokens, "not the whole prompt"
        stored = stored_by(whole, begun)[request.id] if sequence.retained_slices else ()
        return CheckedReplan(sequence, replan, found, slots, stored)

    def check_moves(self, moves: Iterable[tuple[Sequence, DecodePlacement]]) -> list[Slots]:
        """Assert that sequences can move as planned; return the slots that each needs."""
        return [self._check_move(*move) for move in moves]

    def _check_move(self, sequence: Sequence, placement: DecodePlacement) -> Slots:
        assert sequence.joined_ns is not None, (
            f"move of sequence {sequence.id}, which does not decode yet"
        )
        assert sequence.first_token_ns is not None, (
            f"move of sequence {sequence.id}, whose prompt is not computed"
        )
        assert sequence.id in sequence.decode.decoding, (
            f"move of sequence {sequence.id}, which is over"
        )
        assert not sequence.is_moving, f"sequence {sequence.id} is moving already"
        assert not sequence.cached, f"move of sequence {sequence.id}, which reuses a prefix"
        assert sequence.id not in self._moved, f"two moves of sequence {sequence.id}"
        self._moved.add(sequence.id)
        start, stop = sequence.answer_span
        assert covers_once(Span(0, start), placement.slices), "not the prompt's positions"
        assert covers_once(Span(start, stop), placement.answer), "not the answer's positions"
        needs = dict.fromkeys(decode_slots(placement, 0), 0) | coming_slots(sequence, placement)
        self._take(needs, sequence.decode.id)
        return needs

    def _check_plan(self, plan: StartPlan) -> CheckedPlan:
        pair = self._pair(plan)
        reused = reused_by_plan(plan, pair, self._requests.startable, self._prefix)
        decode_reused = decode_reused_by_plan(plan, pair, self._requests.startable, self._prefix)
        self._count_reused(reused)
        self._count_reused(decode_reused)
        begun = {request: cached.slices for request, cached in reused.items()}
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
        return CheckedPlan(plan, pair, reused, decode_reused, found, steps, decode, needs)

    def _count_reused(self, reused: Reused) -> None:
        """Count the slots of reused KV, which nobody may take."""
        for cached in reused.values():
            for instance, count in cached.taken.items():
                self._slots[instance] = self._slots.get(instance, 0) + count

    def _pair(self, plan: StartPlan) -> GangPair:
        prefill = gang_of(plan.steps[0].group[0])
        decode = gang_of(plan.decode[0].master)
        for pair in self._gangs.pairs:
            if pair.prefill.id == prefill and pair.decode.id == decode:
                return pair
        raise AssertionError(f"gangs {prefill} and {decode} are no pair")

    def _check_step(self, step: PlannedStep, gang: GangId) -> None:
        bounds, chunks = step.bounds, step.chunks
        assert len(set(step.group)) == len(step.group) == len(bounds) - 1, "group and bounds"
        assert bounds[0] == 0, "bounds miss the first token"
        assert bounds[-1] == sum([chunk.length for chunk in chunks]), "bounds miss tokens"
        assert step.predicted_ns >= 0, "a predicted time must not be negative"
        cls = self._waiting(chunks[0].request_id).cls
        for chunk in chunks[1:]:
            assert self._waiting(chunk.request_id).cls == cls, (
                "requests of several classes in a step"
            )
        assert all(gang_of(instance) == gang for instance in step.group), (
            "an instance of another gang"
        )
        if any(chunk.rows for chunk in chunks):
            _check_rows(step)

    def _check_members(
        self, step: PlannedStep, histories: Histories, slots: Slots, plan: StartPlan, pair: GangPair
    ) -> None:
        """Assert that the group has exactly the instances that a step concerns."""
        if pair.in_place or any(histories) or not cut_at_bounds(step):
            concerned: Set[InstanceId] = self._concerned(step, histories, plan, pair)
        else:
            concerned = slots.keys()
        group = set(step.group)
        assert concerned <= group, "an instance outside of the group"
        assert concerned == group, "an instance of the group computes and stores nothing"

    def _concerned(
        self, step: PlannedStep, histories: Histories, plan: StartPlan, pair: GangPair
    ) -> set[InstanceId]:
        """Return the instances that compute something of a step, or hold KV of its chunks before or
        after."""
        concerned = {kv_slice.instance for rows in rows_of(step) for kv_slice in rows}
        placed = (
            {placement.request_id: placement.slices for placement in plan.decode}
            if pair.in_place
            else {}
        )
        for chunk, history in zip(step.chunks, histories, strict=True):
            if chunk.placement:
                assert not pair.in_place, "a chunk of an elastic gang has a placement of its own"
                _check_chunk_placement(chunk, history)
            future = chunk.placement or within(placed.get(chunk.request_id, ()), span_of(chunk))
            concerned.update(kv_slice.instance for kv_slice in (*history, *future))
        return concerned

    def _check_piggyback(self, piggyback: PiggybackPlan) -> CheckedPiggyback:
        gang = gang_of(piggyback.placement.master)
        pairs = [pair for pair in self._gangs.pairs if pair.decode.id == gang]
        assert pairs, f"piggyback on gang {gang}, which is in no pair"
        assert piggyback.budget > 0, "a piggyback budget must be positive"
        assert not pairs[0].decode.window, "a gang without the KV before a prompt's end"
        request = self._waiting(piggyback.placement.request_id)
        reused = reused_by_piggyback(piggyback, self._requests.startable, self._prefix)
        self._count_reused(reused)
        widest = max(pairs, key=attrgetter("max_positions"))
        lengths = {request.id: request.prompt_tokens}
        needs = self._check_placement(piggyback.placement, lengths, widest)
        return CheckedPiggyback(piggyback, widest.decode, reused, needs)

    def _take(self, slots: Mapping[InstanceId, int], gang: GangId) -> None:
        for instance, count in slots.items():
            assert gang_of(instance) == gang, "an instance of another gang"
            self._slots[instance] = self._slots.get(instance, 0) + count

    def _check_placement(
        self, placement: DecodePlacement, lengths: dict[RequestId, int], pair: GangPair
    ) -> Slots:
        request, gang = self._waiting(placement.request_id), pair.decode.id
        total = request.prompt_tokens + request.output_tokens
        assert total <= pair.max_positions, (
            f"request {request.id} has {total} tokens, at most {pair.max_positions} fit"
        )
        assert request.id not in self._started, f"request {request.id} is started twice"
        self._started[request.id] = None
        assert lengths.get(request.id) == request.prompt_tokens, "not the whole prompt"
        prompt = request.prompt_tokens
        assert placed_once(0, prompt, placement.slices), "the prompt's KV is not placed once"
        assert not placement.answer or placed_once(prompt, total, placement.answer), (
            "the answer's KV is not placed once"
        )
        assert gang_of(placement.master) == gang, "an instance of another gang"
        slots = decode_slots(placement, request.output_tokens)
        self._take(slots, gang)
        near = window_slots(pair.decode, placement, prompt, request.output_tokens)
        self._window_slots[placement.master] = self._window_slots.get(placement.master, 0) + near
        return slots

    def _waiting(self, request: RequestId) -> Request:
        found = self._requests.startable.get(request)
        assert found is not None, f"request {request} is over"
        assert found.waiting or request in self._replanned, f"request {request} has started already"
        return found


def _check_rows(step: PlannedStep) -> None:
    counts = dict.fromkeys(step.group, 0)
    for chunk in step.chunks:
        assert covers_once(span_of(chunk), chunk.rows), (
            "rows are not the chunk's positions, each once"
        )
        for instance, tokens in tokens_on(chunk.rows).items():
            assert instance in counts, "an instance outside of the group"
            counts[instance] += tokens
    assert step.bounds == bounds_of(list(counts.values())), "bounds are not those of the rows"


def _check_chunk_placement(chunk: PlannedChunk, history: tuple[KvSlice, ...]) -> None:
    """Assert that a placement has all of the chunk; it may have some earlier KV as well."""
    positions = span_of(chunk)
    assert covers_once(positions, within(chunk.placement, positions)), (
        "the chunk's KV is not placed once"
    )
    assert not any(kv_slice.source for kv_slice in chunk.placement), (
        "a chunk's placement names another source"
    )
    moved = [
        KvSlice.of(kv_slice.instance, rest)
        for kv_slice in chunk.placement
        for rest in kv_slice.span.without(positions)
    ]
    history = tuple(own(history))
    once = _total(outside(history, moved)) == _total(history) - _total(moved)
    assert once, "what moves is not earlier KV, each position once"


def _sum(needs: Iterable[Slots]) -> Slots:
    sums: Slots = {}
    for slots in needs:
        for instance, count in slots.items():
            sums[instance] = sums.get(instance, 0) + count
    return sums


def _total(slices: Iterable[KvSlice]) -> int:
    return sum(kv_slice.tokens for kv_slice in slices)


def _computed(steps: Iterable[PlannedStep], reused: Reused) -> dict[RequestId, int]:
    """Return how far each request is computed; its chunks must follow one another."""
    computed = {request: cached.tokens for request, cached in reused.items()}
    for step in steps:
        for chunk in step.chunks:
            assert chunk.start == computed.get(chunk.request_id, 0), "chunks out of order"
            assert chunk.length > 0, "an empty chunk"
            computed[chunk.request_id] = chunk.start + chunk.length
    return computed
