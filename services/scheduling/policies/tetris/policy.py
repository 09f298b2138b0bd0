"""History evenly over a group that has grown (Tetris §4.1).

Attention of a chunk to what lies before it takes as long as the instance with most of that takes.
So before a chunk, its group's members have equal parts of the history, to within a token. It does
not matter which tokens: history precedes every row of the chunk. As few tokens as possible move,
and what other sequences have computed stays where it is.

Whether a plan comes true: what was predicted when it was made, and what is predicted now.

Every prompt in chunks, each on a group of its own size: Tetris.

A request gets its plan as it arrives, on the times at which instances will be free: a chunk is
given to them while they are still busy, and runs when its turn comes. Chunks whose turn is far off
are planned again when reality differs from what was predicted. Strictly first come, first
served: when the oldest finds no slots, all wait. A prompt's KV goes to the one decode instance that
has most free slots for each request that it decodes (§5.2), or to several if none has room for all
of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from csps.configurator.costs.cost_table import StepLatency
from csps.services.scheduling.deciding.decisions import (
    Blocked,
    Decision,
    DecodePlacement,
    IdleCapacity,
    PlannedChunk,
    PlannedStep,
    Replan,
    StartPlan,
)
from csps.services.scheduling.deciding.step_layout import in_layout, rows_of
from csps.services.scheduling.deciding.view import (
    CachedView,
    CostView,
    PairView,
    PlannedView,
    PlanView,
    RequestView,
    View,
)
from csps.services.scheduling.events.commands import PlacedSlice, RunStep
from csps.services.scheduling.events.events import InstanceId
from csps.services.scheduling.events.slices import bounds_of, level_sizes, outside, own, tokens_on
from csps.services.scheduling.policies.rounds.decode_overlay import (
    DecodeOptions,
    DecodeOverlay,
    Placed,
)
from csps.services.scheduling.policies.rounds.prefill_overlay import NOTHING, PrefillOverlay
from csps.services.scheduling.policies.tetris.cdsp import Cdsp, CdspChunk, group_sizes
from csps.services.scheduling.policies.tetris.options import TetrisOptions
from csps.services.scheduling.state.state import Priority


def balanced(
    steps: Sequence[PlannedStep], kept: tuple[PlacedSlice, ...], free: dict[InstanceId, int]
) -> Iterator[PlannedStep]:
    """A plan's chunks, each of which moves history before it attends to it.

    Args:
        kept: what others have computed of the prompt.
        free: slots that the plan leaves; those that moves take are subtracted.
    """
    lying = kept
    for step in steps:
        (chunk,), (rows,) = step.chunks, rows_of(step)
        if moves := balancing_moves(lying, step.group, free):
            for share in moves:
                free[share.instance] -= share.tokens
            chunk = msgspec.structs.replace(chunk, placement=(*rows, *moves))
            step = msgspec.structs.replace(step, chunks=(chunk,))
        lying = (*outside(lying, moves), *moves, *rows)
        yield step


def balancing_moves(
    history: Sequence[PlacedSlice],
    group: Sequence[InstanceId],
    free: Mapping[InstanceId, int] | None = None,
) -> tuple[PlacedSlice, ...]:
    """What has to move, and to whom, so that all members have as much.

    Args:
        history: where the KV of earlier chunks lies; on members of the group.
        group: of the next chunk.
        free: slots of its members, which limit what they can take in; None: enough.
    """
    held = tokens_on(history)
    assert held.keys() <= set(group), "history outside of the group"
    fixed = tokens_on(kv_slice for kv_slice in history if kv_slice.source)
    level, total = _level(group, fixed, sum(held.values()))
    targets = _targets(
        total, [held.get(it, 0) for it in level], [(free or {}).get(it) for it in level]
    )
    if targets is None:
        return ()
    target_of = {it: fixed.get(it, 0) for it in group} | dict(zip(level, targets, strict=True))
    of: dict[InstanceId, list[PlacedSlice]] = {}
    for it in own(history):
        of.setdefault(it.instance, []).append(it)
    surplus, wants = [], []
    for instance, target in target_of.items():
        excess = held.get(instance, 0) - target
        if excess > 0:
            surplus += list(_last(of[instance], excess))
        elif excess < 0:
            wants.append((instance, -excess))
    return tuple(_dealt(surplus, wants))


def _level(
    group: Sequence[InstanceId], fixed: Mapping[InstanceId, int], total: int
) -> tuple[list[InstanceId], int]:
    """Members that can have equal parts, and the tokens that are theirs then: all but those who
    have more of what stays where it is."""
    level = list(group)
    while over := [it for it in level if fixed.get(it, 0) > total // len(level)]:
        level = [it for it in level if it not in over]
        total -= sum(fixed[it] for it in over)
    return level, total


def _targets(total: int, held: Sequence[int], free: Sequence[int | None]) -> list[int] | None:
    """Tokens of each member: whoever holds most gets what is left over of an even division. None
    if there are not slots enough for what those with more would give."""
    count = len(held)
    limits = [total if room is None else have + room for have, room in zip(held, free, strict=True)]
    if any(limit < -(-total // count) for limit in limits):
        return level_sizes(total, limits)
    base, over = divmod(total, count)
    most = sorted(range(count), key=lambda it: (-held[it], it))
    more = set(most[:over])
    return [base + (it in more) for it in range(count)]


def _last(shares: Sequence[PlacedSlice], tokens: int) -> Iterator[PlacedSlice]:
    """The last tokens of what an instance holds."""
    for share in reversed(shares):
        taken = min(tokens, share.tokens)
        tokens -= taken
        if taken:
            yield _part(share, share.tokens - taken, taken, share.instance)


def _dealt(
    surplus: list[PlacedSlice], wants: list[tuple[InstanceId, int]]
) -> Iterator[PlacedSlice]:
    """Hand the surplus out in order."""
    left = iter(surplus)
    share = next(left, None)
    for instance, tokens in wants:
        while tokens:
            assert share is not None, "less to give than to take"
            taken = min(tokens, share.tokens)
            yield _part(share, 0, taken, instance)
            tokens -= taken
            rest = share.tokens - taken
            share = _part(share, taken, rest, share.instance) if rest else next(left, None)


def _part(share: PlacedSlice, skipped: int, tokens: int, instance: InstanceId) -> PlacedSlice:
    """Some of its positions, on an instance."""
    start = share.start + skipped * share.step
    stop = start + (tokens - 1) * share.step + 1
    return PlacedSlice(instance, start, stop, share.step, share.source)


class Computed(NamedTuple):
    """A prompt's beginning that steps compute which stay as they are (`view.CachedView`)."""

    tokens: int
    slices: tuple[PlacedSlice, ...]
    """Where they will lie."""
    taken: Mapping[InstanceId, int] = MappingProxyType({})
    """Its slots are taken already."""


