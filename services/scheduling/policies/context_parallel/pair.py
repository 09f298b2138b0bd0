"""A pair of gangs, or an elastic one, in a round of the policy `context_parallel`.

`ContextParallelPair` starts requests. `RingCosts` predicts exact attention around rings.

`KvHolders` places KV for pass-Q decode (CP §3.6, Alg. 4). The queries of a batch go to all KV
holders, so their KV should be as even as possible. A prompt's KV is spread over the whole decode
gang, or stays where it was computed on an elastic gang. The KV of generated tokens goes to the
holders in rotation, while one instance samples all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from operator import attrgetter

from csps.configurator.costs.cost_table import EXACT, BestOption, Costs
from csps.protocols.attention.plan import AUTO
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.placement import KvSlice, level_sizes, own, round_robin, tokens_on
from csps.protocols.core.topology import GroupShape
from csps.services.scheduling.deciding.decisions import PiggybackPlan, SchedulerView, StartPlan
from csps.services.scheduling.deciding.step_layout import rows_of
from csps.services.scheduling.events.events import InstanceId
from csps.services.scheduling.policies.rounds.decode_overlay import (
    DecodeOptions,
    Piggybacking,
    Placed,
    Spare,
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
    """Options of the policy `context_parallel`."""

    least_saving: float = 0.1
    """Share of the time to the first token that a larger group has to save."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.least_saving < 1:
            raise ConfigError(f"option least_saving must be in [0, 1), not {self.least_saving}")


SHORT_TURN = 16
"""Times that a cached prefix is at least as long as a turn that is not spread. An instance then has
at most an eighth of a conversation more than its even part."""
RING = "ring/exact"
"""Class of requests whose prefill uses the faster of the two rings."""


