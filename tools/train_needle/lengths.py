"""A short text that costs attention what a long one would: skipped positions (PoSE)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence


def log_uniform(rng: random.Random, low: float, high: float) -> float:
    """Every order of magnitude from `low` to `high` as likely as any other."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def skipping_positions(
    rng: random.Random, ids: Sequence[int], length: int, full_stop: int
) -> list[int]:
    """Increasing positions that spread tokens over ``length``, skipping between sentences."""
    ends = [index for index, id_ in enumerate(ids) if id_ == full_stop]
    # Uneven shares: some sentences stay neighbours while others move far apart.
    shares = [rng.random() ** 4 for _ in ends]
    scale = max(0, length - len(ids)) / (sum(shares) or 1.0)
    skips = {index: int(share * scale) for index, share in zip(ends, shares, strict=True)}
    positions: list[int] = []
    position = 0
    for index in range(len(ids)):
        positions.append(position)
        position += 1 + skips.get(index, 0)
    return positions
