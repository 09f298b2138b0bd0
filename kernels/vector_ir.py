"""Vector code for CPUs, written as LLVM IR.

Compilers turn loops into vector instructions only where they may reorder sums, and then as they
like: a dot product over 32 dimensions ends as a sum over lanes for each key, and converting bf16
keeps a loop from being vectorized at all. `VectorCode` writes the instructions of one function
instead. `Int`, `Vector` and `Address` are values of the function that is being written, with the
operators that a reader expects.

No instruction carries a fast-math flag. The order of every sum is written down, so the compiler
need not be free to change it, and NaN and infinity keep their meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from math import factorial, log

from llvmlite import ir

LN_2 = log(2.0)
LINE_BYTES = 64
"""Bytes of a cache line."""
_EXP2_DEGREE = 7
"""Degree of the Taylor polynomial of 2**x for |x| <= 0.5: its relative error is 5e-9."""
_LOG2_TERMS = 6
"""Terms of the series of artanh(x) for |x| <= 0.172: its relative error is 1e-10."""
_SQRT_HALF_BITS, _ONE_BITS, _MANTISSA_BITS = 0x3F3504F3, 0x3F800000, 23
_ROUNDING = 1.5 * 2**_MANTISSA_BITS
"""Number that rounds what is added to it to an integer, which its lowest bits then hold."""
_LEAST_EXPONENT = -126.0
"""Least exponent of a normal fp32 number."""

INT, FLOAT, POINTER = ir.IntType(64), ir.FloatType(), ir.PointerType()
_INT32 = ir.IntType(32)


class Element(Enum):
    """Type of a number in memory; the value is its bytes and LLVM's type."""

    FP32 = (4, FLOAT)
    BF16 = (2, ir.IntType(16))
    FP16 = (2, ir.HalfType())
    INT8 = (1, ir.IntType(8))
    INT64 = (8, INT)

    @property
    def bytes(self) -> int:
        """Return the size of a number."""
        size: int = self.value[0]
        return size


@dataclass(frozen=True, eq=False)
class Int:
    """A 64-bit integer."""

    code: VectorCode
    value: ir.Value

    def __add__(self, other: Int | int) -> Int:
        """Return the sum."""
        return Int(self.code, self.code.builder.add(self.value, self.code.integer(other)))

    def __sub__(self, other: Int | int) -> Int:
        """Return the difference."""
        return Int(self.code, self.code.builder.sub(self.value, self.code.integer(other)))

    def __mul__(self, other: Int | int) -> Int:
        """Return the product."""
        return Int(self.code, self.code.builder.mul(self.value, self.code.integer(other)))

    def down_to(self, multiple: int) -> Int:
        """Return the greatest multiple of a power of two that is not above this."""
        return Int(self.code, self.code.builder.and_(self.value, self.code.integer(-multiple)))

    def most(self, other: Int | int) -> Int:
        """Return the greater of two."""
        builder, bound = self.code.builder, self.code.integer(other)
        above = builder.icmp_signed(">", self.value, bound)
        return Int(self.code, builder.select(above, self.value, bound))

    def least(self, other: Int | int) -> Int:
        """Return the lesser of two."""
        builder, bound = self.code.builder, self.code.integer(other)
        below = builder.icmp_signed("<", self.value, bound)
        return Int(self.code, builder.select(below, self.value, bound))


