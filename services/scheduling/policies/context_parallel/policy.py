"""The policy `context_parallel` computes whole prompts around rings and decodes by pass-Q.

A group of instances computes a prompt around a ring, in zigzag, so that all have equal work
(§3.5.1). Each prefill passes keys and values or queries, by how many of its tokens are new (§3.4).
A larger group has to save `least_saving` of the time. Requests are decoded by pass-Q over all KV
holders (§3.6, `KvHolders`).

Requests start first come, first served within a queue. Short prompts and short suffixes
preempt long steps, by at most the preemption budget (`events/limits.py`), or are piggybacked. Slots
are given in the same order: if a request finds too few, all wait for it, so none starves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from csps.services.scheduling.deciding.decisions import Blocked, Decision, SchedulerView, WakeAt
from csps.services.scheduling.policies.context_parallel.pair import (
    ContextParallelOptions,
    ContextParallelPair,
    GangStartResult,
)
from csps.services.scheduling.policies.rounds.decode_overlay import DecodeOptions
from csps.services.scheduling.policies.rounds.prefill_overlay import priority_of
from csps.services.scheduling.state.state import GangPair, Priority, Request, order_key

MOST_STARTS = 128
"""Most requests that a round starts. More wait for the next round, which follows at once, so that
the router's event loop is not blocked while hundreds are placed."""
LOOK_AHEAD = 64
"""Prompts behind a waiting one that a round still tries for short suffixes."""


class ContextParallel:
    """The policy `context_parallel`."""

    name = "context_parallel"
    whole_prompts = True
    regroups = False

    def __init__(
        self,
        options: ContextParallelOptions | None = None,
        decode: DecodeOptions | None = None,
    ) -> None:
        self.options = options or ContextParallelOptions()
        self.decode_options = decode or DecodeOptions()

    def priority(self, prompt_tokens: int, pairs: Sequence[GangPair]) -> Priority:
        """Return high priority for short prompts."""
        return priority_of(prompt_tokens, self.options.short_tokens, pairs)

    def decide(self, view: SchedulerView) -> Sequence[Decision]:
        """Start requests in order.

        A request that waits for instances closes its queue; one that waits for slots closes both.
        """
        gangs = [
            ContextParallelPair(pair, view, self.options, self.decode_options)
            for pair in view.pairs
        ]
        others: list[Decision] = []
        queues, started = _Queues(view), 0
        for request, high_priority in queues:
            if started == MOST_STARTS:
                others.append(WakeAt(at_ns=view.now_ns))
                break
            # A longer prompt counts by the tokens that are left to compute.
            at_head = queues.is_open(high_priority=high_priority)
            if not high_priority and any(
                gang.start_suffix(request, at_head=at_head) for gang in gangs
            ):
                started += 1
            elif at_head:
                result = _try(gangs, request, high_priority=high_priority)
                started += result is GangStartResult.STARTS
                if result is GangStartResult.BLOCKED:
                    others.append(Blocked(request_id=request.id))
                    break
                if result is GangStartResult.WAITS:
                    queues.close(high_priority=high_priority)
        return [*(plan for gang in gangs for plan in gang.plans()), *others]

    def fits(self, pair: GangPair, prompt_tokens: int, output_tokens: int) -> bool:
        """Return True if there are enough slots: any token may be on any instance."""
        total = prompt_tokens + output_tokens
        return prompt_tokens <= pair.prefill.capacity and total <= pair.decode.capacity


class _Queues:
    """Both queues in order (`order_key`), each until it is closed."""

    def __init__(self, view: SchedulerView) -> None:
        self._left = {True: iter(view.waiting("high")), False: iter(view.waiting("low"))}
        self._next = {
            high_priority: next(queue, None) for high_priority, queue in self._left.items()
        }
        self._open = {True: True, False: True}

    def __iter__(self) -> Iterator[tuple[Request, bool]]:
        while first := [
            (order_key(request), high_priority)
            for high_priority, request in self._next.items()
            if request is not None
        ]:
            _, high_priority = min(first)
            request = self._next[high_priority]
            assert request is not None, "the chosen queue is empty"
            self._next[high_priority] = next(self._left[high_priority], None)
            yield request, high_priority

    def is_open(self, *, high_priority: bool) -> bool:
        """Return True if no request of a queue has to wait so far."""
        return self._open[high_priority]

    def close(self, *, high_priority: bool) -> None:
        """Close a queue; of the low-priority one, try a few more prompts for short suffixes."""
        self._open[high_priority] = False
        self._left[high_priority] = islice(
            self._left[high_priority], 0 if high_priority else LOOK_AHEAD
        )
        if high_priority:
            self._next[high_priority] = None


def _try(
    gangs: Sequence[ContextParallelPair], request: Request, *, high_priority: bool
) -> GangStartResult:
    """Return the best result of all pairs of gangs."""
    best = GangStartResult.BLOCKED
    for gang in gangs:
        best = min(
            best,
            gang.start_high_priority(request)
            if high_priority
            else gang.start_low_priority(request),
        )
        if best is GangStartResult.STARTS:
            break
    return best
