"""The decode attention of `cpu_decode`, as LLVM IR for one shape of heads.

For each block of slots of a part (`cpu_parts_ir`), the kernel computes scores, weights and weighted
values of one row after the other, so KV comes from memory once and from the cache for further rows.

Where the time goes, and what follows from it:

- A core reads memory at its full speed only in order and ahead of time. Keys are read token by
  token, all heads of each, and each tile asks for as many bytes `AHEAD_BYTES` behind it, into the
  second cache: a core waits for more lines there than in its first one. Head by head, or with
  lines that go into the first cache, memory was read at half the speed.
- Scores lie in memory token by token. So the maximum and the sum over tokens need no sum over
  lanes, and a weight is one number to multiply a value by.
- Loops over dimensions are unrolled: loops of four rounds end in a wrong branch prediction, which
  throws away the reads that were under way.

KV may be fp32, bf16, fp16 or 8 bits with scales (`quantized_kv`); numbers are converted in
registers, and all arithmetic is fp32. Scales are multiplied with scores and weights, which are
fewer than the numbers.
"""

from __future__ import annotations

from math import inf

from csps.kernels.cpu_parts_ir import (
    ARGUMENTS,
    BLOCK,
    HeadShape,
    each_part,
    greatest_divisor,
)
from csps.kernels.vector_ir import (
    LINE_BYTES,
    Address,
    Element,
    Int,
    Variable,
    Vector,
    VectorCode,
)

AHEAD_BYTES = 8 * 1024
"""Distance of prefetching."""
NAME = "csps_decode_attention"
_TOKENS = {Element.FP32: 2, Element.BF16: 4, Element.FP16: 4, Element.INT8: 4}
"""Tokens that are computed together, at most: the more, the less memory is read in order."""
_UNROLLED = 4
"""Independent maxima, so that they do not wait for each other."""


def scratch_numbers(shape: HeadShape, lanes: int) -> int:
    """Return the fp32 numbers of scratch memory: scores of a block, and a factor for each head."""
    width = _score_width(shape.heads, lanes)
    return _score_rows(lanes) * width + max(width, lanes)


def decode_attention_ir(shape: HeadShape, lanes: int) -> str:
    """Return the IR of the kernel."""
    return _Kernel(shape, VectorCode(NAME, ARGUMENTS, lanes=lanes)).text()


