"""Sparse attention before it is known where: what a plan says until a group is chosen.

The configurator knows the gang; which of its instances a request runs on is the policy's decision,
and it may take fewer of them than the configurator thought of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from csps.protocols.csa import CsaPlan, LayerGroup, halving
from csps.protocols.topology import Topology


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


@dataclass(frozen=True, kw_only=True)
class CsaTemplate:
    """A `CsaPlan` for whichever group; requests of equal templates may share a job.

    Raises:
        ConfigError: a number that no `CsaPlan` allows.
    """

    levels: int
    """Most levels (N_v); a group that tells fewer apart has fewer."""
    drop_ratio: float = 0.0
    """p of level 2, in [0, 1); each farther level keeps half of what the nearer one does."""
    micro_partitions: int = 1
    """Most of them (M) at each level; an SPT of fewer tokens has one a token."""
    variant: CsaVariant = CsaVariant()

    def __post_init__(self) -> None:
        # What is wrong with it is wrong for every group. Better found here than by a job.
        self.for_group(("0-0-0",), layers=1, longest_spt=1)

    def for_group(self, locations: Sequence[str], *, layers: int, longest_spt: int) -> CsaPlan:
        """The plan of a job.

        Args:
            locations: Rack-Server-GPU ids of the group's members, ascending.
            layers: of the model.
            longest_spt: tokens of the member that has most.
        """
        levels = min(self.levels, len(Topology.of(locations).granularities))
        micro = min(self.micro_partitions, longest_spt)
        group = LayerGroup(
            first=0,
            stop=layers,
            drop_ratios=halving(self.drop_ratio, levels),
            micro_partitions=(micro,) * levels,
        )
        return CsaPlan(
            locations=tuple(locations),
            levels=levels,
            layer_groups=(group,),
            **asdict(self.variant),
        )

    def shortfalls(self, plan: CsaPlan) -> Iterator[str]:
        """What the plan of a job has less than this, in words."""
        members = len(plan.locations)
        if members == 1:
            yield "the job has one instance, which attends exactly"
        elif plan.levels < self.levels:
            yield (
                f"{plan.levels} of {self.levels} levels, because that is all that the "
                f"{members} instances of the job tell apart"
            )
        if (micro := plan.layer_group(0).micro(1)) < self.micro_partitions:
            yield (
                f"{micro} of {self.micro_partitions} micro-partitions, because no instance "
                "has more tokens"
            )
