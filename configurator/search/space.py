"""Configurations of sparse attention that are worth comparing, and bounds to answer (CSPS App. B).

N_v follows the group's locations. Drop ratios of level 2 lie in steps around centers that relate as
what was measured of the layers does; each farther level keeps half. M has a range by level. Similar
layers form groups that share a ratio and micro-partitions. Inside a layer the ratios of the KV
heads relate as the standard deviations of their attention scores do.

The loss of accuracy does not fall when more is dropped. So the ratios of a group of layers are
tried in ascending order, with those of later groups at their lowest, and the first that exceeds the
bound ends the branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, product
from math import inf
from statistics import fmean
from typing import TypeVar

from csps.protocols.attention.csa import Architecture, CsaSettings, Ratios, shortened, trimmed
from csps.protocols.attention.plan import Objective, ObjectiveKind
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import Topology

T = TypeVar("T")

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


LARGEST_RATIO = 0.98
MOST_GROUPS = 3
"""Layer groups of a model at most, because ratios of all groups are combined."""
SIMILAR = 0.25
"""Relative difference up to which the trends of two layers are similar."""


@dataclass(frozen=True, kw_only=True)
class LayerGroups:
    """Layers that share a ratio and micro-partitions; they need not be neighbors.

    Raises:
        ConfigError: not each layer is in one group, or a trend or a share is not a fraction.
    """

    members: tuple[tuple[int, ...], ...]
    """Layers of each group, ascending."""
    trends: tuple[float, ...]
    """Trend of each group: ratios of two groups relate as their trends do."""
    head_shares: tuple[tuple[float, ...], ...] = ()
    """Share of its group's ratio that each KV head has, by layer; empty: all have the whole."""

    def __post_init__(self) -> None:
        layers = sorted(layer for group in self.members for layer in group)
        if not layers or layers != list(range(len(layers))) or not all(self.members):
            raise ConfigError(f"each layer from 0 on must be in one layer group: {self.members}")
        if len(self.members) != len(self.trends):
            raise ConfigError(f"{len(self.trends)} trends for {len(self.members)} layer groups")
        if min(self.trends) <= 0:
            raise ConfigError(f"the trend of a layer group must be positive: {self.trends}")
        if self.head_shares and len(self.head_shares) != len(layers):
            raise ConfigError(f"shares of heads of {len(self.head_shares)} of {len(layers)} layers")
        if not all(0 <= share <= 1 for of_layer in self.head_shares for share in of_layer):
            raise ConfigError(f"shares of heads must be 0 to 1: {self.head_shares}")

    @classmethod
    def alike(cls, layers: int) -> LayerGroups:
        """Return one group of all layers, for models of which nothing was measured by layer."""
        return cls(members=(tuple(range(layers)),), trends=(1.0,))

    @classmethod
    def similar(
        cls,
        trends: Sequence[float],
        head_shares: Sequence[Sequence[float]] = (),
        *,
        most: int = MOST_GROUPS,
    ) -> LayerGroups:
        """Group layers with similar trends, in as many groups as are needed, but at most `most`.

        Args:
            trends: trend of each layer.
            head_shares: share of each KV head, by layer.
        """
        groups: list[list[int]] = []
        for layer in sorted(range(len(trends)), key=lambda layer: trends[layer]):
            if groups and trends[groups[-1][0]] >= (1 - SIMILAR) * trends[layer]:
                groups[-1].append(layer)
            else:
                groups.append([layer])

        def trend(group: Sequence[int]) -> float:
            return fmean(trends[layer] for layer in group)

        while len(groups) > most:
            nearest = min(
                range(len(groups) - 1),
                key=lambda index: trend(groups[index + 1]) / trend(groups[index]),
            )
            groups[nearest] += groups.pop(nearest + 1)
        members = sorted(tuple(sorted(group)) for group in groups)
        return cls(
            members=tuple(members),
            trends=tuple(map(trend, members)),
            head_shares=tuple(
                tuple(round(share, 2) for share in of_layer) for of_layer in head_shares
            ),
        )

    @property
    def layers(self) -> int:
        """Number of layers."""
        return sum(map(len, self.members))

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """Group of each layer."""
        found = {layer: index for index, group in enumerate(self.members) for layer in group}
        return tuple(found[layer] for layer in range(self.layers))

    @property
    def all_alike(self) -> bool:
        """True if all layers and heads have one ratio."""
        return len(self.members) == 1 and not any(
            share < 1 for of in self.head_shares for share in of
        )

    def centers(self, anchor: float) -> tuple[float, ...]:
        """Return ratios p^a : p^b = a : b of every group; that of the widest trend is `anchor`."""
        widest = max(self.trends)
        return tuple(anchor * trend / widest for trend in self.trends)

    def by_layer(self, ratios: Sequence[float]) -> Ratios:
        """Return ratios of groups as `CsaSettings.drop_ratios` needs them."""
        expanded = []
        for layer, group in enumerate(self.group_of):
            shares = self.head_shares[layer] if self.head_shares else (1.0,)
            expanded.append(tuple(_rounded(ratios[group] * share) for share in shares))
        return shortened(tuple(expanded))

    def one_layer(self, layer: int, ratio: float) -> Ratios:
        """Return ratios with which one layer alone drops; its KV heads have their shares."""
        shares = self.head_shares[layer] if self.head_shares else (1.0,)
        alone = tuple(_rounded(ratio * share) for share in shares)
        return shortened(tuple(alone if other == layer else (0.0,) for other in range(self.layers)))

    def smallest_anchor(self, layer: int, ratios: Sequence[float]) -> float:
        """Return the anchor from which on `graded` drops as much in each KV head of a layer.

        Args:
            ratios: a ratio for each KV head, or one for all.
        """
        part = self.trends[self.group_of[layer]] / max(self.trends)
        shares = self.head_shares[layer] if self.head_shares else (1.0,)
        heads = range(max(len(ratios), len(shares)))
        parts = [part * shares[min(head, len(shares) - 1)] for head in heads]
        asked = [ratios[min(head, len(ratios) - 1)] for head in heads]
        return (
            max(
                (ratio / own if own else inf)
                for ratio, own in zip(asked, parts, strict=True)
                if ratio
            )
            if any(asked)
            else 0.0
        )

    def graded(self, anchor: float) -> Ratios:
        """Return the ratios of all layers and heads that relate as measured; the largest is
        `anchor`."""
        return self.by_layer(self.centers(anchor))


