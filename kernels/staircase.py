"""The shape of a causal mask between two ascending position lists, without the mask.

With both sides ascending, row i sees exactly the first visible[i] keys and visible never falls:
the mask is a staircase. Real layouts make long regular stairs - a whole prompt, a chunk after
its history, zigzag halves and striped shards all have rows that see one key more than the row
before, or the same keys - and those need no mask tensor at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

MIN_REGULAR_ROWS = 64  # shorter regular stretches cost more as separate calls than in a mask
MASKED_ROWS = 128  # rows of one masked block: bounds the mask at 128 x keys


class Stair(Enum):
    FLAT = "every row sees the same keys"
    DIAGONAL = "every row sees one key more than the row before"
    MASKED = "anything else"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBlock:
    """Rows [start, stop): the first sees `first` keys, the last `last`, none fewer than one."""

    stair: Stair
    start: int
    stop: int
    first: int
    last: int


def visible_keys(q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """(q tokens,) int64: how many of the ascending keys each ascending query sees."""
    return torch.searchsorted(k_positions, q_positions, right=True)


def blocks(visible: Tensor) -> Iterator[RowBlock]:
    """Cut the rows that see anything into blocks, in row order."""
    cursor = int((visible == 0).sum())  # ascending, so the blind rows come first
    if cursor == len(visible):
        return
    for stair, start, stop in _regular_runs(visible, cursor):
        yield from _masked(visible, cursor, start)
        yield _block(stair, start, stop, visible)
        cursor = stop
    yield from _masked(visible, cursor, len(visible))


def _regular_runs(visible: Tensor, cursor: int) -> Iterator[tuple[Stair, int, int]]:
    """Stretches of at least MIN_REGULAR_ROWS rows (or all rows) with step 0 or 1."""
    rows = len(visible)
    if rows - cursor == 1:
        yield Stair.FLAT, cursor, rows
        return
    steps, lengths = torch.unique_consecutive(visible[cursor:].diff(), return_counts=True)
    least = min(MIN_REGULAR_ROWS, rows - cursor)
    stop = cursor + 1  # a run of n steps joins n + 1 rows; the next run begins on its last row
    for step, length in zip(steps.tolist(), lengths.tolist(), strict=True):
        start, stop = max(cursor, stop - 1), stop + length
        if step <= 1 and stop - start >= least:
            yield (Stair.DIAGONAL if step else Stair.FLAT), start, stop
            cursor = stop


def _masked(visible: Tensor, start: int, stop: int) -> Iterator[RowBlock]:
    for row in range(start, stop, MASKED_ROWS):
        yield _block(Stair.MASKED, row, min(row + MASKED_ROWS, stop), visible)


def _block(stair: Stair, start: int, stop: int, visible: Tensor) -> RowBlock:
    first, last = int(visible[start]), int(visible[stop - 1])
    return RowBlock(stair=stair, start=start, stop=stop, first=first, last=last)
