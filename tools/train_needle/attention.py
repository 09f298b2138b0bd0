"""Attention of training, registered with transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

NAME = "train_needle"


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """In float32 within autocast: backward through torch's bfloat16 attention takes five times as
    long.

    Args:
        query: (B, heads, T, head dim); key and value have KV heads.
        attention_mask: (B, 1, T, T), added to the logits.
        scaling: of the logits.

    Returns:
        (B, T, heads, head dim), and no weights.
    """
    group = query.shape[1] // key.shape[1]
    with torch.autocast("cpu", enabled=False):
        out = F.scaled_dot_product_attention(
            query.float(),
            key.float().repeat_interleave(group, 1),
            value.float().repeat_interleave(group, 1),
            attn_mask=attention_mask,
            scale=scaling,
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
