"""Context parallelism: whole prompts around rings, and decoding with keepers that take turns.

A prompt is computed by a group of instances around a ring, in zigzag, so that all of them have as
much to do (§3.5.1). Whether keys and values or queries go round is decided prefill by prefill, by
how many of its tokens are new (§3.4); what the gang has kept of it is history. A group is as large
as pays: of groups of one, two, four ... instances, or all, a larger one has to save `least_saving`
of the time.

Requests are decoded by pass-Q over all instances that hold their KV (§3.6, `keepers`).

First come, first served within a line. Short prompts are urgent: each is computed by one instance,
at once, inside of whatever long step runs there, and together with others that start then. So is a
short end of a longer prompt, if all before it was kept, by the instances that have kept it; or by
an iteration of a gang that decodes, if that has kept it and is done first (`decode_rides.py`).
**Nobody starves.** Urgent steps delay a long one by `overtaking_s` at most, or by its own time if
that is more (`holdups.py`). Slots are given in the order of admission: when a request finds none,
all wait for it, short ones too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from csps.services.scheduling.deciding.decisions import Blocked, Decision, WakeAt
from csps.services.scheduling.deciding.scheduler_view import SchedulerView
from csps.services.scheduling.policies.context_parallel.pair import (
    ContextParallelOptions,
    ContextParallelPair,
    GangStartResult,
)
from csps.services.scheduling.policies.rounds.decode_overlay import DecodeOptions
from csps.services.scheduling.policies.rounds.prefill_overlay import priority_of
from csps.services.scheduling.state.state import GangPair, Priority, Request

MOST_STARTS = 128
"""Requests that a round starts. More wait for the next one, which follows at once: an event loop
must not stand still while hundreds are placed."""
LOOK_AHEAD = 64
"""Prompts behind one that waits for instances, of which a round looks whether they are nearly
done."""


class ContextParallel:
    """The policy of this module's description."""

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
        """Short prompts are urgent."""
        return priority_of(prompt_tokens, self.options.short_tokens, pairs)

    def decide(self, view: SchedulerView) -> Sequence[Decision]:
        """Start requests in order of admission; whoever waits for instances closes its line, and
        whoever waits for slots both."""
        gangs = [
            ContextParallelPair(pair, view, self.options, self.decode_options)
            for pair in view.pairs
        ]
        others: list[Decision] = []
        lines, started = _Lines(view), 0
        for request, high_priority in lines:
            if started == MOST_STARTS:
                others.append(WakeAt(at_ns=view.now_ns))
                break
            # What counts of a longer prompt is what is left to compute.
            at_head = lines.is_open(high_priority=high_priority)
            if not high_priority and any(
                gang.start_end(request, at_head=at_head) for gang in gangs
            ):
                started += 1
            elif at_head:
                verdict = _try(gangs, request, high_priority=high_priority)
                started += verdict is GangStartResult.STARTS
                if verdict is GangStartResult.BLOCKED:
                    others.append(Blocked(request_id=request.id))
                    break
                if verdict is GangStartResult.WAITS:
                    lines.close(high_priority=high_priority)
        return [*(plan for gang in gangs for plan in gang.plans()), *others]

    def fits(self, pair: GangPair, prompt_tokens: int, output_tokens: int) -> bool:
        """Return whether there are slots enough: any token may lie on any instance."""
        total = prompt_tokens + output_tokens
        return prompt_tokens <= pair.prefill.capacity and total <= pair.decode.capacity


class _Lines:
    """Both lines in order of admission, each until it is closed."""

    def __init__(self, view: SchedulerView) -> None:
        self._left = {True: iter(view.waiting("high")), False: iter(view.waiting("low"))}
        self._next = {high_priority: next(line, None) for high_priority, line in self._left.items()}
        self._open = {True: True, False: True}

    def __iter__(self) -> Iterator[tuple[Request, bool]]:
        while first := [
            (it.id, high_priority) for high_priority, it in self._next.items() if it is not None
        ]:
            _, high_priority = min(first)
            request = self._next[high_priority]
            assert request is not None
            self._next[high_priority] = next(self._left[high_priority], None)
            yield request, high_priority

    def is_open(self, *, high_priority: bool) -> bool:
        """Nobody of a line has to wait so far."""
        return self._open[high_priority]

    def close(self, *, high_priority: bool) -> None:
        """Nobody else of a line; of longer prompts, some more that may be nearly done."""
        self._open[high_priority] = False
        self._left[high_priority] = islice(
            self._left[high_priority], 0 if high_priority else LOOK_AHEAD
        )
        if high_priority:
            self._next[high_priority] = None


def _try(
    gangs: Sequence[ContextParallelPair], request: Request, *, high_priority: bool
) -> GangStartResult:
    """The best that any pair of gangs has to say."""
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
