"""Which implementation serves a call: the tensors' device decides, nothing is configured.

Attention with log-sum-exp over tokens that carry their true positions.

Shape suffixes: t tokens of all sequences of the batch, one after the other; h heads (of q, or
the fewer of k and v); d head dimension. `out_thd`, `lse_ht`.

Every strategy is this function called on pieces of the keys, and `csps.kernels.merge` over
the results (progressive attention: CSPS §3.2.5, Context Parallelism Alg. 2-4).

Attention of decode: single rows of many requests over a paged KV cache, in one call.

Shape suffixes: r query rows; n runs of slots, or pieces of runs; s slots of the cache; h heads (of
q, or the fewer of k and v); d head dimension.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from csps.kernels.arguments import (
    Offsets,
    Positions,
    SlotRuns,
    check_tensors,
    check_tokens,
    softmax_scale,
)
from csps.kernels.merge import nothing_seen


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


def attention(
    q_thd: Tensor,
    k_thd: Tensor,
    v_thd: Tensor,
    *,
    q_positions: Positions | None,
    k_positions: Positions | None,
    scale: float | None = None,
    cu_seqlens_q: Offsets | None = None,
    cu_seqlens_k: Offsets | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend causally by position: query i sees key j iff k_positions[j] <= q_positions[i].

    Args:
        q_thd: (q tokens, query heads, head dim), fp64, fp32, bf16 or fp16.
        k_thd, v_thd: (k tokens, kv heads, head dim) of the same dtype; query heads are a
            multiple of kv heads, and head h reads kv head h // (query heads / kv heads).
        q_positions, k_positions: (tokens,) int64 in any order, fastest when ascending; or a range,
            which tells the back end that they are consecutive. Both None when every query sees
            every key of its sequence (decode, history): nothing is then inspected.
        scale: positive factor on q·k, by default head dim ** -0.5.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) offsets; a query sees only keys of its own
            sequence. Both None for one sequence.

    Returns:
        out_thd: (q tokens, query heads, head dim) fp32 (fp64 for fp64 inputs).
        lse_ht: (query heads, q tokens), natural log, same dtype as out. A row that sees
            nothing has out 0 and lse -inf, the identity of `merge`.

    Raises:
        ValueError: shapes, dtypes or offsets that do not belong together.
    """
    check_tensors(q_thd, k_thd, v_thd)
    check_tokens(q_thd, k_thd, q_positions, k_positions, cu_seqlens_q, cu_seqlens_k)
    scale = softmax_scale(q_thd, scale)
    if q_thd.numel() == 0 or len(k_thd) == 0:
        return nothing_seen(q_thd)
    backend = attention_backend(q_thd, q_positions, k_positions, cu_seqlens_q)
    return backend(q_thd, k_thd, v_thd, q_positions, k_positions, scale, cu_seqlens_q, cu_seqlens_k)


def decode_attention(
    q_rhd: Tensor, k_shd: Tensor, v_shd: Tensor, runs: SlotRuns, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend each row to all keys in its slots; nothing of the cache is copied.

    Args:
        q_rhd: (rows, query heads, head dim), contiguous.
        k_shd, v_shd: (slots, kv heads, head dim) of the same dtype, one layer's cache; query heads
            are a multiple of kv heads, and head h reads kv head h // (query heads / kv heads).
        scale: positive factor on q·k, by default head dim ** -0.5.

    Returns:
        out_rhd: (rows, query heads, head dim) fp32 (fp64 for fp64 inputs).
        lse_rh: (rows, query heads), natural log. A row without slots has out 0 and lse -inf, the
            identity of merging.

    Raises:
        ValueError: shapes or dtypes that do not belong together.
    """
    check_tensors(q_rhd, k_shd, v_shd)
    if len(q_rhd) != runs.rows:
        raise ValueError(f"{len(q_rhd)} query rows, and slots of {runs.rows}")
    scale = softmax_scale(q_rhd, scale)
    if not runs.tokens:
        dtype = torch.promote_types(q_rhd.dtype, torch.float32)
        out_rhd = torch.zeros(q_rhd.shape, dtype=dtype, device=q_rhd.device)
        return out_rhd, out_rhd.new_full(q_rhd.shape[:2], -torch.inf)
    # Imported on use, as in `backends`.
    if q_rhd.is_cuda:
        from csps.kernels import triton_attention as triton_decode

        return triton_decode.decode_attention(q_rhd, k_shd, v_shd, runs, scale)
    from csps.kernels import cpu_attention as cpu_decode

    return cpu_decode.decode_attention(q_rhd, k_shd, v_shd, runs, scale)
