"""The policy `tetris` computes every prompt in chunks, each on a group of its own size.

A request gets its plan on arrival, from the predicted times at which instances are free; its chunks
wait there for their turn. Chunks that the ranks have not received are planned again if reality
deviates from the prediction (`_Pair.replan`). Requests start strictly first come, first served: if
the oldest finds too few slots, all wait. A prompt's KV goes to the decode instance with most free
slots per request (§5.2), or to several if none has enough.

Before a chunk, history moves so that its group's members hold equal amounts, to within a token
(§4.1, `balanced`): the member with most history would delay the others. As few tokens as possible
move, and cached KV of other sequences stays in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from functools import lru_cache
from typing import NamedTuple

import msgspec

from csps.configurator.costs.cost_table import Costs, StepLatency
from csps.protocols.core.placement import KvSlice, bounds_of, level_sizes, outside, own, tokens_on
from csps.protocols.gang.step_messages import PrefillStep
from csps.services.scheduling.deciding.decisions import (
    Blocked,
    Decision,
    DecodePlacement,
    PlannedChunk,
    PlannedStep,
    Replan,
    SchedulerView,
    StartPlan,
    WakeAt,
)
from csps.services.scheduling.deciding.step_layout import in_layout, rows_of
from csps.services.scheduling.events.events import InstanceId
from csps.services.scheduling.events.limits import SECOND_NS
from csps.services.scheduling.policies.rounds.decode_overlay import (
    DecodeOptions,
    DecodeOverlay,
    Placed,
    fits_idle,
)
from csps.services.scheduling.policies.rounds.prefill_overlay import NOTHING, PrefillOverlay
from csps.services.scheduling.policies.tetris.cdsp import Cdsp, CdspChunk, group_sizes
from csps.services.scheduling.policies.tetris.options import TetrisOptions
from csps.services.scheduling.state.state import (
    NO_PLACE,
    Cached,
    GangPair,
    Priority,
    Request,
    Sequence,
    StepPlan,
)


class Tetris:
    """The policy `tetris`."""

    name = "tetris"
    whole_prompts = False
    regroups = False

    def __init__(
        self, options: TetrisOptions | None = None, decode: DecodeOptions | None = None
    ) -> None:
        self.options, self.decode_options = options or TetrisOptions(), decode or DecodeOptions()

    def priority(self, prompt_tokens: int, pairs: Many[GangPair]) -> Priority:
        """Return low priority for all requests."""
        return "low"

    def decide(self, view: SchedulerView) -> Many[Decision]:
        """Start the oldest requests until one has to wait."""
        rate = self._rate(view.rate_30s)
        pairs = [_Pair(pair, view, rate, self.options, self.decode_options) for pair in view.pairs]
        decisions: list[Decision] = []
        if view.planned:
            for pair in pairs:
                decisions += pair.replan(view)
        for request in view.waiting("low"):
            # Who starts queues at its instances, where nobody with less slack passes it.
            waits = view.shared or request.place != NO_PLACE
            at_ns = min(pair.plans_at_ns() for pair in pairs) if waits else view.now_ns
            if at_ns > view.now_ns:
                decisions.append(WakeAt(at_ns=at_ns))
                break
            plan = next(filter(None, (pair.start(request, view) for pair in pairs)), None)
            if plan is None:
                decisions.append(Blocked(request_id=request.id))
                break
            decisions.append(plan)
        return decisions

    def fits(self, pair: GangPair, prompt_tokens: int, output_tokens: int) -> bool:
        """Return True if all instances together have slots for the prompt."""
        roomy = prompt_tokens <= pair.prefill.capacity
        return roomy and fits_idle(pair.decode, prompt_tokens, output_tokens)

    def _rate(self, requests: int) -> float:
        rate = self.options.improvement_rate
        return self.options.rates.at(requests) if isinstance(rate, str) else rate


class _Work(NamedTuple):
    """Chunks of a prompt after its cached prefix."""

    cached: Cached
    holders: list[int]
    """Indices of the holders of the cached prefix."""
    chunks: list[CdspChunk]
    sizes: list[list[int]]
    """Tokens of each member of each chunk."""

    @property
    def ends_ns(self) -> int:
        """Predicted end from now."""
        return self.chunks[-1].end_ns


class _Pair:
    """A pair of gangs in a round."""

    def __init__(
        self,
        pair: GangPair,
        view: SchedulerView,
        rate: float,
        options: TetrisOptions,
        decode: DecodeOptions,
    ) -> None:
        self._now_ns, self._rate, self._options = view.now_ns, rate, options
        self._max_positions, self._tp = pair.max_positions, pair.prefill.tp
        self._gang, self._decoding = pair.prefill.id, pair.decode.id
        self._prefill = PrefillOverlay(pair.prefill, view.now_ns)
        self._decode = DecodeOverlay(pair.decode, decode, view.cost, shared=view.shared)
        candidates = self._prefill.candidates
        self._candidates = [candidates[index] for index in pair.prefill.by_order]
        """Instances server by server, in the order of `Cdsp`."""
        self._servers = pair.prefill.servers

    def fits(self, request: Request) -> bool:
        """Return True if all instances together have slots for a request."""
        prompt, output = request.prompt_tokens, request.output_tokens
        free = sum([candidate.free for candidate in self._candidates])
        return prompt <= free and self._decode.has_room(prompt, output, modest=request.modest)

    def plans_at_ns(self) -> int:
        """Return when to plan requests while several tenants share the gangs: when the ranks need
        to know what comes next. What is planned earlier, a modest tenant's request waits for."""
        free_at_ns = min(candidate.free_at_ns for candidate in self._candidates)
        return free_at_ns - round(self._options.launch_ahead_s * SECOND_NS)

    def start(self, request: Request, view: SchedulerView) -> StartPlan | None:
        """Plan a request; None without enough slots."""
        cost = view.cost
        prompt, output = request.prompt_tokens, request.output_tokens
        if prompt + output > self._max_positions or not self.fits(request):
            return None
        placed = self._place(request, view.cached(request, self._decoding))
        if placed is None:
            return None
        work = self._work(prompt, NOTHING, cost)
        assert work is not None, f"no group for request {request.id}, although its slots are free"
        cached = view.cached(request, self._gang)
        rest = self._work(prompt, cached, cost) if cached else None
        if rest is not None and rest.ends_ns <= work.ends_ns:
            work = rest
        return self._plan(request, work, placed, cost)

    def _work(self, prompt: int, cached: Cached, cost: Costs) -> _Work | None:
        """Plan the chunks of a prompt after its cached prefix; None without enough slots.

        The prefix stays in place, so every group contains its holders.
        """
        cdsp = self._cdsp(cost)
        free_ns = [candidate.free_at_ns - self._now_ns for candidate in self._candidates]
        slots = [
            candidate.free - cached.taken.get(candidate.id, 0) for candidate in self._candidates
        ]
        holders = {kv_slice.instance for kv_slice in cached.slices}
        indices = [
            index for index, candidate in enumerate(self._candidates) if candidate.id in holders
        ]
        if min(slots) < 0:
            return None
        for least in cdsp.sizes:  # Larger groups have more slots.
            if least < len(indices):
                continue
            chunks = cdsp.plan(
                prompt - cached.tokens,
                free_ns,
                self._rate,
                least=least,
                past=cached.tokens,
                holders=indices,
            )
            if (sizes := _sizes(chunks, slots)) is not None:
                return _Work(cached, indices, chunks, sizes)
        return None

    def _place(self, request: Request, cached: Cached | None) -> Placed | None:
        """Place a request on one decode instance if possible, or after its cached prefix."""
        size, modest = (request.prompt_tokens, request.output_tokens), request.modest
        if cached is None and (whole := self._decode.place_whole(*size, modest=modest)):
            return whole
        return self._decode.place_after(cached, *size, modest=modest)

    def _cdsp(self, cost: Costs) -> Cdsp:
        sizes = group_sizes(len(self._candidates))
        costs = tuple([(size, cost.exact(size, self._tp)) for size in sizes])
        return _planner(self._servers, costs, self._options.min_chunk, self._options.chunked)

    def _plan(self, request: Request, work: _Work, placed: Placed, cost: Costs) -> StartPlan:
        steps = self._steps(request, work, cost)
        self._decode.take(placed, request.output_tokens)
        decode = (DecodePlacement(request.id, placed.slices, placed.master),)
        return StartPlan(steps=steps, decode=decode, ahead_ns=self._options.ahead_ns)

    def _steps(self, request: Request, work: _Work, cost: Costs) -> tuple[PlannedStep, ...]:
        """Add the chunks to the queues of their instances, and return them as steps."""
        steps = []
        holding = dict.fromkeys(work.holders, 0)
        for candidate in self._candidates:
            candidate.free -= work.cached.taken.get(candidate.id, 0)
        for chunk, sizes in zip(work.chunks, work.sizes, strict=True):
            # A member without slots still takes part if it holds history.
            used = {
                member: size
                for member, size in zip(chunk.members, sizes, strict=True)
                if size or member in holding
            }
            steps.append(self._step(request, chunk, used, cost))
            holding |= used
        return self._balanced(steps, work.cached.slices)

    def _balanced(
        self, steps: Many[PlannedStep], cached: tuple[KvSlice, ...]
    ) -> tuple[PlannedStep, ...]:
        """Balance the history over each chunk's group, as far as slots allow."""
        if len(steps) == 1 and all(kv_slice.source for kv_slice in cached):
            return tuple(steps)
        free = {candidate.id: candidate.free for candidate in self._candidates}
        with_moves = tuple(balanced(steps, cached, free))
        for candidate in self._candidates:
            candidate.free = free[candidate.id]
        return with_moves

    # --- replanning ------------------------------------------------------------------------------

    def replan(self, view: SchedulerView) -> Iterator[Replan]:
        """Plan the unsent steps again where the predicted end deviates, the oldest sequence first.

        Each sequence is planned on the times at which instances are free of the ones before it.
        """
        index_of = {candidate.id: index for index, candidate in enumerate(self._candidates)}
        for candidate in self._candidates:
            sent = [step.end_ns for step in candidate.instance.steps.values() if not step.unsent]
            candidate.free_at_ns = max([self._now_ns, *sent])
        for sequence in view.planned:
            unsent = _unsent_steps(sequence)
            if unsent[0].group[0] not in index_of:
                continue  # The sequence belongs to another gang.
            free_ns = [candidate.free_at_ns for candidate in self._candidates]
            ends_ns = _predicted_ends(sequence, index_of, free_ns)
            if _deviates(sequence, ends_ns[-1], self._options.replan_share):
                steps = self._better(sequence, unsent[0], ends_ns[-1], view.cost)
                yield Replan(
                    sequence_id=sequence.id, version=_plan_of(sequence).version, steps=steps
                )
                if steps:
                    continue
            for step, end_ns in zip(unsent, ends_ns, strict=True):
                for instance in step.group:
                    self._candidates[index_of[instance]].free_at_ns = end_ns

    def _better(
        self, sequence: Sequence, first: PrefillStep, end_ns: int, cost: Costs
    ) -> tuple[PlannedStep, ...]:
        """Plan other chunks from the first unsent one on.

        Returns:
            An empty tuple if there are too few slots beside the old chunks, or if the new ones save
            less than the improvement rate.
        """
        # The steps already sent compute everything before the first unsent chunk.
        computed = Cached(first.chunks[0].start, first.chunks[0].history)
        work = self._work(sequence.request.prompt_tokens, computed, cost)
        left_ns = end_ns - self._now_ns
        # Other requests pay for a change of plan, as they do for a larger group.
        if work is None or work.ends_ns >= left_ns * (1 - self._rate):
            return ()
        return self._steps(sequence.request, work, cost)

    def _step(
        self, request: Request, chunk: CdspChunk, used: Mapping[int, int], cost: Costs
    ) -> PlannedStep:
        """Add the step of a chunk to the queues of its group.

        Args:
            used: tokens that each member computes.
        """
        group, tokens = [self._candidates[member] for member in used], list(used.values())
        choice = cost.best(request.cls, self._prefill.shape(group), chunk.start, chunk.length)
        self._prefill.start_low_priority(request, group, tokens, choice.time_ns)
        step = PlannedStep(
            group=tuple([candidate.id for candidate in group]),
            bounds=bounds_of(tokens),
            chunks=(PlannedChunk(request.id, chunk.start, chunk.length),),
            strategy=choice.strategy,
            predicted_ns=choice.time_ns,
        )
        return in_layout(step, self._options.layout)


