"""Steps that a round adds to a prefill gang: whole prompts, short prompts, and cached prefixes.

A round decides about several requests before anything changes. `PrefillOverlay` holds a gang's
instances as they will be after these decisions: free slots, predicted times, and the preemption
budget that is left for the low-priority steps of each instance.

`WholePrompts` is a step under construction. `HighPrioritySteps` collects short prompts that start
on the same instance into one step. `Reuses` computes only the rest of a prompt after its cached
prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from csps.configurator.costs.cost_table import Costs
from csps.protocols.core.placement import bounds_of, level_sizes
from csps.protocols.core.topology import GroupShape, Location
from csps.services.scheduling.deciding.decisions import (
    DecodePlacement,
    PlannedChunk,
    PlannedStep,
    StartPlan,
)
from csps.services.scheduling.deciding.step_layout import in_zigzag
from csps.services.scheduling.events.events import InstanceId, StepId
from csps.services.scheduling.events.limits import preemption_delay
from csps.services.scheduling.policies.rounds.decode_overlay import Placed, check_least
from csps.services.scheduling.state.state import (
    Cached,
    Gang,
    GangPair,
    Instance,
    Priority,
    Request,
    Step,
)


@dataclass(frozen=True, kw_only=True)
class ShortPromptOptions:
    """Options of policies with a high-priority queue. Sizes in tokens."""

    short_tokens: int = 1024
    """Longest prompt with high priority."""
    urgent_batch_tokens: int = 2048
    """Longest high-priority step; the first tokens of a batch come when all of it is computed."""
    jobs_per_instance: int = 2
    """Low-priority steps, and as many high-priority ones, given to an instance at a time."""
    overtaking_s: float = 10.0
    """Preemption budget: most seconds that others may delay a request by passing it."""

    def __post_init__(self) -> None:
        check_least(self, 1, "urgent_batch_tokens", "jobs_per_instance")
        check_least(self, 0, "short_tokens", "overtaking_s")

    @property
    def preemption_budget_ns(self) -> int:
        """`overtaking_s` in nanoseconds."""
        return round(self.overtaking_s * 1_000_000_000)


def priority_of(prompt_tokens: int, short_tokens: int, pairs: Sequence[GangPair]) -> Priority:
    """Return high priority for short prompts that fit a single instance of every pair."""
    if prompt_tokens > short_tokens:
        return "low"
    largest = min((pair.prefill.largest for pair in pairs), default=prompt_tokens)
    return "high" if prompt_tokens <= largest else "low"


class Budget(msgspec.Struct, eq=False, gc=False):
    """Preemption budget of a low-priority step."""

    left_ns: int
    """Time by which high-priority steps may still delay it."""


class Candidate(msgspec.Struct, eq=False):
    """An instance as it will be after the decisions of a round."""

    instance: Instance
    id: InstanceId
    place: Location
    order: int
    free: int
    """Free KV slots."""
    low_priority_steps: int
    high_priority_steps: int
    high_priority_ns: int
    """Predicted time of its high-priority steps."""
    free_at_ns: int
    """Predicted end of all its steps, not in the past."""
    preempted_ns: int
    """Time of high-priority steps since it has low-priority ones."""
    preemption_delay_ns: int
    """Time by which high-priority steps have ever delayed low-priority ones here."""
    budgets: list[Budget] | None = None
    """Budgets of its low-priority steps; None until they are needed."""
    version: int = 0
    """Number of changes in this round."""


class PrefillOverlay:
    """A prefill gang's instances as they will be after the decisions of a round.

    Args:
        gang: the gang before the round.
        now_ns: time of the round.
        options: options of high-priority steps; None if the policy has none.
    """

    def __init__(self, gang: Gang, now_ns: int, options: ShortPromptOptions | None = None) -> None:
        self._options = options or ShortPromptOptions(overtaking_s=0.0)
        self._preemption_budget_ns = self._options.preemption_budget_ns
        self._budgets: dict[StepId, Budget] = {}
        self._tp = gang.tp
        self.single = GroupShape((1,), gang.tp)
        """Shape of a group of one instance."""
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
        self.idle = [candidate.low_priority_steps for candidate in self.candidates].count(0)
        """Number of instances without a low-priority step."""

    def shape(self, group: list[Candidate]) -> GroupShape:
        """Return the shape of a group in topology order."""
        return GroupShape.of([candidate.place for candidate in group], self._tp)

    def spare_ns(self, candidate: Candidate) -> int | None:
        """Return the budget left on an instance; None if it has no low-priority steps."""
        if not candidate.low_priority_steps:
            return None
        return min(budget.left_ns for budget in self._budgets_of(candidate))

    def may_preempt(self, group: list[Candidate], sizes: list[int], time_ns: int) -> bool:
        """Return True if a group may be given another high-priority step.

        Args:
            sizes: tokens of each instance.
        """
        # A low-priority step on several of the instances is charged for each of them.
        charge_ns = time_ns * len(group)
        return all(
            self.admits(candidate, size, charge_ns) and self.has_step_left(candidate)
            for candidate, size in zip(group, sizes, strict=True)
        )

    def admits(self, candidate: Candidate, tokens: int, time_ns: int) -> bool:
        """Return True if an instance has slots, and its low-priority steps budget."""
        if candidate.free < tokens:
            return False
        spare_ns = self.spare_ns(candidate)
        return spare_ns is None or spare_ns >= time_ns

    def has_step_left(self, candidate: Candidate) -> bool:
        """Return True if an instance has fewer high-priority steps than it may have at a time."""
        return candidate.high_priority_steps < self._options.jobs_per_instance

    def start_low_priority(
        self, request: Request, group: list[Candidate], sizes: list[int], predicted_ns: int
    ) -> None:
        """Add a low-priority step.

        Args:
            request: the oldest of the step.
            sizes: tokens of each instance.
        """
        begin_ns = max(candidate.free_at_ns for candidate in group)
        since_ns = request.waiting_since_ns
        delay = preemption_delay(request.delays_before, since_ns, group, begin_ns, predicted_ns)
        budget = Budget(delay.budget_ns(self._preemption_budget_ns, predicted_ns))
        end_ns = begin_ns + predicted_ns
        for candidate, size in zip(group, sizes, strict=True):
            self._budgets_of(candidate).append(budget)
            candidate.free -= size
            self.idle -= not candidate.low_priority_steps
            candidate.low_priority_steps += 1
            candidate.free_at_ns = end_ns
            candidate.version += 1

    def start_high_priority(self, candidate: Candidate, tokens: int, predicted_ns: int) -> None:
        """Add a high-priority step."""
        candidate.high_priority_steps += 1
        self.grow_high_priority(candidate, tokens, predicted_ns)

    def grow_high_priority(self, candidate: Candidate, tokens: int, predicted_ns: int) -> None:
        """Add tokens to a high-priority step."""
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
                for step in candidate.instance.steps.values()
                if not step.high_priority
            ]
        return candidate.budgets

    def _budget(self, step: Step) -> Budget:
        # One budget for all instances of a step: a delay of one instance delays them all.
        budget = self._budgets.get(step.id)
        if budget is None:
            budget_ns = step.preemption_delay.budget_ns(
                self._preemption_budget_ns, step.predicted_ns
            )
            budget = self._budgets[step.id] = Budget(budget_ns - step.delayed_ns)
        return budget


class WholePrompts(msgspec.Struct, eq=False, kw_only=True):
    """A step of whole prompts under construction."""

    group: list[Candidate]
    cls: str
    strategy: str
    high_priority: bool
    members: list[tuple[Request, Placed]] = msgspec.field(default_factory=list)
    tokens: int = 0
    predicted_ns: int = 0
    sizes: list[int] | None = None
    """Tokens of each instance of the group; None for a single instance."""

    def add(self, request: Request, placed: Placed) -> None:
        """Add a prompt to the step."""
        self.members.append((request, placed))
        self.tokens += request.prompt_tokens

    def plan(self) -> StartPlan:
        """Return the plan that starts the step."""
        step = PlannedStep(
            group=tuple([candidate.id for candidate in self.group]),
            bounds=bounds_of(self.sizes or [self.tokens]),
            chunks=tuple(
                [PlannedChunk(request.id, 0, request.prompt_tokens) for request, _ in self.members]
            ),
            strategy=self.strategy,
            predicted_ns=self.predicted_ns,
            high_priority=self.high_priority,
        )
        decode = [
            DecodePlacement(request.id, placed.slices, placed.master, placed.answer)
            for request, placed in self.members
        ]
        return StartPlan(steps=(in_zigzag(step),), decode=tuple(decode))


class HighPrioritySteps:
    """High-priority steps of a round, each on one instance.

    Short prompts that start on the same instance in one round share a step up to
    `urgent_batch_tokens`, which costs less than a step for each.

    Args:
        prefill: instances of the gang.
        now_ns: time of the round.
    """

    def __init__(
        self, prefill: PrefillOverlay, cost: Costs, options: ShortPromptOptions, now_ns: int
    ) -> None:
        self._prefill, self._cost = prefill, cost
        self._options, self._now_ns = options, now_ns
        self._growing: dict[tuple[InstanceId, str], WholePrompts] = {}
        """Steps that may still grow, by instance and class."""
        self._by_ns: dict[InstanceId, int] = {}
        """Time by which the steps of an instance must end, so that no request is passed for too
        long."""

    def admits(self, candidate: Candidate, request: Request, time_ns: int) -> bool:
        """Return True if an instance may compute a short prompt, in a new step or a growing one."""
        return self._prefill.admits(candidate, request.prompt_tokens, time_ns) and (
            self._prefill.has_step_left(candidate) or self._room(candidate, request) is not None
        )

    def add(
        self,
        candidate: Candidate,
        request: Request,
        placed: Placed,
        strategy: str,
        time_ns: int,
    ) -> WholePrompts | None:
        """Add a prompt to an instance; return its step if that is a new one.

        Args:
            time_ns: predicted time of a separate step.
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
        """Require that the steps of an instance end by a time."""
        if by_ns is not None:
            self._by_ns[candidate.id] = min(by_ns, self._by_ns.get(candidate.id, by_ns))

    def close(self, candidates: Iterable[Candidate]) -> None:
        """Let no step of instances that were given a low-priority step grow.

        Younger short prompts preempt that low-priority step, so they need a step of their own.
        """
        ids = {candidate.id for candidate in candidates}
        self._growing = {key: step for key, step in self._growing.items() if key[0] not in ids}

    def _room(self, candidate: Candidate, request: Request) -> tuple[WholePrompts, int] | None:
        """Return the step that can take a prompt, and the extra time in ns; None without one."""
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
        # A longer step ends later for all of its members, and for the steps behind it.
        by_ns, spare_ns = self._by_ns.get(candidate.id), self._prefill.spare_ns(candidate)
        return (by_ns is None or self._now_ns + candidate.high_priority_ns + more_ns <= by_ns) and (
            spare_ns is None or spare_ns >= more_ns
        )


