"""The policy `fixed_sp` computes every prompt on a group of the same size: the papers' baseline.

The instances of a gang are divided into groups of `sp` neighbors; the remaining ones stay idle. A
prompt goes to the group that is predicted to be free first. Requests start strictly first come,
first served: if the oldest finds too few slots, all wait. A cached prefix is reused if its group is
free soon enough.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from csps.protocols.core.placement import bounds_of, level_sizes
from csps.protocols.core.topology import GroupShape
from csps.services.scheduling.deciding.decisions import (
    Blocked,
    Decision,
    DecodePlacement,
    PlannedChunk,
    PlannedStep,
    SchedulerView,
    StartPlan,
)
from csps.services.scheduling.deciding.step_layout import in_zigzag
from csps.services.scheduling.policies.rounds.decode_overlay import (
    DecodeOptions,
    DecodeOverlay,
    Placed,
    check_least,
    fits_idle,
)
from csps.services.scheduling.policies.rounds.prefill_overlay import (
    Candidate,
    PrefillOverlay,
    Reuse,
    Reuses,
    reuse_plan,
)
from csps.services.scheduling.state.state import GangPair, Priority, Request


@dataclass(frozen=True, kw_only=True)
class FixedSpOptions:
    """Options of the policy `fixed_sp`."""

    sp: int = 1
    """Instances of each group; all of a gang that has fewer."""
    steps_per_group: int = 2
    """Steps given to a group at a time, one to run and others to follow without a gap."""

    def __post_init__(self) -> None:
        check_least(self, 1, "sp", "steps_per_group")


class FixedSp:
    """The policy `fixed_sp`."""

    name = "fixed_sp"
    whole_prompts = True
    regroups = False

    def __init__(
        self, options: FixedSpOptions | None = None, decode: DecodeOptions | None = None
    ) -> None:
        self.options, self.decode_options = options or FixedSpOptions(), decode or DecodeOptions()

    def priority(self, prompt_tokens: int, pairs: Sequence[GangPair]) -> Priority:
        """Return low priority for all requests."""
        return "low"

    def decide(self, view: SchedulerView) -> Sequence[Decision]:
        """Start the oldest requests until one has to wait."""
        pairs = [_Groups(pair, view, self.options, self.decode_options) for pair in view.pairs]
        decisions: list[Decision] = []
        for request in view.waiting("low"):
            plan = next(filter(None, (pair.start(request, view) for pair in pairs)), None)
            if plan is None:
                if not any(pair.open for pair in pairs):
                    break
                decisions.append(Blocked(request_id=request.id))
                break
            decisions.append(plan)
        return decisions

    def fits(self, pair: GangPair, prompt_tokens: int, output_tokens: int) -> bool:
        """Return True if a group has slots for the prompt, and the decode gang for all of it."""
        room = pair.prefill.largest_group(self.options.sp)
        return prompt_tokens <= room and fits_idle(pair.decode, prompt_tokens, output_tokens)


@dataclass(slots=True, eq=False)
class _Group:
    """Neighbors that compute every step together."""

    candidates: list[Candidate]
    shape: GroupShape

    @property
    def steps(self) -> int:
        return max(candidate.low_priority_steps for candidate in self.candidates)

    @property
    def free_at_ns(self) -> int:
        return max(candidate.free_at_ns for candidate in self.candidates)

    def sizes(self, tokens: int) -> list[int] | None:
        """Return the tokens of each instance; None without enough slots."""
        return level_sizes(tokens, [candidate.free for candidate in self.candidates])


class _Queue(NamedTuple):
    """The queue of a group; the least is the first to be free."""

    free_at_ns: int
    group: int
    """Index of the group in the gang."""


class _Groups:
    """The groups of a pair of gangs in a round."""

    def __init__(
        self, pair: GangPair, view: SchedulerView, options: FixedSpOptions, decode: DecodeOptions
    ) -> None:
        self._options, self._max_positions = options, pair.max_positions
        self._gang, self._decoding = pair.prefill.id, pair.decode.id
        self._prefill = PrefillOverlay(pair.prefill, view.now_ns)
        self._decode = DecodeOverlay(pair.decode, decode, view.cost, shared=view.shared)
        self._groups = list(self._cut(self._prefill.candidates))
        self._queues = [
            _Queue(group.free_at_ns, index)
            for index, group in enumerate(self._groups)
            if group.steps < options.steps_per_group
        ]
        heapq.heapify(self._queues)

    def _cut(self, candidates: Sequence[Candidate]) -> Iterator[_Group]:
        sp = min(self._options.sp, len(candidates))
        neighbors = sorted(candidates, key=lambda candidate: candidate.order)
        for start in range(0, len(candidates) - sp + 1, sp):
            group = neighbors[start : start + sp]
            yield _Group(group, self._prefill.shape(group))

    @property
    def open(self) -> bool:
        """True if some group may be given another step."""
        return bool(self._queues)

    def start(self, request: Request, view: SchedulerView) -> StartPlan | None:
        """Give the request to the group that will be free first."""
        if request.prompt_tokens + request.output_tokens > self._max_positions:
            return None  # Another pair may serve it.
        cached = view.cached(request, self._decoding)
        placed = self._decode.place_after(
            cached, request.prompt_tokens, request.output_tokens, modest=request.modest
        )
        if placed is None:
            return None
        if (reused := self._reuse(request, view)) is not None:
            return self._plan_reuse(request, *reused, placed)
        full: list[_Queue] = []
        plan = None
        while self._queues and plan is None:
            queue = heapq.heappop(self._queues)
            group = self._groups[queue.group]
            sizes = group.sizes(request.prompt_tokens)
            if sizes is None:
                full.append(queue)
            else:
                plan = self._plan(request, view, group, sizes, placed)
                if group.steps < self._options.steps_per_group:
                    heapq.heappush(self._queues, _Queue(group.free_at_ns, queue.group))
        for queue in full:
            heapq.heappush(self._queues, queue)
        return plan

    def _reuse(self, request: Request, view: SchedulerView) -> tuple[int, Reuse] | None:
        """Return the group that reuses a cached prefix, if the first token comes sooner so."""
        cached = view.cached(request, self._gang)
        if cached is None:
            return None
        reuses = Reuses(self._prefill, view.cost)
        holders = {kv_slice.instance for kv_slice in cached.slices}
        for queue in self._queues:
            group = self._groups[queue.group]
            if holders <= {candidate.id for candidate in group.candidates}:
                reuse = reuses.on(request, cached, group.candidates)
                soonest = self._groups[self._queues[0].group]
                whole = view.cost.best(request.cls, soonest.shape, 0, request.prompt_tokens)
                if reuse and reuse.ends_ns <= soonest.free_at_ns + whole.time_ns:
                    reuses.take(reuse)
                    return queue.group, reuse
        return None

    def _plan_reuse(self, request: Request, index: int, reuse: Reuse, placed: Placed) -> StartPlan:
        self._prefill.start_low_priority(request, reuse.candidates, reuse.sizes, reuse.time_ns)
        self._decode.take(placed, request.output_tokens)
        group = self._groups[index]
        queues = [queue for queue in self._queues if queue.group != index]
        if group.steps < self._options.steps_per_group:
            queues.append(_Queue(group.free_at_ns, index))
        heapq.heapify(queues)
        self._queues = queues
        return reuse_plan(request, reuse, placed)

    def _plan(
        self,
        request: Request,
        view: SchedulerView,
        group: _Group,
        sizes: list[int],
        placed: Placed,
    ) -> StartPlan:
        waited_ns = max(group.free_at_ns, view.now_ns) - request.submitted_ns
        choice = view.cost.best(request.cls, group.shape, 0, request.prompt_tokens, waited_ns)
        self._prefill.start_low_priority(request, group.candidates, sizes, choice.time_ns)
        self._decode.take(placed, request.output_tokens)
        used = [
            (candidate.id, size)
            for candidate, size in zip(group.candidates, sizes, strict=True)
            if size
        ]
        step = PlannedStep(
            group=tuple([instance for instance, _ in used]),
            bounds=bounds_of([size for _, size in used]),
            chunks=(PlannedChunk(request.id, 0, request.prompt_tokens),),
            strategy=choice.strategy,
            predicted_ns=choice.time_ns,
        )
        decode = (DecodePlacement(request.id, placed.slices, placed.master),)
        return StartPlan(steps=(in_zigzag(step),), decode=decode)
