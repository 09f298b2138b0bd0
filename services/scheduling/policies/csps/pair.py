"""Options of the policy `csps`.

What a round of the policy `csps` has started on a pair of gangs, and what that leaves.

Where a short prompt waits least, for many of them in a round.

Longer prompts in a round of the policy `csps`: on the groups that they fill, with others.

One pair of gangs in a round of the policy `csps`: short prompts, and short ends of others.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

from csps.configurator.costs.cost_table import EXACT, BestOption
from csps.services.scheduling.deciding.decisions import PiggybackPlan, StartPlan
from csps.services.scheduling.deciding.view import CachedView, PairView, RequestView, View
from csps.services.scheduling.events.events import RequestId
from csps.services.scheduling.events.slices import level_sizes
from csps.services.scheduling.policies.csps.locality import CandidateGroup, LocalityAllocator
from csps.services.scheduling.policies.rounds.decode_overlay import (
    DecodeOptions,
    DecodeOverlay,
    Piggybacking,
    Placed,
    check_least,
)
from csps.services.scheduling.policies.rounds.prefill_overlay import (
    Candidate,
    HighPrioritySteps,
    PrefillOverlay,
    Reuse,
    Reuses,
    ShortPromptOptions,
    WholePrompts,
    reuse_plan,
)


@dataclass(frozen=True, kw_only=True)
class CspsOptions(ShortPromptOptions):
    """Sizes in tokens."""

    spt_tokens: int = 4096
    """Target length of a sequence partition; less where an instance has fewer free slots."""
    look_ahead: int = 64
    """Requests that a round tries in vain before it leaves the rest of the line for the next one.
    It bounds the time of a round; what starts does not count."""
    most_starts: int = 128
    """Requests that a round starts. More wait for the next one, which follows at once: an event
    loop must not stand still while hundreds are placed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "spt_tokens", "look_ahead", "most_starts")


class StartResult(IntEnum):
    """What becomes of a request in a round; the least is the best."""

    STARTS = 0
    WAITS = 1
    """For instances to finish other steps."""
    TOO_LATE = 2
    """It would pass somebody who is blocked for longer than is allowed."""
    BLOCKED = 3
    """There are not slots enough."""


class RoundPlan:
    """Everything that starts on one pair."""

    def __init__(
        self, pair: PairView, view: View, options: CspsOptions, decode: DecodeOptions
    ) -> None:
        self.options, self.cost, self.now_ns = options, view.cost, view.now_ns
        self.prefill = PrefillOverlay(pair.prefill, view.now_ns, options)
        self.decode = DecodeOverlay(pair.decode, decode)
        self.reuses = Reuses(self.prefill, view.cost)
        self.high_priority = HighPrioritySteps(self.prefill, view.cost, options, view.now_ns)
        self._view, self._pair = view, pair
        self._steps: list[WholePrompts] = []
        self._others: list[StartPlan | PiggybackPlan] = []
        """Of prompts that are computed behind what was kept of them."""
        self._started: dict[RequestId, None] = {}

    def started(self, request: RequestView) -> bool:
        """The request has a place."""
        return request.id in self._started

    def plans(self) -> Iterator[StartPlan | PiggybackPlan]:
        """All of it."""
        for step in self._steps:
            yield step.plan()
        yield from self._others

    def too_long(self, request: RequestView) -> bool:
        """Another pair may serve it, but not this one."""
        return request.prompt_tokens + request.output_tokens > self._pair.max_positions

    def cached(self, request: RequestView) -> CachedView | None:
        """What the gang that prefills has kept of a prompt."""
        return self._view.cached(request, self._pair.prefill.id)

    def cached_decoding(self, request: RequestView) -> CachedView | None:
        """What the gang that decodes has kept of it."""
        return self._view.cached(request, self._pair.decode.id)

    def place(self, request: RequestView) -> Placed | None:
        """Where a request is decoded; None while there is no room, or never will be."""
        if self.too_long(request):
            return None
        kept = self.cached_decoding(request)
        return self.decode.place_behind(kept, request.prompt_tokens, request.output_tokens)

    def take(self, request: RequestView, placed: Placed) -> None:
        """A request was placed so, and starts."""
        self.decode.take(placed, request.output_tokens)
        self._started[request.id] = None

    def add_step(self, step: WholePrompts) -> None:
        """A step starts, or grows from now on."""
        self._steps.append(step)

    def add(self, plan: StartPlan | PiggybackPlan) -> None:
        """What follows upon what was kept of a prompt starts."""
        self._others.append(plan)


_Wait = tuple[int, int, int, int, int, Candidate]
"""How long an urgent prompt waits on an instance, the least is the best: time of urgent steps, time
that its long steps were delayed by, when it is free, its place, its version, and itself."""