def _sizes(chunks: Many[CdspChunk], slots: Many[int]) -> list[list[int]] | None:
    """Return the tokens of each member of each chunk; None without enough slots."""
    free, sizes_of_chunks = list(slots), []
    for chunk in chunks:
        sizes = level_sizes(chunk.length, [free[member] for member in chunk.members])
        if sizes is None:
            return None
        for member, size in zip(chunk.members, sizes, strict=True):
            free[member] -= size
        sizes_of_chunks.append(sizes)
    return sizes_of_chunks


@lru_cache(maxsize=8)
def _planner(
    servers: tuple[int, ...],
    costs: tuple[tuple[int, StepLatency], ...],
    min_chunk: int,
    chunked: bool,
) -> Cdsp:
    """Return the planner of a gang and its latencies, made once."""
    return Cdsp(servers, dict(costs), min_chunk=min_chunk, chunked=chunked)


def _deviates(sequence: Sequence, end_ns: int, share: float) -> bool:
    """Return True if a plan's end deviates by more than a share of its time.

    Args:
        end_ns: end as predicted now.
    """
    plan = _plan_of(sequence)
    return abs(end_ns - plan.ends_ns) > share * (plan.ends_ns - plan.made_ns)


def _predicted_ends(
    sequence: Sequence, index_of: Mapping[InstanceId, int], free_ns: Many[int]
) -> list[int]:
    """Predict the ends of the unsent steps of a sequence.

    Args:
        index_of: index of each instance.
        free_ns: time at which each instance, by index, is free of the steps before.
    """
    free, ends = list(free_ns), []
    for step in _plan_of(sequence).unsent:
        assert step.command is not None, f"unsent step {step.id} has no command"
        group = [index_of[instance] for instance in step.command.step.group]
        end_ns = max(free[index] for index in group) + step.predicted_ns
        for index in group:
            free[index] = end_ns
        ends.append(end_ns)
    return ends


