"""What `scheduling: {policy: context_parallel, ...}` may say.

Predictions for a server that computes exact prompts around rings.

Who keeps what of the requests that a gang decodes: pass-Q decode (CP §3.6, Alg. 4).

Queries of a batch go to all instances that hold KV, which therefore should be as even as can be.
A prompt's KV is spread over the whole gang, or stays where it was computed on a gang that does
both. The KV of an answer's tokens goes to the instances in turns, while the tokens are drawn in one
place.

A pair of gangs, or an elastic one, in a round of the policy `context_parallel`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby

from csps.configurator.costs.cost_table import EXACT, BestOption, Costs
from csps.protocols.attention.plan import AUTO
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.placement import round_robin
from csps.protocols.core.topology import GroupShape
from csps.services.scheduling.deciding.decisions import PiggybackPlan, StartPlan
from csps.services.scheduling.deciding.scheduler_view import SchedulerView
from csps.services.scheduling.deciding.step_layout import rows_of
from csps.services.scheduling.events.commands import PlacedSlice
from csps.services.scheduling.events.events import InstanceId
from csps.services.scheduling.events.slices import level_sizes, own, tokens_on
from csps.services.scheduling.policies.rounds.decode_overlay import (
    DecodeOptions,
    Piggybacking,
    Placed,
)
from csps.services.scheduling.policies.rounds.prefill_overlay import (
    NOTHING,
    Candidate,
    HighPrioritySteps,
    PrefillOverlay,
    Reuse,
    Reuses,
    ShortPromptOptions,
    WholePrompts,
    plan_of,
    reuse_step,
)
from csps.services.scheduling.policies.tetris.cdsp import group_sizes
from csps.services.scheduling.policies.tetris.groups import PooledGroup
from csps.services.scheduling.state.state import Cached, Gang, GangPair, Request


@dataclass(frozen=True, kw_only=True)
class ContextParallelOptions(ShortPromptOptions):
    """How prompts share a gang."""

    least_saving: float = 0.1
    """Share of the time to the first token that a larger group has to save."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.least_saving < 1:
            raise ConfigError(f"option least_saving must be in [0, 1), not {self.least_saving}")


RING = "ring/exact"
"""The class of requests that take whichever variant of the ring is better for their prefill."""


