"""Who judges which tokens matter: the attention that each key received in the layer before.

CSPS §3.2.4 (after Scissorhands): a head's unimportant tokens are much the same in neighbouring
layers. What a key received is a column sum of probabilities, divided by the number of queries that
saw it, over the query heads of its KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from csps.actors.csa.kept_rows import KeptRows
from csps.actors.csa.level_buffers import LevelBuffers
from csps.actors.csa.returns import RunningAttention
from csps.actors.levels.geometry import Part
from csps.actors.transfers import Transfers


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """What is known on one member once a layer's attention is complete."""

    layer: int
    rows: KeptRows
    running: RunningAttention
    levels: tuple[LevelBuffers, ...]


class Judge(Protocol):
    """Watches each layer before one that drops, and then says what mattered there.

    All members call all methods alike, in this order, so that messages match. What they compute is
    phase `importance` of the layer watched.
    """

    def begin(self, layer: int, rows: KeptRows, transfers: Transfers) -> None:
        """Queries and keys of the layer exist; nothing else of it is on the wire yet."""
        ...

    def advance(self, layer: int, transfers: Transfers) -> None:
        """Own rows have attended to each other while the first all-to-all travels."""
        ...

    def finish(self, done: LayerAttention, transfers: Transfers) -> None:
        """The layer's attention is complete."""
        ...

    def importance(self, part: Part, transfers: Transfers) -> Tensor:
        """(KV heads, tokens of the part), at least 0, of the layer watched last; fp32, or fp64
        for fp64 inputs."""
        ...


@dataclass
class Tally:
    """Column sums of one part, and the number of queries in each."""

    sums_gt: Tensor
    seen_gt: Tensor

    @classmethod
    def empty(cls, kv_heads: int, tokens: int, like: Tensor) -> Tally:
        """Nothing seen yet; dtype and device as of `like`."""
        sums_gt = like.new_zeros(kv_heads, tokens)
        return cls(sums_gt, torch.zeros_like(sums_gt))

    @property
    def mean_gt(self) -> Tensor:
        """Importance; 0 for a key that nobody saw."""
        return self.sums_gt / self.seen_gt.clamp_min(1)
