# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Top-k tokens in ascending order in Triton, one program a head, without sorting.

Bisection over the bits of the values finds the k-th largest in 32 counts; one more pass writes
the indices above it, and of those equal to it the earliest. A sort would move every value about
as often, and need a second sort to bring the indices in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # tokens that a program looks at together


@triton.jit
def _load_ordered(values, start, tokens, BLOCK: tl.constexpr):
    """(BLOCK,) int64 keys in the order of the fp32 values; below all values past the end."""
    token = start + tl.arange(0, BLOCK)
    bits = tl.load(values + token, mask=token < tokens, other=0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(token < tokens, ordered, -(2**40))


@triton.jit(do_not_specialize=["tokens", "keep"], do_not_specialize_on_alignment=["values"])
def _top_tokens_kernel(values, kept, tokens, keep, BLOCK: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    values += head * tokens
    kept += head * keep
    # Invariant: at least `keep` keys are >= low, fewer are >= high.
    low = tl.full((), -(2**31), tl.int64)
    high = tl.full((), 2**31, tl.int64)
    for _ in range(32):
        middle = (low + high) >> 1
        count = tl.zeros((BLOCK,), dtype=tl.int32)
        for start in range(0, tokens, BLOCK):
            count += (_load_ordered(values, start, tokens, BLOCK) >= middle).to(tl.int32)
        enough = tl.sum(count, 0) >= keep
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    above = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, tokens, BLOCK):
        above += (_load_ordered(values, start, tokens, BLOCK) > low).to(tl.int32)
    ties = keep - tl.sum(above, 0)
    written = tl.zeros((), dtype=tl.int32)
    for start in range(0, tokens, BLOCK):
        key = _load_ordered(values, start, tokens, BLOCK)
        tie = (key == low).to(tl.int32)
        take = (key > low) | ((key == low) & (tl.cumsum(tie, 0) <= ties))
        ties -= tl.minimum(tl.sum(tie, 0), ties)
        place = written + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(kept + place, (start + tl.arange(0, BLOCK)).to(tl.int64), mask=take)
        written += tl.sum(take.to(tl.int32), 0)


def top_tokens(importance_gt: Tensor, keep: int) -> Tensor:
    """See `csps.kernels.selection.select`; (kv heads, keep) int64."""
    heads, tokens = importance_gt.shape
    kept_gk = torch.empty(heads, keep, dtype=torch.int64, device=importance_gt.device)
    if keep:
        values = importance_gt.float().contiguous()
        _top_tokens_kernel[(heads,)](values, kept_gk, tokens, keep, BLOCK=BLOCK, num_warps=8)
    return kept_gk
