"""Attention on CPU: torch's flash attention, which returns the LSE and takes GQA as it is.

Its only mask-free forms are "all keys" and "causal from the top left corner", and a mask costs
time and memory, so calls are cut along the staircase of the positions (`csps.kernels.staircase`)
until each is one of those two. matmul-softmax-matmul reaches a third of its speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from csps.kernels.merge import merge_into, nothing_seen
from csps.kernels.positions import Offsets, Positions, as_tensor, ascending, sequences
from csps.kernels.staircase import RowBlock, Stair, blocks, visible_keys

FOLD_ROWS = 16  # up to here a kv head's query heads go as rows: 2.5x faster for one fp32 row


def attention(
    q_thd: Tensor,
    k_thd: Tensor,
    v_thd: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    scale: float,
    cu_seqlens_q: Offsets | None,
    cu_seqlens_k: Offsets | None,
) -> tuple[Tensor, Tensor]:
    """See `csps.kernels.attention.attention`."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return _one_sequence(q_thd, k_thd, v_thd, q_positions, k_positions, scale)
    out_thd, lse_ht = nothing_seen(q_thd)
    q_slices, k_slices = sequences(cu_seqlens_q, len(q_thd)), sequences(cu_seqlens_k, len(k_thd))
    for q, k in zip(q_slices, k_slices, strict=True):
        qp = None if q_positions is None else q_positions[q]
        kp = None if k_positions is None else k_positions[k]
        out_thd[q], lse_ht[:, q] = _one_sequence(q_thd[q], k_thd[k], v_thd[k], qp, kp, scale)
    return out_thd, lse_ht


def _one_sequence(
    q_thd: Tensor,
    k_thd: Tensor,
    v_thd: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    if len(q_thd) == 0 or len(k_thd) == 0:
        return nothing_seen(q_thd)
    if q_positions is None or k_positions is None:
        return _dense(q_thd, k_thd, v_thd, scale)
    if isinstance(q_positions, range) and isinstance(k_positions, range):
        # Chunks of a prompt come so, and short ones often: nothing is inspected.
        corner = q_positions.start - k_positions.start
        if q_positions.step == k_positions.step == 1 and 0 <= corner <= len(k_thd) - len(q_thd):
            return _diagonal(q_thd, k_thd, v_thd, corner, scale)
    q_positions = as_tensor(q_positions, q_thd.device)
    k_positions = as_tensor(k_positions, q_thd.device)
    if q_positions.min() >= k_positions.max():
        return _dense(q_thd, k_thd, v_thd, scale)
    if not ascending(k_positions):
        k_positions, order = k_positions.sort()
        k_thd, v_thd = k_thd[order], v_thd[order]
    if ascending(q_positions):
        return _staircase(q_thd, k_thd, v_thd, visible_keys(q_positions, k_positions), scale)
    q_positions, order = q_positions.sort()
    visible = visible_keys(q_positions, k_positions)
    out_thd, lse_ht = _staircase(q_thd[order], k_thd, v_thd, visible, scale)
    back = order.argsort()
    return out_thd[back], lse_ht[:, back]


def _staircase(
    q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    out_thd, lse_ht = nothing_seen(q_thd)
    for block in blocks(visible):
        rows = slice(block.start, block.stop)
        out, lse = _block(q_thd[rows], k_thd, v_thd, block, visible[rows], scale)
        if len(out) == len(q_thd):
            return out, lse  # one block is the common case, and saves the copy
        out_thd[rows], lse_ht[:, rows] = out, lse
    return out_thd, lse_ht


def _block(
    q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, block: RowBlock, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    k_thd, v_thd = k_thd[: block.last], v_thd[: block.last]
    if block.stair is Stair.FLAT:
        return _dense(q_thd, k_thd, v_thd, scale)
    if block.stair is Stair.MASKED:
        hidden = torch.arange(block.last) >= visible[:, None]
        mask = torch.zeros(hidden.shape, dtype=q_thd.dtype).masked_fill_(hidden, -torch.inf)
        return _flash(q_thd, k_thd, v_thd, scale, mask=mask)
    return _diagonal(q_thd, k_thd, v_thd, block.first - 1, scale)


def _diagonal(
    q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, corner: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Row i sees keys up to `corner` + i: all before the corner, and those of a triangle."""
    stop = corner + len(q_thd)
    k_thd, v_thd = k_thd[:stop], v_thd[:stop]
    if len(q_thd) == 1:
        return _dense(q_thd, k_thd, v_thd, scale)
    out_thd, lse_ht = _flash(q_thd, k_thd[corner:], v_thd[corner:], scale, causal=True)
    if corner:
        merge_into(out_thd, lse_ht, *_dense(q_thd, k_thd[:corner], v_thd[:corner], scale))
    return out_thd, lse_ht


def _dense(q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every query sees every key. Few queries read each kv head once for all its query heads."""
    tokens, heads, dim = q_thd.shape
    kv_heads = k_thd.shape[1]
    group = heads // kv_heads
    if tokens > FOLD_ROWS or group == 1:
        return _flash(q_thd, k_thd, v_thd, scale)
    folded = q_thd.reshape(tokens, kv_heads, group, dim).transpose(1, 2)
    folded = folded.reshape(tokens * group, kv_heads, dim)
    out, lse = _flash(folded, k_thd, v_thd, scale)
    out_thd = out.view(tokens, group, kv_heads, dim).transpose(1, 2).reshape(q_thd.shape)
    lse_ht = lse.view(kv_heads, tokens, group).transpose(1, 2).reshape(heads, tokens)
    return out_thd, lse_ht


def _flash(
    q_thd: Tensor,
    k_thd: Tensor,
    v_thd: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    q, k, v = (_batch_of_one(x) for x in (q_thd, k_thd, v_thd))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    dtype = torch.promote_types(q_thd.dtype, torch.float32)
    return out[0].transpose(0, 1).to(dtype), lse[0].to(dtype)


def _batch_of_one(x_thd: Tensor) -> Tensor:
    """(1, heads, tokens, dim). The op reads any strides but silently assumes a dense last dim."""
    x_thd = x_thd if x_thd.stride(-1) == 1 else x_thd.contiguous()
    return x_thd.transpose(0, 1)[None]
