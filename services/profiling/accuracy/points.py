"""Which configurations the loss of accuracy is measured of (CSPS App. B)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from csps.configurator.enumeration import Judging, Space
from csps.configurator.regressors.measured import places_of
from csps.configurator.scaling_information_base import AccuracyRow
from csps.models.spec import ModelSpec
from csps.protocols.csa_settings import CsaSettings
from csps.services.profiling.accuracy.emulated_group import EmulatedGroup


@dataclass(frozen=True, kw_only=True)
class Branch:
    """Configurations that differ in how much they drop alone."""

    tokens: int
    group_shape: str
    """Instances by server, such as "2" or "4+4"."""
    strategy: Literal["ntp", "tp"]
    levels: int
    judging: Judging


@dataclass(frozen=True, kw_only=True)
class Point:
    """One configuration."""

    branch: Branch
    drop_ratio: float

    @property
    def settings(self) -> CsaSettings:
        """As a request would ask for it."""
        it = self.branch
        return CsaSettings(
            levels=it.levels,
            drop_ratios=((self.drop_ratio,),),
            strategy=it.strategy,
            importance_layer="same" if it.judging.layer == "same" else "previous",
            importance_window=it.judging.window,
        )

    def group(self, spec: ModelSpec, tokens: int) -> EmulatedGroup:
        """Of a prompt, which may be a little shorter than the branch says."""
        places, tensor_parallel = places_of(self.branch.group_shape), self.branch.strategy == "tp"
        plan = self.settings.for_group(
            places, layers=spec.layers, longest_spt=tokens, every_query=tensor_parallel
        )
        return EmulatedGroup(spec=spec, plan=plan, tokens=tokens, tensor_parallel=tensor_parallel)

    @classmethod
    def of_row(cls, row: AccuracyRow) -> Point:
        """What a row is about."""
        branch = Branch(
            tokens=row.tokens,
            group_shape=row.group_shape,
            strategy="tp" if row.strategy == "tp" else "ntp",
            levels=row.levels,
            judging=Judging(row.importance_layer, row.importance_window),
        )
        return cls(branch=branch, drop_ratio=row.drop_ratio)


@dataclass(frozen=True, kw_only=True)
class Enumeration:
    """All points, as far as a model takes their lengths."""

    lengths: tuple[int, ...] = (1_024, 2_048, 4_096)
    group_shapes: tuple[str, ...] = ("2", "4", "2+2", "4+4")
    judging: tuple[tuple[Literal["ntp", "tp"], Judging], ...] = (
        ("ntp", Judging("same", 64)),
        ("ntp", Judging("previous", 64)),
        ("tp", Judging("same", 64)),
        ("tp", Judging("previous", 64)),
        ("ntp", Judging("same", 16)),
        ("ntp", Judging("same", 256)),
    )
    drop_ratios: tuple[float, ...] = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98)
    """Ascending."""

    def points(self, tokens: int) -> Iterator[Point]:
        """Of one length, those that drop least first."""
        for ratio, branch in product(self.drop_ratios, self._branches(tokens)):
            yield Point(branch=branch, drop_ratio=ratio)

    def _branches(self, tokens: int) -> Sequence[Branch]:
        return [
            Branch(
                tokens=tokens,
                group_shape=shape,
                strategy=strategy,
                levels=levels,
                judging=judging,
            )
            for strategy, judging in self.judging
            for shape in self.group_shapes
            for levels in Space.level_counts(places_of(shape))
            if levels > 1
        ]


QUICK = Enumeration(
    lengths=(1_024,),
    group_shapes=("2", "2+2"),
    judging=(("ntp", Judging("same", 64)), ("ntp", Judging("previous", 64))),
    drop_ratios=(0.3, 0.6, 0.9),
)
