"""Column sums of attention probabilities on CPU: tiles of scores that stay in cache."""

from __future__ import annotations

import torch
from torch import Tensor

from csps.kernels.positions import Offsets, Positions, as_tensor, ascending, sequences
from csps.kernels.staircase import visible_keys

TILE_ROWS = 256  # (query, head) pairs of one kv head
TILE_KEYS = 512  # with the rows: 512 KiB of fp32 scores per kv head, which a core's cache holds


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
    """See `csps.kernels.importance.column_sums`."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return _one_sequence(q_thd, k_thd, lse_ht, q_positions, k_positions, scale)
    parts = []
    q_slices, k_slices = sequences(cu_seqlens_q, len(q_thd)), sequences(cu_seqlens_k, len(k_thd))
    for q, k in zip(q_slices, k_slices, strict=True):
        qp = None if q_positions is None else q_positions[q]
        kp = None if k_positions is None else k_positions[k]
        parts.append(_one_sequence(q_thd[q], k_thd[k], lse_ht[:, q], qp, kp, scale))
    return torch.cat(parts, dim=1)


def _one_sequence(
    q_thd: Tensor,
    k_thd: Tensor,
    lse_ht: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    scale: float,
) -> Tensor:
    if q_positions is None or k_positions is None:
        visible = torch.full((len(q_thd),), len(k_thd))
        return _ascending(q_thd, k_thd, lse_ht, visible, scale)
    q_positions = as_tensor(q_positions, q_thd.device)
    k_positions = as_tensor(k_positions, q_thd.device)
    if not ascending(q_positions):
        q_positions, order = q_positions.sort()
        q_thd, lse_ht = q_thd[order], lse_ht[:, order]
    if ascending(k_positions):
        return _ascending(q_thd, k_thd, lse_ht, visible_keys(q_positions, k_positions), scale)
    k_positions, order = k_positions.sort()
    visible = visible_keys(q_positions, k_positions)
    sums_gt = _ascending(q_thd, k_thd[order], lse_ht, visible, scale)
    return sums_gt[:, order.argsort()]


def _ascending(
    q_thd: Tensor, k_thd: Tensor, lse_ht: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """Row i sees the first visible[i] keys; see `csps.kernels.staircase`."""
    tokens, heads, dim = q_thd.shape
    kv_heads = k_thd.shape[1]
    group = heads // kv_heads
    dtype = torch.promote_types(q_thd.dtype, torch.float32)
    sums_gt = torch.zeros(kv_heads, len(k_thd), dtype=dtype)
    k_gdt = k_thd.to(dtype).permute(1, 2, 0)
    # exp(score - inf) is 0: a row that saw nothing adds nothing, whatever is multiplied.
    lse_ht = lse_ht.masked_fill(lse_ht == -torch.inf, torch.inf)
    step = max(1, TILE_ROWS // group)
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        q_grd = q_thd[rows].to(dtype).view(-1, kv_heads, group, dim).permute(1, 2, 0, 3)
        lse_gr1 = lse_ht[:, rows].reshape(kv_heads, -1, 1)
        seen = visible[rows].repeat(group)
        q_grd = q_grd.reshape(kv_heads, -1, dim) * scale
        _add_rows(sums_gt, q_grd, k_gdt, lse_gr1, seen)
    return sums_gt


def _add_rows(sums_gt: Tensor, q_grd: Tensor, k_gdt: Tensor, lse_gr1: Tensor, seen: Tensor) -> None:
    least, most = (int(x) for x in seen.aminmax())
    for start in range(0, most, TILE_KEYS):
        stop = min(start + TILE_KEYS, most)
        score_grt = torch.baddbmm(lse_gr1, q_grd, k_gdt[:, :, start:stop], beta=-1)
        if stop > least:
            score_grt.masked_fill_(torch.arange(start, stop) >= seen[:, None], -torch.inf)
        sums_gt[:, start:stop] += score_grt.exp_().sum(dim=1)
