"""Attention with log-sum-exp, by true positions, for prefill and for decode.

`attention` is for prefill. Every strategy calls it on parts of the keys and merges the results with
`csps.kernels.merge` (progressive attention: CSPS §3.2.5, Context Parallelism Alg. 2-4).
`decode_attention` computes one row for each of many requests over a slotted KV cache, in one call,
and `chunk_attention` chunks of prompts over what is cached of them.
The device of the tensors selects the backend; there is no setting for it.

Shape suffixes: t tokens of all sequences of the batch, one after the other; r query rows; s slots
of the cache; h heads (of q, or the fewer of k and v); d head dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from csps.kernels.arguments import (
    ChunkRuns,
    Offsets,
    Positions,
    SlotRuns,
    check_cache,
    check_tensors,
    check_tokens,
    check_window,
    never_hides,
    softmax_scale,
)
from csps.kernels.merge import nothing_seen

_log = logging.getLogger(__name__)


class AttentionBackend(Protocol):
    """Signature of `attention` after its checks: the scale is given, no input is empty."""

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
        window: int | None,
        /,
    ) -> tuple[Tensor, Tensor]: ...


def attention_backend(
    q_thd: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    cu_seqlens_q: Offsets | None,
    window: int | None = None,
) -> AttentionBackend:
    """Return the backend for a call."""
    # Imported on use: a machine without a GPU needs no Triton, and flash-attn is optional.
    if not q_thd.is_cuda:
        from csps.kernels import cpu_attention

        return cpu_attention.attention
    if window is None and flash_attn_installed():
        from csps.kernels import flash_attention

        if flash_attention.applies(q_thd, q_positions, k_positions, cu_seqlens_q):
            return flash_attention.attention
    from csps.kernels import triton_attention

    return triton_attention.attention


@cache
def flash_attn_installed() -> bool:
    """Return True if the flash-attn library can be imported."""
    installed = find_spec("flash_attn") is not None
    _log.debug("flash-attn is %s", "installed" if installed else "not installed: using Triton")
    return installed


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
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend by position: query i sees key j iff k_positions[j] <= q_positions[i] (causal mask).

    Args:
        q_thd: (q tokens, query heads, head dim), fp64, fp32, bf16 or fp16.
        k_thd, v_thd: (k tokens, kv heads, head dim) of the same dtype; query heads are a
            multiple of kv heads, and head h reads kv head h // (query heads / kv heads).
        q_positions, k_positions: (tokens,) int64 in any order, fastest when ascending; or a range,
            if they are consecutive. Both None if every query sees every key of its sequence
            (decode, history); the backend then inspects no positions.
        scale: positive factor on q·k, by default head dim ** -0.5.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) offsets; a query sees only keys of its own
            sequence. Both None for one sequence.
        window: positions that a query sees, its own included: keys with k_positions[j] <=
            q_positions[i] - window are hidden as well. None for all; else positions must be given.

    Returns:
        out_thd: (q tokens, query heads, head dim) fp32 (fp64 for fp64 inputs).
        lse_ht: (query heads, q tokens), natural log, same dtype as out. A row that sees
            no key has out 0 and lse -inf, the identity of `merge`.

    Raises:
        ValueError: shapes, dtypes, offsets or the window do not match.
    """
    check_tensors(q_thd, k_thd, v_thd)
    check_tokens(q_thd, k_thd, q_positions, k_positions, cu_seqlens_q, cu_seqlens_k)
    check_window(window, q_positions)
    scale = softmax_scale(q_thd, scale)
    if q_thd.numel() == 0 or len(k_thd) == 0:
        return nothing_seen(q_thd)
    if window is not None and never_hides(window, q_positions, k_positions):
        window = None
    backend = attention_backend(q_thd, q_positions, k_positions, cu_seqlens_q, window)
    offsets = cu_seqlens_q, cu_seqlens_k
    return backend(q_thd, k_thd, v_thd, q_positions, k_positions, scale, *offsets, window)


def decode_attention(
    q_rhd: Tensor, k_shd: Tensor, v_shd: Tensor, runs: SlotRuns, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend each row to all keys in its slots, without a copy of the cache.

    Args:
        q_rhd: (rows, query heads, head dim), contiguous.
        k_shd, v_shd: (slots, kv heads, head dim) of the same dtype, or on a CPU in 8 bits
            (`quantized_kv`), one layer's cache; query heads are a multiple of kv heads, and head h
            reads kv head h // (query heads / kv heads).
        scale: positive factor on q·k, by default head dim ** -0.5.

    Returns:
        out_rhd: (rows, query heads, head dim) fp32 (fp64 for fp64 inputs).
        lse_rh: (rows, query heads), natural log. A row without slots has out 0 and lse -inf, the
            identity of merging.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    check_cache(q_rhd, k_shd, v_shd)
    if len(q_rhd) != runs.rows:
        raise ValueError(f"{len(q_rhd)} query rows need as many rows of slots, not {runs.rows}")
    scale = softmax_scale(q_rhd, scale)
    if not runs.tokens:
        dtype = torch.promote_types(q_rhd.dtype, torch.float32)
        out_rhd = torch.zeros(q_rhd.shape, dtype=dtype, device=q_rhd.device)
        return out_rhd, out_rhd.new_full(q_rhd.shape[:2], -torch.inf)
    # Imported on use, as in `attention_backend`.
    if q_rhd.is_cuda:
        from csps.kernels import triton_attention

        return triton_attention.decode_attention(q_rhd, k_shd, v_shd, runs, scale)
    from csps.kernels import cpu_attention

    return cpu_attention.decode_attention(q_rhd, k_shd, v_shd, runs, scale)


def chunk_attention(
    q_nhd: Tensor, k_shd: Tensor, v_shd: Tensor, runs: ChunkRuns, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend every row of each chunk to all keys in the chunk's slots, without a copy of the cache.

    On a GPU this is one launch, whatever chunks there are, and one more where keys are split.

    Args:
        q_nhd: (rows of all chunks, query heads, head dim).
        k_shd, v_shd: one layer's cache, as in `decode_attention`.
        scale: positive factor on q·k, by default head dim ** -0.5.

    Returns:
        out_nhd, lse_hn: as `attention`.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    check_cache(q_nhd, k_shd, v_shd)
    if len(q_nhd) != runs.rows:
        raise ValueError(f"chunks of {runs.rows} rows need as many query rows, not {len(q_nhd)}")
    scale = softmax_scale(q_nhd, scale)
    if not runs.rows or not runs.depth:
        return nothing_seen(q_nhd)
    # Imported on use, as in `attention_backend`.
    if q_nhd.is_cuda:
        from csps.kernels import triton_attention

        return triton_attention.chunk_attention(q_nhd, k_shd, v_shd, runs, scale)
    from csps.kernels import cpu_attention

    return cpu_attention.chunk_attention(q_nhd, k_shd, v_shd, runs, scale)


def prepare_attention(
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    dtypes: Collection[torch.dtype],
    device: torch.device,
) -> None:
    """Compile what attention of this shape over KV of these dtypes needs, so that no request waits
    for it."""
    if device.type == "cpu":
        from csps.kernels import cpu_decode

        for dtype in dtypes:
            cpu_decode.prepare(heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
