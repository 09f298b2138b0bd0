"""One pair of gangs in a round of the policy `csps`.

`RoundPlan` collects what starts on the pair and tracks what is left. `LeastWait` finds the instance
for each short prompt, and `LongPrompts` the group for each longer one, with fillers in the slack of
its last SPT. `CspsPair` starts short prompts and short suffixes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice

from csps.configurator.costs.cost_table import EXACT, BestOption
from csps.protocols.core.placement import level_sizes
from csps.services.scheduling.deciding.decisions import PiggybackPlan, SchedulerView, StartPlan
from csps.services.scheduling.events.events import RequestId
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
from csps.services.scheduling.state.state import Cached, GangPair, Request, order_key


@dataclass(frozen=True, kw_only=True)
class CspsOptions(ShortPromptOptions):
    """Options of the policy `csps`. Sizes in tokens."""

    spt_tokens: int = 4096
    """Target length of a sequence partition; less where an instance has fewer free slots."""
    look_ahead: int = 64
    """Failed attempts after which a round ends, which bounds its time."""
    most_starts: int = 128
    """Most requests that a round starts. More wait for the next round, which follows at once, so
    that the router's event loop is not blocked while hundreds are placed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "spt_tokens", "look_ahead", "most_starts")


class StartResult(IntEnum):
    """Result of trying to start a request; the least is the best."""

    STARTS = 0
    WAITS = 1
    """The request waits for other steps to finish."""
    TOO_LATE = 2
    """The request would pass a blocked one for too long."""
    BLOCKED = 3
    """The request finds too few slots."""


class RoundPlan:
    """Everything that starts on one pair in a round."""

    def __init__(
        self, pair: GangPair, view: SchedulerView, options: CspsOptions, decode: DecodeOptions
    ) -> None:
        self.options, self.cost, self.now_ns = options, view.cost, view.now_ns
        self.prefill = PrefillOverlay(pair.prefill, view.now_ns, options)
        self.decode = DecodeOverlay(pair.decode, decode, view.cost, shared=view.shared)
        self.reuses = Reuses(self.prefill, view.cost)
        self.high_priority = HighPrioritySteps(self.prefill, view.cost, options, view.now_ns)
        self._view, self._pair = view, pair
        self._steps: list[WholePrompts] = []
        self._others: list[StartPlan | PiggybackPlan] = []
        """Plans of prompts that are computed after a cached prefix."""
        self._started: set[RequestId] = set()

    def started(self, request: Request) -> bool:
        """Return True if the request starts in this round."""
        return request.id in self._started

    def plans(self) -> Iterator[StartPlan | PiggybackPlan]:
        """Yield the plans of all requests that start."""
        for step in self._steps:
            yield step.plan()
        yield from self._others

    def too_long(self, request: Request) -> bool:
        """Return True if the model of this pair has too few positions."""
        return request.prompt_tokens + request.output_tokens > self._pair.max_positions

    def cached(self, request: Request) -> Cached | None:
        """Return the prefix of a prompt that the prefill gang has cached."""
        return self._view.cached(request, self._pair.prefill.id)

    def cached_decoding(self, request: Request) -> Cached | None:
        """Return the prefix of a prompt that the decode gang has cached."""
        return self._view.cached(request, self._pair.decode.id)

    def place(self, request: Request) -> Placed | None:
        """Place a request on the decode gang; None without enough slots or positions."""
        if self.too_long(request):
            return None
        cached = self.cached_decoding(request)
        return self.decode.place_after(
            cached, request.prompt_tokens, request.output_tokens, modest=request.modest
        )

    def take(self, request: Request, placed: Placed) -> None:
        """Record that a request starts with a placement."""
        self.decode.take(placed, request.output_tokens)
        self._started.add(request.id)

    def add_step(self, step: WholePrompts) -> None:
        """Add a step, which may still grow in this round."""
        self._steps.append(step)

    def add(self, plan: StartPlan | PiggybackPlan) -> None:
        """Add the plan of a prompt that is computed after a cached prefix."""
        self._others.append(plan)


