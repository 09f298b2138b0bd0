"""The router's cost tables: strategies and times by which the scheduler compares options.

The configurator fills the table in, bucket by bucket, and latencies follow the steps that are
measured while serving. No request waits for the configurator: a missing bucket runs by the default
strategy of its class and is asked for in the background, so the next table has it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from csps.configurator.costs.cost_table import (
    EXACT_STRATEGY,
    MILLION,
    WHOLE_PERMILLE,
    Allowed,
    Bucket,
    Costs,
    CostTable,
    bucket_of,
    default_strategy,
)
from csps.configurator.costs.fitting import Refit
from csps.configurator.costs.latency import LatencyKey, LatencyTable
from csps.protocols.attention.plan import (
    AUTO,
    BOUNDED,
    RING_CLASSES,
    RINGS,
    Objective,
    RequestClass,
    StrategyChoice,
    StrategyChoices,
    StrategyQuestion,
    StrategyQuestions,
    parse_option,
)
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import GroupShape, Location
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.step_messages import PrefillChunk
from csps.protocols.rpc import trace_context
from csps.services.requests.request_handle import RequestHandle
from csps.services.scheduling.events.commands import RunStep
from csps.services.scheduling.events.events import AnyEvent, CostTableUpdated

_log = logging.getLogger(__name__)
Configure = Callable[[StrategyQuestions], Awaitable[StrategyChoices]]
"""The configurator, wherever it runs. An exception costs only its advice."""
ANSWER_S = 60.0
"""Deadline of the configurator's answer; it may simulate hundreds of configurations."""
AT_ONCE = 16
"""Buckets without bounds asked for together; each takes some tenths of a second."""
PAUSE_S, MOST_PAUSE_S = 1.0, 30.0
"""Pause before a question without an answer is repeated; it doubles with every failure of the
question, up to the second number."""
ATTEMPTS = 6
"""Failures of a question after which its bucket is exact, and not asked for again."""
MAX_CLASSES = 64
"""Limit on request classes; clients may invent any number of them."""
REFIT_STEPS, REFIT_S = 16, 10.0
"""Latencies are refitted after this many steps, at most once in this many seconds."""
LONGEST = 1 << 21
"""Prompt tokens up to which buckets are filled before a request asks for them."""
_ALWAYS = {AUTO: RequestClass(), BOUNDED: RequestClass(objective=Objective())}
"""Classes that are never dropped."""


