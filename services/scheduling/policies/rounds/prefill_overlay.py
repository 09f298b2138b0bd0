"""Which prompts may pass others, under policies with an urgent line.

The prefill instances as they will be once what a round has decided is under way.

Steps of whole prompts that a round puts together, and urgent ones that grow while it does.

Going on from what a gang has kept of a prompt, instead of computing all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from csps.protocols.core.topology import GroupShape, Location
from csps.services.scheduling.deciding.decisions import (
    DecodePlacement,
    PlannedChunk,
    PlannedStep,
    StartPlan,
)
from csps.services.scheduling.deciding.step_layout import in_zigzag
from csps.services.scheduling.deciding.view import (
    CachedView,
    CostView,
    GangView,
    InstanceView,
    PairView,
    RequestView,
    StepView,
)
from csps.services.scheduling.events.commands import PlacedSlice
from csps.services.scheduling.events.events import InstanceId, StepId
from csps.services.scheduling.events.limits import preemption_delay
from csps.services.scheduling.events.slices import bounds_of, level_sizes
from csps.services.scheduling.policies.rounds.decode_overlay import Placed, check_least
from csps.services.scheduling.state.state import Priority


@dataclass(frozen=True, kw_only=True)
class ShortPromptOptions:
    """Of policies with an urgent line, which have more of their own. Sizes in tokens."""

    short_tokens: int = 1024
    """Longest prompt that is urgent."""
    urgent_batch_tokens: int = 2048
    """Longest urgent step: the first token of a batch comes when all of it is computed."""
    jobs_per_instance: int = 2
    """Long steps, and urgent ones, that an instance is given at a time."""
    overtaking_s: float = 10.0
    """What a request may be delayed by others that pass it, in seconds."""

    def __post_init__(self) -> None:
        check_least(self, 1, "urgent_batch_tokens", "jobs_per_instance")
        check_least(self, 0, "short_tokens", "overtaking_s")

    @property
    def preemption_budget_ns(self) -> int:
        """`overtaking_s` in nanoseconds."""
        return round(self.overtaking_s * 1_000_000_000)


def priority_of(prompt_tokens: int, short_tokens: int, pairs: Sequence[PairView]) -> Priority:
    """Short prompts are urgent, if a single instance of whichever pair can hold them."""
    if prompt_tokens > short_tokens:
        return "low"
    largest = min((pair.prefill.largest for pair in pairs), default=prompt_tokens)
    return "high" if prompt_tokens <= largest else "low"


class Budget(msgspec.Struct, eq=False, gc=False):
    """What urgent steps may still cost a step that they overtake."""

    left_ns: int


class Candidate(msgspec.Struct, eq=False):
    """An instance."""

    view: InstanceView
    id: InstanceId
    place: Location
    order: int
    free: int
    """KV slots."""
    low_priority_steps: int
    high_priority_steps: int
    high_priority_ns: int
    """Predicted time of urgent steps."""
    free_at_ns: int
    """When all steps will have been computed; not in the past."""
    preempted_ns: int
    """What urgent steps have taken since it has long ones."""
    preemption_delay_ns: int
    """What they have cost long ones here, ever."""
    budgets: list[Budget] | None = None
    """Of its long steps; None until somebody asked."""
    version: int = 0
    """Counts its changes."""


class PrefillOverlay:
    """A gang's instances and what a round adds to them.

    Args:
        gang: as it is.
        now_ns: the time of the round.
        options: of urgent steps, if there are any.
    """

    def __init__(
        self, gang: GangView, now_ns: int, options: ShortPromptOptions | None = None
    ) -> None:
        self._options = options or ShortPromptOptions(overtaking_s=0.0)
        self._preemption_budget_ns = self._options.preemption_budget_ns
        self._budgets: dict[StepId, Budget] = {}
        self._tp = gang.tp
        self.single = GroupShape((1,), gang.tp)
        """Of one instance."""
        self.candidates = [
            Candidate(
                instance,
                instance.id,
                instance.place,
                instance.order,
                instance.free_slots,
                instance.low_priority_steps,
                len(instance.steps) - instance.low_priority_steps,
                instance.high_priority_ns,
                max(now_ns, instance.free_at_ns),
                instance.preempted_ns,
                instance.preemption_delay_ns,
            )
            for instance in gang.instances
        ]
        self.idle = sum(not candidate.low_priority_steps for candidate in self.candidates)
        """Instances without a long step."""

    def shape(self, group: list[Candidate]) -> GroupShape:
        """Of instances in topology order."""
        return GroupShape.of([instance.place for instance in group], self._tp)

    def spare_ns(self, candidate: Candidate) -> int | None:
        """What urgent steps on an instance may still cost; None if they overtake nothing."""
        if not candidate.low_priority_steps:
            return None
        return min(it.left_ns for it in self._budgets_of(candidate))

    def may_preempt(self, candidate: Candidate, tokens: int, time_ns: int) -> bool:
        """An instance may compute another urgent step."""
        return self.admits(candidate, tokens, time_ns) and self.has_step_left(candidate)

    def admits(self, candidate: Candidate, tokens: int, time_ns: int) -> bool:
        """There are slots, and the long steps of the instance may be overtaken."""
        if candidate.free < tokens:
            return False
        spare_ns = self.spare_ns(candidate)
        return spare_ns is None or spare_ns >= time_ns

    def has_step_left(self, candidate: Candidate) -> bool:
        """It may be given another urgent step: one to run and one to follow without a gap. Those
        who wait for a turn share a step when one comes."""
        return candidate.high_priority_steps < self._options.jobs_per_instance

    def start_low_priority(
        self, request: RequestView, group: list[Candidate], shares: list[int], predicted_ns: int
    ) -> None:
        """A step that is not urgent.

        Args:
            request: the oldest that it computes.
        """
        begin_ns = max(instance.free_at_ns for instance in group)
        since_ns = request.waiting_since_ns
        found = preemption_delay(request.delays_before, since_ns, group, begin_ns, predicted_ns)
        budget = Budget(found.budget_ns(self._preemption_budget_ns, predicted_ns))
        end_ns = begin_ns + predicted_ns
        for candidate, share in zip(group, shares, strict=True):
            self._budgets_of(candidate).append(budget)
            candidate.free -= share
            self.idle -= not candidate.low_priority_steps
            candidate.low_priority_steps += 1
            candidate.free_at_ns = end_ns
            candidate.version += 1

    def start_high_priority(self, candidate: Candidate, tokens: int, predicted_ns: int) -> None:
        """An urgent step."""
        candidate.high_priority_steps += 1
        self.grow_high_priority(candidate, tokens, predicted_ns)

    def grow_high_priority(self, candidate: Candidate, tokens: int, predicted_ns: int) -> None:
        """More of an urgent step."""
        if candidate.low_priority_steps:
            for budget in self._budgets_of(candidate):
                budget.left_ns -= predicted_ns
            candidate.preempted_ns += predicted_ns
            candidate.preemption_delay_ns += predicted_ns
        candidate.free -= tokens
        candidate.high_priority_ns += predicted_ns
        candidate.free_at_ns += predicted_ns
        candidate.version += 1

    def _budgets_of(self, candidate: Candidate) -> list[Budget]:
        if candidate.budgets is None:
            candidate.budgets = [
                self._budget(step)
                for step in candidate.view.steps.values()
                if not step.high_priority
            ]
        return candidate.budgets

    def _budget(self, step: StepView) -> Budget:
        """One for all instances of a step: a delay of one of them delays them all."""
        found = self._budgets.get(step.id)
        if found is None:
            budget_ns = step.preemption_delay.budget_ns(
                self._preemption_budget_ns, step.predicted_ns
            )
            found = self._budgets[step.id] = Budget(budget_ns - step.delayed_ns)
        return found


class WholePrompts(msgspec.Struct, eq=False, kw_only=True):
    """A step that is being put together."""

    group: list[Candidate]
    cls: str
    strategy: str
    high_priority: bool
    members: list[tuple[RequestView, Placed]] = msgspec.field(default_factory=list)
    tokens: int = 0
    predicted_ns: int = 0
    sizes: list[int] | None = None
    """Tokens for each of the group; None for a single instance."""

    def add(self, request: RequestView, placed: Placed) -> None:
        """It computes this one as well."""
        self.members.append((request, placed))
        self.tokens += request.prompt_tokens

    def plan(self) -> StartPlan:
        """To start it."""
        step = PlannedStep(
            group=tuple([candidate.id for candidate in self.group]),
            bounds=bounds_of(self.sizes or [self.tokens]),
            chunks=tuple([PlannedChunk(it.id, 0, it.prompt_tokens) for it, _ in self.members]),
            strategy=self.strategy,
            predicted_ns=self.predicted_ns,
            high_priority=self.high_priority,
        )
        decode = [
            DecodePlacement(it.id, placed.slices, placed.master, placed.answer)
            for it, placed in self.members
        ]
        return StartPlan(steps=(in_zigzag(step),), decode=tuple(decode))


class HighPrioritySteps:
    """Of short prompts, each on one instance: whoever starts there in the same round is added, if
    that does not make it too long.

    Args:
        prefill: the gang's instances.
        now_ns: the time of the round.
    """

    def __init__(
        self, prefill: PrefillOverlay, cost: CostView, options: ShortPromptOptions, now_ns: int
    ) -> None:
        self._prefill, self._cost = prefill, cost
        self._options, self._now_ns = options, now_ns
        self._growing: dict[tuple[InstanceId, str], WholePrompts] = {}
        """By instance and class."""
        self._by_ns: dict[InstanceId, int] = {}
        """When those of an instance must be over, or a member would pass somebody for too long."""

    def admits(self, candidate: Candidate, request: RequestView, time_ns: int) -> bool:
        """An instance has slots for a prompt, long steps that may be overtaken, and a turn left or
        a step to which it can be added. Those who wait for a turn share a step when one comes,
        which costs less than a step for each."""
        return self._prefill.admits(candidate, request.prompt_tokens, time_ns) and (
            self._prefill.has_step_left(candidate) or self._room(candidate, request) is not None
        )

    def add(
        self,
        candidate: Candidate,
        request: RequestView,
        placed: Placed,
        strategy: str,
        time_ns: int,
    ) -> WholePrompts | None:
        """Compute a prompt on an instance; returns its step if that is a new one.

        Args:
            time_ns: what a step of its own takes.
        """
        tokens = request.prompt_tokens
        if (room := self._room(candidate, request)) is not None:
            step, more_ns = room
            step.add(request, placed)
            step.predicted_ns += more_ns
            self._prefill.grow_high_priority(candidate, tokens, more_ns)
            return None
        step = WholePrompts(
            group=[candidate],
            cls=request.cls,
            strategy=strategy,
            high_priority=True,
            predicted_ns=time_ns,
        )
        step.add(request, placed)
        self._growing[candidate.id, request.cls] = step
        self._prefill.start_high_priority(candidate, tokens, time_ns)
        return step

    def bound(self, candidate: Candidate, by_ns: int | None) -> None:
        """Have those of an instance over by then."""
        if by_ns is not None:
            self._by_ns[candidate.id] = min(by_ns, self._by_ns.get(candidate.id, by_ns))

    def close(self, candidates: Iterable[Candidate]) -> None:
        """Instances were given a long step: whoever is younger than that passes it, and does so in
        a step of its own."""
        ids = {candidate.id for candidate in candidates}
        self._growing = {key: it for key, it in self._growing.items() if key[0] not in ids}

    def _room(self, candidate: Candidate, request: RequestView) -> tuple[WholePrompts, int] | None:
        """The step to which a prompt can be added, and how much longer that takes then."""
        step = self._growing.get((candidate.id, request.cls))
        if step is None:
            return None
        total = step.tokens + request.prompt_tokens
        if total > self._options.urgent_batch_tokens:
            return None
        together = self._cost.best(request.cls, self._prefill.single, 0, total)
        more_ns = max(0, together.time_ns - step.predicted_ns)
        return (step, more_ns) if self._may_grow(candidate, more_ns) else None

    def _may_grow(self, candidate: Candidate, more_ns: int) -> bool:
        """A longer step is over later for all of its members, and for those behind it."""
        by_ns, spare_ns = self._by_ns.get(candidate.id), self._prefill.spare_ns(candidate)
        return (by_ns is None or self._now_ns + candidate.high_priority_ns + more_ns <= by_ns) and (
            spare_ns is None or spare_ns >= more_ns
        )


class Reuse(NamedTuple):
    """A step that computes the rest of a prompt."""

    cached: CachedView
    candidates: list[Candidate]
    """In topology order: all that hold what is reused, and others."""
    sizes: list[int]
    """Tokens of the rest; none for who only holds."""
    strategy: str
    time_ns: int

    @property
    def ends_ns(self) -> int:
        """When it will have been computed."""
        return max(candidate.free_at_ns for candidate in self.candidates) + self.time_ns

    @property
    def high_priority_end_ns(self) -> int:
        """When an urgent one would have been computed, from now on."""
        return max(candidate.high_priority_ns for candidate in self.candidates) + self.time_ns


class _Nothing(NamedTuple):
    tokens: int = 0
    slices: tuple[PlacedSlice, ...] = ()
    taken: Mapping[InstanceId, int] = MappingProxyType({})


NOTHING: CachedView = _Nothing()
"""Of a prompt that is computed whole."""


class Reuses:
    """What a round could reuse of a gang."""

    def __init__(self, overlay: PrefillOverlay, cost: CostView) -> None:
        self._overlay, self._cost = overlay, cost
        self._candidates: dict[InstanceId, Candidate] = {
            candidate.id: candidate for candidate in overlay.candidates
        }

    def holders(self, cached: CachedView) -> list[Candidate]:
        """Who has to be in the group."""
        ids = dict.fromkeys(kv_slice.instance for kv_slice in cached.slices)
        return sorted((self._candidates[identifier] for identifier in ids), key=lambda it: it.order)

    def on(
        self, request: RequestView, cached: CachedView, candidates: list[Candidate]
    ) -> Reuse | None:
        """The rest of a prompt on a group; None if it has no room."""
        left = request.prompt_tokens - cached.tokens
        limits = [it.free - cached.taken.get(it.id, 0) for it in candidates]
        shares = level_sizes(left, limits) if min(limits) >= 0 else None
        if shares is None:
            return None
        held = {kv_slice.instance for kv_slice in cached.slices}
        used = [(it, n) for it, n in zip(candidates, shares, strict=True) if n or it.id in held]
        group = [candidate for candidate, _ in used]
        shape = self._overlay.shape(group)
        waited_ns = max(instance.free_at_ns for instance in group) - request.submitted_ns
        choice = self._cost.best(request.cls, shape, cached.tokens, left, waited_ns)
        return Reuse(cached, group, [n for _, n in used], choice.strategy, choice.time_ns)

    def end(
        self,
        request: RequestView,
        cached: CachedView | None,
        most: int,
    ) -> Reuse | None:
        """The end of a prompt where its beginning is, as an urgent step; None if it is not short,
        or not all of these may be interrupted.

        Args:
            most: tokens of a short one.
        """
        if cached is None or request.prompt_tokens - cached.tokens > most:
            return None
        reuse = self.on(request, cached, self.holders(cached))
        if reuse is None:
            return None
        # A long step on several of them is charged for each.
        charge_ns = reuse.time_ns * len(reuse.candidates)
        tokens = zip(reuse.candidates, reuse.sizes, strict=True)
        held_up = all(self._overlay.may_preempt(it, n, charge_ns) for it, n in tokens)
        return reuse if held_up else None

    def take(self, reuse: Reuse) -> None:
        """The slots of what is reused are free no longer."""
        for instance, count in reuse.cached.taken.items():
            self._candidates[instance].free -= count


def reuse_plan(
    request: RequestView, reuse: Reuse, placed: Placed, *, high_priority: bool = False
) -> StartPlan:
    """The plan of a step of one request."""
    return plan_of(request, reuse_step(request, reuse, high_priority=high_priority), placed)


def plan_of(request: RequestView, step: PlannedStep, placed: Placed) -> StartPlan:
    """The plan of a step that computes all that is left of one request."""
    decode = DecodePlacement(request.id, placed.slices, placed.master, placed.answer)
    return StartPlan(steps=(step,), decode=(decode,))


def reuse_step(request: RequestView, reuse: Reuse, *, high_priority: bool = False) -> PlannedStep:
    """Its step."""
    start = reuse.cached.tokens
    step = PlannedStep(
        group=tuple([candidate.id for candidate in reuse.candidates]),
        bounds=bounds_of(reuse.sizes),
        chunks=(PlannedChunk(request.id, start, request.prompt_tokens - start),),
        strategy=reuse.strategy,
        predicted_ns=reuse.time_ns,
        high_priority=high_priority,
    )
    return in_zigzag(step)
