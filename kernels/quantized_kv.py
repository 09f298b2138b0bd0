"""KV in 8 bits: whole numbers from -127 to 127, and a scale for each token and KV head.

In memory a token's numbers of one head are followed by the four bytes of their scale. So slots,
transfers, moves and files see int8 tensors with a longer last dim, and pass them on as they are.

Keys and values are rounded where they are computed (`csps.models.network.network.Layer.qkv`), so
all rows see the same ones, whether these come from the step itself, from another rank or from a
pool: an answer depends neither on the chunks of its prompt nor on where its KV lies. For that,
numbers that were rounded once must never change again. A scale therefore has 17 significant bits:
its product with a number of 7 bits is exact in fp32, and yields the same scale and number again.
In bf16 and fp16, rounding the product changes it by less than half of the scale.

Shape suffixes: t tokens, h KV heads, d head dim, b bytes of a head's numbers and scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

INT8 = torch.int8
SCALE_BYTES = 4
_MOST = 127
_CUT_BITS = (1 << 7) - 1
"""Lowest bits of an fp32 number, which a scale lacks."""
_LEAST_SCALE = 2.0**-120
"""Scale of zeros."""


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Return how many numbers of a dtype a head of a token takes in memory."""
    return head_dim + SCALE_BYTES if dtype == INT8 else head_dim


def round_kv(x_thd: Tensor) -> None:
    """Round keys or values in place to what 8 bits hold; rounded ones stay as they are."""
    scale_th1 = _scales(x_thd)
    x_thd.copy_(_whole(x_thd, scale_th1).mul_(scale_th1))


def quantized(x_thd: Tensor) -> Tensor:
    """Return keys or values in 8 bits, (t, h, b)."""
    dim = x_thd.shape[-1]
    x_thb = x_thd.new_empty(*x_thd.shape[:-1], dim + SCALE_BYTES, dtype=INT8)
    if not len(x_thb):  # whose scales could not be viewed as bytes
        return x_thb
    scale_th1 = _scales(x_thd)
    x_thb[..., :dim] = _whole(x_thd, scale_th1)
    x_thb[..., dim:] = scale_th1.view(INT8)
    return x_thb


def dequantized(x_thb: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values in 8 bits as numbers of a dtype, (t, h, d)."""
    dim = x_thb.shape[-1] - SCALE_BYTES
    if not len(x_thb):
        return x_thb.new_empty(*x_thb.shape[:-1], dim, dtype=dtype)
    # A copy even of one head, which would be contiguous: fp32 begins at every fourth byte.
    scale_th4 = x_thb[..., dim:].clone(memory_format=torch.contiguous_format)
    scale_th1 = scale_th4.view(torch.float32)
    return (x_thb[..., :dim] * scale_th1).to(dtype)


def _scales(x_thd: Tensor) -> Tensor:
    """Return the scale of each token and head, with which its largest number comes to 127."""
    scale_th1 = x_thd.abs().amax(-1, keepdim=True).float().div_(_MOST)
    # Rounded up: no number may come to more.
    bits_th1 = (scale_th1.view(torch.int32) + _CUT_BITS).bitwise_and_(~_CUT_BITS)
    return bits_th1.view(torch.float32).clamp_min_(_LEAST_SCALE)


def _whole(x_thd: Tensor, scale_th1: Tensor) -> Tensor:
    """Return numbers over their scales as whole ones, in fp32."""
    return (x_thd / scale_th1).round_()