_Wait = tuple[int, int, int, int, int, Candidate]
"""Sort key of an instance for a short prompt: waiting time behind other high-priority steps, time
that its low-priority steps were preempted for, predicted end of all steps, order, version; and the
instance."""


class LeastWait:
    """The instances of a gang, ordered by the waiting time of a short prompt.

    Args:
        prefill: the instances.
        high_priority: steps that start on them in this round.
        yield_ns: time until a low-priority step yields, about that of a short prompt.
    """

    def __init__(
        self, prefill: PrefillOverlay, high_priority: HighPrioritySteps, yield_ns: int
    ) -> None:
        self._prefill, self._high_priority, self._yield_ns = prefill, high_priority, yield_ns
        self._waits: list[_Wait] | None = None
        self._failed: dict[str, tuple[int, int]] = {}
        """Tokens and time of a prompt that found no instance, by class."""

    def candidate(self, request: Request, time_ns: int) -> Candidate | None:
        """Return the instance that admits a short prompt and where it waits least."""
        tokens = request.prompt_tokens
        # Slots, steps and budgets only shrink in a round, so larger prompts fail as well.
        failed = self._failed.get(request.cls)
        if failed and tokens >= failed[0] and time_ns >= failed[1]:
            return None
        heap = self._heap()
        unfit: list[_Wait] = []
        chosen = None
        while heap and chosen is None:
            *_, version, candidate = heap[0]
            if version != candidate.version:
                # Changes only lengthen the wait, so a stale entry is too early, never too late.
                heapq.heapreplace(heap, self._wait(candidate))
            elif self._high_priority.admits(candidate, request, time_ns):
                chosen = candidate
            else:
                unfit.append(heapq.heappop(heap))
        for wait in unfit:
            heapq.heappush(heap, wait)
        if chosen is None:
            self._failed[request.cls] = tokens, time_ns
        return chosen

    def _heap(self) -> list[_Wait]:
        if self._waits is None:
            self._waits = [self._wait(candidate) for candidate in self._prefill.candidates]
            heapq.heapify(self._waits)
        return self._waits

    def _wait(self, candidate: Candidate) -> _Wait:
        wait_ns = candidate.high_priority_ns + (
            self._yield_ns if candidate.low_priority_steps else 0
        )
        # Among equal waits, the instance that was preempted less: the members of a step wait for
        # one another, so it is delayed least if all are preempted equally.
        return (
            wait_ns,
            candidate.preempted_ns,
            candidate.free_at_ns,
            candidate.order,
            candidate.version,
            candidate,
        )


FILLERS_PASS = 8
"""Most waiting prompts that fillers of a step may pass."""


