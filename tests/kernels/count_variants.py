"""Count how often each Triton kernel would be compiled for calls that differ in their lengths.

Run as a program by test_triton_compiles.py, outside of the interpreter. Prints a JSON object.
"""

from __future__ import annotations

import json

import torch
from device_budget import DEVICE
from recording_kernels import on_device, recorded_kernels

from csps.kernels import triton_attention, triton_importance, triton_merge
from csps.kernels.arguments import ChunkRuns, SlotRuns

HEADS, KV_HEADS, DIM = 4, 2, 64
LENGTHS = (*range(1, 140), 144, 250, 255, 256, 257, 512, 1000, 1024, 4097)
FIRST = (0, 1, 3, 16)
"""First tokens of slices of longer tensors."""


def launch(length: int, first: int) -> None:
    """Launch every kernel with slices of longer tensors."""
    q_thd = on_device(first + length, HEADS, DIM)[first:]
    k_thd = on_device(first + length, KV_HEADS, DIM)[first:]
    positions = torch.arange(first + length, device=DEVICE)[first:]
    lse_ht = on_device(HEADS, first + length, dtype=torch.float32)[:, first:]
    for at in (positions, None):
        triton_attention.attention(q_thd, k_thd, k_thd, at, at, 1.0, None, None)
        triton_importance.column_sums(q_thd, k_thd, lse_ht, at, at, 1.0, None, None)
    out_thd = q_thd.float()
    triton_merge.merge_stacked(torch.stack([out_thd] * 2), torch.stack([lse_ht] * 2))
    other_hk = on_device(HEADS, length, dtype=torch.float32)
    triton_merge.merge_into(out_thd, lse_ht, out_thd.clone(), other_hk, None)
    row_n = torch.arange(length, device=DEVICE) % 3
    triton_merge.merge_rows(out_thd, other_hk.T, row_n, 3)
    triton_importance.top_tokens(other_hk[:KV_HEADS], 1 + length // 2)
    runs = SlotRuns(2, [(0, first, first + length), (1, 0, 7)])
    cache = on_device(8192, KV_HEADS, DIM)
    chunks = ChunkRuns([length, 2], [[range(first, first + length)], [range(3), range(7, 9)]])
    rows_thd = on_device(length + 2, HEADS, DIM)
    triton_attention.chunk_attention(rows_thd, cache, cache, chunks, 1.0)
    own_thd, at = on_device(length + 2, KV_HEADS, DIM), torch.arange(length + 2, device=DEVICE)
    cu = chunks.offsets_on(DEVICE)
    triton_attention.attention(rows_thd, own_thd, own_thd, at, at, 1.0, cu, cu)
    triton_attention.decode_attention(q_thd[:1].repeat(2, 1, 1), cache, cache, runs, 1.0)


if __name__ == "__main__":
    variants = recorded_kernels()
    for tokens in LENGTHS:
        for begin in FIRST:
            launch(tokens, begin)
    print(json.dumps({kernel: len(found) for kernel, found in variants.items()}))
