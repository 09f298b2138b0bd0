"""Configurations of sparse attention that are worth comparing, and bounds to answer (CSPS App. B).

N_v follows the group's locations. Drop ratios of level 2 lie in steps around centers that relate as
the standard deviations of attention scores do; each farther level keeps half. M has a range by
level. Layers with similar scores form groups that share ratios and micro-partitions.

The loss of accuracy does not fall when more is dropped. So the ratios of a run of layers are tried
in ascending order, with those of later runs at their lowest, and the first that exceeds the bound
ends the branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from csps.protocols.attention.csa import Architecture, CsaSettings
from csps.protocols.attention.plan import Objective, ObjectiveKind
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import Topology

LOSSES = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1)
"""Bounds on the loss."""
TIMES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5)
"""Bounds on TTFT, as fractions of the time of exact attention without micro-partitions."""


def objectives(kind: ObjectiveKind, exact_seconds: float) -> Iterator[Objective]:
    """Yield one objective for each bucket of bounds.

    Args:
        exact_seconds: time of the prompt with exact SP-NTP without micro-partitions.
    """
    if kind == "ttft":
        yield from (Objective(kind=kind, max_accuracy_loss=bound) for bound in LOSSES)
        return
    for share in TIMES:
        most_ms = 1000 * exact_seconds * share
        yield Objective(kind=kind, max_accuracy_loss=LOSSES[-1], max_ttft_ms=most_ms)


Spread = tuple[float, ...]
"""Standard deviation of attention scores in a layer: one for all KV heads, or one per KV head."""
LARGEST_RATIO = 0.98


@dataclass(frozen=True, kw_only=True)
class LayerGroups:
    """Runs of neighboring layers.

    Raises:
        ConfigError: runs are not consecutive, or not each has one spread.
    """

    runs: tuple[range, ...]
    spreads: tuple[Spread, ...]

    def __post_init__(self) -> None:
        if len(self.runs) != len(self.spreads) or not self.runs:
            raise ConfigError(f"{len(self.spreads)} spreads for {len(self.runs)} runs of layers")
        begins = [0, *(run.stop for run in self.runs[:-1])]
        if [run.start for run in self.runs] != begins or not all(self.runs):
            raise ConfigError(f"runs of layers must be consecutive from layer 0 on: {self.runs}")
        if (smallest := min(map(min, self.spreads))) <= 0:
            raise ConfigError(
                f"the standard deviation of attention scores must be positive, not {smallest}"
            )

    @classmethod
    def alike(cls, layers: int) -> LayerGroups:
        """Return one run of all layers, for models whose layers are unknown."""
        return cls(runs=(range(layers),), spreads=((1.0,),))

    @classmethod
    def similar(cls, spreads: Sequence[Spread], *, tolerance: float = 0.25) -> LayerGroups:
        """Group neighboring layers whose spreads are near those of the run's first layer.

        Args:
            spreads: spread of each layer.
            tolerance: relative difference up to which two spreads are similar, for every head.
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
        """Number of layers."""
        return self.runs[-1].stop

    def centers(self, anchor: float) -> tuple[Spread, ...]:
        """Return ratios p^a : p^b = a : b of every run and head; the widest spread has `anchor`."""
        widest = max(map(max, self.spreads))
        return tuple(
            tuple(anchor * spread / widest for spread in of_heads) for of_heads in self.spreads
        )

    def by_layer(self, ratios: Sequence[Spread]) -> tuple[Spread, ...]:
        """Return ratios as `CsaSettings.drop_ratios` needs them, with equal ones at the end only
        once."""
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


STEP = 0.02
REACH = 0.2
Ratios = tuple[Spread, ...]
"""Ratios of level 2, by run of layers, for all KV heads or by KV head."""
Loss = Callable[[Sequence[CsaSettings]], Sequence[float]]
"""F_Ad: the loss of accuracy of each of some configurations."""


@dataclass(frozen=True)
class ImportanceScoring:
    """Layer and window that score importance."""

    layer: str = "same"
    window: int = 64


