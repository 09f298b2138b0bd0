"""Layers that share drop ratios and micro-partitions, and how their ratios relate (CSPS App. B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from csps.protocols.errors import ConfigError

Spread = tuple[float, ...]
"""Standard deviation of attention scores in a layer: one for all KV heads, or one per KV head."""
LARGEST_RATIO = 0.98


@dataclass(frozen=True, kw_only=True)
class LayerGroups:
    """Runs of neighbouring layers.

    Raises:
        ConfigError: runs that do not follow each other, or other than one spread for each.
    """

    runs: tuple[range, ...]
    spreads: tuple[Spread, ...]

    def __post_init__(self) -> None:
        if len(self.runs) != len(self.spreads) or not self.runs:
            raise ConfigError(f"{len(self.spreads)} spreads for {len(self.runs)} runs of layers")
        begins = [0, *(run.stop for run in self.runs[:-1])]
        if [run.start for run in self.runs] != begins or not all(self.runs):
            raise ConfigError(f"runs of layers follow each other from layer 0 on: {self.runs}")
        if min(map(min, self.spreads)) <= 0:
            raise ConfigError("the standard deviation of attention scores is positive")

    @classmethod
    def alike(cls, layers: int) -> LayerGroups:
        """One run, where nothing is known of the layers."""
        return cls(runs=(range(layers),), spreads=((1.0,),))

    @classmethod
    def similar(cls, spreads: Sequence[Spread], *, tolerance: float = 0.25) -> LayerGroups:
        """Neighbours stay together while their spreads are near those of the run's first layer.

        Args:
            spreads: of each layer.
            tolerance: relative difference up to which two are alike, for every head.
        """
        runs: list[range] = []
        for layer, spread in enumerate(spreads):
            if runs and _near(spreads[runs[-1].start], spread, tolerance):
                runs[-1] = range(runs[-1].start, layer + 1)
            else:
                runs.append(range(layer, layer + 1))
        return cls(runs=tuple(runs), spreads=tuple(_mean(spreads, run) for run in runs))

    @property
    def layers(self) -> int:
        """All of them."""
        return self.runs[-1].stop

    def centres(self, anchor: float) -> tuple[Spread, ...]:
        """Ratios p^a : p^b = a : b, of every run and head; the widest spread has `anchor`."""
        widest = max(map(max, self.spreads))
        return tuple(
            tuple(anchor * spread / widest for spread in of_heads) for of_heads in self.spreads
        )

    def by_layer(self, ratios: Sequence[Spread]) -> tuple[Spread, ...]:
        """As `CsaSettings.drop_ratios` wants them; equal ones at the end only once."""
        expanded = [of_heads for run, of_heads in zip(self.runs, ratios, strict=True) for _ in run]
        while len(expanded) > 1 and expanded[-1] == expanded[-2]:
            expanded.pop()
        return tuple(expanded)


def _near(one: Spread, other: Spread, tolerance: float) -> bool:
    return all(
        abs(a - b) <= tolerance * max(abs(a), abs(b)) for a, b in zip(one, other, strict=True)
    )


def _mean(spreads: Sequence[Spread], run: range) -> Spread:
    columns = zip(*(spreads[layer] for layer in run), strict=True)
    return tuple(sum(column) / len(run) for column in columns)