@dataclass(frozen=True, eq=False)
class Vector:
    """A vector of fp32 numbers, one in each lane."""

    code: VectorCode
    value: ir.Value

    def __add__(self, other: Vector) -> Vector:
        """Return the sum of each lane."""
        return Vector(self.code, self.code.builder.fadd(self.value, other.value))

    def __sub__(self, other: Vector) -> Vector:
        """Return the difference of each lane."""
        return Vector(self.code, self.code.builder.fsub(self.value, other.value))

    def __mul__(self, other: Vector) -> Vector:
        """Return the product of each lane."""
        return Vector(self.code, self.code.builder.fmul(self.value, other.value))

    def __truediv__(self, other: Vector) -> Vector:
        """Return the quotient of each lane."""
        return Vector(self.code, self.code.builder.fdiv(self.value, other.value))

    def times_plus(self, factor: Vector, term: Vector) -> Vector:
        """Return self * factor + term, in one instruction where the processor has it."""
        arguments = [self, factor, term]
        return self.code.intrinsic("llvm.fmuladd", arguments)

    def where(self, relation: str, bound: float, then: float) -> Vector:
        """Return `then` in lanes that have this relation to the bound, and the others as they are.

        NaN has no relation to anything, and stays.
        """
        code = self.code
        holds = code.builder.fcmp_ordered(relation, self.value, code.fill(bound).value)
        return Vector(code, code.builder.select(holds, code.fill(then).value, self.value))

    def before(self, count: Int, then: float) -> Vector:
        """Return the first `count` lanes as they are, and `then` in the others."""
        code, lanes = self.code, self.code.lanes
        number = code.builder.trunc(count.value, _INT32)
        numbers = ir.Constant(code.ints, list(range(lanes)))
        below = code.builder.icmp_signed("<", numbers, code.spread(number))
        return Vector(code, code.builder.select(below, self.value, code.fill(then).value))

    def greatest(self, other: Vector) -> Vector:
        """Return the greater of two in each lane, and `other` if either is NaN."""
        builder = self.code.builder
        above = builder.fcmp_ordered(">", self.value, other.value)
        return Vector(self.code, builder.select(above, self.value, other.value))

    def rotated(self, lanes: int) -> Vector:
        """Return lane i + `lanes` in lane i."""
        count = self.code.lanes
        return Vector(
            self.code, self.code.shuffle(self, self, [(i + lanes) % count for i in range(count)])
        )

    def exp2(self) -> Vector:
        """Return 2**x for x <= 0 or NaN; what would not be a normal number is 0."""
        code, builder = self.code, self.code.builder
        rounded = self + code.fill(_ROUNDING)
        fraction = self - (rounded - code.fill(_ROUNDING))
        power = code.fill(LN_2**_EXP2_DEGREE / factorial(_EXP2_DEGREE))
        for k in reversed(range(_EXP2_DEGREE)):
            power = power.times_plus(fraction, code.fill(LN_2**k / factorial(k)))
        bits = builder.shl(
            builder.bitcast(rounded.value, code.ints), code.fill_integer(_MANTISSA_BITS)
        )
        scale = builder.bitcast(builder.add(bits, code.fill_integer(_ONE_BITS)), code.floats)
        normal = power * Vector(code, scale)
        # For -inf the polynomial is NaN; the comparison is with x, so that NaN alone stays.
        tiny = builder.fcmp_ordered("<", self.value, code.fill(_LEAST_EXPONENT).value)
        return Vector(code, builder.select(tiny, code.fill(0.0).value, normal.value))

    def log2(self) -> Vector:
        """Return the logarithm of x for x = 0, positive normal x or NaN."""
        code, builder = self.code, self.code.builder
        # x is 2**exponent times a factor from sqrt(1/2) to sqrt(2).
        bits = builder.bitcast(self.value, code.ints)
        above = builder.sub(bits, code.fill_integer(_SQRT_HALF_BITS))
        exponent = builder.ashr(above, code.fill_integer(_MANTISSA_BITS))
        factor_bits = builder.sub(bits, builder.shl(exponent, code.fill_integer(_MANTISSA_BITS)))
        factor = Vector(code, builder.bitcast(factor_bits, code.floats))
        one = code.fill(1.0)
        ratio = (factor - one) / (factor + one)
        square = ratio * ratio
        series = code.fill(1 / (2 * _LOG2_TERMS - 1))
        for k in reversed(range(1, _LOG2_TERMS)):
            series = series.times_plus(square, code.fill(1 / (2 * k - 1)))
        whole = Vector(code, builder.sitofp(exponent, code.floats))
        found = (ratio * series).times_plus(code.fill(2 / LN_2), whole)
        number = builder.fcmp_ordered(">", self.value, code.fill(0.0).value)
        zero = builder.fcmp_ordered("==", self.value, code.fill(0.0).value)
        other = builder.select(zero, code.fill(-float("inf")).value, self.value)
        return Vector(code, builder.select(number, found.value, other))