class CostTableService:
    """Keeps cost tables by digest, and why each strategy was chosen.

    Args:
        table: the first one: latency models, and buckets that are known already.
        configure: asked for the buckets that the scheduler misses.
        store_table: takes every table before it is in force, for the decision log.
    """

    def __init__(
        self,
        table: CostTable,
        configure: Configure,
        store_table: Callable[[CostTable], None] | None = None,
    ) -> None:
        self._store = {table.digest: table}
        self._newest = table
        latencies = table.latencies
        self._refit = Refit(latencies) if isinstance(latencies, LatencyTable) else None
        self._refitted_at, self._steps = time.monotonic(), 0
        self.costs = Costs(table, self._store)
        """Tables in which the scheduler looks things up."""
        self._configure, self._store_table = configure, store_table
        self._post_event: Callable[[AnyEvent], None] | None = None
        self._drift, self._overhead = OptionDrift(), Overhead()
        self._errors = PredictionErrors()
        self._classes: OrderedDict[str, RequestClass] = OrderedDict(_ALWAYS)
        self._traces: dict[str, dict[str, str]] = {}
        """Trace headers of each class's latest request."""
        self._choices: dict[Bucket, dict[str, StrategyChoice]] = {}
        self._wanted: dict[Bucket, None] = {}
        self._dropped: set[str] = set()
        """Rows of classes that were dropped since the last answer."""
        self._failures: dict[Bucket, int] = {}
        """Failed questions by bucket that is still missing."""
        self._asking: asyncio.Task[None] | None = None

    def start(self, post_event: Callable[[AnyEvent], None]) -> None:
        """Announce new tables to `post_event` from now on."""
        self._post_event = post_event

    async def close(self) -> None:
        """Stop asking the configurator."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})

    # --- look-ups ------------------------------------------------------------------------------

    def register_class(self, cls: RequestClass) -> None:
        """Remember the class of a submitted request."""
        self._classes[cls.row] = cls
        self._classes.move_to_end(cls.row)
        self._dropped.discard(cls.row)
        self._traces[cls.row] = trace_context.inject()
        if len(self._classes) > MAX_CLASSES:
            oldest = next(row for row in self._classes if row not in _ALWAYS)
            del self._classes[oldest]
            self._dropped.add(oldest)
            self._traces.pop(oldest, None)

    def gang_up(self, gang: GangClient) -> None:
        """Fill in the buckets that most requests will look up, before they do."""
        if gang.role == "decode":
            return
        places = sorted(map(Location.parse, gang.locations))
        shapes = {
            GroupShape.of(places[:count], gang.tp): None for count in range(1, len(places) + 1)
        }
        exponents = range(LONGEST.bit_length())
        self._want(
            [
                Bucket(AUTO, shape, exponent)
                for shape, exponent in itertools.product(shapes, exponents)
            ]
        )

    def request_misses(self) -> None:
        """Ask for the buckets that the scheduler has missed since the last call."""
        if missed := self.costs.cache_misses():
            self._want(missed)

    def why(self, bucket: Bucket, strategy: str) -> str:
        """Return why a step runs by this strategy, in words for clients."""
        asked = RING_CLASSES.get(bucket.row)
        if asked == "ring":
            return f"'{strategy}', as the better ring {self._ring_rule(bucket)}"
        if asked is not None:
            return f"strategy '{asked}' as asked"
        known = self._choice(bucket, strategy)
        if known is not None:
            return known.reason
        if strategy in RINGS:
            return f"'{strategy}', as this server's scheduling policy has it"
        name = parse_option(strategy).strategy
        return f"'{name}', as nothing was compared yet for such prompts and groups"

    def loss(self, bucket: Bucket, strategy: str) -> float | None:
        """Return the predicted accuracy loss of a step by this option; None if unknown."""
        known = self._choice(bucket, strategy)
        return None if known is None else known.loss

    @property
    def overhead_ns(self) -> int:
        """Return the overhead of the table in force (`CostTable.overhead_ns`)."""
        return self.costs.table.overhead_ns

    @property
    def error(self) -> float:
        """Return the relative error of the steps that the table in force predicts."""
        return self.costs.table.error_permille / 1000

    def _choice(self, bucket: Bucket, strategy: str) -> StrategyChoice | None:
        for found in (bucket, bucket._replace(history_bits=0)):  # as the table looks it up
            if known := self._choices.get(found, {}).get(strategy):
                return known
        return None

    def _ring_rule(self, bucket: Bucket) -> str:
        rings = self._newest.rings
        if rings is None or bucket.shape.sp == 1:
            return "of two that do the same here"
        fitted = rings.fitted_to(bucket.shape)
        return "by what was measured here" if fitted else "by compute and bandwidth (CP Alg. 5)"

    # --- asking the configurator ---------------------------------------------------------------

    def _want(self, buckets: Sequence[Bucket]) -> None:
        filled = self._newest.buckets
        self._wanted.update(
            (bucket, None)
            for bucket in buckets
            if bucket not in filled and bucket.row in self._classes
        )
        if self._wanted and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask(), name="ask the configurator")

    async def _ask(self) -> None:
        while self._wanted:
            wanted = self._next_wanted()
            if not wanted:
                return  # their classes were dropped meanwhile
            questions = StrategyQuestions(asked=tuple(map(self._question, wanted)))
            try:
                with trace_context.attached(self._trace_of(wanted)):
                    async with asyncio.timeout(ANSWER_S):
                        answer = await self._configure(questions)
                answers = zip(wanted, answer.chosen, strict=True)
            except Exception as exc:  # it may run in another process and fail in any way
                await self._failed(wanted, exc)
                continue
            for bucket in wanted:
                self._failures.pop(bucket, None)
            # A bucket without choices stays missing; the next miss asks for it again.
            self._enter({bucket: choices for bucket, choices in answers if choices})

    async def _failed(self, wanted: Sequence[Bucket], exc: Exception) -> None:
        """Repeat a question after a pause; answer it with exact attention if it fails too often."""
        failures = 1 + max(self._failures.get(bucket, 0) for bucket in wanted)
        if failures >= ATTEMPTS:
            _log.error(
                "no answer from the configurator for %s after %d attempts, using exact attention: "
                "%s", wanted, failures, exc,
            )  # fmt: skip
            reason = f"exact, because the configurator has failed {failures} times ({exc})"
            self._enter({bucket: (_default(bucket, reason),) for bucket in wanted})
            for bucket in wanted:
                self._failures.pop(bucket, None)
            return
        pause_s = min(PAUSE_S * 2 ** (failures - 1), MOST_PAUSE_S)
        _log.warning(
            "no answer from the configurator for %d buckets, retrying in %g s: %s",
            len(wanted), pause_s, exc,
        )  # fmt: skip
        self._failures.update(dict.fromkeys(wanted, failures))
        self._wanted.update(dict.fromkeys(wanted))
        await asyncio.sleep(pause_s)

    def _trace_of(self, wanted: Sequence[Bucket]) -> dict[str, str]:
        """Return the trace of a request that needs a bucket; the question appears in it."""
        return next((trace for bucket in wanted if (trace := self._traces.get(bucket.row))), {})

    def _next_wanted(self) -> list[Bucket]:
        """Return the next buckets to ask for: some quick ones, or else a single one that is slow or
        has failed."""
        wanted = [bucket for bucket in self._wanted if bucket.row in self._classes]
        quick = [
            bucket
            for bucket in wanted
            if self._classes[bucket.row].objective is None and bucket not in self._failures
        ]
        # One that fails must not fail others for ever, so those that failed are asked one by one.
        failed = sorted(
            (bucket for bucket in wanted if bucket in self._failures),
            key=lambda bucket: self._failures[bucket],
        )
        slow = [bucket for bucket in wanted if bucket not in self._failures]
        asked = quick[:AT_ONCE] or slow[:1] or failed[:1]
        self._failures = {bucket: self._failures[bucket] for bucket in failed}
        self._wanted = {bucket: None for bucket in wanted if bucket not in set(asked)}
        return asked

    def _question(self, bucket: Bucket) -> StrategyQuestion:
        cls = self._classes[bucket.row]
        return StrategyQuestion(
            csa=cls.csa,
            bounded=cls.objective is not None,
            given=cls.given,
            servers=bucket.shape.servers,
            racks=bucket.shape.racks,
            tp=bucket.shape.tp,
            tokens=max(1, 3 << bucket.exponent >> 1),
            history=max(1, 3 << bucket.history_bits >> 2) if bucket.history_bits else 0,
        )

    def _enter(self, chosen: Mapping[Bucket, Sequence[StrategyChoice]]) -> None:
        """Put a table in force with these buckets and those of classes in use."""
        old = self._newest.buckets
        dropped = self._dropped
        without = [bucket for bucket in old if bucket.row in dropped] if dropped else []
        # A class may have been dropped while its question was asked.
        self._dropped = {bucket.row for bucket in chosen if bucket.row not in self._classes}
        for bucket in without:
            self._choices.pop(bucket, None)
        for bucket, choices in chosen.items():
            self._choices[bucket] = {choice.strategy: choice for choice in choices}
        buckets = {
            bucket: self._drift.corrected(bucket, map(_allowed, choices))
            for bucket, choices in chosen.items()
        }
        self._put_in_force(self._newest.updated(buckets, without=without))

    # --- learning from served requests ---------------------------------------------------------

    def measured(self, command: RunStep, shape: GroupShape, took_s: float) -> None:
        """Learn from a finished step that computed and exchanged for `took_s` seconds."""
        if self._refit is None:
            return
        if not self._note_option(command, shape, took_s):
            key = LatencyKey(strategy=command.step.strategy, sp=shape.sp, tp=shape.tp)
            rows = [(chunk.length, chunk.start) for chunk in command.step.chunks]
            try:
                self._refit.observe(key, rows, int(took_s * 1e9))
            except ConfigError:
                return  # this kind of step was never profiled: nothing to correct
        self._errors.observe(command, shape, took_s)
        self._steps += 1
        now = time.monotonic()
        if self._steps >= REFIT_STEPS and now - self._refitted_at >= REFIT_S:
            self._refitted_at, self._steps = now, 0
            corrected = self._newest.updated(
                self._drift.corrections(self._newest.buckets),
                latencies=self._refit.table(),
                overhead_ns=self._overhead.in_ns,
            )
            self._put_in_force(
                corrected.updated({}, error_permille=self._errors.permille(corrected))
            )

    def _note_option(self, command: RunStep, shape: GroupShape, took_s: float) -> bool:
        """Learn from a step by an option that the table times, if it computed one prompt.

        Returns:
            False if the step's strategy has a latency model, which learns from the step instead.
        """
        step = command.step
        (chunk, *others) = step.chunks
        bucket = bucket_of(command.cls, shape, chunk.start, step.bounds[-1])
        found = self._newest.buckets.get(bucket, ())
        allowed = next((option for option in found if option.strategy == step.strategy), None)
        if allowed is None or allowed.permille == WHOLE_PERMILLE:
            return parse_option(step.strategy).csa is not None
        if not others:
            predicted_ns = self._newest.time_ns(allowed, shape, chunk.start, chunk.length)
            self._drift.observe(bucket, allowed.strategy, took_s * 1e9 / predicted_ns)
        return True

    def record_overhead(self, handle: RequestHandle) -> None:
        """Learn what an answer's first token took beside waiting and the step, if that is known."""
        if (overhead_s := handle.overhead_s) is not None:
            self._overhead.observe(round(overhead_s * 1e9))

    # --- tables --------------------------------------------------------------------------------

    def _put_in_force(self, table: CostTable) -> None:
        if table.digest == self._newest.digest:
            return
        self._newest = table
        self._store.pop(table.digest, None)  # keeps `_store` in order of activation
        self._store[table.digest] = table
        if self._store_table is not None:
            self._store_table(table)
        assert self._post_event is not None, "a cost table changed before the service was started"
        _log.debug("cost table %s in force, %d buckets", table.digest, len(table.buckets))
        self._post_event(CostTableUpdated(digest=table.digest))
        self._discard_former()

    def _discard_former(self) -> None:
        """Drop tables older than the one in force; newer ones are about to be in force."""
        for digest in list(self._store):
            if digest == self.costs.table.digest:
                return
            del self._store[digest]


