"""Latency models predict times of steps, decode iterations and messages in integer arithmetic.

Tetris' Eq. 1 and LoongServe's Eq. 7 are one formula. A step of chunks with lengths L and histories
C takes::

    T = a + b * sum(L) + c * sum(C * L) + d * sum(L^2)

with coefficients for each group shape: Tetris fits one chunk per SP size, LoongServe a batch
without history per (SP, TP). A decode iteration takes `A + B * sum(context) + C * batch`, with
separate coefficients where it is memory-bound and where it is compute-bound.

All coefficients are integers, in 2^-48 ns. So predictions are the same on every machine, comparing
two needs no tolerance, and the inverse is exact. A million tokens lose less than a nanosecond.
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
"""Length and history of a chunk, in tokens."""


def fixed_ns(seconds: float) -> int:
    """Convert a coefficient in seconds to the fixed-point integer of the classes below."""
    return round(seconds * 1e9 * _ONE_NS)


def in_seconds(fixed: int) -> float:
    """Convert a fixed-point coefficient to seconds."""
    return fixed / _ONE_NS / 1e9


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Time T(L, C) of a step on groups of one shape; coefficients in 2^-48 ns, none negative."""

    a: int
    """Constant time of a step."""
    b: int
    """Time for each token: projections and MLP."""
    c: int
    """Time for each pair of a token and a token of its history."""
    d: int
    """Time for each pair of tokens of one chunk; 2d = c where only causal pairs are computed."""

    def __post_init__(self) -> None:
        if min(self.a, self.b, self.c, self.d) < 0:
            raise ConfigError(f"coefficients of a step must not be negative, as in {self}")

    @classmethod
    def of_seconds(cls, a: float, b: float, c: float, d: float) -> Self:
        """Convert coefficients in seconds, per token and per pair."""
        return cls(a=fixed_ns(a), b=fixed_ns(b), c=fixed_ns(c), d=fixed_ns(d))

    @property
    def in_ns(self) -> tuple[float, float, float, float]:
        """Coefficients (a, b, c, d) in nanoseconds."""
        return self.a / _ONE_NS, self.b / _ONE_NS, self.c / _ONE_NS, self.d / _ONE_NS

    def predict_ns(self, length: int, history: int = 0) -> int:
        """Predict a step with one chunk, rounded down (Tetris Eq. 1)."""
        return (self.a + length * (self.b + self.c * history + self.d * length)) >> FRACTION_BITS

    def predict_batch_ns(self, chunks: Iterable[ChunkSize]) -> int:
        """Predict a step with several chunks, rounded down (LoongServe Eq. 7)."""
        total = self.a
        for length, history in chunks:
            total += length * (self.b + self.c * history + self.d * length)
        return total >> FRACTION_BITS

    def longest(self, budget_ns: int, *, history: int = 0, at_most: int) -> int:
        """Return the longest chunk, up to `at_most`, that ends within the budget; 0 if none does.

        The result is exact: the floor of the positive root of the quadratic (Tetris Alg. 3).
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
    """One regime of `DecodeCost`; coefficients in 2^-48 ns, none negative."""

    a: int
    """Constant time of an iteration."""
    b: int
    """Time for each token of context, summed over the batch."""
    c: int
    """Time for each request of the batch."""

    def __post_init__(self) -> None:
        if min(self.a, self.b, self.c) < 0:
            raise ConfigError(f"coefficients of an iteration must not be negative, as in {self}")

    @classmethod
    def of_seconds(cls, a: float, b: float, c: float) -> Self:
        """Convert coefficients in seconds."""
        return cls(a=fixed_ns(a), b=fixed_ns(b), c=fixed_ns(c))

    def predict_fixed(self, batch: int, context: int) -> int:
        """Predict one iteration, in 2^-48 ns."""
        return self.a + self.b * context + self.c * batch

    def predict_ns(self, batch: int, context: int) -> int:
        """Predict one iteration, rounded down."""
        return self.predict_fixed(batch, context) >> FRACTION_BITS


@dataclass(frozen=True, kw_only=True)
class DecodeCost:
    """Time of a decode iteration on groups of one shape, in two regimes."""

    small: LinearDecodeCost
    """Memory-bound regime: batches up to `tipping_batch`."""
    large: LinearDecodeCost
    """Compute-bound regime: larger batches. Equal to `small` if no second regime was seen."""
    tipping_batch: int

    def regime(self, batch: int) -> LinearDecodeCost:
        """Return the coefficients for a batch of this size."""
        return self.small if batch <= self.tipping_batch else self.large

    def predict_fixed(self, batch: int, context: int) -> int:
        """Predict one iteration, in 2^-48 ns.

        Args:
            batch: requests that sample a token.
            context: tokens that they attend to, summed.
        """
        return self.regime(batch).predict_fixed(batch, context)

    def predict_ns(self, batch: int, context: int) -> int:
        """Predict one iteration, rounded down."""
        return self.predict_fixed(batch, context) >> FRACTION_BITS


@dataclass(frozen=True, kw_only=True)
class HybridCost:
    """Time of an iteration with piggybacked prefill: chunks beside a batch (Sarathi-Serve).

    The master of a sequence computes its chunk; masters work in parallel. Constant costs, such as
    reading the weights, are paid once for both.
    """

    step: StepCost
    """Cost of a step on a single instance."""
    decode: DecodeCost
    """Cost of an iteration of the gang."""

    def predict_fixed(self, chunks: Iterable[Iterable[ChunkSize]], batch: int, context: int) -> int:
        """Predict one iteration, in 2^-48 ns.

        Args:
            chunks: chunks of each master.
            batch: sequences that decode.
            context: tokens that they attend to, summed.
        """
        step, constant = self.step, 0
        grows = [
            sum(length * (step.b + step.c * past + step.d * length) for length, past in of_master)
            for of_master in chunks
        ]
        if grows:
            constant = step.a
        total = max(grows, default=0)
        if batch:
            cost = self.decode.regime(batch)
            constant = max(constant, cost.a)
            total += cost.b * context + cost.c * batch
        return constant + total

    def predict_ns(self, chunks: Iterable[Iterable[ChunkSize]], batch: int, context: int) -> int:
        """Predict one iteration in nanoseconds, rounded down."""
        return self.predict_fixed(chunks, batch, context) >> FRACTION_BITS


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """Time of a message between two ranks; coefficients in 2^-48 ns."""

    a: int
    """Latency of the link."""
    b: int
    """Time for each byte."""

    @classmethod
    def of_seconds(cls, a: float, b: float) -> Self:
        """Convert latency and seconds per byte."""
        return cls(a=fixed_ns(a), b=fixed_ns(b))

    def predict_ns(self, size: int) -> int:
        """Predict a message of `size` bytes without competing traffic, rounded down."""
        return (self.a + self.b * size) >> FRACTION_BITS


@dataclass(frozen=True, kw_only=True, order=True)
class LatencyKey:
    """Strategy and group size of a set of coefficients; the servers make no difference."""

    strategy: str
    sp: int
    """Number of instances of the group."""
    tp: int = 1
    """Ranks per instance."""


@dataclass(frozen=True, kw_only=True)
class LatencyTable:
    """All coefficients of a scheduler; its log names them by `digest`."""

    name: str
    """Origin of the coefficients, for people."""
    exact: str
    """Strategy of callers that name none."""
    steps: tuple[tuple[LatencyKey, StepCost], ...]
    decode: tuple[tuple[LatencyKey, DecodeCost], ...] = ()
    links: tuple[tuple[str, LinkCost], ...] = ()
    """Links by kind: "inside" a server, "between" two of one rack, and between "racks"."""

    def step(self, sp: int, tp: int = 1, strategy: str = "") -> StepCost:
        """Return the coefficients for groups of `sp` instances, interpolated if necessary.

        Raises:
            ConfigError: nothing was measured with this strategy and `tp`.
        """
        key = (sp, tp, strategy)
        if key not in self._found_steps:
            shapes = _sizes(self.steps, strategy or self.exact, tp)
            self._found_steps[key] = StepCost(**_at_size(shapes, sp))
        return self._found_steps[key]

    def iteration(self, sp: int, tp: int = 1) -> DecodeCost:
        """Return the coefficients for decode groups of `sp` instances, interpolated if necessary.

        Raises:
            ConfigError: no decoding was measured with this `tp`.
        """
        key = (sp, tp)
        if key not in self._found_iterations:
            sizes = _sizes(self.decode, "decode", tp)
            self._found_iterations[key] = DecodeCost(
                small=LinearDecodeCost(
                    **_at_size({size: cost.small for size, cost in sizes.items()}, sp)
                ),
                large=LinearDecodeCost(
                    **_at_size({size: cost.large for size, cost in sizes.items()}, sp)
                ),
                tipping_batch=sizes[_nearest(sizes, sp)].tipping_batch,
            )
        return self._found_iterations[key]

    def link(self, kind: str) -> LinkCost:
        """Return the coefficients of a kind of link.

        Raises:
            ConfigError: no link of this kind was measured.
        """
        for name, cost in self.links:
            if name == kind:
                return cost
        known = ", ".join(name for name, _ in self.links) or "none"
        raise ConfigError(
            f"latency table '{self.name}' has no link '{kind}'; measured links: {known}"
        )

    @functools.cached_property
    def canonical(self) -> bytes:
        """Coefficients as bytes for `parse_table`, the same for equal tables."""
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
    """Read a table from the bytes of `LatencyTable.canonical`.

    Raises:
        ConfigError: the bytes are not a latency table.
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
    """Return the measured entries of a strategy and tensor parallelism, by number of instances."""
    sizes = {key.sp: cost for key, cost in entries if (key.strategy, key.tp) == (strategy, tp)}
    if not sizes:
        known = sorted({f"{key.strategy} with tp={key.tp}" for key, _ in entries})
        raise ConfigError(
            f"no latencies of {strategy} with tp={tp}; measured: {', '.join(known) or 'none'}"
        )
    return sizes


def _at_size(sizes: Mapping[int, StepCost | LinearDecodeCost], sp: int) -> dict[str, int]:
    """Return the coefficients at a size, interpolated or extrapolated if it was not measured."""
    if sp in sizes:
        return vars(sizes[sp])
    for low, high in pairwise(sorted(sizes)):
        if low < sp < high:
            return _between(low, sizes[low], high, sizes[high], sp)
    size = _nearest(sizes, sp)
    # Extrapolate by the rule that d * sp is constant, which holds within 15 % in Tetris' Table 1
    # and 1 % in LoongServe's Fig. 2 and 3. b and c follow it too; a stays.
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
    """Interpolate between two measured sizes."""
    # Affine in 1/sp, so that predictions are monotone between the two sizes.
    ends = vars(last)
    return {
        name: value + (ends[name] - value) * high * (sp - low) // (sp * (high - low))
        for name, value in vars(first).items()
    }


def _nearest(sizes: Iterable[int], sp: int) -> int:
    return min(sizes, key=lambda size: (abs(size - sp), size))
