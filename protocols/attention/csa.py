"""Communication-efficient sparse attention: its plan and its settings (CSPS §3.2.4-3.2.6).

A `CsaPlan` has N_v levels, drop ratios p_{l,h,v} and micro-partitions M_{l,v}, and the options that
the paper leaves open: how levels are read, what scores importance, and what is never dropped.
Instead of drop ratios a layer may have coverages: shares of attention that kept tokens must reach.
`CsaSettings` is the same as a request asks for it, before its group is known. The policy chooses
the instances; levels and micro-partitions are made for that group when the step is launched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby, pairwise
from typing import Any, Literal, TypeVar

from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import MAX_LEVELS, Segments, Topology

ALL_QUERIES = 0
"""Value of `CsaPlan.importance_window` that scores by all queries."""

Ratios = tuple[tuple[float, ...], ...]
"""Drop ratios or coverages of levels 2, 3, …, or of layers; of each, one for all KV heads or one
per KV head."""

T = TypeVar("T")

_LARGEST = math.nextafter(1.0, 0.0)
_SMALLEST = math.nextafter(0.0, 1.0)


def halving(drop_ratio: float | Sequence[float], levels: int) -> Ratios:
    """Return ratios that keep half as much from level to level: keep_{2+n} = keep_2 / 2^n.

    Args:
        drop_ratio: ratio of level 2, for all KV heads or for each one.
    """
    # The paper prints 1-p = (1-p')/2^n, which keeps more of what is farther away; its text wants
    # the opposite. A ratio of 0 asks for exact attention, so it drops nothing at any level.
    by_head = drop_ratio if isinstance(drop_ratio, Sequence) else (drop_ratio,)
    for ratio in by_head:
        _check_ratio(ratio)
    return tuple(
        # Halving the largest ratios would round to 1, which keeps nothing.
        tuple(min(1.0 - (1.0 - ratio) / 2**n, _LARGEST) if ratio else 0.0 for ratio in by_head)
        for n in range(levels - 1)
    )


def squaring(coverage: float | Sequence[float], levels: int) -> Ratios:
    """Return coverages that are squared from level to level: c_{2+n} = c_2 ^ 2^n.

    Args:
        coverage: coverage of level 2, for all KV heads or for each one.
    """
    # A small dropped mass doubles from level to level, as halving doubles the dropped tokens; and
    # unlike twice the dropped mass, a square is never 0 or less.
    by_head = coverage if isinstance(coverage, Sequence) else (coverage,)
    for share in by_head:
        _check_coverage(share)
    return tuple(
        tuple(max(share ** (2**n), _SMALLEST) for share in by_head) for n in range(levels - 1)
    )


def ratios_text(drop_ratios: Ratios) -> str:
    """Return ratios by layer as text, such as "0, 0.9, 0.3/0.6" with two KV heads."""
    return ", ".join("/".join(f"{ratio:g}" for ratio in of_heads) for of_heads in drop_ratios)


def parse_ratios(text: str) -> Ratios:
    """Parse `ratios_text`.

    Raises:
        ValueError: it is no such text.
    """
    return tuple(
        tuple(float(ratio) for ratio in of_heads.split("/")) for of_heads in text.split(", ")
    )


def shortened(drop_ratios: Ratios) -> Ratios:
    """Return the same ratios with equal ones of all KV heads, or of all last layers, only once."""
    return trimmed(
        of_heads[:1] if len(set(of_heads)) == 1 else of_heads for of_heads in drop_ratios
    )


def trimmed(by_layer: Iterable[T]) -> tuple[T, ...]:
    """Return numbers by layer without the last ones that repeat the one before."""
    kept = list(by_layer)
    while len(kept) > 1 and kept[-1] == kept[-2]:
        kept.pop()
    return tuple(kept)


def kept_tokens(tokens: int, drop_ratio: float, always: int = 0) -> int:
    """Return how many of an SPT's tokens a level keeps, of which `always` are never dropped."""
    # The tolerance is needed because 1 - 0.9 is a little more than a tenth.
    return max(always, math.ceil((1.0 - drop_ratio) * tokens - 1e-9))


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Similar layers that share ratios and micro-partitions (CSPS App. B)."""

    first: int
    stop: int
    """First layer after the group, which is layers [first, stop)."""
    drop_ratios: Ratios = ()
    """Drop ratios by level; empty drops nothing."""
    coverages: Ratios = ()
    """Coverages by level: shares of the estimated attention mass of an SPT's droppable tokens that
    its kept ones must reach, in (0, 1]; 1 drops nothing. Empty: `drop_ratios` hold."""
    micro_partitions: tuple[int, ...] = ()
    """M of levels 1, 2, …; empty means 1 everywhere."""

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.stop:
            raise ConfigError(f"layers [{self.first}, {self.stop}) are not a range of layers")
        for ratios in self.drop_ratios:
            if not ratios:
                raise ConfigError(
                    "a level has no drop_ratios; allowed are one for all KV heads, or one per KV "
                    "head"
                )
            for ratio in ratios:
                _check_ratio(ratio)
        for nearer, farther in pairwise(self.drop_ratios):
            _check_nested("drop ratios", nearer, farther, rising=(nearer, farther))
        self._check_coverages()
        if any(count < 1 for count in self.micro_partitions):
            raise ConfigError(f"micro_partitions {self.micro_partitions}: allowed are 1 and more")

    def _check_coverages(self) -> None:
        if self.coverages and any(map(any, self.drop_ratios)):
            raise ConfigError("layers have either drop_ratios or coverages, not both")
        for shares in self.coverages:
            if not shares:
                raise ConfigError(
                    "a level has no coverages; allowed are one for all KV heads, or one per KV head"
                )
            for share in shares:
                _check_coverage(share)
        for nearer, farther in pairwise(self.coverages):
            _check_nested("coverages", nearer, farther, rising=(farther, nearer))

    def drop_ratio(self, level: int, kv_head: int) -> float:
        """Return p of a level, counted from 1, and a KV head of the whole model."""
        if level == 1 or not self.drop_ratios:
            return 0.0
        return _of_head(self.drop_ratios[level - 2], kv_head)

    def coverage(self, level: int, kv_head: int) -> float:
        """Return the coverage of a level, counted from 1, and a KV head of the whole model; 1 drops
        nothing."""
        if level == 1 or not self.coverages:
            return 1.0
        return _of_head(self.coverages[level - 2], kv_head)

    @property
    def drops(self) -> bool:
        """True if a level drops tokens of a KV head."""
        covering = any(share < 1.0 for shares in self.coverages for share in shares)
        return covering or any(map(any, self.drop_ratios))

    def micro(self, level: int) -> int:
        """Return M of a level, counted from 1."""
        return self.micro_partitions[level - 1] if self.micro_partitions else 1


@dataclass(frozen=True, kw_only=True)
class CsaPlan:
    """Sparse attention of one step's layers, for a group whose members are at `locations`.

    Raises:
        ConfigError: locations out of order or named twice, more levels than they distinguish,
            ratios outside [0, 1), layer groups that overlap, or numbers for other than `levels`.
    """

    locations: tuple[str, ...]
    """Rack-Server-GPU id of each member of the group, in the group's order, ascending."""
    levels: int
    """N_v, from 1 to what the locations distinguish (`Topology.levels`)."""
    layer_groups: tuple[LayerGroup, ...] = ()
    """Layer groups, ascending; layers outside drop nothing and are not cut. The first and the
    last layer never drop, whatever their group says."""
    nested: bool = False
    """Levels as the paper's formula has them: a level attends to its whole segment, so near
    tokens count once per level. The default attends at each level only to what no lower level
    has, which is exact at ratio 0."""
    drop_queries: bool = True
    """True if a dropped token's query is dropped with its key and value; False drops only the
    latter."""
    importance_window: int = 64
    """Number of the prompt's last queries that score importance; 0 means all queries."""
    importance_layer: Literal["previous", "same"] = "previous"
    """Layer whose attention decides what a layer drops.

    The previous layer's is known before the layer begins, but its heads may look for other tokens.
    The same layer's is accurate, but costs a round of small messages before the first all-to-all,
    and requires a window.
    """
    sinks: int = 4
    """Number of first tokens of a prompt that are never dropped."""
    tail: int = 64
    """Number of last tokens of a prompt that are never dropped."""
    pipelined: bool = True
    """True overlaps both all-to-alls with attention; False waits for each, for comparison."""
    decode_kept_only: bool = False
    """True if decode attends, in layers that drop, only to tokens that prefill kept, head by head.

    These are all tokens of a prompt's last SPT, since level 1 drops none and generated tokens
    belong to it (CSPS §4.2), and of every other SPT those that level 2 keeps, which include those
    of farther levels. The prompt's last token never attends to more. No other KV is sent to the
    decode gang. By default decode attends to all tokens.
    """

    def __post_init__(self) -> None:
        self.topology.require_order()
        self.segments()
        for name in ("importance_window", "sinks", "tail"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} {getattr(self, name)}: allowed are 0 and more")
        if self.importance_layer == "same" and self.importance_window == ALL_QUERIES:
            raise ConfigError(
                "importance_layer 'same' needs an importance_window of 1 or more: what all queries "
                "attend to is known only when the layer is over"
            )
        for before, after in pairwise(self.layer_groups):
            if after.first < before.stop:
                raise ConfigError(
                    f"layer groups must ascend without overlap; they do not at layer {after.first}"
                )
        for group in self.layer_groups:
            self._check_levels("drop_ratios", group.drop_ratios, self.levels - 1)
            self._check_levels("coverages", group.coverages, self.levels - 1)
            self._check_levels("micro_partitions", group.micro_partitions, self.levels)

    def _check_levels(self, name: str, numbers: Sequence[object], expected: int) -> None:
        if len(numbers) not in (0, expected):
            raise ConfigError(
                f"{name} of {len(numbers)} levels; {self.levels} levels need {expected}, or none"
            )

    @property
    def lossless(self) -> bool:
        """True if it is exact attention, computed by levels."""
        dropping = any(group.drops for group in self.layer_groups)
        return self.levels == 1 or not (dropping or self.nested)

    @property
    def topology(self) -> Topology:
        """Topology of the members."""
        return Topology.of(self.locations)

    def segments(self) -> tuple[Segments, ...]:
        """Return the segments of members, level 1 first."""
        return self.topology.levels(self.levels)

    def layer_group(self, layer: int) -> LayerGroup:
        """Return the group of a layer; one that drops nothing where the plan names none."""
        for group in self.layer_groups:
            if group.first <= layer < group.stop:
                return group
        return LayerGroup(first=layer, stop=layer + 1)

    def check_kv_heads(self, kv_heads: int) -> None:
        """Check ratios per KV head against a model.

        Raises:
            ConfigError: there are ratios or coverages per KV head, but not `kv_heads` of them.
        """
        for group in self.layer_groups:
            for name in ("drop_ratios", "coverages"):
                for of_level in getattr(group, name):
                    if len(of_level) not in (1, kv_heads):
                        raise ConfigError(
                            f"{len(of_level)} {name} of one level; allowed are one for all KV "
                            f"heads, or {kv_heads}, one per KV head of the model"
                        )

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Check micro-partitions against the SPTs of a step.

        Args:
            tokens: number of tokens of each member.

        Raises:
            ConfigError: a level has more micro-partitions than the longest SPT has tokens.
        """
        longest = max(tokens)
        for group in self.layer_groups:
            if any(count > longest for count in group.micro_partitions):
                raise ConfigError(
                    f"micro_partitions {group.micro_partitions}, but the longest SPT has "
                    f"{longest} tokens; allowed are 1 to {longest}"
                )


def _of_head(ratios: tuple[float, ...], kv_head: int) -> float:
    return ratios[0] if len(ratios) == 1 else ratios[kv_head]


def _check_nested(
    name: str,
    nearer: tuple[float, ...],
    farther: tuple[float, ...],
    *,
    rising: tuple[tuple[float, ...], tuple[float, ...]],
) -> None:
    """Check numbers of two levels; `rising` are both, and no number of its first may be greater."""
    heads = max(len(nearer), len(farther))
    if len(nearer) > 1 and len(farther) > 1 and len(nearer) != len(farther):
        raise ConfigError(f"{len(nearer)} {name} of one level, {len(farther)} of the next")
    least, most = rising
    if any(_of_head(least, h) > _of_head(most, h) for h in range(heads)):
        raise ConfigError(
            f"{name} {nearer} of one level and {farther} of the next: a farther level may not keep "
            "what a nearer one drops"
        )


def _check_ratio(ratio: float) -> None:
    if not 0.0 <= ratio < 1.0:
        raise ConfigError(f"drop ratio {ratio}: allowed are 0 to less than 1")


def _check_coverage(share: float) -> None:
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"coverage {share}: allowed are more than 0 to 1")


Architecture = Literal["ntp", "tp", "tp_flat"]
"""SP-NTP; SP-TP with hierarchical collectives, or with flat ones for comparison (CSPS §3.2.1)."""

MICRO_PARTITIONS = 4
"""M if the client names none: enough to hide most of an exchange with few messages."""


@dataclass(frozen=True, kw_only=True)
class CsaSettings:
    """A `CsaPlan` for any group; requests with equal settings may share a step.

    Raises:
        ConfigError: a number that no `CsaPlan` allows, or options that exclude each other.
    """

    levels: int | None = None
    """Largest number of levels (N_v); a group that distinguishes fewer has fewer. None: as many
    as the group distinguishes."""
    drop_ratios: tuple[tuple[float, ...], ...] = ((0.0,),)
    """p of level 2, in [0, 1), by layer: one for all KV heads, or one per KV head.

    The last entry holds for all further layers. Each farther level keeps half of what the nearer
    one does.
    """
    coverages: tuple[tuple[float, ...], ...] | None = None
    """Coverage of level 2, in (0, 1], by layer and KV head as `drop_ratios`, which must be 0 then.

    Each farther level covers the square of the share before.
    """
    micro_partitions: tuple[tuple[int, ...], ...] | None = None
    """Largest M by layer and by level; the last entries hold for all further ones.

    An SPT with fewer tokens has one micro-partition per token. None is `MICRO_PARTITIONS`
    everywhere.
    """
    strategy: Architecture | None = None
    """Architecture; None: the one that can serve the request and moves least."""
    nested: bool = False
    drop_queries: bool = True
    importance_window: int = 64
    importance_layer: Literal["previous", "same"] = "previous"
    sinks: int = 4
    tail: int = 64
    pipelined: bool = True
    decode_kept_only: bool = False
    """Same as in `CsaPlan`, like the seven fields before it."""

    def __post_init__(self) -> None:
        for by_layer in (self.drop_ratios, self._micro_partitions):
            if not by_layer or not all(by_layer):
                raise ConfigError("drop_ratios and micro_partitions name a number for every layer")
        if self.strategy in ("tp", "tp_flat") and (only := self.ntp_only):
            raise ConfigError(f"strategy '{self.strategy}' does not have {only}")
        # Building a plan for any group checks the rest here, not first when a step is launched.
        for of_heads in self.drop_ratios:
            halving(of_heads, self.levels or MAX_LEVELS)
        if self.coverages is not None:
            self._check_coverages(self.coverages)
        if self.levels is not None and self.levels < 1:
            raise ConfigError(f"levels start at 1, not {self.levels}")
        longest_spt = min(map(min, self._micro_partitions))
        self.for_group(("0-0-0",), layers=1, longest_spt=longest_spt)

    def _check_coverages(self, coverages: tuple[tuple[float, ...], ...]) -> None:
        if not coverages or not all(coverages):
            raise ConfigError("coverages name a number for every layer")
        if any(map(any, self.drop_ratios)):
            raise ConfigError("coverages and drop_ratios exclude each other")
        for of_heads in coverages:
            squaring(of_heads, self.levels or MAX_LEVELS)

    @property
    def lossless(self) -> bool:
        """True if it is exact attention, computed in parts."""
        covering = any(share < 1.0 for of_heads in self.coverages or () for share in of_heads)
        dropping = covering or any(map(any, self.drop_ratios))
        return self.levels == 1 or not (dropping or self.nested)

    @property
    def ntp_only(self) -> str | None:
        """Name of an option in use that SP-TP does not support, or None."""
        return ntp_only(nested=self.nested, decode_kept_only=self.decode_kept_only)

    def for_group(
        self, locations: Sequence[str], *, layers: int, longest_spt: int, every_query: bool = False
    ) -> CsaPlan:
        """Return the plan of a step.

        Args:
            locations: Rack-Server-GPU ids of the group's members, ascending.
            layers: number of layers of the model.
            longest_spt: tokens of the member that has most.
            every_query: SP-TP computes queries of dropped tokens, too, despite `drop_queries`.
        """
        levels = self._levels_of(locations)
        return CsaPlan(
            locations=tuple(locations),
            levels=levels,
            layer_groups=tuple(
                LayerGroup(
                    first=run.start,
                    stop=run.stop,
                    **self._dropping(run.start, levels),
                    micro_partitions=tuple(
                        min(count, longest_spt) for count in self._micro(run.start, levels)
                    ),
                )
                for run in self._layer_runs(layers)
            ),
            **{**self._variant(), "drop_queries": self.drop_queries and not every_query},
        )

    def _dropping(self, layer: int, levels: int) -> dict[str, Ratios]:
        """Return the drop ratios or the coverages of a layer."""
        if self.coverages is None:
            return {"drop_ratios": halving(_of(self.drop_ratios, layer), levels)}
        return {"coverages": squaring(_of(self.coverages, layer), levels)}

    def _levels_of(self, locations: Sequence[str]) -> int:
        distinct = len(Topology.of(locations).granularities)
        return distinct if self.levels is None else min(self.levels, distinct)

    def _variant(self) -> dict[str, Any]:
        """Return the fields that a plan has with the same name and meaning."""
        of_plan = {field.name for field in fields(CsaPlan)}
        own = ("levels", "drop_ratios", "coverages", "micro_partitions", "strategy")
        names = (field.name for field in fields(self) if field.name not in own)
        return {name: getattr(self, name) for name in names if name in of_plan}

    @property
    def _micro_partitions(self) -> tuple[tuple[int, ...], ...]:
        return ((MICRO_PARTITIONS,),) if self.micro_partitions is None else self.micro_partitions

    def _layer_runs(self, layers: int) -> Iterator[range]:
        """Yield runs of neighboring layers with equal numbers."""
        for _, run in groupby(
            range(layers),
            key=lambda layer: (
                _of(self.drop_ratios, layer),
                _of(self.coverages or ((1.0,),), layer),
                _of(self._micro_partitions, layer),
            ),
        ):
            alike = list(run)
            yield range(alike[0], alike[-1] + 1)

    def _micro(self, layer: int, levels: int) -> tuple[int, ...]:
        """Return M of levels 1, 2, …, as requested."""
        return tuple(_of(_of(self._micro_partitions, layer), level) for level in range(levels))

    def shortfalls(self, plan: CsaPlan) -> Iterator[str]:
        """Yield, in words, what the plan of a step has less than these settings."""
        members = len(plan.locations)
        if members == 1 and self.levels != 1:
            yield "the step has one instance, which attends exactly"
        elif self.levels is not None and plan.levels < self.levels:
            yield (
                f"{plan.levels} of {self.levels} levels, because the {members} instances of the "
                "step distinguish no more"
            )
        if self.micro_partitions is None:
            return
        asked = max(max(self._micro(run.first, plan.levels)) for run in plan.layer_groups)
        if (most := max(max(run.micro_partitions) for run in plan.layer_groups)) < asked:
            yield f"{most} of {asked} micro-partitions, because no instance has more tokens"


def ntp_only(*, nested: bool | None, decode_kept_only: bool | None) -> str | None:
    """Return the name of an option in use that only SP-NTP supports, or None."""
    if nested:
        return "'nested'"
    return "'decode_kept_only'" if decode_kept_only else None


def _of(numbers: Sequence[T], index: int) -> T:
    """Return the number at an index; the last number holds for all further layers, or levels."""
    return numbers[min(index, len(numbers) - 1)]
