"""Prompts cut into sequence partitions (SPTs) over as many instances as they fill (CSPS §3.2).

First come, first served, with these exceptions, each of them bounded:

1. A *short* prompt (at most `short_tokens`) starts at once, on the instance where it will wait
   least, as an *urgent* step that ranks let run inside a long one. One that fits no single
   instance is not short. What was kept does not count: a longer prompt keeps its place in line,
   but as soon as no more than a short *end* of it is left to compute, that starts as an urgent step
   on the instances that have kept the rest. An end may also be computed by the gang that decodes,
   if that has kept all before it (`decode_rides.py`).
2. Longer prompts that would otherwise wait fill up the slack of the last SPT of a starting step.

**Nobody starves.** Overtaking is bounded in seconds, predicted when a request is placed and trued
up by what was measured:

- while a long step is outstanding, urgent steps on its instances delay it by `overtaking_s` at
  most, or by its own time if that is more; and its oldest request altogether, the line behind
  others included, by `overtaking_s`, or by what it takes without them (`holdups.py`). So the bounds
  of several steps in line do not add up. When that is used up, short prompts go elsewhere or wait
  for the step;
- while a request waits for KV slots, no longer prompt passes it, and a short one only if its last
  token will have been drawn `overtaking_s` after the older one became blocked. From then on the
  request waits for none but older ones.

An instance is given at most `jobs_per_instance` long steps at a time, one to run and one to follow
without a gap: what is not yet sent can still be decided otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from csps.services.scheduling.deciding.decisions import Blocked, Decision, IdleCapacity, WakeAt
from csps.services.scheduling.deciding.view import PairView, RequestView, View
from csps.services.scheduling.events.events import RequestId
from csps.services.scheduling.policies.csps.locality import LocalityAllocator
from csps.services.scheduling.policies.csps.pair import CspsOptions, CspsPair, StartResult
from csps.services.scheduling.policies.rounds.decode_overlay import DecodeOptions, DecodeOverlay
from csps.services.scheduling.policies.rounds.prefill_overlay import PrefillOverlay, priority_of
from csps.services.scheduling.state.state import Priority


class Csps:
    """The policy of this module's description."""

    name = "csps"
    whole_prompts = True
    regroups = False

    def __init__(
        self, options: CspsOptions | None = None, decode: DecodeOptions | None = None
    ) -> None:
        self.options, self.decode_options = options or CspsOptions(), decode or DecodeOptions()

    def priority(self, prompt_tokens: int, pairs: Sequence[PairView]) -> Priority:
        """Short prompts are urgent."""
        return priority_of(prompt_tokens, self.options.short_tokens, pairs)

    def decide(self, view: View) -> Sequence[Decision]:
        """One pass over both lines, in order of admission."""
        return _Round(view, self.options, self.decode_options).decide()

    def idle_capacity(self, pair: PairView) -> IdleCapacity:
        """On idle gangs."""
        return _Trial(pair, self.options, self.decode_options)


class _Trial:
    def __init__(self, pair: PairView, options: CspsOptions, decode: DecodeOptions) -> None:
        self._decode = DecodeOverlay(pair.decode, decode)
        candidates = PrefillOverlay(pair.prefill, 0).candidates
        self._rooms = LocalityAllocator(candidates, options.spt_tokens, options.jobs_per_instance)

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """What fits on one instance also fits on a group, so that short prompts need no trial of
        their own."""
        if not self._decode.has_room(prompt_tokens, output_tokens):
            return False
        return self._rooms.group(prompt_tokens) is not None


class _Round:
    """One pass over the lines."""

    def __init__(self, view: View, options: CspsOptions, decode: DecodeOptions) -> None:
        self._view, self._options = view, options
        self._pairs = [CspsPair(pair, view, options, decode) for pair in view.pairs]
        self._others: list[Decision] = []
        self._blocked = deque(view.blocked)
        """Those that were blocked before, and that this round has not come to."""
        self._end_by_ns: int | None = None
        """When whoever starts now must have ended, or somebody would be passed for too long."""
        self._long_queue_open = True
        """False as soon as a longer prompt waits: the ones behind it do, too."""

    def decide(self) -> list[Decision]:
        """What starts, and who is blocked."""
        high_priority, long = self._view.waiting("high"), self._view.waiting("low")
        next_urgent = next_long = misses = passed = 0
        look_ahead, most_starts = self._options.look_ahead, self._options.most_starts
        while misses < look_ahead:
            if next_urgent + next_long - misses - passed >= most_starts:
                self._others.append(WakeAt(at_ns=self._view.now_ns))
                break
            take_long = passed < look_ahead and next_long < len(long)
            if take_long and next_urgent < len(high_priority):
                take_long = long[next_long].id < high_priority[next_urgent].id
            if take_long and self._long_queue_open:
                high_priority_id = (
                    high_priority[next_urgent].id if next_urgent < len(high_priority) else None
                )
                misses += not self._consider_long(long, next_long, high_priority_id)
                next_long += 1
            elif take_long:
                passed += not self._consider_end(long[next_long], at_head=False)
                next_long += 1
            elif next_urgent < len(high_priority):
                misses += not self._consider_short(high_priority[next_urgent])
                next_urgent += 1
            else:
                break
        return [*self._others, *(plan for pair in self._pairs for plan in pair.round_plan.plans())]

    def _consider_short(self, request: RequestView) -> bool:
        self._come_to(request)
        verdict = self._try(lambda pair: pair.start_high_priority(request, self._end_by_ns))
        if verdict in (StartResult.TOO_LATE, StartResult.BLOCKED):
            # How late a long step ends is not known to the second: others may overtake it.
            self._long_queue_open = False
        return self._note(request, verdict)

    def _consider_long(
        self, long: Sequence[RequestView], index: int, high_priority_id: RequestId | None
    ) -> bool:
        request = long[index]
        if self._consider_end(request, at_head=True):
            return True
        verdict = self._try(lambda pair: pair.long.start(long, index, high_priority_id))
        self._long_queue_open = verdict is StartResult.STARTS
        return self._note(request, verdict)

    def _consider_end(self, request: RequestView, *, at_head: bool) -> bool:
        """Of a longer prompt that was mostly kept: what counts is what is left to compute."""
        if self._started(request):
            return True  # as a filler
        self._come_to(request)
        end_by_ns = self._end_by_ns
        return any(pair.start_end(request, end_by_ns, at_head=at_head) for pair in self._pairs)

    def _started(self, request: RequestView) -> bool:
        return any(pair.round_plan.started(request) for pair in self._pairs)

    def _come_to(self, request: RequestView) -> None:
        """Whoever is blocked and older must not be passed for too long, whether or not this round
        has found it blocked."""
        while self._blocked and self._blocked[0].id < request.id:
            older = self._blocked.popleft()
            if not self._started(older):
                self._bound(older)

    def _bound(self, blocked: RequestView) -> None:
        end_by_ns = self._view.blocked_ns(blocked) + self._options.preemption_budget_ns
        if self._end_by_ns is None or end_by_ns < self._end_by_ns:
            self._end_by_ns = end_by_ns

    def _try(self, start: Callable[[CspsPair], StartResult]) -> StartResult:
        """The best that any pair of gangs has to say."""
        best = StartResult.BLOCKED
        for pair in self._pairs:
            best = min(best, start(pair))
            if best is StartResult.STARTS:
                break
        return best

    def _note(self, request: RequestView, verdict: StartResult) -> bool:
        if verdict is StartResult.BLOCKED:
            self._others.append(Blocked(request_id=request.id))
            self._bound(request)
        return verdict is StartResult.STARTS