def _default(bucket: Bucket, reason: str) -> StrategyChoice:
    """Return what a bucket without options runs by."""
    # Of a class with drop ratios of its own these stay, and nobody knows what they lose.
    strategy = default_strategy(bucket.row)
    return StrategyChoice(
        strategy=strategy, reason=reason, loss=0.0 if strategy == EXACT_STRATEGY else None
    )


def _allowed(choice: StrategyChoice) -> Allowed:
    """Return the choice as an entry of the table; its loss is rounded up to a millionth."""
    # An option with unknown loss is always its bucket's only one: the 0.0 is never compared.
    loss = choice.loss or 0.0
    return Allowed(choice.strategy, choice.permille, math.ceil(loss * MILLION))


HALF_LIFE = 8
"""Steps after which a measurement counts half."""
WITHIN = 0.03
"""Relative error up to which a prediction is left alone."""
WINDOW = 128
"""First tokens from which the overhead is estimated."""
FEWEST = 8
QUANTILE = 0.95
LEAST_ERROR_PERMILLE, MOST_ERROR_PERMILLE = 30, 900
"""Limits of the estimated error: what is corrected lies within `WITHIN` anyway."""
RECENT_STEPS = 64
"""Steps from which the error is estimated."""
MOST_CORRECTED = 4_096
"""Limit on corrected options; those of invented classes are forgotten first."""


