"""How many tokens each part keeps, by layer, level and KV head (CSPS §3.2.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from csps.actors.levels.geometry import Part
from csps.protocols.csa import CsaPlan, kept_tokens
from csps.protocols.prefill_job import PrefillPiece


@dataclass(frozen=True, kw_only=True)
class DropSchedule:
    """A plan's ratios, with its exceptions, for the KV heads of one rank.

    Raises:
        ConfigError: ratios per KV head, but not for every one of the model's.
    """

    plan: CsaPlan
    layers: int
    """Of the model."""
    kv_heads: range
    """Of this rank, numbered over the whole model."""
    total_kv_heads: int
    """Of the model."""

    def __post_init__(self) -> None:
        self.plan.check_kv_heads(self.total_kv_heads)

    def head_ratios(self, layer: int) -> tuple[tuple[float, ...], ...]:
        """Per local KV head, its ratios at levels 1 .. N_v.

        The first layer has no layer before it to judge importance, and tokens that matter in the
        last differ from those in the layers before (CSPS §3.2.4): neither drops anything.
        """
        levels = range(1, self.plan.levels + 1)
        if self._is_exact(layer):
            return tuple((0.0,) * len(levels) for _ in self.kv_heads)
        group = self.plan.layer_group(layer)
        return tuple(
            tuple(group.drop_ratio(level, head) for level in levels) for head in self.kv_heads
        )

    def drops(self, layer: int) -> bool:
        """Whether anything is dropped in a layer."""
        return any(ratio for ratios in self.head_ratios(layer) for ratio in ratios)

    def narrows(self, layer: int) -> bool:
        """Whether decode is to see what a layer kept, and no more; alike for the heads of every
        rank, so that all KV of the layer travels in one way."""
        if not self.plan.decode_kept_only or self._is_exact(layer):
            return False
        return any(any(ratios) for ratios in self.plan.layer_group(layer).drop_ratios)

    def micro_partitions(self, layer: int) -> tuple[int, ...]:
        """M of levels 1 .. N_v."""
        group = self.plan.layer_group(layer)
        return tuple(group.micro(level) for level in range(1, self.plan.levels + 1))

    def _is_exact(self, layer: int) -> bool:
        return layer in (0, self.layers - 1)


def always_kept(plan: CsaPlan, piece: PrefillPiece, part: Part) -> tuple[range, range]:
    """Rows of a part that are never dropped: the prompt's first tokens, and its last ones."""
    sinks = range(max(0, min(part.length, plan.sinks - part.start)))
    if not piece.last:
        return sinks, range(0)
    end = piece.start + piece.length
    first = max(sinks.stop, end - plan.tail - part.start)
    return sinks, range(min(first, part.length), part.length)


def kept_counts(
    plan: CsaPlan, pieces: Sequence[PrefillPiece], part: Part, ratios: Sequence[float]
) -> tuple[int, ...]:
    """Tokens that a part keeps at each level, for one KV head's ratios; never ascending."""
    always = sum(map(len, always_kept(plan, pieces[part.piece], part)))
    return tuple(kept_tokens(part.length, ratio, always) for ratio in ratios)