class RingCosts(Costs):
    """Costs of one round in which exact attention is a ring.

    A request without a strategy of its own has the class `RING`.
    """

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
    """A decode gang's slots as they will be after the decisions of a round.

    Args:
        gang: the gang that decodes.
        max_batch: most requests that it decodes, including those still receiving KV.
        shared: whether several tenants share the gang.
    """

    def __init__(self, gang: Gang, max_batch: int, *, shared: bool = False) -> None:
        instances = sorted(gang.instances, key=lambda instance: instance.order)
        self.free = {instance.id: instance.free_slots for instance in instances}
        """Free slots of each instance, in topology order."""
        self._mastered = {instance.id: instance.mastered for instance in instances}
        self._more = {instance.id: instance.more_masters for instance in instances}
        """Sequences that each instance can still be the master of."""
        self._left, self._capacity = max_batch - gang.mastered, gang.capacity
        self._spare = Spare.of(gang, max_batch, shared=shared)

    def has_room(
        self,
        tokens: int,
        taken: Mapping[InstanceId, int] | None = None,
        *,
        modest: bool = False,
    ) -> bool:
        """Return True if the gang has slots for another request, on any instances.

        Args:
            taken: slots of its cached prefix, which are no longer free then.
            modest: whether the request's tenant is modest.
        """
        spare = Spare() if modest else self._spare
        tokens += sum((taken or {}).values())
        if not any(more > 0 for more in self._more.values()):
            return False
        free = sum(self.free.values())
        return spare.leaves(tokens, batch=self._left, free=free, capacity=self._capacity)

    def spread(self, request: Request, cached: Cached | None) -> Placed:
        """Spread a prompt evenly over all instances, as far as slots and the cached prefix allow.

        The cached prefix stays in place. A short turn of a conversation is not spread: if each
        were, a long conversation would have a slice for each turn and instance.
        """
        if cached is None or any(
            self.free[instance] < count for instance, count in cached.taken.items()
        ):
            cached = NOTHING
        room = {
            instance: free - cached.taken.get(instance, 0) for instance, free in self.free.items()
        }
        resident = tokens_on(cached.slices)
        if (continued := self._continued(request, cached, resident, room)) is not None:
            return continued
        sizes = levelled(
            request.prompt_tokens - cached.tokens,
            [resident.get(instance, 0) for instance in room],
            list(room.values()),
        )
        slices, start = list(cached.slices), cached.tokens
        for instance, size in zip(self.free, sizes, strict=True):
            if size:
                slices.append(KvSlice(instance, start, start + size))
                start += size
                room[instance] -= size
        return self._with_answer(request, tuple(slices), room, cached.taken)

    def _continued(
        self,
        request: Request,
        cached: Cached,
        resident: Mapping[InstanceId, int],
        room: dict[InstanceId, int],
    ) -> Placed | None:
        """Place a short rest and the first of its answer on one instance; None if it is long or has
        no slots there.

        This is where the prefix ends, until it has too many tokens.
        """
        few, start = cached.tokens // SHORT_TURN, request.prompt_tokens
        tokens = start - cached.tokens
        if tokens > few:
            return None
        last = max(cached.slices, key=attrgetter("stop")).instance
        if resident[last] > cached.tokens // len(room) + few:
            last = min(room, key=lambda instance: (resident.get(instance, 0), -room[instance]))
        first = min(request.output_tokens, few - tokens)
        if room[last] < tokens + first:
            return None
        room[last] -= tokens + first
        slices = (*cached.slices, KvSlice(last, cached.tokens, start))
        return self._with_answer(
            request, slices, room, cached.taken, (KvSlice(last, start, start + first),)
        )

    def in_place(self, request: Request, cached: Cached, rows: tuple[KvSlice, ...]) -> Placed:
        """Place a prompt where it is computed, and its answer there as well if it finds slots."""
        slices, new = (*cached.slices, *rows), tokens_on(rows)
        room = {
            instance: free - new.get(instance, 0) - cached.taken.get(instance, 0)
            for instance, free in self.free.items()
        }
        there = {instance: room[instance] for instance in tokens_on(slices)}
        enough = sum(there.values()) >= request.output_tokens
        return self._with_answer(request, slices, there if enough else room, cached.taken)

    def take(self, placed: Placed) -> None:
        """Count the slots of a placement as used."""
        slots = tokens_on(own((*placed.slices, *placed.answer)))
        for counts in (slots, placed.taken):
            for instance, count in counts.items():
                self.free[instance] -= count
        self._mastered[placed.master] += 1
        self._more[placed.master] -= 1
        self._left -= 1

    def _with_answer(
        self,
        request: Request,
        slices: tuple[KvSlice, ...],
        room: Mapping[InstanceId, int],
        taken: Mapping[InstanceId, int],
        first: tuple[KvSlice, ...] = (),
    ) -> Placed:
        """Choose the holders of the answer, and the master: the holder that samples the fewest.

        Args:
            room: free slots of each holder.
            first: placement of the answer's first tokens, if they have one.
        """
        resident, placed = tokens_on((*slices, *first)), sum(part.tokens for part in first)
        # The holder with fewest tokens gets the first one, so that all are even at any time.
        rotation = sorted(room, key=lambda instance: (resident.get(instance, 0), -room[instance]))
        rooms = [(instance, room[instance]) for instance in rotation if room[instance]]
        rest = interleaved(request.prompt_tokens + placed, request.output_tokens - placed, rooms)
        masters = [instance for instance in room if self._more[instance] > 0]
        master = min(masters, key=lambda instance: (self._mastered[instance], -room[instance]))
        return Placed(slices, master, (*(part for part in first if part.tokens), *rest), taken)


