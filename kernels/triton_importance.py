# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Importance of keys and selection of tokens in Triton.

`column_sums`: a program owns a block of keys of one KV head and loops over the query blocks that
see it. Each sum is stored once, without atomics, so the result is reproducible.

`top_tokens`: one program a head. Bisection over the bits of the values finds the k-th largest in 32
counts. One more pass writes the indices of greater values and the earliest of equal ones. A sort
would move every value about as often, and a second sort would have to order the indices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from csps.kernels.arguments import Offsets, Positions, as_tensor
from csps.kernels.triton_blocks import (
    LAST_POSITION,
    bounds_of,
    extremes,
    first_slot_of,
    kernel_input,
    load_tile,
    offsets_tensor,
    padded_dim,
    seeing_blocks,
    sequence_of,
    shared_by,
    shared_memory,
    slots,
)

LOG2_E = 1.4426950408889634
BLOCK_M = 64  # rows: tokens x query heads of the KV head
BLOCK_N = 128  # keys
FEWEST = 16  # rows or keys that tensor cores take
BLOCK = 4096  # tokens that a program of `top_tokens` reads at a time


@triton.jit
def _add_columns(acc, k_tile, k_position, q, lse, q_positions, tokens, begin, end, lse_stride,
                 stride_qt, stride_qh, scale_log2, MASKED: tl.constexpr, GROUP: tl.constexpr,
                 HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Add the probabilities of query blocks [begin, end) of the sequence that begins at q, lse."""
    LOG2E: tl.constexpr = 1.4426950408889634
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    head = row % GROUP
    for block in range(begin, end):
        token = block * TOKENS + row // GROUP
        used = (row < TOKENS * GROUP) & (token < tokens)
        q_row = token.to(tl.int64) * stride_qt + head * stride_qh
        elements = used[:, None] & (dim < HEAD_DIM)[None, :]
        q_tile = tl.load(q + q_row[:, None] + dim[None, :], mask=elements, other=0.0)
        row_lse = tl.load(lse + head.to(tl.int64) * lse_stride + token, mask=used,
                          other=float("inf"))  # fmt: skip
        # exp2(score - inf) is 0, so unused rows and rows that saw no key add nothing.
        row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse) * LOG2E
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale_log2
        prob = tl.exp2(score - row_lse[:, None])
        if MASKED:
            q_position = tl.load(q_positions + token, mask=used, other=-1).to(tl.int32)
            prob = tl.where(k_position[None, :] <= q_position[:, None], prob, 0.0)
        acc += tl.sum(prob, 0)
    return acc


@triton.jit(
    do_not_specialize=["q_tokens", "k_tokens", "sequences"],
    do_not_specialize_on_alignment=[
        "lse",
        "q_positions",
        "k_positions",
        "least",
        "most",
        "cu_seqlens_q",
        "cu_seqlens_k",
    ],
)
def _column_sums_kernel(q, k, lse, q_positions, k_positions, least, most, cu_seqlens_q,
                        cu_seqlens_k, sums, q_tokens, k_tokens, sequences, scale_log2,
                        stride_qt, stride_qh, stride_kt, stride_kh,
                        GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
                        VARLEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                        BLOCK_D: tl.constexpr):  # fmt: skip
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    slot = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = 0
    if VARLEN:
        sequence = sequence_of(slot, cu_seqlens_k, sequences, BLOCK_N)
    q_begin, q_end = bounds_of(sequence, cu_seqlens_q, q_tokens, VARLEN)
    k_begin, k_end = bounds_of(sequence, cu_seqlens_k, k_tokens, VARLEN)
    first = k_begin + (slot - first_slot_of(sequence, k_begin, BLOCK_N)) * BLOCK_N
    if first >= k_end:
        return

    rest = k_end - first
    column = tl.arange(0, BLOCK_N)
    k += first.to(tl.int64) * stride_kt + kv_head * stride_kh
    k_tile = load_tile(k, stride_kt, rest, True, BLOCK_N, HEAD_DIM, BLOCK_D)
    blocks = tl.cdiv(q_end - q_begin, TOKENS)
    seeing = 0
    whole = 0
    k_position = column
    if CAUSAL:
        inside = column < rest
        k_position = tl.load(k_positions + first + column, mask=inside, other=0).to(tl.int32)
        k_least = tl.min(tl.where(inside, k_position, LAST_POSITION), 0)
        q_positions += q_begin
        q_slot = first_slot_of(sequence, q_begin, TOKENS)
        seeing, whole = seeing_blocks(
            least + q_slot, most + q_slot, blocks, k_least, tl.max(k_position, 0)
        )
    q += q_begin.to(tl.int64) * stride_qt + kv_head * GROUP * stride_qh
    lse += (kv_head * GROUP).to(tl.int64) * q_tokens + q_begin
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    if CAUSAL:
        acc = _add_columns(
            acc, k_tile, k_position, q, lse, q_positions, q_end - q_begin, seeing, whole,
            q_tokens, stride_qt, stride_qh, scale_log2, True, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D,
        )  # fmt: skip
    acc = _add_columns(
        acc, k_tile, k_position, q, lse, q_positions, q_end - q_begin, whole, blocks,
        q_tokens, stride_qt, stride_qh, scale_log2, False, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    sums += kv_head.to(tl.int64) * k_tokens + first
    tl.store(sums + column, acc, mask=column < rest)


def column_sums(
    q_thd: Tensor,
    k_thd: Tensor,
    lse_ht: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    scale: float,
    cu_seqlens_q: Offsets | None,
    cu_seqlens_k: Offsets | None,
) -> Tensor:
    """Implement `csps.kernels.importance.column_sums` for bf16, fp16 and fp32."""
    if q_thd.dtype == torch.float64:
        raise ValueError("fp64 importance runs on CPU only; a GPU takes bf16, fp16 and fp32")
    q_thd, k_thd, lse_ht = kernel_input(q_thd), kernel_input(k_thd), lse_ht.contiguous()
    q_tokens, heads, dim = q_thd.shape
    k_tokens, kv_heads, _ = k_thd.shape
    group = heads // kv_heads
    block_m, block_n = choose_blocks(q_thd.dtype, dim, group, shared_memory(q_thd.device))
    cu_q, cu_k = (offsets_tensor(cu, q_thd.device) for cu in (cu_seqlens_q, cu_seqlens_k))
    sequences = 1 if cu_q is None else len(cu_q) - 1
    least = most = None
    if q_positions is not None and k_positions is not None:
        q_positions = as_tensor(q_positions, q_thd.device)
        k_positions = as_tensor(k_positions, q_thd.device)
        least, most = extremes(q_positions, cu_q, sequences, block_m // group)
    sums_gt = torch.empty(kv_heads, k_tokens, dtype=torch.float32, device=q_thd.device)
    _column_sums_kernel[(slots(k_tokens, sequences, block_n), kv_heads)](
        q_thd, k_thd, lse_ht, q_positions, k_positions, least, most, cu_q, cu_k, sums_gt,
        q_tokens, k_tokens, sequences, scale * LOG2_E, *q_thd.stride()[:2], *k_thd.stride()[:2],
        GROUP=group, HEAD_DIM=dim, CAUSAL=least is not None, VARLEN=cu_q is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=padded_dim(dim), num_warps=8, num_stages=2,
    )  # fmt: skip
    return sums_gt


def choose_blocks(dtype: torch.dtype, head_dim: int, group: int, shared: int) -> tuple[int, int]:
    """Choose the rows and the keys of a tile of `column_sums`, for a card with so many bytes of
    shared memory."""
    wide, fewest = padded_dim(head_dim), max(FEWEST, int(triton.next_power_of_2(group)))
    block_m, block_n = max(BLOCK_M, fewest), BLOCK_N
    while block_n > FEWEST and shared_by(dtype, wide, 2 * block_m, block_n) > shared:
        block_n //= 2
    while block_m > fewest and shared_by(dtype, wide, 2 * block_m, block_n) > shared:
        block_m //= 2
    return block_m, block_n


@triton.jit
def _load_ordered(values, start, tokens, BLOCK: tl.constexpr):
    """Load (BLOCK,) int64 keys that order like the fp32 values; lowest past the end."""
    token = start + tl.arange(0, BLOCK)
    bits = tl.load(values + token, mask=token < tokens, other=0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(token < tokens, ordered, -(2**40))


@triton.jit(do_not_specialize=["tokens", "keep"], do_not_specialize_on_alignment=["values"])
def _top_tokens_kernel(values, kept, tokens, keep, BLOCK: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    values += head * tokens
    kept += head * keep
    # Invariant: at least `keep` keys are >= low, fewer are >= high.
    low = tl.full((), -(2**31), tl.int64)
    high = tl.full((), 2**31, tl.int64)
    for _ in range(32):
        middle = (low + high) >> 1
        count = tl.zeros((BLOCK,), dtype=tl.int32)
        for start in range(0, tokens, BLOCK):
            count += (_load_ordered(values, start, tokens, BLOCK) >= middle).to(tl.int32)
        enough = tl.sum(count, 0) >= keep
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    above = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, tokens, BLOCK):
        above += (_load_ordered(values, start, tokens, BLOCK) > low).to(tl.int32)
    ties = keep - tl.sum(above, 0)
    written = tl.zeros((), dtype=tl.int32)
    for start in range(0, tokens, BLOCK):
        key = _load_ordered(values, start, tokens, BLOCK)
        tie = (key == low).to(tl.int32)
        take = (key > low) | ((key == low) & (tl.cumsum(tie, 0) <= ties))
        ties -= tl.minimum(tl.sum(tie, 0), ties)
        place = written + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(kept + place, (start + tl.arange(0, BLOCK)).to(tl.int64), mask=take)
        written += tl.sum(take.to(tl.int32), 0)


def top_tokens(importance_gt: Tensor, keep: int) -> Tensor:
    """Select the `keep` highest tokens of each head, ascending; (kv heads, keep) int64."""
    heads, tokens = importance_gt.shape
    kept_gk = torch.empty(heads, keep, dtype=torch.int64, device=importance_gt.device)
    if keep:
        values = importance_gt.float().contiguous()
        _top_tokens_kernel[(heads,)](values, kept_gk, tokens, keep, BLOCK=BLOCK, num_warps=8)
    return kept_gk
