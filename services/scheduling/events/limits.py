"""Limits, deadlines and timers of the scheduler, and the preemption delay of requests.

*Preemption delay.* Every instance counts the time that high-priority steps have cost low-priority
ones there. A request remembers these counters when it begins to wait. Their growth until it starts
is its preemption delay, in the queue behind others as much as at the head.
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
    """Limits of the queue and of retries."""

    max_waiting: int = 256
    max_waiting_tokens: int = 4_194_304
    """Prompt and answer tokens of all waiting requests."""
    max_attempts: int = 3
    """Attempts at a request when the cluster fails under it."""
    patience_s: int = 60
    """Time after which no request that comes later goes before a waiting one, whatever objectives
    and priorities they have (`core.promises`)."""

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 1:
            raise ConfigError(f"limits must be positive: {self}")


@dataclass(frozen=True, kw_only=True)
class SchedulerDeadlines:
    """Longest waits, in nanoseconds."""

    reserve_ns: int = 10 * SECOND_NS
    """Time for decode instances to reserve slots."""
    reserve_token_ns: int = 10_000
    """Time to reserve, more for each token of the prompt."""
    transfer_ns: int = 60 * SECOND_NS
    """Time from the first token of a sequence until all its KV is received."""
    transfer_token_ns: int = 1_000_000
    """Time to transfer, more for each token: a model of 128 KiB of KV a token over a link of 125
    MB/s."""
    prefill_liveness_ns: int = 180 * SECOND_NS
    """Time without an advance of a step, and of those that it waits for. It is longer than any
    instance computes between two yield points, which is a part of a layer."""
    decode_liveness_ns: int = 120 * SECOND_NS
    """Silence of an instance that owes tokens or slots."""
    gang_recovery_ns: int = 60 * SECOND_NS
    """Time for which a request waits for gangs to come up."""
    retry_pause_ns: int = SECOND_NS // 4
    """Pause before a request is tried again on living gangs. What broke the attempt may be the
    first sign of a dying gang, on which the next attempt would be wasted."""
    liveness_check_ns: int = SECOND_NS
    """Time between two checks of liveness."""

    def __post_init__(self) -> None:
        for deadline in fields(self):
            if getattr(self, deadline.name) < 0:
                raise ConfigError(f"{deadline.name} must not be negative")
        if self.liveness_check_ns == 0:
            raise ConfigError("liveness_check_ns must be positive")


BLOCK_TOKENS = 64
"""Tokens of a block: prefixes are found in multiples of it."""


@dataclass(frozen=True, kw_only=True)
class ReuseSettings:
    """Settings of the prefix cache."""

    enabled: bool = False
    max_share: float = 0.5
    """Share of an instance's slots for retained KV that nobody reads."""
    block_tokens: int = BLOCK_TOKENS
    files_bytes: int = 0
    """Limit of the files in which KV survives its gang, on each machine; 0: it does not."""
    decode_rest_tokens: int = 0
    """Most tokens of a prompt that a decode gang computes behind what it has cached; 0: it computes
    none, and its KV goes to no files."""

    def __post_init__(self) -> None:
        if self.files_bytes < 0:
            raise ConfigError(f"files_bytes must not be negative, not {self.files_bytes}")
        if not 0 <= self.max_share <= 1:
            raise ConfigError(f"max_share must be between 0 and 1, not {self.max_share}")
        if self.block_tokens < 1:
            raise ConfigError(f"block_tokens must be positive, not {self.block_tokens}")


class PreemptionCounter(Protocol):
    """Instance that counts its preemption delay."""

    @property
    def id(self) -> InstanceId: ...
    @property
    def preemption_delay_ns(self) -> int: ...


def delay_counters(instances: Iterable[PreemptionCounter]) -> dict[InstanceId, int]:
    """Return the counters that a request remembers when it begins to wait, without zeros."""
    return {
        instance.id: instance.preemption_delay_ns
        for instance in instances
        if instance.preemption_delay_ns
    }


class PreemptionDelay(NamedTuple):
    """Delay of a step's oldest request, at the step's launch."""

    delay_ns: int = 0
    """Delay by high-priority steps since the request began to wait."""
    alone_ns: int = 0
    """Predicted time without them, from the beginning of its wait to the end of its step."""

    def budget_ns(self, preemption_budget_ns: int, predicted_ns: int) -> int:
        """Return what high-priority steps may still cost the step. They may cost the step
        `preemption_budget_ns`, or its own time if that is more; they may cost its request
        altogether `preemption_budget_ns`, or its time without them if that is more."""
        altogether_ns = max(preemption_budget_ns, self.alone_ns) - self.delay_ns
        return min(max(preemption_budget_ns, predicted_ns), altogether_ns)


def preemption_delay(
    before: Mapping[InstanceId, int],
    waiting_since_ns: int,
    group: Sequence[PreemptionCounter],
    begin_ns: int,
    predicted_ns: int,
) -> PreemptionDelay:
    """Return the preemption delay of a request that starts.

    Args:
        before: counters that it remembers.
        waiting_since_ns: when it began to wait.
        group: instances that compute it; the one with the largest delay counts.
        begin_ns: predicted begin of its step.
        predicted_ns: predicted time of its step.
    """
    held_ns = max(
        0, *[instance.preemption_delay_ns - before.get(instance.id, 0) for instance in group]
    )
    waits_ns = max(0, begin_ns - waiting_since_ns - held_ns)
    return PreemptionDelay(held_ns, waits_ns + predicted_ns)


@dataclass(slots=True, order=True)
class Timer:
    """Action and its time. Of several due, the one set first runs first."""

    at_ns: int
    order: int
    action: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)


class Timers:
    """Heap of timers. A cancelled timer stays until it is due or cancelled ones are the majority,
    because most requests end long before their deadlines."""

    MINORITY = 64
    """Cancelled timers that may stay without a look at how many are not cancelled."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._count = 0
        self._cancelled = 0

    def __len__(self) -> int:
        """Return how many timers are not cancelled."""
        return len(self._heap) - self._cancelled

    @property
    def next_ns(self) -> int | None:
        """Time of the next timer."""
        while self._heap and self._heap[0].cancelled:
            self._pop()
        return self._heap[0].at_ns if self._heap else None

    def at(self, at_ns: int, action: Callable[[], None]) -> Timer:
        """Run an action at a time."""
        self._count += 1
        timer = Timer(at_ns, self._count, action)
        heapq.heappush(self._heap, timer)
        return timer

    def cancel(self, timer: Timer | None) -> None:
        """Cancel a timer; one that has run or was cancelled before may be named again."""
        if timer is None or timer.cancelled:
            return
        timer.cancelled = True
        self._cancelled += 1
        if self._cancelled > max(self.MINORITY, len(self._heap) // 2):
            self._heap = [timer for timer in self._heap if not timer.cancelled]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def run_due(self, now_ns: int) -> None:
        """Run all actions that are due, also those that become due meanwhile."""
        while self._heap and self._heap[0].at_ns <= now_ns:
            timer = self._pop()
            if not timer.cancelled:
                timer.cancelled = True  # before the action, which may call it off
                timer.action()

    def _pop(self) -> Timer:
        timer = heapq.heappop(self._heap)
        self._cancelled -= timer.cancelled
        return timer
