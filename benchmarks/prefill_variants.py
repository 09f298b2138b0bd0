"""The prefill variants that `two_servers.py` compares: attention, overlap and strategy.

SP-NTP                exact or CSA, with or without overlap
SP-TP, flat           the same, every row sent to every rank of the other server
SP-TP, hierarchical   the same, every row sent once to the other server and spread there
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from csps.protocols.attention.csa import CsaPlan, LayerGroup, halving

Strategy = Literal["sp_ntp", "sp_tp_flat", "sp_tp_hierarchical"]
STRATEGIES: tuple[Strategy, ...] = ("sp_ntp", "sp_tp_flat", "sp_tp_hierarchical")
_ENGINE_NAMES: dict[Strategy, str] = {
    "sp_ntp": "csa",
    "sp_tp_flat": "sp_tp_flat",
    "sp_tp_hierarchical": "sp_tp",
}


@dataclass(frozen=True, kw_only=True)
class CsaOptions:
    """The sparse plan to measure; the exact variants use only `exact_micro`."""

    levels: int = 3
    drop_ratios: tuple[float, ...] = (0.0, 0.9)
    """Drop ratios of level 2 by layer, the last one also for all further layers; each further level
    keeps half as much. SP-NTP scores by the layer's own attention, and so may drop from layer 1 on.
    """
    tp_drop_ratios: tuple[float, ...] = (0.0, 0.0, 0.9)
    """The same for SP-TP, which scores by the layer before. Layer 1 of the default model looks the
    needles up by keys that nothing in layer 0 has pointed at, and cannot drop without loss.
    """
    micro_partitions: tuple[int, ...] = (4, 1, 2)
    """Micro-partitions of levels 1, 2, …"""
    exact_micro: int = 4
    """Micro-partitions of exact pipelined SP-NTP, which has a single level."""
    tp_micro: int = 2
    """Micro-partitions of SP-TP, exact and sparse: it cuts gathered rows, not levels."""
    importance_window: int = 64

    def drop_ratio(self, layer: int, strategy: Strategy) -> float:
        """Return the drop ratio of level 2 in a layer."""
        ratios = self.drop_ratios if strategy == "sp_ntp" else self.tp_drop_ratios
        return ratios[min(layer, len(ratios) - 1)]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the twelve variants."""

    strategy: Strategy
    csa: bool
    pipelined: bool

    @property
    def name(self) -> str:
        """Return the name on the command line and in results."""
        attention = "csa" if self.csa else "exact"
        return f"{self.strategy}/{attention}/{'pipelined' if self.pipelined else 'unpipelined'}"

    @property
    def engine_strategy(self) -> str:
        """Return the engine's name of the strategy."""
        return "ulysses" if self == BASELINE else _ENGINE_NAMES[self.strategy]

    def plan(self, locations: Sequence[str], *, layers: int, options: CsaOptions) -> CsaPlan | None:
        """Return the plan of its jobs; the baseline has none."""
        return None if self == BASELINE else self._plan(locations, layers, options)

    def _plan(self, locations: Sequence[str], layers: int, options: CsaOptions) -> CsaPlan:
        levels = options.levels if self.csa else 1
        groups = [
            LayerGroup(
                first=layer,
                stop=layer + 1,
                drop_ratios=halving(options.drop_ratio(layer, self.strategy), levels),
                micro_partitions=self._micro_partitions(options, levels),
            )
            for layer in range(layers)
        ]
        return CsaPlan(
            locations=tuple(locations),
            levels=levels,
            layer_groups=tuple(groups),
            importance_window=options.importance_window,
            importance_layer="same" if self.strategy == "sp_ntp" else "previous",
            pipelined=self.pipelined,
        )

    def _micro_partitions(self, options: CsaOptions, levels: int) -> tuple[int, ...]:
        if self.strategy != "sp_ntp":
            return (options.tp_micro,) * levels
        return options.micro_partitions if self.csa else (options.exact_micro,)


BASELINE = Variant(strategy="sp_ntp", csa=False, pipelined=False)
"""Baseline of all comparisons: exact unpipelined SP-NTP."""


def all_variants() -> Iterator[Variant]:
    """Return every combination, the baseline first."""
    for strategy in STRATEGIES:
        for csa in (False, True):
            for pipelined in (False, True):
                yield Variant(strategy=strategy, csa=csa, pipelined=pipelined)


def select(patterns: Sequence[str]) -> list[Variant]:
    """Return the variants whose names contain one of the patterns.

    Raises:
        ValueError: a pattern matches none.
    """
    variants = list(all_variants())
    for pattern in patterns:
        if not any(pattern in variant.name for variant in variants):
            names = ", ".join(variant.name for variant in variants)
            raise ValueError(f"no variant is named like {pattern!r}; there are {names}")
    return [v for v in variants if any(pattern in v.name for pattern in patterns)]
