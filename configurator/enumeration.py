"""Which configurations of sparse attention are worth comparing (CSPS App. B).

N_v as the group is spread; drop ratios of level 2 around centres that relate as the standard
deviations of attention scores do, in steps, each farther level keeping half; M in ranges by level.
Loss of accuracy does not fall when more is dropped. So the ratios of a run of layers are tried in
ascending order, with those of later runs at their least, and the first that breaks the bound ends
the branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from csps.configurator.layer_groups import LARGEST_RATIO, LayerGroups, Spread
from csps.protocols.csa_settings import Architecture, CsaSettings
from csps.protocols.errors import ConfigError
from csps.protocols.topology import Topology

STEP = 0.02
REACH = 0.2
Ratios = tuple[Spread, ...]
"""Of level 2, by run of layers, for all KV heads or by KV head."""
Loss = Callable[[Sequence[CsaSettings]], Sequence[float]]
"""F_Ad: what each of some configurations loses of accuracy."""


@dataclass(frozen=True)
class Judging:
    """How importance is judged, which is as much a choice as how much is dropped."""

    layer: str = "same"
    window: int = 64


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is enumerated.

    Raises:
        ConfigError: ratios or micro-partitions that no configuration allows.
    """

    groups: LayerGroups
    anchors: tuple[float, ...] = (0.2, 0.5, 0.8)
    """Centres of the ratio of the run with the widest spread."""
    step: float = STEP
    reach: float = REACH
    micro_partitions: tuple[tuple[int, ...], ...] = (
        (4, 6, 8, 12, 16),
        (1, 2, 4, 8),
        (1, 2, 4),
    )
    """M to try at levels 1, 2, …, ascending; the last ones also at all farther levels. App. B's
    ranges are 4 to 16, 1 to 8 and 1 to 4."""
    judging: tuple[Judging, ...] = (Judging(),)
    strategies: tuple[Architecture, ...] = ("ntp", "tp")

    def __post_init__(self) -> None:
        if not (self.step > 0 and self.reach >= 0):
            raise ConfigError(f"steps of {self.step} up to {self.reach} are no range")
        if not all(0 <= anchor < 1 for anchor in self.anchors):
            raise ConfigError(f"anchors {self.anchors}: allowed are 0 to less than 1")
        if not self.micro_partitions or not all(map(all, self.micro_partitions)):
            raise ConfigError("micro_partitions name at least one number for every level")

    # --- numbers of levels ---------------------------------------------------------------------

    @staticmethod
    def level_counts(locations: Sequence[str]) -> range:
        """N_v: 1 or 2 inside a server, 2 or 3 across servers, 3 or 4 across racks, as far as the
        locations tell so many apart."""
        topology = Topology.of(locations)
        fewest = 1 if len(topology.servers) == 1 else 2 if len(topology.racks) == 1 else 3
        told_apart = len(topology.granularities)
        return range(min(fewest, told_apart), min(fewest + 1, told_apart) + 1)

    # --- micro-partitions ----------------------------------------------------------------------

    def micros(self, levels: int) -> list[tuple[int, ...]]:
        """M of levels 1 .. N_v, every combination."""
        last = len(self.micro_partitions) - 1
        return list(product(*(self.micro_partitions[min(v, last)] for v in range(levels))))

    # --- drop ratios ---------------------------------------------------------------------------

    def grids(self, anchor: float) -> list[list[Spread]]:
        """Ratios to try of each run of layers, ascending for every head."""
        steps = round(self.reach / self.step)
        return [
            _distinct(
                tuple(_clipped(centre + number * self.step) for centre in of_heads)
                for number in range(-steps, steps + 1)
            )
            for of_heads in self.groups.centres(anchor)
        ]

    def ratios(self) -> Iterator[Ratios]:
        """All combinations, each once, all of nothing left out: that is exact attention."""
        seen = set()
        for anchor in self.anchors:
            for ratios in product(*self.grids(anchor)):
                if ratios not in seen and any(map(any, ratios)):
                    seen.add(ratios)
                    yield ratios

    def admissible(
        self, settings: Callable[[Ratios], CsaSettings], loss: Loss, most: float
    ) -> Iterator[Ratios]:
        """Those of `ratios` that lose no more than `most`, with the branches cut that cannot.

        Args:
            settings: that ratios belong to.
            loss: does not fall when a ratio rises.
        """
        seen = set()
        for anchor in self.anchors:
            for ratios in _within(self.grids(anchor), (), settings, loss, most):
                if ratios not in seen and any(map(any, ratios)):
                    seen.add(ratios)
                    yield ratios

    # --- configurations ------------------------------------------------------------------------

    def settings(
        self,
        strategy: Architecture,
        levels: int,
        judging: Judging,
        ratios: Ratios,
        micro: tuple[int, ...] | None = None,
    ) -> CsaSettings:
        """One configuration."""
        assert judging.layer in ("previous", "same")
        return CsaSettings(
            levels=levels,
            drop_ratios=self.groups.by_layer(ratios),
            micro_partitions=None if micro is None else (micro,),
            strategy=strategy,
            importance_layer="same" if judging.layer == "same" else "previous",
            importance_window=judging.window,
        )

    def variants(self, locations: Sequence[str]) -> Iterator[tuple[Architecture, int, Judging]]:
        """(strategy, N_v, judging) of sparse attention; one level drops nothing."""
        for strategy, levels, judging in product(
            self.strategies, self.level_counts(locations), self.judging
        ):
            if levels > 1:
                yield strategy, levels, judging

    def exact(self, locations: Sequence[str]) -> list[CsaSettings]:
        """Exact attention: SP-NTP as a whole, over levels with each M, and SP-TP."""
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
    """Combinations that begin with what is chosen."""
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
