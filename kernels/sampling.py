"""Sample one token for each row of a batch by temperature, top-k, top-p and min-p.

A row costs a few passes over the vocabulary. Only the `HEAD` highest values are sorted, and all of
them where a filter keeps more tokens than that. No loop runs over rows, and the host does not wait
for the device once per row. The token of a row depends on that row's logits alone, to the last bit,
and not on the rest of the batch.

Shape suffixes: b rows; v vocabulary; c candidates, the tokens of one row that may be sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NARROW = 64
"""Number of candidates of a row whose top-k is smaller."""
# A fixed width and not the batch's largest top-k, or sums would round differently by batch.
HEAD = 1024
"""Number of values of a row that are sorted at first: mostly all that top-k or top-p keeps."""
CPU_BLOCK, DEVICE_BLOCK = 1 << 17, 1 << 24
"""Most fp64 probabilities that one pass computes."""
# On a CPU more do not fit the cache: 64 rows of 151,936 cost 2.1 ms each together, 0.5 one by one.


class Filters(NamedTuple):
    """Sampling parameters of one row."""

    temperature: float = 1.0
    top_k: int = 0
    """Number of tokens, or 0 for all."""
    top_p: float = 1.0
    min_p: float = 0.0


class Candidates(NamedTuple):
    """Tokens of some rows of a batch that pass the filters."""

    rows: Tensor
    """Rows of the batch, (b,) int64."""
    ids_bc: Tensor | None
    """Token ids, ascending in each row; None if column c is token c."""
    # Not by probability: rounding may swap two tokens of nearly equal probability, and the same
    # random number would then select another token.
    probs_bc: Tensor
    """Probabilities, fp64, not normalized, 0 for tokens that the filters removed."""
    # In fp32 the cumulative sum of a large vocabulary would lose the tokens of its tail, and the
    # smallest temperatures would overflow.


def sample(scores_bv: Tensor, filters: Sequence[Filters], uniforms: Sequence[float]) -> Tensor:
    """Sample a token for every row.

    Args:
        scores_bv: fp32; each row has a finite maximum and may contain -inf.
        filters: parameters of each row.
        uniforms: a random number in [0, 1) for each row, of at most 52 bits, so that its product
            with a total is less than the total.

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
    """Return the first column whose cumulative probability exceeds u of the total, (b, 1) int64."""
    cdf_bc = probs_bc.cumsum(-1)
    return torch.searchsorted(cdf_bc, cdf_bc[:, -1:] * u_b1, right=True)


def candidates(scores_bv: Tensor, filters: Sequence[Filters]) -> Iterator[Candidates]:
    """Apply temperature, top-k, top-p and min-p; each row comes once, in any order."""
    vocab = scores_bv.shape[1]
    narrow = [row for row, asked in enumerate(filters) if 0 < asked.top_k < NARROW < vocab]
    wide = [row for row, asked in enumerate(filters) if not 0 < asked.top_k < NARROW < vocab]
    if narrow:
        top_k = [filters[row].top_k for row in narrow]
        scores_bc, ids_bc, cut = _highest(_rows(scores_bv, narrow), top_k)
        cut_rows = [row for row, is_cut in zip(narrow, cut, strict=True) if is_cut]
        wide = sorted(wide + cut_rows)  # `_rows` takes all rows for the batch as it stands
        whole = [index for index, is_cut in enumerate(cut) if not is_cut]
        if whole:
            uncut_rows = [narrow[index] for index in whole]
            probs_bc = _filter(_rows(scores_bc, whole), [filters[row] for row in uncut_rows])
            yield Candidates(_index(uncut_rows, scores_bv), _rows(ids_bc, whole), probs_bc)
    for rows in row_blocks(wide, scores_bv):
        row_filters = [filters[row] for row in rows]
        scores_bc = _top_k(_rows(scores_bv, rows), [row_filter.top_k for row_filter in row_filters])
        yield Candidates(_index(rows, scores_bv), None, _filter(scores_bc, row_filters))


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=like.device)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _rows(values_bx: Tensor, rows: Sequence[int]) -> Tensor:
    """Select rows, without a copy if they are all."""
    return values_bx if len(rows) == len(values_bx) else values_bx[_index(rows, values_bx)]


