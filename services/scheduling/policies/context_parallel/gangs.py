"""A pair of gangs, or an elastic one, in a round of the policy `context_parallel`."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from itertools import groupby

from csps.services.scheduling.commands import Share
from csps.services.scheduling.decisions import Ride, StartPlan
from csps.services.scheduling.policies.context_parallel.keepers import Keepers
from csps.services.scheduling.policies.context_parallel.options import ContextParallelOptions
from csps.services.scheduling.policies.context_parallel.ring_costs import RingCosts
from csps.services.scheduling.policies.decode_overlay import DecodeOptions, Placed
from csps.services.scheduling.policies.decode_rides import DecodeRides
from csps.services.scheduling.policies.prefill_overlay import PrefillOverlay, Spot
from csps.services.scheduling.policies.reuse import (
    NOTHING,
    Reuse,
    Reuses,
    plan_of,
    reuse_step,
)
from csps.services.scheduling.policies.tetris.cdsp import group_sizes
from csps.services.scheduling.policies.tetris.groups import Group
from csps.services.scheduling.policies.whole_prompts import UrgentSteps, WholePrompts
from csps.services.scheduling.step_shares import rows_of
from csps.services.scheduling.view import CachedView, PairView, RequestView, View


class Verdict(IntEnum):
    """What becomes of a request in a round; the least is the best."""

    STARTS = 0
    WAITS = 1
    """For instances to finish other steps."""
    BLOCKED = 2
    """There are not slots enough."""


class Gangs:
    """What starts on them, and what that leaves for others.

    Args:
        pair: two gangs, or twice the same one.
        view: of the round.
    """

    def __init__(
        self, pair: PairView, view: View, options: ContextParallelOptions, decode: DecodeOptions
    ) -> None:
        self._view, self._options = view, options
        self._max_positions = pair.max_positions
        self._gang, self._decode_gang = pair.prefill.id, pair.decode.id
        self._is_one = self._gang == self._decode_gang
        self._cost = RingCosts(view.cost)
        self._prefill = PrefillOverlay(pair.prefill, view.now_ns, options)
        self._keepers = Keepers(pair.decode, decode.max_batch)
        self._rides = DecodeRides(pair.decode, view.cost, decode)
        self._reuses = Reuses(self._prefill, self._cost)
        self._spots = sorted(self._prefill.spots, key=lambda it: it.order)
        """Server by server."""
        self._urgent = UrgentSteps(self._prefill, self._cost, options, view.now_ns)
        self._plans: list[StartPlan | Ride | WholePrompts] = []

    def plans(self) -> Iterator[StartPlan | Ride]:
        """Everything that starts here."""
        for it in self._plans:
            yield it.plan() if isinstance(it, WholePrompts) else it

    def start_urgent(self, request: RequestView) -> Verdict:
        """Compute a short prompt inside whatever runs on one instance, with others if they start in
        the same round, or its end on those that have kept its beginning, if it so ends no later
        than where it waits least."""
        if self._too_long(request):
            return Verdict.BLOCKED
        whole = self._least_wait(request)
        end = self._end(request, whole)
        sooner = end or whole
        if self._ride(request, sooner and sooner.urgent_end_ns):
            return Verdict.STARTS
        if end is not None:
            self._start(request, end, urgent=True)
        elif whole is not None:
            self._start_whole(request, whole)
        else:
            roomy = any(it.free >= request.prompt_tokens for it in self._spots)
            waits = roomy and self._has_room(request, NOTHING)
            return Verdict.WAITS if waits else Verdict.BLOCKED
        return Verdict.STARTS

    def start_end(self, request: RequestView, *, in_turn: bool) -> bool:
        """Whether a longer prompt starts so, all but a short end of which was kept.

        Args:
            in_turn: nobody before it in its line waits, so that it may also start as a long one.
        """
        if self._too_long(request):
            return False
        end = self._end(request, None)
        within_ns = end and end.urgent_end_ns
        if end is None and in_turn and self._lacks_little(request):
            work = self._long(request)
            within_ns = work and work.ends_ns - self._view.now_ns
        if self._ride(request, within_ns):
            return True
        if end is not None:
            self._start(request, end, urgent=True)
        return end is not None

    def start_long(self, request: RequestView) -> Verdict:
        """Compute a prompt, or what follows upon what was kept of it, on the group that will be
        done first; a larger group has to be worth it."""
        if self._too_long(request):
            return Verdict.BLOCKED
        work = self._long(request)
        if work is None:
            # With slots enough, only outstanding steps are in the way.
            roomy = sum(it.free for it in self._spots) >= request.prompt_tokens
            waits = roomy and self._has_room(request, NOTHING)
            return Verdict.WAITS if waits else Verdict.BLOCKED
        self._start(request, work, urgent=False)
        return Verdict.STARTS

    def _too_long(self, request: RequestView) -> bool:
        """Others may serve it, but not these."""
        return request.prompt_tokens + request.output_tokens > self._max_positions

    def _has_room(self, request: RequestView, cached: CachedView) -> bool:
        """Slots where it is decoded."""
        tokens = request.prompt_tokens + request.output_tokens
        if not self._is_one:
            return self._keepers.has_room(tokens)
        return self._keepers.has_room(tokens - cached.tokens, cached.taken)

    # --- on which instances ---

    def _least_wait(self, request: RequestView) -> Reuse | None:
        """All of a short prompt on the instance where it waits least for other urgent ones; None
        if no instance may be interrupted for so long, or has slots for it, and a turn left or a
        step to which it can be added."""
        if not self._has_room(request, NOTHING):
            return None
        tokens = request.prompt_tokens
        choice = self._cost.best(request.cls, self._prefill.single, 0, tokens)
        spots = [it for it in self._spots if self._urgent.admits(it, request, choice.time_ns)]
        if not spots:
            return None
        spot = min(spots, key=_wait)
        return Reuse(NOTHING, [spot], [tokens], choice.strategy, choice.time_ns)

    def _end(self, request: RequestView, whole: Reuse | None) -> Reuse | None:
        """A short end of a prompt where its beginning is, if it is done no later than all of it."""
        cached = self._view.cached(request, self._gang)
        if cached is None or not self._has_room(request, cached):
            return None
        end = self._reuses.end(request, cached, self._options.short_tokens)
        if end is None or (whole is not None and whole.urgent_end_ns < end.urgent_end_ns):
            return None
        return end

    def _lacks_little(self, request: RequestView) -> bool:
        """The gang that decodes has kept all of a prompt but an end that may ride."""
        if self._is_one or not self._rides.most:
            return False
        kept = self._view.cached(request, self._decode_gang)
        return kept is not None and request.prompt_tokens - kept.tokens <= self._rides.most

    def _ride(self, request: RequestView, within_ns: int | None) -> bool:
        """Have the gang that decodes compute what it lacks of a prompt, if that is done within this
        time from now on; None if nobody else can start it."""
        if not self._lacks_little(request) or not self._has_room(request, NOTHING):
            return False
        placed = self._keepers.spread(request, self._view.cached(request, self._decode_gang))
        ride = self._rides.ride(request, placed, within_ns)
        if ride is not None:
            self._keepers.take(placed)
            self._plans.append(ride)
        return ride is not None

    def _long(self, request: RequestView) -> Reuse | None:
        """A prompt, or what follows upon what was kept of it, on the group that will be done
        first."""
        most = self._options.jobs_per_instance
        spots = [it for it in self._spots if it.long_steps < most]
        work = self._best(request, NOTHING, spots)
        cached = self._view.cached(request, self._gang)
        if cached is not None:
            rest = self._best(request, cached, spots)
            if rest and (work is None or rest.ends_ns <= work.ends_ns):
                work = rest
        return work

    def _best(self, request: RequestView, cached: CachedView, spots: list[Spot]) -> Reuse | None:
        """The group that pays, of those with slots; all of them have the instances that hold what
        is reused."""
        held = {it.instance for it in cached.shares}
        numbers = [number for number, it in enumerate(spots) if it.id in held]
        if not spots or len(numbers) < len(held) or not self._has_room(request, cached):
            return None
        now_ns = self._view.now_ns
        sizes = sorted({*group_sizes(len(spots)), len(held) or 1})
        by_server = groupby(spots, key=lambda it: it.place.server_id)
        servers = [sum(1 for _ in same) for _, same in by_server]
        groups = Group.of(servers, sizes, [it.free_at_ns - now_ns for it in spots], numbers)
        best: Reuse | None = None
        for index, size in enumerate(sizes):
            if size < len(held):
                continue
            group = [spots[it] for it in groups.members(index)]
            work = self._reuses.on(request, cached, group)
            if work and (best is None or self._pays(work.ends_ns - now_ns, best.ends_ns - now_ns)):
                best = work
        return best

    def _pays(self, time_ns: int, smaller_ns: int) -> bool:
        """A larger group is worth what it takes from others."""
        return time_ns < smaller_ns * (1 - self._options.least_saving)

    # --- starting ---

    def _start(self, request: RequestView, work: Reuse, *, urgent: bool) -> None:
        step = reuse_step(request, work, urgent=urgent)
        (rows,) = rows_of(step)
        placed = self._place(request, work.cached, rows)
        self._reuses.take(work)
        if urgent:
            for spot, tokens in zip(work.spots, work.shares, strict=True):
                self._prefill.start_urgent(spot, tokens, work.time_ns)
        else:
            self._prefill.start_long(request, work.spots, work.shares, work.time_ns)
            self._urgent.close(work.spots)
        self._share_slots()
        self._plans.append(plan_of(request, step, placed))

    def _start_whole(self, request: RequestView, work: Reuse) -> None:
        """A short prompt, in a step with those before it if there is one."""
        (spot,) = work.spots
        placed = self._place(request, NOTHING, (Share(spot.id, 0, request.prompt_tokens),))
        step = self._urgent.add(spot, request, placed, work.strategy, work.time_ns)
        if step is not None:
            self._plans.append(step)
        self._share_slots()

    def _place(self, request: RequestView, cached: CachedView, rows: tuple[Share, ...]) -> Placed:
        """Where the KV goes of a prompt that these compute."""
        if self._is_one:
            placed = self._keepers.in_place(request, cached, rows)
        else:
            kept = self._view.cached(request, self._decode_gang)
            placed = self._keepers.spread(request, kept)
        self._keepers.take(placed)
        return placed

    def _share_slots(self) -> None:
        """On one gang, an answer takes slots of prompts."""
        for spot in self._spots if self._is_one else ():
            spot.free = self._keepers.free[spot.id]


def _wait(spot: Spot) -> tuple[int, bool, int, int, int]:
    """How long a short prompt waits; the least is the best."""
    busy = spot.long_steps > 0
    return spot.urgent_ns, busy, spot.overtaken_ns, spot.free_at_ns, spot.order