def levelled(tokens: int, resident: Sequence[int], room: Sequence[int]) -> list[int]:
    """Return new tokens for each holder that make their totals equal.

    Free slots and the tokens already resident limit this.
    """
    holders = list(range(len(resident)))
    # Leave out holders that already exceed the level of the others, until none does.
    while True:
        total = tokens + sum(resident[holder] for holder in holders)
        level = level_sizes(total, [resident[holder] + room[holder] for holder in holders])
        assert level is not None, f"{tokens} tokens exceed the free slots {list(room)}"
        below = [
            holder
            for holder, count in zip(holders, level, strict=True)
            if count >= resident[holder]
        ]
        if below == holders:
            more = [0] * len(resident)
            for holder, count in zip(holders, level, strict=True):
                more[holder] = count - resident[holder]
            return more
        holders = below


def interleaved(
    start: int, tokens: int, rooms: Sequence[tuple[InstanceId, int]]
) -> Iterator[KvSlice]:
    """Yield slices that deal positions from `start` on to the holders in rotation.

    A holder without free slots drops out.

    Args:
        rooms: holders in the order of the rotation, with their free slots, at least one each;
            together enough.
    """
    while tokens:
        rounds = min(room for _, room in rooms)
        now = min(tokens, rounds * len(rooms))
        spans = round_robin(start, start + now, [holder for holder, _ in rooms])
        yield from (KvSlice.of(holder, span) for holder, span in spans.items() if span.length)
        rooms = [(holder, room - rounds) for holder, room in rooms if room > rounds]
        start, tokens = start + now, tokens - now


class GangStartResult(IntEnum):
    """Result of trying to start a request; the least is the best."""

    STARTS = 0
    WAITS = 1
    """The request waits for other steps to finish."""
    BLOCKED = 2
    """The request finds too few slots."""