class LeastWait:
    """The instances of a gang, by how long an urgent prompt waits there.

    Args:
        prefill: the instances.
        urgent: what starts on them.
        turn_ns: what a part of a long step costs: about as much as a short prompt.
    """

    def __init__(
        self, prefill: PrefillOverlay, high_priority: HighPrioritySteps, yield_ns: int
    ) -> None:
        self._prefill, self._high_priority, self._yield_ns = prefill, high_priority, yield_ns
        self._waits: list[_Wait] | None = None
        self._vain: dict[str, tuple[int, int]] = {}
        """Tokens and time of a prompt of a class that found no instance."""

    def candidate(self, request: RequestView, time_ns: int) -> Candidate | None:
        """Where an urgent prompt waits least: behind other urgent ones, and for a part of a layer;
        of the instances that admit it.

        Of equal instances the one that was overtaken less since it has long steps: the members of a
        step wait for one another, so it is held up least when all are preempted alike.
        """
        tokens = request.prompt_tokens
        vain = self._vain.get(request.cls)  # slots, turns and budgets only become less in a round
        if vain and tokens >= vain[0] and time_ns >= vain[1]:
            return None
        heap = self._heap()
        unfit: list[_Wait] = []
        found = None
        while heap and found is None:
            *_, version, candidate = heap[0]
            if version != candidate.version:  # whatever it was given since makes it wait longer
                heapq.heapreplace(heap, self._wait(candidate))
            elif self._high_priority.admits(candidate, request, time_ns):
                found = candidate
            else:
                unfit.append(heapq.heappop(heap))
        for wait in unfit:
            heapq.heappush(heap, wait)
        if found is None:
            self._vain[request.cls] = tokens, time_ns
        return found

    def _heap(self) -> list[_Wait]:
        if self._waits is None:
            self._waits = [self._wait(candidate) for candidate in self._prefill.candidates]
            heapq.heapify(self._waits)
        return self._waits

    def _wait(self, candidate: Candidate) -> _Wait:
        wait_ns = candidate.high_priority_ns + (
            self._yield_ns if candidate.low_priority_steps else 0
        )
        return (
            wait_ns,
            candidate.preempted_ns,
            candidate.free_at_ns,
            candidate.order,
            candidate.version,
            candidate,
        )


FILLERS_PASS = 8
"""Waiting prompts that others may pass to fill the slack of a step."""