class OptionDrift:
    """Measured over predicted times of options, until the predictions are corrected.

    A correction holds for an option wherever it is offered: exact attention takes as long for a
    request with bounds as for one without.
    """

    def __init__(self) -> None:
        self._log_ratios: dict[tuple[Bucket, str], float] = {}
        self._corrections: OrderedDict[tuple[Bucket, str], float] = OrderedDict()
        """Logarithms of the factors by which the configurator's predictions were corrected."""

    def observe(self, bucket: Bucket, strategy: str, ratio: float) -> None:
        """Record that a step took `ratio` times as long as predicted."""
        key, new = (_of_all_rows(bucket), strategy), math.log(max(ratio, 1e-3))
        weight = 1 - 0.5 ** (1 / HALF_LIFE)
        known = self._log_ratios.get(key)
        self._log_ratios[key] = new if known is None else known + weight * (new - known)

    def corrections(
        self, buckets: Mapping[Bucket, tuple[Allowed, ...]]
    ) -> Mapping[Bucket, tuple[Allowed, ...]]:
        """Return the buckets whose predictions change, as they match the measurements, and start
        over."""
        new = {key: ratio for key, ratio in self._log_ratios.items() if abs(ratio) > WITHIN}
        self._log_ratios.clear()
        for key, log_ratio in new.items():
            self._corrections[key] = self._corrections.pop(key, 0.0) + log_ratio
        while len(self._corrections) > MOST_CORRECTED:
            self._corrections.popitem(last=False)
        changed = {key[0] for key in new}
        return {
            bucket: _scaled(bucket, options, new)
            for bucket, options in buckets.items()
            if _of_all_rows(bucket) in changed
        }

    def corrected(self, bucket: Bucket, options: Iterable[Allowed]) -> tuple[Allowed, ...]:
        """Return new options of a bucket with the corrections made so far."""
        return _scaled(bucket, options, self._corrections)