def _unsent_steps(sequence: Sequence) -> list[PrefillStep]:
    """Return the steps that no rank has received."""
    return [step.command.step for step in _plan_of(sequence).unsent if step.command is not None]


def _plan_of(sequence: Sequence) -> StepPlan:
    assert sequence.plan is not None, f"planned sequence {sequence.id} has no plan"
    return sequence.plan


def balanced(
    steps: Many[PlannedStep], cached: tuple[KvSlice, ...], free: dict[InstanceId, int]
) -> Iterator[PlannedStep]:
    """Yield the steps of a plan, each with the moves that balance its history.

    Args:
        cached: cached prefix of the prompt.
        free: free slots beside the plan; those that moves take are subtracted.
    """
    history = cached
    for step in steps:
        (chunk,), (rows,) = step.chunks, rows_of(step)
        if moves := balancing_moves(history, step.group, free):
            for move in moves:
                free[move.instance] -= move.tokens
            chunk = msgspec.structs.replace(chunk, placement=(*rows, *moves))
            step = msgspec.structs.replace(step, chunks=(chunk,))
        history = (*outside(history, moves), *moves, *rows)
        yield step


def balancing_moves(
    history: Many[KvSlice],
    group: Many[InstanceId],
    free: Mapping[InstanceId, int] | None = None,
) -> tuple[KvSlice, ...]:
    """Return the slices to move, with their new instances, so that all members hold as much.

    Args:
        history: placement of earlier chunks, on members of the group.
        group: group of the next chunk.
        free: free slots of its members, which limit what they can receive; None: enough.
    """
    resident = tokens_on(history)
    assert resident.keys() <= set(group), (
        f"history on instances {sorted(resident.keys() - set(group))} outside of the group"
    )
    fixed = tokens_on(kv_slice for kv_slice in history if kv_slice.source)
    level, total = _level(group, fixed, sum(resident.values()))
    targets = _targets(
        total,
        [resident.get(instance, 0) for instance in level],
        [(free or {}).get(instance) for instance in level],
    )
    if targets is None:
        return ()
    target_of = {instance: fixed.get(instance, 0) for instance in group}
    target_of |= dict(zip(level, targets, strict=True))
    movable: dict[InstanceId, list[KvSlice]] = {}
    for kv_slice in own(history):
        movable.setdefault(kv_slice.instance, []).append(kv_slice)
    surplus, missing = [], []
    for instance, target in target_of.items():
        excess = resident.get(instance, 0) - target
        if excess > 0:
            surplus += list(_last(movable[instance], excess))
        elif excess < 0:
            missing.append((instance, -excess))
    return tuple(_distributed(surplus, missing))


