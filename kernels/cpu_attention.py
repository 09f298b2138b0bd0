"""Attention, decode attention and importance on CPU, without a mask where none is needed.

Attention runs compiled code where it was prepared and is faster (`cpu_decode`), otherwise torch's
flash kernel, which returns the LSE and supports GQA; matmul, softmax and matmul reach a third of
its speed. Without a mask tensor, which costs time and memory, the kernel knows two forms only: "all
keys" and "causal from the top left corner".

With both position lists ascending, row i sees exactly the first visible[i] keys, and visible never
falls: the causal mask is a staircase. `row_blocks` cuts it into blocks of one of the two forms.
Real layouts have long regular stairs: in a whole prompt, a chunk after its history, zigzag halves
and striped shards, a row sees the same keys as the row before or one key more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import torch
from torch import Tensor

from csps.kernels.arguments import (
    ChunkRuns,
    Offsets,
    Positions,
    SlotRuns,
    as_tensor,
    ascending,
    sequences,
)
from csps.kernels.cpu_decode import prepared
from csps.kernels.merge import merge_into, merge_rows, nothing_seen
from csps.kernels.quantized_kv import INT8, dequantized

MIN_REGULAR_ROWS = 64  # a shorter regular run costs more as a call of its own than in a mask
MASKED_ROWS = 128  # rows of one masked block, which bounds the mask at 128 x keys
WINDOW_ROWS = (
    64  # the same for a window of keys; fastest of 32 to 1,024 for windows of 128 to 4,096
)
FOLD_ROWS = 16  # up to here a KV head's query heads become rows: 2.5x faster for one fp32 row
DEQUANTIZED_KEYS = 4096  # bounds the memory of KV in 8 bits that torch's kernel is to read
TILE_ROWS = 256  # (query, head) pairs of one KV head
TILE_KEYS = 512  # with TILE_ROWS: 512 KiB of fp32 scores per KV head, which fit a core's cache


def attention(
    q_thd: Tensor,
    k_thd: Tensor,
    v_thd: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    scale: float,
    cu_seqlens_q: Offsets | None,
    cu_seqlens_k: Offsets | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Implement `csps.kernels.attention.attention`; takes any dtype."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return _attend_sequence(q_thd, k_thd, v_thd, q_positions, k_positions, scale, window)
    q_slices, k_slices = sequences(cu_seqlens_q, len(q_thd)), sequences(cu_seqlens_k, len(k_thd))
    if len(q_slices) == len(k_slices) == 1:  # this saves a copy
        return _attend_sequence(q_thd, k_thd, v_thd, q_positions, k_positions, scale, window)
    out_thd, lse_ht = nothing_seen(q_thd)
    for q, k in zip(q_slices, k_slices, strict=True):
        qp = None if q_positions is None else q_positions[q]
        kp = None if k_positions is None else k_positions[k]
        of_sequence = q_thd[q], k_thd[k], v_thd[k], qp, kp
        out_thd[q], lse_ht[:, q] = _attend_sequence(*of_sequence, scale, window)
    return out_thd, lse_ht


def _attend_sequence(
    q_thd: Tensor,
    k_thd: Tensor,
    v_thd: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    if len(q_thd) == 0 or len(k_thd) == 0:
        return nothing_seen(q_thd)
    if q_positions is None or k_positions is None:
        return _attend_dense(q_thd, k_thd, v_thd, scale)
    if window is not None:
        q_positions = as_tensor(q_positions, q_thd.device)
        k_positions = as_tensor(k_positions, q_thd.device)
        if int(q_positions.max()) - int(k_positions.min()) >= window:
            return _attend_window(q_thd, k_thd, v_thd, q_positions, k_positions, scale, window)
    if isinstance(q_positions, range) and isinstance(k_positions, range):
        # Chunks of a prompt come like this, and are often short: inspect no positions.
        corner = q_positions.start - k_positions.start
        if q_positions.step == k_positions.step == 1 and 0 <= corner <= len(k_thd) - len(q_thd):
            return _attend_diagonal(q_thd, k_thd, v_thd, corner, scale)
    q_positions = as_tensor(q_positions, q_thd.device)
    k_positions = as_tensor(k_positions, q_thd.device)
    if q_positions.min() >= k_positions.max():
        return _attend_dense(q_thd, k_thd, v_thd, scale)
    if not ascending(k_positions):
        k_positions, order = k_positions.sort()
        k_thd, v_thd = k_thd[order], v_thd[order]
    if ascending(q_positions):
        return _attend_staircase(q_thd, k_thd, v_thd, visible_keys(q_positions, k_positions), scale)
    q_positions, order = q_positions.sort()
    visible = visible_keys(q_positions, k_positions)
    out_thd, lse_ht = _attend_staircase(q_thd[order], k_thd, v_thd, visible, scale)
    back = order.argsort()
    return out_thd[back], lse_ht[:, back]


def _attend_window(
    q_thd: Tensor,
    k_thd: Tensor,
    v_thd: Tensor,
    q_positions: Tensor,
    k_positions: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Attend in blocks of rows, each to the keys that any of its rows sees."""
    if not ascending(k_positions):
        k_positions, order = k_positions.sort()
        k_thd, v_thd = k_thd[order], v_thd[order]
    if not ascending(q_positions):
        q_positions, order = q_positions.sort()
        of_order = q_thd[order], k_thd, v_thd, q_positions, k_positions
        out_thd, lse_ht = _attend_window(*of_order, scale, window)
        back = order.argsort()
        return out_thd[back], lse_ht[:, back]
    first = visible_keys(q_positions - window, k_positions)
    stop = visible_keys(q_positions, k_positions)
    out_thd, lse_ht = nothing_seen(q_thd)
    # Long blocks read keys less often; short ones have fewer masked scores.
    for start in range(0, len(q_thd), WINDOW_ROWS):
        rows = slice(start, min(start + WINDOW_ROWS, len(q_thd)))
        keys = slice(int(first[rows.start]), int(stop[rows.stop - 1]))
        if keys.start < keys.stop:
            seen = first[rows] - keys.start, stop[rows] - keys.start
            block = q_thd[rows], k_thd[keys], v_thd[keys]
            out_thd[rows], lse_ht[:, rows] = _attend_band(*block, *seen, scale)
    return out_thd, lse_ht


