"""Drawing one token for each row of a batch: temperature, top-k, top-p, min-p, and a number.

Whatever its filters are, a row costs a few passes over the vocabulary and one sort of its values:
nothing here walks rows one by one or waits for the device once per row. A row's token depends on
that row alone, to the last bit, not on what else is in the batch.

Shape suffixes: b rows; v vocabulary; c candidates, the tokens of one row that are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NARROW = 64
"""Candidates of a row whose top-k is smaller. A fixed width and not the batch's largest top-k:
sums would round differently beside other rows."""
CPU_BLOCK, DEVICE_BLOCK = 1 << 17, 1 << 24
"""Probabilities in fp64 at a time. On a CPU more do not fit into the cache: 64 rows of 151,936
cost 2.1 ms each at once and 0.5 one by one."""


class Filters(NamedTuple):
    """Which tokens of a row may be drawn."""

    temperature: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0


class Candidates(NamedTuple):
    """What the filters leave of some rows of a batch."""

    rows: Tensor
    """(b,) int64, which rows these are."""
    ids_bc: Tensor | None
    """Tokens, ascending in each row; None if column c is token c. In that order, and not by
    probability, rounding, which may swap two tokens of nearly the same one, does not change what a
    random number stands for."""
    probs_bc: Tensor
    """fp64, not normalised, 0 for what is filtered out. In fp32 the cumulative sum of a large
    vocabulary would lose the tokens of its tail, and the smallest temperatures would overflow."""


def sample(scores_bv: Tensor, filters: Sequence[Filters], uniforms: Sequence[float]) -> Tensor:
    """Draw a token for every row.

    Args:
        scores_bv: fp32; each row has a finite maximum and may hold -inf.
        filters: what each row asks for.
        uniforms: a random number of [0, 1) for each row, of at most 52 bits: then its product with
            a total is less than the total.

    Returns:
        (b,) int64: the first token, by id, whose cumulative probability exceeds the row's number;
        never one of probability 0.
    """
    u_b = torch.tensor(uniforms, dtype=torch.float64, device=scores_bv.device)
    tokens_b = torch.empty(len(scores_bv), dtype=torch.int64, device=scores_bv.device)
    for rows, ids_bc, probs_bc in candidates(scores_bv, filters):
        columns_b1 = inverse_cdf(probs_bc, u_b[rows, None])
        tokens_b[rows] = (columns_b1 if ids_bc is None else ids_bc.gather(1, columns_b1))[:, 0]
    return tokens_b


def inverse_cdf(probs_bc: Tensor, u_b1: Tensor) -> Tensor:
    """(b, 1) int64: the first columns whose cumulative share of the total exceeds u."""
    cdf_bc = probs_bc.cumsum(-1)
    return torch.searchsorted(cdf_bc, cdf_bc[:, -1:] * u_b1, right=True)


def candidates(scores_bv: Tensor, filters: Sequence[Filters]) -> Iterator[Candidates]:
    """Apply temperature, top-k, top-p and min-p; each row comes once, in any order."""
    vocab = scores_bv.shape[1]
    narrow = [row for row, it in enumerate(filters) if 0 < it.top_k < NARROW < vocab]
    wide = [row for row, it in enumerate(filters) if not 0 < it.top_k < NARROW < vocab]
    if narrow:
        top_k = [filters[row].top_k for row in narrow]
        scores_bc, ids_bc, cut = _highest(_rows(scores_bv, narrow), top_k)
        cut_rows = [row for row, is_cut in zip(narrow, cut, strict=True) if is_cut]
        wide = sorted(wide + cut_rows)  # `_rows` takes all rows for the batch as it stands
        whole = [place for place, is_cut in enumerate(cut) if not is_cut]
        if whole:
            kept = [narrow[place] for place in whole]
            probs_bc = _filtered(_rows(scores_bc, whole), [filters[row] for row in kept])
            yield Candidates(_index(kept, scores_bv), _rows(ids_bc, whole), probs_bc)
    for rows in row_blocks(wide, scores_bv):
        asked = [filters[row] for row in rows]
        scores_bc = _top_k(_rows(scores_bv, rows), [it.top_k for it in asked])
        yield Candidates(_index(rows, scores_bv), None, _filtered(scores_bc, asked))


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=like.device)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _rows(values_bx: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows; without a copy where they are all."""
    return values_bx if len(rows) == len(values_bx) else values_bx[_index(rows, values_bx)]


