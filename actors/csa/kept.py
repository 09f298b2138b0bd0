"""The kept tokens of one part, ordered so that every level's kept set is a prefix.

Tokens of the farthest level come first, then those that only nearer levels keep. The rectangles
of the levels do not care about the order of keys, and outputs go back to where the order is known:
so a farther level's data is a slice of a nearer one's, and no index ever travels.

Shape suffixes: g KV heads, k kept tokens, t tokens of the part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from csps.kernels.selection import select


def nested_order(
    importance_gt: Tensor, counts: Sequence[int], always: Sequence[range] = ()
) -> Tensor:
    """Kept tokens by level.

    Args:
        importance_gt: of each token for each KV head.
        counts: tokens that each level keeps, never ascending.
        always: tokens kept before all others; every count has room for them.

    Returns:
        order_gk: (g, counts[0]) int64; its first counts[v] columns are the tokens that level v
            keeps, ascending within each step.
    """
    importance_gt = _raised(importance_gt, always)
    kept_gk = select(importance_gt, counts[0])
    farther = sorted(set(counts[1:]) - {counts[0]}, reverse=True)
    if not farther:
        return kept_gk
    depth_gt = torch.zeros(importance_gt.shape, dtype=torch.int8, device=importance_gt.device)
    for count in farther:
        chosen_gk = select(importance_gt, count)
        depth_gt.scatter_add_(1, chosen_gk, torch.ones_like(chosen_gk, dtype=torch.int8))
    deepest_first = depth_gt.gather(1, kept_gk).argsort(dim=1, descending=True, stable=True)
    return kept_gk.gather(1, deepest_first)


def _raised(importance_gt: Tensor, always: Sequence[range]) -> Tensor:
    """Tokens that are always kept become the most important ones."""
    importance_gt = importance_gt.clone()
    for rows in always:
        importance_gt[:, rows.start : rows.stop] = torch.inf
    return importance_gt
