"""Sparse attention that is alike in all layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from csps.protocols.attention.csa import CsaPlan, LayerGroup, halving


def uniform_plan(
    locations: Sequence[str],
    *,
    levels: int,
    layers: int,
    drop_ratio: float = 0.0,
    micro_partitions: int = 1,
    importance_layer: Literal["previous", "same"] = "previous",
    pipelined: bool = True,
) -> CsaPlan:
    """Return one ratio, halved from level to level, and one M."""
    group = LayerGroup(
        first=0,
        stop=layers,
        drop_ratios=halving(drop_ratio, levels),
        micro_partitions=(micro_partitions,) * levels,
    )
    return CsaPlan(
        locations=tuple(locations),
        levels=levels,
        layer_groups=(group,),
        importance_layer=importance_layer,
        pipelined=pipelined,
    )
