"""Every prompt on a group of the same size: the baseline that papers call Fixed-SP.

The instances of a gang are cut into groups of `sp` neighbours; what is left over computes nothing.
A prompt goes to the group that will be free first, as predicted, and waits there for those before
it. Strictly first come, first served: when the oldest finds no slots, all wait. What a group has
kept of a prompt is not computed again, if that group is free soon enough.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from csps.protocols.core.topology import GroupShape
from csps.services.scheduling.deciding.decisions import (
    Blocked,
    Decision,
    DecodePlacement,
    IdleCapacity,
    PlannedChunk,
    PlannedStep,
    StartPlan,
)
from csps.services.scheduling.deciding.step_layout import in_zigzag
from csps.services.scheduling.deciding.view import PairView, RequestView, View
from csps.services.scheduling.events.slices import bounds_of, level_sizes
from csps.services.scheduling.policies.rounds.decode_overlay import (
    DecodeOptions,
    DecodeOverlay,
    Placed,
    check_least,
)
from csps.services.scheduling.policies.rounds.prefill_overlay import (
    Candidate,
    PrefillOverlay,
    Reuse,
    Reuses,
    reuse_plan,
)
from csps.services.scheduling.state.state import Priority


@dataclass(frozen=True, kw_only=True)
class FixedSpOptions:
    """The baseline's only choices."""

    sp: int = 1
    """Instances of every group; all of a gang that has fewer."""
    steps_per_group: int = 2
    """Steps that a group is given at a time, one to run and others to follow without a gap."""

    def __post_init__(self) -> None:
        check_least(self, 1, "sp", "steps_per_group")


class FixedSp:
    """The policy of this module's description."""

    name = "fixed_sp"
    whole_prompts = True
    regroups = False

    def __init__(
        self, options: FixedSpOptions | None = None, decode: DecodeOptions | None = None
    ) -> None:
        self.options, self.decode_options = options or FixedSpOptions(), decode or DecodeOptions()

    def priority(self, prompt_tokens: int, pairs: Sequence[PairView]) -> Priority:
        """Nobody is urgent."""
        return "low"

    def decide(self, view: View) -> Sequence[Decision]:
        """Start the oldest requests until one has to wait."""
        pairs = [
            _Groups(pair, view.now_ns, self.options, self.decode_options) for pair in view.pairs
        ]
        decisions: list[Decision] = []
        for request in view.waiting("low"):
            plan = next((it for pair in pairs if (it := pair.start(request, view))), None)
            if plan is None:
                if not any(pair.open for pair in pairs):
                    break
                decisions.append(Blocked(request_id=request.id))
                break
            decisions.append(plan)
        return decisions

    def idle_capacity(self, pair: PairView) -> IdleCapacity:
        """On idle gangs."""
        return _Trial(_Groups(pair, 0, self.options, self.decode_options))


class _Trial:
    def __init__(self, groups: _Groups) -> None:
        self._groups = groups

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """On any of the groups, and with the decode gang to itself."""
        return self._groups.fits(prompt_tokens, output_tokens)


@dataclass(slots=True, eq=False)
class _Group:
    """Neighbours that compute together; their lines are the same."""

    candidates: list[Candidate]
    shape: GroupShape

    @property
    def steps(self) -> int:
        return max(candidate.low_priority_steps for candidate in self.candidates)

    @property
    def free_at_ns(self) -> int:
        return max(candidate.free_at_ns for candidate in self.candidates)

    def sizes(self, tokens: int) -> list[int] | None:
        """Tokens of each; None if they have no slots for so many."""
        return level_sizes(tokens, [candidate.free for candidate in self.candidates])


class _Queue(NamedTuple):
    """A group by the length of its line; the least is the best."""

    free_at_ns: int
    number: int