def _level(
    group: Many[InstanceId], fixed: Mapping[InstanceId, int], total: int
) -> tuple[list[InstanceId], int]:
    """Return the members that can hold equal amounts, and their tokens together.

    Members whose fixed slices alone exceed an equal amount are left out.
    """
    level = list(group)
    while over := [instance for instance in level if fixed.get(instance, 0) > total // len(level)]:
        level = [instance for instance in level if instance not in over]
        total -= sum(fixed[instance] for instance in over)
    return level, total


def _targets(total: int, resident: Many[int], free: Many[int | None]) -> list[int] | None:
    """Return the tokens of each member; None if there are too few slots."""
    count = len(resident)
    limits = [
        total if room is None else tokens + room
        for tokens, room in zip(resident, free, strict=True)
    ]
    if any(limit < -(-total // count) for limit in limits):
        return level_sizes(total, limits)
    base, over = divmod(total, count)
    # The members with most tokens get the remainder, so that fewer tokens move.
    most = sorted(range(count), key=lambda member: (-resident[member], member))
    more = set(most[:over])
    return [base + (member in more) for member in range(count)]


def _last(slices: Many[KvSlice], tokens: int) -> Iterator[KvSlice]:
    """Yield the last tokens of the slices of an instance."""
    for kv_slice in reversed(slices):
        taken = min(tokens, kv_slice.tokens)
        tokens -= taken
        if taken:
            yield _moved(kv_slice, kv_slice.tokens - taken, taken, kv_slice.instance)


def _distributed(
    surplus: list[KvSlice], missing: list[tuple[InstanceId, int]]
) -> Iterator[KvSlice]:
    """Distribute the surplus in order over the instances that miss tokens."""
    left = iter(surplus)
    kv_slice = next(left, None)
    for instance, tokens in missing:
        while tokens:
            assert kv_slice is not None, (
                f"instance {instance} misses {tokens} tokens of the history"
            )
            taken = min(tokens, kv_slice.tokens)
            yield _moved(kv_slice, 0, taken, instance)
            tokens -= taken
            rest = kv_slice.tokens - taken
            kv_slice = (
                _moved(kv_slice, taken, rest, kv_slice.instance) if rest else next(left, None)
            )


def _moved(kv_slice: KvSlice, skipped: int, tokens: int, instance: InstanceId) -> KvSlice:
    """Return some positions of a slice on an instance."""
    start = kv_slice.start + skipped * kv_slice.step
    stop = start + (tokens - 1) * kv_slice.step + 1
    return KvSlice(instance, start, stop, kv_slice.step, kv_slice.source)
