"""Levels and micro-partitions of a step, now that it is known where it runs and how it is cut."""

from __future__ import annotations

from itertools import pairwise

from csps.protocols.csa import CsaPlan
from csps.protocols.csa_settings import CsaSettings
from csps.protocols.gang_client import GangClient
from csps.protocols.plans import LEVELS, RIDE, Plan
from csps.services.router.running import Generation
from csps.services.scheduling.commands import RunStep
from csps.services.scheduling.ids import index_of

EXACT_OVER_PLACES = CsaSettings(levels=1)
"""Exact attention, with the locations that hierarchical collectives go by."""
EXACT_WITH_LEVELS = CsaSettings()
"""Exact attention, as many levels as the locations tell apart."""


def csa_plan(command: RunStep, settings: CsaSettings | None, gang: GangClient) -> CsaPlan | None:
    """How a step attends by parts; None if it does not.

    Args:
        settings: of its pieces' class.
    """
    over_places = command.strategy.startswith("sp_tp")
    if settings is None:
        if command.strategy == LEVELS:
            settings = EXACT_WITH_LEVELS
        elif over_places:
            settings = EXACT_OVER_PLACES
        else:
            return None
    locations = gang.locations
    return settings.for_group(
        [locations[index_of(instance)] for instance in command.group],
        layers=gang.descriptions[0].layers,
        longest_spt=max(stop - start for start, stop in pairwise(command.bounds)),
        every_query=over_places,
    )


def shown_plan(command: RunStep, generation: Generation, csa: CsaPlan | None, why: str) -> Plan:
    """What `explain` answers.

    Args:
        why: this strategy.
    """
    settings = generation.csa
    if settings is None:
        return Plan(
            strategy=command.strategy,
            csa=csa,
            predicted_accuracy_loss=0.0,
            reason=f"{_why_exact(generation)}; {why}",
        )
    assert csa is not None, "sparse attention without a plan"
    reasons = [f"the client asked for sparse attention; {why}"]
    if generation.objective.bounded:
        reasons.append("whether it meets the bounds was not predicted")
    return Plan(
        attention="csa",
        strategy=command.strategy,
        csa=csa,
        predicted_accuracy_loss=0.0 if settings.lossless else None,
        reason="; ".join((*reasons, *settings.shortfalls(csa))),
    )


def ride_plan(generation: Generation, budget: int) -> Plan:
    """What `explain` answers about a prompt that no step computes."""
    pieces = f"in pieces beside rows that decode, {budget} tokens an iteration"
    return Plan(
        strategy=RIDE,
        predicted_accuracy_loss=0.0,
        reason=f"{_why_exact(generation)}; {pieces}",
    )


def _why_exact(generation: Generation) -> str:
    if generation.attention == "exact":
        return "the client asked for exact attention"
    if generation.objective.max_ttft_ms is not None:
        return "exact attention loses nothing; whether it meets the TTFT bound was not predicted"
    return "exact attention loses nothing"
