"""How long things may take, and how many may wait for them.

What is kept, and how much of it.

How long a request was held up by urgent steps since it came.

Every instance counts what urgent steps have cost the long ones there. A request remembers these
counters when it begins to wait; when it gets its place, what they have grown by is what it was held
up by, in the line behind others as much as at its head.

What has to be done at a set time, unless it is called off before.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Protocol

from csps.protocols.core.errors import ConfigError
from csps.services.scheduling.events.events import InstanceId

SECOND_NS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """How long the line may get, and how often one may stand in it."""

    max_waiting: int = 256
    max_waiting_tokens: int = 4_194_304
    """Prompt and answer tokens of all waiting requests."""
    max_attempts: int = 3
    """Times that a request is tried when the cluster fails under it."""

    def __post_init__(self) -> None:
        if min(self.max_waiting, self.max_waiting_tokens, self.max_attempts) < 1:
            raise ConfigError(f"limits must be positive: {self}")


@dataclass(frozen=True, kw_only=True)
class SchedulerDeadlines:
    """Nanoseconds, each for a wait that has this name."""

    reserve_ns: int = 10 * SECOND_NS
    """For decode instances to set slots aside."""
    reserve_token_ns: int = 10_000
    """More of it for each token of the prompt."""
    transfer_ns: int = 60 * SECOND_NS
    """From the first token of a sequence until all of its KV has landed."""
    transfer_token_ns: int = 1_000_000
    """More of it for each token that is transferred: a model of 128 KiB of KV a token over a link
    of 125 MB/s."""
    prefill_liveness_ns: int = 180 * SECOND_NS
    """Of the instances that a step runs on, and of those that they wait for: longer than any of
    them computes between two signs of life, which is a part of a layer."""
    decode_liveness_ns: int = 120 * SECOND_NS
    """Of a decode gang that owes tokens or slots."""
    gang_recovery_ns: int = 60 * SECOND_NS
    """A request waits so long for gangs to come up."""
    retry_pause_ns: int = SECOND_NS // 4
    """Before a request is tried again on gangs that live. What broke the attempt may be the first
    sign of a gang that dies, and the next attempt on it would be wasted."""
    liveness_check_ns: int = SECOND_NS
    """Between two looks at who is silent."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise ConfigError(f"{field.name} must not be negative")
        if self.liveness_check_ns == 0:
            raise ConfigError("watch_ns must be positive")


BLOCK_TOKENS = 64
"""Prefixes are found in multiples of it."""


@dataclass(frozen=True, kw_only=True)
class ReuseSettings:
    """How KV outlives its requests."""

    enabled: bool = False
    max_share: float = 0.5
    """Of an instance's slots that KV may take which is kept and in nobody's use."""
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        if not 0 <= self.max_share <= 1:
            raise ConfigError(f"max_share must be between 0 and 1, not {self.max_share}")
        if self.block_tokens < 1:
            raise ConfigError(f"block_tokens must be positive, not {self.block_tokens}")


class PreemptionCounter(Protocol):
    """An instance that counts."""

    @property
    def id(self) -> InstanceId: ...
    @property
    def preemption_delay_ns(self) -> int: ...


def delay_counters(instances: Iterable[PreemptionCounter]) -> dict[InstanceId, int]:
    """What a request that begins to wait remembers; those at zero are left out."""
    return {
        instance.id: instance.preemption_delay_ns
        for instance in instances
        if instance.preemption_delay_ns
    }


class PreemptionDelay(NamedTuple):
    """Of the oldest request of a step, at the step's launch."""

    delay_ns: int = 0
    """By urgent steps since it began to wait."""
    alone_ns: int = 0
    """What it takes without them, to the end of its step, as predicted."""

    def budget_ns(self, preemption_budget_ns: int, predicted_ns: int) -> int:
        """What urgent steps may cost the step: `preemption_budget_ns`, or its own time if that is more;
        and its request altogether `preemption_budget_ns`, or what it takes without them."""
        altogether_ns = max(preemption_budget_ns, self.alone_ns) - self.delay_ns
        return min(max(preemption_budget_ns, predicted_ns), altogether_ns)


def preemption_delay(
    before: Mapping[InstanceId, int],
    waiting_since_ns: int,
    group: Sequence[PreemptionCounter],
    begin_ns: int,
    predicted_ns: int,
) -> PreemptionDelay:
    """Of a request that gets its place.

    Args:
        before: what it remembers.
        waiting_since_ns: it began to wait.
        group: that computes it; the instance that was held up most counts.
        begin_ns: of its step, as predicted.
        predicted_ns: time of its step.
    """
    held_ns = max(
        0, *[instance.preemption_delay_ns - before.get(instance.id, 0) for instance in group]
    )
    waits_ns = max(0, begin_ns - waiting_since_ns - held_ns)
    return PreemptionDelay(held_ns, waits_ns + predicted_ns)


@dataclass(slots=True, order=True)
class Timer:
    """An action and its time. Of several due, the one that was set first comes first."""

    at_ns: int
    order: int
    action: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)


class Timers:
    """A heap of timers. One that was called off stays in it until it is due, or until such ones
    are the majority: most requests end long before their deadlines."""

    MINORITY = 64
    """Timers that may be off without a look at how many are not."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._count = 0
        self._cancelled = 0

    def __len__(self) -> int:
        """Timers that are on."""
        return len(self._heap) - self._cancelled

    @property
    def next_ns(self) -> int | None:
        """When the next one is due."""
        while self._heap and self._heap[0].cancelled:
            self._pop()
        return self._heap[0].at_ns if self._heap else None

    def at(self, at_ns: int, action: Callable[[], None]) -> Timer:
        """Have something done then."""
        self._count += 1
        timer = Timer(at_ns, self._count, action)
        heapq.heappush(self._heap, timer)
        return timer

    def cancel(self, timer: Timer | None) -> None:
        """Forget a timer; one that was due or is off already may be named again."""
        if timer is None or timer.cancelled:
            return
        timer.cancelled = True
        self._cancelled += 1
        if self._cancelled > max(self.MINORITY, len(self._heap) // 2):
            self._heap = [it for it in self._heap if not it.cancelled]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def run_due(self, now_ns: int) -> None:
        """Do what is due, also what that makes due at once."""
        while self._heap and self._heap[0].at_ns <= now_ns:
            timer = self._pop()
            if not timer.cancelled:
                timer.cancelled = True  # before the action, which may call it off
                timer.action()

    def _pop(self) -> Timer:
        timer = heapq.heappop(self._heap)
        self._cancelled -= timer.cancelled
        return timer
