"""Count the variants of each Triton kernel that calls of many lengths would compile.

test_triton_compiles.py runs this as a program, outside of the interpreter, which has no variants.
Triton itself tells variants apart; nothing is compiled or run. Prints a JSON object.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from csps.kernels import triton_attention, triton_blocks, triton_importance, triton_merge
from csps.kernels.arguments import SlotRuns

HEADS, KV_HEADS, DIM = 4, 2, 64
LENGTHS = (128, 129, 130, 144, 250, 512, 1000, 1024, 4097)
FIRST = (0, 1, 3, 16)
"""First tokens of slices of longer tensors."""
BACKEND = make_backend(GPUTarget("cuda", 90, 32))

variants: dict[str, set[str]] = defaultdict(set)


class RecordingKernel:
    """Stand-in for a kernel that records what a launch would be compiled for."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._record

    def _record(self, *args: Any, **kwargs: Any) -> None:
        _, specialization, options = self._bind(*args, **kwargs)
        variants[self._kernel.__name__].add(repr((specialization, sorted(options.items()))))


def replace_kernels() -> None:
    for module in (triton_attention, triton_blocks, triton_importance, triton_merge):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, RecordingKernel(getattr(module, name)))


def rows(heads: int, length: int, first: int = 0) -> Tensor:
    return torch.zeros(first + length, heads, DIM)[first:]


def launch(length: int, first: int) -> None:
    """Launch every kernel once, with slices of longer tensors."""
    q_thd, k_thd = rows(HEADS, length, first), rows(KV_HEADS, length, first)
    positions = torch.arange(first + length)[first:]
    triton_attention.attention(q_thd, k_thd, k_thd, positions, positions, 1.0, None, None)
    lse_ht = torch.zeros(HEADS, first + length)[:, first:]
    triton_importance.column_sums(q_thd, k_thd, lse_ht, positions, positions, 1.0, None, None)
    triton_merge.merge_stacked(torch.stack([q_thd] * 2), torch.stack([lse_ht] * 2))
    triton_merge.merge_into(q_thd, lse_ht, rows(HEADS, length), torch.zeros(HEADS, length), None)
    row_n = torch.arange(length) % 3
    triton_merge.merge_rows(rows(HEADS, length), torch.zeros(length, HEADS), row_n, 3)
    triton_importance.top_tokens(torch.zeros(KV_HEADS, length), 1 + length // 2)
    runs = SlotRuns(2, [(0, first, first + length), (1, 0, 7)])
    cache = rows(KV_HEADS, 8192)
    triton_attention.decode_attention(rows(HEADS, 2), cache, cache, runs, 1.0)


if __name__ == "__main__":
    replace_kernels()
    for tokens in LENGTHS:
        for begin in FIRST:
            launch(tokens, begin)
    print(json.dumps({kernel: len(found) for kernel, found in variants.items()}))
