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

from csps.services.scheduling.decisions import Blocked, Decision, Trial, WakeAt
from csps.services.scheduling.ids import RequestId
from csps.services.scheduling.policies.csps.options import CspsOptions
from csps.services.scheduling.policies.csps.pair import CspsPair
from csps.services.scheduling.policies.csps.starts import Verdict
from csps.services.scheduling.policies.decode_overlay import DecodeOptions, DecodeOverlay
from csps.services.scheduling.policies.near_rooms import NearRooms
from csps.services.scheduling.policies.prefill_overlay import PrefillOverlay
from csps.services.scheduling.policies.short_prompts import line_of
from csps.services.scheduling.state import Line
from csps.services.scheduling.view import PairView, RequestView, View


class Csps:
    """The policy of this module's description."""

    name = "csps"
    whole_prompts = True
    regroups = False

    def __init__(
        self, options: CspsOptions | None = None, decode: DecodeOptions | None = None
    ) -> None:
        self.options, self.decode_options = options or CspsOptions(), decode or DecodeOptions()

    def line(self, prompt_tokens: int, pairs: Sequence[PairView]) -> Line:
        """Short prompts are urgent."""
        return line_of(prompt_tokens, self.options.short_tokens, pairs)

    def decide(self, view: View) -> Sequence[Decision]:
        """One pass over both lines, in order of admission."""
        return _Round(view, self.options, self.decode_options).decide()

    def trial(self, pair: PairView) -> Trial:
        """On idle gangs."""
        return _Trial(pair, self.options, self.decode_options)


class _Trial:
    def __init__(self, pair: PairView, options: CspsOptions, decode: DecodeOptions) -> None:
        self._decode = DecodeOverlay(pair.decode, decode)
        spots = PrefillOverlay(pair.prefill, 0).spots
        self._rooms = NearRooms(spots, options.spt_tokens, options.jobs_per_instance)

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
        self._long_line_open = True
        """False as soon as a longer prompt waits: the ones behind it do, too."""

    def decide(self) -> list[Decision]:
        """What starts, and who is blocked."""
        urgent, long = self._view.waiting("urgent"), self._view.waiting("long")
        next_urgent = next_long = misses = passed = 0
        look_ahead, most_starts = self._options.look_ahead, self._options.most_starts
        while misses < look_ahead:
            if next_urgent + next_long - misses - passed >= most_starts:
                self._others.append(WakeAt(at_ns=self._view.now_ns))
                break
            take_long = passed < look_ahead and next_long < len(long)
            if take_long and next_urgent < len(urgent):
                take_long = long[next_long].id < urgent[next_urgent].id
            if take_long and self._long_line_open:
                urgent_id = urgent[next_urgent].id if next_urgent < len(urgent) else None
                misses += not self._consider_long(long, next_long, urgent_id)
                next_long += 1
            elif take_long:
                passed += not self._consider_end(long[next_long], in_turn=False)
                next_long += 1
            elif next_urgent < len(urgent):
                misses += not self._consider_urgent(urgent[next_urgent])
                next_urgent += 1
            else:
                break
        return [*self._others, *(plan for it in self._pairs for plan in it.starts.plans())]

    def _consider_urgent(self, request: RequestView) -> bool:
        self._come_to(request)
        verdict = self._try(lambda pair: pair.start_urgent(request, self._end_by_ns))
        if verdict in (Verdict.TOO_LATE, Verdict.BLOCKED):
            # How late a long step ends is not known to the second: others may overtake it.
            self._long_line_open = False
        return self._note(request, verdict)

    def _consider_long(
        self, long: Sequence[RequestView], index: int, urgent_id: RequestId | None
    ) -> bool:
        request = long[index]
        if self._consider_end(request, in_turn=True):
            return True
        verdict = self._try(lambda pair: pair.long.start(long, index, urgent_id))
        self._long_line_open = verdict is Verdict.STARTS
        return self._note(request, verdict)

    def _consider_end(self, request: RequestView, *, in_turn: bool) -> bool:
        """Of a longer prompt that was mostly kept: what counts is what is left to compute."""
        if self._started(request):
            return True  # as a filler
        self._come_to(request)
        end_by_ns = self._end_by_ns
        return any(it.start_end(request, end_by_ns, in_turn=in_turn) for it in self._pairs)

    def _started(self, request: RequestView) -> bool:
        return any(pair.starts.started(request) for pair in self._pairs)

    def _come_to(self, request: RequestView) -> None:
        """Whoever is blocked and older must not be passed for too long, whether or not this round
        has found it blocked."""
        while self._blocked and self._blocked[0].id < request.id:
            older = self._blocked.popleft()
            if not self._started(older):
                self._bound(older)

    def _bound(self, blocked: RequestView) -> None:
        end_by_ns = self._view.blocked_ns(blocked) + self._options.overtaking_ns
        if self._end_by_ns is None or end_by_ns < self._end_by_ns:
            self._end_by_ns = end_by_ns

    def _try(self, start: Callable[[CspsPair], Verdict]) -> Verdict:
        """The best that any pair of gangs has to say."""
        best = Verdict.BLOCKED
        for pair in self._pairs:
            best = min(best, start(pair))
            if best is Verdict.STARTS:
                break
        return best

    def _note(self, request: RequestView, verdict: Verdict) -> bool:
        if verdict is Verdict.BLOCKED:
            self._others.append(Blocked(request=request.id))
            self._bound(request)
        return verdict is Verdict.STARTS