def differs(sequence: PlannedView, end_ns: int, share: float) -> bool:
    """Whether a plan ends earlier or later than it was to, by more than a share of its time.

    Args:
        end_ns: as predicted now.
    """
    plan = plan_of(sequence)
    return abs(end_ns - plan.ends_ns) > share * (plan.ends_ns - plan.made_ns)


def predicted_ends(
    sequence: PlannedView, numbers: Mapping[InstanceId, int], free_ns: Sequence[int]
) -> list[int]:
    """When the steps of a sequence end that no rank has heard of.

    Args:
        numbers: of the instances.
        free_ns: when instances are free of all that is before them, by number.
    """
    free, ends = list(free_ns), []
    for step in plan_of(sequence).unsent:
        assert step.command is not None, "held without a command"
        group = [numbers[instance] for instance in step.command.group]
        end_ns = max(free[instance] for instance in group) + step.predicted_ns
        for instance in group:
            free[instance] = end_ns
        ends.append(end_ns)
    return ends


def unsent_commands(sequence: PlannedView) -> list[RunStep]:
    """Of the steps that no rank has heard of."""
    return [it.command for it in plan_of(sequence).unsent if it.command is not None]


def plan_of(sequence: PlannedView) -> PlanView:
    """Of a sequence that has one."""
    assert sequence.plan is not None, "held without a plan"
    return sequence.plan


class Tetris:
    """The policy of this module's description."""

    name = "tetris"
    whole_prompts = False
    regroups = False

    def __init__(
        self, options: TetrisOptions | None = None, decode: DecodeOptions | None = None
    ) -> None:
        self.options, self.decode_options = options or TetrisOptions(), decode or DecodeOptions()

    def priority(self, prompt_tokens: int, pairs: Sequence[PairView]) -> Priority:
        """Nobody is urgent."""
        return "low"

    def decide(self, view: View) -> Sequence[Decision]:
        """Start the oldest requests until one has to wait."""
        rate = self._rate(view.rate_30s())
        pairs = [
            _Pair(pair, view.now_ns, rate, self.options, self.decode_options) for pair in view.pairs
        ]
        decisions: list[Decision] = []
        if view.planned:
            for pair in pairs:
                decisions += pair.replan(view)
        for request in view.waiting("low"):
            plan = next((it for pair in pairs if (it := pair.start(request, view))), None)
            if plan is None:
                decisions.append(Blocked(request_id=request.id))
                break
            decisions.append(plan)
        return decisions

    def idle_capacity(self, pair: PairView) -> IdleCapacity:
        """On idle gangs."""
        return _Trial(_Pair(pair, 0, 0.0, self.options, self.decode_options))

    def _rate(self, requests: int) -> float:
        rate = self.options.improvement_rate
        return self.options.rates.at(requests) if isinstance(rate, str) else rate


