"""Merge attention over disjoint sets of keys, exactly (CSPS Eq. 5, Context Parallelism Eq. 4).

The weight of a part is exp(lse - max lse), divided by the sum of these. Raw softmax denominators
would be wrong, since each part has its own maximum. Weights exp(lse - total lse) would not sum to
one: at |lse| = 1e4 an fp32 total is off by 5e-4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge any number of partial outputs, weighted by their LSE.

    Args:
        outs: each (tokens, heads, head dim), finite, of any floating dtype.
        lses: each (heads, tokens), natural log; -inf where a part saw no key.

    Returns:
        out_thd, lse_ht: attention over the union of the keys, in the dtype of the lses.

    Raises:
        ValueError: no parts, or unequal numbers of outputs and LSEs.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"merge takes as many outs as lses, at least one, not {len(outs)} and {len(lses)}"
        )
    if outs[0].is_cuda:
        from csps.kernels.triton_merge import merge_stacked

        stacked = torch.stack([out.to(lses[0].dtype) for out in outs])
        return merge_stacked(stacked, torch.stack(tuple(lses)))
    return _merge(outs, torch.stack(tuple(lses)))


def merge_into(
    out_thd: Tensor,
    lse_ht: Tensor,
    other_khd: Tensor,
    other_hk: Tensor,
    kept_gk: Tensor | None = None,
) -> None:
    """Merge one more part into a running result, in place (progressive attention, CSPS §3.2.5).

    With `kept_gk` the part has rows for some tokens only, selected by KV head. It is then a level
    of sparse attention, where dropped tokens have weight 0 (CSPS Eq. 5).

    Args:
        out_thd, lse_ht: the running (tokens, heads, head dim) and (heads, tokens); overwritten.
        other_khd, other_hk: the part, same layout over its own rows, of any floating dtype.
        kept_gk: (kv heads, rows) int64, the token of each row, no token twice for one head; head
            h reads kv head h // (heads / kv heads). None when row i is token i.
    """
    if out_thd.is_cuda:
        from csps.kernels import triton_merge

        triton_merge.merge_into(out_thd, lse_ht, other_khd, other_hk, kept_gk)
    elif kept_gk is None:
        _merge_rows(out_thd, lse_ht, other_khd, other_hk)
    else:
        kept_hk = kept_gk.repeat_interleave(len(lse_ht) // len(kept_gk), dim=0)
        at = kept_hk.T, torch.arange(len(kept_hk))
        out_khd, lse_hk = out_thd[at], lse_ht.gather(1, kept_hk)
        _merge_rows(out_khd, lse_hk, other_khd, other_hk)
        out_thd[at] = out_khd
        lse_ht.scatter_(1, kept_hk, lse_hk)


def merge_sink(out_thd: Tensor, lse_ht: Tensor, sinks_h: Tensor) -> None:
    """Merge an attention sink into a result, in place: a key with the value 0 for each head.

    Args:
        sinks_h: (heads,) logit of each head's sink.
    """
    sinks_h1 = sinks_h.to(lse_ht.dtype)[:, None]
    out_thd.mul_(torch.sigmoid(lse_ht - sinks_h1).transpose(0, 1)[..., None])
    lse_ht.copy_(torch.logaddexp(lse_ht, sinks_h1))


def merge_rows(out_nhd: Tensor, lse_nh: Tensor, row_n: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Merge any number of parts for each row, in a fixed number of operations.

    Args:
        out_nhd, lse_nh: (parts, heads, head dim) and (parts, heads).
        row_n: (parts,) int64, the row of each part, in any order.

    Returns:
        out_rhd, lse_rh: one entry per row; 0 and -inf for a row without a part.
    """
    if out_nhd.is_cuda:
        from csps.kernels import triton_merge

        return triton_merge.merge_rows(out_nhd, lse_nh, row_n, rows)
    heads = lse_nh.shape[1]
    index_nh = row_n[:, None].expand(-1, heads)
    peak_rh = lse_nh.new_full((rows, heads), -torch.inf)
    peak_rh.scatter_reduce_(0, index_nh, lse_nh, "amax")
    shift_rh = peak_rh.masked_fill(peak_rh == -torch.inf, 0.0)
    weight_nh = torch.exp(lse_nh - shift_rh[row_n])
    total_rh = torch.zeros_like(peak_rh).index_add_(0, row_n, weight_nh)
    # A total is at least 1, or 0 for a row without a part.
    fraction_nh = weight_nh / total_rh.clamp_min(1.0)[row_n]
    out_rhd = out_nhd.new_zeros(rows, *out_nhd.shape[1:])
    out_rhd.index_add_(0, row_n, out_nhd * fraction_nh[..., None])
    return out_rhd, shift_rh + total_rh.log()


def nothing_seen(q_thd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention of these queries over no key, the identity of merging: 0 and -inf."""
    tokens, heads, _ = q_thd.shape
    dtype = torch.promote_types(q_thd.dtype, torch.float32)
    lse_ht = torch.full((heads, tokens), -torch.inf, dtype=dtype, device=q_thd.device)
    return torch.zeros(q_thd.shape, dtype=dtype, device=q_thd.device), lse_ht


def _merge(outs: Sequence[Tensor], lse_pht: Tensor) -> tuple[Tensor, Tensor]:
    max_ht = lse_pht.amax(dim=0)
    weight_pht = torch.exp(lse_pht - max_ht.masked_fill(max_ht == -torch.inf, 0.0))
    total_ht = weight_pht.sum(dim=0)  # at least 1, or 0 where no part saw anything
    weight_pth1 = (weight_pht / total_ht.clamp_min(1.0)).transpose(1, 2)[..., None]
    out_thd = outs[0] * weight_pth1[0]
    for out, weight in zip(outs[1:], weight_pth1[1:], strict=True):
        out_thd.addcmul_(out.to(out_thd.dtype), weight)
    return out_thd, max_ht + total_ht.log()


def _merge_rows(out_thd: Tensor, lse_ht: Tensor, other_thd: Tensor, other_ht: Tensor) -> None:
    # Two weights in sigmoid form. The mask replaces NaN where neither part saw a key.
    fraction_ht = torch.sigmoid(other_ht - lse_ht).masked_fill_(other_ht == -torch.inf, 0.0)
    out_thd.lerp_(other_thd.to(out_thd.dtype), fraction_ht.transpose(0, 1)[..., None])
    lse_ht.copy_(torch.logaddexp(lse_ht, other_ht))
