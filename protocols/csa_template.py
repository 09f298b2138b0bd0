"""Sparse attention before it is known where: what a plan says until a group is chosen.

The configurator knows the gang; which of its instances a request runs on is the policy's decision,
and it may take fewer of them than the configurator thought of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Literal, TypeVar

from csps.protocols.csa import CsaPlan, LayerGroup, halving
from csps.protocols.errors import ConfigError
from csps.protocols.topology import Topology

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CsaVariant:
    """What the paper leaves open or takes away for comparison; each field is `CsaPlan`'s."""

    nested: bool = False
    drop_queries: bool = True
    importance_window: int = 64
    importance_layer: Literal["previous", "same"] = "previous"
    sinks: int = 4
    tail: int = 64
    pipelined: bool = True
    decode_kept_only: bool = False


@dataclass(frozen=True, kw_only=True)
class CsaTemplate:
    """A `CsaPlan` for whichever group; requests of equal templates may share a job.

    Raises:
        ConfigError: a number that no `CsaPlan` allows.
    """

    levels: int
    """Most levels (N_v); a group that tells fewer apart has fewer."""
    drop_ratios: tuple[tuple[float, ...], ...] = ((0.0,),)
    """p of level 2, in [0, 1), by layer, the last one's for all further layers: one for all KV
    heads, or one per KV head. Each farther level keeps half of what the nearer one does."""
    micro_partitions: tuple[tuple[int, ...], ...] = ((1,),)
    """Most of them (M) by layer and by level, the last one's for all further ones; an SPT of fewer
    tokens has one a token."""
    variant: CsaVariant = CsaVariant()

    def __post_init__(self) -> None:
        for by_layer in (self.drop_ratios, self.micro_partitions):
            if not by_layer or not all(by_layer):
                raise ConfigError("drop_ratios and micro_partitions name a number for every layer")
        # What is wrong with it is wrong for every group. Better found here than by a job.
        for of_heads in self.drop_ratios:
            halving(of_heads, self.levels)
        self.for_group(("0-0-0",), layers=1, longest_spt=min(map(min, self.micro_partitions)))

    @property
    def lossless(self) -> bool:
        """Whether it is exact attention, in parts."""
        return self.levels == 1 or not (any(map(any, self.drop_ratios)) or self.variant.nested)

    def for_group(self, locations: Sequence[str], *, layers: int, longest_spt: int) -> CsaPlan:
        """The plan of a job.

        Args:
            locations: Rack-Server-GPU ids of the group's members, ascending.
            layers: of the model.
            longest_spt: tokens of the member that has most.
        """
        levels = min(self.levels, len(Topology.of(locations).granularities))
        return CsaPlan(
            locations=tuple(locations),
            levels=levels,
            layer_groups=tuple(
                LayerGroup(
                    first=run.start,
                    stop=run.stop,
                    drop_ratios=halving(_of(self.drop_ratios, run.start), levels),
                    micro_partitions=tuple(
                        min(count, longest_spt) for count in self._micro(run.start, levels)
                    ),
                )
                for run in self._layer_runs(layers)
            ),
            **asdict(self.variant),
        )

    def _layer_runs(self, layers: int) -> Iterator[range]:
        """Neighbouring layers of equal numbers."""
        for _, run in groupby(
            range(layers),
            key=lambda layer: (_of(self.drop_ratios, layer), _of(self.micro_partitions, layer)),
        ):
            alike = list(run)
            yield range(alike[0], alike[-1] + 1)

    def _micro(self, layer: int, levels: int) -> tuple[int, ...]:
        """M of levels 1, 2, …, as asked for."""
        return tuple(_of(_of(self.micro_partitions, layer), level) for level in range(levels))

    def shortfalls(self, plan: CsaPlan) -> Iterator[str]:
        """What the plan of a job has less than this, in words."""
        members = len(plan.locations)
        if members == 1 and self.levels > 1:
            yield "the job has one instance, which attends exactly"
        elif plan.levels < self.levels:
            yield (
                f"{plan.levels} of {self.levels} levels, because that is all that the "
                f"{members} instances of the job tell apart"
            )
        asked = max(max(self._micro(run.first, plan.levels)) for run in plan.layer_groups)
        if (most := max(max(run.micro_partitions) for run in plan.layer_groups)) < asked:
            yield f"{most} of {asked} micro-partitions, because no instance has more tokens"


def _of(numbers: Sequence[T], index: int) -> T:
    """The last number is also that of all further layers, or levels."""
    return numbers[min(index, len(numbers) - 1)]
