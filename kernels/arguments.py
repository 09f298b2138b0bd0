"""Arguments of the kernels: slot runs, positions and offsets, and the checks of a call.

The checks run before a kernel could read past the end of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

SlotRun = tuple[int, int, int]
"""(query row, first slot, end) of adjacent slots."""


class SlotRuns:
    """Slots of the keys that each query row sees.

    Args:
        rows: query rows.
        runs: ascending by row; a row without a run sees nothing.
    """

    # Runs, not a page table: most tokens of a request are adjacent, so a CPU kernel reads them
    # through slices without a copy.

    def __init__(self, rows: int, runs: Sequence[SlotRun]) -> None:
        self.rows = rows
        self.runs = [run for run in runs if run[1] < run[2]]
        self._splits: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    @cached_property
    def one_each(self) -> bool:
        """True if every row has exactly one run."""
        return len(self.runs) == self.rows == len({row for row, _, _ in self.runs})

    @cached_property
    def tokens(self) -> int:
        """Number of slots in all runs."""
        return sum(end - begin for _, begin, end in self.runs)

    @cached_property
    def row_n(self) -> Tensor:
        """Row of each run, (n,) int64 on the CPU."""
        return torch.tensor([row for row, _, _ in self.runs], dtype=torch.int64)

    def split(self, device: torch.device, longest: int) -> tuple[Tensor, Tensor]:
        """Split the runs into runs of at most `longest` slots, one for each GPU program.

        Returns:
            The shorter runs, (n, 3) int32, and the row of each, (n,) int64, both on the device.
        """
        # Cached, because all layers of an iteration use the same runs.
        if (device, longest) not in self._splits:
            runs_n3 = torch.tensor(self.runs, dtype=torch.int32).view(-1, 3)
            count_n = (runs_n3[:, 2] - runs_n3[:, 1] + longest - 1) // longest
            own_n3 = runs_n3.repeat_interleave(count_n, dim=0)
            first_n = (count_n.cumsum(0) - count_n).repeat_interleave(count_n)
            begin_n = own_n3[:, 1] + (torch.arange(len(own_n3)) - first_n) * longest
            end_n = torch.minimum(begin_n + longest, own_n3[:, 2])
            splits_n3 = torch.stack([own_n3[:, 0], begin_n, end_n], 1).int()
            splits_n3 = splits_n3.to(device, non_blocking=True)
            self._splits[device, longest] = splits_n3, splits_n3[:, 0].long()
        return self._splits[device, longest]


Positions = Tensor | range
"""One int64 position per token, or a range, which a backend need not inspect."""

Offsets = Tensor | Sequence[int]
"""Offsets of sequences (cu_seqlens), (sequences + 1,), from 0 to the number of tokens."""


def as_tensor(positions: Positions, device: torch.device) -> Tensor:
    """Return the positions as (tokens,) int64 on the device."""
    if isinstance(positions, Tensor):
        return positions
    return torch.arange(positions.start, positions.stop, positions.step, device=device)


def ascending(positions: Tensor) -> bool:
    """Return True if the positions never fall; for CPU tensors only, as it waits for the device."""
    return bool((positions[1:] >= positions[:-1]).all())


def sequences(cu_seqlens: Offsets, tokens: int) -> list[slice]:
    """Return the token slice of each sequence.

    Raises:
        ValueError: the offsets do not run from 0 to `tokens`.
    """
    offsets = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    if offsets[0] != 0 or offsets[-1] != tokens:
        raise ValueError(f"cu_seqlens {list(offsets)} do not cover {tokens} tokens")
    return [slice(start, stop) for start, stop in pairwise(offsets)]


def check_tensors(q_thd: Tensor, k_thd: Tensor, v_thd: Tensor) -> None:
    """Check that q, k and v have three dimensions, matching heads and one dtype.

    Raises:
        ValueError: they do not.
    """
    if q_thd.ndim != 3 or k_thd.ndim != 3 or k_thd.shape != v_thd.shape:
        raise ValueError(
            "attention takes q (tokens, heads, dim) and k and v (tokens, kv heads, dim) of one "
            f"shape, not {tuple(q_thd.shape)}, {tuple(k_thd.shape)}, {tuple(v_thd.shape)}"
        )
    if q_thd.shape[2] != k_thd.shape[2] or q_thd.shape[1] % max(k_thd.shape[1], 1):
        raise ValueError(
            f"{q_thd.shape[1]} query heads of dim {q_thd.shape[2]} do not match "
            f"{k_thd.shape[1]} kv heads of dim {k_thd.shape[2]}: query heads must be a multiple "
            "of kv heads, and the dims equal"
        )
    if not q_thd.dtype == k_thd.dtype == v_thd.dtype:
        raise ValueError(
            f"q, k and v must have one dtype, not {q_thd.dtype}, {k_thd.dtype}, {v_thd.dtype}"
        )


def check_tokens(
    q_thd: Tensor,
    k_thd: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    cu_seqlens_q: Offsets | None,
    cu_seqlens_k: Offsets | None,
) -> None:
    """Check that each token has a position, and that both sides are given or neither.

    Raises:
        ValueError: they are not.
    """
    if (q_positions is None) != (k_positions is None):
        raise ValueError("q_positions and k_positions must be given together")
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k must be given together")
    for name, side_thd, positions in (
        ("queries", q_thd, q_positions),
        ("keys", k_thd, k_positions),
    ):
        if positions is not None and len(positions) != len(side_thd):
            raise ValueError(f"{len(side_thd)} {name} need as many positions, not {len(positions)}")


def softmax_scale(q_thd: Tensor, scale: float | None) -> float:
    """Return `scale`, or head dim ** -0.5 if it is None.

    Raises:
        ValueError: the scale is not positive.
    """
    if scale is None:
        return float(q_thd.shape[2] ** -0.5)
    if scale <= 0:  # kernels take the maximum before they scale
        raise ValueError(f"scale must be positive, not {scale}")
    return scale
