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

from csps.services.scheduling.decisions import Blocked, Decision, Trial, WakeAt
from csps.services.scheduling.policies.context_parallel.gangs import Gangs, Verdict
from csps.services.scheduling.policies.context_parallel.keepers import Keepers
from csps.services.scheduling.policies.context_parallel.options import ContextParallelOptions
from csps.services.scheduling.policies.decode_overlay import DecodeOptions
from csps.services.scheduling.policies.short_prompts import line_of
from csps.services.scheduling.state import Line
from csps.services.scheduling.view import PairView, RequestView, View

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

    def line(self, prompt_tokens: int, pairs: Sequence[PairView]) -> Line:
        """Short prompts are urgent."""
        return line_of(prompt_tokens, self.options.short_tokens, pairs)

    def decide(self, view: View) -> Sequence[Decision]:
        """Start requests in order of admission; whoever waits for instances closes its line, and
        whoever waits for slots both."""
        gangs = [Gangs(pair, view, self.options, self.decode_options) for pair in view.pairs]
        others: list[Decision] = []
        lines, started = _Lines(view), 0
        for request, urgent in lines:
            if started == MOST_STARTS:
                others.append(WakeAt(at_ns=view.now_ns))
                break
            # What counts of a longer prompt is what is left to compute.
            in_turn = lines.is_open(urgent=urgent)
            if not urgent and any(it.start_end(request, in_turn=in_turn) for it in gangs):
                started += 1
            elif in_turn:
                verdict = _try(gangs, request, urgent=urgent)
                started += verdict is Verdict.STARTS
                if verdict is Verdict.BLOCKED:
                    others.append(Blocked(request=request.id))
                    break
                if verdict is Verdict.WAITS:
                    lines.close(urgent=urgent)
        return [*(plan for it in gangs for plan in it.plans()), *others]

    def trial(self, pair: PairView) -> Trial:
        """On idle gangs."""
        return _Trial(pair, self.decode_options.max_batch)


class _Trial:
    def __init__(self, pair: PairView, max_batch: int) -> None:
        self._slots = sum(it.free_slots for it in pair.prefill.instances)
        self._keepers = Keepers(pair.decode, max_batch)

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Any token may lie on any instance."""
        return prompt_tokens <= self._slots and self._keepers.has_room(
            prompt_tokens + output_tokens
        )


class _Lines:
    """Both lines in order of admission, each until it is closed."""

    def __init__(self, view: View) -> None:
        self._left = {True: iter(view.waiting("urgent")), False: iter(view.waiting("long"))}
        self._next = {urgent: next(line, None) for urgent, line in self._left.items()}
        self._open = {True: True, False: True}

    def __iter__(self) -> Iterator[tuple[RequestView, bool]]:
        while first := [(it.id, urgent) for urgent, it in self._next.items() if it is not None]:
            _, urgent = min(first)
            request = self._next[urgent]
            assert request is not None
            self._next[urgent] = next(self._left[urgent], None)
            yield request, urgent

    def is_open(self, *, urgent: bool) -> bool:
        """Nobody of a line has to wait so far."""
        return self._open[urgent]

    def close(self, *, urgent: bool) -> None:
        """Nobody else of a line; of longer prompts, some more that may be nearly done."""
        self._open[urgent] = False
        self._left[urgent] = islice(self._left[urgent], 0 if urgent else LOOK_AHEAD)
        if urgent:
            self._next[urgent] = None


def _try(gangs: Sequence[Gangs], request: RequestView, *, urgent: bool) -> Verdict:
    """The best that any pair of gangs has to say."""
    best = Verdict.BLOCKED
    for it in gangs:
        best = min(best, it.start_urgent(request) if urgent else it.start_long(request))
        if best is Verdict.STARTS:
            break
    return best
