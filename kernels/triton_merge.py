# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""LSE-weighted sums in Triton: stacked parts, a part into a running result, the parts of each row.

See `csps.kernels.merge` for the weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4  # tokens of one head that a program merges: head dim x rows fills four warps
PARTS = 16  # parts that a program searches at a time for those of its row


@triton.jit(do_not_specialize=["parts", "tokens"])
def _merge_stacked_kernel(outs, lses, out, lse, parts, tokens, HEAD_DIM: tl.constexpr,
                          ROWS: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Merge outs (parts, tokens, heads, dim) and lses (parts, heads, tokens), both dense."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    dim = tl.arange(0, BLOCK_D)
    used = token < tokens
    elements = used[:, None] & (dim < HEAD_DIM)[None, :]
    lse_row = head.to(tl.int64) * tokens + token
    out_row = (token.to(tl.int64) * heads + head)[:, None] * HEAD_DIM + dim[None, :]
    size = heads.to(tl.int64) * tokens
    peak = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    for part in range(parts):
        peak = tl.maximum(peak, tl.load(lses + part * size + lse_row, mask=used, other=0.0))
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    for part in range(parts):
        weight = tl.exp(tl.load(lses + part * size + lse_row, mask=used, other=0.0) - shift)
        total += weight
        row = tl.load(outs + part * size * HEAD_DIM + out_row, mask=elements, other=0.0)
        acc += weight[:, None] * row.to(tl.float32)
    blind = total == 0.0
    safe = tl.where(blind, 1.0, total)
    tl.store(out + out_row, acc / safe[:, None], mask=elements)
    tl.store(lse + lse_row, tl.where(blind, float("-inf"), shift + tl.log(safe)), mask=used)


@triton.jit(
    do_not_specialize=[
        "rows",
        "group",
        "stride_lh",
        "stride_lt",
        "stride_qh",
        "stride_qt",
        "stride_kh",
    ],
    do_not_specialize_on_alignment=["lse", "other_lse", "kept"],
)
def _merge_into_kernel(out, lse, other, other_lse, kept, rows, group,
                       stride_ot, stride_oh, stride_lh, stride_lt,
                       stride_pt, stride_ph, stride_qh, stride_qt, stride_kh,
                       KEPT: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
                       BLOCK_D: tl.constexpr):  # fmt: skip
    """Merge row i of `other` into token kept[head // group, i], or into token i."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    used = row < rows
    elements = used[:, None] & (dim < HEAD_DIM)[None, :]
    token = row.to(tl.int64)
    if KEPT:
        token = tl.load(kept + (head // group) * stride_kh + row, mask=used, other=0)
    lse_at = lse + head * stride_lh + token * stride_lt
    out_at = out + (token * stride_ot + head * stride_oh)[:, None] + dim[None, :]
    other_at = other + (row.to(tl.int64) * stride_pt + head * stride_ph)[:, None] + dim[None, :]
    mine = tl.load(lse_at, mask=used, other=0.0)
    theirs = tl.load(other_lse + head * stride_qh + row * stride_qt, mask=used, other=0.0)
    peak = tl.maximum(mine, theirs)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    my_weight = tl.exp(mine - shift)
    their_weight = tl.exp(theirs - shift)
    total = my_weight + their_weight
    blind = total == 0.0
    safe = tl.where(blind, 1.0, total)
    my_row = tl.load(out_at, mask=elements, other=0.0)
    their_row = tl.load(other_at, mask=elements, other=0.0).to(tl.float32)
    merged = my_weight[:, None] * my_row + their_weight[:, None] * their_row
    tl.store(out_at, merged / safe[:, None], mask=elements)
    tl.store(lse_at, tl.where(blind, float("-inf"), shift + tl.log(safe)), mask=used)


@triton.jit(do_not_specialize=["parts"])
def _merge_rows_kernel(outs, lses, row_of, out, lse, parts, HEAD_DIM: tl.constexpr,
                       PARTS: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Merge outs (parts, heads, dim) and lses (parts, heads), both dense, into rows row_of[i]."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    dim = tl.arange(0, BLOCK_D)
    peak = tl.full((), float("-inf"), dtype=tl.float32)
    total = tl.zeros((), dtype=tl.float32)
    acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        own = tl.load(row_of + part, mask=part < parts, other=-1) == row
        at = part.to(tl.int64) * heads + head
        theirs = tl.load(lses + at, mask=own, other=float("-inf"))
        highest = tl.maximum(peak, tl.max(theirs, 0))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp(theirs - shift)
        before = tl.exp(peak - shift)
        elements = own[:, None] & (dim < HEAD_DIM)[None, :]
        tile = tl.load(outs + at[:, None] * HEAD_DIM + dim[None, :], mask=elements, other=0.0)
        acc = acc * before + tl.sum(weight[:, None] * tile, 0)
        total = total * before + tl.sum(weight, 0)
        peak = highest
    blind = total == 0.0
    safe = tl.where(blind, 1.0, total)
    out_row = row.to(tl.int64) * heads + head
    tl.store(out + out_row * HEAD_DIM + dim, acc / safe, mask=dim < HEAD_DIM)
    tl.store(lse + out_row, tl.where(blind, float("-inf"), peak + tl.log(safe)))


def merge_stacked(out_pthd: Tensor, lse_pht: Tensor) -> tuple[Tensor, Tensor]:
    """Implement `csps.kernels.merge.merge` for parts along the first dim of dense fp32 tensors."""
    parts, tokens, heads, dim = out_pthd.shape
    out_thd, lse_ht = torch.empty_like(out_pthd[0]), torch.empty_like(lse_pht[0])
    _merge_stacked_kernel[(triton.cdiv(tokens, ROWS), heads)](
        out_pthd.contiguous(), lse_pht.contiguous(), out_thd, lse_ht, parts, tokens,
        HEAD_DIM=dim, ROWS=ROWS, BLOCK_D=triton.next_power_of_2(dim),
    )  # fmt: skip
    return out_thd, lse_ht


def merge_into(
    out_thd: Tensor,
    lse_ht: Tensor,
    other_khd: Tensor,
    other_hk: Tensor,
    kept_gk: Tensor | None,
) -> None:
    """Implement `csps.kernels.merge.merge_into`."""
    rows, heads, dim = other_khd.shape
    _merge_into_kernel[(triton.cdiv(rows, ROWS), heads)](
        out_thd, lse_ht, other_khd, other_hk, kept_gk, rows,
        1 if kept_gk is None else heads // kept_gk.shape[0],
        *out_thd.stride()[:2], *lse_ht.stride(), *other_khd.stride()[:2], *other_hk.stride(),
        0 if kept_gk is None else kept_gk.stride(0),
        KEPT=kept_gk is not None, HEAD_DIM=dim, ROWS=ROWS, BLOCK_D=triton.next_power_of_2(dim),
    )  # fmt: skip


def merge_rows(out_nhd: Tensor, lse_nh: Tensor, row_n: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Implement `csps.kernels.merge.merge_rows` for fp32 with one kernel."""
    _, heads, dim = out_nhd.shape
    out_rhd, lse_rh = out_nhd.new_empty(rows, heads, dim), lse_nh.new_empty(rows, heads)
    _merge_rows_kernel[(rows, heads)](
        out_nhd.contiguous(), lse_nh.contiguous(), row_n, out_rhd, lse_rh, len(out_nhd),
        HEAD_DIM=dim, PARTS=PARTS, BLOCK_D=triton.next_power_of_2(dim),
    )  # fmt: skip
    return out_rhd, lse_rh
