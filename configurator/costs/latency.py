"""How long a step takes: Tetris' Eq. 1 and LoongServe's Eq. 7, in integers.

Both are one formula. A step of pieces with lengths L and histories C takes::

    T = a + b * sum(L) + c * sum(C * L) + d * sum(L^2)

with coefficients for every group shape: Tetris fits it per SP size and for one piece, LoongServe
per strategy (SP, TP) and for a batch without history. An iteration of decoding takes
`A + B * sum(context) + C * batch` with two sets of coefficients, memory-bound and compute-bound.

Coefficients are integers, nanoseconds times 2^48, and so is all arithmetic: a prediction is the
same on every machine, comparing two needs no tolerance, and the inverse is exact. A step of a
million tokens is rounded by less than a nanosecond.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import isqrt
from typing import Any, Self, TypeVar

from csps.protocols.core.errors import ConfigError

FRACTION_BITS = 48
_ONE_NS = 1 << FRACTION_BITS

T = TypeVar("T")
ChunkSize = tuple[int, int]
"""(length, history) of a piece, in tokens."""


def fixed_ns(seconds: float) -> int:
    """A coefficient in seconds as the integer that the classes below take."""
    return round(seconds * 1e9 * _ONE_NS)


def in_seconds(fixed: int) -> float:
    """The inverse of `fixed_ns`, as near as a float gets."""
    return fixed / _ONE_NS / 1e9


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """T(L, C) on groups of one shape. All four in 2^-48 ns, none negative."""

    a: int
    """Whatever does not grow with the step."""
    b: int
    """For each token: projections and MLP."""
    c: int
    """For each pair of a token and one of its history."""
    d: int
    """For each pair of tokens of the same piece; 2d = c where only causal pairs are computed."""

    def __post_init__(self) -> None:
        if min(self.a, self.b, self.c, self.d) < 0:
            raise ConfigError("a coefficient of a step's time is negative")

    @classmethod
    def of_seconds(cls, a: float, b: float, c: float, d: float) -> Self:
        """From coefficients in seconds, per token and per pair."""
        return cls(a=fixed_ns(a), b=fixed_ns(b), c=fixed_ns(c), d=fixed_ns(d))

    @property
    def in_ns(self) -> tuple[float, float, float, float]:
        """(a, b, c, d) in nanoseconds."""
        return self.a / _ONE_NS, self.b / _ONE_NS, self.c / _ONE_NS, self.d / _ONE_NS

    def predict_ns(self, length: int, history: int = 0) -> int:
        """Time of a step with one piece, rounded down (Tetris Eq. 1)."""
        return (self.a + length * (self.b + self.c * history + self.d * length)) >> FRACTION_BITS

    def predict_batch_ns(self, rows: Iterable[ChunkSize]) -> int:
        """Time of a step with several pieces, rounded down (LoongServe Eq. 7)."""
        total = self.a
        for length, history in rows:
            total += length * (self.b + self.c * history + self.d * length)
        return total >> FRACTION_BITS

    def longest(self, budget_ns: int, *, history: int = 0, at_most: int) -> int:
        """The longest piece, up to `at_most`, that ends within the budget; 0 if none does.

        Exact: the positive root of the quadratic, floored (Tetris Alg. 3).
        """
        # T >> 48 <= budget means T < (budget + 1) << 48.
        room = ((budget_ns + 1) << FRACTION_BITS) - 1 - self.a
        if room < 0:
            return 0
        linear = self.b + self.c * history
        if self.d:
            root = (isqrt(linear * linear + 4 * self.d * room) - linear) // (2 * self.d)
        elif linear:
            root = room // linear
        else:
            root = at_most
        return min(root, at_most)


@dataclass(frozen=True, kw_only=True)
class LinearDecodeCost:
    """One regime of `DecodeCost`. All three in 2^-48 ns, none negative."""

    a: int
    b: int
    """For each token of context, summed over the batch."""
    c: int
    """For each request of the batch."""

    def __post_init__(self) -> None:
        if min(self.a, self.b, self.c) < 0:
            raise ConfigError("a coefficient of an iteration's time is negative")

    @classmethod
    def of_seconds(cls, a: float, b: float, c: float) -> Self:
        """From coefficients in seconds."""
        return cls(a=fixed_ns(a), b=fixed_ns(b), c=fixed_ns(c))

    def predict_ns(self, batch: int, context: int) -> int:
        """Time of one iteration, rounded down."""
        return (self.a + self.b * context + self.c * batch) >> FRACTION_BITS


@dataclass(frozen=True, kw_only=True)
class DecodeCost:
    """Time of an iteration of decoding on groups of one shape, in two regimes."""

    small: LinearDecodeCost
    """Memory-bound: batches up to `tipping_batch`."""
    large: LinearDecodeCost
    """Compute-bound: larger ones. The same as `small` where no second regime was seen."""
    tipping_batch: int

    def predict_ns(self, batch: int, context: int) -> int:
        """Time of one iteration, rounded down.

        Args:
            batch: requests that draw a token.
            context: tokens that they attend to, summed.
        """
        line = self.small if batch <= self.tipping_batch else self.large
        return line.predict_ns(batch, context)


@dataclass(frozen=True, kw_only=True)
class HybridCost:
    """Time of an iteration that computes pieces of prompts beside rows that decode (Sarathi-Serve).

    A piece is computed by its row's master; masters work side by side. Whatever grows with neither
    pieces nor rows, such as reading the weights, is paid once for both.
    """

    step: StepCost
    """Of a single instance."""
    decode: DecodeCost
    """Of the gang."""

    def predict_fixed(self, chunks: Iterable[Iterable[ChunkSize]], batch: int, context: int) -> int:
        """Time of one iteration, in 2^-48 ns.

        Args:
            pieces: by master.
            batch: rows that decode.
            context: tokens that they attend to, summed.
        """
        step, constant = self.step, 0
        grows = [
            sum(length * (step.b + step.c * past + step.d * length) for length, past in rows)
            for rows in chunks
        ]
        if grows:
            constant = step.a
        total = max(grows, default=0)
        if batch:
            line = self.decode.small if batch <= self.decode.tipping_batch else self.decode.large
            constant = max(constant, line.a)
            total += line.b * context + line.c * batch
        return constant + total

    def predict_ns(self, chunks: Iterable[Iterable[ChunkSize]], batch: int, context: int) -> int:
        """The same in nanoseconds, rounded down."""
        return self.predict_fixed(chunks, batch, context) >> FRACTION_BITS


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """Time of a message between two ranks. Both in 2^-48 ns."""

    a: int
    """Latency."""
    b: int
    """For each byte."""

    @classmethod
    def of_seconds(cls, a: float, b: float) -> Self:
        """From latency and seconds a byte."""
        return cls(a=fixed_ns(a), b=fixed_ns(b))

    def predict_ns(self, size: int) -> int:
        """Time of a message of `size` bytes that has the link to itself, rounded down."""
        return (self.a + self.b * size) >> FRACTION_BITS


@dataclass(frozen=True, kw_only=True, order=True)
class LatencyKey:
    """What coefficients are fitted for; it makes no difference on which servers instances stand."""

    strategy: str
    sp: int
    """Instances of the group."""
    tp: int = 1
    """Ranks of each instance."""


@dataclass(frozen=True, kw_only=True)
class LatencyTable:
    """All coefficients that a scheduler works with; its log names them by `digest`."""

    name: str
    """Where they come from, for people."""
    exact: str
    """Strategy that a caller means who names none."""
    steps: tuple[tuple[LatencyKey, StepCost], ...]
    decode: tuple[tuple[LatencyKey, DecodeCost], ...] = ()
    links: tuple[tuple[str, LinkCost], ...] = ()
    """By kind: "inside" a server, "between" two."""

    def step(self, sp: int, tp: int = 1, strategy: str = "") -> StepCost:
        """Coefficients for groups of `sp` instances, interpolated where that was not measured.

        Raises:
            ConfigError: nothing was measured with this strategy and `tp`.
        """
        key = (sp, tp, strategy)
        if key not in self._found_steps:
            shapes = _sizes(self.steps, strategy or self.exact, tp)
            self._found_steps[key] = StepCost(**_at_size(shapes, sp))
        return self._found_steps[key]

    def iteration(self, sp: int, tp: int = 1) -> DecodeCost:
        """Coefficients for decode groups of `sp` instances, interpolated as `step` does.

        Raises:
            ConfigError: no decoding was measured with this `tp`.
        """
        key = (sp, tp)
        if key not in self._found_iterations:
            sizes = _sizes(self.decode, "decode", tp)
            self._found_iterations[key] = DecodeCost(
                small=LinearDecodeCost(**_at_size({n: it.small for n, it in sizes.items()}, sp)),
                large=LinearDecodeCost(**_at_size({n: it.large for n, it in sizes.items()}, sp)),
                tipping_batch=sizes[_nearest(sizes, sp)].tipping_batch,
            )
        return self._found_iterations[key]

    def link(self, kind: str) -> LinkCost:
        """Of a kind of link.

        Raises:
            ConfigError: none of this kind was measured.
        """
        for name, cost in self.links:
            if name == kind:
                return cost
        raise ConfigError(f"latency table '{self.name}' knows no link '{kind}'")

    @functools.cached_property
    def canonical(self) -> bytes:
        """The coefficients as bytes: equal tables, equal bytes. `parse_table` reads them."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of `canonical`, in hexadecimal."""
        return hashlib.sha256(self.canonical).hexdigest()

    @functools.cached_property
    def _found_steps(self) -> dict[tuple[int, int, str], StepCost]:
        return {}

    @functools.cached_property
    def _found_iterations(self) -> dict[tuple[int, int], DecodeCost]:
        return {}


