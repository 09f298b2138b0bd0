# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Parts common to the Triton kernels: token blocks of a variable-length batch and their extremes.

Sequence i owns the block slots from cu_seqlens[i] // BLOCK + i to the first slot of the next
sequence. These are never too few, so the grid follows from the token count alone and the host need
not wait for the lengths. A program finds its sequence by bisection; a few slots remain empty.

Kernels are not specialized on the number of tokens or on the alignment of a slice. Otherwise a
server would compile for seconds in the middle of decoding.

The least and greatest position of each block tell which blocks a mask hides. This works in any
order of positions; with ascending positions exactly the staircase remains.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import max_shared_mem

from csps.kernels.arguments import Offsets

LAST_POSITION = tl.constexpr(2**31 - 1)
SCAN = tl.constexpr(256)  # block extremes that a program reads at a time
HOPPER_SHARED = 227 * 1024
BARRIERS = 1024  # shared memory besides tiles


@triton.jit
def sequence_of(slot, cu_seqlens, sequences, BLOCK: tl.constexpr):
    """Return the last sequence whose slots begin at or before `slot`."""
    low = 0
    high = sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) // BLOCK + middle <= slot:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def bounds_of(sequence, cu_seqlens, tokens, VARLEN: tl.constexpr):
    """Return the first token and the end of a sequence."""
    begin = 0
    end = tokens
    if VARLEN:
        begin = tl.load(cu_seqlens + sequence)
        end = tl.load(cu_seqlens + sequence + 1)
    return begin, end


@triton.jit
def range_of(sequence, begins, ends, tokens, VARLEN: tl.constexpr):
    """Return the first key and the end of a sequence, whose keys may lie anywhere."""
    begin = 0
    end = tokens
    if VARLEN:
        begin = tl.load(begins + sequence)
        end = tl.load(ends + sequence)
    return begin, end


@triton.jit
def first_slot_of(sequence, begin, BLOCK: tl.constexpr):
    return begin // BLOCK + sequence


