"""Attention by the flash-attn library, if it is installed and can express the mask.

The library reads no positions and knows two masks: "all keys" and "causal from the bottom right
corner". It serves calls without positions (the first mask) and calls with ranges that end at the
same position (the second). Inspecting position tensors would make the host wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from csps.kernels.arguments import Offsets, Positions

MAX_HEAD_DIM = 256


def applies(
    q_thd: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    cu_seqlens_q: Offsets | None,
) -> bool:
    """Return True if the library can compute this call."""
    # One sequence only: the library returns an LSE of +inf for a sequence without keys.
    half = q_thd.dtype in (torch.bfloat16, torch.float16)
    known = q_positions is None or _ends_together(q_positions, k_positions)
    return half and known and cu_seqlens_q is None and q_thd.shape[2] <= MAX_HEAD_DIM


def _ends_together(q_positions: Positions, k_positions: Positions | None) -> bool:
    """Return True if both are consecutive, end together, and no query precedes all keys."""
    if not (isinstance(q_positions, range) and isinstance(k_positions, range)):
        return False
    return q_positions == k_positions[-len(q_positions) :] and q_positions.step == 1


def attention(
    q_thd: Tensor,
    k_thd: Tensor,
    v_thd: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    scale: float,
    cu_seqlens_q: Offsets | None,
    cu_seqlens_k: Offsets | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Implement `csps.kernels.attention.attention` for calls that `applies` accepts."""
    from flash_attn import flash_attn_func

    out_bthd, lse_bht, _ = flash_attn_func(
        q_thd[None],
        k_thd[None],
        v_thd[None],
        softmax_scale=scale,
        causal=q_positions is not None,
        return_attn_probs=True,
    )
    return out_bthd[0].float(), lse_bht[0]
