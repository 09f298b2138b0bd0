"""Context parallelism: whole prompts around rings, and decoding with keepers that take turns.

A prompt is computed by a group of instances around a ring, in zigzag, so that all of them have as
much to do (§3.5.1). Whether keys and values or queries go round is decided prefill by prefill, by
how many of its tokens are new (§3.4); what the gang has kept of it is history. A group is as large
as pays: of groups of one, two, four ... instances, or all, a larger one has to save `least_saving`
of the time.

Requests are decoded by ring pass-Q over all instances that hold their KV (§3.6, `keepers`).

First come, first served within a line. Short prompts are urgent: each is computed by one instance,
at once, inside of whatever long step runs there. **Nobody starves.** Urgent steps delay a long one
by `overtaking_s` at most, or by its own time if that is more (`holdups.py`). Slots are given in the
order of admission: when a request finds none, all wait for it, short ones too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from csps.services.scheduling.decisions import Blocked, Decision, StartPlan, Trial, WakeAt
from csps.services.scheduling.policies.context_parallel.gangs import Gangs, NoPlan
from csps.services.scheduling.policies.context_parallel.keepers import Keepers
from csps.services.scheduling.policies.context_parallel.options import ContextParallelOptions
from csps.services.scheduling.policies.decode_overlay import DecodeOptions
from csps.services.scheduling.policies.short_prompts import line_of
from csps.services.scheduling.state import Line
from csps.services.scheduling.view import PairView, RequestView, View

MOST_STARTS = 128
"""Requests that a round starts. More wait for the next one, which follows at once: an event loop
must not stand still while hundreds are placed."""


class ContextParallel:
    """The policy of this module's description."""

    name = "context_parallel"
    whole_prompts = True

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
        most = self.decode_options.max_batch
        gangs = [Gangs(pair, view, self.options, most) for pair in view.pairs]
        decisions: list[Decision] = []
        lines = _Lines(view)
        for request, urgent in lines:
            if len(decisions) == MOST_STARTS:
                decisions.append(WakeAt(at_ns=view.now_ns))
                break
            found = _try(gangs, request, urgent=urgent)
            if found is NoPlan.BLOCKED:
                decisions.append(Blocked(request=request.id))
                break
            if found is NoPlan.WAITS:
                lines.close(urgent=urgent)
            else:
                decisions.append(found)
        return decisions

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

    def __iter__(self) -> Iterator[tuple[RequestView, bool]]:
        while first := [(it.id, urgent) for urgent, it in self._next.items() if it is not None]:
            _, urgent = min(first)
            request = self._next[urgent]
            assert request is not None
            self._next[urgent] = next(self._left[urgent], None)
            yield request, urgent

    def close(self, *, urgent: bool) -> None:
        """Nobody else of a line."""
        self._left[urgent] = iter(())
        self._next[urgent] = None


def _try(gangs: Sequence[Gangs], request: RequestView, *, urgent: bool) -> StartPlan | NoPlan:
    """The best that any pair of gangs has to say."""
    waits = False
    for it in gangs:
        found = it.start_urgent(request) if urgent else it.start_long(request)
        if isinstance(found, StartPlan):
            return found
        waits = waits or found is NoPlan.WAITS
    return NoPlan.WAITS if waits else NoPlan.BLOCKED
