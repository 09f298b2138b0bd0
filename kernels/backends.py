"""Which implementation serves a call: the tensors' device decides, nothing is configured."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Protocol

from torch import Tensor

from csps.kernels.positions import Offsets, Positions


class AttentionBackend(Protocol):
    """`csps.kernels.attention.attention` after its checks: scale given, no empty input."""

    def __call__(
        self,
        q_thd: Tensor,
        k_thd: Tensor,
        v_thd: Tensor,
        q_positions: Positions | None,
        k_positions: Positions | None,
        scale: float,
        cu_seqlens_q: Offsets | None,
        cu_seqlens_k: Offsets | None,
        /,
    ) -> tuple[Tensor, Tensor]: ...


def attention_backend(
    q_thd: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    cu_seqlens_q: Offsets | None,
) -> AttentionBackend:
    """Imported on use: a machine without a GPU needs no Triton, one with it no flash-attn."""
    if not q_thd.is_cuda:
        from csps.kernels import cpu_attention

        return cpu_attention.attention
    if flash_attn_installed():
        from csps.kernels import flash_attention

        if flash_attention.applies(q_thd, q_positions, k_positions, cu_seqlens_q):
            return flash_attention.attention
    from csps.kernels import triton_attention

    return triton_attention.attention


@cache
def flash_attn_installed() -> bool:
    return find_spec("flash_attn") is not None
