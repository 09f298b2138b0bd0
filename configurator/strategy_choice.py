"""SP-NTP or SP-TP: which moves less (CSPS §3.2.2, App. A).

`exact_options` and `sparse_options` count what this engine sends with each strategy that it can
run, and `least` chooses between them. Where App. A has one SP-NTP the engine has two on a
tensor-parallel deployment: with the heads split over an instance's ranks as its weights are, and
with gathered weights, which is the paper's. Besides attention both count what the MLP, whose
weights stay sharded, makes of it: an instance's ranks all need the instance's rows. With split
heads they have them, but must sum the output projection; with gathered weights they must gather
them. App. A leaves that out; in SP-TP it is a part of the gather that is counted anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from csps.configurator.csa_traffic import csa_traffic, levels_traffic
from csps.configurator.shapes import AttentionShape
from csps.configurator.traffic import (
    Traffic,
    gathered_weights_traffic,
    sp_tp_traffic,
    ulysses_traffic,
)
from csps.protocols.csa import CsaPlan
from csps.protocols.group_shape import GroupShape

Strategy = Literal["ulysses", "gathered_weights", "levels", "csa", "sp_tp"]
"""By the engine's names (`actors/engine/choice.py`)."""

LEVELS_LINK_RATIO = 8.0
"""From which ratio of links on exact attention with levels is compared. It halves what two servers
send each other, in more and shorter messages beside more and shorter calls of attention: over
links that were alike those took 15 % of the time, at a ratio of 13 nothing (benchmarks/results/
two-servers-2026-11-21.md, `sp_ntp/exact`, pipelined against not)."""

ROUNDING = 1e-9
"""Costs that differ by less, relatively, are equal."""


def exact_options(
    shape: AttentionShape, group: GroupShape, tokens: int, *, link_ratio: float = 1.0
) -> dict[Strategy, Traffic]:
    """What exact attention of a prompt moves in a layer with each strategy; without tensor
    parallelism there are no weights to gather, and without a slow link between servers levels are
    more work than they save.

    Args:
        tokens: at least one for each instance.
    """
    options: dict[Strategy, Traffic] = {"ulysses": ulysses_traffic(shape, group, tokens)}
    if group.tp > 1:
        options["gathered_weights"] = gathered_weights_traffic(shape, group, tokens)
    if len(group.servers) > 1 and link_ratio >= LEVELS_LINK_RATIO:
        options["levels"] = levels_traffic(shape, group, tokens)
    options["sp_tp"] = sp_tp_traffic(shape, group, tokens)
    return options


def sparse_options(
    shape: AttentionShape, plan: CsaPlan, *, tp: int, spts: Sequence[int]
) -> dict[Strategy, Traffic]:
    """The same for a plan of sparse attention, on the average of the layers that exchange; only
    SP-NTP sends less of what is dropped. It has no variant that gathers weights.

    Args:
        spts: tokens of each member.
    """
    return {
        "csa": csa_traffic(shape, plan, tp=tp, spts=spts),
        "sp_tp": sp_tp_traffic(shape, GroupShape.of(plan.topology.locations, tp), sum(spts)),
    }


def least(options: Mapping[Strategy, Traffic], *, link_ratio: float = 1.0) -> Strategy:
    """What moves least; of equals the first.

    Args:
        link_ratio: how much longer an element takes between servers than inside one; 1 counts as
            App. A does.

    Raises:
        ValueError: a ratio below 1.
    """
    if link_ratio < 1:
        raise ValueError(f"link ratio {link_ratio}: allowed are 1 and more")
    costs = {name: traffic.cost(link_ratio) for name, traffic in options.items()}
    enough = min(costs.values()) * (1 + ROUNDING)
    return next(name for name, cost in costs.items() if cost <= enough)
