"""Sparse attention as a request asks for it, before it is known where it runs.

Which instances a request runs on is the policy's decision; levels and micro-partitions are made
for that very group when its step is launched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, Literal, TypeVar

from csps.protocols.csa import CsaPlan, LayerGroup, halving
from csps.protocols.errors import ConfigError
from csps.protocols.topology import MAX_LEVELS, Topology

T = TypeVar("T")

Architecture = Literal["ntp", "tp", "tp_flat"]
"""SP-NTP; SP-TP with hierarchical collectives, or with flat ones for comparison (CSPS §3.2.1)."""

MICRO_PARTITIONS = 4
"""M if the client names none: enough to hide most of an exchange, and few messages."""


@dataclass(frozen=True, kw_only=True)
class CsaSettings:
    """A `CsaPlan` for whichever group; requests of equal settings may share a step.

    Raises:
        ConfigError: a number that no `CsaPlan` allows, or options that exclude each other.
    """

    levels: int | None = None
    """Most levels (N_v); a group that tells fewer apart has fewer. None: as many as it does."""
    drop_ratios: tuple[tuple[float, ...], ...] = ((0.0,),)
    """p of level 2, in [0, 1), by layer, the last one's for all further layers: one for all KV
    heads, or one per KV head. Each farther level keeps half of what the nearer one does."""
    micro_partitions: tuple[tuple[int, ...], ...] | None = None
    """Most of them (M) by layer and by level, the last one's for all further ones; an SPT of fewer
    tokens has one a token. None is `MICRO_PARTITIONS` everywhere."""
    strategy: Architecture | None = None
    """None: whichever of those that can do it moves least."""
    nested: bool = False
    drop_queries: bool = True
    importance_window: int = 64
    importance_layer: Literal["previous", "same"] = "previous"
    sinks: int = 4
    tail: int = 64
    pipelined: bool = True
    decode_kept_only: bool = False
    """These eight are `CsaPlan`'s: what the paper leaves open, or takes away for comparison."""

    def __post_init__(self) -> None:
        for by_layer in (self.drop_ratios, self._micro_partitions):
            if not by_layer or not all(by_layer):
                raise ConfigError("drop_ratios and micro_partitions name a number for every layer")
        if self.strategy in ("tp", "tp_flat") and (only := self.ntp_only):
            raise ConfigError(f"strategy '{self.strategy}' does not have {only}")
        # What is wrong with it is wrong for every group. Better found here than by a step.
        for of_heads in self.drop_ratios:
            halving(of_heads, self.levels or MAX_LEVELS)
        if self.levels is not None and self.levels < 1:
            raise ConfigError(f"levels start at 1, not {self.levels}")
        longest_spt = min(map(min, self._micro_partitions))
        self.for_group(("0-0-0",), layers=1, longest_spt=longest_spt)

    @property
    def lossless(self) -> bool:
        """Whether it is exact attention, in parts."""
        return self.levels == 1 or not (any(map(any, self.drop_ratios)) or self.nested)

    @property
    def ntp_only(self) -> str | None:
        """The option, if there is one, that SP-TP does not have."""
        return ntp_only(nested=self.nested, decode_kept_only=self.decode_kept_only)

    def for_group(
        self, locations: Sequence[str], *, layers: int, longest_spt: int, every_query: bool = False
    ) -> CsaPlan:
        """The plan of a step.

        Args:
            locations: Rack-Server-GPU ids of the group's members, ascending.
            layers: of the model.
            longest_spt: tokens of the member that has most.
            every_query: SP-TP computes those of dropped tokens as well, whatever `drop_queries`.
        """
        levels = self._levels_of(locations)
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
            **{**self._variant(), "drop_queries": self.drop_queries and not every_query},
        )

    def _levels_of(self, locations: Sequence[str]) -> int:
        told_apart = len(Topology.of(locations).granularities)
        return told_apart if self.levels is None else min(self.levels, told_apart)

    def _variant(self) -> dict[str, Any]:
        """The fields that a plan has under the same name and with the same meaning."""
        of_plan = {field.name for field in fields(CsaPlan)}
        own = ("levels", "drop_ratios", "micro_partitions", "strategy")
        names = (field.name for field in fields(self) if field.name not in own)
        return {name: getattr(self, name) for name in names if name in of_plan}

    @property
    def _micro_partitions(self) -> tuple[tuple[int, ...], ...]:
        return ((MICRO_PARTITIONS,),) if self.micro_partitions is None else self.micro_partitions

    def _layer_runs(self, layers: int) -> Iterator[range]:
        """Neighbouring layers of equal numbers."""
        for _, run in groupby(
            range(layers),
            key=lambda layer: (_of(self.drop_ratios, layer), _of(self._micro_partitions, layer)),
        ):
            alike = list(run)
            yield range(alike[0], alike[-1] + 1)

    def _micro(self, layer: int, levels: int) -> tuple[int, ...]:
        """M of levels 1, 2, …, as asked for."""
        return tuple(_of(_of(self._micro_partitions, layer), level) for level in range(levels))

    def shortfalls(self, plan: CsaPlan) -> Iterator[str]:
        """What the plan of a step has less than this, in words."""
        members = len(plan.locations)
        if members == 1 and self.levels != 1:
            yield "the step has one instance, which attends exactly"
        elif self.levels is not None and plan.levels < self.levels:
            yield (
                f"{plan.levels} of {self.levels} levels, because that is all that the "
                f"{members} instances of the step tell apart"
            )
        if self.micro_partitions is None:
            return
        asked = max(max(self._micro(run.first, plan.levels)) for run in plan.layer_groups)
        if (most := max(max(run.micro_partitions) for run in plan.layer_groups)) < asked:
            yield f"{most} of {asked} micro-partitions, because no instance has more tokens"


def ntp_only(*, nested: bool | None, decode_kept_only: bool | None) -> str | None:
    """Which of these options, if one, asks for what only SP-NTP has."""
    if nested:
        return "'nested'"
    return "'decode_kept_only'" if decode_kept_only else None


def _of(numbers: Sequence[T], index: int) -> T:
    """The last number is also that of all further layers, or levels."""
    return numbers[min(index, len(numbers) - 1)]
