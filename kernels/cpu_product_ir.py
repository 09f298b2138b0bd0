"""The products of few rows of `cpu_product`, as LLVM IR.

Each block of weight rows is read once and multiplied with all rows of the input. Sums stay in
registers over the whole inner dimension, and end side by side.
"""

from __future__ import annotations

from csps.kernels.vector_ir import INT, POINTER, Address, Element, Int, Variable, VectorCode

NAME = "csps_few_row_product"
ARGUMENTS = {
    "x": POINTER,
    "weight": POINTER,
    "out": POINTER,
    "rows": INT,
    "inner": INT,
    "outputs": INT,
    "first_output": INT,
    "end_output": INT,
}
"""Arguments of the kernel: x and out are fp32, `inner` is a multiple of the lanes, and there are at
least `BLOCK` outputs from the first to the end."""
BLOCK = 16
"""Outputs of a block of weights, which stays in a core's second cache for further rows."""
ROWS = 1, 2, 4, 8
"""Rows that are computed together. Together with as many outputs as make one sum for each lane,
their sums fill about half of the registers."""
_MOST_AHEAD = 1 << 16
"""Numbers after which nothing is asked for: the next block, unless rows are so long that the
processor sees by itself what is read next."""


def product_ir(element: Element, rows: int, lanes: int) -> str:
    """Return the IR of the kernel for groups of so many rows; the last group may repeat a row."""
    code = VectorCode(NAME, ARGUMENTS, lanes=lanes)
    x, out = (code.address(name, Element.FP32) for name in ("x", "out"))
    weight = code.address("weight", element)
    count, inner, outputs, first, end = (
        code.integer_argument(name)
        for name in ("rows", "inner", "outputs", "first_output", "end_output")
    )
    tile = max(1, lanes // rows)
    with code.loop(first, end, BLOCK) as block_start, code.loop(0, count, rows) as row:
        # The last block begins early and computes some outputs again, so none is cut.
        block = block_start.least(end - BLOCK)
        own = [(row + r).least(count - 1) for r in range(rows)]
        with code.loop(block, block + BLOCK, tile) as output:
            sums = _sums(
                code, [x + each * inner for each in own], weight + output * inner, inner, tile
            )
            for each, of_row in zip(own, sums, strict=True):
                place = out + each * outputs + output
                place.store(code.lane_sums([total.get() for total in of_row]), range(tile))
    return code.text()


def _sums(
    code: VectorCode, rows: list[Address], weight: Address, inner: Int, tile: int
) -> list[list[Variable]]:
    """Write the products of some rows and `tile` outputs; each sum is spread over the lanes."""
    sums = [[Variable(code, code.fill(0.0)) for _ in range(tile)] for _ in rows]
    ahead = (inner * BLOCK).least(_MOST_AHEAD)
    with code.loop(0, inner, code.lanes) as i:
        numbers = [(row + i).vector() for row in rows]
        for k in range(tile):
            place = weight + inner * k + i
            (place + ahead).prefetch()
            weights = place.vector()
            for of_row, number in zip(sums, numbers, strict=True):
                of_row[k].set(weights.times_plus(number, of_row[k].get()))
    return sums
