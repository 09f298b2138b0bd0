"""Combine attention over disjoint sets of keys, exactly (CSPS Eq. 5, Context Parallelism Eq. 4).

Weights are exp(lse - max lse) over their own sum. Raw softmax denominators would be wrong, since
each part has its own maximum. exp(lse - total lse) would not sum to one: at |lse| = 1e4 an fp32
total is off by 5e-4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Weighted sum of partial outputs by their LSE, over any number of parts.

    Args:
        outs: each (tokens, heads, head dim), finite.
        lses: each (heads, tokens), natural log; -inf marks a part that saw nothing.

    Returns:
        out_thd, lse_ht: what one attention over the union of the keys would have given.

    Raises:
        ValueError: no parts, or unequal numbers of outputs and LSEs.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"merge takes as many outs as lses, not {len(outs)} and {len(lses)}")
    lse_pht = torch.stack(tuple(lses))
    max_ht = lse_pht.amax(dim=0)
    weight_pht = torch.exp(lse_pht - max_ht.masked_fill(max_ht == -torch.inf, 0.0))
    total_ht = weight_pht.sum(dim=0)  # at least 1, or 0 where no part saw anything
    weight_pth1 = (weight_pht / total_ht.clamp_min(1.0)).transpose(1, 2)[..., None]
    out_thd = outs[0] * weight_pth1[0]
    for out, weight in zip(outs[1:], weight_pth1[1:], strict=True):
        out_thd.addcmul_(out, weight)
    return out_thd, max_ht + total_ht.log()


def merge_into(out_thd: Tensor, lse_ht: Tensor, other_thd: Tensor, other_ht: Tensor) -> None:
    """Merge one more part into a running result, in place (progressive attention, CSPS §3.2.5).

    `out_thd` and `other_thd` are of one dtype; `out_thd` and `lse_ht` are overwritten.
    """
    # The sigmoid form of two weights; alone it is NaN where neither part saw anything.
    share_ht = torch.sigmoid(other_ht - lse_ht).masked_fill_(other_ht == -torch.inf, 0.0)
    out_thd.lerp_(other_thd, share_ht.transpose(0, 1)[..., None])
    torch.logaddexp(lse_ht, other_ht, out=lse_ht)


def nothing_seen(q_thd: Tensor) -> tuple[Tensor, Tensor]:
    """The identity of merging, as attention of these queries over no key: zeros and -inf."""
    tokens, heads, _ = q_thd.shape
    dtype = torch.promote_types(q_thd.dtype, torch.float32)
    lse_ht = torch.full((heads, tokens), -torch.inf, dtype=dtype, device=q_thd.device)
    return torch.zeros(q_thd.shape, dtype=dtype, device=q_thd.device), lse_ht
