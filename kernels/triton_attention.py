# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Flash attention with LSE in Triton: true positions, GQA, variable length (CSPS §3.2.5, §4).

`attention`: a program owns a block of query tokens and all query heads of one KV head, as rows of
one tile. Each key is read once for the group, and one decode token still fills a tile. The first
loop reads key blocks that every row sees whole, without a mask; the second reads the rest with a
mask. Neither loop branches, so loads remain pipelined. Exponents are base 2, one instruction each.

`decode_attention`: the slots of each row are split into runs, with a program for each run and KV
head. A program reads its run from memory, not from its arguments. So no kernel is compiled for a
length, and the number of kernels and the grid do not depend on how the lengths of rows differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from csps.kernels.arguments import ChunkRuns, Offsets, Positions, SlotRuns, as_tensor
from csps.kernels.merge import merge_rows
from csps.kernels.triton_blocks import (
    LAST_POSITION,
    bounds_of,
    extremes,
    first_slot_of,
    kernel_input,
    load_tile,
    offsets_tensor,
    padded_dim,
    range_of,
    reached_block,
    seen_blocks,
    sequence_of,
    shared_by,
    shared_memory,
    slots,
)
from csps.kernels.triton_merge import merge_stacked

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
MIN_SPLIT_BLOCKS = 4  # fewer key blocks than this are not worth a program and a merge
WAVES = 2  # programs per processor to aim at when splitting the keys
SHORTEST_SPLIT, LONGEST_SPLIT = 128, 4096  # slots of a run in decode
DECODE_WAVES = 4  # programs per processor to aim at when splitting the runs in decode
TOKEN_ROWS, SHORT_ROWS, LONG_ROWS = 16, 64, 128
"""Rows (tokens x group) of a tile: of one token in decode, of a call with few rows, of any other.
Each size is a variant of its kernel, and takes seconds to compile: a size for each power of two
would be compiled at the first piggybacked chunk, the first short suffix, and so on."""
FEWEST_KEYS = 16  # tensor cores take no fewer


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """Tiling of one call: rows (tokens x group) and keys of a tile, warps, pipeline stages."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@triton.jit
def _attend(acc, total, peak, q_tile, q_position, k, v, k_positions, length, begin, end,
            stride_kt, stride_vt, scale_log2, window, CAUSAL: tl.constexpr,
            WINDOWED: tl.constexpr, MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
            HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Run online softmax over key blocks [begin, end) of the sequence that begins at k, v."""
    k += begin.to(tl.int64) * BLOCK_N * stride_kt
    v += begin.to(tl.int64) * BLOCK_N * stride_vt
    for block in range(begin, end):
        rest = length - block * BLOCK_N
        k_tile = load_tile(k, stride_kt, rest, MASKED, BLOCK_N, HEAD_DIM, BLOCK_D)
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        if MASKED:
            column = tl.arange(0, BLOCK_N)
            visible = (column < rest)[None, :]
            if CAUSAL:
                position = tl.load(k_positions + block * BLOCK_N + column, mask=column < rest)
                ahead = q_position[:, None] - position.to(tl.int32)[None, :]
                visible = visible & (ahead >= 0)
                if WINDOWED:
                    visible = visible & (ahead < window)
            score = tl.where(visible, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1) * scale_log2)
        shift = new_peak
        if MASKED:  # for a row that has seen no key yet, -inf minus -inf would be NaN
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        prob = tl.exp2(score * scale_log2 - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(prob, 1)
        v_tile = load_tile(v, stride_vt, rest, MASKED, BLOCK_N, HEAD_DIM, BLOCK_D)
        acc = acc * shrink[:, None]
        acc = tl.dot(prob.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
        peak = new_peak
        k += BLOCK_N * stride_kt
        v += BLOCK_N * stride_vt
    return acc, total, peak


@triton.jit(
    do_not_specialize=["q_tokens", "k_tokens", "sequences", "splits", "window"],
    do_not_specialize_on_alignment=[
        "q_positions",
        "k_positions",
        "least",
        "most",
        "cu_seqlens_q",
        "k_begins",
        "k_ends",
    ],
)
def _attention_kernel(q, k, v, q_positions, k_positions, least, most, cu_seqlens_q, k_begins,
                      k_ends, out, lse, q_tokens, k_tokens, sequences, splits, window, scale_log2,
                      stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
                      GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
                      WINDOWED: tl.constexpr, VARLEN: tl.constexpr, BLOCK_M: tl.constexpr,
                      BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    slot = tl.num_programs(0) - 1 - tl.program_id(0)  # late queries see most keys: start first
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    sequence = 0
    if VARLEN:
        sequence = sequence_of(slot, cu_seqlens_q, sequences, TOKENS)
    q_begin, q_end = bounds_of(sequence, cu_seqlens_q, q_tokens, VARLEN)
    k_begin, k_end = range_of(sequence, k_begins, k_ends, k_tokens, VARLEN)
    first = q_begin + (slot - first_slot_of(sequence, q_begin, TOKENS)) * TOKENS
    if first >= q_end:
        return

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    used = (row < TOKENS * GROUP) & (token < q_end)
    elements = used[:, None] & (dim < HEAD_DIM)[None, :]
    q_row = token.to(tl.int64) * stride_qt + head * stride_qh
    q_tile = tl.load(q + q_row[:, None] + dim[None, :], mask=elements, other=0.0)

    length = k_end - k_begin
    blocks = tl.cdiv(length, BLOCK_N)
    whole = length // BLOCK_N
    seen = blocks
    q_position = row
    if CAUSAL:
        q_position = tl.load(q_positions + token, mask=used, other=-1).to(tl.int32)
        q_least = tl.min(tl.where(used, q_position, LAST_POSITION), 0)
        k_positions += k_begin
        k_slot = first_slot_of(sequence, k_begin, BLOCK_N)
        k_seen, seen = seen_blocks(
            least + k_slot, most + k_slot, blocks, q_least, tl.max(q_position, 0)
        )
        whole = tl.minimum(whole, k_seen)
    reached = seen * 0
    if WINDOWED:  # every block has a mask: the oldest keys of some rows are hidden, too
        reached = tl.minimum(reached_block(most + k_slot, blocks, q_least - window), seen)
        whole = reached
    length_of_split = tl.cdiv(seen - reached, splits)
    begin = reached + split * length_of_split
    end = tl.minimum(begin + length_of_split, seen)
    whole = tl.minimum(tl.maximum(whole, begin), end)

    k += k_begin.to(tl.int64) * stride_kt + kv_head * stride_kh
    v += k_begin.to(tl.int64) * stride_vt + kv_head * stride_vh
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    acc, total, peak = _attend(
        acc, total, peak, q_tile, q_position, k, v, k_positions, length, begin, whole,
        stride_kt, stride_vt, scale_log2, window, CAUSAL, False, False, BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    acc, total, peak = _attend(
        acc, total, peak, q_tile, q_position, k, v, k_positions, length, whole, end,
        stride_kt, stride_vt, scale_log2, window, CAUSAL, WINDOWED, True,
        BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip

    blind = total == 0.0
    acc = acc / tl.where(blind, 1.0, total)[:, None]
    heads = tl.num_programs(1) * GROUP
    out_row = ((split * q_tokens).to(tl.int64) + token) * heads + head
    tl.store(out + out_row[:, None] * HEAD_DIM + dim[None, :], acc, mask=elements)
    lse_row = (split * heads + head).to(tl.int64) * q_tokens + token
    log_total = (peak + tl.log2(tl.where(blind, 1.0, total))) * LN_2
    tl.store(lse + lse_row, tl.where(blind, float("-inf"), log_total), mask=used)


def attention(
    q_thd: Tensor,
    k_thd: Tensor,
    v_thd: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    scale: float,
    cu_seqlens_q: Offsets | None,
    cu_seqlens_k: Offsets | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Implement `csps.kernels.attention.attention` for bf16, fp16 and fp32."""
    _refuse_fp64(q_thd)
    q_thd, k_thd, v_thd = (kernel_input(tensor) for tensor in (q_thd, k_thd, v_thd))
    cu_q, cu_k = (offsets_tensor(cu, q_thd.device) for cu in (cu_seqlens_q, cu_seqlens_k))
    sequences = 1 if cu_q is None else len(cu_q) - 1
    tiling = _tiling_of(q_thd, k_thd, sequences)
    positions = None
    if q_positions is not None and k_positions is not None:
        k_at = as_tensor(k_positions, q_thd.device)
        least, most = extremes(k_at, cu_k, sequences, tiling.block_n)
        positions = as_tensor(q_positions, q_thd.device), k_at, least, most
    keys = None if cu_k is None else (cu_k[:-1], cu_k[1:])
    return _launch(tiling, q_thd, k_thd, v_thd, positions, cu_q, keys, len(k_thd), scale, window)


def chunk_attention(
    q_nhd: Tensor, k_shd: Tensor, v_shd: Tensor, runs: ChunkRuns, scale: float
) -> tuple[Tensor, Tensor]:
    """Implement `csps.kernels.attention.chunk_attention` for bf16, fp16 and fp32."""
    _refuse_fp64(q_nhd)
    q_nhd, k_shd, v_shd = (kernel_input(tensor) for tensor in (q_nhd, k_shd, v_shd))
    cu_q, begins, ends = runs.layered(q_nhd.device)
    layers = runs.depth
    tokens = sum(len(run) for of_chunk in runs.runs for run in of_chunk)
    tiling = _tiling_of(q_nhd, k_shd, len(runs.runs))
    # A chunk's rows are repeated for each of its runs. Mostly there is one.
    rows_nhd = q_nhd if layers == 1 else q_nhd.repeat(layers, 1, 1)
    out_nhd, lse_hn = _launch(
        tiling, rows_nhd, k_shd, v_shd, None, cu_q, (begins, ends), tokens, scale, None
    )
    if layers == 1:
        return out_nhd, lse_hn
    lse_lhn = lse_hn.view(len(lse_hn), layers, -1).transpose(0, 1)
    return merge_stacked(out_nhd.view(layers, *q_nhd.shape), lse_lhn)


def _tiling_of(q_thd: Tensor, k_thd: Tensor, sequences: int) -> Tiling:
    tokens, heads, dim = q_thd.shape
    group = heads // k_thd.shape[1]
    rows = SHORT_ROWS if triton.cdiv(tokens, sequences) * group <= SHORT_ROWS else LONG_ROWS
    return choose_tiling(q_thd.dtype, dim, group, rows, shared_memory(q_thd.device))


def _launch(
    tiling: Tiling,
    q_thd: Tensor,
    k_thd: Tensor,
    v_thd: Tensor,
    positions: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    cu_q: Tensor | None,
    keys: tuple[Tensor, Tensor] | None,
    k_tokens: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel.

    Args:
        positions: of queries and keys, and the extremes of the keys' blocks; None without a mask.
        keys: first key and end of each sequence; None if it is one.
        k_tokens: keys that all sequences see together.
    """
    q_tokens, heads, dim = q_thd.shape
    kv_heads = k_thd.shape[1]
    group = heads // kv_heads
    sequences = 1 if cu_q is None else len(cu_q) - 1
    begins, ends = (None, None) if keys is None else keys
    q_slots = slots(q_tokens, sequences, tiling.block_m // group)
    k_blocks = triton.cdiv(k_tokens, sequences * tiling.block_n)
    splits = _splits(q_slots * kv_heads, k_blocks, q_thd.device)
    out_sthd = torch.empty(splits, q_tokens, heads, dim, dtype=torch.float32, device=q_thd.device)
    lse_sht = torch.empty(splits, heads, q_tokens, dtype=torch.float32, device=q_thd.device)
    _attention_kernel[(q_slots, kv_heads, splits)](
        q_thd, k_thd, v_thd, *(positions or (None,) * 4), cu_q, begins, ends,
        out_sthd, lse_sht, q_tokens, k_tokens, sequences, splits, window or 0, scale * LOG2_E,
        *q_thd.stride()[:2], *k_thd.stride()[:2], *v_thd.stride()[:2],
        GROUP=group, HEAD_DIM=dim, CAUSAL=positions is not None, WINDOWED=window is not None,
        VARLEN=cu_q is not None,
        BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, BLOCK_D=padded_dim(dim),
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return merge_stacked(out_sthd, lse_sht) if splits > 1 else (out_sthd[0], lse_sht[0])


def choose_tiling(dtype: torch.dtype, head_dim: int, group: int, rows: int, shared: int) -> Tiling:
    """Choose the tiling of a call with this many rows a tile, for a card with so many bytes of
    shared memory."""
    # A table, not autotuning, which would stall the first requests.
    fewest = int(triton.next_power_of_2(group))  # a token's group stays together
    wide = padded_dim(head_dim)
    if dtype == torch.float32:  # no tensor cores at full precision: for tests and small models
        rows, keys, warps, stages = min(rows, 32), 32 if wide <= 128 else 16, 4, 2
    else:
        keys = 128 if wide == 128 and rows == LONG_ROWS else 64
        warps, stages = 8 if wide > 64 and rows == LONG_ROWS else 4, 3 if wide <= 64 else 2
    rows = max(rows, fewest)
    while keys > FEWEST_KEYS and shared_by(dtype, wide, rows, 2 * stages * keys) > shared:
        keys //= 2
    if shared_by(dtype, wide, rows, 2 * stages * keys) > shared:
        stages = 1
    return Tiling(block_m=rows, block_n=keys, warps=warps, stages=stages)


def _splits(programs: int, k_blocks: int, device: torch.device) -> int:
    """Return how often to split the keys if the queries alone leave processors idle (decode)."""
    wanted = triton.cdiv(WAVES * processors(device), programs)
    return max(1, min(int(wanted), k_blocks // MIN_SPLIT_BLOCKS))


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 1 for a CPU."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _decode_kernel(q, k, v, runs, out, lse, scale_log2,
                   stride_qr, stride_qh, stride_ks, stride_kh, stride_vs, stride_vh,
                   GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    run = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(runs + run * 3)
    begin = tl.load(runs + run * 3 + 1)
    length = tl.load(runs + run * 3 + 2) - begin

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
        acc, total, peak, q_tile, member, k, v, runs, length, whole * 0, whole,
        stride_ks, stride_vs, scale_log2, 0, False, False, False, BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    acc, total, peak = _attend(
        acc, total, peak, q_tile, member, k, v, runs, length, whole, tl.cdiv(length, BLOCK_N),
        stride_ks, stride_vs, scale_log2, 0, False, False, True, BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip

    out_row = run.to(tl.int64) * tl.num_programs(1) * GROUP + head
    tl.store(out + out_row[:, None] * HEAD_DIM + dim[None, :], acc / total[:, None], mask=elements)
    tl.store(lse + out_row, (peak + tl.log2(total)) * LN_2, mask=used)


def decode_attention(
    q_rhd: Tensor, k_shd: Tensor, v_shd: Tensor, runs: SlotRuns, scale: float
) -> tuple[Tensor, Tensor]:
    """Implement `csps.kernels.attention.decode_attention` for bf16, fp16 and fp32."""
    _refuse_fp64(q_rhd)
    q_rhd, k_shd, v_shd = (kernel_input(tensor) for tensor in (q_rhd, k_shd, v_shd))
    rows, heads, dim = q_rhd.shape
    kv_heads = k_shd.shape[1]
    group = heads // kv_heads
    tiling = choose_tiling(q_rhd.dtype, dim, group, TOKEN_ROWS, shared_memory(q_rhd.device))
    splits_n3, row_n = runs.split(
        q_rhd.device, split_length(runs.tokens * kv_heads, processors(q_rhd.device))
    )
    out_nhd = torch.empty(len(row_n), heads, dim, dtype=torch.float32, device=q_rhd.device)
    lse_nh = torch.empty(len(row_n), heads, dtype=torch.float32, device=q_rhd.device)
    _decode_kernel[(len(row_n), kv_heads)](
        q_rhd, k_shd, v_shd, splits_n3, out_nhd, lse_nh, scale * LOG2_E,
        *q_rhd.stride()[:2], *k_shd.stride()[:2], *v_shd.stride()[:2],
        GROUP=group, HEAD_DIM=dim, BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n,
        BLOCK_D=padded_dim(dim), num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return merge_rows(out_nhd, lse_nh, row_n, rows)


def split_length(work: int, processor_count: int) -> int:
    """Return how many slots a run may have so that `work` (slots x heads) fills the processors."""
    wanted = triton.next_power_of_2(max(1, work // (DECODE_WAVES * processor_count)))
    return int(min(max(wanted, SHORTEST_SPLIT), LONGEST_SPLIT))


def _refuse_fp64(q: Tensor) -> None:
    if q.dtype == torch.float64:
        raise ValueError("fp64 attention runs on CPU only; a GPU takes bf16, fp16 and fp32")
