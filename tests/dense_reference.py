"""The oracle of every attention test: the definition, in fp64, with the whole matrix in memory.

Imported as `dense_reference` by the tests of all rooms. Nothing here is shared with the product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def dense_attention(
    q_thd: Tensor,
    k_thd: Tensor,
    v_thd: Tensor,
    *,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    scale: float | None = None,
    cu_seqlens_q: Sequence[int] | None = None,
    cu_seqlens_k: Sequence[int] | None = None,
    window: int | None = None,
    sinks_h: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return fp64 out_thd and lse_ht of `csps.kernels.attention.attention`.

    Args:
        sinks_h: one more logit for each query head, which has no value.
    """
    mask_qk = visible_mask(
        len(q_thd), len(k_thd), q_positions, k_positions, cu_seqlens_q, cu_seqlens_k
    )
    if window is not None:
        assert q_positions is not None
        assert k_positions is not None
        mask_qk &= k_positions[None, :] > q_positions[:, None] - window
    score_hqk = masked_scores(q_thd, k_thd, mask_qk, scale)
    value_hkd = _heads_first(v_thd, q_thd.shape[1])
    if sinks_h is not None:
        sink_hq1 = sinks_h.double()[:, None, None].expand(-1, len(q_thd), 1)
        score_hqk = torch.cat((score_hqk, sink_hq1), dim=-1)
        value_hkd = torch.cat((value_hkd, torch.zeros_like(value_hkd[:, :1])), dim=1)
    prob_hqk = torch.softmax(score_hqk, dim=-1).nan_to_num(0.0)
    return (prob_hqk @ value_hkd).transpose(0, 1), torch.logsumexp(score_hqk, dim=-1)


def dense_importance(
    q_thd: Tensor,
    k_thd: Tensor,
    *,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    scale: float | None = None,
    cu_seqlens_q: Sequence[int] | None = None,
    cu_seqlens_k: Sequence[int] | None = None,
) -> Tensor:
    """Return (kv heads, k tokens) fp64: mean probability over the queries that see a key, summed
    over the query heads of a kv head, when these keys are all there are.
    """
    mask_qk = visible_mask(
        len(q_thd), len(k_thd), q_positions, k_positions, cu_seqlens_q, cu_seqlens_k
    )
    prob_hqk = torch.softmax(masked_scores(q_thd, k_thd, mask_qk, scale), dim=-1).nan_to_num(0.0)
    sums_ht = prob_hqk.sum(dim=1) / mask_qk.sum(dim=0).clamp_min(1)
    kv_heads = k_thd.shape[1]
    return sums_ht.view(kv_heads, len(sums_ht) // kv_heads, len(k_thd)).sum(dim=1)


def masked_scores(
    q_thd: Tensor, k_thd: Tensor, mask_qk: Tensor, scale: float | None = None
) -> Tensor:
    """Return (query heads, q tokens, k tokens) fp64 scores, -inf where a query does not see a
    key.
    """
    scale = 1.0 / math.sqrt(q_thd.shape[2]) if scale is None else scale
    q_hqd = q_thd.double().transpose(0, 1)
    score_hqk = scale * (q_hqd @ _heads_first(k_thd, q_thd.shape[1]).transpose(1, 2))
    return score_hqk.masked_fill(~mask_qk, -math.inf)


def visible_mask(
    q_tokens: int,
    k_tokens: int,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    cu_seqlens_q: Sequence[int] | None = None,
    cu_seqlens_k: Sequence[int] | None = None,
) -> Tensor:
    """Return (q tokens, k tokens) bool: true where the query sees the key."""
    mask_qk = torch.ones(q_tokens, k_tokens, dtype=torch.bool)
    if q_positions is not None and k_positions is not None:
        mask_qk &= k_positions[None, :] <= q_positions[:, None]
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        mask_qk &= _owner(cu_seqlens_q)[:, None] == _owner(cu_seqlens_k)[None, :]
    return mask_qk


def _heads_first(x_thd: Tensor, heads: int) -> Tensor:
    return x_thd.double().transpose(0, 1).repeat_interleave(heads // x_thd.shape[1], dim=0)


def _owner(cu_seqlens: Sequence[int]) -> Tensor:
    lengths = [stop - start for start, stop in pairwise(list(cu_seqlens))]
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
