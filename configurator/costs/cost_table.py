"""Cost tables predict a step's time on a group and choose the cheapest strategy allowed there.

Both time and accuracy loss depend on the group, so a policy compares every group at its own
cheapest strategy. A `CostTable` combines latency models with options: for each row of request
classes, group shape and range of lengths, the available strategies and their losses. The classes
of a row differ only in their bounds, which a look-up applies.

A look-up in a bucket without options is a cache miss. It falls back to the bucket without history,
then to the default of the class. `Costs` remembers the miss, so that the configurator can fill the
bucket in the background; the next table takes effect by its digest. `stored` and `read_stored`
convert a table to and from the file beside a router's decision log.
"""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Protocol

import msgspec

from csps.configurator.costs.latency import LatencyTable, parse_table
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import (
    AUTO,
    BOUNDED,
    KNOWN_OPTIONS,
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
"""Class of requests that allow exact attention only."""
EXACT_STRATEGY = "ulysses"
QUANTUM_NS = 1_000
"""Unit of all predictions, so that noise in their last digits decides nothing."""
MILLION = 1_000_000
WHOLE_PERMILLE = 1_000
ERROR_PERMILLE = 200
"""Relative error of predicted steps, in thousandths, before it was measured."""
LARGEST_BATCH = 1_024
"""Largest decode batch that `rows_alone` compares."""
MAX_CACHE_MISSES = 4_096
"""Most cache misses remembered at a time."""


class Bucket(NamedTuple):
    """A range of lengths whose requests have the same options on groups of one shape."""

    row: str
    """Row of request classes (`RequestClass.row`)."""
    shape: GroupShape
    exponent: int
    """Exponent of the lengths, which are in [2^exponent, 2^(exponent + 1))."""
    history_bits: int = 0
    """Bits of the history, which is in [2^(history_bits - 1), 2^history_bits) tokens; 0: none."""


class Allowed(NamedTuple):
    """An option of a bucket."""

    strategy: str
    """Strategy with its settings (`protocols/attention/plan.py`)."""
    permille: int = WHOLE_PERMILLE
    """Time in thousandths of exact attention. 1000 without settings: the latency model of the
    strategy itself gives the time."""
    loss_ppm: int = 0
    """Predicted loss of accuracy, in millionths."""


class BestOption(msgspec.Struct, frozen=True, order=True, gc=False):
    """The best option within the bounds, or the closest one if none is."""

    time_ns: int
    strategy: str
    """Strategy with its settings (`protocols/attention/plan.py`)."""
    cache_miss: bool = False
    """True if the table has no options for the bucket."""


class StepLatency(Protocol):
    """Time of a step on groups of one shape (Tetris Eq. 1)."""

    @property
    def in_ns(self) -> tuple[float, float, float, float]:
        """Coefficients (a, b, c, d) in nanoseconds: a + b L + c C L + d L^2."""
        ...

    def predict_ns(self, length: int, history: int = 0) -> int:
        """Predict a step with one chunk."""
        ...


class IterationLatency(Protocol):
    """Time of a decode iteration on groups of one shape."""

    def predict_ns(self, batch: int, context: int) -> int:
        """Predict an iteration of `batch` requests that attend to `context` tokens in total."""
        ...


class LinkLatency(Protocol):
    """Time of a message over a kind of link."""

    def predict_ns(self, size: int) -> int:
        """Predict a message of `size` bytes."""
        ...


class Latencies(Protocol):
    """Latency models of one machine and model (`latency.LatencyTable`)."""

    @property
    def digest(self) -> str:
        """Digest, the same for equal models."""
        ...

    def step(self, sp: int, tp: int = 1, strategy: str = "") -> StepLatency:
        """Return the model of groups of `sp` instances, or raise ConfigError if not measured."""
        ...

    def iteration(self, sp: int, tp: int = 1) -> IterationLatency:
        """Return the model of decode groups, or raise ConfigError if not measured."""
        ...

    def link(self, kind: str) -> LinkLatency:
        """Return the model of a kind of link, or raise ConfigError if not measured."""
        ...


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Latency models and options; logs and `CostTableUpdated` name a table by its digest."""

    latencies: Latencies
    buckets: Mapping[Bucket, tuple[Allowed, ...]] = field(default_factory=dict)
    rings: RingRules | None = None
    """Rules that choose between the rings; None: always `ring_kv`."""
    overhead_ns: int = 0
    """Measured part of TTFT that is neither waiting nor a step; bounds leave time for it."""
    error_permille: int = ERROR_PERMILLE
    """Relative error of predicted steps: a bound on TTFT leaves so much of a step's time free."""

    def best(
        self, cls: str, shape: GroupShape, history: int, length: int, waited_ns: int = 0
    ) -> BestOption:
        """Return the best option of a class for `length` tokens after `history`.

        Args:
            waited_ns: time since submission at which the step could start. A bound on TTFT applies
                to the remaining time.
        """
        asked = RING_CLASSES.get(cls)
        if asked is not None:
            ring = Allowed(self.ring(shape, history, length) if asked == "ring" else asked)
            return BestOption(self.time_ns(ring, shape, history, length), ring.strategy)
        row, objective = row_of(cls, history)
        options, missed = self._options(row, shape, history, length)
        if len(options) == 1:
            (only,) = options
            return BestOption(self.time_ns(only, shape, history, length), only.strategy, missed)
        timed = [(self.time_ns(option, shape, history, length), option) for option in options]
        time_ns, chosen = self._within(timed, objective, waited_ns)
        return BestOption(time_ns, chosen.strategy, missed)

    def _within(
        self, timed: list[tuple[int, Allowed]], objective: Objective | None, waited_ns: int
    ) -> tuple[int, Allowed]:
        """Choose within the bounds of an objective; the bound on loss precedes that on TTFT."""
        if objective is None:
            return min(timed)
        most_ppm = objective.most_loss * MILLION
        accurate = [(time_ns, option) for time_ns, option in timed if option.loss_ppm <= most_ppm]
        if not accurate:
            return min(timed, key=_by_loss)
        if objective.kind == "ttft":
            return min(accurate)
        if objective.max_ttft_ms is None:
            return min(accurate, key=_by_loss)
        left_ns = objective.max_ttft_ms * MILLION - waited_ns - self.overhead_ns
        # Steps take longer than predicted by at most the error, and then are still in time.
        most_ns = 1000 * left_ns / (1000 + self.error_permille)
        fast = [(time_ns, option) for time_ns, option in accurate if time_ns <= most_ns]
        return min(fast, key=_by_loss) if fast else min(accurate)

    def ring(self, shape: GroupShape, history: int, length: int) -> Ring:
        """Return the ring for `length` tokens after `history`."""
        if self.rings is None or shape.sp == 1:
            return "ring_kv"
        return self.rings.choose(shape, length, history)

    def iteration_ns(self, sp: int, tp: int, batch: int, context: int) -> int:
        """Predict a decode iteration."""
        try:
            times = self.latencies.iteration(sp, tp)
        except ConfigError:
            # This tensor parallelism was not measured. As many instances of one rank are closer
            # than no prediction.
            times = self.latencies.iteration(sp * tp, 1)
        return _quantised(times.predict_ns(batch, context))

    def rows_alone(self, tp: int) -> int:
        """Return the most sequences that one instance samples at least as fast as two.

        Larger batches are faster on a group that is scaled up (LoongServe §5.4). `LARGEST_BATCH`
        if two instances are never faster below it.
        """
        most = self._rows_alone.get(tp)
        if most is None:
            batches = range(1, LARGEST_BATCH + 1)
            most = next(
                (batch - 1 for batch in batches if self._faster_as_two(tp, batch)), LARGEST_BATCH
            )
            self._rows_alone[tp] = most
        return most

    def _faster_as_two(self, tp: int, batch: int) -> bool:
        return self.iteration_ns(2, tp, batch, 0) < self.iteration_ns(1, tp, batch, 0)

    def transfer_ns(self, kind: str, size: int) -> int | None:
        """Predict a message over a kind of link; None if that kind was not measured."""
        try:
            return _quantised(self.latencies.link(kind).predict_ns(size))
        except ConfigError:
            return None

    def _options(
        self, row: str, shape: GroupShape, history: int, length: int
    ) -> tuple[tuple[Allowed, ...], bool]:
        """Return the options of a bucket, and True for a cache miss."""
        if row == EXACT:
            return _EXACT, False
        bucket = Bucket(row, shape, length.bit_length() - 1, history.bit_length())
        options = self.buckets.get(bucket)
        if options is not None:
            return options, False
        return self.buckets.get(bucket._replace(history_bits=0)) or (
            Allowed(default_strategy(row)),
        ), True

    def time_ns(self, allowed: Allowed, shape: GroupShape, history: int, length: int) -> int:
        """Predict a step that runs by an option."""
        strategy, settings = parse_option(allowed.strategy)
        by_name = settings is None and allowed.permille == WHOLE_PERMILLE
        times = self._cached_times(shape, strategy if by_name else EXACT_STRATEGY)
        return _quantised(times.predict_ns(length, history) * allowed.permille // 1000)

    def exact(self, sp: int, tp: int, strategy: str = EXACT_STRATEGY) -> StepLatency:
        """Return the latency of exact attention on `sp` instances, wherever they are.

        If `strategy` was not measured, the latency of another exact strategy.
        """
        return self._cached_times(GroupShape((sp,), tp), strategy)

    def _cached_times(self, shape: GroupShape, strategy: str) -> StepLatency:
        key = (shape, strategy)
        times = self._times_by_shape.get(key)
        if times is None:
            times = self._times_by_shape[key] = self._times(shape, strategy)
        return times

    def _times(self, shape: GroupShape, strategy: str) -> StepLatency:
        """Return the closest measured latency.

        Exact attention replaces an unmeasured strategy, instances of one rank replace unmeasured
        tensor parallelism.
        """
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
    def _times_by_shape(self) -> dict[tuple[GroupShape, str], StepLatency]:
        return {}

    def updated(
        self,
        buckets: Mapping[Bucket, tuple[Allowed, ...]],
        *,
        without: Iterable[Bucket] = (),
        latencies: Latencies | None = None,
        overhead_ns: int | None = None,
        error_permille: int | None = None,
    ) -> CostTable:
        """Return a table with some changes, whose digest costs little more than they do.

        Args:
            buckets: new options of these buckets.
            without: buckets to leave out.
            latencies, overhead_ns, error_permille: replacements; None: as they are.
        """
        found, lines = dict(self.buckets), list(self._lines)
        for bucket in (*without, *buckets):
            if (before := found.pop(bucket, None)) is not None:
                del lines[bisect_left(lines, _line(bucket, before))]
        for bucket, allowed in buckets.items():
            found[bucket] = allowed
            insort(lines, _line(bucket, allowed))
        made = CostTable(
            latencies=latencies or self.latencies,
            buckets=found,
            rings=self.rings,
            overhead_ns=self.overhead_ns if overhead_ns is None else overhead_ns,
            error_permille=self.error_permille if error_permille is None else error_permille,
        )
        vars(made)["_lines"] = lines  # what the property would compute
        return made

    @cached_property
    def _lines(self) -> list[bytes]:
        """Lines of all buckets in order. Formatting them is most of the work of a digest: 40 ms for
        ten thousand."""
        return sorted(itertools.starmap(_line, self.buckets.items()))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the table's contents, in hexadecimal."""
        lines = [self.latencies.digest.encode(), *self._lines]
        if self.rings is not None:
            lines.append(self.rings.digest.encode())
        if self.overhead_ns:
            lines.append(str(self.overhead_ns).encode())
        if self.error_permille != ERROR_PERMILLE:
            lines.append(f"error {self.error_permille}".encode())
        return hashlib.sha256(b"\n".join(lines)).hexdigest()


def _line(bucket: Bucket, allowed: tuple[Allowed, ...]) -> bytes:
    """Return a bucket as digests contain it."""
    # `kept` is the field's name at the time of the first stored tables, and shapes had no racks:
    # their digests stand.
    line = f"{bucket} {allowed}".replace(" history_bits=", " kept=")
    return line.replace(", racks=()", "", 1).encode()


class Costs:
    """The current cost table, and the cache misses of its look-ups.

    Args:
        table: the first table.
        store: tables by digest; `use` looks up the digest of `CostTableUpdated` there.
    """

    def __init__(self, table: CostTable, store: Mapping[str, CostTable] | None = None) -> None:
        self.table = table
        self._store = store if store is not None else {}
        self._misses: dict[Bucket, None] = {}

    def best(
        self, cls: str, shape: GroupShape, history: int, length: int, waited_ns: int = 0
    ) -> BestOption:
        """Return `CostTable.best`, and remember a cache miss."""
        choice = self.table.best(cls, shape, history, length, waited_ns)
        if choice.cache_miss and len(self._misses) < MAX_CACHE_MISSES:
            self._misses[bucket_of(cls, shape, history, length)] = None
        return choice

    def iteration_ns(self, sp: int, tp: int, batch: int, context: int) -> int:
        """Return `CostTable.iteration_ns`."""
        return self.table.iteration_ns(sp, tp, batch, context)

    def rows_alone(self, tp: int) -> int:
        """Return `CostTable.rows_alone`."""
        return self.table.rows_alone(tp)

    def transfer_ns(self, kind: str, size: int) -> int | None:
        """Return `CostTable.transfer_ns`."""
        return self.table.transfer_ns(kind, size)

    def exact(self, sp: int, tp: int, strategy: str = EXACT_STRATEGY) -> StepLatency:
        """Return `CostTable.exact`."""
        return self.table.exact(sp, tp, strategy)

    def use(self, digest: str) -> None:
        """Use another table of the store from now on."""
        self.table = self._store[digest]

    def cache_misses(self) -> list[Bucket]:
        """Return the buckets that were missing since the last call, and forget them."""
        missed, self._misses = list(self._misses), {}
        return missed


@dataclass(frozen=True, kw_only=True)
class Unmeasured:
    """Latencies for tests and benchmarks: constant work per token, divided among the ranks."""

    step_ns: int = 5_000_000
    token_ns: int = 100_000
    pair_ns: int = 10
    """Time for each pair of tokens."""
    iteration_time_ns: int = 20_000_000

    @property
    def digest(self) -> str:
        """Representation of the fields."""
        return repr(self)

    def step(self, sp: int, tp: int = 1, strategy: str = "") -> StepLatency:
        """Return the latency of a step, the same for all strategies."""
        return _UnmeasuredStep(self, sp * tp)

    def iteration(self, sp: int, tp: int = 1) -> IterationLatency:
        """Return the latency of an iteration, the same for all groups."""
        return _UnmeasuredIteration(self.iteration_time_ns)

    def link(self, kind: str) -> LinkLatency:
        """Raise ConfigError: no link was measured."""
        raise ConfigError(f"no link '{kind}' was measured")


class _UnmeasuredStep(NamedTuple):
    latencies: Unmeasured
    ranks: int

    @property
    def in_ns(self) -> tuple[float, float, float, float]:
        pair_ns = self.latencies.pair_ns / self.ranks
        token_ns = self.latencies.token_ns / self.ranks
        return float(self.latencies.step_ns), token_ns, pair_ns, pair_ns / 2

    def predict_ns(self, length: int, history: int = 0) -> int:
        pairs = length * (length // 2 + history)
        work_ns = length * self.latencies.token_ns + pairs * self.latencies.pair_ns
        return self.latencies.step_ns + work_ns // self.ranks


class _UnmeasuredIteration(NamedTuple):
    time_ns: int

    def predict_ns(self, batch: int, context: int) -> int:
        return self.time_ns


_EXACT = (Allowed(EXACT_STRATEGY),)


def row_of(cls: str, history: int) -> tuple[str, Objective | None]:
    """Return the row of options for a class, and the objective to choose among them."""
    row, objective = parse_class(cls)
    # After history all attention is exact, so bounds on accuracy have nothing to choose from.
    return (AUTO, None) if row == BOUNDED and history else (row, objective)


def bucket_of(cls: str, shape: GroupShape, history: int, length: int) -> Bucket:
    """Return the bucket of a class for `length` tokens after `history`."""
    row, _ = row_of(cls, history)
    return Bucket(row, shape, length.bit_length() - 1, history.bit_length())


def default_strategy(row: str) -> str:
    """Return the strategy that a row uses on a cache miss: the prefix of its name, or exact.

    >>> default_strategy("csa/5e1f"), default_strategy("auto")
    ('csa', 'ulysses')
    """
    strategy, slash, _ = row.partition("/")
    return strategy if slash else EXACT_STRATEGY


def _by_loss(timed: tuple[int, Allowed]) -> tuple[int, float, int, str]:
    """Order options by predicted loss, and equal losses by certainty: who drops less loses no
    more."""
    time_ns, allowed = timed
    return allowed.loss_ppm, _dropped_share(allowed.strategy), time_ns, allowed.strategy


@lru_cache(KNOWN_OPTIONS)
def _dropped_share(strategy: str) -> float:
    return dropped_share(parse_option(strategy).csa)


def dropped_share(csa: CsaSettings | None) -> float:
    """Return the mean drop ratio of sparse attention; 0 for exact attention."""
    return 0.0 if csa is None or csa.lossless else fmean(map(fmean, csa.drop_ratios))


def _quantised(time_ns: int) -> int:
    return (time_ns + QUANTUM_NS // 2) // QUANTUM_NS * QUANTUM_NS


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    latencies: bytes
    buckets: list[tuple[Bucket, tuple[Allowed, ...]]]
    rings: bytes | None = None
    overhead_ns: int = 0
    error_permille: int = ERROR_PERMILLE


def stored(table: CostTable) -> bytes:
    """Return a table as bytes for `read_stored`."""
    assert isinstance(table.latencies, LatencyTable), (
        f"only a LatencyTable can be stored, not {type(table.latencies).__name__}"
    )
    return msgspec.msgpack.encode(
        _Stored(
            table.latencies.canonical,
            sorted(table.buckets.items()),
            None if table.rings is None else table.rings.canonical,
            table.overhead_ns,
            table.error_permille,
        )
    )


def read_stored(path: Path) -> CostTable:
    """Read the table of a file.

    Raises:
        ConfigError: the file is missing, or does not contain a table.
    """
    record = _read(path)
    return CostTable(
        latencies=parse_table(record.latencies),
        buckets=dict(record.buckets),
        rings=None if record.rings is None else parse_rules(record.rings),
        overhead_ns=record.overhead_ns,
        error_permille=record.error_permille,
    )


def read_latencies(path: Path) -> LatencyTable:
    """Read only the latencies of a file's table.

    Raises:
        ConfigError: the file is missing, or does not contain a table.
    """
    return parse_table(_read(path).latencies)


def _read(path: Path) -> _Stored:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=_Stored)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError:
        raise ConfigError(f"{path} is not a cost table of a router's decision log") from None