@triton.jit
def load_tile(base, stride, rows, BOUNDED: tl.constexpr, ROWS: tl.constexpr,
              HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Load (ROWS, BLOCK_D) of consecutive tokens; 0 past `rows` if BOUNDED, and past HEAD_DIM."""
    row = tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    pointers = base + row * stride + dim
    if BOUNDED:
        tile = tl.load(pointers, mask=(row < rows) & (dim < HEAD_DIM), other=0.0)
    elif BLOCK_D != HEAD_DIM:
        tile = tl.load(pointers, mask=dim < HEAD_DIM, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit(
    do_not_specialize=["tokens", "sequences"],
    do_not_specialize_on_alignment=["positions", "cu_seqlens", "least", "most"],
)
def _extremes_kernel(positions, cu_seqlens, least, most, tokens, sequences,
                     VARLEN: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr):  # fmt: skip
    slot = tl.program_id(0)
    sequence = 0
    if VARLEN:
        sequence = sequence_of(slot, cu_seqlens, sequences, BLOCK)
    begin, end = bounds_of(sequence, cu_seqlens, tokens, VARLEN)
    offset = tl.arange(0, SPAN)
    token = begin + (slot - first_slot_of(sequence, begin, BLOCK)) * BLOCK + offset
    inside = (offset < BLOCK) & (token < end)
    position = tl.load(positions + token, mask=inside, other=0).to(tl.int32)
    tl.store(least + slot, tl.min(tl.where(inside, position, LAST_POSITION), 0))
    tl.store(most + slot, tl.max(tl.where(inside, position, -1), 0))


@triton.jit
def seen_blocks(least, most, blocks, q_least, q_most):
    """Return (whole, seen): queries between the extremes see every key of the blocks before
    `whole`, and no key of the blocks from `seen` on."""
    whole = blocks
    seen = 0
    for start in range(0, blocks, SCAN):
        index = start + tl.arange(0, SCAN)
        inside = index < blocks
        begins = inside & (tl.load(least + index, mask=inside, other=0) <= q_most)
        exceeds = inside & (tl.load(most + index, mask=inside, other=0) > q_least)
        seen = tl.maximum(seen, tl.max(tl.where(begins, index + 1, 0), 0))
        whole = tl.minimum(whole, tl.min(tl.where(exceeds, index, blocks), 0))
    return whole, seen


@triton.jit
def reached_block(most, blocks, bound):
    """Return the first block with a key behind position `bound`."""
    reached = blocks
    for start in range(0, blocks, SCAN):
        index = start + tl.arange(0, SCAN)
        inside = index < blocks
        behind = inside & (tl.load(most + index, mask=inside, other=0) > bound)
        reached = tl.minimum(reached, tl.min(tl.where(behind, index, blocks), 0))
    return reached


@triton.jit
def seeing_blocks(least, most, blocks, k_least, k_most):
    """Return (seeing, whole): queries before block `seeing` see no key between the extremes, and
    queries of the blocks from `whole` on see all of them."""
    seeing = blocks
    whole = 0
    for start in range(0, blocks, SCAN):
        index = start + tl.arange(0, SCAN)
        inside = index < blocks
        reaches = inside & (tl.load(most + index, mask=inside, other=0) >= k_least)
        falls_short = inside & (tl.load(least + index, mask=inside, other=0) < k_most)
        seeing = tl.minimum(seeing, tl.min(tl.where(reaches, index, blocks), 0))
        whole = tl.maximum(whole, tl.max(tl.where(falls_short, index + 1, 0), 0))
    return seeing, tl.maximum(seeing, whole)


def slots(tokens: int, sequences: int, block: int) -> int:
    """Return enough block slots for any split of the tokens into sequences."""
    return tokens // block + sequences


def extremes(
    positions: Tensor, cu_seqlens: Tensor | None, sequences: int, block: int
) -> tuple[Tensor, Tensor]:
    """Compute the least and greatest position of each block slot, (slots,) int32 each."""
    count = slots(len(positions), sequences, block)
    least, most = torch.empty(2, count, dtype=torch.int32, device=positions.device)
    _extremes_kernel[(count,)](
        positions, cu_seqlens, least, most, len(positions), sequences,
        VARLEN=cu_seqlens is not None, BLOCK=block, SPAN=triton.next_power_of_2(block),
    )  # fmt: skip
    return least, most


def offsets_tensor(cu_seqlens: Offsets | None, device: torch.device) -> Tensor | None:
    """Return the offsets as int32 on the device."""
    if cu_seqlens is None:
        return None
    # int32 like the kernels' token counts, because the bounds of a loop must have one type.
    return torch.as_tensor(cu_seqlens, dtype=torch.int32, device=device)


def kernel_input(x_thd: Tensor) -> Tensor:
    """Return the tensor with a dense last dim, on a CPU in fp32."""
    # On a CPU Triton's interpreter runs the kernels, and it cannot compute in bf16.
    if not x_thd.is_cuda and x_thd.dtype in (torch.bfloat16, torch.float16):
        x_thd = x_thd.float()
    return x_thd if x_thd.stride(-1) == 1 else x_thd.contiguous()


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have; a Hopper's on a CPU."""
    # What Triton compares a compiled kernel with: 227 KiB on H100, 163 on A100, 99 on L40.
    return int(max_shared_mem(device.index)) if device.type == "cuda" else HOPPER_SHARED


def shared_by(dtype: torch.dtype, wide: int, *rows: int) -> int:
    """Return the most bytes of shared memory that tiles with so many rows take."""
    # What compiling for Hopper takes, to the byte; Ampere takes less.
    return wide * sum(rows) * dtype.itemsize + BARRIERS


def padded_dim(head_dim: int) -> int:
    """Return the tile size of a head dim."""
    # Tiles are powers of two, and tensor cores take at least 16.
    return max(16, int(triton.next_power_of_2(head_dim)))