@dataclass(frozen=True, kw_only=True)
class Space:
    """Ranges of a search.

    Raises:
        ConfigError: ratios or micro-partitions that no configuration allows.
    """

    groups: LayerGroups
    anchors: tuple[float, ...] = (0.2, 0.5, 0.8)
    """Centers of the ratio of the run with the widest spread."""
    step: float = STEP
    reach: float = REACH
    micro_partitions: tuple[tuple[int, ...], ...] = (
        (4, 6, 8, 12, 16),
        (1, 2, 4, 8),
        (1, 2, 4),
    )
    """M to try at levels 1, 2, …, ascending; the last ones also at all farther levels. App. B's
    ranges are 4 to 16, 1 to 8 and 1 to 4."""
    scoring: tuple[ImportanceScoring, ...] = (ImportanceScoring(),)
    strategies: tuple[Architecture, ...] = ("ntp", "tp")

    def __post_init__(self) -> None:
        if not (self.step > 0 and self.reach >= 0):
            raise ConfigError(
                f"step {self.step}, reach {self.reach}: allowed are more than 0, and 0 or more"
            )
        if not all(0 <= anchor < 1 for anchor in self.anchors):
            raise ConfigError(f"anchors {self.anchors}: allowed are 0 to less than 1")
        if not self.micro_partitions or not all(map(all, self.micro_partitions)):
            raise ConfigError("micro_partitions must name at least one number for every level")

    @staticmethod
    def level_counts(locations: Sequence[str]) -> range:
        """Return N_v: 1 or 2 inside a server, 2 or 3 across servers, 3 or 4 across racks.

        Locations that distinguish fewer levels have fewer.
        """
        topology = Topology.of(locations)
        fewest = 1 if len(topology.servers) == 1 else 2 if len(topology.racks) == 1 else 3
        distinct = len(topology.granularities)
        return range(min(fewest, distinct), min(fewest + 1, distinct) + 1)

    def micros(self, levels: int) -> list[tuple[int, ...]]:
        """Return every combination of M of levels 1 .. N_v."""
        last = len(self.micro_partitions) - 1
        return list(product(*(self.micro_partitions[min(v, last)] for v in range(levels))))

    def grids(self, anchor: float) -> list[list[Spread]]:
        """Return the ratios to try of each run of layers, ascending for every head."""
        steps = round(self.reach / self.step)
        return [
            _distinct(
                tuple(_clipped(center + number * self.step) for center in of_heads)
                for number in range(-steps, steps + 1)
            )
            for of_heads in self.groups.centers(anchor)
        ]

    def ratios(self) -> Iterator[Ratios]:
        """Yield all combinations of ratios, each once, except for 0 everywhere, which is exact
        attention."""
        seen = set()
        for anchor in self.anchors:
            for ratios in product(*self.grids(anchor)):
                if ratios not in seen and any(map(any, ratios)):
                    seen.add(ratios)
                    yield ratios

    def admissible(
        self, settings: Callable[[Ratios], CsaSettings], loss: Loss, most: float
    ) -> Iterator[Ratios]:
        """Yield those of `ratios` that lose no more than `most`, without descending into other
        branches.

        Args:
            settings: function from ratios to a configuration.
            loss: loss, which must not fall when a ratio rises.
        """
        seen = set()
        for anchor in self.anchors:
            for ratios in _within(self.grids(anchor), (), settings, loss, most):
                if ratios not in seen and any(map(any, ratios)):
                    seen.add(ratios)
                    yield ratios

    def settings(
        self,
        strategy: Architecture,
        levels: int,
        scoring: ImportanceScoring,
        ratios: Ratios,
        micro: tuple[int, ...] | None = None,
    ) -> CsaSettings:
        """Return one configuration."""
        assert scoring.layer in ("previous", "same")
        return CsaSettings(
            levels=levels,
            drop_ratios=self.groups.by_layer(ratios),
            micro_partitions=None if micro is None else (micro,),
            strategy=strategy,
            importance_layer="same" if scoring.layer == "same" else "previous",
            importance_window=scoring.window,
        )

    def variants(
        self, locations: Sequence[str]
    ) -> Iterator[tuple[Architecture, int, ImportanceScoring]]:
        """Yield (strategy, N_v, scoring) of sparse attention, which needs two levels or more."""
        for strategy, levels, scoring in product(
            self.strategies, self.level_counts(locations), self.scoring
        ):
            if levels > 1:
                yield strategy, levels, scoring

    def exact(self, locations: Sequence[str]) -> list[CsaSettings]:
        """Return exact attention: SP-NTP as a whole, over levels with each M, and SP-TP."""
        found = [CsaSettings(levels=1, pipelined=False, strategy="ntp")]
        for levels in self.level_counts(locations):
            found += [
                CsaSettings(levels=levels, micro_partitions=(micro,), strategy="ntp")
                for micro in self.micros(levels)
            ]
        if "tp" in self.strategies:
            found += [
                CsaSettings(levels=1, micro_partitions=(micro,), strategy="tp")
                for micro in self.micros(1)
            ]
        return found


def _within(
    grids: Sequence[Sequence[Spread]],
    chosen: Ratios,
    settings: Callable[[Ratios], CsaSettings],
    loss: Loss,
    most: float,
) -> Iterator[Ratios]:
    """Yield combinations that begin with `chosen`."""
    if len(chosen) == len(grids):
        yield chosen
        return
    rest = tuple(grid[0] for grid in grids[len(chosen) + 1 :])
    branches = [(*chosen, ratio) for ratio in grids[len(chosen)]]
    losses = loss([settings((*branch, *rest)) for branch in branches])
    for branch, lost in zip(branches, losses, strict=True):
        if lost > most:
            return
        yield from _within(grids, branch, settings, loss, most)


def _clipped(ratio: float) -> float:
    return round(min(max(ratio, 0.0), LARGEST_RATIO), 6)


def _distinct(ratios: Iterator[Spread]) -> list[Spread]:
    return list(dict.fromkeys(ratios))
