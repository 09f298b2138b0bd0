"""Arguments of the kernels of `cpu_decode`, and their walk over parts, blocks and rows.

A part is some query rows that see the same runs of slots. Of each row the kernels keep its outputs,
and for each head the maximum and the sum of online softmax with powers of 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from csps.kernels.arguments import PART_FIELDS
from csps.kernels.quantized_kv import SCALE_BYTES
from csps.kernels.vector_ir import (
    FLOAT,
    INT,
    LN_2,
    POINTER,
    Address,
    Element,
    Int,
    VectorCode,
)

BLOCK = 64
"""Slots of a block: its keys and values stay in a core's second cache for further rows."""
ARGUMENTS = {
    "q": POINTER,
    "k": POINTER,
    "v": POINTER,
    "parts": POINTER,
    "runs": POINTER,
    "out": POINTER,
    "lse": POINTER,
    "scratch": POINTER,
    "first_part": INT,
    "end_part": INT,
    "scale": FLOAT,
}
"""Arguments of the kernel. `scale` includes the factor log2(e)."""


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Shape of the heads that a kernel computes."""

    heads: int
    """Query heads."""
    kv_heads: int
    dim: int
    element: Element
    """Type of the keys and values; queries are fp32."""

    @property
    def group(self) -> int:
        """Return the number of query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def quantized(self) -> bool:
        """Return whether a scale follows the numbers of each KV head."""
        return self.element is Element.INT8

    @property
    def width(self) -> int:
        """Return the numbers of one KV head in a slot, with its scale."""
        return self.dim + SCALE_BYTES if self.quantized else self.dim


def lanes_for(dim: int, most: int) -> int:
    """Return the lanes of vectors for a head dim: the greatest power of two that divides it."""
    return min(most, dim & -dim)


def row_numbers(shape: HeadShape, lanes: int) -> int:
    """Return the fp32 numbers of scratch memory for each row of a part: maxima and sums, each in
    whole vectors."""
    return 2 * -(-shape.heads // lanes) * lanes


def greatest_divisor(number: int, most: float) -> int:
    """Return the greatest divisor of a number up to a bound, at least 1."""
    return max(d for d in range(1, number + 1) if number % d == 0 and d <= max(most, 1))


@dataclass(frozen=True, kw_only=True)
class QueryPart:
    """A part while its code is written: its rows, and their runs of slots."""

    code: VectorCode
    shape: HeadShape
    states: Address
    """Maxima and sums of the heads, row by row."""
    queries: Address
    outs: Address
    lses: Address
    runs: Address
    first_run: Int
    end_run: Int
    rows: Int
    unseen: Int
    """First slot that the first row does not see; each further row sees one more."""

    def query(self, row: Int) -> Address:
        """Return where the queries of a row are."""
        return self.queries + row * (self.shape.heads * self.shape.dim)

    def out(self, row: Int) -> Address:
        """Return where the outputs of a row are."""
        return self.outs + row * (self.shape.heads * self.shape.dim)

    def state(self, row: Int) -> tuple[Address, Address]:
        """Return where the maxima and the sums of a row's heads are."""
        numbers = row_numbers(self.shape, self.code.lanes)
        maxima = self.states + row * numbers
        return maxima, maxima + numbers // 2

    @contextmanager
    def blocks(self) -> Iterator[tuple[Int, Int]]:
        """Write a loop over blocks; its body sees the first slot and the number of slots."""
        with self.code.loop(self.first_run, self.end_run) as run:
            begin, end = (self.runs + run * 2).integer(), (self.runs + run * 2 + 1).integer()
            with self.code.loop(begin, end, BLOCK) as slot:
                yield slot, (end - slot).least(BLOCK)

    @contextmanager
    def rows_that_see(self, slot: Int, slots: Int) -> Iterator[tuple[Int, Int]]:
        """Write a loop over the rows that see some of a block; its body sees the row and how many
        of the block's slots it sees."""
        # Rows that see none of the block are the first ones: they see fewest.
        with self.code.loop((slot - self.unseen + 1).most(0), self.rows) as row:
            yield row, slots.least(self.unseen + row - slot)

    def begin(self) -> None:
        """Write nothing seen into outputs, maxima and sums."""
        code, lanes = self.code, self.code.lanes
        zero = code.fill(0.0)
        with code.loop(0, self.rows) as row:
            out, (maxima, sums) = self.out(row), self.state(row)
            with code.loop(0, self.shape.heads * self.shape.dim, lanes) as cell:
                (out + cell).store(zero)
            for at in range(0, self.shape.heads, lanes):
                (maxima + at).store(code.fill(-inf))
                (sums + at).store(zero)

    def end(self) -> None:
        """Divide outputs by the sums, and write LSEs."""
        code, lanes, dim = self.code, self.code.lanes, self.shape.dim
        with code.loop(0, self.rows) as row:
            out, lse = self.out(row), self.lses + row * self.shape.heads
            maxima, sums = self.state(row)
            for at in range(0, self.shape.heads, lanes):
                top, total = (maxima + at).vector(), (sums + at).vector()
                own = range(min(lanes, self.shape.heads - at))
                (lse + at).store((top + total.log2()) * code.fill(LN_2), own)
                # A row without keys has outputs 0, and stays so.
                (sums + at).store(code.fill(1.0) / total.where("==", 0.0, 1.0))
            with code.loop(0, self.shape.heads) as head:
                factor = (sums + head).spread()
                for d in range(0, dim, lanes):
                    cell = out + head * dim + d
                    cell.store(cell.vector() * factor)


@contextmanager
def each_part(code: VectorCode, shape: HeadShape, states: Address) -> Iterator[QueryPart]:
    """Write a loop over the parts of a call; its body sees a part with rows that have seen nothing,
    and what it has seen is the part's result.

    Args:
        states: scratch memory for maxima and sums (`row_numbers`).
    """
    parts = code.address("parts", Element.INT64)
    with code.loop(
        code.integer_argument("first_part"), code.integer_argument("end_part")
    ) as number:
        place = parts + number * PART_FIELDS
        q_row, out_row, rows, first_run, end_run, unseen = (
            (place + field).integer() for field in range(PART_FIELDS)
        )
        cells = shape.heads * shape.dim
        part = QueryPart(
            code=code,
            shape=shape,
            states=states,
            queries=code.address("q", Element.FP32) + q_row * cells,
            outs=code.address("out", Element.FP32) + out_row * cells,
            lses=code.address("lse", Element.FP32) + out_row * shape.heads,
            runs=code.address("runs", Element.INT64),
            first_run=first_run,
            end_run=end_run,
            rows=rows,
            unseen=unseen,
        )
        part.begin()
        yield part
        part.end()
