"""The shape of a causal mask between two ascending position lists, without the mask.

With both sides ascending, row i sees exactly the first visible[i] keys and visible never falls:
the mask is a staircase. Real layouts make long regular stairs - a whole prompt, a chunk after
its history, zigzag halves and striped shards all have rows that see one key more than the row
before, or the same keys - and those need no mask tensor at all.

Attention on CPU: torch's flash attention, which returns the LSE and takes GQA as it is.

Its only mask-free forms are "all keys" and "causal from the top left corner", and a mask costs
time and memory, so calls are cut along the staircase of the positions (`csps.kernels.cpu_attention`)
until each is one of those two. matmul-softmax-matmul reaches a third of its speed.

Attention of decode on CPU: one flash call a run, over slices of the cache.

The call alone takes 13 us, so that little else may surround it: with look-ups, checks and copies
for each request and layer, 64 short requests spent four times as long as they computed.

Column sums of attention probabilities on CPU: tiles of scores that stay in cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from csps.kernels.arguments import Offsets, Positions, SlotRuns, as_tensor, ascending, sequences
from csps.kernels.merge import merge_into, merge_rows, nothing_seen

MIN_REGULAR_ROWS = 64  # shorter regular stretches cost more as separate calls than in a mask
MASKED_ROWS = 128  # rows of one masked block: bounds the mask at 128 x keys


class Stair(Enum):
    FLAT = "every row sees the same keys"
    DIAGONAL = "every row sees one key more than the row before"
    MASKED = "anything else"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBlock:
    """Rows [start, stop): the first sees `first` keys, the last `last`, none fewer than one."""

    stair: Stair
    start: int
    stop: int
    first: int
    last: int


def visible_keys(q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """(q tokens,) int64: how many of the ascending keys each ascending query sees."""
    return torch.searchsorted(k_positions, q_positions, right=True)


def blocks(visible: Tensor) -> Iterator[RowBlock]:
    """Cut the rows that see anything into blocks, in row order."""
    cursor = int((visible == 0).sum())  # ascending, so the blind rows come first
    if cursor == len(visible):
        return
    for stair, start, stop in _regular_runs(visible, cursor):
        yield from _masked(visible, cursor, start)
        yield _row_block(stair, start, stop, visible)
        cursor = stop
    yield from _masked(visible, cursor, len(visible))


def _regular_runs(visible: Tensor, cursor: int) -> Iterator[tuple[Stair, int, int]]:
    """Stretches of at least MIN_REGULAR_ROWS rows (or all rows) with step 0 or 1."""
    rows = len(visible)
    if rows - cursor == 1:
        yield Stair.FLAT, cursor, rows
        return
    steps, lengths = torch.unique_consecutive(visible[cursor:].diff(), return_counts=True)
    least = min(MIN_REGULAR_ROWS, rows - cursor)
    stop = cursor + 1  # a run of n steps joins n + 1 rows; the next run begins on its last row
    for step, length in zip(steps.tolist(), lengths.tolist(), strict=True):
        start, stop = max(cursor, stop - 1), stop + length
        if step <= 1 and stop - start >= least:
            yield (Stair.DIAGONAL if step else Stair.FLAT), start, stop
            cursor = stop


def _masked(visible: Tensor, start: int, stop: int) -> Iterator[RowBlock]:
    for row in range(start, stop, MASKED_ROWS):
        yield _row_block(Stair.MASKED, row, min(row + MASKED_ROWS, stop), visible)


def _row_block(stair: Stair, start: int, stop: int, visible: Tensor) -> RowBlock:
    first, last = int(visible[start]), int(visible[stop - 1])
    return RowBlock(stair=stair, start=start, stop=stop, first=first, last=last)


FOLD_ROWS = 16  # up to here a kv head's query heads go as rows: 2.5x faster for one fp32 row


def attention(
    q_thd: Tensor,
    k_thd: Tensor,
    v_thd: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    scale: float,
    cu_seqlens_q: Offsets | None,
    cu_seqlens_k: Offsets | None,
) -> tuple[Tensor, Tensor]:
    """See `csps.kernels.attention.attention`."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return _one_sequence(q_thd, k_thd, v_thd, q_positions, k_positions, scale)
    out_thd, lse_ht = nothing_seen(q_thd)
    q_slices, k_slices = sequences(cu_seqlens_q, len(q_thd)), sequences(cu_seqlens_k, len(k_thd))
    for q, k in zip(q_slices, k_slices, strict=True):
        qp = None if q_positions is None else q_positions[q]
        kp = None if k_positions is None else k_positions[k]
        out_thd[q], lse_ht[:, q] = _one_sequence(q_thd[q], k_thd[k], v_thd[k], qp, kp, scale)
    return out_thd, lse_ht


