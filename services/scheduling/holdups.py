"""How long a request was held up by urgent steps since it came.

Every instance counts what urgent steps have cost the long ones there. A request remembers these
counters when it begins to wait; when it gets its place, what they have grown by is what it was held
up by, in the line behind others as much as at its head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from csps.services.scheduling.ids import InstanceId


class HeldUp(Protocol):
    """An instance that counts."""

    @property
    def id(self) -> InstanceId: ...
    @property
    def held_ns(self) -> int: ...


def counters(instances: Iterable[HeldUp]) -> dict[InstanceId, int]:
    """What a request that begins to wait remembers; those at zero are left out."""
    return {it.id: it.held_ns for it in instances if it.held_ns}


class HoldUp(NamedTuple):
    """Of the oldest request of a step, at the step's launch."""

    held_ns: int = 0
    """By urgent steps since it began to wait."""
    alone_ns: int = 0
    """What it takes without them, to the end of its step, as predicted."""

    def bound_ns(self, overtaking_ns: int, predicted_ns: int) -> int:
        """What urgent steps may cost the step: `overtaking_ns`, or its own time if that is more;
        and its request altogether `overtaking_ns`, or what it takes without them."""
        altogether_ns = max(overtaking_ns, self.alone_ns) - self.held_ns
        return min(max(overtaking_ns, predicted_ns), altogether_ns)


def hold_up(
    before: Mapping[InstanceId, int],
    waiting_since_ns: int,
    group: Sequence[HeldUp],
    begin_ns: int,
    predicted_ns: int,
) -> HoldUp:
    """Of a request that gets its place.

    Args:
        before: what it remembers.
        waiting_since_ns: it began to wait.
        group: that computes it; the instance that was held up most counts.
        begin_ns: of its step, as predicted.
        predicted_ns: time of its step.
    """
    held_ns = max(0, *[it.held_ns - before.get(it.id, 0) for it in group])
    waits_ns = max(0, begin_ns - waiting_since_ns - held_ns)
    return HoldUp(held_ns, waits_ns + predicted_ns)
