"""Attention of decode: single rows of many requests over a paged KV cache, in one call.

Shape suffixes: r query rows; n runs of slots, or pieces of runs; s slots of the cache; h heads (of
q, or the fewer of k and v); d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from csps.kernels.checks import check_tensors, softmax_scale

Run = tuple[int, int, int]
"""(query row, first slot, end): neighbouring slots."""


class SlotRuns:
    """Which slots hold the keys of each query row: all that the row sees.

    Runs and not a table of pages: a request's tokens lie side by side but for few places, and are
    read where they lie, on a CPU through slices without a copy.

    Args:
        rows: query rows.
        runs: ascending by row; a row without any sees nothing.
    """

    def __init__(self, rows: int, runs: Sequence[Run]) -> None:
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


def decode_attention(
    q_rhd: Tensor, k_shd: Tensor, v_shd: Tensor, runs: SlotRuns, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend each row to all keys in its slots; nothing of the cache is copied.

    Args:
        q_rhd: (rows, query heads, head dim), contiguous.
        k_shd, v_shd: (slots, kv heads, head dim) of the same dtype, one layer's cache; query heads
            are a multiple of kv heads, and head h reads kv head h // (query heads / kv heads).
        scale: positive factor on q·k, by default head dim ** -0.5.

    Returns:
        out_rhd: (rows, query heads, head dim) fp32 (fp64 for fp64 inputs).
        lse_rh: (rows, query heads), natural log. A row without slots has out 0 and lse -inf, the
            identity of merging.

    Raises:
        ValueError: shapes or dtypes that do not belong together.
    """
    check_tensors(q_rhd, k_shd, v_shd)
    if len(q_rhd) != runs.rows:
        raise ValueError(f"{len(q_rhd)} query rows, and slots of {runs.rows}")
    scale = softmax_scale(q_rhd, scale)
    if not runs.tokens:
        dtype = torch.promote_types(q_rhd.dtype, torch.float32)
        out_rhd = torch.zeros(q_rhd.shape, dtype=dtype, device=q_rhd.device)
        return out_rhd, out_rhd.new_full(q_rhd.shape[:2], -torch.inf)
    # Imported on use, as in `backends`.
    if q_rhd.is_cuda:
        from csps.kernels import triton_decode

        return triton_decode.decode_attention(q_rhd, k_shd, v_shd, runs, scale)
    from csps.kernels import cpu_decode

    return cpu_decode.decode_attention(q_rhd, k_shd, v_shd, runs, scale)