def row_blocks(rows: Sequence[int], values_bv: Tensor) -> Iterator[Sequence[int]]:
    """Split rows into groups whose temporary values fit the cache, or the device's bound."""
    block = CPU_BLOCK if values_bv.device.type == "cpu" else DEVICE_BLOCK
    most = max(1, block // values_bv.shape[1])
    return (rows[start : start + most] for start in range(0, len(rows), most))


def _highest(scores_bv: Tensor, top_k: Sequence[int]) -> tuple[Tensor, Tensor, list[bool]]:
    """Select the `NARROW` highest scores, in order of id, with -inf for those below the k-th.

    Returns:
        scores_bc, ids_bc, and for each row whether scores equal to the k-th may be missing.
    """
    values_bc, ids_bc = scores_bv.topk(NARROW)
    edge_b1 = values_bc.gather(1, _index(top_k, scores_bv)[:, None] - 1)
    cut: list[bool] = (values_bc[:, -1] >= edge_b1[:, 0]).tolist()
    ids_bc, order_bc = ids_bc.sort()
    values_bc = values_bc.gather(1, order_bc)
    return values_bc.masked_fill(values_bc < edge_b1, -torch.inf), ids_bc, cut


def _top_k(scores_bv: Tensor, top_k: Sequence[int]) -> Tensor:
    """Replace scores below the row's k-th by -inf; scores equal to the k-th remain."""
    vocab = scores_bv.shape[1]
    asked = [k if 0 < k < vocab else 0 for k in top_k]
    if not any(asked):
        return scores_bv
    ordered_bc = _descending(scores_bv, max(asked))
    edge_b1 = ordered_bc.gather(1, _index([max(k - 1, 0) for k in asked], scores_bv)[:, None])
    if 0 in asked:
        edge_b1 = edge_b1.masked_fill(_index(asked, scores_bv)[:, None] == 0, -torch.inf)
    return scores_bv.masked_fill(scores_bv < edge_b1, -torch.inf)


def _filter(scores_bc: Tensor, filters: Sequence[Filters]) -> Tensor:
    """Return probabilities after temperature, top-p and min-p, fp64, not normalized."""
    temperature_b1 = _column([asked.temperature for asked in filters], scores_bc)
    probs_bc = (scores_bc.double() / temperature_b1).softmax(-1)
    if any(asked.top_p < 1.0 for asked in filters):
        # Rounded sums may reach 1 before the last token, so a row without top-p has no limit.
        limits = [asked.top_p if asked.top_p < 1.0 else math.inf for asked in filters]
        probs_bc = _top_p(probs_bc, _column(limits, scores_bc))
    if any(asked.min_p > 0.0 for asked in filters):
        min_p_b1 = _column([asked.min_p for asked in filters], scores_bc)
        least_b1 = min_p_b1 * probs_bc.amax(-1, True)
        probs_bc = probs_bc.masked_fill(probs_bc < least_b1, 0.0)
    return probs_bc


def _top_p(probs_bc: Tensor, p_b1: Tensor) -> Tensor:
    """Select the fewest tokens whose probabilities add up to p, at least one; set others to 0.

    Of tokens of equal probability at the edge, those of lower id are selected.
    """
    vocab = probs_bc.shape[1]
    edge_b1, count_b1 = _edges(_descending(probs_bc, HEAD), p_b1)
    # Of rows without a limit all tokens are selected, and their order does not matter.
    longer = ((count_b1 > HEAD) & p_b1.isfinite())[:, 0].tolist() if vocab > HEAD else []
    if rows := [row for row, is_longer in enumerate(longer) if is_longer]:
        rows_r = _index(rows, probs_bc)
        every_rc = _descending(probs_bc[rows_r], vocab)
        edge_b1[rows_r], count_b1[rows_r] = _edges(every_rc, p_b1[rows_r])
    edge_b1 = edge_b1.masked_fill(p_b1.isinf(), 0.0)
    count_b1 = count_b1.masked_fill(p_b1.isinf(), vocab).clamp_max(vocab)
    selected_bc = probs_bc >= edge_b1
    # On a device, a test for ties (a wait) would cost more than handling ties always.
    on_cpu = selected_bc.device.type == "cpu"
    if not on_cpu or not torch.equal(selected_bc.sum(-1, keepdim=True), count_b1):
        equal_bc = probs_bc == edge_b1
        above_b1 = (probs_bc > edge_b1).sum(-1, keepdim=True)
        selected_bc &= ~equal_bc | (equal_bc.cumsum(-1) <= count_b1 - above_b1)
    return probs_bc.masked_fill(~selected_bc, 0.0)


def _edges(ordered_bc: Tensor, p_b1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least selected probability of each row, and how many tokens are selected; one more
    than there are columns if these do not add up to p."""
    count_b1 = 1 + (ordered_bc.cumsum(-1) < p_b1).sum(-1, keepdim=True)
    return ordered_bc.gather(1, (count_b1 - 1).clamp_max(ordered_bc.shape[1] - 1)), count_b1


def _descending(values_bc: Tensor, count: int) -> Tensor:
    """Return the highest values of each row, highest first: `HEAD` if so many suffice, or all."""
    width = values_bc.shape[1]
    most = HEAD if count <= HEAD < width else width
    # A width by itself and not the largest count, see `NARROW`.
    if values_bc.device.type != "cpu":
        return values_bc.topk(most).values if most < width else values_bc.sort(descending=True)[0]
    # numpy sorts 151,936 values in 1 ms on a core with AVX-512; torch also sorts indices: 15 ms.
    ordered_bc = values_bc.clone(memory_format=torch.contiguous_format)
    if most < width:
        ordered_bc.numpy().partition(width - most, axis=-1)  # in place
        ordered_bc = ordered_bc[:, width - most :].contiguous()
    ordered_bc.numpy().sort(axis=-1)
    return ordered_bc.flip(-1)
