"""Where the tokens of a call sit: their positions, and the offsets of their sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

Positions = Tensor | range
"""One int64 position per token, or a range: consecutive positions that no one need inspect."""

Offsets = Tensor | Sequence[int]
"""cu_seqlens: (sequences + 1,), from 0 to the number of tokens."""


def as_tensor(positions: Positions, device: torch.device) -> Tensor:
    """(tokens,) int64 on the device."""
    if isinstance(positions, Tensor):
        return positions
    return torch.arange(positions.start, positions.stop, positions.step, device=device)


def ascending(positions: Tensor) -> bool:
    """Waits for the device: for CPU tensors only."""
    return bool((positions[1:] >= positions[:-1]).all())


def sequences(cu_seqlens: Offsets, tokens: int) -> list[slice]:
    """The token slice of each sequence.

    Raises:
        ValueError: the offsets do not run from 0 to `tokens`.
    """
    offsets = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    if offsets[0] != 0 or offsets[-1] != tokens:
        raise ValueError(f"cu_seqlens {list(offsets)} do not cover {tokens} tokens")
    return [slice(start, stop) for start, stop in pairwise(offsets)]