class LongPrompts:
    """Those of one pair."""

    def __init__(self, round_plan: RoundPlan) -> None:
        self._round_plan, self._options = round_plan, round_plan.options
        self._prefill, self._cost = round_plan.prefill, round_plan.cost
        self._allocator: LocalityAllocator | None = None

    def changed(self, candidate: Candidate) -> None:
        """An instance was given something."""
        if self._allocator is not None:
            self._allocator.update(candidate)

    def _allocator_of_round(self) -> LocalityAllocator:
        if self._allocator is None:
            it = self._options
            self._allocator = LocalityAllocator(
                self._prefill.candidates, it.spt_tokens, it.jobs_per_instance
            )
        return self._allocator

    def start(
        self, queue: Sequence[RequestView], index: int, high_priority_id: RequestId | None
    ) -> StartResult:
        """Compute a prompt on the group that it fills, with others in the slack of the last SPT.

        Args:
            line: of longer prompts.
            index: of the prompt in the line.
            urgent_id: the oldest short one that this round has not come to.
        """
        request = queue[index]
        placed = self._round_plan.place(request)
        if placed is None:
            return StartResult.BLOCKED
        group = self._allocator_of_round().group(request.prompt_tokens)
        reuse = self.reuse(request)
        if reuse and (group is None or reuse.ends_ns <= self._ends_ns(request, group)):
            self._start_reuse(request, reuse, placed)
            return StartResult.STARTS
        if group is None:
            # With slots enough, only outstanding steps are in the way.
            room = sum(candidate.free for candidate in self._prefill.candidates)
            return StartResult.WAITS if room >= request.prompt_tokens else StartResult.BLOCKED
        choice = self._best(request, group, request.prompt_tokens)
        step = WholePrompts(
            group=group.candidates, cls=request.cls, strategy=choice.strategy, high_priority=False
        )
        self._add(step, request, placed)
        younger = islice(queue, index + 1, index + 1 + self._options.look_ahead)
        self._fill(step, younger, group, high_priority_id)
        if len(step.members) > 1:
            choice = self._best(request, group, step.tokens)
        self._launch(step, group, choice.time_ns)
        return StartResult.STARTS

    def _ends_ns(self, request: RequestView, group: CandidateGroup) -> int:
        """When a group will have computed all of a prompt."""
        choice = self._best(request, group, request.prompt_tokens)
        return max(candidate.free_at_ns for candidate in group.candidates) + choice.time_ns

    def _best(self, request: RequestView, group: CandidateGroup, tokens: int) -> BestOption:
        """How a group computes all of a prompt, and others that fill its last SPT, when it is
        free."""
        waited_ns = (
            max(candidate.free_at_ns for candidate in group.candidates) - request.submitted_ns
        )
        shape = self._prefill.shape(group.candidates)
        return self._cost.best(request.cls, shape, 0, tokens, waited_ns)

    def _add(self, step: WholePrompts, request: RequestView, placed: Placed) -> None:
        self._round_plan.take(request, placed)
        step.add(request, placed)

    def _launch(self, step: WholePrompts, group: CandidateGroup, predicted_ns: int) -> None:
        sizes = level_sizes(step.tokens, group.room)
        assert sizes is not None, "fillers exceed the slack"
        used = [(candidate, n) for candidate, n in zip(group.candidates, sizes, strict=True) if n]
        step.group, step.sizes = [candidate for candidate, _ in used], [n for _, n in used]
        step.predicted_ns = predicted_ns
        oldest, _ = step.members[0]
        self._prefill.start_low_priority(oldest, step.group, step.sizes, predicted_ns)
        self._round_plan.add_step(step)
        self._given(step.group)

    def _given(self, candidates: list[Candidate]) -> None:
        """Instances were given a long step."""
        for candidate in candidates:
            self._allocator_of_round().update(candidate)
        self._round_plan.high_priority.close(candidates)

    # --- behind what was kept ------------------------------------------------------------------

    def reuse(self, request: RequestView) -> Reuse | None:
        """The rest of a prompt, where its beginning was kept and around it."""
        cached = self._round_plan.cached(request)
        if cached is None:
            return None
        candidates = self._round_plan.reuses.holders(cached)
        left = request.prompt_tokens - cached.tokens
        if left > len(candidates) * self._options.spt_tokens:
            wider = self._allocator_of_round().group(left)
            ids = {candidate.id for candidate in candidates}
            candidates += [it for it in (wider.candidates if wider else ()) if it.id not in ids]
            candidates.sort(key=lambda it: it.order)
        if any(
            candidate.low_priority_steps >= self._options.jobs_per_instance
            for candidate in candidates
        ):
            return None
        return self._round_plan.reuses.on(request, cached, candidates)

    def _start_reuse(self, request: RequestView, reuse: Reuse, placed: Placed) -> None:
        self._round_plan.reuses.take(reuse)
        self._prefill.start_low_priority(request, reuse.candidates, reuse.sizes, reuse.time_ns)
        self._round_plan.take(request, placed)
        self._round_plan.add(reuse_plan(request, reuse, placed))
        self._given(reuse.candidates)

    # --- with others in the slack --------------------------------------------------------------

    def _fill(
        self,
        step: WholePrompts,
        younger: Iterable[RequestView],
        group: CandidateGroup,
        high_priority_id: RequestId | None,
    ) -> None:
        """Add younger prompts for the slack of the last SPT, if they would otherwise wait.

        They may pass `FILLERS_PASS` longer ones, for which slots are kept meanwhile, but nobody
        who is blocked, nor a short one that may be found to be: what they take is not given back
        within any bound.
        """
        spt = min(self._options.spt_tokens, *group.room)
        slack = len(group.candidates) * spt - step.tokens
        idle = self._prefill.idle
        if slack <= 0 or (
            idle and idle > sum(not candidate.low_priority_steps for candidate in group.candidates)
        ):
            return  # an idle instance serves them sooner
        queue = self._queue_to_last_filler(younger, slack, step.cls, high_priority_id)
        if not queue:
            return
        decode = self._round_plan.decode
        passed: list[tuple[Placed, int]] = []
        room = sum(candidate.free for candidate in self._prefill.candidates) - step.tokens
        for other in queue:
            placed = self._round_plan.place(other)
            room -= other.prompt_tokens
            if placed is None or room < 0:
                break
            if other.prompt_tokens <= slack and other.cls == step.cls:
                slack -= other.prompt_tokens
                self._add(step, other, placed)
            else:
                decode.take(placed, other.output_tokens)
                passed.append((placed, other.output_tokens))
        for placed, output_tokens in passed:
            decode.put_back(placed, output_tokens)

    def _queue_to_last_filler(
        self,
        younger: Iterable[RequestView],
        slack: int,
        cls: str,
        high_priority_id: RequestId | None,
    ) -> list[RequestView]:
        """The part of the line that matters for the slack; mostly nobody in it is small enough."""
        queue: list[RequestView] = []
        passing = end = 0
        for other in younger:
            if other.blocked_ns is not None or (
                high_priority_id is not None and high_priority_id < other.id
            ):
                break
            if self._round_plan.started(other) or self._round_plan.too_long(other):
                continue
            queue.append(other)
            if other.prompt_tokens <= slack and other.cls == cls:
                end = len(queue)
            elif passing < FILLERS_PASS:
                passing += 1
            else:
                break
        return queue[:end]