def row_blocks(rows: Sequence[int], values_bv: Tensor) -> Iterator[Sequence[int]]:
    """Rows in groups for which temporary values stay within the cache, or within bounds."""
    block = CPU_BLOCK if values_bv.device.type == "cpu" else DEVICE_BLOCK
    most = max(1, block // values_bv.shape[1])
    return (rows[start : start + most] for start in range(0, len(rows), most))


def _highest(scores_bv: Tensor, top_k: Sequence[int]) -> tuple[Tensor, Tensor, list[bool]]:
    """The `NARROW` highest scores by id, with -inf for those below the k-th.

    Returns:
        scores_bc, ids_bc, and for each row whether scores equal to the k-th may lie beyond.
    """
    values_bc, ids_bc = scores_bv.topk(NARROW)
    edge_b1 = values_bc.gather(1, _index(top_k, scores_bv)[:, None] - 1)
    cut: list[bool] = (values_bc[:, -1] >= edge_b1[:, 0]).tolist()
    ids_bc, order_bc = ids_bc.sort()
    values_bc = values_bc.gather(1, order_bc)
    return values_bc.masked_fill(values_bc < edge_b1, -torch.inf), ids_bc, cut


def _top_k(scores_bv: Tensor, top_k: Sequence[int]) -> Tensor:
    """The scores, with -inf for those below the row's k-th; equals of the k-th stay."""
    vocab = scores_bv.shape[1]
    if not any(0 < k < vocab for k in top_k):
        return scores_bv
    lasts = [k - 1 if 0 < k < vocab else vocab - 1 for k in top_k]
    edge_b1 = _descending(scores_bv).gather(1, _index(lasts, scores_bv)[:, None])
    return scores_bv.masked_fill(scores_bv < edge_b1, -torch.inf)


def _filtered(scores_bc: Tensor, filters: Sequence[Filters]) -> Tensor:
    """Probabilities after temperature, top-p and min-p, fp64, not normalised."""
    temperature_b1 = _column([it.temperature for it in filters], scores_bc)
    probs_bc = (scores_bc.double() / temperature_b1).softmax(-1)
    if any(it.top_p < 1.0 for it in filters):
        # Rounded sums may reach 1 before the last token: who does not filter has no limit.
        limits = [it.top_p if it.top_p < 1.0 else math.inf for it in filters]
        probs_bc = _top_p(probs_bc, _column(limits, scores_bc))
    if any(it.min_p > 0.0 for it in filters):
        least_b1 = _column([it.min_p for it in filters], scores_bc) * probs_bc.amax(-1, True)
        probs_bc = probs_bc.masked_fill(probs_bc < least_b1, 0.0)
    return probs_bc


def _top_p(probs_bc: Tensor, p_b1: Tensor) -> Tensor:
    """The fewest tokens whose probabilities add up to p, at least one; 0 for the others.

    Of equal tokens at the edge those with the lower id stay.
    """
    ordered_bc = _descending(probs_bc)
    count_b1 = 1 + (ordered_bc.cumsum(-1)[:, :-1] < p_b1).sum(-1, keepdim=True)
    edge_b1 = ordered_bc.gather(1, count_b1 - 1)
    stay_bc = probs_bc >= edge_b1
    # To ask whether there are any equals would cost more on a device than to look at all.
    on_cpu = stay_bc.device.type == "cpu"
    if not on_cpu or not torch.equal(stay_bc.sum(-1, keepdim=True), count_b1):
        equal_bc = probs_bc == edge_b1
        above_b1 = (probs_bc > edge_b1).sum(-1, keepdim=True)
        stay_bc &= ~equal_bc | (equal_bc.cumsum(-1) <= count_b1 - above_b1)
    return probs_bc.masked_fill(~stay_bc, 0.0)


def _descending(values_bc: Tensor) -> Tensor:
    """Each row's values, highest first. Values alone: 151,936 of them take numpy 1 ms on a core
    with AVX-512, and torch, which sorts indices along, 15."""
    if values_bc.device.type != "cpu":
        return values_bc.sort(descending=True).values
    ordered_bc = values_bc.clone(memory_format=torch.contiguous_format)
    ordered_bc.numpy().sort(axis=-1)  # in place
    return ordered_bc.flip(-1)