class LongPrompts:
    """The low-priority prompts that start on one pair."""

    def __init__(self, round_plan: RoundPlan) -> None:
        self._round_plan, self._options = round_plan, round_plan.options
        self._prefill, self._cost = round_plan.prefill, round_plan.cost
        self._allocator: LocalityAllocator | None = None

    def changed(self, candidate: Candidate) -> None:
        """Update an instance that was given a step."""
        if self._allocator is not None:
            self._allocator.update(candidate)

    def _allocator_of_round(self) -> LocalityAllocator:
        if self._allocator is None:
            self._allocator = LocalityAllocator(
                self._prefill.candidates,
                self._options.spt_tokens,
                self._options.jobs_per_instance,
            )
        return self._allocator

    def start(
        self, queue: Sequence[Request], index: int, first_short: Request | None
    ) -> StartResult:
        """Compute a prompt on the group that it fills, with others in the slack of the last SPT.

        Args:
            queue: the low-priority queue.
            index: index of the prompt in the queue.
            first_short: the first short prompt that this round has not reached.
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
            # With enough free slots, the prompt only waits for outstanding steps.
            room = sum(candidate.free for candidate in self._prefill.candidates)
            return StartResult.WAITS if room >= request.prompt_tokens else StartResult.BLOCKED
        choice = self._best(request, group, request.prompt_tokens)
        step = WholePrompts(
            group=group.candidates, cls=request.cls, strategy=choice.strategy, high_priority=False
        )
        self._add(step, request, placed)
        younger = islice(queue, index + 1, index + 1 + self._options.look_ahead)
        self._fill(step, younger, group, first_short)
        if len(step.members) > 1:
            choice = self._best(request, group, step.tokens)
        self._launch(step, group, choice.time_ns)
        return StartResult.STARTS

    def preempting_group(self, tokens: int) -> CandidateGroup | None:
        """Return the group for a prompt of a modest tenant, whatever low-priority steps it has:
        instances without a high-priority step if they suffice."""
        for steps in (1, self._options.jobs_per_instance):
            allocator = LocalityAllocator(
                self._prefill.candidates, self._options.spt_tokens, steps, high_priority=True
            )
            if (group := allocator.group(tokens)) is not None:
                return group
        return None

    def _ends_ns(self, request: Request, group: CandidateGroup) -> int:
        """Predict when a group ends a whole prompt."""
        choice = self._best(request, group, request.prompt_tokens)
        return max(candidate.free_at_ns for candidate in group.candidates) + choice.time_ns

    def _best(self, request: Request, group: CandidateGroup, tokens: int) -> BestOption:
        """Return the best option for a step of `tokens` when the group is free."""
        waited_ns = (
            max(candidate.free_at_ns for candidate in group.candidates) - request.submitted_ns
        )
        shape = self._prefill.shape(group.candidates)
        return self._cost.best(request.cls, shape, 0, tokens, waited_ns)

    def _add(self, step: WholePrompts, request: Request, placed: Placed) -> None:
        self._round_plan.take(request, placed)
        step.add(request, placed)

    def _launch(self, step: WholePrompts, group: CandidateGroup, predicted_ns: int) -> None:
        sizes = level_sizes(step.tokens, group.room)
        assert sizes is not None, f"a step of {step.tokens} tokens exceeds its group's {group.room}"
        used = [
            (candidate, size)
            for candidate, size in zip(group.candidates, sizes, strict=True)
            if size
        ]
        step.group, step.sizes = [candidate for candidate, _ in used], [size for _, size in used]
        step.predicted_ns = predicted_ns
        oldest, _ = step.members[0]
        self._prefill.start_low_priority(oldest, step.group, step.sizes, predicted_ns)
        self._round_plan.add_step(step)
        self._update(step.group)

    def _update(self, candidates: list[Candidate]) -> None:
        """Update instances that were given a low-priority step."""
        for candidate in candidates:
            self._allocator_of_round().update(candidate)
        self._round_plan.high_priority.close(candidates)

    # --- after a cached prefix ------------------------------------------------------------------

    def reuse(self, request: Request) -> Reuse | None:
        """Compute the rest of a prompt on the holders of its cached prefix, and near them.

        Returns:
            None if nothing is cached, or if one of the instances has no step left.
        """
        cached = self._round_plan.cached(request)
        if cached is None:
            return None
        candidates = self._round_plan.reuses.holders(cached)
        left = request.prompt_tokens - cached.tokens
        if left > len(candidates) * self._options.spt_tokens:
            wider = self._allocator_of_round().group(left)
            ids = {candidate.id for candidate in candidates}
            candidates += [
                candidate
                for candidate in (wider.candidates if wider else ())
                if candidate.id not in ids
            ]
            candidates.sort(key=lambda candidate: candidate.order)
        if any(
            candidate.low_priority_steps >= self._options.jobs_per_instance
            for candidate in candidates
        ):
            return None
        return self._round_plan.reuses.on(request, cached, candidates)

    def _start_reuse(self, request: Request, reuse: Reuse, placed: Placed) -> None:
        self._round_plan.reuses.take(reuse)
        self._prefill.start_low_priority(request, reuse.candidates, reuse.sizes, reuse.time_ns)
        self._round_plan.take(request, placed)
        self._round_plan.add(reuse_plan(request, reuse, placed))
        self._update(reuse.candidates)

    # --- fillers ---------------------------------------------------------------------------------

    def _fill(
        self,
        step: WholePrompts,
        younger: Iterable[Request],
        group: CandidateGroup,
        first_short: Request | None,
    ) -> None:
        """Add younger prompts in the slack of the last SPT, if they would otherwise wait.

        They may pass `FILLERS_PASS` longer prompts, whose slots stay reserved meanwhile. They pass
        no blocked request, nor a short one that may turn out to be blocked: their slots are not
        freed within any bound.
        """
        spt = min(self._options.spt_tokens, *group.room)
        slack = len(group.candidates) * spt - step.tokens
        idle = self._prefill.idle
        if slack <= 0 or (
            idle and idle > sum(not candidate.low_priority_steps for candidate in group.candidates)
        ):
            return  # An idle instance serves them sooner.
        queue = self._queue_to_last_filler(younger, slack, step.cls, first_short)
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
            decode.free(placed, output_tokens)

    def _queue_to_last_filler(
        self,
        younger: Iterable[Request],
        slack: int,
        cls: str,
        first_short: Request | None,
    ) -> list[Request]:
        """Return the queue up to the last prompt that fits the slack; mostly none does."""
        last = None if first_short is None else order_key(first_short)
        queue: list[Request] = []
        passing = end = 0
        for other in younger:
            if other.blocked_ns is not None or (last is not None and last < order_key(other)):
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
    """The starts on a pair of gangs in a round."""

    def __init__(
        self, pair: GangPair, view: SchedulerView, options: CspsOptions, decode: DecodeOptions
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

    def start_high_priority(self, request: Request, end_by_ns: int | None) -> StartResult:
        """Compute a short prompt inside whatever runs on the instance where it waits least."""
        tokens = request.prompt_tokens
        placed = self.round_plan.place(request)
        if placed is None:
            return StartResult.BLOCKED
        waited_ns = self._now_ns - request.submitted_ns
        choice = self._cost.best(request.cls, self._prefill.single, 0, tokens, waited_ns)
        candidate = self._least_wait.candidate(request, choice.time_ns)
        soonest_ns = None if candidate is None else candidate.high_priority_ns + choice.time_ns
        if self._start_suffix(request, placed, soonest_ns, end_by_ns):
            return StartResult.STARTS
        if candidate is None:
            roomy = any(other.free >= tokens for other in self._prefill.candidates)
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

    def start_suffix(self, request: Request, end_by_ns: int | None, *, at_head: bool) -> bool:
        """Compute the suffix of a longer prompt, if it is short and the rest is cached.

        Args:
            end_by_ns: time by which the answer must end; None: any.
            at_head: True if no older low-priority prompt waits, so that this one may also start as
                a low-priority step.
        """
        left = _left(request, self.round_plan.cached(request))
        if not (left <= self._longest_suffix(request) or self._may_piggyback(request)):
            return False
        placed = self.round_plan.place(request)
        if placed is None:
            return False
        reuse = self.long.reuse(request) if at_head else None
        soonest_ns = None if reuse is None else reuse.ends_ns - self._now_ns
        return self._start_suffix(request, placed, soonest_ns, end_by_ns)

    def start_modest(self, request: Request, end_by_ns: int | None, *, at_head: bool) -> bool:
        """Compute a prompt of a modest tenant inside whatever runs, on the group that it fills.

        Args:
            at_head: True if no older low-priority prompt waits, so that it needs no priority where
                nothing runs.
        """
        group = self.long.preempting_group(request.prompt_tokens)
        placed = self.round_plan.place(request)
        if group is None or placed is None:
            return False
        sizes = level_sizes(request.prompt_tokens, group.room)
        assert sizes is not None, f"a group has no room for {request.prompt_tokens} tokens"
        candidates = [
            candidate for candidate, size in zip(group.candidates, sizes, strict=True) if size
        ]
        sizes = [size for size in sizes if size]
        if at_head and not any(candidate.low_priority_steps for candidate in candidates):
            return False
        waits_ns = max(candidate.high_priority_ns for candidate in candidates)
        waited_ns = self._now_ns + waits_ns - request.submitted_ns
        shape = self._prefill.shape(candidates)
        choice = self._cost.best(request.cls, shape, 0, request.prompt_tokens, waited_ns)
        by_ns = None if end_by_ns is None else end_by_ns - self._decode_ns(request)
        if by_ns is not None and self._now_ns + waits_ns + choice.time_ns > by_ns:
            return False
        if not self._prefill.may_preempt(candidates, sizes, choice.time_ns):
            return False
        step = WholePrompts(
            group=candidates,
            cls=request.cls,
            strategy=choice.strategy,
            high_priority=True,
            predicted_ns=choice.time_ns,
            sizes=sizes,
        )
        step.add(request, placed)
        for candidate, size in zip(candidates, sizes, strict=True):
            self._high_priority.bound(candidate, by_ns)
            self._prefill.start_high_priority(candidate, size, choice.time_ns)
            self.long.changed(candidate)
        self.round_plan.take(request, placed)
        self.round_plan.add_step(step)
        return True

    def _longest_suffix(self, request: Request) -> int:
        """Return the most tokens that may be computed on the holders of a cached prefix inside what
        runs there: a short suffix, or of a modest tenant what the holders would compute anyway."""
        cached = self.round_plan.cached(request) if request.modest else None
        if cached is None:
            return self._options.short_tokens
        holders = {kv_slice.instance for kv_slice in cached.slices}
        return max(self._options.short_tokens, len(holders) * self._options.spt_tokens)

    def _may_piggyback(self, request: Request) -> bool:
        most = self._piggybacking.most
        return most > 0 and _left(request, self.round_plan.cached_decoding(request)) <= most

    def _start_suffix(
        self,
        request: Request,
        placed: Placed,
        soonest_ns: int | None,
        end_by_ns: int | None,
    ) -> bool:
        """Compute the suffix of a prompt where it ends first, if that is no later than elsewhere.

        The places are the holders of its cached prefix, as a high-priority step, and an iteration
        of the gang that will decode it.

        Args:
            soonest_ns: time until it would be computed elsewhere; None if that is impossible.
        """
        by_ns = None if end_by_ns is None else end_by_ns - self._decode_ns(request) - self._now_ns
        within_ns = min((ns for ns in (soonest_ns, by_ns) if ns is not None), default=None)
        cached = self.round_plan.cached(request)
        reuse = self.round_plan.reuses.suffix(request, cached, self._longest_suffix(request))
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
        self, request: Request, reuse: Reuse, placed: Placed, by_ns: int | None
    ) -> None:
        self.round_plan.reuses.take(reuse)
        for candidate, tokens in zip(reuse.candidates, reuse.sizes, strict=True):
            self._high_priority.bound(candidate, None if by_ns is None else self._now_ns + by_ns)
            self._prefill.start_high_priority(candidate, tokens, reuse.time_ns)
            self.long.changed(candidate)
        self.round_plan.add(reuse_plan(request, reuse, placed, high_priority=True))

    def _decode_ns(self, request: Request) -> int:
        """Predict the time to sample the whole answer."""
        gang = self._gang
        iteration_ns = gang.iteration_ns or self._cost.iteration_ns(
            1, gang.tp, gang.mastered + 1, request.prompt_tokens
        )
        return iteration_ns * request.output_tokens


def _left(request: Request, cached: Cached | None) -> int:
    """Return the number of prompt tokens that are not cached."""
    return request.prompt_tokens - (cached.tokens if cached else 0)