class _Groups:
    """The groups of a pair of gangs in a round."""

    def __init__(
        self, pair: PairView, now_ns: int, options: FixedSpOptions, decode: DecodeOptions
    ) -> None:
        self._options, self._max_positions = options, pair.max_positions
        self._gang, self._decoding = pair.prefill.id, pair.decode.id
        self._prefill = PrefillOverlay(pair.prefill, now_ns)
        self._decode = DecodeOverlay(pair.decode, decode)
        self._groups = list(self._cut(self._prefill.candidates))
        self._queues = [
            _Queue(it.free_at_ns, number)
            for number, it in enumerate(self._groups)
            if it.steps < options.steps_per_group
        ]
        heapq.heapify(self._queues)

    def _cut(self, candidates: Sequence[Candidate]) -> Iterator[_Group]:
        sp = min(self._options.sp, len(candidates))
        neighbours = sorted(candidates, key=lambda it: it.order)
        for start in range(0, len(candidates) - sp + 1, sp):
            group = neighbours[start : start + sp]
            yield _Group(group, self._prefill.shape(group))

    @property
    def open(self) -> bool:
        """Some group's line is not full."""
        return bool(self._queues)

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether anything of the groups and of decode is enough for a request."""
        if not self._decode.has_room(prompt_tokens, output_tokens):
            return False
        return any(group.sizes(prompt_tokens) is not None for group in self._groups)

    def start(self, request: RequestView, view: View) -> StartPlan | None:
        """Give the request to the group that will be free first."""
        if request.prompt_tokens + request.output_tokens > self._max_positions:
            return None  # another pair may serve it
        kept = view.cached(request, self._decoding)
        placed = self._decode.place_behind(kept, request.prompt_tokens, request.output_tokens)
        if placed is None:
            return None
        if (number := self._reusing(request, view)) is not None:
            return self._plan_reuse(request, *number, placed)
        full: list[_Queue] = []
        plan = None
        while self._queues and plan is None:
            queue = heapq.heappop(self._queues)
            group = self._groups[queue.number]
            shares = group.sizes(request.prompt_tokens)
            if shares is None:
                full.append(queue)
            else:
                plan = self._plan(request, view, group, shares, placed)
                if group.steps < self._options.steps_per_group:
                    heapq.heappush(self._queues, _Queue(group.free_at_ns, queue.number))
        for queue in full:
            heapq.heappush(self._queues, queue)
        return plan

    def _reusing(self, request: RequestView, view: View) -> tuple[int, Reuse] | None:
        """The group that has kept some of the prompt, if that makes its answer begin sooner."""
        cached = view.cached(request, self._gang)
        if cached is None:
            return None
        reuses, held = (
            Reuses(self._prefill, view.cost),
            {kv_slice.instance for kv_slice in cached.slices},
        )
        for queue in self._queues:
            group = self._groups[queue.number]
            if held <= {candidate.id for candidate in group.candidates}:
                reuse = reuses.on(request, cached, group.candidates)
                soonest = self._groups[self._queues[0].number]
                whole = view.cost.best(request.cls, soonest.shape, 0, request.prompt_tokens)
                if reuse and reuse.ends_ns <= soonest.free_at_ns + whole.time_ns:
                    reuses.take(reuse)
                    return queue.number, reuse
        return None

    def _plan_reuse(
        self, request: RequestView, number: int, reuse: Reuse, placed: Placed
    ) -> StartPlan:
        self._prefill.start_low_priority(request, reuse.candidates, reuse.sizes, reuse.time_ns)
        self._decode.take(placed, request.output_tokens)
        group = self._groups[number]
        queues = [queue for queue in self._queues if queue.number != number]
        if group.steps < self._options.steps_per_group:
            queues.append(_Queue(group.free_at_ns, number))
        heapq.heapify(queues)
        self._queues = queues
        return reuse_plan(request, reuse, placed)

    def _plan(
        self, request: RequestView, view: View, group: _Group, shares: list[int], placed: Placed
    ) -> StartPlan:
        waited_ns = max(group.free_at_ns, view.now_ns) - request.submitted_ns
        choice = view.cost.best(request.cls, group.shape, 0, request.prompt_tokens, waited_ns)
        self._prefill.start_low_priority(request, group.candidates, shares, choice.time_ns)
        self._decode.take(placed, request.output_tokens)
        used = [
            (candidate.id, share)
            for candidate, share in zip(group.candidates, shares, strict=True)
            if share
        ]
        step = PlannedStep(
            group=tuple([candidate for candidate, _ in used]),
            bounds=bounds_of([share for _, share in used]),
            chunks=(PlannedChunk(request.id, 0, request.prompt_tokens),),
            strategy=choice.strategy,
            predicted_ns=choice.time_ns,
        )
        decode = (DecodePlacement(request.id, placed.slices, placed.master),)
        return StartPlan(steps=(in_zigzag(step),), decode=decode)
