"""Steps of whole prompts that a round puts together, and urgent ones that grow while it does."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from csps.services.scheduling.decisions import (
    DecodePlacement,
    PlannedPiece,
    PlannedStep,
    StartPlan,
)
from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.policies.decode_overlay import Placed
from csps.services.scheduling.policies.prefill_overlay import PrefillOverlay, Spot
from csps.services.scheduling.policies.short_prompts import ShortPromptOptions
from csps.services.scheduling.ring_rows import in_zigzag
from csps.services.scheduling.shares import bounds_of
from csps.services.scheduling.view import CostView, RequestView


class WholePrompts(msgspec.Struct, eq=False, kw_only=True):
    """A step that is being put together."""

    group: list[Spot]
    cls: str
    strategy: str
    urgent: bool
    members: list[tuple[RequestView, Placed]] = msgspec.field(default_factory=list)
    tokens: int = 0
    predicted_ns: int = 0
    shares: list[int] | None = None
    """Tokens for each of the group; None for a single instance."""

    def add(self, request: RequestView, placed: Placed) -> None:
        """It computes this one as well."""
        self.members.append((request, placed))
        self.tokens += request.prompt_tokens

    def plan(self) -> StartPlan:
        """To start it."""
        step = PlannedStep(
            group=tuple([spot.id for spot in self.group]),
            bounds=bounds_of(self.shares or [self.tokens]),
            pieces=tuple([PlannedPiece(it.id, 0, it.prompt_tokens) for it, _ in self.members]),
            strategy=self.strategy,
            predicted_ns=self.predicted_ns,
            urgent=self.urgent,
        )
        decode = [
            DecodePlacement(it.id, placed.shares, placed.master, placed.answer)
            for it, placed in self.members
        ]
        return StartPlan(steps=(in_zigzag(step),), decode=tuple(decode))


class UrgentSteps:
    """Of short prompts, each on one instance: whoever starts there in the same round is added, if
    that does not make it too long.

    Args:
        prefill: the gang's instances.
        now_ns: the time of the round.
    """

    def __init__(
        self, prefill: PrefillOverlay, cost: CostView, options: ShortPromptOptions, now_ns: int
    ) -> None:
        self._prefill, self._cost = prefill, cost
        self._options, self._now_ns = options, now_ns
        self._growing: dict[tuple[InstanceId, str], WholePrompts] = {}
        """By instance and class."""
        self._by_ns: dict[InstanceId, int] = {}
        """When those of an instance must be over, or a member would pass somebody for too long."""

    def admits(self, spot: Spot, request: RequestView, time_ns: int) -> bool:
        """An instance has slots for a prompt, long steps that may be overtaken, and a turn left or
        a step to which it can be added. Those who wait for a turn share a step when one comes,
        which costs less than a step for each."""
        return self._prefill.admits(spot, request.prompt_tokens, time_ns) and (
            self._prefill.has_turn(spot) or self._room(spot, request) is not None
        )

    def add(
        self, spot: Spot, request: RequestView, placed: Placed, strategy: str, time_ns: int
    ) -> WholePrompts | None:
        """Compute a prompt on an instance; returns its step if that is a new one.

        Args:
            time_ns: what a step of its own takes.
        """
        tokens = request.prompt_tokens
        if (room := self._room(spot, request)) is not None:
            step, more_ns = room
            step.add(request, placed)
            step.predicted_ns += more_ns
            self._prefill.grow_urgent(spot, tokens, more_ns)
            return None
        step = WholePrompts(
            group=[spot], cls=request.cls, strategy=strategy, urgent=True, predicted_ns=time_ns
        )
        step.add(request, placed)
        self._growing[spot.id, request.cls] = step
        self._prefill.start_urgent(spot, tokens, time_ns)
        return step

    def bound(self, spot: Spot, by_ns: int | None) -> None:
        """Have those of an instance over by then."""
        if by_ns is not None:
            self._by_ns[spot.id] = min(by_ns, self._by_ns.get(spot.id, by_ns))

    def close(self, spots: Iterable[Spot]) -> None:
        """Instances were given a long step: whoever is younger than that passes it, and does so in
        a step of its own."""
        ids = {spot.id for spot in spots}
        self._growing = {key: it for key, it in self._growing.items() if key[0] not in ids}

    def _room(self, spot: Spot, request: RequestView) -> tuple[WholePrompts, int] | None:
        """The step to which a prompt can be added, and how much longer that takes then."""
        step = self._growing.get((spot.id, request.cls))
        if step is None:
            return None
        total = step.tokens + request.prompt_tokens
        if total > self._options.urgent_batch_tokens:
            return None
        together = self._cost.best(request.cls, self._prefill.single, 0, total)
        more_ns = max(0, together.time_ns - step.predicted_ns)
        return (step, more_ns) if self._may_grow(spot, more_ns) else None

    def _may_grow(self, spot: Spot, more_ns: int) -> bool:
        """A longer step is over later for all of its members, and for those behind it."""
        by_ns, spare_ns = self._by_ns.get(spot.id), self._prefill.spare_ns(spot)
        return (by_ns is None or self._now_ns + spot.urgent_ns + more_ns <= by_ns) and (
            spare_ns is None or spare_ns >= more_ns
        )
