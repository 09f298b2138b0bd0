"""Whether a plan comes true: what was predicted when it was made, and what is predicted now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from csps.services.scheduling.commands import RunStep, Share
from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.view import PlannedView, PlanView


class Computed(NamedTuple):
    """A prompt's beginning that steps compute which stay as they are (`view.CachedView`)."""

    tokens: int
    shares: tuple[Share, ...]
    """Where they will lie."""
    taken: Mapping[InstanceId, int] = MappingProxyType({})
    """Its slots are taken already."""


def differs(sequence: PlannedView, end_ns: int, share: float) -> bool:
    """Whether a plan ends earlier or later than it was to, by more than a share of its time.

    Args:
        end_ns: as predicted now.
    """
    plan = plan_of(sequence)
    return abs(end_ns - plan.ends_ns) > share * (plan.ends_ns - plan.made_ns)


def in_line(
    sequence: PlannedView, numbers: Mapping[InstanceId, int], free_ns: Sequence[int]
) -> list[int]:
    """When the steps of a sequence end that no rank has heard of.

    Args:
        numbers: of the instances.
        free_ns: when instances are free of all that is before them, by number.
    """
    free, ends = list(free_ns), []
    for step in plan_of(sequence).held:
        assert step.command is not None, "held without a command"
        group = [numbers[it] for it in step.command.group]
        end_ns = max(free[it] for it in group) + step.predicted_ns
        for it in group:
            free[it] = end_ns
        ends.append(end_ns)
    return ends


def held_commands(sequence: PlannedView) -> list[RunStep]:
    """Of the steps that no rank has heard of."""
    return [it.command for it in plan_of(sequence).held if it.command is not None]


def plan_of(sequence: PlannedView) -> PlanView:
    """Of a sequence that has one."""
    assert sequence.plan is not None, "held without a plan"
    return sequence.plan
