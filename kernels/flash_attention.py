"""The flash-attn library where it is installed, for the calls whose mask it can express.

It knows "all keys" and "causal from the bottom right corner" and reads no positions, so it is
asked only when the caller has said which of the two a call is: without positions, or by ranges
that end together. Looking at position tensors would make the host wait for the device.
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
    """One sequence: the library gives sequences without keys an lse of +inf."""
    half = q_thd.dtype in (torch.bfloat16, torch.float16)
    known = q_positions is None or _ends_together(q_positions, k_positions)
    return half and known and cu_seqlens_q is None and q_thd.shape[2] <= MAX_HEAD_DIM


def _ends_together(q_positions: Positions, k_positions: Positions | None) -> bool:
    """Consecutive on both sides up to the same last position, and no query before all keys."""
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
) -> tuple[Tensor, Tensor]:
    """See `csps.kernels.attention.attention`; only for calls that `applies` accepts."""
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
