"""Rotary position embedding (RoPE) at true positions.

Shape suffixes: t tokens, h heads, d head dim, r half of the rotated dims.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """How a model rotates its queries and keys, with any scaling of its frequencies worked out."""

    inverse_frequencies: tuple[float, ...]
    """Radians per position, one for each pair of rotated dims: the leading ones of each head. The
    rest pass unchanged."""

    amplitude: float = 1.0
    """Factor on cos and sin: YaRN's attention temperature."""

    interleaved: bool = False
    """Pairs are (0, 1), (2, 3), ... as in GLM; else (0, r), (1, r + 1), ... as in Llama."""


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """The rotation of each token of one forward pass, computed once and used by every layer."""

    cos_t1r: Tensor
    sin_t1r: Tensor
    interleaved: bool

    def __getitem__(self, tokens: slice) -> "Rotary":
        """The rotation of some of the tokens."""
        return Rotary(
            cos_t1r=self.cos_t1r[tokens],
            sin_t1r=self.sin_t1r[tokens],
            interleaved=self.interleaved,
        )


def rotary_at(spec: RopeSpec, positions_t: Tensor, dtype: torch.dtype) -> Rotary:
    """Cosines and sines for tokens at `positions_t` (t,), on its device, as `dtype`.

    Angles are fp32 whatever the dtype: bf16 cannot tell position 300 from 301.
    """
    frequencies_r = torch.tensor(spec.inverse_frequencies, device=positions_t.device)
    angles_t1r = (positions_t.float()[:, None] * frequencies_r)[:, None, :]
    return Rotary(
        cos_t1r=angles_t1r.cos().mul_(spec.amplitude).to(dtype),
        sin_t1r=angles_t1r.sin().mul_(spec.amplitude).to(dtype),
        interleaved=spec.interleaved,
    )


def rotate(x_thd: Tensor, rotary: Rotary, out_thd: Tensor) -> None:
    """Writes `x_thd`, rotated, to `out_thd` of the same shape; the two may not overlap.

    Out of place because x is a strided slice of the fused QKV product and has to be made
    contiguous anyway: the rotation then costs no pass of its own.
    """
    rotated = 2 * rotary.cos_t1r.shape[-1]
    x1_thr, x2_thr = _pairs(x_thd[..., :rotated], rotary.interleaved)
    out1_thr, out2_thr = _pairs(out_thd[..., :rotated], rotary.interleaved)
    torch.mul(x1_thr, rotary.cos_t1r, out=out1_thr).addcmul_(x2_thr, rotary.sin_t1r, value=-1)
    torch.mul(x2_thr, rotary.cos_t1r, out=out2_thr).addcmul_(x1_thr, rotary.sin_t1r)
    out_thd[..., rotated:].copy_(x_thd[..., rotated:])


def _pairs(x_thd: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second dim of each rotated pair."""
    if interleaved:
        return x_thd[..., 0::2], x_thd[..., 1::2]
    first, second = x_thd.chunk(2, dim=-1)
    return first, second