def _one_sequence(
    q_thd: Tensor,
    k_thd: Tensor,
    v_thd: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    if len(q_thd) == 0 or len(k_thd) == 0:
        return nothing_seen(q_thd)
    if q_positions is None or k_positions is None:
        return _dense(q_thd, k_thd, v_thd, scale)
    if isinstance(q_positions, range) and isinstance(k_positions, range):
        # Chunks of a prompt come so, and short ones often: nothing is inspected.
        corner = q_positions.start - k_positions.start
        if q_positions.step == k_positions.step == 1 and 0 <= corner <= len(k_thd) - len(q_thd):
            return _diagonal(q_thd, k_thd, v_thd, corner, scale)
    q_positions = as_tensor(q_positions, q_thd.device)
    k_positions = as_tensor(k_positions, q_thd.device)
    if q_positions.min() >= k_positions.max():
        return _dense(q_thd, k_thd, v_thd, scale)
    if not ascending(k_positions):
        k_positions, order = k_positions.sort()
        k_thd, v_thd = k_thd[order], v_thd[order]
    if ascending(q_positions):
        return _staircase(q_thd, k_thd, v_thd, visible_keys(q_positions, k_positions), scale)
    q_positions, order = q_positions.sort()
    visible = visible_keys(q_positions, k_positions)
    out_thd, lse_ht = _staircase(q_thd[order], k_thd, v_thd, visible, scale)
    back = order.argsort()
    return out_thd[back], lse_ht[:, back]


def _staircase(
    q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    out_thd, lse_ht = nothing_seen(q_thd)
    for block in blocks(visible):
        rows = slice(block.start, block.stop)
        out, lse = _block(q_thd[rows], k_thd, v_thd, block, visible[rows], scale)
        if len(out) == len(q_thd):
            return out, lse  # one block is the common case, and saves the copy
        out_thd[rows], lse_ht[:, rows] = out, lse
    return out_thd, lse_ht


def _block(
    q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, block: RowBlock, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    k_thd, v_thd = k_thd[: block.last], v_thd[: block.last]
    if block.stair is Stair.FLAT:
        return _dense(q_thd, k_thd, v_thd, scale)
    if block.stair is Stair.MASKED:
        hidden = torch.arange(block.last) >= visible[:, None]
        mask = torch.zeros(hidden.shape, dtype=q_thd.dtype).masked_fill_(hidden, -torch.inf)
        return _flash(q_thd, k_thd, v_thd, scale, mask=mask)
    return _diagonal(q_thd, k_thd, v_thd, block.first - 1, scale)


def _diagonal(
    q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, corner: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Row i sees keys up to `corner` + i: all before the corner, and those of a triangle."""
    stop = corner + len(q_thd)
    k_thd, v_thd = k_thd[:stop], v_thd[:stop]
    if len(q_thd) == 1:
        return _dense(q_thd, k_thd, v_thd, scale)
    out_thd, lse_ht = _flash(q_thd, k_thd[corner:], v_thd[corner:], scale, causal=True)
    if corner:
        merge_into(out_thd, lse_ht, *_dense(q_thd, k_thd[:corner], v_thd[:corner], scale))
    return out_thd, lse_ht


def _dense(q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every query sees every key. Few queries read each kv head once for all its query heads."""
    tokens, heads, dim = q_thd.shape
    kv_heads = k_thd.shape[1]
    group = heads // kv_heads
    if tokens > FOLD_ROWS or group == 1:
        return _flash(q_thd, k_thd, v_thd, scale)
    folded = q_thd.reshape(tokens, kv_heads, group, dim).transpose(1, 2)
    folded = folded.reshape(tokens * group, kv_heads, dim)
    out, lse = _flash(folded, k_thd, v_thd, scale)
    out_thd = out.view(tokens, group, kv_heads, dim).transpose(1, 2).reshape(q_thd.shape)
    lse_ht = lse.view(kv_heads, tokens, group).transpose(1, 2).reshape(heads, tokens)
    return out_thd, lse_ht


def _flash(
    q_thd: Tensor,
    k_thd: Tensor,
    v_thd: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    q, k, v = (_batch_of_one(x) for x in (q_thd, k_thd, v_thd))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    dtype = torch.promote_types(q_thd.dtype, torch.float32)
    return out[0].transpose(0, 1).to(dtype), lse[0].to(dtype)


def _batch_of_one(x_thd: Tensor) -> Tensor:
    """(1, heads, tokens, dim). The op reads any strides but silently assumes a dense last dim."""
    x_thd = x_thd if x_thd.stride(-1) == 1 else x_thd.contiguous()
    return x_thd.transpose(0, 1)[None]


def decode_attention(
    q_rhd: Tensor, k_shd: Tensor, v_shd: Tensor, runs: SlotRuns, scale: float
) -> tuple[Tensor, Tensor]:
    """See `csps.kernels.attention.decode_attention`."""
    rows, heads, dim = q_rhd.shape
    kv_heads = k_shd.shape[1]
    # The query heads of a kv head are the rows of a call: each key is read once for all of them.
    queries = q_rhd.contiguous().view(rows, 1, kv_heads, heads // kv_heads, dim).unbind()
    k_hsd, v_hsd = (_dense_rows(x_shd).transpose(0, 1)[None] for x_shd in (k_shd, v_shd))
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


def _dense_rows(x_shd: Tensor) -> Tensor:
    """The call reads any strides but silently assumes a dense last dimension."""
    return x_shd if x_shd.stride(-1) == 1 else x_shd.contiguous()


TILE_ROWS = 256  # (query, head) pairs of one kv head
TILE_KEYS = 512  # with the rows: 512 KiB of fp32 scores per kv head, which a core's cache holds


def column_sums(
    q_thd: Tensor,
    k_thd: Tensor,
    lse_ht: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    scale: float,
    cu_seqlens_q: Offsets | None,
    cu_seqlens_k: Offsets | None,
) -> Tensor:
    """See `csps.kernels.importance.column_sums`."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return _sums_of_sequence(q_thd, k_thd, lse_ht, q_positions, k_positions, scale)
    parts = []
    q_slices, k_slices = sequences(cu_seqlens_q, len(q_thd)), sequences(cu_seqlens_k, len(k_thd))
    for q, k in zip(q_slices, k_slices, strict=True):
        qp = None if q_positions is None else q_positions[q]
        kp = None if k_positions is None else k_positions[k]
        parts.append(_sums_of_sequence(q_thd[q], k_thd[k], lse_ht[:, q], qp, kp, scale))
    return torch.cat(parts, dim=1)


def _sums_of_sequence(
    q_thd: Tensor,
    k_thd: Tensor,
    lse_ht: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    scale: float,
) -> Tensor:
    if q_positions is None or k_positions is None:
        visible = torch.full((len(q_thd),), len(k_thd))
        return _ascending(q_thd, k_thd, lse_ht, visible, scale)
    q_positions = as_tensor(q_positions, q_thd.device)
    k_positions = as_tensor(k_positions, q_thd.device)
    if not ascending(q_positions):
        q_positions, order = q_positions.sort()
        q_thd, lse_ht = q_thd[order], lse_ht[:, order]
    if ascending(k_positions):
        return _ascending(q_thd, k_thd, lse_ht, visible_keys(q_positions, k_positions), scale)
    k_positions, order = k_positions.sort()
    visible = visible_keys(q_positions, k_positions)
    sums_gt = _ascending(q_thd, k_thd[order], lse_ht, visible, scale)
    return sums_gt[:, order.argsort()]


def _ascending(
    q_thd: Tensor, k_thd: Tensor, lse_ht: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """Row i sees the first visible[i] keys; see `csps.kernels.cpu_attention`."""
    tokens, heads, dim = q_thd.shape
    kv_heads = k_thd.shape[1]
    group = heads // kv_heads
    dtype = torch.promote_types(q_thd.dtype, torch.float32)
    sums_gt = torch.zeros(kv_heads, len(k_thd), dtype=dtype)
    k_gdt = k_thd.to(dtype).permute(1, 2, 0)
    # exp(score - inf) is 0: a row that saw nothing adds nothing, whatever is multiplied.
    lse_ht = lse_ht.masked_fill(lse_ht == -torch.inf, torch.inf)
    step = max(1, TILE_ROWS // group)
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        q_grd = q_thd[rows].to(dtype).view(-1, kv_heads, group, dim).permute(1, 2, 0, 3)
        lse_gr1 = lse_ht[:, rows].reshape(kv_heads, -1, 1)
        seen = visible[rows].repeat(group)
        q_grd = q_grd.reshape(kv_heads, -1, dim) * scale
        _add_rows(sums_gt, q_grd, k_gdt, lse_gr1, seen)
    return sums_gt


def _add_rows(sums_gt: Tensor, q_grd: Tensor, k_gdt: Tensor, lse_gr1: Tensor, seen: Tensor) -> None:
    least, most = (int(x) for x in seen.aminmax())
    for start in range(0, most, TILE_KEYS):
        stop = min(start + TILE_KEYS, most)
        score_grt = torch.baddbmm(lse_gr1, q_grd, k_gdt[:, :, start:stop], beta=-1)
        if stop > least:
            score_grt.masked_fill_(torch.arange(start, stop) >= seen[:, None], -torch.inf)
        sums_gt[:, start:stop] += score_grt.exp_().sum(dim=1)