class ContextParallelPair:
    """The starts on a pair of gangs in a round, and the rest of their slots.

    Args:
        pair: two gangs, or twice the same elastic one.
        view: the scheduler's state in this round.
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
        self._holders = KvHolders(pair.decode, decode.max_batch, shared=view.shared)
        self._piggybacking = Piggybacking(pair.decode, view.cost, decode)
        self._reuses = Reuses(self._prefill, self._cost)
        self._candidates = sorted(self._prefill.candidates, key=lambda candidate: candidate.order)
        """Instances server by server."""
        self._high_priority = HighPrioritySteps(self._prefill, self._cost, options, view.now_ns)
        self._plans: list[StartPlan | PiggybackPlan | WholePrompts] = []

    def plans(self) -> Iterator[StartPlan | PiggybackPlan]:
        """Yield the plans of all requests that start."""
        for plan in self._plans:
            yield plan.plan() if isinstance(plan, WholePrompts) else plan

    def start_high_priority(self, request: Request) -> GangStartResult:
        """Start a short prompt as a high-priority step on one instance, where it waits least.

        If its suffix is computed no later on the holders of its cached prefix, it starts there.
        """
        if self._too_long(request):
            return GangStartResult.BLOCKED
        whole = self._least_wait(request)
        suffix = self._suffix(request, whole)
        sooner = suffix or whole
        if self._piggyback(request, sooner and sooner.high_priority_end_ns):
            return GangStartResult.STARTS
        if suffix is not None:
            self._start(request, suffix, high_priority=True)
        elif whole is not None:
            self._start_whole(request, whole)
        else:
            roomy = any(candidate.free >= request.prompt_tokens for candidate in self._candidates)
            waits = roomy and self._has_room(request, NOTHING)
            return GangStartResult.WAITS if waits else GangStartResult.BLOCKED
        return GangStartResult.STARTS

    def start_suffix(self, request: Request, *, at_head: bool) -> bool:
        """Start a longer prompt if only a short suffix is not cached, or inside what runs if its
        tenant is modest; return True if it starts.

        Args:
            at_head: True if no older low-priority prompt waits, so that this one may also start as
                a low-priority step.
        """
        if self._too_long(request):
            return False
        suffix = self._suffix(request, None)
        within_ns = suffix and suffix.high_priority_end_ns
        if suffix is None and at_head and self._lacks_little(request):
            work = self._low_priority(request)
            within_ns = work and work.ends_ns - self._view.now_ns
        if self._piggyback(request, within_ns):
            return True
        preempting = suffix or (self._preempting(request, at_head) if request.modest else None)
        if preempting is not None:
            self._start(request, preempting, high_priority=True)
        return preempting is not None

    def start_low_priority(self, request: Request) -> GangStartResult:
        """Start a prompt, or the rest of it, on the group that ends first."""
        if self._too_long(request):
            return GangStartResult.BLOCKED
        work = self._low_priority(request)
        if work is None:
            # With enough free slots, the prompt only waits for outstanding steps.
            roomy = sum(candidate.free for candidate in self._candidates) >= request.prompt_tokens
            waits = roomy and self._has_room(request, NOTHING)
            return GangStartResult.WAITS if waits else GangStartResult.BLOCKED
        self._start(request, work, high_priority=False)
        return GangStartResult.STARTS

    def _too_long(self, request: Request) -> bool:
        """Return True if the model of this pair has too few positions."""
        return request.prompt_tokens + request.output_tokens > self._max_positions

    def _has_room(self, request: Request, cached: Cached) -> bool:
        """Return True if the decode gang has slots for a request."""
        tokens = request.prompt_tokens + request.output_tokens
        modest = request.modest
        if not self._is_one:
            return self._holders.has_room(tokens, modest=modest)
        return self._holders.has_room(tokens - cached.tokens, cached.taken, modest=modest)

    # --- groups ----------------------------------------------------------------------------------

    def _least_wait(self, request: Request) -> Reuse | None:
        """Compute a short prompt on the instance where it waits least; None if none admits it."""
        if not self._has_room(request, NOTHING):
            return None
        tokens = request.prompt_tokens
        choice = self._cost.best(request.cls, self._prefill.single, 0, tokens)
        candidates = [
            candidate
            for candidate in self._candidates
            if self._high_priority.admits(candidate, request, choice.time_ns)
        ]
        if not candidates:
            return None
        candidate = min(candidates, key=_wait)
        return Reuse(NOTHING, [candidate], [tokens], choice.strategy, choice.time_ns)

    def _suffix(self, request: Request, whole: Reuse | None) -> Reuse | None:
        """Compute a short suffix on the holders of its prefix, if no later than `whole`."""
        cached = self._view.cached(request, self._gang)
        if cached is None or not self._has_room(request, cached):
            return None
        suffix = self._reuses.suffix(request, cached, self._options.short_tokens)
        if suffix is None or (
            whole is not None and whole.high_priority_end_ns < suffix.high_priority_end_ns
        ):
            return None
        return suffix

    def _lacks_little(self, request: Request) -> bool:
        """Return True if the decode gang lacks only a suffix that may be piggybacked."""
        if self._is_one or not self._piggybacking.most:
            return False
        cached = self._view.cached(request, self._decode_gang)
        return (
            cached is not None and request.prompt_tokens - cached.tokens <= self._piggybacking.most
        )

    def _piggyback(self, request: Request, within_ns: int | None) -> bool:
        """Let the decode gang compute the suffix of a prompt; return True if it does.

        Args:
            within_ns: time from now on within which that must end; None: any, since the prompt
                starts nowhere else.
        """
        if not self._lacks_little(request) or not self._has_room(request, NOTHING):
            return False
        placed = self._holders.spread(request, self._view.cached(request, self._decode_gang))
        piggyback = self._piggybacking.piggyback(request, placed, within_ns)
        if piggyback is not None:
            self._holders.take(placed)
            self._plans.append(piggyback)
        return piggyback is not None

    def _low_priority(self, request: Request) -> Reuse | None:
        """Compute a prompt, or the rest of it, on the group that ends first; None without one."""
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

    def _preempting(self, request: Request, at_head: bool) -> Reuse | None:
        """Compute a prompt of a modest tenant, or the rest of it, inside whatever runs; None if no
        group may be preempted, or if nothing runs and it is at the head of its queue."""
        most = self._options.jobs_per_instance
        candidates = [
            candidate for candidate in self._candidates if candidate.high_priority_steps < most
        ]
        cached = self._view.cached(request, self._gang)
        ways = [
            self._best(request, start, candidates, high_priority=True)
            for start in (cached, NOTHING)
            if start is not None
        ]
        works = [work for work in ways if work is not None and self._reuses.may_preempt(work)]
        work = min(works, key=lambda work: work.high_priority_end_ns, default=None)
        if work is None or (
            at_head and not any(candidate.low_priority_steps for candidate in work.candidates)
        ):
            return None
        return work

    def _best(
        self,
        request: Request,
        cached: Cached,
        candidates: list[Candidate],
        *,
        high_priority: bool = False,
    ) -> Reuse | None:
        """Compute the rest of a prompt on the best group that contains the holders of its prefix.

        A larger group must pay off (`least_saving`). None without enough slots.

        Args:
            high_priority: whether it waits for high-priority steps only.
        """
        holders = {kv_slice.instance for kv_slice in cached.slices}
        indices = [index for index, candidate in enumerate(candidates) if candidate.id in holders]
        if not candidates or len(indices) < len(holders) or not self._has_room(request, cached):
            return None
        now_ns = self._view.now_ns
        sizes = sorted({*group_sizes(len(candidates)), len(holders) or 1})
        by_server = groupby(candidates, key=lambda candidate: candidate.place.server_id)
        servers = [sum(1 for _ in same) for _, same in by_server]
        waits_ns = [
            candidate.high_priority_ns if high_priority else candidate.free_at_ns - now_ns
            for candidate in candidates
        ]
        groups = PooledGroup.of(servers, sizes, waits_ns, indices)
        best: Reuse | None = None
        best_ns = 0
        for index, size in enumerate(sizes):
            if size < len(holders):
                continue
            group = [candidates[member] for member in groups.members(index)]
            work = self._reuses.on(request, cached, group)
            if work is None:
                continue
            ends_ns = work.high_priority_end_ns if high_priority else work.ends_ns - now_ns
            if best is None or self._pays(ends_ns, best_ns):
                best, best_ns = work, ends_ns
        return best

    def _pays(self, time_ns: int, smaller_ns: int) -> bool:
        """Return True if a larger group saves enough of the smaller one's time."""
        return time_ns < smaller_ns * (1 - self._options.least_saving)

    # --- starts ----------------------------------------------------------------------------------

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
        """Start a short prompt, in one step with earlier ones of this round if possible."""
        (candidate,) = work.candidates
        placed = self._place(request, NOTHING, (KvSlice(candidate.id, 0, request.prompt_tokens),))
        step = self._high_priority.add(candidate, request, placed, work.strategy, work.time_ns)
        if step is not None:
            self._plans.append(step)
        self._share_slots()

    def _place(self, request: Request, cached: Cached, rows: tuple[KvSlice, ...]) -> Placed:
        """Place a request for decoding, and take its slots."""
        if self._is_one:
            placed = self._holders.in_place(request, cached, rows)
        else:
            cached_decoding = self._view.cached(request, self._decode_gang)
            placed = self._holders.spread(request, cached_decoding)
        self._holders.take(placed)
        return placed

    def _share_slots(self) -> None:
        """Update the prefill slots of an elastic gang, where answers take slots of prompts."""
        for candidate in self._candidates if self._is_one else ():
            candidate.free = self._holders.free[candidate.id]


def _wait(candidate: Candidate) -> tuple[int, bool, int, int, int]:
    """Order instances by how long a short prompt waits there."""
    busy = candidate.low_priority_steps > 0
    return (
        candidate.high_priority_ns,
        busy,
        candidate.preempted_ns,
        candidate.free_at_ns,
        candidate.order,
    )
