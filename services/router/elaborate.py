"""Levels and micro-partitions of a step, now that it is known where it runs and how it is cut."""

from __future__ import annotations

from itertools import pairwise

from csps.protocols.csa import CsaPlan
from csps.protocols.csa_settings import CsaSettings
from csps.protocols.gang_client import GangClient
from csps.protocols.options import parse_option
from csps.protocols.plans import LEVELS, RIDE, Plan
from csps.services.router.generation import Generation
from csps.services.scheduling.commands import RunStep
from csps.services.scheduling.ids import index_of

EXACT_OVER_PLACES = CsaSettings(levels=1)
"""Exact attention, with the locations that hierarchical collectives go by."""
EXACT_WITH_LEVELS = CsaSettings()
"""Exact attention, as many levels as the locations tell apart."""


def settings_of(command: RunStep, generation: Generation) -> CsaSettings | None:
    """Of a step by parts: what its option says, or else what was asked for.

    Args:
        generation: of one of its pieces, which are of one class.
    """
    strategy, chosen = parse_option(command.strategy)
    if chosen is not None:
        return chosen
    if generation.csa is not None:
        return generation.csa
    if strategy == LEVELS:
        return EXACT_WITH_LEVELS
    return EXACT_OVER_PLACES if strategy.startswith("sp_tp") else None


def csa_plan(command: RunStep, generation: Generation, gang: GangClient) -> CsaPlan | None:
    """How a step attends by parts; None if it does not.

    Args:
        generation: of one of its pieces, which are of one class.
    """
    settings = settings_of(command, generation)
    if settings is None:
        return None
    locations = gang.locations
    return settings.for_group(
        [locations[index_of(instance)] for instance in command.group],
        layers=gang.descriptions[0].layers,
        longest_spt=max(stop - start for start, stop in pairwise(command.bounds)),
        every_query=parse_option(command.strategy).strategy.startswith("sp_tp"),
    )


def shown_plan(
    command: RunStep, generation: Generation, csa: CsaPlan | None, why: str, loss: float | None
) -> Plan:
    """What `explain` answers.

    Args:
        why: this option.
        loss: predicted for it; None if it was not.
    """
    settings = settings_of(command, generation)
    strategy = parse_option(command.strategy).strategy
    lossless = settings is None or settings.lossless
    if generation.csa is None and lossless:
        return Plan(
            strategy=strategy,
            csa=csa,
            predicted_accuracy_loss=0.0,
            reason=f"{_why_exact(generation)}; {why}",
        )
    assert settings is not None, "sparse attention without settings"
    assert csa is not None, "sparse attention without a plan"
    wish = "sparse attention within the bounds" if generation.open else "sparse attention"
    reasons = [f"the client asked for {wish}; {why}"]
    if not lossless and loss is None:
        reasons.append("what it loses of accuracy was not predicted")
    return Plan(
        attention="csa",
        strategy=strategy,
        csa=csa,
        predicted_accuracy_loss=0.0 if lossless or csa.levels == 1 else loss,
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
    return "exact attention loses nothing"
