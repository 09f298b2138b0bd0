"""Attention of decode on CPU: one flash call a run, over slices of the cache.

The call alone takes 13 us, so that little else may surround it: with look-ups, checks and copies
for each request and layer, 64 short requests spent four times as long as they computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from csps.kernels.decode_attention import SlotRuns
from csps.kernels.merge import merge_rows


def decode_attention(
    q_rhd: Tensor, k_shd: Tensor, v_shd: Tensor, runs: SlotRuns, scale: float
) -> tuple[Tensor, Tensor]:
    """See `csps.kernels.decode_attention.decode_attention`."""
    rows, heads, dim = q_rhd.shape
    kv_heads = k_shd.shape[1]
    # The query heads of a kv head are the rows of a call: each key is read once for all of them.
    queries = q_rhd.contiguous().view(rows, 1, kv_heads, heads // kv_heads, dim).unbind()
    k_hsd, v_hsd = (_dense(x_shd).transpose(0, 1)[None] for x_shd in (k_shd, v_shd))
    # `narrow` costs a third of an index with slices.
    keys, values = k_hsd.narrow, v_hsd.narrow
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    parts = [
        attend(
            queries[row], keys(2, begin, end - begin), values(2, begin, end - begin), scale=scale
        )
        for row, begin, end in runs.runs
    ]
    dtype = torch.promote_types(q_rhd.dtype, torch.float32)
    out_nhd = torch.cat([out for out, _ in parts]).reshape(-1, heads, dim).to(dtype)
    lse_nh = torch.cat([lse for _, lse in parts]).reshape(-1, heads).to(dtype)
    if runs.one_each:
        return out_nhd, lse_nh
    return merge_rows(out_nhd, lse_nh, runs.row_n, rows)


def _dense(x_shd: Tensor) -> Tensor:
    """The call reads any strides but silently assumes a dense last dimension."""
    return x_shd if x_shd.stride(-1) == 1 else x_shd.contiguous()