class CspsPair:
    """What starts on a pair of gangs in this round."""

    def __init__(
        self, pair: PairView, view: View, options: CspsOptions, decode: DecodeOptions
    ) -> None:
        self._options, self._cost, self._now_ns = options, view.cost, view.now_ns
        self._gang = pair.decode
        self.round_plan = RoundPlan(pair, view, options, decode)
        self.long = LongPrompts(self.round_plan)
        self._prefill, self._high_priority = self.round_plan.prefill, self.round_plan.high_priority
        self._piggybacking = Piggybacking(pair.decode, view.cost, decode)
        short = max(1, options.short_tokens)
        yield_ns = self._cost.best(EXACT, self._prefill.single, 0, short).time_ns
        self._least_wait = LeastWait(self._prefill, self._high_priority, yield_ns)

    def start_high_priority(self, request: RequestView, end_by_ns: int | None) -> StartResult:
        """Compute a short prompt inside whatever runs on the instance where it waits least."""
        tokens = request.prompt_tokens
        placed = self.round_plan.place(request)
        if placed is None:
            return StartResult.BLOCKED
        waited_ns = self._now_ns - request.submitted_ns
        choice = self._cost.best(request.cls, self._prefill.single, 0, tokens, waited_ns)
        candidate = self._least_wait.candidate(request, choice.time_ns)
        soonest_ns = None if candidate is None else candidate.high_priority_ns + choice.time_ns
        if self._start_end(request, placed, soonest_ns, end_by_ns):
            return StartResult.STARTS
        if candidate is None:
            roomy = any(it.free >= tokens for it in self._prefill.candidates)
            return StartResult.WAITS if roomy else StartResult.BLOCKED
        by_ns = None if end_by_ns is None else end_by_ns - self._decode_ns(request)
        if by_ns is not None and self._now_ns + candidate.high_priority_ns + choice.time_ns > by_ns:
            return StartResult.TOO_LATE
        step = self._high_priority.add(candidate, request, placed, choice.strategy, choice.time_ns)
        if step is not None:
            self.round_plan.add_step(step)
        self.round_plan.take(request, placed)
        self._high_priority.bound(candidate, by_ns)
        self.long.changed(candidate)
        return StartResult.STARTS

    def start_end(self, request: RequestView, end_by_ns: int | None, *, at_head: bool) -> bool:
        """Compute the end of a longer prompt, if that is short and all before it was kept.

        Args:
            in_turn: nobody before it in its line waits, so that it may also start as a long one.
        """
        left = _left(request, self.round_plan.cached(request))
        if not (left <= self._options.short_tokens or self._may_piggyback(request)):
            return False
        placed = self.round_plan.place(request)
        if placed is None:
            return False
        reuse = self.long.reuse(request) if at_head else None
        soonest_ns = None if reuse is None else reuse.ends_ns - self._now_ns
        return self._start_end(request, placed, soonest_ns, end_by_ns)

    def _may_piggyback(self, request: RequestView) -> bool:
        most = self._piggybacking.most
        return most > 0 and _left(request, self.round_plan.cached_decoding(request)) <= most

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
        cached = self.round_plan.cached(request)
        reuse = self.round_plan.reuses.end(request, cached, self._options.short_tokens)
        if reuse is not None:
            if within_ns is None or reuse.high_priority_end_ns <= within_ns:
                within_ns = reuse.high_priority_end_ns
            else:
                reuse = None
        if piggyback := self._piggybacking.piggyback(request, placed, within_ns):
            self.round_plan.add(piggyback)
        elif reuse is not None:
            self._start_high_priority_reuse(request, reuse, placed, by_ns)
        else:
            return False
        self.round_plan.take(request, placed)
        return True

    def _start_high_priority_reuse(
        self, request: RequestView, reuse: Reuse, placed: Placed, by_ns: int | None
    ) -> None:
        self.round_plan.reuses.take(reuse)
        for candidate, tokens in zip(reuse.candidates, reuse.sizes, strict=True):
            self._high_priority.bound(candidate, None if by_ns is None else self._now_ns + by_ns)
            self._prefill.start_high_priority(candidate, tokens, reuse.time_ns)
            self.long.changed(candidate)
        self.round_plan.add(reuse_plan(request, reuse, placed, high_priority=True))

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
