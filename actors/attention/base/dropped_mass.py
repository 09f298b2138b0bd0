"""Attention mass that a step's layers drop, estimated by the scores that selected the kept tokens.

The mass of a key is its importance: what the last queries of its chunk give it. A key counts as
dropped if the level at which these queries see it drops it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from csps.protocols.gang.messages import DroppedMass


@dataclass(frozen=True)
class _Masses:
    """Masses of one layer for the KV heads of a rank; they add up over parts of a chunk."""

    dropped_g: Tensor
    total_g: Tensor


class DroppedMassTally:
    """Sums of one step on one rank, which stay on the device until the step is over."""

    def __init__(self) -> None:
        self._masses: dict[int, dict[int, _Masses]] = {}
        """Sums by sequence and layer."""

    def add(
        self,
        sequence_id: int,
        layer: int,
        heads: slice,
        *,
        kv_heads: int,
        dropped_g: Tensor,
        total_g: Tensor,
    ) -> None:
        """Add the masses of some tokens for some of a rank's `kv_heads` KV heads."""
        by_layer = self._masses.setdefault(sequence_id, {})
        if layer not in by_layer:
            nothing_g = total_g.new_zeros(kv_heads)
            by_layer[layer] = _Masses(nothing_g, nothing_g.clone())
        by_layer[layer].dropped_g[heads] += dropped_g
        by_layer[layer].total_g[heads] += total_g

    def reports(self, first_kv_head: int) -> Iterator[DroppedMass]:
        """Yield what the router is told, once for each sequence.

        Args:
            first_kv_head: number in the model of the rank's first KV head.
        """
        for sequence_id, by_layer in self._masses.items():
            yield DroppedMass(
                sequence_id=sequence_id,
                layers=tuple(by_layer),
                first_kv_head=first_kv_head,
                dropped=_packed([masses.dropped_g for masses in by_layer.values()]),
                total=_packed([masses.total_g for masses in by_layer.values()]),
            )


def mass_without(importance_gt: Tensor, kept_gk: Tensor) -> Tensor:
    """Return the mass (g,) of the tokens that are not among the kept ones."""
    return importance_gt.scatter(1, kept_gk, 0.0).sum(dim=1)


def _packed(masses: list[Tensor]) -> bytes:
    return bytes(torch.stack(masses).float().cpu().numpy().tobytes())
