"""A pair of gangs, or an elastic one, in a round of the policy `context_parallel`."""

from __future__ import annotations

from enum import Enum
from itertools import groupby

from csps.services.scheduling.decisions import DecodePlacement, StartPlan
from csps.services.scheduling.policies.context_parallel.keepers import Keepers
from csps.services.scheduling.policies.context_parallel.options import ContextParallelOptions
from csps.services.scheduling.policies.context_parallel.ring_costs import RingCosts
from csps.services.scheduling.policies.prefill_overlay import PrefillOverlay, Spot
from csps.services.scheduling.policies.reuse import NOTHING, Reuse, Reuses, reuse_step
from csps.services.scheduling.policies.tetris.cdsp import group_sizes
from csps.services.scheduling.policies.tetris.groups import Group
from csps.services.scheduling.step_shares import rows_of
from csps.services.scheduling.view import CachedView, PairView, RequestView, View


class NoPlan(Enum):
    """Why a request does not start."""

    WAITS = 0
    """For instances to finish other steps."""
    BLOCKED = 1
    """There are not slots enough."""


class Gangs:
    """What starts on them, and what that leaves for others.

    Args:
        pair: two gangs, or twice the same one.
        view: of the round.
        max_batch: requests that are decoded at a time.
    """

    def __init__(
        self, pair: PairView, view: View, options: ContextParallelOptions, max_batch: int
    ) -> None:
        self._view, self._options = view, options
        self._max_positions = pair.max_positions
        self._gang, self._decode_gang = pair.prefill.id, pair.decode.id
        self._is_one = self._gang == self._decode_gang
        self._cost = RingCosts(view.cost)
        self._prefill = PrefillOverlay(pair.prefill, view.now_ns, options.overtaking_ns)
        self._keepers = Keepers(pair.decode, max_batch)
        self._reuses = Reuses(self._prefill, self._cost)
        self._spots = sorted(self._prefill.spots, key=lambda it: it.order)
        """Server by server."""

    def start_urgent(self, request: RequestView) -> StartPlan | NoPlan:
        """Compute a short prompt inside whatever runs on one instance: the one that has kept its
        beginning, if it so ends no later than where it waits least."""
        if self._too_long(request):
            return NoPlan.BLOCKED
        whole = self._least_wait(request)
        work = self._kept_on_one(request, whole) or whole
        if work is None:
            roomy = any(it.free >= request.prompt_tokens for it in self._spots)
            return NoPlan.WAITS if roomy and self._has_room(request, NOTHING) else NoPlan.BLOCKED
        return self._start(request, work, urgent=True)

    def start_long(self, request: RequestView) -> StartPlan | NoPlan:
        """Compute a prompt, or what follows upon what was kept of it, on the group that will be
        done first; a larger group has to be worth it."""
        if self._too_long(request):
            return NoPlan.BLOCKED
        most = self._options.jobs_per_instance
        spots = [it for it in self._spots if it.long_steps < most]
        work = self._best(request, NOTHING, spots)
        cached = self._view.cached(request, self._gang)
        if cached is not None:
            rest = self._best(request, cached, spots)
            if rest and (work is None or rest.ends_ns <= work.ends_ns):
                work = rest
        if work is None:
            # With slots enough, only outstanding steps are in the way.
            roomy = sum(it.free for it in self._spots) >= request.prompt_tokens
            return NoPlan.WAITS if roomy and self._has_room(request, NOTHING) else NoPlan.BLOCKED
        return self._start(request, work, urgent=False)

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
        if no instance may be interrupted for so long, or has slots for it."""
        if not self._has_room(request, NOTHING):
            return None
        tokens = request.prompt_tokens
        choice = self._cost.best(request.cls, self._prefill.single, 0, tokens)
        spots = [it for it in self._spots if self._admits(it, tokens, choice.time_ns)]
        if not spots:
            return None
        spot = min(spots, key=_wait)
        return Reuse(NOTHING, [spot], [tokens], choice.strategy, choice.time_ns)

    def _kept_on_one(self, request: RequestView, whole: Reuse | None) -> Reuse | None:
        """The rest of a short prompt where its beginning is, if that is one instance."""
        cached = self._view.cached(request, self._gang)
        if cached is None or not self._has_room(request, cached):
            return None
        spots = self._reuses.holders(cached)
        rest = self._reuses.on(request, cached, spots) if len(spots) == 1 else None
        if rest is None or not self._admits(spots[0], sum(rest.shares), rest.time_ns):
            return None
        sooner = whole is None or _urgent_end_ns(rest) <= _urgent_end_ns(whole)
        return rest if sooner else None

    def _admits(self, spot: Spot, tokens: int, time_ns: int) -> bool:
        """There are slots, and the long steps of the instance may be overtaken."""
        if spot.free < tokens:
            return False
        spare_ns = self._prefill.spare_ns(spot)
        return spare_ns is None or spare_ns >= time_ns

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

    def _start(self, request: RequestView, work: Reuse, *, urgent: bool) -> StartPlan:
        cached = work.cached
        step = reuse_step(request, work, urgent=urgent)
        if self._is_one:
            (rows,) = rows_of(step)
            placed = self._keepers.in_place(request, cached, rows)
            self._keepers.take(placed)
        else:
            kept = self._view.cached(request, self._decode_gang)
            placed = self._keepers.spread(request, kept)
            self._keepers.take(placed)
        self._reuses.take(work)
        if urgent:
            self._prefill.start_urgent(work.spots[0], work.shares[0], work.time_ns)
        else:
            self._prefill.start_long(request, work.spots, work.shares, work.time_ns)
        if self._is_one:
            for spot in self._spots:  # an answer takes slots of prompts
                spot.free = self._keepers.free[spot.id]
        decode = DecodePlacement(request.id, placed.shares, placed.master, placed.answer)
        return StartPlan(steps=(step,), decode=(decode,))


def _wait(spot: Spot) -> tuple[int, bool, int, int, int]:
    """How long a short prompt waits; the least is the best."""
    busy = spot.long_steps > 0
    return spot.urgent_ns, busy, spot.overtaken_ns, spot.free_at_ns, spot.order


def _urgent_end_ns(work: Reuse) -> int:
    return work.spots[0].urgent_ns + work.time_ns
