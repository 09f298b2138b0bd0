"""Predictions for a server that computes exact prompts around rings."""

from __future__ import annotations

from csps.protocols.group_shape import GroupShape
from csps.protocols.plans import AUTO
from csps.services.scheduling.cost import EXACT, EXACT_STRATEGY, Choice, StepTimes
from csps.services.scheduling.view import CostView

RING = "ring/exact"
"""The class of requests that take whichever variant of the ring is better for their prefill."""


class RingCosts:
    """Requests that ask for no strategy of their own are of the class `RING`; others run as they
    ask."""

    def __init__(self, cost: CostView) -> None:
        self._cost = cost

    def best(
        self, cls: str, shape: GroupShape, history: int, length: int, waited_ns: int = 0
    ) -> Choice:
        """As `CostView`."""
        asked = RING if cls in (EXACT, AUTO) else cls
        return self._cost.best(asked, shape, history, length, waited_ns)

    def iteration_ns(self, sp: int, tp: int, batch: int, context: int) -> int:
        """As `CostView`."""
        return self._cost.iteration_ns(sp, tp, batch, context)

    def rows_alone(self, tp: int) -> int:
        """As `CostView`."""
        return self._cost.rows_alone(tp)

    def exact(self, sp: int, tp: int, strategy: str = EXACT_STRATEGY) -> StepTimes:
        """As `CostView`."""
        return self._cost.exact(sp, tp, strategy)

    def transfer_ns(self, kind: str, size: int) -> int | None:
        """As `CostView`."""
        return self._cost.transfer_ns(kind, size)