def _attend_band(
    q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, first: Tensor, stop: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend row i to the keys [first[i], stop[i]); both ascend."""
    if int(first[-1]) == 0 and int(stop[0]) == len(k_thd):
        return _attend_dense(q_thd, k_thd, v_thd, scale)
    column = torch.arange(len(k_thd))
    hidden = (column < first[:, None]) | (column >= stop[:, None])
    mask = torch.zeros(hidden.shape, dtype=q_thd.dtype).masked_fill_(hidden, -torch.inf)
    out_thd, lse_ht = _flash(q_thd, k_thd, v_thd, scale, mask=mask)
    blind = first >= stop
    if blind.any():
        out_thd[blind], lse_ht[:, blind] = 0.0, -torch.inf
    return out_thd, lse_ht


def _attend_staircase(
    q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    out_thd, lse_ht = nothing_seen(q_thd)
    for block in row_blocks(visible):
        rows = slice(block.start, block.stop)
        out, lse = _attend_block(q_thd[rows], k_thd, v_thd, block, visible[rows], scale)
        if len(out) == len(q_thd):
            return out, lse  # One block is the common case; this saves a copy.
        out_thd[rows], lse_ht[:, rows] = out, lse
    return out_thd, lse_ht


def _attend_block(
    q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, block: RowBlock, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    k_thd, v_thd = k_thd[: block.last], v_thd[: block.last]
    if block.stair is Stair.FLAT:
        return _attend_dense(q_thd, k_thd, v_thd, scale)
    if block.stair is Stair.MASKED:
        hidden = torch.arange(block.last) >= visible[:, None]
        mask = torch.zeros(hidden.shape, dtype=q_thd.dtype).masked_fill_(hidden, -torch.inf)
        return _flash(q_thd, k_thd, v_thd, scale, mask=mask)
    return _attend_diagonal(q_thd, k_thd, v_thd, block.first - 1, scale)


def _attend_diagonal(
    q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, corner: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend row i to the keys up to `corner` + i: all before the corner and a triangle."""
    stop = corner + len(q_thd)
    k_thd, v_thd = k_thd[:stop], v_thd[:stop]
    if len(q_thd) == 1:
        return _attend_dense(q_thd, k_thd, v_thd, scale)
    compiled = prepared(q_thd, k_thd, v_thd)
    if compiled is not None and len(q_thd) <= compiled.most_queries:
        return compiled.attend_staircase(q_thd, k_thd, v_thd, corner + 1, scale)
    out_thd, lse_ht = _flash(q_thd, k_thd[corner:], v_thd[corner:], scale, causal=True)
    if corner:
        merge_into(out_thd, lse_ht, *_attend_dense(q_thd, k_thd[:corner], v_thd[:corner], scale))
    return out_thd, lse_ht


def _attend_dense(
    q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend every query to every key."""
    compiled = prepared(q_thd, k_thd, v_thd)
    if compiled is not None and len(q_thd) <= compiled.most_queries:
        return compiled.attend_all(q_thd, k_thd, v_thd, scale)
    if k_thd.dtype == INT8:
        return _attend_quantized(q_thd, k_thd, v_thd, scale)
    tokens, heads, dim = q_thd.shape
    kv_heads = k_thd.shape[1]
    group = heads // kv_heads
    if tokens > FOLD_ROWS or group == 1:
        return _flash(q_thd, k_thd, v_thd, scale)
    # With few queries, each KV head is read once for all of its query heads.
    folded = q_thd.reshape(tokens, kv_heads, group, dim).transpose(1, 2)
    folded = folded.reshape(tokens * group, kv_heads, dim)
    out, lse = _flash(folded, k_thd, v_thd, scale)
    out_thd = out.view(tokens, group, kv_heads, dim).transpose(1, 2).reshape(q_thd.shape)
    lse_ht = lse.view(kv_heads, tokens, group).transpose(1, 2).reshape(heads, tokens)
    return out_thd, lse_ht


def _attend_quantized(
    q_thd: Tensor, k_thb: Tensor, v_thb: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend every query to every key, dequantized block by block."""
    out_thd, lse_ht = nothing_seen(q_thd)
    for start in range(0, len(k_thb), DEQUANTIZED_KEYS):
        keys = slice(start, start + DEQUANTIZED_KEYS)
        k_thd, v_thd = (dequantized(x_thb[keys], q_thd.dtype) for x_thb in (k_thb, v_thb))
        merge_into(out_thd, lse_ht, *_attend_dense(q_thd, k_thd, v_thd, scale))
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
    q, k, v = (_batch_of_one(tensor) for tensor in (q_thd, k_thd, v_thd))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    dtype = torch.promote_types(q_thd.dtype, torch.float32)
    return out[0].transpose(0, 1).to(dtype), lse[0].to(dtype)


def _batch_of_one(x_thd: Tensor) -> Tensor:
    """Return (1, heads, tokens, dim)."""
    return _with_dense_last_dim(x_thd).transpose(0, 1)[None]


def chunk_attention(
    q_nhd: Tensor, k_shd: Tensor, v_shd: Tensor, runs: ChunkRuns, scale: float
) -> tuple[Tensor, Tensor]:
    """Implement `csps.kernels.attention.chunk_attention` for any dtype."""
    if len(runs.runs) == runs.depth == 1:  # the common case; this saves a copy
        [[run]] = runs.runs
        return _attend_dense(q_nhd, k_shd[run.start : run.stop], v_shd[run.start : run.stop], scale)
    out_nhd, lse_hn = nothing_seen(q_nhd)
    for (start, stop), of_chunk in zip(pairwise(runs.offsets), runs.runs, strict=True):
        rows = slice(start, stop)
        for run in of_chunk:
            keys, values = k_shd[run.start : run.stop], v_shd[run.start : run.stop]
            part = _attend_dense(q_nhd[rows], keys, values, scale)
            if run is of_chunk[0]:
                out_nhd[rows], lse_hn[:, rows] = part
            else:
                merge_into(out_nhd[rows], lse_hn[:, rows], *part)
    return out_nhd, lse_hn


def decode_attention(
    q_rhd: Tensor, k_shd: Tensor, v_shd: Tensor, runs: SlotRuns, scale: float
) -> tuple[Tensor, Tensor]:
    """Implement `csps.kernels.attention.decode_attention` for any dtype."""
    compiled = prepared(q_rhd, k_shd, v_shd)
    if compiled is not None:
        return compiled.attend_runs(q_rhd, k_shd, v_shd, runs, scale)
    if k_shd.dtype == INT8:
        return decode_quantized(q_rhd, k_shd, v_shd, runs, scale)
    return decode_by_flash(q_rhd, k_shd, v_shd, runs, scale)


def decode_quantized(
    q_rhd: Tensor, k_shb: Tensor, v_shb: Tensor, runs: SlotRuns, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute decode attention over 8 bits, which torch's kernel cannot read."""
    parts = [
        _attend_quantized(q_rhd[row : row + 1], k_shb[begin:end], v_shb[begin:end], scale)
        for row, begin, end in runs.runs
    ]
    out_nhd = torch.cat([out_1hd for out_1hd, _ in parts])
    lse_nh = torch.cat([lse_h1.T for _, lse_h1 in parts])
    return merge_rows(out_nhd, lse_nh, runs.row_n, runs.rows)


def decode_by_flash(
    q_rhd: Tensor, k_shd: Tensor, v_shd: Tensor, runs: SlotRuns, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute decode attention with one call of torch's flash kernel for each run."""
    # The call itself takes 13 us, so little else may surround it: with look-ups, checks and copies
    # for each request and layer, 64 short requests took four times as long.
    rows, heads, dim = q_rhd.shape
    kv_heads = k_shd.shape[1]
    # The query heads of a KV head are the rows of a call, so each key is read once for all of them.
    queries = q_rhd.contiguous().view(rows, 1, kv_heads, heads // kv_heads, dim).unbind()
    k_hsd, v_hsd = (_batch_of_one(cache_shd) for cache_shd in (k_shd, v_shd))
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


def _with_dense_last_dim(x_thd: Tensor) -> Tensor:
    # The op accepts any strides but silently assumes a dense last dimension.
    return x_thd if x_thd.stride(-1) == 1 else x_thd.contiguous()


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
    """Implement `csps.kernels.importance.column_sums` in tiles of scores that stay in cache."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return _column_sums_of_sequence(q_thd, k_thd, lse_ht, q_positions, k_positions, scale)
    parts = []
    q_slices, k_slices = sequences(cu_seqlens_q, len(q_thd)), sequences(cu_seqlens_k, len(k_thd))
    for q, k in zip(q_slices, k_slices, strict=True):
        qp = None if q_positions is None else q_positions[q]
        kp = None if k_positions is None else k_positions[k]
        parts.append(_column_sums_of_sequence(q_thd[q], k_thd[k], lse_ht[:, q], qp, kp, scale))
    return torch.cat(parts, dim=1)


def _column_sums_of_sequence(
    q_thd: Tensor,
    k_thd: Tensor,
    lse_ht: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    scale: float,
) -> Tensor:
    if q_positions is None or k_positions is None:
        visible = torch.full((len(q_thd),), len(k_thd))
        return _column_sums_ascending(q_thd, k_thd, lse_ht, visible, scale)
    q_positions = as_tensor(q_positions, q_thd.device)
    k_positions = as_tensor(k_positions, q_thd.device)
    if not ascending(q_positions):
        q_positions, order = q_positions.sort()
        q_thd, lse_ht = q_thd[order], lse_ht[:, order]
    if ascending(k_positions):
        return _column_sums_ascending(
            q_thd, k_thd, lse_ht, visible_keys(q_positions, k_positions), scale
        )
    k_positions, order = k_positions.sort()
    visible = visible_keys(q_positions, k_positions)
    sums_gt = _column_sums_ascending(q_thd, k_thd[order], lse_ht, visible, scale)
    return sums_gt[:, order.argsort()]


def _column_sums_ascending(
    q_thd: Tensor, k_thd: Tensor, lse_ht: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """Sum the columns where row i sees the first visible[i] keys."""
    tokens, heads, dim = q_thd.shape
    kv_heads = k_thd.shape[1]
    group = heads // kv_heads
    dtype = torch.promote_types(q_thd.dtype, torch.float32)
    sums_gt = torch.zeros(kv_heads, len(k_thd), dtype=dtype)
    k_gdt = k_thd.to(dtype).permute(1, 2, 0)
    # exp(score - inf) is 0: a row that saw nothing adds nothing, whatever its scores are.
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
    least, most = (int(count) for count in seen.aminmax())
    for start in range(0, most, TILE_KEYS):
        stop = min(start + TILE_KEYS, most)
        score_grt = torch.baddbmm(lse_gr1, q_grd, k_gdt[:, :, start:stop], beta=-1)
        if stop > least:
            score_grt.masked_fill_(torch.arange(start, stop) >= seen[:, None], -torch.inf)
        sums_gt[:, start:stop] += score_grt.exp_().sum(dim=1)


class Stair(Enum):
    FLAT = "every row sees the same keys"
    DIAGONAL = "every row sees one key more than the row before"
    MASKED = "anything else"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBlock:
    """Rows [start, stop); the first sees `first` keys (at least one), the last sees `last`."""

    stair: Stair
    start: int
    stop: int
    first: int
    last: int


def visible_keys(q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Return how many of the ascending keys each ascending query sees, (q tokens,) int64."""
    return torch.searchsorted(k_positions, q_positions, right=True)


def row_blocks(visible: Tensor) -> Iterator[RowBlock]:
    """Cut the rows that see anything into blocks, in row order."""
    cursor = int((visible == 0).sum())  # `visible` ascends, so rows that see nothing come first
    if cursor == len(visible):
        return
    for stair, start, stop in _regular_runs(visible, cursor):
        yield from _masked_blocks(visible, cursor, start)
        yield _row_block(stair, start, stop, visible)
        cursor = stop
    yield from _masked_blocks(visible, cursor, len(visible))


def _regular_runs(visible: Tensor, cursor: int) -> Iterator[tuple[Stair, int, int]]:
    """Yield runs of at least MIN_REGULAR_ROWS rows (or of all rows) with step 0 or 1."""
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


def _masked_blocks(visible: Tensor, start: int, stop: int) -> Iterator[RowBlock]:
    for row in range(start, stop, MASKED_ROWS):
        yield _row_block(Stair.MASKED, row, min(row + MASKED_ROWS, stop), visible)


def _row_block(stair: Stair, start: int, stop: int, visible: Tensor) -> RowBlock:
    first, last = int(visible[start]), int(visible[stop - 1])
    return RowBlock(stair=stair, start=start, stop=stop, first=first, last=last)
