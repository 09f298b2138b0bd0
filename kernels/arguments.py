"""Arguments of the kernels: slot runs, positions and offsets, and the checks of a call.

The checks run before a kernel could read past the end of a tensor.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from csps.kernels.quantized_kv import INT8, row_width

SlotRun = tuple[int, int, int]
"""(query row, first slot, end) of adjacent slots."""


_UNEVEN = 8
"""A thread may have 1/8 more or less than its share of tokens, if no row is cut for that."""
PART_FIELDS = 6
"""Integers of a part: first query row, first output row, rows, first run, end of its runs, and the
first slot that the first row does not see; each further row sees one more."""
EVERY_SLOT = 1 << 62
"""Slot beyond all, for rows that see whole runs."""


@dataclass(frozen=True, kw_only=True)
class RowParts:
    """Work of a CPU kernel: parts of query rows, each over some runs of slots.

    The kernel reads `parts` (PART_FIELDS integers each) and `runs` (first slot and end).
    """

    parts: ctypes.Array[ctypes.c_int64]
    runs: ctypes.Array[ctypes.c_int64]
    of_thread: list[range]
    """Parts of each thread."""
    rows: int
    """Output rows: one for each query row, then `further` ones."""
    most_rows: int = 1
    """Rows of a part, at most."""
    further: list[int]
    """Query row of each further output: a row that two threads compute has two."""

    @classmethod
    def of_one_run(cls, rows: int, slots: int, *, threads: int, most_rows: int) -> RowParts:
        """Return parts of at most so many rows, all of which see slots [0, slots)."""
        count = max(threads, -(-rows // most_rows))
        cuts = [rows * part // count for part in range(count + 1)]
        parts = [(start, start, stop - start, 0, 1, EVERY_SLOT) for start, stop in pairwise(cuts)]
        of_thread = [count * thread // threads for thread in range(threads + 1)]
        return cls(
            parts=_integers(parts),
            runs=_integers([(0, slots)]),
            of_thread=[range(start, stop) for start, stop in pairwise(of_thread)],
            rows=rows,
            most_rows=max(part[2] for part in parts),
            further=[],
        )

    @classmethod
    def of_staircase(cls, rows: int, first: int, *, threads: int, most_rows: int) -> RowParts:
        """Return parts of at most so many rows. The first row sees slots [0, first), and each
        further one sees one more."""
        # A thread's first rows see fewer slots than its last, so threads share slots, not rows.
        seen = [0, *accumulate(range(first, first + rows))]
        bounds = [bisect_left(seen, seen[-1] * thread // threads) for thread in range(threads + 1)]
        parts: list[tuple[int, ...]] = []
        of_thread = [0]
        for begin, end in pairwise(bounds):
            for start in range(begin, end, most_rows):
                stop = min(start + most_rows, end)
                parts.append(
                    (start, start, stop - start, len(parts), len(parts) + 1, first + start)
                )
            of_thread.append(len(parts))
        return cls(
            parts=_integers(parts),
            runs=_integers([(0, first + part[0] + part[2] - 1) for part in parts]),
            of_thread=[range(start, stop) for start, stop in pairwise(of_thread)],
            rows=rows,
            most_rows=max(part[2] for part in parts),
            further=[],
        )


def _integers(rows: Sequence[tuple[int, ...]]) -> ctypes.Array[ctypes.c_int64]:
    flat = [number for row in rows for number in row]
    return (ctypes.c_int64 * len(flat))(*flat)


class SlotRuns:
    """Slots of the keys that each query row sees.

    Args:
        rows: query rows.
        runs: ascending by row; a row without a run sees nothing.
    """

    # Runs, not a page table: most tokens of a request are adjacent, so a CPU kernel reads them
    # through slices without a copy.

    def __init__(self, rows: int, runs: Sequence[SlotRun]) -> None:
        self.rows = rows
        self.runs = [run for run in runs if run[1] < run[2]]
        self._splits: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}
        self._parts: dict[int, RowParts] = {}

    @cached_property
    def one_each(self) -> bool:
        """True if every row has exactly one run."""
        return len(self.runs) == self.rows == len({row for row, _, _ in self.runs})

    @cached_property
    def tokens(self) -> int:
        """Number of slots in all runs."""
        return sum(end - begin for _, begin, end in self.runs)

    @cached_property
    def row_n(self) -> Tensor:
        """Row of each run, (n,) int64 on the CPU."""
        return torch.tensor([row for row, _, _ in self.runs], dtype=torch.int64)

    def split(self, device: torch.device, longest: int) -> tuple[Tensor, Tensor]:
        """Split the runs into runs of at most `longest` slots, one for each GPU program.

        Returns:
            The shorter runs, (n, 3) int32, and the row of each, (n,) int64, both on the device.
        """
        # Cached, because all layers of an iteration use the same runs.
        if (device, longest) not in self._splits:
            runs_n3 = torch.tensor(self.runs, dtype=torch.int32).view(-1, 3)
            count_n = (runs_n3[:, 2] - runs_n3[:, 1] + longest - 1) // longest
            own_n3 = runs_n3.repeat_interleave(count_n, dim=0)
            first_n = (count_n.cumsum(0) - count_n).repeat_interleave(count_n)
            begin_n = own_n3[:, 1] + (torch.arange(len(own_n3)) - first_n) * longest
            end_n = torch.minimum(begin_n + longest, own_n3[:, 2])
            splits_n3 = torch.stack([own_n3[:, 0], begin_n, end_n], 1).int()
            splits_n3 = splits_n3.to(device, non_blocking=True)
            self._splits[device, longest] = splits_n3, splits_n3[:, 0].long()
        return self._splits[device, longest]

    def parts(self, threads: int) -> RowParts:
        """Return the rows as parts for some CPU threads, with about as many tokens each."""
        if threads not in self._parts:
            self._parts[threads] = self._cut(threads)
        return self._parts[threads]

    def _cut(self, threads: int) -> RowParts:
        bounds = self._bounds(threads) if threads > 1 else []
        runs: list[tuple[int, int]] = []
        parts: list[tuple[int, ...]] = []
        further: list[int] = []
        ends = [0] * threads  # of each thread's parts
        empty = set(range(self.rows))
        for (row, thread), pieces in groupby(self._pieces(bounds), key=lambda piece: piece[:2]):
            first, again = len(runs), row not in empty
            runs += [(begin, end) for _, _, begin, end in pieces]
            out_row = self.rows + len(further) if again else row
            parts.append((row, out_row, 1, first, len(runs), EVERY_SLOT))
            if again:
                further.append(row)
            empty.discard(row)
            ends[thread] = len(parts)
        parts += [(row, row, 1, 0, 0, EVERY_SLOT) for row in empty]
        ends[-1] = len(parts)
        return RowParts(
            parts=_integers(parts),
            runs=_integers(runs),
            of_thread=[range(start, max(start, stop)) for start, stop in pairwise([0, *ends])],
            rows=self.rows + len(further),
            further=further,
        )

    def _bounds(self, threads: int) -> list[int]:
        """Return how many tokens come before each thread but the first."""
        of_row = [0] * self.rows
        for row, begin, end in self.runs:
            of_row[row] += end - begin
        row_ends = list(accumulate(of_row))
        bounds = []
        for thread in range(1, threads):
            even = thread * self.tokens // threads
            distance, nearest = min((abs(end - even), end) for end in row_ends)
            near = distance * threads * _UNEVEN <= self.tokens
            bounds.append(nearest if near else even)
        return bounds

    def _pieces(self, bounds: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """Yield (row, thread, first slot, end) of the runs, cut at the bounds."""
        before = 0
        for row, begin, end in self.runs:
            while begin < end:
                thread = bisect_right(bounds, before)
                room = bounds[thread] - before if thread < len(bounds) else end - begin
                stop = min(end, begin + room)
                yield row, thread, begin, stop
                before += stop - begin
                begin = stop


class ChunkRuns:
    """Slots of the keys that chunks of query rows see: every row of a chunk sees all its runs.

    Args:
        lengths: query rows of each chunk; the chunks follow one another.
        runs: runs of slots of each chunk.
    """

    def __init__(self, lengths: Sequence[int], runs: Sequence[Sequence[range]]) -> None:
        self.offsets = [0, *accumulate(lengths)]
        """First query row of each chunk, and the end."""
        self.runs = [[run for run in of_chunk if run] for of_chunk in runs]
        self._on_device: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def rows(self) -> int:
        """Number of query rows."""
        return self.offsets[-1]

    @property
    def depth(self) -> int:
        """Most runs of a chunk."""
        return max(map(len, self.runs), default=0)

    def offsets_on(self, device: torch.device) -> Offsets:
        """Return `offsets`, on a GPU as a tensor that is copied once for all layers."""
        if device.type == "cpu":
            return self.offsets
        return self.layered(device)[0][: len(self.offsets)]

    def layered(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return the runs in layers, of which layer i has run i of each chunk, or an empty one.

        Returns:
            cu_seqlens of the query rows, repeated for each layer; first slots and ends of the runs;
            all int32 on the device.
        """
        # Cached, because all layers of an iteration use the same runs.
        if device not in self._on_device:
            none = range(0)
            layers = [
                [of_chunk[at] if at < len(of_chunk) else none for of_chunk in self.runs]
                for at in range(max(1, self.depth))
            ]
            runs = [run for layer in layers for run in layer]
            starts = [at * self.rows for at in range(len(layers))]
            cu_seqlens = [0, *(start + end for start in starts for end in self.offsets[1:])]
            begins, ends = [run.start for run in runs], [run.stop for run in runs]
            numbers = torch.tensor([*cu_seqlens, *begins, *ends], dtype=torch.int32)
            copied = numbers.to(device, non_blocking=True)
            first, end = len(cu_seqlens), len(cu_seqlens) + len(begins)
            self._on_device[device] = copied[:first], copied[first:end], copied[end:]
        return self._on_device[device]