class Reuse(NamedTuple):
    """A step that computes the rest of a prompt after its cached prefix."""

    cached: Cached
    candidates: list[Candidate]
    """Instances in topology order: all holders of the prefix, and others."""
    sizes: list[int]
    """Tokens of each instance; 0 for one that is only a holder."""
    strategy: str
    time_ns: int

    @property
    def ends_ns(self) -> int:
        """Predicted end of a low-priority step."""
        return max(candidate.free_at_ns for candidate in self.candidates) + self.time_ns

    @property
    def high_priority_end_ns(self) -> int:
        """Predicted end of a high-priority step, from now on."""
        return max(candidate.high_priority_ns for candidate in self.candidates) + self.time_ns


NOTHING = Cached(0, ())
"""Cached prefix of a prompt that is computed whole."""


class Reuses:
    """The ways of a round to reuse the prefix cache of a gang."""

    def __init__(self, overlay: PrefillOverlay, cost: Costs) -> None:
        self._overlay, self._cost = overlay, cost
        self._candidates: dict[InstanceId, Candidate] = {
            candidate.id: candidate for candidate in overlay.candidates
        }

    def holders(self, cached: Cached) -> list[Candidate]:
        """Return the holders of a cached prefix in topology order."""
        ids = {kv_slice.instance for kv_slice in cached.slices}
        return sorted(
            (self._candidates[instance] for instance in ids),
            key=lambda candidate: candidate.order,
        )

    def on(self, request: Request, cached: Cached, candidates: list[Candidate]) -> Reuse | None:
        """Compute the rest of a prompt on a group; None if it has too few slots."""
        left = request.prompt_tokens - cached.tokens
        limits = [candidate.free - cached.taken.get(candidate.id, 0) for candidate in candidates]
        sizes = level_sizes(left, limits) if min(limits) >= 0 else None
        if sizes is None:
            return None
        holders = {kv_slice.instance for kv_slice in cached.slices}
        used = [
            (candidate, size)
            for candidate, size in zip(candidates, sizes, strict=True)
            if size or candidate.id in holders
        ]
        group = [candidate for candidate, _ in used]
        shape = self._overlay.shape(group)
        waited_ns = max(candidate.free_at_ns for candidate in group) - request.submitted_ns
        choice = self._cost.best(request.cls, shape, cached.tokens, left, waited_ns)
        return Reuse(cached, group, [size for _, size in used], choice.strategy, choice.time_ns)

    def suffix(
        self,
        request: Request,
        cached: Cached | None,
        most: int,
    ) -> Reuse | None:
        """Compute the suffix of a prompt on the holders of its prefix, as a high-priority step.

        Args:
            most: tokens of a short end.

        Returns:
            None if the suffix is not short, or if one of the holders may not be preempted.
        """
        if cached is None or request.prompt_tokens - cached.tokens > most:
            return None
        reuse = self.on(request, cached, self.holders(cached))
        return reuse if reuse is not None and self.may_preempt(reuse) else None

    def may_preempt(self, reuse: Reuse) -> bool:
        """Return True if it may be a high-priority step."""
        return self._overlay.may_preempt(reuse.candidates, reuse.sizes, reuse.time_ns)

    def take(self, reuse: Reuse) -> None:
        """Count the slots of the reused prefix as used."""
        for instance, count in reuse.cached.taken.items():
            self._candidates[instance].free -= count


def reuse_plan(
    request: Request, reuse: Reuse, placed: Placed, *, high_priority: bool = False
) -> StartPlan:
    """Return the plan of a step that reuses a cached prefix."""
    return plan_of(request, reuse_step(request, reuse, high_priority=high_priority), placed)


def plan_of(request: Request, step: PlannedStep, placed: Placed) -> StartPlan:
    """Return the plan of a step that computes all missing tokens of one request."""
    decode = DecodePlacement(request.id, placed.slices, placed.master, placed.answer)
    return StartPlan(steps=(step,), decode=(decode,))


def reuse_step(request: Request, reuse: Reuse, *, high_priority: bool = False) -> PlannedStep:
    """Return the step that computes a prompt after its cached prefix."""
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