@dataclass(frozen=True, eq=False)
class Address:
    """A place in memory, counted in numbers of one type."""

    code: VectorCode
    pointer: ir.Value
    element: Element

    def __add__(self, count: Int | int) -> Address:
        """Return the address so many numbers further on."""
        code, (_, typ) = self.code, self.element.value
        moved = code.builder.gep(self.pointer, [code.integer(count)], source_etype=typ)
        return Address(code, moved, self.element)

    def of(self, element: Element) -> Address:
        """Return the same place, counted in numbers of another type."""
        return Address(self.code, self.pointer, element)

    def integer(self) -> Int:
        """Read an integer."""
        return Int(self.code, self.code.builder.load(self.pointer, typ=INT, align=8))

    def vector(self) -> Vector:
        """Read as many numbers as there are lanes, as fp32."""
        code, builder, (size, typ) = self.code, self.code.builder, self.element.value
        packed = ir.VectorType(typ, code.lanes)
        loaded = builder.load(self.pointer, typ=packed, align=size)
        if self.element is Element.FP32:
            return Vector(code, loaded)
        if self.element is Element.FP16:
            return Vector(code, builder.fpext(loaded, code.floats))
        if self.element is Element.INT8:
            return Vector(code, builder.sitofp(builder.sext(loaded, code.ints), code.floats))
        # bf16 is the upper half of fp32.
        upper = builder.shl(builder.zext(loaded, code.ints), code.fill_integer(16))
        return Vector(code, builder.bitcast(upper, code.floats))

    def spread(self) -> Vector:
        """Read one fp32 number into every lane."""
        code = self.code
        return Vector(code, code.spread(code.builder.load(self.pointer, typ=FLOAT, align=4)))

    def store(self, vector: Vector, lanes: range | None = None) -> None:
        """Write the lanes of a vector, or some neighboring ones."""
        value = vector.value if lanes is None else self.code.shuffle(vector, vector, lanes)
        self.code.builder.store(value, self.pointer, align=4)

    def prefetch(self) -> None:
        """Ask for the cache line of this address, which may be outside of any memory, into the
        core's second cache."""
        self.code.prefetch(self.pointer)


class Variable:
    """A vector that changes."""

    # A slot on the stack, which LLVM turns into a register.

    def __init__(self, code: VectorCode, initial: Vector) -> None:
        self._code, self._slot = code, code.stack_slot(code.floats)
        self.set(initial)

    def get(self) -> Vector:
        """Return the value."""
        return Vector(self._code, self._code.builder.load(self._slot, typ=self._code.floats))

    def set(self, value: Vector) -> None:
        """Change the value."""
        self._code.builder.store(value.value, self._slot)


