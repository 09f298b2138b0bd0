"""Which tokens each kv head keeps at a level, and their rows (CSPS §3.2.3, token dropping).

Shape suffixes: t tokens, k kept tokens, h heads, g kv heads, d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor


def select(importance_gt: Tensor, keep: int, *, always_t: Tensor | None = None) -> Tensor:
    """The `keep` most important tokens of each head, in ascending order.

    Of equal importance the earlier token wins, so the choice is the same on every device and a
    smaller `keep` always chooses a subset: the nested kept sets of the levels.

    Args:
        importance_gt: (kv heads, tokens), one sequence-parallel token partition.
        keep: tokens to keep, from 0 to all.
        always_t: (tokens,) bool on the host: kept before all others (sinks, the prompt's tail).

    Returns:
        kept_gk: (kv heads, keep) int64.

    Raises:
        ValueError: `keep` is less than the tokens always kept, or more than there are.
    """
    _, tokens = importance_gt.shape
    least = 0 if always_t is None else int(always_t.sum())
    if not least <= keep <= tokens:
        raise ValueError(f"keep must be from {least} to {tokens} tokens, not {keep}")
    if always_t is not None:
        always_t = always_t.to(importance_gt.device, non_blocking=True)
        importance_gt = importance_gt.masked_fill(always_t, torch.inf)
    if importance_gt.is_cuda:
        from csps.kernels.triton_selection import top_tokens

        return top_tokens(importance_gt, keep)
    ranked = importance_gt.sort(dim=1, descending=True, stable=True).indices
    return ranked[:, :keep].sort(dim=1).values


def gather_kept(x_thd: Tensor, kept_gk: Tensor) -> Tensor:
    """Rows of the kept tokens, each head its own: what is sent and computed at a level.

    Args:
        x_thd: (tokens, heads, head dim): k or v, or q with a multiple of the kv heads.
        kept_gk: (kv heads, keep), from `select`.

    Returns:
        x_khd: (keep, heads, head dim), dense; `csps.kernels.merge.merge_into` is the way back.
    """
    tokens, heads, dim = x_thd.shape
    kv_heads, keep = kept_gk.shape
    row_kg = kept_gk.T * kv_heads + torch.arange(kv_heads, device=kept_gk.device)
    # Whole rows of one flat index: several times faster than torch.gather element by element.
    flat = x_thd.reshape(tokens * kv_heads, heads // kv_heads * dim)
    return flat.index_select(0, row_kg.flatten()).view(keep, heads, dim)
