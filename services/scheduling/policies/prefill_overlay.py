"""The prefill instances as they will be once what a round has decided is under way."""

from __future__ import annotations

import msgspec

from csps.protocols.group_shape import GroupShape
from csps.protocols.topology import Location
from csps.services.scheduling.holdups import hold_up
from csps.services.scheduling.ids import InstanceId, StepId
from csps.services.scheduling.policies.short_prompts import ShortPromptOptions
from csps.services.scheduling.view import GangView, InstanceView, RequestView, StepView


class Budget(msgspec.Struct, eq=False, gc=False):
    """What urgent steps may still cost a step that they overtake."""

    left_ns: int


class Spot(msgspec.Struct, eq=False):
    """An instance."""

    view: InstanceView
    id: InstanceId
    place: Location
    order: int
    free: int
    """KV slots."""
    long_steps: int
    urgent_steps: int
    urgent_ns: int
    """Predicted time of urgent steps."""
    free_at_ns: int
    """When all steps will have been computed; not in the past."""
    overtaken_ns: int
    """What urgent steps have taken since it has long ones."""
    held_ns: int
    """What they have cost long ones here, ever."""
    budgets: list[Budget] | None = None
    """Of its long steps; None until somebody asked."""
    version: int = 0
    """Counts its changes."""


class PrefillOverlay:
    """A gang's instances and what a round adds to them.

    Args:
        gang: as it is.
        now_ns: the time of the round.
        options: of urgent steps, if there are any.
    """

    def __init__(
        self, gang: GangView, now_ns: int, options: ShortPromptOptions | None = None
    ) -> None:
        self._options = options or ShortPromptOptions(overtaking_s=0.0)
        self._overtaking_ns = self._options.overtaking_ns
        self._budgets: dict[StepId, Budget] = {}
        self._tp = gang.tp
        self.single = GroupShape((1,), gang.tp)
        """Of one instance."""
        self.spots = [
            Spot(
                it,
                it.id,
                it.place,
                it.order,
                it.free_slots,
                it.long_steps,
                len(it.steps) - it.long_steps,
                it.urgent_ns,
                max(now_ns, it.free_at_ns),
                it.overtaken_ns,
                it.held_ns,
            )
            for it in gang.instances
        ]
        self.idle = sum(not it.long_steps for it in self.spots)
        """Instances without a long step."""

    def shape(self, group: list[Spot]) -> GroupShape:
        """Of instances in topology order."""
        return GroupShape.of([it.place for it in group], self._tp)

    def spare_ns(self, spot: Spot) -> int | None:
        """What urgent steps on an instance may still cost; None if they overtake nothing."""
        if not spot.long_steps:
            return None
        return min(it.left_ns for it in self._budgets_of(spot))

    def may_hold_up(self, spot: Spot, tokens: int, time_ns: int) -> bool:
        """An instance may compute another urgent step."""
        return self.admits(spot, tokens, time_ns) and self.has_turn(spot)

    def admits(self, spot: Spot, tokens: int, time_ns: int) -> bool:
        """There are slots, and the long steps of the instance may be overtaken."""
        if spot.free < tokens:
            return False
        spare_ns = self.spare_ns(spot)
        return spare_ns is None or spare_ns >= time_ns

    def has_turn(self, spot: Spot) -> bool:
        """It may be given another urgent step: one to run and one to follow without a gap. Those
        who wait for a turn share a step when one comes."""
        return spot.urgent_steps < self._options.jobs_per_instance

    def start_long(
        self, request: RequestView, group: list[Spot], shares: list[int], predicted_ns: int
    ) -> None:
        """A step that is not urgent.

        Args:
            request: the oldest that it computes.
        """
        begin_ns = max(it.free_at_ns for it in group)
        since_ns = request.waiting_since_ns
        found = hold_up(request.held_before, since_ns, group, begin_ns, predicted_ns)
        budget = Budget(found.bound_ns(self._overtaking_ns, predicted_ns))
        end_ns = begin_ns + predicted_ns
        for spot, share in zip(group, shares, strict=True):
            self._budgets_of(spot).append(budget)
            spot.free -= share
            self.idle -= not spot.long_steps
            spot.long_steps += 1
            spot.free_at_ns = end_ns
            spot.version += 1

    def start_urgent(self, spot: Spot, tokens: int, predicted_ns: int) -> None:
        """An urgent step."""
        spot.urgent_steps += 1
        self.grow_urgent(spot, tokens, predicted_ns)

    def grow_urgent(self, spot: Spot, tokens: int, predicted_ns: int) -> None:
        """More of an urgent step."""
        if spot.long_steps:
            for budget in self._budgets_of(spot):
                budget.left_ns -= predicted_ns
            spot.overtaken_ns += predicted_ns
            spot.held_ns += predicted_ns
        spot.free -= tokens
        spot.urgent_ns += predicted_ns
        spot.free_at_ns += predicted_ns
        spot.version += 1

    def _budgets_of(self, spot: Spot) -> list[Budget]:
        if spot.budgets is None:
            spot.budgets = [
                self._budget(step) for step in spot.view.steps.values() if not step.urgent
            ]
        return spot.budgets

    def _budget(self, step: StepView) -> Budget:
        """One for all instances of a step: a delay of one of them delays them all."""
        found = self._budgets.get(step.id)
        if found is None:
            bound_ns = step.hold_up.bound_ns(self._overtaking_ns, step.predicted_ns)
            found = self._budgets[step.id] = Budget(bound_ns - step.delayed_ns)
        return found