Positions = Tensor | range
"""One int64 position per token, or a range, which a backend need not inspect."""

Offsets = Tensor | Sequence[int]
"""Offsets of sequences (cu_seqlens), (sequences + 1,), from 0 to the number of tokens."""


def as_tensor(positions: Positions, device: torch.device) -> Tensor:
    """Return the positions as (tokens,) int64 on the device."""
    if isinstance(positions, Tensor):
        return positions
    return torch.arange(positions.start, positions.stop, positions.step, device=device)


def ascending(positions: Tensor) -> bool:
    """Return True if the positions never fall; for CPU tensors only, as it waits for the device."""
    return bool((positions[1:] >= positions[:-1]).all())


def sequences(cu_seqlens: Offsets, tokens: int) -> list[slice]:
    """Return the token slice of each sequence.

    Raises:
        ValueError: the offsets do not run from 0 to `tokens`.
    """
    offsets = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    if offsets[0] != 0 or offsets[-1] != tokens:
        raise ValueError(f"cu_seqlens {list(offsets)} do not cover {tokens} tokens")
    return [slice(start, stop) for start, stop in pairwise(offsets)]


def check_tensors(q_thd: Tensor, k_thd: Tensor, v_thd: Tensor) -> None:
    """Check that q, k and v have three dimensions, matching heads and one dtype.

    Raises:
        ValueError: they do not.
    """
    _check_heads(q_thd, k_thd, v_thd, width=q_thd.shape[-1])
    if not q_thd.dtype == k_thd.dtype == v_thd.dtype:
        raise ValueError(
            f"q, k and v must have one dtype, not {q_thd.dtype}, {k_thd.dtype}, {v_thd.dtype}"
        )


