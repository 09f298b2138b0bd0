# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention of decode in Triton: the context cut into pieces of slots, a program for each.

A program owns one piece for one kv head, with all query heads of that as rows of its tile. What a
piece is comes from memory and not as an argument: nothing is compiled for a length, and neither
the number of kernels nor the grid's shape depends on how the rows' lengths differ.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from csps.kernels.decode_attention import SlotRuns
from csps.kernels.merge import merge_rows
from csps.kernels.triton_attention import LN_2, LOG2_E, _attend, choose_tiling, processors
from csps.kernels.triton_blocks import kernel_input, padded_dim

SHORTEST_PIECE, LONGEST_PIECE = 128, 4096
WAVES = 4  # programs per processor that cutting the context aims at


@triton.jit
def _decode_kernel(q, k, v, pieces, out, lse, scale_log2,
                   stride_qr, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh,
                   GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    piece = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(pieces + piece * 3)
    begin = tl.load(pieces + piece * 3 + 1)
    length = tl.load(pieces + piece * 3 + 2) - begin

    member = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + member
    used = member < GROUP
    elements = used[:, None] & (dim < HEAD_DIM)[None, :]
    q_row = row.to(tl.int64) * stride_qr + head * stride_qh
    q_tile = tl.load(q + q_row[:, None] + dim[None, :], mask=elements, other=0.0)

    k += begin.to(tl.int64) * stride_ks + kv_head * stride_kh
    v += begin.to(tl.int64) * stride_vs + kv_head * stride_vh
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    whole = length // BLOCK_N
    acc, total, peak = _attend(
        acc, total, peak, q_tile, member, k, v, pieces, length, whole * 0, whole,
        stride_ks, stride_vs, scale_log2, False, False, BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    acc, total, peak = _attend(
        acc, total, peak, q_tile, member, k, v, pieces, length, whole, tl.cdiv(length, BLOCK_N),
        stride_ks, stride_vs, scale_log2, False, True, BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip

    out_row = piece.to(tl.int64) * tl.num_programs(1) * GROUP + head
    tl.store(out + out_row[:, None] * HEAD_DIM + dim[None, :], acc / total[:, None], mask=elements)
    tl.store(lse + out_row, (peak + tl.log2(total)) * LN_2, mask=used)


def decode_attention(
    q_rhd: Tensor, k_shd: Tensor, v_shd: Tensor, runs: SlotRuns, scale: float
) -> tuple[Tensor, Tensor]:
    """See `csps.kernels.decode_attention.decode_attention`; bf16, fp16 and fp32."""
    if q_rhd.dtype == torch.float64:
        raise ValueError("fp64 attention runs on CPU only")
    q_rhd, k_shd, v_shd = (kernel_input(x) for x in (q_rhd, k_shd, v_shd))
    rows, heads, dim = q_rhd.shape
    kv_heads = k_shd.shape[1]
    group = heads // kv_heads
    tiling = choose_tiling(q_rhd.dtype, dim, group, 1)
    pieces_n3, row_n = runs.pieces(
        q_rhd.device, piece_length(runs.tokens * kv_heads, processors(q_rhd.device))
    )
    out_nhd = torch.empty(len(row_n), heads, dim, dtype=torch.float32, device=q_rhd.device)
    lse_nh = torch.empty(len(row_n), heads, dtype=torch.float32, device=q_rhd.device)
    _decode_kernel[(len(row_n), kv_heads)](
        q_rhd, k_shd, v_shd, pieces_n3, out_nhd, lse_nh, scale * LOG2_E,
        *q_rhd.stride()[:2], *k_shd.stride()[:2], *v_shd.stride()[:2],
        GROUP=group, HEAD_DIM=dim, BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n,
        BLOCK_D=padded_dim(dim), num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return merge_rows(out_nhd, lse_nh, row_n, rows)


def piece_length(work: int, programs: int) -> int:
    """Slots of a piece, so that `work` slots and heads keep that many processors busy."""
    wanted = triton.next_power_of_2(max(1, work // (WAVES * programs)))
    return int(min(max(wanted, SHORTEST_PIECE), LONGEST_PIECE))
