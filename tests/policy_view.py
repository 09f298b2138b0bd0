"""Views for policies: live objects in any state, without a scheduler around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from random_executor import gang_up

from csps.configurator.costs.cost_table import Costs, CostTable, Unmeasured
from csps.services.scheduling.deciding.decisions import Decision, Policy, SchedulerView, StartPlan
from csps.services.scheduling.events.events import index_of
from csps.services.scheduling.events.limits import PreemptionDelay
from csps.services.scheduling.state.state import (
    Cached,
    Gang,
    GangPair,
    Priority,
    Request,
    Step,
    new_gang,
)

TOKEN_NS = 1000
PLAIN = Unmeasured(step_ns=0, token_ns=TOKEN_NS, pair_ns=0, iteration_time_ns=TOKEN_NS)
"""Costs of a microsecond a token, shared by a group."""


@dataclass
class Busy:
    """Instance of a gang with what it has to do."""

    free: int = 10_000
    place: str = ""
    long: tuple[tuple[int, int], ...] = ()
    """(predicted, delayed) of its low-priority steps, in tokens' times."""
    high_priority: int = 0
    """Tokens of high-priority steps."""
    urgent_steps: int = 0
    requests: int = 0


def waiting(number: int, prompt: int, output: int = 10, **more: object) -> Request:
    """Make a waiting request."""
    request = Request(
        id=number,
        cls=str(more.get("cls", "exact")),
        prompt_tokens=prompt,
        output_tokens=output,
        deadline_ns=None,
        submitted_ns=0,
        waiting_since_ns=0,
    )
    blocked = more.get("blocked_ns")
    request.blocked_ns = blocked if isinstance(blocked, int) else None
    return request


def gang(number: int, instances: Sequence[Busy], *, prefill: bool) -> Gang:
    """Make a gang whose instances are as busy as that."""
    places = [busy.place or f"0-{number}-{index}" for index, busy in enumerate(instances)]
    slots = [busy.free for busy in instances]
    up = gang_up(number, slots, prefill=prefill, decode=not prefill, places=places)
    made = new_gang(up, 0)
    for index, (instance, busy) in enumerate(zip(made.instances, instances, strict=True)):
        instance.used = instance.capacity - busy.free
        instance.mastered = busy.requests
        instance.high_priority_ns = busy.high_priority * TOKEN_NS
        instance.low_priority_steps = len(busy.long)
        instance.preempted_ns = max([0, *(delayed for _, delayed in busy.long)]) * TOKEN_NS
        for at, (tokens, delayed) in enumerate(busy.long):
            step = _step(1000 * (index + 1) + at, made, tokens, delayed)
            instance.steps[step.id] = step
        for at in range(busy.urgent_steps):
            step = _step(1000 * (index + 1) + 500 + at, made, 0, 0, high_priority=True)
            instance.steps[step.id] = step
        instance.free_at_ns = (
            busy.high_priority + sum(tokens for tokens, _ in busy.long)
        ) * TOKEN_NS
    made.mastered = sum(busy.requests for busy in instances)
    return made


def _step(number: int, of: Gang, tokens: int, delayed: int, *, high_priority: bool = False) -> Step:
    return Step(
        id=number,
        gang=of,
        sequences=(),
        high_priority=high_priority,
        predicted_ns=tokens * TOKEN_NS,
        launched_ns=0,
        undone={},
        delayed_ns=delayed * TOKEN_NS,
        preemption_delay=PreemptionDelay(0, tokens * TOKEN_NS),
    )


@dataclass
class Picture:
    """Pair of gangs and some requests, from which `view` makes what a policy reads."""

    requests: list[Request]
    prefill: list[Busy] = field(default_factory=lambda: [Busy() for _ in range(4)])
    decode: list[Busy] = field(default_factory=lambda: [Busy(50_000), Busy(50_000)])
    now_ns: int = 0

    def __post_init__(self) -> None:
        self.cost = Costs(CostTable(latencies=PLAIN))
        self.pairs = [
            GangPair(
                prefill=gang(1, self.prefill, prefill=True),
                decode=gang(2, self.decode, prefill=False),
            )
        ]

    def view(self) -> SchedulerView:
        """Make the view of this state."""
        queues: dict[Priority, list[Request]] = {"high": [], "low": []}
        for request in self.requests:
            queues[request.priority].append(request)
        return SchedulerView(
            now_ns=self.now_ns,
            cost=self.cost,
            pairs=self.pairs,
            queues=queues,
            planned=(),
            blocked=self.blocked,
            blocked_ns=self.blocked_ns,
            cached=self.cached,
            rate_30s=len(self.requests),
        )

    def ask(self, policy: Policy) -> list[Decision]:
        """Return what the policy decides."""
        for request in self.requests:
            request.priority = policy.priority(request.prompt_tokens, self.pairs)
        return list(policy.decide(self.view()))

    @property
    def blocked(self) -> list[Request]:
        return [request for request in self.requests if request.blocked_ns is not None]

    def blocked_ns(self, request: Request) -> int:
        return self.now_ns if request.blocked_ns is None else request.blocked_ns

    def cached(self, request: Request, gang: int) -> Cached | None:
        return None


def plans(decisions: Sequence[Decision]) -> list[StartPlan]:
    """Return the decisions that start something."""
    return [decision for decision in decisions if isinstance(decision, StartPlan)]


def numbers(plan: StartPlan) -> list[int]:
    """Return the requests of the plan's only step."""
    (step,) = plan.steps
    return [chunk.request_id for chunk in step.chunks]


def group(plan: StartPlan) -> list[int]:
    """Return the indexes of the instances of the plan's only step."""
    return [index_of(instance) for instance in plan.steps[0].group]


def sizes(plan: StartPlan) -> dict[int, int]:
    """Return the tokens that each instance computes."""
    bounds = plan.steps[0].bounds
    parts = [stop - start for start, stop in pairwise(bounds)]
    return dict(zip(group(plan), parts, strict=True))