def _rounded(number: float) -> float:
    """Round as rows of measurements are, so that a measured configuration is found again."""
    return round(number, 4)


STEP = 0.02
REACH = 0.2
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
    """Centers of the ratio of the group with the widest trend."""
    step: float = STEP
    reach: float = REACH
    rungs: tuple[float, ...] = tuple(number / 50 for number in range(1, 50))
    """Largest ratios of `ladders`, ascending."""
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

    def group_micros(self, levels: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Yield every combination of M by layer group; M of level 1 is the same for all."""
        groups = range(len(self.groups.members))
        for _, alike in groupby(self.micros(levels), key=lambda micro: micro[0]):
            yield from product(alike, repeat=len(groups))

    def grids(self, anchor: float) -> list[list[float]]:
        """Return the ratios to try of each group of layers, ascending."""
        steps = round(self.reach / self.step)
        return [
            _distinct(_clipped(center + number * self.step) for number in range(-steps, steps + 1))
            for center in self.groups.centers(anchor)
        ]

    def ladders(self) -> list[list[Ratios]]:
        """Return further ratios to try, each list ascending: graded ones, and alike everywhere.

        Those were measured. Steps around centers rarely meet them where several ratios differ.
        """
        if self.groups.all_alike:
            return []
        graded = [self.groups.graded(rung) for rung in self.rungs]
        return [graded, [((rung,),) for rung in self.rungs]]

    def ratios(self) -> Iterator[Ratios]:
        """Yield all combinations of ratios, each once, except for 0 everywhere, which is exact
        attention."""
        combined = (
            self.groups.by_layer(ratios)
            for anchor in self.anchors
            for ratios in product(*self.grids(anchor))
        )
        yield from _dropping(chain(combined, *self.ladders()))

    def admissible(
        self, settings: Callable[[Ratios], CsaSettings], loss: Loss, most: float
    ) -> Iterator[Ratios]:
        """Yield those of `ratios` that lose no more than `most`, without descending into other
        branches.

        Args:
            settings: function from ratios to a configuration.
            loss: loss, which must not fall when a ratio rises.
        """

        def losses(ratios: Sequence[Ratios]) -> Sequence[float]:
            return loss([settings(each) for each in ratios])

        def grouped(branches: Sequence[Sequence[float]]) -> Sequence[float]:
            return losses([self.groups.by_layer(ratios) for ratios in branches])

        combined = (
            self.groups.by_layer(ratios)
            for anchor in self.anchors
            for ratios in _within(self.grids(anchor), (), grouped, most)
        )
        yield from _dropping(
            chain(combined, *(_least(ladder, losses, most) for ladder in self.ladders()))
        )

    def settings(
        self,
        strategy: Architecture,
        levels: int,
        scoring: ImportanceScoring,
        ratios: Ratios,
        micros: Sequence[tuple[int, ...]] | None = None,
    ) -> CsaSettings:
        """Return one configuration.

        Args:
            ratios: drop ratios by layer.
            micros: M by layer group.
        """
        assert scoring.layer in ("previous", "same")
        return CsaSettings(
            levels=levels,
            drop_ratios=ratios,
            micro_partitions=None if micros is None else self.by_layer(micros),
            strategy=strategy,
            importance_layer="same" if scoring.layer == "same" else "previous",
            importance_window=scoring.window,
        )

    def by_layer(self, micros: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        """Return M of groups as `CsaSettings.micro_partitions` needs it."""
        return trimmed(micros[group] for group in self.groups.group_of)

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
    grids: Sequence[Sequence[float]],
    chosen: tuple[float, ...],
    losses: Callable[[Sequence[Sequence[float]]], Sequence[float]],
    most: float,
) -> Iterator[tuple[float, ...]]:
    """Yield combinations that begin with `chosen`."""
    if len(chosen) == len(grids):
        yield chosen
        return
    rest = tuple(grid[0] for grid in grids[len(chosen) + 1 :])
    branches = [(*chosen, ratio) for ratio in grids[len(chosen)]]
    for branch in _least(branches, lambda each: losses([(*one, *rest) for one in each]), most):
        yield from _within(grids, branch, losses, most)


def _least(
    ascending: Sequence[T], losses: Callable[[Sequence[T]], Sequence[float]], most: float
) -> Iterator[T]:
    """Yield what comes before the first that loses more than `most`."""
    for each, lost in zip(ascending, losses(ascending), strict=True):
        if lost > most:
            return
        yield each


def _dropping(ratios: Iterable[Ratios]) -> Iterator[Ratios]:
    """Yield each of some ratios once, without 0 everywhere."""
    return (each for each in dict.fromkeys(ratios) if any(map(any, each)))


def _clipped(ratio: float) -> float:
    return _rounded(min(max(ratio, 0.0), LARGEST_RATIO))


def _distinct(ratios: Iterator[float]) -> list[float]:
    return list(dict.fromkeys(ratios))