class _Work(NamedTuple):
    """How a prompt could be computed."""

    cached: CachedView
    holders: list[int]
    """Numbers of those who have it."""
    chunks: list[CdspChunk]
    sizes: list[list[int]]
    """Tokens of each member of each chunk."""

    @property
    def ends_ns(self) -> int:
        """When all is computed, from now on."""
        return self.chunks[-1].end_ns


class _Trial:
    def __init__(self, pair: _Pair) -> None:
        self._pair = pair

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """On all instances together."""
        return self._pair.fits(prompt_tokens, output_tokens)


class _Pair:
    """A pair of gangs in a round."""

    def __init__(
        self,
        pair: PairView,
        now_ns: int,
        rate: float,
        options: TetrisOptions,
        decode: DecodeOptions,
    ) -> None:
        self._now_ns, self._rate, self._options = now_ns, rate, options
        self._max_positions, self._tp = pair.max_positions, pair.prefill.tp
        self._gang, self._decoding = pair.prefill.id, pair.decode.id
        self._prefill = PrefillOverlay(pair.prefill, now_ns)
        self._decode = DecodeOverlay(pair.decode, decode)
        self._candidates = sorted(self._prefill.candidates, key=lambda it: it.order)
        """Server by server, as `Cdsp` numbers them."""
        by_server = groupby(self._candidates, key=lambda it: it.place.server_id)
        self._servers = tuple([sum(1 for _ in candidates) for _, candidates in by_server])

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether there are slots enough, on whichever instances."""
        free = sum(candidate.free for candidate in self._candidates)
        return prompt_tokens <= free and self._decode.has_room(prompt_tokens, output_tokens)

    def start(self, request: RequestView, view: View) -> StartPlan | None:
        """Plan the request; None if there are not slots enough."""
        cost = view.cost
        prompt, output = request.prompt_tokens, request.output_tokens
        if prompt + output > self._max_positions or not self.fits(prompt, output):
            return None
        placed = self._place(prompt, output, view.cached(request, self._decoding))
        if placed is None:
            return None
        work = self._work(prompt, NOTHING, cost)
        assert work is not None, "there was room"
        cached = view.cached(request, self._gang)
        rest = self._work(prompt, cached, cost) if cached else None
        if rest is not None and rest.ends_ns <= work.ends_ns:
            work = rest
        return self._plan(request, work, placed, cost)

    def _work(self, prompt: int, cached: CachedView, cost: CostView) -> _Work | None:
        """Chunks of what follows upon KV that was kept, which stays where it lies and whose holders
        are in every group; None if there are not slots enough."""
        cdsp = self._cdsp(cost)
        free_ns = [candidate.free_at_ns - self._now_ns for candidate in self._candidates]
        slots = [
            candidate.free - cached.taken.get(candidate.id, 0) for candidate in self._candidates
        ]
        holders = {kv_slice.instance for kv_slice in cached.slices}
        held = [number for number, it in enumerate(self._candidates) if it.id in holders]
        if min(slots) < 0:
            return None
        for least in cdsp.sizes:  # more instances have more slots
            if least < len(held):
                continue
            chunks = cdsp.plan(
                prompt - cached.tokens,
                free_ns,
                self._rate,
                least=least,
                past=cached.tokens,
                held=held,
            )
            if (shares := _shares(chunks, slots)) is not None:
                return _Work(cached, held, chunks, shares)
        return None

    def _place(self, prompt: int, output: int, kept: CachedView | None) -> Placed | None:
        """On one instance, if any has room; what was kept there stays where it is."""
        if kept is None and (whole := self._decode.place_whole(prompt, output)):
            return whole
        return self._decode.place_behind(kept, prompt, output)

    def _cdsp(self, cost: CostView) -> Cdsp:
        sizes = group_sizes(len(self._candidates))
        costs = tuple([(size, cost.exact(size, self._tp)) for size in sizes])
        return _planner(self._servers, costs, self._options.min_chunk, self._options.chunked)

    def _plan(self, request: RequestView, work: _Work, placed: Placed, cost: CostView) -> StartPlan:
        steps = self._steps(request, work, cost)
        self._decode.take(placed, request.output_tokens)
        decode = (DecodePlacement(request.id, placed.slices, placed.master),)
        return StartPlan(steps=steps, decode=decode, ahead_ns=self._options.ahead_ns)

    def _steps(self, request: RequestView, work: _Work, cost: CostView) -> tuple[PlannedStep, ...]:
        """Chunks as steps, in the line of their instances."""
        steps = []
        holding = dict.fromkeys(work.holders, 0)
        for candidate in self._candidates:
            candidate.free -= work.cached.taken.get(candidate.id, 0)
        for chunk, parts in zip(work.chunks, work.sizes, strict=True):
            computing = zip(chunk.members, parts, strict=True)
            # Who has no slots left takes part if it holds history.
            used = {it: part for it, part in computing if part or it in holding}
            steps.append(self._step(request, chunk, used, cost))
            holding |= used
        return self._balanced(steps, work.cached.slices)

    def _balanced(
        self, steps: Sequence[PlannedStep], kept: tuple[PlacedSlice, ...]
    ) -> tuple[PlannedStep, ...]:
        """With history even over each chunk's group, as far as slots allow."""
        if len(steps) == 1 and all(it.source for it in kept):
            return tuple(steps)
        free = {it.id: it.free for it in self._candidates}
        moving = tuple(balanced(steps, kept, free))
        for candidate in self._candidates:
            candidate.free = free[candidate.id]
        return moving

    # --- planning again --------------------------------------------------------------------

    def replan(self, view: View) -> Iterator[Replan]:
        """Plans whose end is not what it was to be are made again for what no rank has heard of,
        the oldest first: each on the times at which instances are free of those before it."""
        numbers = {it.id: number for number, it in enumerate(self._candidates)}
        for candidate in self._candidates:
            sent = [step.end_ns for step in candidate.view.steps.values() if not step.unsent]
            candidate.free_at_ns = max([self._now_ns, *sent])
        for sequence in view.planned:
            held = unsent_commands(sequence)
            if held[0].group[0] not in numbers:
                continue  # of another gang
            ends_ns = predicted_ends(sequence, numbers, [it.free_at_ns for it in self._candidates])
            if differs(sequence, ends_ns[-1], self._options.replan_share):
                steps = self._better(sequence, held[0], ends_ns[-1], view.cost)
                yield Replan(
                    sequence_id=sequence.id, version=plan_of(sequence).version, steps=steps
                )
                if steps:
                    continue
            for command, end_ns in zip(held, ends_ns, strict=True):
                for instance in command.group:
                    self._candidates[numbers[instance]].free_at_ns = end_ns

    def _better(
        self, sequence: PlannedView, first: RunStep, end_ns: int, cost: CostView
    ) -> tuple[PlannedStep, ...]:
        """Other chunks from the first that no rank has heard of. None if they do not improve the
        time that is left by as much as a larger group would have to, because others pay for it; or
        have no slots beside the old ones."""
        computed = Computed(first.chunks[0].start, first.history[0])
        work = self._work(sequence.request.prompt_tokens, computed, cost)
        left_ns = end_ns - self._now_ns
        if work is None or work.ends_ns >= left_ns * (1 - self._rate):
            return ()
        return self._steps(sequence.request, work, cost)

    def _step(
        self, request: RequestView, chunk: CdspChunk, used: Mapping[int, int], cost: CostView
    ) -> PlannedStep:
        """A step of a chunk.

        Args:
            used: tokens that each of its members computes.
        """
        group, tokens = [self._candidates[it] for it in used], list(used.values())
        choice = cost.best(request.cls, self._prefill.shape(group), chunk.start, chunk.length)
        self._prefill.start_low_priority(request, group, tokens, choice.time_ns)
        step = PlannedStep(
            group=tuple([instance.id for instance in group]),
            bounds=bounds_of(tokens),
            chunks=(PlannedChunk(request.id, chunk.start, chunk.length),),
            strategy=choice.strategy,
            predicted_ns=choice.time_ns,
        )
        return in_layout(step, self._options.layout)


def _shares(chunks: Sequence[CdspChunk], slots: Sequence[int]) -> list[list[int]] | None:
    """Tokens of each member of each chunk, as even as slots allow; None if they do not."""
    free, shares = list(slots), []
    for chunk in chunks:
        parts = level_sizes(chunk.length, [free[it] for it in chunk.members])
        if parts is None:
            return None
        for member, part in zip(chunk.members, parts, strict=True):
            free[member] -= part
        shares.append(parts)
    return shares


@lru_cache(maxsize=8)
def _planner(
    servers: tuple[int, ...],
    costs: tuple[tuple[int, StepLatency], ...],
    min_chunk: int,
    chunked: bool,
) -> Cdsp:
    """Worked out once for a gang and its latencies."""
    return Cdsp(servers, dict(costs), min_chunk=min_chunk, chunked=chunked)
