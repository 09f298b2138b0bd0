"""Select the configurations that bounds choose.

With prompts so long that all would take days, these alone are measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from csps.configurator.model.scaling_information_base import AccuracyRow
from csps.configurator.regressors.samples import Setting, accuracy_samples, places_of
from csps.configurator.regressors.support import Support
from csps.configurator.search.space import LayerGroups
from csps.services.profiling.accuracy.profile import Enumeration, Point


@dataclass(frozen=True, kw_only=True)
class ChosenPoints(Enumeration):
    """Points that bounds would choose: among configurations that differ only in how much they drop,
    the one that drops most within each bound, by what shorter prompts lost."""

    measured: Sequence[AccuracyRow]
    """Measurements of the model."""
    shipped: Support | None
    """Measurements that ship with the model; used if none are shorter."""
    layers: int
    bounds: tuple[float, ...]

    def points(self, tokens: int) -> Iterator[Point]:
        """Yield the points of one length, those that drop least first."""
        shorter = [row for row in self.measured if row.tokens < tokens]
        samples = accuracy_samples(shorter, layers=self.layers)
        support = Support.of(samples) if samples else self.shipped
        if support is None:
            return
        points = sorted(super().points(tokens), key=lambda point: repr(point.branch))
        chosen = set()
        for _, alike in groupby(points, key=lambda point: point.branch):
            branch = list(alike)
            losses = support.losses([self._setting(point) for point in branch])
            for bound in self.bounds:
                within = [
                    point for point, loss in zip(branch, losses, strict=True) if loss <= bound
                ]
                if within:
                    chosen.add(max(within, key=lambda point: point.largest))
        yield from (point for point in super().points(tokens) if point in chosen)

    def layer_points(self, tokens: int, spreads: LayerGroups) -> Iterator[Point]:
        """Yield nothing: shorter prompts relate the layers."""
        return iter(())

    def graded_points(self, tokens: int, groups: LayerGroups) -> Iterator[Point]:
        """Yield nothing: bounds choose among `points`."""
        return iter(())

    def _setting(self, point: Point) -> Setting:
        return Setting(
            tokens=point.branch.tokens,
            locations=places_of(point.branch.group_shape),
            layers=self.layers,
            csa=point.settings,
        )