class VectorCode:
    """The code of one function without a result, being written.

    Args:
        arguments: types of the function's arguments, by name: `INT`, `POINTER` or `FLOAT`.
        lanes: fp32 numbers of a vector, a power of two.
    """

    def __init__(self, name: str, arguments: Mapping[str, ir.Type], *, lanes: int) -> None:
        self.lanes = lanes
        self.floats, self.ints = ir.VectorType(FLOAT, lanes), ir.VectorType(_INT32, lanes)
        self._module = ir.Module(name)
        typ = ir.FunctionType(ir.VoidType(), list(arguments.values()))
        self._function = ir.Function(self._module, typ, name)
        self._function.attributes.add("nounwind")
        self._arguments = dict(zip(arguments, self._function.args, strict=True))
        self._entry = self._function.append_basic_block("entry")
        self._start = self._function.append_basic_block("start")
        self.builder = ir.IRBuilder(self._start)

    def text(self) -> str:
        """End the function and return its IR."""
        self.builder.ret_void()
        ir.IRBuilder(self._entry).branch(self._start)
        return str(self._module)

    # --- arguments and constants -------------------------------------------------------------

    def address(self, name: str, element: Element) -> Address:
        """Return an argument that is an address."""
        return Address(self, self._arguments[name], element)

    def integer_argument(self, name: str) -> Int:
        """Return an argument that is an integer."""
        return Int(self, self._arguments[name])

    def vector_argument(self, name: str) -> Vector:
        """Return an fp32 argument in every lane."""
        return Vector(self, self.spread(self._arguments[name]))

    def integer(self, number: Int | int) -> ir.Value:
        """Return LLVM's value of an integer."""
        return number.value if isinstance(number, Int) else ir.Constant(INT, number)

    def fill(self, number: float) -> Vector:
        """Return a constant in every lane."""
        return Vector(self, ir.Constant(self.floats, [number] * self.lanes))

    def fill_integer(self, number: int) -> ir.Value:
        """Return LLVM's value of an integer constant in every lane."""
        return ir.Constant(self.ints, [number] * self.lanes)

    # --- control -----------------------------------------------------------------------------

    @contextmanager
    def loop(self, begin: Int | int, end: Int | int, step: int = 1) -> Iterator[Int]:
        """Write a loop; what is written inside the context is its body, and sees the index."""
        builder, slot, bound = self.builder, self.stack_slot(INT), self.integer(end)
        head, body, done = (
            self._function.append_basic_block(name) for name in ("head", "body", "done")
        )
        builder.store(self.integer(begin), slot)
        builder.branch(head)
        builder.position_at_end(head)
        index = Int(self, builder.load(slot, typ=INT))
        builder.cbranch(builder.icmp_signed("<", index.value, bound), body, done)
        builder.position_at_end(body)
        yield index
        builder.store((index + step).value, slot)
        builder.branch(head)
        builder.position_at_end(done)

    @contextmanager
    def unless_one(self, factor: Address) -> Iterator[None]:
        """Write what runs unless an fp32 number is 1."""
        builder = self.builder
        number = builder.load(factor.pointer, typ=FLOAT, align=4)
        with builder.if_then(builder.fcmp_unordered("!=", number, ir.Constant(FLOAT, 1.0))):
            yield

    def stack_slot(self, typ: ir.Type) -> ir.Value:
        """Return a place on the stack."""
        # All are in the first block, where LLVM looks for what may become a register.
        return ir.IRBuilder(self._entry).alloca(typ)

    # --- vectors -----------------------------------------------------------------------------

    def spread(self, number: ir.Value) -> ir.Value:
        """Return a number in every lane."""
        none = ir.Constant(ir.VectorType(number.type, self.lanes), ir.Undefined)
        first = self.builder.insert_element(none, number, ir.Constant(_INT32, 0))
        return self.builder.shuffle_vector(first, none, self.fill_integer(0))

    def shuffle(self, first: Vector, second: Vector, lanes: Sequence[int]) -> ir.Value:
        """Return some lanes of two vectors, those of the second counted after the first's."""
        picked = ir.Constant(ir.VectorType(_INT32, len(lanes)), list(lanes))
        return self.builder.shuffle_vector(first.value, second.value, picked)

    def lane_sums(self, vectors: Sequence[Vector]) -> Vector:
        """Return the sum over the lanes of vector i in lane i, for at most as many as lanes."""
        # Pairs of vectors are added pair of lanes by pair of lanes until one vector is left: 3
        # instructions a sum, and all sums end side by side. Each alone would take 8.
        left = [*vectors, *[self.fill(0.0)] * (self.lanes - len(vectors))]
        even, odd = range(0, 2 * self.lanes, 2), range(1, 2 * self.lanes, 2)
        while len(left) > 1:
            pairs = list(zip(left[::2], left[1::2], strict=True))
            left = [
                Vector(self, self.shuffle(one, two, even))
                + Vector(self, self.shuffle(one, two, odd))
                for one, two in pairs
            ]
        return left[0]

    def transposed(self, vectors: Sequence[Vector]) -> list[Vector]:
        """Return lane i of vector j in lane j of vector i, for as many vectors as lanes."""
        # Each round moves the highest bit of a vector's number to the lowest bit of the lane's, and
        # the highest bit of the lane's to the lowest bit of the vector's.
        lanes, half = self.lanes, self.lanes // 2
        low = [lane for i in range(half) for lane in (i, lanes + i)]
        high = [lane + half for lane in low]
        left = list(vectors)
        for _ in range(lanes.bit_length() - 1):
            pairs = list(zip(left[:half], left[half:], strict=True))
            left = [
                Vector(self, self.shuffle(one, two, picked))
                for one, two in pairs
                for picked in (low, high)
            ]
        return left

    def intrinsic(self, name: str, arguments: Sequence[Vector]) -> Vector:
        """Call one of LLVM's functions of vectors."""
        full = f"{name}.v{self.lanes}f32"
        typ = ir.FunctionType(self.floats, [self.floats] * len(arguments))
        return Vector(
            self, self.builder.call(self._declared(full, typ), [x.value for x in arguments])
        )

    def prefetch(self, pointer: ir.Value) -> None:
        """Ask for a cache line that is going to be read, into the core's second cache."""
        typ = ir.FunctionType(ir.VoidType(), [POINTER, _INT32, _INT32, _INT32])
        read, into_second_cache, data = (ir.Constant(_INT32, number) for number in (0, 2, 1))
        function = self._declared("llvm.prefetch.p0", typ)
        self.builder.call(function, [pointer, read, into_second_cache, data])

    def _declared(self, name: str, typ: ir.FunctionType) -> ir.Function:
        if name not in self._module.globals:
            ir.Function(self._module, typ, name)
        return self._module.globals[name]