def check_cache(q_thd: Tensor, k_shd: Tensor, v_shd: Tensor) -> None:
    """Check as `check_tensors` does, where k and v may also have 8 bits (`quantized_kv`).

    Raises:
        ValueError: they do not match, or 8 bits are on a GPU.
    """
    if k_shd.dtype != INT8:
        check_tensors(q_thd, k_shd, v_shd)
        return
    if q_thd.is_cuda:
        raise ValueError("KV in 8 bits is read by CPUs only")
    _check_heads(q_thd, k_shd, v_shd, width=row_width(q_thd.shape[-1], INT8))
    if v_shd.dtype != INT8:
        raise ValueError(
            f"attention takes q with k and v of one dtype, not {k_shd.dtype} and {v_shd.dtype}"
        )


def _check_heads(q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, *, width: int) -> None:
    """Check dimensions and heads; `width` is the last dimension that k and v need."""
    if q_thd.ndim != 3 or k_thd.ndim != 3 or k_thd.shape != v_thd.shape:
        raise ValueError(
            "attention takes q (tokens, heads, dim) and k and v (tokens, kv heads, dim) of one "
            f"shape, not {tuple(q_thd.shape)}, {tuple(k_thd.shape)}, {tuple(v_thd.shape)}"
        )
    if k_thd.shape[2] != width or q_thd.shape[1] % max(k_thd.shape[1], 1):
        raise ValueError(
            f"{q_thd.shape[1]} query heads of dim {q_thd.shape[2]} do not match "
            f"{k_thd.shape[1]} kv heads of dim {k_thd.shape[2]}: query heads must be a multiple "
            f"of kv heads, whose dim must be {width}"
        )


def check_tokens(
    q_thd: Tensor,
    k_thd: Tensor,
    q_positions: Positions | None,
    k_positions: Positions | None,
    cu_seqlens_q: Offsets | None,
    cu_seqlens_k: Offsets | None,
) -> None:
    """Check that each token has a position, and that both sides are given or neither.

    Raises:
        ValueError: they are not.
    """
    if (q_positions is None) != (k_positions is None):
        raise ValueError("q_positions and k_positions must be given together")
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k must be given together")
    for name, side_thd, positions in (
        ("queries", q_thd, q_positions),
        ("keys", k_thd, k_positions),
    ):
        if positions is not None and len(positions) != len(side_thd):
            raise ValueError(f"{len(side_thd)} {name} need as many positions, not {len(positions)}")


def check_window(window: int | None, q_positions: Positions | None) -> None:
    """Check that a window has positions to compare, and at least the query's own.

    Raises:
        ValueError: it does not.
    """
    if window is not None and (window < 1 or q_positions is None):
        raise ValueError(f"a window must be at least 1 and needs positions, not {window}")


def never_hides(window: int, q_positions: Positions | None, k_positions: Positions | None) -> bool:
    """Return True if ranges of positions show that no key is too far away for a window."""
    if not (isinstance(q_positions, range) and isinstance(k_positions, range)):
        return False
    return max(q_positions[0], q_positions[-1]) - min(k_positions[0], k_positions[-1]) < window


def softmax_scale(q_thd: Tensor, scale: float | None) -> float:
    """Return `scale`, or head dim ** -0.5 if it is None.

    Raises:
        ValueError: the scale is not positive.
    """
    if scale is None:
        return float(q_thd.shape[2] ** -0.5)
    if scale <= 0:  # kernels take the maximum before they scale
        raise ValueError(f"scale must be positive, not {scale}")
    return scale
