"""Refuse arguments that do not belong together, before a kernel reads past an end."""

from __future__ import annotations

from torch import Tensor

from csps.kernels.positions import Offsets, Positions


def check_tensors(q_thd: Tensor, k_thd: Tensor, v_thd: Tensor) -> None:
    """Three dimensions, k like v, heads that divide, one dtype."""
    if q_thd.ndim != 3 or k_thd.ndim != 3 or k_thd.shape != v_thd.shape:
        raise ValueError(
            "attention takes q (tokens, heads, dim) and equal k and v (tokens, kv heads, dim), "
            f"not {tuple(q_thd.shape)}, {tuple(k_thd.shape)}, {tuple(v_thd.shape)}"
        )
    if q_thd.shape[2] != k_thd.shape[2] or q_thd.shape[1] % max(k_thd.shape[1], 1):
        raise ValueError(
            f"{q_thd.shape[1]} query heads of {q_thd.shape[2]} do not divide into "
            f"{k_thd.shape[1]} kv heads of {k_thd.shape[2]}"
        )
    if not q_thd.dtype == k_thd.dtype == v_thd.dtype:
        raise ValueError(f"q, k, v differ in dtype: {q_thd.dtype}, {k_thd.dtype}, {v_thd.dtype}")


def check_tokens(
    q_thd: Tensor,
    k_thd: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    cu_seqlens_q: Offsets | None,
    cu_seqlens_k: Offsets | None,
) -> None:
    """A position for each token, and both sides given or neither."""
    if (q_positions is None) != (k_positions is None):
        raise ValueError("q_positions and k_positions come together")
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k come together")
    for name, x_thd, positions in (("queries", q_thd, q_positions), ("keys", k_thd, k_positions)):
        if positions is not None and len(positions) != len(x_thd):
            raise ValueError(f"{len(x_thd)} {name} with {len(positions)} positions")


def softmax_scale(q_thd: Tensor, scale: float | None) -> float:
    """The given factor or the usual one; kernels take the maximum before they scale."""
    if scale is None:
        return float(q_thd.shape[2] ** -0.5)
    if scale <= 0:
        raise ValueError(f"scale must be positive, not {scale}")
    return scale