def _score_width(heads: int, lanes: int) -> int:
    """Return the scores of a token in memory: whole vectors, or a whole fraction of one."""
    return 1 << (heads - 1).bit_length() if heads < lanes else -(-heads // lanes) * lanes


def _score_rows(lanes: int) -> int:
    """Return the tokens for whose scores there is room."""
    # The last tile, and the last vector, may reach behind the end of a block.
    return BLOCK + max(*_TOKENS.values(), lanes)


class _Kernel:
    def __init__(self, shape: HeadShape, code: VectorCode) -> None:
        self._shape, self._code, self._lanes = shape, code, code.lanes
        self._width = _score_width(shape.heads, self._lanes)
        self._vectors = range(0, self._width, self._lanes)
        """Score vectors of a token, or one of some tokens."""
        self._dims = range(0, shape.dim, self._lanes)
        self._slot = shape.kv_heads * shape.width
        # A tile of scores fills as many registers as a vector has lanes: about half of them.
        self._heads = greatest_divisor(shape.group, self._lanes)
        self._tokens = min(_TOKENS[shape.element], self._lanes // self._heads)
        self._kv_heads = greatest_divisor(
            shape.kv_heads if self._heads == shape.group else 1,
            self._lanes // (self._heads * self._tokens),
        )
        self._scores = code.address("scratch", Element.FP32)
        self._factors = self._scores + _score_rows(self._lanes) * self._width
        """A factor for the outputs of each head."""
        self._states = self._factors + max(self._width, self._lanes)
        """Maximum and sum of each head, row by row."""

    def text(self) -> str:
        with (
            each_part(self._code, self._shape, self._states) as part,
            part.blocks() as (slot, slots),
            part.rows_that_see(slot, slots) as (row, seen),
        ):
            self._write_scores(part.query(row), slot, seen)
            self._weigh(part.out(row), part.state(row), seen)
            self._add_values(part.out(row), slot, seen)
        return self._code.text()

    # --- scores ------------------------------------------------------------------------------

    def _write_scores(self, query: Address, slot: Int, slots: Int) -> None:
        """Write the scores of a row and a block."""
        code, last = self._code, slots - 1
        keys = code.address("k", self._shape.element) + slot * self._slot
        with code.loop(0, slots, self._tokens) as token:
            # A tile behind the block's end reads its last token again.
            rows = [keys + (token + i).least(last) * self._slot for i in range(self._tokens)]
            with code.loop(0, self._shape.kv_heads, self._kv_heads) as kv_head:
                self._prefetch_behind(keys, token, kv_head, self._tokens, self._kv_heads)
                for head in range(0, self._shape.group, self._heads):
                    self._write_tile(query, rows, token, kv_head, head)

    def _write_tile(
        self, query: Address, rows: list[Address], token: Int, kv_head: Int, head: int
    ) -> None:
        """Write the scores of some tokens, KV heads, and query heads of each from `head` on."""
        code, shape = self._code, self._shape
        kv_heads = range(self._kv_heads)
        first = kv_head * shape.group + head
        sums: dict[tuple[int, int, int], Vector] = {}
        for i, row in enumerate(rows):
            for g in kv_heads:
                for d in self._dims:
                    key = (row + (kv_head + g) * shape.width + d).vector()
                    for h in range(self._heads):
                        asked = (query + (first + (g * shape.group + h)) * shape.dim + d).vector()
                        cell = i, g, h
                        sums[cell] = asked.times_plus(key, sums[cell]) if d else asked * key
                if shape.quantized:
                    scale = self._scale_of(row, kv_head + g)
                    for h in range(self._heads):
                        sums[i, g, h] = sums[i, g, h] * scale
        scores = code.lane_sums([sums[cell] for cell in sorted(sums)])
        scores = scores * code.vector_argument("scale")
        adjacent = self._kv_heads * self._heads
        for i in range(len(rows)):
            at = self._scores + (token + i) * self._width + first
            at.store(scores, range(i * adjacent, (i + 1) * adjacent))

    def _scale_of(self, row: Address, kv_head: Int) -> Vector:
        """Return the scale of a KV head of a token, in every lane."""
        place = row + (kv_head * self._shape.width + self._shape.dim)
        return place.of(Element.FP32).spread()

    def _prefetch_behind(
        self, tokens_at: Address, token: Int, kv_head: Int, tokens: int, kv_heads: int
    ) -> None:
        """Ask for what a tile will read later; tile by tile, these are all bytes in order."""
        size = tokens_at.element.bytes
        place = tokens_at + token * self._slot + kv_head * (tokens * self._shape.width)
        for number in range(0, tokens * kv_heads * self._shape.width, LINE_BYTES // size):
            (place + (AHEAD_BYTES // size + number)).prefetch()

    # --- weights -----------------------------------------------------------------------------

    def _weigh(self, out: Address, state: tuple[Address, Address], slots: Int) -> None:
        """Replace a block's scores by weights, and scale down what was summed before."""
        code, lanes, width = self._code, self._lanes, self._width
        tokens = max(1, lanes // width)  # of a vector
        end = (slots + (tokens - 1)).down_to(tokens)
        if tokens > 1:
            with code.loop(slots, end) as token:
                (self._scores + token * width).store(code.fill(-inf), range(width))
        for at in self._vectors:
            scores = self._scores + at
            before, total = (place + at for place in state)
            old = before.vector()
            top = self._maximum(scores, end, tokens, old)
            # All scores may be -inf; -inf minus -inf would be NaN.
            shift = top.where("==", -inf, 0.0)
            added = Variable(code, code.fill(0.0))
            with code.loop(0, end, tokens) as token:
                place = scores + token * width
                weight = (place.vector() - shift).exp2()
                place.store(weight)
                added.set(added.get() + weight)
            factor = (old - shift).exp2()
            total.store(total.vector().times_plus(factor, self._over_tokens(added.get(), "sum")))
            before.store(top)
            (self._factors + at).store(factor)
        self._scale(out)

    def _maximum(self, scores: Address, end: Int, tokens: int, least: Vector) -> Vector:
        """Return the maximum over tokens, at least `least`."""
        code, step = self._code, tokens * _UNROLLED
        tops = [Variable(code, least) for _ in range(_UNROLLED)]
        whole = end.down_to(step)
        with code.loop(0, whole, step) as token:
            for i, variable in enumerate(tops):
                place = scores + (token + i * tokens) * self._width
                variable.set(place.vector().greatest(variable.get()))
        with code.loop(whole, end, tokens) as token:
            place = scores + token * self._width
            tops[0].set(place.vector().greatest(tops[0].get()))
        top = tops[0].get()
        for other in tops[1:]:
            top = top.greatest(other.get())
        return self._over_tokens(top, "maximum")

    def _over_tokens(self, vector: Vector, kind: str) -> Vector:
        """Join the tokens of one vector; each of them has as many lanes as heads."""
        step = self._lanes
        while step > self._width:
            step //= 2
            other = vector.rotated(step)
            vector = vector.greatest(other) if kind == "maximum" else vector + other
        return vector

    def _scale(self, out: Address) -> None:
        """Multiply the outputs of each head by its factor."""
        code, shape = self._code, self._shape
        with code.loop(0, shape.heads) as head:
            place = self._factors + head
            with code.unless_one(place):
                factor = place.spread()
                for d in self._dims:
                    cell = out + head * shape.dim + d
                    cell.store(cell.vector() * factor)

    # --- values ------------------------------------------------------------------------------

    def _add_values(self, out: Address, slot: Int, slots: Int) -> None:
        """Add a block's weighted values to the outputs of a row."""
        code = self._code
        values = code.address("v", self._shape.element) + slot * self._slot
        # The weights of a tile fill as many registers as a vector has lanes.
        fit = 1 << (self._lanes // self._heads).bit_length() - 1
        tokens = min(_TOKENS[self._shape.element], fit)
        whole = slots.down_to(tokens)
        with code.loop(0, whole, tokens) as token:
            self._add_tokens(out, values, token, tokens)
        if tokens > 1:
            with code.loop(whole, slots) as token:
                self._add_tokens(out, values, token, 1)

    def _add_tokens(self, out: Address, values: Address, token: Int, tokens: int) -> None:
        with self._code.loop(0, self._shape.kv_heads) as kv_head:
            self._prefetch_behind(values, token, kv_head, tokens, 1)
            for head in range(0, self._shape.group, self._heads):
                self._add_tile(out, values, token, tokens, kv_head, head)

    def _add_tile(
        self, out: Address, values: Address, token: Int, tokens: int, kv_head: Int, head: int
    ) -> None:
        """Add the values of one KV head of some tokens to query heads from `head` on."""
        shape = self._shape
        first = kv_head * shape.group + head
        weights = {
            (i, h): (self._scores + (token + i) * self._width + (first + h)).spread()
            for i in range(tokens)
            for h in range(self._heads)
        }
        rows = [values + (token + i) * self._slot for i in range(tokens)]
        if shape.quantized:
            scales = [self._scale_of(row, kv_head) for row in rows]
            weights = {(i, h): weight * scales[i] for (i, h), weight in weights.items()}
        for d in self._dims:
            seen = []
            for row in rows:
                value = row + kv_head * shape.width + d
                seen.append(value.vector())
            for h in range(self._heads):
                place = out + (first + h) * shape.dim + d
                total = place.vector()
                for i, value_d in enumerate(seen):
                    total = weights[i, h].times_plus(value_d, total)
                place.store(total)
