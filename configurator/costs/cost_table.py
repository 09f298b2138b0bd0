"""What a step costs on a group, and which strategy makes it cheapest there.

Loss of accuracy and time both depend on the group, so a policy that compares groups compares each
at its own cheapest allowed strategy. A table answers: latency models for the times, and for every
row of classes, group shape and bucket of lengths the options that there are, with the loss of each.
Classes of one row differ in their bounds, which are applied when it is looked up: a bound on TTFT
to what is left of it when the step will start. Behind history all attention is exact, and by which
strategy depends on both lengths. A bucket that nobody has filled in is *cold*: it answers what is
known of such lengths without history, or else what its class begins with, and is remembered, so
that the configurator can fill it in the background; the next table is put in force by its digest.

A cost table as bytes, as it lies beside the log of a live router under its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from csps.configurator.costs.latency import LatencyTable, parse_table
from csps.protocols.attention.plan import (
    AUTO,
    BOUNDED,
    RING_CLASSES,
    Objective,
    Ring,
    parse_class,
    parse_option,
)
from csps.protocols.attention.ring_choice import RingRules, parse_rules
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import GroupShape

EXACT = "exact"
"""The class of requests that allow exact attention only."""
EXACT_STRATEGY = "ulysses"
QUANTUM_NS = 1_000
"""Predictions are multiples of it, so that noise in their last digits decides nothing."""
MILLION = 1_000_000
WHOLE_PERMILLE = 1_000
LARGEST_BATCH = 1_024
"""Decode batches up to this size are compared with one another."""
MAX_CACHE_MISSES = 4_096
"""Cold buckets that are remembered at a time."""


class Bucket(NamedTuple):
    """Requests for which there are the same options on groups of one shape."""

    row: str
    """Of classes (`plans.RequestClass.row`)."""
    shape: GroupShape
    exponent: int
    """Lengths in [2^exponent, 2^(exponent + 1))."""
    history_bits: int = 0
    """Bits of the history before them, which is in [2^(kept - 1), 2^kept) tokens; 0 has none."""


class Allowed(NamedTuple):
    """An option of a bucket."""

    strategy: str
    """With its settings (`protocols.options`)."""
    permille: int = WHOLE_PERMILLE
    """Its time in thousandths of what exact attention takes that is not cut; 1000 of an option
    without settings: what the latency model says of it."""
    loss_ppm: int = 0
    """Predicted loss of accuracy, in millionths."""


class BestOption(msgspec.Struct, frozen=True, order=True, gc=False):
    """The best option within the bounds, or what comes nearest to keeping them."""

    time_ns: int
    strategy: str
    """With its settings (`protocols.options`)."""
    cache_miss: bool = False
    """Nobody has filled in the bucket."""


class StepLatency(Protocol):
    """Time of a step on groups of one shape (Tetris Eq. 1)."""

    @property
    def in_ns(self) -> tuple[float, float, float, float]:
        """(a, b, c, d) in nanoseconds: a + b L + c C L + d L^2."""
        ...

    def predict_ns(self, length: int, history: int = 0) -> int:
        """Of a step with one piece."""
        ...


class IterationLatency(Protocol):
    """Time of a decode iteration on groups of one shape."""

    def predict_ns(self, batch: int, context: int) -> int:
        """Of `batch` requests that attend to `context` tokens together."""
        ...


class LinkLatency(Protocol):
    """Time of a message over a kind of link."""

    def predict_ns(self, size: int) -> int:
        """Of `size` bytes."""
        ...


class Latencies(Protocol):
    """Latency models of one machine and model (`latency.LatencyTable`)."""

    @property
    def digest(self) -> str:
        """Equal models, equal digests."""
        ...

    def step(self, sp: int, tp: int = 1, strategy: str = "") -> StepLatency:
        """Of groups of `sp` instances; raises ConfigError for a strategy not measured."""
        ...

    def iteration(self, sp: int, tp: int = 1) -> IterationLatency:
        """Of decode groups of `sp` instances; raises ConfigError if not measured."""
        ...

    def link(self, kind: str) -> LinkLatency:
        """Of a kind of link; raises ConfigError if not measured."""
        ...


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Latency models and strategies; its digest names it in logs and in `Calibrated`."""

    latencies: Latencies
    buckets: Mapping[Bucket, tuple[Allowed, ...]] = field(default_factory=dict)
    rings: RingRules | None = None
    """What chooses between rings; without it pass-KV, which all rules take without history."""
    overhead_ns: int = 0
    """What of TTFT is neither waiting nor a step, as measured: bounds leave room for it."""

    def best(
        self, cls: str, shape: GroupShape, history: int, length: int, waited_ns: int = 0
    ) -> BestOption:
        """The best that a class allows for `length` tokens after `history`.

        Args:
            waited_ns: of the time to the first token, before a step could start.
        """
        asked = RING_CLASSES.get(cls)
        if asked is not None:
            ring = Allowed(self.ring(shape, history, length) if asked == "ring" else asked)
            return BestOption(self.time_ns(ring, shape, history, length), ring.strategy)
        row, objective = row_of(cls, history)
        allowed, cold = self._allowed(row, shape, history, length)
        if len(allowed) == 1:
            (only,) = allowed
            return BestOption(self.time_ns(only, shape, history, length), only.strategy, cold)
        timed = [(self.time_ns(it, shape, history, length), it) for it in allowed]
        time_ns, found = self._within(timed, objective, waited_ns)
        return BestOption(time_ns, found.strategy, cold)

    def _within(
        self, timed: list[tuple[int, Allowed]], objective: Objective | None, waited_ns: int
    ) -> tuple[int, Allowed]:
        """Bounds on the loss are kept before those on TTFT."""
        if objective is None:
            return min(timed)
        most_ppm = objective.most_loss * MILLION
        accurate = [it for it in timed if it[1].loss_ppm <= most_ppm]
        if not accurate:
            return min(timed, key=_by_loss)
        if objective.kind == "ttft":
            return min(accurate)
        if objective.max_ttft_ms is None:
            return min(accurate, key=_by_loss)
        left_ns = objective.max_ttft_ms * MILLION - waited_ns - self.overhead_ns
        fast = [it for it in accurate if it[0] <= left_ns]
        return min(fast, key=_by_loss) if fast else min(accurate)

    def ring(self, shape: GroupShape, history: int, length: int) -> Ring:
        """The variant of the ring for `length` tokens after `history`."""
        if self.rings is None or shape.sp == 1:
            return "ring_kv"
        return self.rings.choose(shape, length, history)

    def iteration_ns(self, sp: int, tp: int, batch: int, context: int) -> int:
        """Time of a decode iteration."""
        try:
            times = self.latencies.iteration(sp, tp)
        except ConfigError:  # nobody has measured instances of so many ranks
            times = self.latencies.iteration(sp * tp, 1)
        return _quantised(times.predict_ns(batch, context))

    def rows_alone(self, tp: int) -> int:
        """Rows that an instance draws at least as fast as two of them do, whatever they attend to:
        beyond, a group that is scaled up is faster (LoongServe §5.4). `LARGEST_BATCH` where two
        are nowhere faster below."""
        found = self._rows_alone.get(tp)
        if found is None:
            batches = range(1, LARGEST_BATCH + 1)
            found = next(
                (batch - 1 for batch in batches if self._faster_as_two(tp, batch)), LARGEST_BATCH
            )
            self._rows_alone[tp] = found
        return found

    def _faster_as_two(self, tp: int, batch: int) -> bool:
        return self.iteration_ns(2, tp, batch, 0) < self.iteration_ns(1, tp, batch, 0)

    def transfer_ns(self, kind: str, size: int) -> int | None:
        """Time of a message over a kind of link; None if nobody has measured it."""
        try:
            return _quantised(self.latencies.link(kind).predict_ns(size))
        except ConfigError:
            return None

    def _allowed(
        self, row: str, shape: GroupShape, history: int, length: int
    ) -> tuple[tuple[Allowed, ...], bool]:
        """What there is, and whether the bucket is cold."""
        if row == EXACT:
            return _EXACT, False
        bucket = Bucket(row, shape, length.bit_length() - 1, history.bit_length())
        found = self.buckets.get(bucket)
        if found is not None:
            return found, False
        return self.buckets.get(bucket._replace(history_bits=0)) or (
            Allowed(default_strategy(row)),
        ), True

    def time_ns(self, allowed: Allowed, shape: GroupShape, history: int, length: int) -> int:
        """Of an option."""
        strategy, settings = parse_option(allowed.strategy)
        by_name = settings is None and allowed.permille == WHOLE_PERMILLE
        times = self._known(shape, strategy if by_name else EXACT_STRATEGY)
        return _quantised(times.predict_ns(length, history) * allowed.permille // 1000)

    def exact(self, sp: int, tp: int, strategy: str = EXACT_STRATEGY) -> StepLatency:
        """Times of exact attention on groups of `sp` instances, wherever they stand; of any that
        was measured, if it was not by this strategy."""
        return self._known(GroupShape((sp,), tp), strategy)

    def _known(self, shape: GroupShape, strategy: str) -> StepLatency:
        key = (shape, strategy)
        times = self._found.get(key)
        if times is None:
            times = self._found[key] = self._times(shape, strategy)
        return times

    def _times(self, shape: GroupShape, strategy: str) -> StepLatency:
        """Of the nearest that was measured: exact attention in the place of a strategy, instances
        of one rank in the place of those of several."""
        for sp, tp, name in ((shape.sp, shape.tp, strategy), (shape.sp, shape.tp, "")):
            try:
                return self.latencies.step(sp, tp, name)
            except ConfigError:
                continue
        return self.latencies.step(shape.sp * shape.tp, 1)

    @cached_property
    def _rows_alone(self) -> dict[int, int]:
        return {}

    @cached_property
    def _found(self) -> dict[tuple[GroupShape, str], StepLatency]:
        return {}

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hexadecimal."""
        lines = sorted(f"{bucket} {allowed}" for bucket, allowed in self.buckets.items())
        if self.rings is not None:
            lines.append(self.rings.digest)
        if self.overhead_ns:
            lines.append(str(self.overhead_ns))
        text = "\n".join([self.latencies.digest, *lines])
        return hashlib.sha256(text.encode()).hexdigest()


class Costs:
    """The table in force.

    Args:
        table: to begin with.
        store: tables by digest. A digest is looked up there when `Calibrated` names it.
    """

    def __init__(self, table: CostTable, store: Mapping[str, CostTable] | None = None) -> None:
        self.table = table
        self._store = store if store is not None else {}
        self._misses: dict[Bucket, None] = {}

    def best(
        self, cls: str, shape: GroupShape, history: int, length: int, waited_ns: int = 0
    ) -> BestOption:
        """`CostTable.best`; a cold bucket is remembered."""
        choice = self.table.best(cls, shape, history, length, waited_ns)
        if choice.cache_miss and len(self._misses) < MAX_CACHE_MISSES:
            self._misses[bucket_of(cls, shape, history, length)] = None
        return choice

    def iteration_ns(self, sp: int, tp: int, batch: int, context: int) -> int:
        """`CostTable.iteration_ns`."""
        return self.table.iteration_ns(sp, tp, batch, context)

    def rows_alone(self, tp: int) -> int:
        """`CostTable.rows_alone`."""
        return self.table.rows_alone(tp)

    def transfer_ns(self, kind: str, size: int) -> int | None:
        """`CostTable.transfer_ns`."""
        return self.table.transfer_ns(kind, size)

    def exact(self, sp: int, tp: int, strategy: str = EXACT_STRATEGY) -> StepLatency:
        """`CostTable.exact`."""
        return self.table.exact(sp, tp, strategy)

    def use(self, digest: str) -> None:
        """Put another table of the store in force."""
        self.table = self._store[digest]

    def cache_misses(self) -> list[Bucket]:
        """Buckets that were asked for in vain since the last call."""
        asked, self._misses = list(self._misses), {}
        return asked


@dataclass(frozen=True, kw_only=True)
class Unmeasured:
    """Latencies for a server that has measured none: the work of a token, shared by the group."""

    step_ns: int = 5_000_000
    token_ns: int = 100_000
    pair_ns: int = 10
    """For each pair of tokens."""
    iteration_time_ns: int = 20_000_000

    @property
    def digest(self) -> str:
        """Its own notation."""
        return repr(self)

    def step(self, sp: int, tp: int = 1, strategy: str = "") -> StepLatency:
        """The same for all strategies."""
        return _UnmeasuredStep(self, sp * tp)

    def iteration(self, sp: int, tp: int = 1) -> IterationLatency:
        """The same for all groups."""
        return _UnmeasuredIteration(self.iteration_time_ns)

    def link(self, kind: str) -> LinkLatency:
        """None was measured."""
        raise ConfigError(f"no link '{kind}' was measured")


class _UnmeasuredStep(NamedTuple):
    of: Unmeasured
    ranks: int

    @property
    def in_ns(self) -> tuple[float, float, float, float]:
        it, ranks = self.of, self.ranks
        pair_ns = it.pair_ns / ranks
        return float(it.step_ns), it.token_ns / ranks, pair_ns, pair_ns / 2

    def predict_ns(self, length: int, history: int = 0) -> int:
        it = self.of
        pairs = length * (length // 2 + history)
        return it.step_ns + (length * it.token_ns + pairs * it.pair_ns) // self.ranks


class _UnmeasuredIteration(NamedTuple):
    time_ns: int

    def predict_ns(self, batch: int, context: int) -> int:
        return self.time_ns


_EXACT = (Allowed(EXACT_STRATEGY),)


def row_of(cls: str, history: int) -> tuple[str, Objective | None]:
    """The row that a class is looked up in, and what it wants of its options."""
    row, objective = parse_class(cls)
    return (AUTO, None) if row == BOUNDED and history else (row, objective)


def bucket_of(cls: str, shape: GroupShape, history: int, length: int) -> Bucket:
    """Where a class is looked up for `length` tokens after `history`."""
    row, _ = row_of(cls, history)
    return Bucket(row, shape, length.bit_length() - 1, history.bit_length())


def default_strategy(row: str) -> str:
    """What requests of a row run by while nobody has filled in their bucket: what the row's name
    begins with, or exact attention.

    >>> cold_strategy("csa/5e1f"), cold_strategy("auto")
    ('csa', 'ulysses')
    """
    strategy, slash, _ = row.partition("/")
    return strategy if slash else EXACT_STRATEGY


def _by_loss(timed: tuple[int, Allowed]) -> tuple[int, bool, int, str]:
    """Of those that are predicted to lose as little, what is exact for certain."""
    time_ns, allowed = timed
    csa = parse_option(allowed.strategy).csa
    drops = csa is not None and not csa.lossless
    return allowed.loss_ppm, drops, time_ns, allowed.strategy


def _quantised(time_ns: int) -> int:
    return (time_ns + QUANTUM_NS // 2) // QUANTUM_NS * QUANTUM_NS


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    latencies: bytes
    buckets: list[tuple[Bucket, tuple[Allowed, ...]]]
    rings: bytes | None = None
    overhead_ns: int = 0


def stored(table: CostTable) -> bytes:
    """What `read_stored` reads."""
    assert isinstance(table.latencies, LatencyTable), "latencies that cannot be stored"
    return msgspec.msgpack.encode(
        _Stored(
            table.latencies.canonical,
            sorted(table.buckets.items()),
            None if table.rings is None else table.rings.canonical,
            table.overhead_ns,
        )
    )


def read_stored(path: Path) -> CostTable:
    """The table of a file.

    Raises:
        ConfigError: there is no such file, or it is none.
    """
    found = _read(path)
    return CostTable(
        latencies=parse_table(found.latencies),
        buckets=dict(found.buckets),
        rings=None if found.rings is None else parse_rules(found.rings),
        overhead_ns=found.overhead_ns,
    )


def read_latencies(path: Path) -> LatencyTable:
    """The latencies of a file's table.

    Raises:
        ConfigError: as above.
    """
    return parse_table(_read(path).latencies)


def _read(path: Path) -> _Stored:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=_Stored)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError:
        raise ConfigError(f"{path} is no table of a router's log") from None
