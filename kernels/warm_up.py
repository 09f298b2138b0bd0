"""Compile the Triton kernels before they are needed.

A variant takes seconds to compile. In the middle of serving, all peers of the rank would wait for
it in an exchange. So a rank launches each variant once before it is ready. Lengths do not tell
variants apart (`triton_blocks`); what does is the number of query heads of a KV head, whether
positions are compared, with a window or without, whether there are several sequences, whether a
call has few rows or many, and for merging the dtype of a part and whether its address is a multiple
of 16.

Shape suffixes as in `csps.kernels.attention`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from csps.kernels import triton_attention, triton_importance, triton_merge
from csps.kernels.arguments import ChunkRuns, SlotRuns

KEYS = 16


def launch_variants(
    device: torch.device,
    dtype: torch.dtype,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    groups: Iterable[int],
    window: int | None = None,
) -> None:
    """Launch every variant that calls of a rank can need, on a few tokens.

    Args:
        heads, kv_heads: of the rank; decode attends with all of them.
        groups: numbers of query heads of a KV head in other calls.
        window: positions that layers with a window see; None if there are no such layers.
    """
    for group in groups:
        for q_thd, k_thd in _few_and_many(device, dtype, group, head_dim):
            _attend(q_thd, k_thd, window)
    for q_thd, k_thd in _few_and_many(device, dtype, heads // kv_heads, head_dim):
        _attend_chunks(q_thd, k_thd, window)
    cache_shd = torch.zeros(KEYS, kv_heads, head_dim, dtype=dtype, device=device)
    q_rhd = torch.zeros(1, heads, head_dim, dtype=dtype, device=device)
    runs = SlotRuns(1, [(0, 0, KEYS)])
    triton_attention.decode_attention(q_rhd, cache_shd, cache_shd, runs, 1.0)
    _merge(device, dtype, head_dim)
    triton_importance.top_tokens(torch.zeros(1, KEYS, device=device), 1)


def _few_and_many(
    device: torch.device, dtype: torch.dtype, group: int, head_dim: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield queries, and keys of one KV head, for calls of few rows and of many."""
    for tokens in (1, triton_attention.SHORT_ROWS // group + 1):
        q_thd = torch.zeros(tokens, group, head_dim, dtype=dtype, device=device)
        yield q_thd, torch.zeros(tokens, 1, head_dim, dtype=dtype, device=device)


def _attend(q_thd: Tensor, k_thd: Tensor, window: int | None) -> None:
    """Attend and score, with positions and without, and with a window."""
    positions = torch.arange(len(q_thd), device=q_thd.device)
    for at in (positions, None):
        _, lse_ht = triton_attention.attention(q_thd, k_thd, k_thd, at, at, 1.0, None, None)
        triton_importance.column_sums(q_thd, k_thd, lse_ht, at, at, 1.0, None, None)
    if window is not None:
        at = positions
        triton_attention.attention(q_thd, k_thd, k_thd, at, at, 1.0, None, None, window)


def _attend_chunks(q_thd: Tensor, k_thd: Tensor, window: int | None) -> None:
    """Attend one chunk of a prompt to what is before it and to itself, and with a window."""
    tokens = len(q_thd)
    runs = ChunkRuns([tokens], [[range(tokens)]])
    triton_attention.chunk_attention(q_thd, k_thd, k_thd, runs, 1.0)
    at, cu = torch.arange(tokens, device=q_thd.device), runs.offsets_on(q_thd.device)
    for reach in {None, window}:
        triton_attention.attention(q_thd, k_thd, k_thd, at, at, 1.0, cu, cu, reach)


def _merge(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Merge one token's parts in every way."""
    out_thd, lse_ht = torch.zeros(1, 1, head_dim, device=device), torch.zeros(1, 1, device=device)
    triton_merge.merge_stacked(torch.stack([out_thd] * 2), torch.stack([lse_ht] * 2))
    row_n = torch.zeros(1, dtype=torch.int64, device=device)
    triton_merge.merge_rows(out_thd, lse_ht, row_n, 1)
    # Outputs come back from other ranks in the model's dtype, behind LSEs and so at any address.
    for part_dtype in {torch.float32, dtype}:
        for begin in (0, 1):
            part = torch.zeros(begin + head_dim, dtype=part_dtype, device=device)[begin:]
            for kept_gk in (None, row_n[None]):
                part_thd = part.view(1, 1, head_dim)
                triton_merge.merge_into(out_thd, lse_ht, part_thd, lse_ht, kept_gk)
