"""Moved definitions.

Where the tokens of a call sit: their positions, and the offsets of their sequences.

Refuse arguments that do not belong together, before a kernel reads past an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

SlotRun = tuple[int, int, int]
"""(query row, first slot, end): neighbouring slots."""


class SlotRuns:
    """Which slots hold the keys of each query row: all that the row sees.

    Runs and not a table of pages: a request's tokens lie side by side but for few places, and are
    read where they lie, on a CPU through slices without a copy.

    Args:
        rows: query rows.
        runs: ascending by row; a row without any sees nothing.
    """

    def __init__(self, rows: int, runs: Sequence[SlotRun]) -> None:
        self.rows = rows
        self.runs = [run for run in runs if run[1] < run[2]]
        self._pieces: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}

    @cached_property
    def one_each(self) -> bool:
        """Whether every row has exactly one run."""
        return len(self.runs) == self.rows == len({row for row, _, _ in self.runs})

    @cached_property
    def tokens(self) -> int:
        """Slots of all runs."""
        return sum(end - begin for _, begin, end in self.runs)

    @cached_property
    def row_n(self) -> Tensor:
        """(n,) int64 on the CPU: the row of each run."""
        return torch.tensor([row for row, _, _ in self.runs], dtype=torch.int64)

    def pieces(self, device: torch.device, longest: int) -> tuple[Tensor, Tensor]:
        """The runs cut into pieces of at most `longest` slots, for a device that wants many.

        Returns:
            (n, 3) int32 pieces as runs are, and (n,) int64 the row of each, on the device. They
            are made once and serve all layers.
        """
        if (device, longest) not in self._pieces:
            runs_n3 = torch.tensor(self.runs, dtype=torch.int32).view(-1, 3)
            count_n = (runs_n3[:, 2] - runs_n3[:, 1] + longest - 1) // longest
            own_n3 = runs_n3.repeat_interleave(count_n, dim=0)
            first_n = (count_n.cumsum(0) - count_n).repeat_interleave(count_n)
            begin_n = own_n3[:, 1] + (torch.arange(len(own_n3)) - first_n) * longest
            end_n = torch.minimum(begin_n + longest, own_n3[:, 2])
            pieces_n3 = torch.stack([own_n3[:, 0], begin_n, end_n], 1).int()
            pieces_n3 = pieces_n3.to(device, non_blocking=True)
            self._pieces[device, longest] = pieces_n3, pieces_n3[:, 0].long()
        return self._pieces[device, longest]


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


def check_tensors(q_thd: Tensor, k_thd: Tensor, v_thd: Tensor) -> None:
    """Three dimensions, k like v, heads that divide, one dtype."""
    if q_thd.ndim != 3 or k_thd.ndim != 3 or k_thd.shape != v_thd.shape:
        raise ValueError(
            "attention takes q (tokens, heads, dim) and equal k and v (tokens, kv heads, dim), "
            f"not {tuple(q_thd.shape)}, {tuple(k_thd.shape)}, {tuple(v_thd.shape)}"
        )
    if q_thd.shape[2] != k_thd.shape[2] or q_thd.shape[1] % max(k_thd.shape[1], 1):
        raise ValueError(
            f"{q_thd.shape[1]} query heads of {q_thd.shape[2]} do not divide into "
            f"{k_thd.shape[1]} kv heads of {k_thd.shape[2]}"
        )
    if not q_thd.dtype == k_thd.dtype == v_thd.dtype:
        raise ValueError(f"q, k, v differ in dtype: {q_thd.dtype}, {k_thd.dtype}, {v_thd.dtype}")


def check_tokens(
    q_thd: Tensor,
    k_thd: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    cu_seqlens_q: Offsets | None,
    cu_seqlens_k: Offsets | None,
) -> None:
    """A position for each token, and both sides given or neither."""
    if (q_positions is None) != (k_positions is None):
        raise ValueError("q_positions and k_positions come together")
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k come together")
    for name, x_thd, positions in (("queries", q_thd, q_positions), ("keys", k_thd, k_positions)):
        if positions is not None and len(positions) != len(x_thd):
            raise ValueError(f"{len(x_thd)} {name} with {len(positions)} positions")


def softmax_scale(q_thd: Tensor, scale: float | None) -> float:
    """The given factor or the usual one; kernels take the maximum before they scale."""
    if scale is None:
        return float(q_thd.shape[2] ** -0.5)
    if scale <= 0:
        raise ValueError(f"scale must be positive, not {scale}")
    return scale
