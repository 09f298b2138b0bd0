"""Sizes of a model's attention, on which traffic depends, and checks of sparse attention against
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from csps.protocols.attention.csa import CsaSettings
from csps.protocols.core.errors import ConfigError, InvalidRequest
from csps.protocols.core.placement import even_share
from csps.protocols.core.topology import Topology


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes of a model's attention."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    lse: int = 1
    """Elements of the model's dtype that an fp32 LSE takes: 1 in fp32, 2 in 16 bit."""
    window: int | None = None
    """Positions that a token sees in layers with a sliding window, its own included."""
    windowed: frozenset[int] = frozenset()
    """Layers with the window."""

    def __post_init__(self) -> None:
        sizes = self.hidden, self.heads, self.kv_heads, self.head_dim, self.layers, self.lse
        if min(sizes) < 1:
            raise ValueError(f"sizes of attention must be at least 1: {self}")
        if self.windowed and self.window is None:
            raise ValueError(f"layers with a window, but no window: {self}")

    def window_of(self, layer: int) -> int | None:
        """Return the positions that a token sees in a layer; None for all."""
        return self.window if layer in self.windowed else None

    def after(self, layer: int) -> int:
        """Return the next layer without a window, for which this one scores importance."""
        return next(number for number in count(layer + 1) if number not in self.windowed)

    def may_drop(self, layer: int) -> bool:
        """Return False for layers with a window, the first one without, and the last layer, whose
        attention is always exact."""
        return layer not in self.windowed and self.after(-1) < layer < self.layers - 1

    @property
    def width(self) -> int:
        """Elements of the queries of one token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of the keys of one token, or of its values."""
        return self.kv_heads * self.head_dim

    @property
    def weights(self) -> int:
        """Elements of a layer's four projections; their biases are not counted."""
        return 2 * self.hidden * (self.width + self.kv_width)


def lse_elements(element_bytes: int) -> int:
    """Return the elements of a dtype that one fp32 LSE takes in a message; at least one."""
    return max(1, 4 // element_bytes)


def head_shares(heads: int, kv_heads: int, parts: int) -> Iterator[tuple[range, range]]:
    """Yield the query heads of each part, and the KV heads that they read.

    A KV head belongs to every part with a query head that reads it.
    """
    group = heads // kv_heads
    for part in range(parts):
        queries = even_share(heads, parts, part)
        keys = range(queries[0] // group, queries[-1] // group + 1) if queries else range(0)
        yield queries, keys


def check_csa(
    settings: CsaSettings, *, prompt_tokens: int, locations: Sequence[str], shape: AttentionShape
) -> None:
    """Refuse sparse attention that no group of the gang could compute for the prompt.

    Args:
        locations: Rack-Server-GPU ids of the prefill instances. Empty while there is no gang, when
            the number of levels is not known.

    Raises:
        InvalidRequest: more levels than the gang's locations distinguish, more micro-partitions
            than the prompt has tokens, or numbers for layers or KV heads that the model lacks.
    """
    _check_levels(settings, locations)
    _check_micro_partitions(settings, prompt_tokens, locations)
    _check_model(settings, shape)


def _check_levels(settings: CsaSettings, locations: Sequence[str]) -> None:
    if settings.levels is None or not locations:
        return
    try:
        _ordered(locations).levels(settings.levels)
    except ConfigError as error:
        what = str(error).removeprefix("levels ")
        raise InvalidRequest(f"csps.levels: {what}", param="csps.levels") from None


def _check_micro_partitions(settings: CsaSettings, tokens: int, locations: Sequence[str]) -> None:
    if settings.micro_partitions is None:
        return
    most = max(map(max, settings.micro_partitions))
    if most > tokens:
        raise InvalidRequest(
            f"csps.micro_partitions: must be 1 to {tokens}, the tokens of the prompt, not {most}",
            param="csps.micro_partitions",
        )
    if settings.levels is None and locations:
        levels = len(_ordered(locations).granularities)
        if (longest := max(map(len, settings.micro_partitions))) > levels:
            raise InvalidRequest(
                f"csps.micro_partitions: must be at most {levels} by level, as the gang's "
                f"locations distinguish no more, not {longest}",
                param="csps.micro_partitions",
            )


def _check_model(settings: CsaSettings, shape: AttentionShape) -> None:
    numbers_by_name: dict[str, Sequence[Sequence[float]]] = {
        "drop_ratio": settings.drop_ratios,
        "coverage": settings.coverages or (),
        "micro_partitions": settings.micro_partitions or (),
    }
    for name, numbers in numbers_by_name.items():
        if len(numbers) > shape.layers:
            raise InvalidRequest(
                f"csps.{name}: must be at most {shape.layers} by layer, as the model has no more, "
                f"not {len(numbers)}",
                param=f"csps.{name}",
            )
    for name in ("drop_ratio", "coverage"):
        for of_heads in numbers_by_name[name]:
            if len(of_heads) not in (1, shape.kv_heads):
                raise InvalidRequest(
                    f"csps.{name}: must be one a layer, or {shape.kv_heads}, one per KV head of "
                    f"the model, not {len(of_heads)}",
                    param=f"csps.{name}",
                )


def _ordered(locations: Sequence[str]) -> Topology:
    topology = Topology.of(locations)
    return topology.subset(topology.order)
