"""Attention with log-sum-exp over tokens that carry their true positions.

Shape suffixes: t tokens of all sequences of the batch, one after the other; h heads (of q, or
the fewer of k and v); d head dimension. `out_thd`, `lse_ht`.

Every strategy is this function called on pieces of the keys, and `csps.kernels.merge` over
the results (progressive attention: CSPS §3.2.5, Context Parallelism Alg. 2-4).
"""

from __future__ import annotations

from torch import Tensor

from csps.kernels.backends import attention_backend
from csps.kernels.checks import check_tensors, check_tokens, softmax_scale
from csps.kernels.merge import nothing_seen
from csps.kernels.positions import Offsets, Positions


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
