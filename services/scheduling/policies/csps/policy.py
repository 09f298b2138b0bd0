"""The policy `csps` cuts prompts into sequence partitions (SPTs) over the instances they fill.

Requests start first come, first served (CSPS §3.2), except that short prompts preempt long ones,
short suffixes start on the holders of their cached prefix (or piggybacked where they are
decoded), prompts of modest tenants start inside those of others (`core/queue.py`), and waiting
prompts fill the slack of the last SPT of a starting step.

No request starves, because preemption is bounded in seconds, predicted when a request is placed and
corrected by measured times (`events/limits.py`). While a request waits for KV slots, no longer
prompt passes it, and a short one only if its last token is predicted within `overtaking_s` of the
time at which the older request was blocked. From then on it waits only for older requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from csps.services.scheduling.deciding.decisions import Blocked, Decision, SchedulerView, WakeAt
from csps.services.scheduling.policies.csps.pair import CspsOptions, CspsPair, StartResult
from csps.services.scheduling.policies.rounds.decode_overlay import (
    DecodeOptions,
    fits_idle,
)
from csps.services.scheduling.policies.rounds.prefill_overlay import priority_of
from csps.services.scheduling.state.state import GangPair, Priority, Request, order_key


class Csps:
    """The policy `csps`."""

    name = "csps"
    whole_prompts = True
    regroups = False

    def __init__(
        self, options: CspsOptions | None = None, decode: DecodeOptions | None = None
    ) -> None:
        self.options, self.decode_options = options or CspsOptions(), decode or DecodeOptions()

    def priority(self, prompt_tokens: int, pairs: Sequence[GangPair]) -> Priority:
        """Return high priority for short prompts."""
        return priority_of(prompt_tokens, self.options.short_tokens, pairs)

    def decide(self, view: SchedulerView) -> Sequence[Decision]:
        """Decide about both queues in one pass, in order."""
        return _Round(view, self.options, self.decode_options).decide()

    def fits(self, pair: GangPair, prompt_tokens: int, output_tokens: int) -> bool:
        """Return whether all instances together have slots: a prompt of any length may take all."""
        roomy = prompt_tokens <= pair.prefill.capacity
        return roomy and fits_idle(pair.decode, prompt_tokens, output_tokens)


class _Round:
    """One pass over both queues, in order (`order_key`)."""

    def __init__(self, view: SchedulerView, options: CspsOptions, decode: DecodeOptions) -> None:
        self._view, self._options = view, options
        self._pairs = [CspsPair(pair, view, options, decode) for pair in view.pairs]
        self._others: list[Decision] = []
        self._blocked = deque(view.blocked)
        """Requests blocked before that this round has not reached."""
        self._end_by_ns: int | None = None
        """Time by which a request that starts now must end, so that none is passed for too long."""
        self._long_queue_open = True
        """False as soon as a longer prompt waits: those behind it wait, too."""

    def decide(self) -> list[Decision]:
        """Return the plans of requests that start, and the blocked requests."""
        short, long = self._view.waiting("high"), self._view.waiting("low")
        next_short = next_long = misses = passed = 0
        look_ahead, most_starts = self._options.look_ahead, self._options.most_starts
        while misses < look_ahead:
            if next_short + next_long - misses - passed >= most_starts:
                self._others.append(WakeAt(at_ns=self._view.now_ns))
                break
            take_long = passed < look_ahead and next_long < len(long)
            if take_long and next_short < len(short):
                take_long = order_key(long[next_long]) < order_key(short[next_short])
            if take_long and self._long_queue_open:
                first_short = short[next_short] if next_short < len(short) else None
                misses += not self._consider_long(long, next_long, first_short)
                next_long += 1
            elif take_long:
                passed += not self._consider_suffix(long[next_long], at_head=False)
                next_long += 1
            elif next_short < len(short):
                misses += not self._consider_short(short[next_short])
                next_short += 1
            else:
                break
        return [*self._others, *(plan for pair in self._pairs for plan in pair.round_plan.plans())]

    def _consider_short(self, request: Request) -> bool:
        """Start a short prompt; return True if it starts."""
        self._bound_by_older(request)
        result = self._try(lambda pair: pair.start_high_priority(request, self._end_by_ns))
        if result in (StartResult.TOO_LATE, StartResult.BLOCKED):
            # No long prompt may pass this one: its step may itself be preempted, so its end cannot
            # be predicted well enough to be bounded.
            self._long_queue_open = False
        return self._note(request, result)

    def _consider_long(
        self, long: Sequence[Request], index: int, first_short: Request | None
    ) -> bool:
        """Start the long prompt at an index; return True if it starts."""
        request = long[index]
        if self._consider_suffix(request, at_head=True):
            return True
        result = self._try(lambda pair: pair.long.start(long, index, first_short))
        self._long_queue_open = result is StartResult.STARTS
        return self._note(request, result)

    def _consider_suffix(self, request: Request, *, at_head: bool) -> bool:
        """Start a longer prompt inside what runs already, if only a short suffix is left to compute
        or if its tenant is modest."""
        if self._started(request):
            return True  # It fills the slack of a step already.
        self._bound_by_older(request)
        end_by_ns = self._end_by_ns
        return any(
            pair.start_suffix(request, end_by_ns, at_head=at_head)
            or (request.modest and pair.start_modest(request, end_by_ns, at_head=at_head))
            for pair in self._pairs
        )

    def _started(self, request: Request) -> bool:
        return any(pair.round_plan.started(request) for pair in self._pairs)

    def _bound_by_older(self, request: Request) -> None:
        """Apply the bounds of all older blocked requests, reached in this round or not."""
        while self._blocked and order_key(self._blocked[0]) < order_key(request):
            older = self._blocked.popleft()
            if not self._started(older):
                self._bound(older)

    def _bound(self, blocked: Request) -> None:
        end_by_ns = self._view.blocked_ns(blocked) + self._options.preemption_budget_ns
        if self._end_by_ns is None or end_by_ns < self._end_by_ns:
            self._end_by_ns = end_by_ns

    def _try(self, start: Callable[[CspsPair], StartResult]) -> StartResult:
        """Return the best result of all pairs of gangs."""
        best = StartResult.BLOCKED
        for pair in self._pairs:
            best = min(best, start(pair))
            if best is StartResult.STARTS:
                break
        return best

    def _note(self, request: Request, result: StartResult) -> bool:
        """Record a blocked request; return True if the request starts."""
        if result is StartResult.BLOCKED:
            self._others.append(Blocked(request_id=request.id))
            self._bound(request)
        return result is StartResult.STARTS
