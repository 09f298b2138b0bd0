"""The attention of prompts of `cpu_decode`, as LLVM IR for one shape of heads.

For each block of slots and KV head of a part (`cpu_parts_ir`) with at least `FEWEST_ROWS` rows,
keys are copied with the tokens side by side, values as they are, both in fp32. Then row after row
computes scores, weights and weighted values. The decode kernel (`cpu_decode_ir`) copies nothing,
for rows that share little.

Where the time goes, and what follows from it:

- A product of a query and a key along the dimensions ends as a sum over lanes, which costs as much
  as the product for a head dim of 32. With tokens side by side every lane has its own score.
- Outputs of a tile stay in registers over all tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from csps.kernels.cpu_parts_ir import ARGUMENTS, BLOCK, HeadShape, each_part, greatest_divisor
from csps.kernels.vector_ir import Address, Element, Int, Variable, Vector, VectorCode

NAME = "csps_prompt_attention"
FEWEST_ROWS = 8
"""Rows for which copies pay."""
_UNROLLED_DIMS = 32


def scratch_numbers(shape: HeadShape, lanes: int) -> int:
    """Return the fp32 numbers of scratch memory: scores, keys and values of a block."""
    return BLOCK * (shape.group + 2 * shape.dim)


def prompt_attention_ir(shape: HeadShape, lanes: int) -> str:
    """Return the IR of the kernel."""
    return _PromptKernel(shape, VectorCode(NAME, ARGUMENTS, lanes=lanes)).text()


class _PromptKernel:
    def __init__(self, shape: HeadShape, code: VectorCode) -> None:
        self._shape, self._code, self._lanes = shape, code, code.lanes
        self._dims = range(0, shape.dim, self._lanes)
        self._tokens = range(0, BLOCK, self._lanes)
        # A tile fills as many registers as a vector has lanes: about half of them.
        self._score_heads = greatest_divisor(shape.group, self._lanes // len(self._tokens))
        self._value_heads = greatest_divisor(shape.group, self._lanes // len(self._dims))
        self._scores = code.address("scratch", Element.FP32)
        """Scores and then weights of a row: those of a block's tokens side by side, for each query
        head of a KV head."""
        self._keys = self._scores + shape.group * BLOCK
        """Keys of a block and KV head: tokens side by side, for each dimension."""
        self._values = self._keys + shape.dim * BLOCK
        self._states = self._values + shape.dim * BLOCK
        """Maximum and sum of each head, row by row."""

    def text(self) -> str:
        code, shape = self._code, self._shape
        with (
            each_part(code, shape, self._states) as part,
            part.blocks() as (slot, slots),
            code.loop(0, shape.kv_heads) as kv_head,
        ):
            self._copy(slot, slots, kv_head)
            with part.rows_that_see(slot, slots) as (row, seen):
                head = kv_head * shape.group
                query, out = part.query(row) + head * shape.dim, part.out(row) + head * shape.dim
                maxima, sums = (place + head for place in part.state(row))
                self._write_scores(query)
                self._weigh(out, maxima, sums, seen)
                self._add_values(out, seen)
        return code.text()

    def _copy(self, slot: Int, slots: Int, kv_head: Int) -> None:
        """Copy the keys and values of a block and KV head."""
        code, shape, last = self._code, self._shape, slots - 1
        keys, values = (
            code.address(name, shape.element) + (slot * shape.kv_heads + kv_head) * shape.dim
            for name in ("k", "v")
        )
        step = shape.kv_heads * shape.dim
        with code.loop(0, slots, self._lanes) as token:
            # Behind the block's end the last token is read again; nobody sees these scores.
            rows = [keys + (token + i).least(last) * step for i in range(self._lanes)]
            for d in self._dims:
                of_dims = code.transposed([(row + d).vector() for row in rows])
                for i, vector in enumerate(of_dims):
                    (self._keys + token + (d + i) * BLOCK).store(vector)
        with code.loop(0, slots) as token:
            for d in self._dims:
                (self._values + token * shape.dim + d).store((values + token * step + d).vector())

    def _write_scores(self, query: Address) -> None:
        """Write the scores of a row's query heads and all tokens of the block."""
        code, shape = self._code, self._shape
        unrolled = greatest_divisor(shape.dim, _UNROLLED_DIMS)
        scale = code.vector_argument("scale")
        for first in range(0, shape.group, self._score_heads):
            heads = range(first, first + self._score_heads)
            sums = {(h, t): Variable(code, code.fill(0.0)) for h in heads for t in self._tokens}
            with code.loop(0, shape.dim, unrolled) as dim:
                found = {cell: variable.get() for cell, variable in sums.items()}
                for d in range(unrolled):
                    keys = {t: (self._keys + (dim + d) * BLOCK + t).vector() for t in self._tokens}
                    for h in heads:
                        asked = (query + dim + (h * shape.dim + d)).spread()
                        for t in self._tokens:
                            found[h, t] = asked.times_plus(keys[t], found[h, t])
                for cell, variable in sums.items():
                    variable.set(found[cell])
            for (h, t), variable in sums.items():
                (self._scores + (h * BLOCK + t)).store(variable.get() * scale)

    def _weigh(self, out: Address, maxima: Address, sums: Address, seen: Int) -> None:
        """Replace the scores by weights, and scale down what was summed before."""
        code = self._code
        with code.loop(0, self._shape.group) as head:
            places = [self._scores + head * BLOCK + t for t in self._tokens]
            scores = [
                place.vector().before(seen - t, -inf)
                for place, t in zip(places, self._tokens, strict=True)
            ]
            old = (maxima + head).spread()
            top = old
            for score in scores:
                top = top.greatest(score)
            top = self._over_lanes(top, Vector.greatest)
            # All scores may be -inf; -inf minus -inf would be NaN.
            shift = top.where("==", -inf, 0.0)
            weights = [(score - shift).exp2() for score in scores]
            for place, weight in zip(places, weights, strict=True):
                place.store(weight)
            added = weights[0]
            for weight in weights[1:]:
                added = added + weight
            factor = (old - shift).exp2()
            total = (
                (sums + head).spread().times_plus(factor, self._over_lanes(added, Vector.__add__))
            )
            (maxima + head).store(top, range(1))
            (sums + head).store(total, range(1))
            for d in self._dims:
                cell = out + head * self._shape.dim + d
                cell.store(cell.vector() * factor)

    def _over_lanes(self, vector: Vector, join: Callable[[Vector, Vector], Vector]) -> Vector:
        """Join all lanes of a vector; every lane has the result."""
        step = self._lanes
        while step > 1:
            step //= 2
            vector = join(vector, vector.rotated(step))
        return vector

    def _add_values(self, out: Address, seen: Int) -> None:
        """Add the block's weighted values to a row's outputs."""
        code, shape = self._code, self._shape
        for first in range(0, shape.group, self._value_heads):
            heads = range(first, first + self._value_heads)
            places = {(h, d): out + (h * shape.dim + d) for h in heads for d in self._dims}
            sums = {cell: Variable(code, place.vector()) for cell, place in places.items()}
            with code.loop(0, seen) as token:
                values = {d: (self._values + token * shape.dim + d).vector() for d in self._dims}
                for h in heads:
                    weight = (self._scores + token + h * BLOCK).spread()
                    for d in self._dims:
                        total = sums[h, d]
                        total.set(weight.times_plus(values[d], total.get()))
            for cell, place in places.items():
                place.store(sums[cell].get())
