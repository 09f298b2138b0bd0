"""Token dropping (CSPS §3.2.3): importance of keys, selection of tokens, and their rows.

The paper ranks tokens by the attention scores of the previous layer. The score of a key is a column
sum of the probability matrix. The LSE of the rows does not contain it, so queries and keys are
multiplied once more. For a window of the last queries, pass only those queries.

Shape suffixes: t tokens, k selected ("kept") tokens, h heads, g KV heads, d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from csps.kernels.arguments import (
    Offsets,
    Positions,
    as_tensor,
    check_tensors,
    check_tokens,
    softmax_scale,
)

BEYOND_POSITIONS = 2**32  # offset between the positions of one sequence and the next


def importance(
    q_thd: Tensor,
    k_thd: Tensor,
    lse_ht: Tensor,
    *,
    q_positions: Positions | None,
    k_positions: Positions | None,
    scale: float | None = None,
    cu_seqlens_q: Offsets | None = None,
    cu_seqlens_k: Offsets | None = None,
) -> Tensor:
    """Return the mean probability of each key, summed over the query heads of its KV head.

    Args:
        q_thd, k_thd, q_positions, k_positions, scale, cu_seqlens_q, cu_seqlens_k: as for
            `csps.kernels.attention.attention`.
        lse_ht: (query heads, q tokens) of the attention of these queries over all their keys,
            also those not given here.

    Returns:
        importance_gt: (kv heads, k tokens) fp32 (fp64 for fp64 inputs), at least 0; 0 for a key
            that no query sees.

    Raises:
        ValueError: shapes, dtypes or offsets do not match.
    """
    # The mean over the queries that see a key, not the sum: more queries see early keys than late.
    sums_gt = column_sums(
        q_thd, k_thd, lse_ht, q_positions=q_positions, k_positions=k_positions, scale=scale,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
    )  # fmt: skip
    seen_t = seeing_queries(
        q_thd, k_thd, q_positions=q_positions, k_positions=k_positions,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
    )  # fmt: skip
    return sums_gt / seen_t.clamp_min(1)


def column_sums(
    q_thd: Tensor,
    k_thd: Tensor,
    lse_ht: Tensor,
    *,
    q_positions: Positions | None,
    k_positions: Positions | None,
    scale: float | None = None,
    cu_seqlens_q: Offsets | None = None,
    cu_seqlens_k: Offsets | None = None,
) -> Tensor:
    """Return the numerator of `importance`; it adds up over disjoint queries (micro-partitions).

    Returns:
        sums_gt: (kv heads, k tokens); sum of exp(scale * q_i k_j - lse_i) over the queries i that
            see key j and the query heads of the KV head.

    Raises:
        ValueError: shapes, dtypes or offsets do not match.
    """
    check_tensors(q_thd, k_thd, k_thd)
    check_tokens(q_thd, k_thd, q_positions, k_positions, cu_seqlens_q, cu_seqlens_k)
    if lse_ht.shape != (q_thd.shape[1], q_thd.shape[0]):
        raise ValueError(
            f"lse of shape {tuple(lse_ht.shape)} does not match q of {tuple(q_thd.shape)}: "
            "it must be (query heads, q tokens)"
        )
    scale = softmax_scale(q_thd, scale)
    if q_thd.numel() == 0 or len(k_thd) == 0:
        dtype = torch.promote_types(q_thd.dtype, torch.float32)
        return torch.zeros(k_thd.shape[1], len(k_thd), dtype=dtype, device=k_thd.device)
    if q_thd.is_cuda:
        from csps.kernels.triton_importance import column_sums as compute
    else:
        from csps.kernels.cpu_attention import column_sums as compute
    return compute(
        q_thd, k_thd, lse_ht, q_positions, k_positions, scale, cu_seqlens_q, cu_seqlens_k
    )


def seeing_queries(
    q_thd: Tensor,
    k_thd: Tensor,
    *,
    q_positions: Positions | None,
    k_positions: Positions | None,
    cu_seqlens_q: Offsets | None = None,
    cu_seqlens_k: Offsets | None = None,
) -> Tensor:
    """Return the denominator of `importance`: how many queries see each key, (k tokens,) int64."""
    # One sort over all sequences: a loop over sequences would make the host wait for the device.
    device = q_thd.device
    q_end = torch.full((len(k_thd),), len(q_thd), device=device)
    q_key = torch.zeros(len(q_thd), dtype=torch.int64, device=device)
    k_key = torch.zeros(len(k_thd), dtype=torch.int64, device=device)
    if q_positions is not None and k_positions is not None:
        q_key, k_key = as_tensor(q_positions, device), as_tensor(k_positions, device)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        q_owner, k_owner = _owners(cu_seqlens_q, q_key), _owners(cu_seqlens_k, k_key)
        q_end = torch.as_tensor(cu_seqlens_q, device=device)[1:][k_owner]
        q_key, k_key = q_key + q_owner * BEYOND_POSITIONS, k_key + k_owner * BEYOND_POSITIONS
    return q_end - torch.searchsorted(q_key.sort().values, k_key)


def _owners(cu_seqlens: Offsets, tokens: Tensor) -> Tensor:
    """Return the sequence of each token, (tokens,)."""
    ends = torch.as_tensor(cu_seqlens, device=tokens.device)[1:].long()
    return torch.searchsorted(ends, torch.arange(len(tokens), device=tokens.device), right=True)


def select(importance_gt: Tensor, keep: int, *, always_t: Tensor | None = None) -> Tensor:
    """Select the `keep` most important tokens of each head, in ascending order.

    Of tokens of equal importance the earlier is selected. So every device selects the same tokens,
    and a smaller `keep` selects a subset, which makes the sets of the levels nested.

    Args:
        importance_gt: (kv heads, tokens), one sequence-parallel token partition.
        keep: tokens to select, from 0 to all.
        always_t: (tokens,) bool on the host: selected before all others (sinks, end of prompt).

    Returns:
        kept_gk: (kv heads, keep) int64.

    Raises:
        ValueError: `keep` is below the number of `always_t` tokens or above the number of tokens.
    """
    _, tokens = importance_gt.shape
    least = 0 if always_t is None else int(always_t.sum())
    if not least <= keep <= tokens:
        raise ValueError(f"keep must be from {least} to {tokens} tokens, not {keep}")
    if always_t is not None:
        always_t = always_t.to(importance_gt.device, non_blocking=True)
        importance_gt = importance_gt.masked_fill(always_t, torch.inf)
    if importance_gt.is_cuda:
        from csps.kernels.triton_importance import top_tokens

        return top_tokens(importance_gt, keep)
    ranked = importance_gt.sort(dim=1, descending=True, stable=True).indices
    return ranked[:, :keep].sort(dim=1).values


def covering_counts(
    importance_gt: Tensor, coverage_gv: Tensor, *, always_t: Tensor | None = None
) -> Tensor:
    """Return how many of the most important tokens each head must keep to cover shares of its mass.

    The mass of a set of tokens is the sum of their importance. Shares count only tokens that may
    be dropped, because a few others, such as the first tokens of a prompt, often have most of all.

    Args:
        importance_gt: (kv heads, tokens), one sequence-parallel token partition.
        coverage_gv: (kv heads, levels) shares in (0, 1]; 1 keeps all tokens.
        always_t: (tokens,) bool on the host: kept at any rate, and counted.

    Returns:
        counts_gv: (kv heads, levels) int64 on the device; `select` with such a count selects the
            fewest tokens that reach the share.
    """
    tokens = importance_gt.shape[1]
    always = 0 if always_t is None else int(always_t.sum())
    mass_gt, coverage_gv = importance_gt.double(), coverage_gv.to(importance_gt.device)
    if always_t is not None:
        mass_gt = mass_gt.masked_fill(always_t.to(mass_gt.device, non_blocking=True), 0.0)
    # fp64, because sums of long prompts lose the smallest shares of attention in fp32.
    covered_gt = mass_gt.sort(dim=1, descending=True).values.cumsum(dim=1)
    if not tokens:
        return coverage_gv.new_zeros(coverage_gv.shape, dtype=torch.int64)
    needed_gv = coverage_gv.double() * covered_gt[:, -1:]
    fewest_gv = torch.searchsorted(covered_gt, needed_gv) + (needed_gv > 0)
    return torch.where(coverage_gv < 1.0, (always + fewest_gv).clamp_max(tokens), tokens)


def gather_kept(x_thd: Tensor, kept_gk: Tensor) -> Tensor:
    """Gather the rows of the selected tokens, which differ by KV head, for one level.

    Args:
        x_thd: (tokens, heads, head dim): k or v, or q with a multiple of the kv heads.
        kept_gk: (kv heads, keep), from `select`.

    Returns:
        x_khd: (keep, heads, head dim), dense; `csps.kernels.merge.merge_into` is the way back.
    """
    tokens, heads, dim = x_thd.shape
    kv_heads, keep = kept_gk.shape
    row_kg = kept_gk.T * kv_heads + torch.arange(kv_heads, device=kept_gk.device)
    # One flat index of whole rows is several times faster than torch.gather of elements.
    flat = x_thd.reshape(tokens * kv_heads, heads // kv_heads * dim)
    return flat.index_select(0, row_kg.flatten()).view(keep, heads, dim)
