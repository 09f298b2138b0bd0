"""Going on from what a gang has kept of a prompt, instead of computing all of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from csps.services.scheduling.commands import Share
from csps.services.scheduling.decisions import (
    DecodePlacement,
    PlannedPiece,
    PlannedStep,
    StartPlan,
)
from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.policies.decode_overlay import Placed
from csps.services.scheduling.policies.prefill_overlay import PrefillOverlay, Spot
from csps.services.scheduling.ring_rows import in_zigzag
from csps.services.scheduling.shares import bounds_of, level_shares
from csps.services.scheduling.view import CachedView, CostView, RequestView


class Reuse(NamedTuple):
    """A step that computes the rest of a prompt."""

    cached: CachedView
    spots: list[Spot]
    """In topology order: all that hold what is reused, and others."""
    shares: list[int]
    """Tokens of the rest; none for who only holds."""
    strategy: str
    time_ns: int

    @property
    def ends_ns(self) -> int:
        """When it will have been computed."""
        return max(it.free_at_ns for it in self.spots) + self.time_ns

    @property
    def urgent_end_ns(self) -> int:
        """When an urgent one would have been computed, from now on."""
        return max(it.urgent_ns for it in self.spots) + self.time_ns


class _Nothing(NamedTuple):
    tokens: int = 0
    shares: tuple[Share, ...] = ()
    taken: Mapping[InstanceId, int] = MappingProxyType({})


NOTHING: CachedView = _Nothing()
"""Of a prompt that is computed whole."""


class Reuses:
    """What a round could reuse of a gang."""

    def __init__(self, overlay: PrefillOverlay, cost: CostView) -> None:
        self._overlay, self._cost = overlay, cost
        self._spots: dict[InstanceId, Spot] = {it.id: it for it in overlay.spots}

    def holders(self, cached: CachedView) -> list[Spot]:
        """Who has to be in the group."""
        ids = dict.fromkeys(it.instance for it in cached.shares)
        return sorted((self._spots[it] for it in ids), key=lambda it: it.order)

    def on(self, request: RequestView, cached: CachedView, spots: list[Spot]) -> Reuse | None:
        """The rest of a prompt on a group; None if it has no room."""
        left = request.prompt_tokens - cached.tokens
        limits = [it.free - cached.taken.get(it.id, 0) for it in spots]
        shares = level_shares(left, limits) if min(limits) >= 0 else None
        if shares is None:
            return None
        held = {it.instance for it in cached.shares}
        used = [(it, n) for it, n in zip(spots, shares, strict=True) if n or it.id in held]
        group = [spot for spot, _ in used]
        shape = self._overlay.shape(group)
        waited_ns = max(it.free_at_ns for it in group) - request.submitted_ns
        choice = self._cost.best(request.cls, shape, cached.tokens, left, waited_ns)
        return Reuse(cached, group, [n for _, n in used], choice.strategy, choice.time_ns)

    def end(
        self,
        request: RequestView,
        cached: CachedView | None,
        most: int,
    ) -> Reuse | None:
        """The end of a prompt where its beginning is, as an urgent step; None if it is not short,
        or not all of these may be interrupted.

        Args:
            most: tokens of a short one.
        """
        if cached is None or request.prompt_tokens - cached.tokens > most:
            return None
        reuse = self.on(request, cached, self.holders(cached))
        if reuse is None:
            return None
        # A long step on several of them is charged for each.
        charge_ns = reuse.time_ns * len(reuse.spots)
        tokens = zip(reuse.spots, reuse.shares, strict=True)
        held_up = all(self._overlay.may_hold_up(it, n, charge_ns) for it, n in tokens)
        return reuse if held_up else None

    def take(self, reuse: Reuse) -> None:
        """The slots of what is reused are free no longer."""
        for instance, count in reuse.cached.taken.items():
            self._spots[instance].free -= count


def reuse_plan(
    request: RequestView, reuse: Reuse, placed: Placed, *, urgent: bool = False
) -> StartPlan:
    """The plan of a step of one request."""
    return plan_of(request, reuse_step(request, reuse, urgent=urgent), placed)


def plan_of(request: RequestView, step: PlannedStep, placed: Placed) -> StartPlan:
    """The plan of a step that computes all that is left of one request."""
    decode = DecodePlacement(request.id, placed.shares, placed.master, placed.answer)
    return StartPlan(steps=(step,), decode=(decode,))


def reuse_step(request: RequestView, reuse: Reuse, *, urgent: bool = False) -> PlannedStep:
    """Its step."""
    start = reuse.cached.tokens
    step = PlannedStep(
        group=tuple([it.id for it in reuse.spots]),
        bounds=bounds_of(reuse.shares),
        pieces=(PlannedPiece(request.id, start, request.prompt_tokens - start),),
        strategy=reuse.strategy,
        predicted_ns=reuse.time_ns,
        urgent=urgent,
    )
    return in_zigzag(step)
