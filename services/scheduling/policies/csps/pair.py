"""One pair of gangs in a round of the policy `csps`: short prompts, and short ends of others."""

from __future__ import annotations

from csps.services.scheduling.cost import EXACT
from csps.services.scheduling.policies.csps.least_wait import LeastWait
from csps.services.scheduling.policies.csps.long_prompts import LongPrompts
from csps.services.scheduling.policies.csps.options import CspsOptions
from csps.services.scheduling.policies.csps.starts import Starts, Verdict
from csps.services.scheduling.policies.decode_overlay import DecodeOptions, Placed
from csps.services.scheduling.policies.decode_rides import DecodeRides
from csps.services.scheduling.policies.reuse import Reuse, reuse_plan
from csps.services.scheduling.view import CachedView, PairView, RequestView, View


class CspsPair:
    """What starts on a pair of gangs in this round."""

    def __init__(
        self, pair: PairView, view: View, options: CspsOptions, decode: DecodeOptions
    ) -> None:
        self._options, self._cost, self._now_ns = options, view.cost, view.now_ns
        self._gang = pair.decode
        self.starts = Starts(pair, view, options, decode)
        self.long = LongPrompts(self.starts)
        self._prefill, self._urgent = self.starts.prefill, self.starts.urgent
        self._rides = DecodeRides(pair.decode, view.cost, decode)
        short = max(1, options.short_tokens)
        turn_ns = self._cost.best(EXACT, self._prefill.single, 0, short).time_ns
        self._least_wait = LeastWait(self._prefill, self._urgent, turn_ns)

    def start_urgent(self, request: RequestView, end_by_ns: int | None) -> Verdict:
        """Compute a short prompt inside whatever runs on the instance where it waits least."""
        tokens = request.prompt_tokens
        placed = self.starts.place(request)
        if placed is None:
            return Verdict.BLOCKED
        waited_ns = self._now_ns - request.submitted_ns
        choice = self._cost.best(request.cls, self._prefill.single, 0, tokens, waited_ns)
        spot = self._least_wait.spot(request, choice.time_ns)
        soonest_ns = None if spot is None else spot.urgent_ns + choice.time_ns
        if self._start_end(request, placed, soonest_ns, end_by_ns):
            return Verdict.STARTS
        if spot is None:
            roomy = any(it.free >= tokens for it in self._prefill.spots)
            return Verdict.WAITS if roomy else Verdict.BLOCKED
        by_ns = None if end_by_ns is None else end_by_ns - self._decode_ns(request)
        if by_ns is not None and self._now_ns + spot.urgent_ns + choice.time_ns > by_ns:
            return Verdict.TOO_LATE
        step = self._urgent.add(spot, request, placed, choice.strategy, choice.time_ns)
        if step is not None:
            self.starts.add_step(step)
        self.starts.take(request, placed)
        self._urgent.bound(spot, by_ns)
        self.long.changed(spot)
        return Verdict.STARTS

    def start_end(self, request: RequestView, end_by_ns: int | None, *, in_turn: bool) -> bool:
        """Compute the end of a longer prompt, if that is short and all before it was kept.

        Args:
            in_turn: nobody before it in its line waits, so that it may also start as a long one.
        """
        left = _left(request, self.starts.cached(request))
        if not (left <= self._options.short_tokens or self._may_ride(request)):
            return False
        placed = self.starts.place(request)
        if placed is None:
            return False
        reuse = self.long.reuse(request) if in_turn else None
        soonest_ns = None if reuse is None else reuse.ends_ns - self._now_ns
        return self._start_end(request, placed, soonest_ns, end_by_ns)

    def _may_ride(self, request: RequestView) -> bool:
        most = self._rides.most
        return most > 0 and _left(request, self.starts.cached_decoding(request)) <= most

    def _start_end(
        self,
        request: RequestView,
        placed: Placed,
        soonest_ns: int | None,
        end_by_ns: int | None,
    ) -> bool:
        """Compute the end of a prompt inside whatever runs on the instances that have kept what
        comes before it, or in an iteration of the gang that will decode it: wherever it is over
        first, if that is no later than elsewhere.

        Args:
            soonest_ns: when it would be computed elsewhere, from now on; None if nobody can.
        """
        by_ns = None if end_by_ns is None else end_by_ns - self._decode_ns(request) - self._now_ns
        within_ns = min((it for it in (soonest_ns, by_ns) if it is not None), default=None)
        cached = self.starts.cached(request)
        reuse = self.starts.reuses.end(request, cached, self._options.short_tokens)
        if reuse is not None:
            if within_ns is None or reuse.urgent_end_ns <= within_ns:
                within_ns = reuse.urgent_end_ns
            else:
                reuse = None
        if ride := self._rides.ride(request, placed, within_ns):
            self.starts.add(ride)
        elif reuse is not None:
            self._start_urgent_reuse(request, reuse, placed, by_ns)
        else:
            return False
        self.starts.take(request, placed)
        return True

    def _start_urgent_reuse(
        self, request: RequestView, reuse: Reuse, placed: Placed, by_ns: int | None
    ) -> None:
        self.starts.reuses.take(reuse)
        for spot, tokens in zip(reuse.spots, reuse.shares, strict=True):
            self._urgent.bound(spot, None if by_ns is None else self._now_ns + by_ns)
            self._prefill.start_urgent(spot, tokens, reuse.time_ns)
            self.long.changed(spot)
        self.starts.add(reuse_plan(request, reuse, placed, urgent=True))

    def _decode_ns(self, request: RequestView) -> int:
        """How long it takes to draw the whole answer."""
        gang = self._gang
        iteration_ns = gang.iteration_ns or self._cost.iteration_ns(
            1, gang.tp, gang.mastered + 1, request.prompt_tokens
        )
        return iteration_ns * request.output_tokens


def _left(request: RequestView, cached: CachedView | None) -> int:
    """What a gang would have to compute of a prompt."""
    return request.prompt_tokens - (cached.tokens if cached else 0)