class RingCosts(Costs):
    """Costs in which exact attention is a ring: a request that asks for no strategy of its own is
    of the class `RING`. One round uses it."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs.table)
        self._costs = costs

    def best(
        self, cls: str, shape: GroupShape, history: int, length: int, waited_ns: int = 0
    ) -> BestOption:
        """Return the best option; `costs` remembers cache misses."""
        asked = RING if cls in (EXACT, AUTO) else cls
        return self._costs.best(asked, shape, history, length, waited_ns)


class KvHolders:
    """A gang's slots as they will be once what a round has decided is under way.

    Args:
        gang: that decodes.
        max_batch: requests that it decodes at a time, landing ones included.
    """

    def __init__(self, gang: Gang, max_batch: int) -> None:
        instances = sorted(gang.instances, key=lambda it: it.order)
        self.free = {instance.id: instance.free_slots for instance in instances}
        """In topology order."""
        self._mastered = {instance.id: instance.mastered for instance in instances}
        self._left = max_batch - gang.mastered

    def has_room(self, tokens: int, taken: Mapping[InstanceId, int] | None = None) -> bool:
        """For one request more, with so many tokens wherever they find slots.

        Args:
            taken: slots of KV that it reads, which are free no longer then.
        """
        return self._left > 0 and tokens + sum((taken or {}).values()) <= sum(self.free.values())

    def spread(self, request: Request, kept: Cached | None) -> Placed:
        """The prompt evenly over all instances, as far as they have slots and what they have kept
        of it allows, which stays where it is."""
        if kept is None or any(self.free[it] < count for it, count in kept.taken.items()):
            kept = NOTHING
        room = {it: free - kept.taken.get(it, 0) for it, free in self.free.items()}
        held = tokens_on(kept.slices)
        sizes = levelled(
            request.prompt_tokens - kept.tokens,
            [held.get(it, 0) for it in room],
            list(room.values()),
        )
        slices, start = list(kept.slices), kept.tokens
        for instance, size in zip(self.free, sizes, strict=True):
            if size:
                slices.append(PlacedSlice(instance, start, start + size))
                start += size
                room[instance] -= size
        return self._with_answer(request, tuple(slices), room, kept.taken)

    def in_place(self, request: Request, cached: Cached, rows: tuple[PlacedSlice, ...]) -> Placed:
        """The prompt where it is computed, behind what is reused; the answer there as well, if it
        finds slots."""
        slices, new = (*cached.slices, *rows), tokens_on(rows)
        room = {
            it: free - new.get(it, 0) - cached.taken.get(it, 0) for it, free in self.free.items()
        }
        there = {it: room[it] for it in tokens_on(slices)}
        enough = sum(there.values()) >= request.output_tokens
        return self._with_answer(request, slices, there if enough else room, cached.taken)

    def take(self, placed: Placed) -> None:
        """Somebody was placed so."""
        slots = tokens_on(own((*placed.slices, *placed.answer)))
        for counts in (slots, placed.taken):
            for instance, count in counts.items():
                self.free[instance] -= count
        self._mastered[placed.master] += 1
        self._left -= 1

    def _with_answer(
        self,
        request: Request,
        slices: tuple[PlacedSlice, ...],
        room: Mapping[InstanceId, int],
        taken: Mapping[InstanceId, int],
    ) -> Placed:
        """Keepers of the answer, and the master: whoever of them draws for fewest.

        Args:
            room: slots for it, by keeper.
        """
        held = tokens_on(slices)
        # The first to keep a token is who has fewest, so that all have as many at any time.
        turns = sorted(room, key=lambda it: (held.get(it, 0), -room[it]))
        rooms = [(turn, room[turn]) for turn in turns if room[turn]]
        answer = tuple(interleaved(request.prompt_tokens, request.output_tokens, rooms))
        master = min(room, key=lambda it: (self._mastered[it], -room[it]))
        return Placed(slices, master, answer, taken)


def levelled(tokens: int, held: Sequence[int], room: Sequence[int]) -> list[int]:
    """So many more for each keeper that all have as many as one another, as far as slots and what
    they have already allow."""
    below = list(range(len(held)))
    """Those who do not have more than that already."""
    while True:
        total = tokens + sum(held[it] for it in below)
        level = level_sizes(total, [held[it] + room[it] for it in below])
        assert level is not None, "room was counted wrong"
        reached = [it for it, count in zip(below, level, strict=True) if count >= held[it]]
        if reached == below:
            more = [0] * len(held)
            for it, count in zip(below, level, strict=True):
                more[it] = count - held[it]
            return more
        below = reached


def interleaved(
    start: int, tokens: int, rooms: Sequence[tuple[InstanceId, int]]
) -> Iterator[PlacedSlice]:
    """Positions from `start` on, one to each keeper in turn. Whoever has no slot left drops out.

    Args:
        rooms: keepers in the order of their turns, with their slots, at least one; together enough.
    """
    while tokens:
        rounds = min(room for _, room in rooms)
        now = min(tokens, rounds * len(rooms))
        spans = round_robin(start, start + now, [it for it, _ in rooms])
        yield from (PlacedSlice.of(it, span) for it, span in spans.items() if span.length)
        rooms = [(it, room - rounds) for it, room in rooms if room > rounds]
        start, tokens = start + now, tokens - now


class GangStartResult(IntEnum):
    """What becomes of a request in a round; the least is the best."""

    STARTS = 0
    WAITS = 1
    """For instances to finish other steps."""
    BLOCKED = 2
    """There are not slots enough."""


class ContextParallelPair:
    """What starts on them, and what that leaves for others.

    Args:
        pair: two gangs, or twice the same one.
        view: of the round.
    """

    def __init__(
        self,
        pair: GangPair,
        view: SchedulerView,
        options: ContextParallelOptions,
        decode: DecodeOptions,
    ) -> None:
        self._view, self._options = view, options
        self._max_positions = pair.max_positions
        self._gang, self._decode_gang = pair.prefill.id, pair.decode.id
        self._is_one = self._gang == self._decode_gang
        self._cost = RingCosts(view.cost)
        self._prefill = PrefillOverlay(pair.prefill, view.now_ns, options)
        self._holders = KvHolders(pair.decode, decode.max_batch)
        self._piggybacking = Piggybacking(pair.decode, view.cost, decode)
        self._reuses = Reuses(self._prefill, self._cost)
        self._candidates = sorted(self._prefill.candidates, key=lambda it: it.order)
        """Server by server."""
        self._high_priority = HighPrioritySteps(self._prefill, self._cost, options, view.now_ns)
        self._plans: list[StartPlan | PiggybackPlan | WholePrompts] = []

    def plans(self) -> Iterator[StartPlan | PiggybackPlan]:
        """Everything that starts here."""
        for plan in self._plans:
            yield plan.plan() if isinstance(plan, WholePrompts) else plan

    def start_high_priority(self, request: Request) -> GangStartResult:
        """Compute a short prompt inside whatever runs on one instance, with others if they start in
        the same round, or its end on those that have kept its beginning, if it so ends no later
        than where it waits least."""
        if self._too_long(request):
            return GangStartResult.BLOCKED
        whole = self._least_wait(request)
        end = self._end(request, whole)
        sooner = end or whole
        if self._piggyback(request, sooner and sooner.high_priority_end_ns):
            return GangStartResult.STARTS
        if end is not None:
            self._start(request, end, high_priority=True)
        elif whole is not None:
            self._start_whole(request, whole)
        else:
            roomy = any(candidate.free >= request.prompt_tokens for candidate in self._candidates)
            waits = roomy and self._has_room(request, NOTHING)
            return GangStartResult.WAITS if waits else GangStartResult.BLOCKED
        return GangStartResult.STARTS

    def start_end(self, request: Request, *, at_head: bool) -> bool:
        """Whether a longer prompt starts so, all but a short end of which was kept.

        Args:
            in_turn: nobody before it in its line waits, so that it may also start as a long one.
        """
        if self._too_long(request):
            return False
        end = self._end(request, None)
        within_ns = end and end.high_priority_end_ns
        if end is None and at_head and self._lacks_little(request):
            work = self._long(request)
            within_ns = work and work.ends_ns - self._view.now_ns
        if self._piggyback(request, within_ns):
            return True
        if end is not None:
            self._start(request, end, high_priority=True)
        return end is not None

    def start_low_priority(self, request: Request) -> GangStartResult:
        """Compute a prompt, or what follows upon what was kept of it, on the group that will be
        done first; a larger group has to be worth it."""
        if self._too_long(request):
            return GangStartResult.BLOCKED
        work = self._long(request)
        if work is None:
            # With slots enough, only outstanding steps are in the way.
            roomy = sum(candidate.free for candidate in self._candidates) >= request.prompt_tokens
            waits = roomy and self._has_room(request, NOTHING)
            return GangStartResult.WAITS if waits else GangStartResult.BLOCKED
        self._start(request, work, high_priority=False)
        return GangStartResult.STARTS

    def _too_long(self, request: Request) -> bool:
        """Others may serve it, but not these."""
        return request.prompt_tokens + request.output_tokens > self._max_positions

    def _has_room(self, request: Request, cached: Cached) -> bool:
        """Slots where it is decoded."""
        tokens = request.prompt_tokens + request.output_tokens
        if not self._is_one:
            return self._holders.has_room(tokens)
        return self._holders.has_room(tokens - cached.tokens, cached.taken)

    # --- on which instances ---

    def _least_wait(self, request: Request) -> Reuse | None:
        """All of a short prompt on the instance where it waits least for other urgent ones; None
        if no instance may be interrupted for so long, or has slots for it, and a turn left or a
        step to which it can be added."""
        if not self._has_room(request, NOTHING):
            return None
        tokens = request.prompt_tokens
        choice = self._cost.best(request.cls, self._prefill.single, 0, tokens)
        candidates = [
            it for it in self._candidates if self._high_priority.admits(it, request, choice.time_ns)
        ]
        if not candidates:
            return None
        candidate = min(candidates, key=_wait)
        return Reuse(NOTHING, [candidate], [tokens], choice.strategy, choice.time_ns)

    def _end(self, request: Request, whole: Reuse | None) -> Reuse | None:
        """A short end of a prompt where its beginning is, if it is done no later than all of it."""
        cached = self._view.cached(request, self._gang)
        if cached is None or not self._has_room(request, cached):
            return None
        end = self._reuses.end(request, cached, self._options.short_tokens)
        if end is None or (
            whole is not None and whole.high_priority_end_ns < end.high_priority_end_ns
        ):
            return None
        return end

    def _lacks_little(self, request: Request) -> bool:
        """The gang that decodes has kept all of a prompt but an end that may ride."""
        if self._is_one or not self._piggybacking.most:
            return False
        kept = self._view.cached(request, self._decode_gang)
        return kept is not None and request.prompt_tokens - kept.tokens <= self._piggybacking.most

    def _piggyback(self, request: Request, within_ns: int | None) -> bool:
        """Have the gang that decodes compute what it lacks of a prompt, if that is done within this
        time from now on; None if nobody else can start it."""
        if not self._lacks_little(request) or not self._has_room(request, NOTHING):
            return False
        placed = self._holders.spread(request, self._view.cached(request, self._decode_gang))
        piggyback = self._piggybacking.piggyback(request, placed, within_ns)
        if piggyback is not None:
            self._holders.take(placed)
            self._plans.append(piggyback)
        return piggyback is not None

    def _long(self, request: Request) -> Reuse | None:
        """A prompt, or what follows upon what was kept of it, on the group that will be done
        first."""
        most = self._options.jobs_per_instance
        candidates = [
            candidate for candidate in self._candidates if candidate.low_priority_steps < most
        ]
        work = self._best(request, NOTHING, candidates)
        cached = self._view.cached(request, self._gang)
        if cached is not None:
            rest = self._best(request, cached, candidates)
            if rest and (work is None or rest.ends_ns <= work.ends_ns):
                work = rest
        return work

    def _best(self, request: Request, cached: Cached, candidates: list[Candidate]) -> Reuse | None:
        """The group that pays, of those with slots; all of them have the instances that hold what
        is reused."""
        held = {kv_slice.instance for kv_slice in cached.slices}
        numbers = [number for number, it in enumerate(candidates) if it.id in held]
        if not candidates or len(numbers) < len(held) or not self._has_room(request, cached):
            return None
        now_ns = self._view.now_ns
        sizes = sorted({*group_sizes(len(candidates)), len(held) or 1})
        by_server = groupby(candidates, key=lambda it: it.place.server_id)
        servers = [sum(1 for _ in same) for _, same in by_server]
        groups = PooledGroup.of(
            servers, sizes, [candidate.free_at_ns - now_ns for candidate in candidates], numbers
        )
        best: Reuse | None = None
        for index, size in enumerate(sizes):
            if size < len(held):
                continue
            group = [candidates[member] for member in groups.members(index)]
            work = self._reuses.on(request, cached, group)
            if work and (best is None or self._pays(work.ends_ns - now_ns, best.ends_ns - now_ns)):
                best = work
        return best

    def _pays(self, time_ns: int, smaller_ns: int) -> bool:
        """A larger group is worth what it takes from others."""
        return time_ns < smaller_ns * (1 - self._options.least_saving)

    # --- starting ---

    def _start(self, request: Request, work: Reuse, *, high_priority: bool) -> None:
        step = reuse_step(request, work, high_priority=high_priority)
        (rows,) = rows_of(step)
        placed = self._place(request, work.cached, rows)
        self._reuses.take(work)
        if high_priority:
            for candidate, tokens in zip(work.candidates, work.sizes, strict=True):
                self._prefill.start_high_priority(candidate, tokens, work.time_ns)
        else:
            self._prefill.start_low_priority(request, work.candidates, work.sizes, work.time_ns)
            self._high_priority.close(work.candidates)
        self._share_slots()
        self._plans.append(plan_of(request, step, placed))

    def _start_whole(self, request: Request, work: Reuse) -> None:
        """A short prompt, in a step with those before it if there is one."""
        (candidate,) = work.candidates
        placed = self._place(
            request, NOTHING, (PlacedSlice(candidate.id, 0, request.prompt_tokens),)
        )
        step = self._high_priority.add(candidate, request, placed, work.strategy, work.time_ns)
        if step is not None:
            self._plans.append(step)
        self._share_slots()

    def _place(self, request: Request, cached: Cached, rows: tuple[PlacedSlice, ...]) -> Placed:
        """Where the KV goes of a prompt that these compute."""
        if self._is_one:
            placed = self._holders.in_place(request, cached, rows)
        else:
            kept = self._view.cached(request, self._decode_gang)
            placed = self._holders.spread(request, kept)
        self._holders.take(placed)
        return placed

    def _share_slots(self) -> None:
        """On one gang, an answer takes slots of prompts."""
        for candidate in self._candidates if self._is_one else ():
            candidate.free = self._holders.free[candidate.id]


def _wait(candidate: Candidate) -> tuple[int, bool, int, int, int]:
    """How long a short prompt waits; the least is the best."""
    busy = candidate.low_priority_steps > 0
    return (
        candidate.high_priority_ns,
        busy,
        candidate.preempted_ns,
        candidate.free_at_ns,
        candidate.order,
    )