def _of_all_rows(bucket: Bucket) -> Bucket:
    return bucket._replace(row="")


def _scaled(
    bucket: Bucket, options: Iterable[Allowed], by: Mapping[tuple[Bucket, str], float]
) -> tuple[Allowed, ...]:
    """Return options with their times multiplied by the exponentials of `by`."""
    where, scaled = _of_all_rows(bucket), []
    for option in options:
        log_ratio = by.get((where, option.strategy))
        if log_ratio is not None:
            permille = max(1, round(option.permille * math.exp(log_ratio)))
            # `WHOLE_PERMILLE` would mean that a latency model has the time.
            permille += permille == WHOLE_PERMILLE
            option = option._replace(permille=permille)
        scaled.append(option)
    return tuple(scaled)


class PredictionErrors:
    """Relative error that a table makes when it predicts the last steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[Bucket, str, PrefillChunk, float]] = deque(maxlen=RECENT_STEPS)

    def observe(self, command: RunStep, shape: GroupShape, took_s: float) -> None:
        """Record how long a step took, if it computed one prompt on a group with a choice."""
        step = command.step
        (chunk, *others) = step.chunks
        if not others and shape.sp > 1:
            bucket = bucket_of(command.cls, shape, chunk.start, step.bounds[-1])
            self._steps.append((bucket, step.strategy, chunk, took_s))

    def permille(self, table: CostTable) -> int:
        """Return the error, in thousandths, that 95 % of the predictions do not exceed."""
        errors = sorted(
            abs(1e9 * took_s / table.time_ns(option, bucket.shape, chunk.start, chunk.length) - 1)
            for bucket, strategy, chunk, took_s in self._steps
            if (option := _option_of(table, bucket, strategy)) is not None
        )
        if len(errors) < FEWEST:
            return table.error_permille
        error = 1000 * errors[math.ceil(QUANTILE * len(errors)) - 1]
        return round(min(max(error, LEAST_ERROR_PERMILLE), MOST_ERROR_PERMILLE))


def _option_of(table: CostTable, bucket: Bucket, strategy: str) -> Allowed | None:
    """Return an option with its predicted time, if the table has one."""
    for option in table.buckets.get(bucket, ()):
        if option.strategy == strategy:
            return option
    return Allowed(strategy) if parse_option(strategy).csa is None else None


class Overhead:
    """Part of the time to first token that is neither waiting nor a step, for all but the slowest
    first tokens."""

    def __init__(self) -> None:
        self._late_ns: deque[int] = deque(maxlen=WINDOW)

    def observe(self, late_ns: int) -> None:
        """Record this part of one first token's time."""
        self._late_ns.append(late_ns)

    @property
    def in_ns(self) -> int:
        """Return the overhead in nanoseconds; 0 before enough first tokens came."""
        if len(self._late_ns) < FEWEST:
            return 0
        in_order = sorted(self._late_ns)
        return max(0, in_order[int(QUANTILE * (len(in_order) - 1))])