def parse_table(canonical: bytes) -> LatencyTable:
    """The table whose `canonical` these bytes are.

    Raises:
        ConfigError: they are not those of a table.
    """
    try:
        data = json.loads(canonical)
        return LatencyTable(
            name=str(data["name"]),
            exact=str(data["exact"]),
            steps=tuple((LatencyKey(**key), StepCost(**cost)) for key, cost in data["steps"]),
            decode=tuple((LatencyKey(**key), _parse_decode(cost)) for key, cost in data["decode"]),
            links=tuple((str(kind), LinkCost(**cost)) for kind, cost in data["links"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"not a latency table: {error}") from None


def _parse_decode(data: Mapping[str, Any]) -> DecodeCost:
    return DecodeCost(
        small=LinearDecodeCost(**data["small"]),
        large=LinearDecodeCost(**data["large"]),
        tipping_batch=int(data["tipping_batch"]),
    )


def _sizes(entries: Sequence[tuple[LatencyKey, T]], strategy: str, tp: int) -> dict[int, T]:
    """What was measured with a strategy and a tensor parallelism, by number of instances."""
    sizes = {it.sp: cost for it, cost in entries if (it.strategy, it.tp) == (strategy, tp)}
    if not sizes:
        known = sorted({f"{it.strategy} with tp={it.tp}" for it, _ in entries})
        raise ConfigError(
            f"no latencies of {strategy} with tp={tp}; there are {', '.join(known) or 'none'}"
        )
    return sizes


def _at_size(sizes: Mapping[int, StepCost | LinearDecodeCost], sp: int) -> dict[str, int]:
    """Coefficients at a size that may not have been measured.

    Between two measured sizes every coefficient is affine in 1/sp, so that a prediction is
    monotone between them and lies between theirs. That contains the rule that d * sp is constant,
    which holds within 15 % in Tetris' Table 1 and 1 % in LoongServe's Fig. 2 and 3. Beyond the
    measured sizes it is all there is to go by: b, c and d times sp stay, and a stays.
    """
    if sp in sizes:
        return vars(sizes[sp])
    for low, high in pairwise(sorted(sizes)):
        if low < sp < high:
            return _between(low, sizes[low], high, sizes[high], sp)
    size = _nearest(sizes, sp)
    return {
        name: value if name == "a" else value * size // sp
        for name, value in vars(sizes[size]).items()
    }


def _between(
    low: int,
    first: StepCost | LinearDecodeCost,
    high: int,
    last: StepCost | LinearDecodeCost,
    sp: int,
) -> dict[str, int]:
    ends = vars(last)
    return {
        name: value + (ends[name] - value) * high * (sp - low) // (sp * (high - low))
        for name, value in vars(first).items()
    }


def _nearest(sizes: Iterable[int], sp: int) -> int:
    return min(sizes, key=lambda size: (abs(size - sp), size))
