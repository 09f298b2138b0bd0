"""What serving teaches about times: of options, and of what a step's time leaves out of TTFT.

The cost table that the router's scheduler looks strategies and times up in.

The configurator fills it in, and latencies follow the steps that are measured while serving. No
request waits for the configurator. A bucket that nobody has filled in runs by its class's own
strategy; it is asked for in the background, and the next table has it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from csps.configurator.costs.cost_table import (
    MILLION,
    WHOLE_PERMILLE,
    Allowed,
    Bucket,
    Costs,
    CostTable,
    bucket_of,
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
from csps.protocols.rpc import trace_context
from csps.services.requests.request_handle import RequestHandle
from csps.services.scheduling.events.commands import RunStep
from csps.services.scheduling.events.events import AnyEvent, CostTableUpdated

HALF_LIFE = 8
"""Steps after which a measurement counts half."""
WITHIN = 0.03
"""Predictions that were this near are left alone."""
WINDOW = 128
"""First tokens that the overhead is taken of."""
FEWEST = 8
QUANTILE = 0.95


class OptionDrift:
    """Measured times of options over predicted ones, until the predictions are corrected."""

    def __init__(self) -> None:
        self._log_ratios: dict[tuple[Bucket, str], float] = {}

    def observe(self, bucket: Bucket, strategy: str, ratio: float) -> None:
        """A step took `ratio` times as long as was predicted."""
        key, new = (bucket, strategy), math.log(max(ratio, 1e-3))
        weight = 1 - 0.5 ** (1 / HALF_LIFE)
        known = self._log_ratios.get(key)
        self._log_ratios[key] = new if known is None else known + weight * (new - known)

    def corrected(
        self, buckets: Mapping[Bucket, tuple[Allowed, ...]]
    ) -> Mapping[Bucket, tuple[Allowed, ...]]:
        """Buckets that predict what was measured."""
        found = dict(buckets)
        for (bucket, strategy), log_ratio in self._log_ratios.items():
            if bucket in found and abs(log_ratio) > WITHIN:
                found[bucket] = tuple(
                    it._replace(permille=max(1, round(it.permille * math.exp(log_ratio))))
                    if it.strategy == strategy
                    else it
                    for it in found[bucket]
                )
        self._log_ratios.clear()
        return found


class Overhead:
    """By how much first tokens come later than predicted, for all but the slowest."""

    def __init__(self) -> None:
        self._late_ns: deque[int] = deque(maxlen=WINDOW)

    def observe(self, late_ns: int) -> None:
        """A first token came so much later than its step was to end, or earlier."""
        self._late_ns.append(late_ns)

    @property
    def in_ns(self) -> int:
        """Not less than nothing, and nothing before a few have come."""
        if len(self._late_ns) < FEWEST:
            return 0
        in_order = sorted(self._late_ns)
        return max(0, in_order[int(QUANTILE * (len(in_order) - 1))])


_log = logging.getLogger(__name__)

Configure = Callable[[StrategyQuestions], Awaitable[StrategyChoices]]
"""The configurator, wherever it runs; exceptions cost only the advice."""

ANSWER_S = 60.0
"""For the configurator's answer, which may have to simulate hundreds of configurations."""
AT_ONCE = 16
"""Buckets without bounds that are asked for together; each takes some tenths of a second."""
PAUSE_S = 1.0
"""Before a question that got none is asked again."""
MAX_CLASSES = 64
"""Classes with wishes of their own; clients may think of any number of them."""
REFIT_STEPS, REFIT_S = 16, 10.0
"""Latencies are fitted again after so many steps, and not more often than so many seconds."""
LONGEST = 1 << 21
"""Tokens up to which buckets are filled before anybody asks."""
_ALWAYS = {AUTO: RequestClass(), BOUNDED: RequestClass(objective=Objective())}
"""Classes that are never forgotten."""


class CostTableService:
    """Keeps tables by digest, and why each strategy was chosen.

    Args:
        table: to begin with: latency models, and buckets that are known already.
        configure: asked for cold buckets.
        keep: is given every table before it is put in force, for the scheduler's log.
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
        """What the scheduler looks things up in."""
        self._configure, self._store_table = configure, store_table
        self._post_event: Callable[[AnyEvent], None] | None = None
        self._drift, self._overhead = OptionDrift(), Overhead()
        self._classes: OrderedDict[str, RequestClass] = OrderedDict(_ALWAYS)
        self._traces: dict[str, dict[str, str]] = {}
        """Of the latest request of each class that one was submitted of."""
        self._choices: dict[Bucket, dict[str, StrategyChoice]] = {}
        self._wanted: dict[Bucket, None] = {}
        self._asking: asyncio.Task[None] | None = None

    def start(self, post_event: Callable[[AnyEvent], None]) -> None:
        """Announce new tables to `post_event` from now on."""
        self._post_event = post_event

    async def close(self) -> None:
        """Ask for nothing more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})

    # --- what may be asked for -----------------------------------------------------------------

    def register_class(self, cls: RequestClass) -> None:
        """A request of this class was submitted."""
        self._classes[cls.row] = cls
        self._classes.move_to_end(cls.row)
        self._traces[cls.row] = trace_context.inject()
        if len(self._classes) > MAX_CLASSES:
            oldest = next(row for row in self._classes if row not in _ALWAYS)
            del self._classes[oldest]
            self._traces.pop(oldest, None)

    def gang_up(self, gang: GangClient) -> None:
        """Fill in what most requests will ask for, before they do."""
        if gang.role == "decode":
            return
        places = sorted(map(Location.parse, gang.locations))
        shapes = {
            GroupShape.of(places[:count], gang.tp): None for count in range(1, len(places) + 1)
        }
        exponents = range(LONGEST.bit_length())
        self._want([Bucket(AUTO, *it) for it in itertools.product(shapes, exponents)])

    def request_misses(self) -> None:
        """Ask for the buckets that the scheduler has missed since the last time."""
        if cold := self.costs.cache_misses():
            self._want(cold)

    def why(self, bucket: Bucket, strategy: str) -> str:
        """Why a step runs by this strategy, for people."""
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
        """What a step by this option loses of accuracy; None if that was not predicted."""
        known = self._choice(bucket, strategy)
        return None if known is None else known.loss

    @property
    def overhead_ns(self) -> int:
        """`CostTable.overhead_ns` in force."""
        return self.costs.table.overhead_ns

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

    # --- asking --------------------------------------------------------------------------------

    def _want(self, buckets: Sequence[Bucket]) -> None:
        filled = self._newest.buckets
        self._wanted.update(
            (bucket, None)
            for bucket in buckets
            if bucket not in filled and bucket.row in self._classes
        )
        if self._wanted and self._asking is None:
            self._asking = asyncio.create_task(self._ask(), name="ask the configurator")
            self._asking.add_done_callback(lambda _: setattr(self, "_asking", None))

    async def _ask(self) -> None:
        while self._wanted:
            wanted = self._next_wanted()
            if not wanted:
                return  # their classes were forgotten meanwhile
            questions = StrategyQuestions(asked=tuple(map(self._question, wanted)))
            try:
                with trace_context.attached(self._trace_of(wanted)):
                    async with asyncio.timeout(ANSWER_S):
                        answer = await self._configure(questions)
                answers = zip(wanted, answer.chosen, strict=True)
            except Exception as exc:  # it may run elsewhere and fail in any way
                _log.warning("the configurator did not answer (%s); asking again", exc)
                self._wanted.update(dict.fromkeys(wanted))
                await asyncio.sleep(PAUSE_S)
                continue
            # What is not known yet stays cold, and is asked for again by whoever misses it.
            self._enter({it: choices for it, choices in answers if choices})

    def _trace_of(self, wanted: Sequence[Bucket]) -> dict[str, str]:
        """That of a request for which a bucket is wanted, which then shows the question."""
        return next((it for bucket in wanted if (it := self._traces.get(bucket.row))), {})

    def _next_wanted(self) -> list[Bucket]:
        """Some of those that are compared quickly; after them one at a time."""
        wanted = [it for it in self._wanted if it.row in self._classes]
        quick = [it for it in wanted if self._classes[it.row].objective is None]
        asked = quick[:AT_ONCE] or wanted[:1]
        self._wanted = {it: None for it in wanted if it not in set(asked)}
        return asked

    def _question(self, bucket: Bucket) -> StrategyQuestion:
        cls = self._classes[bucket.row]
        return StrategyQuestion(
            csa=cls.csa,
            bounded=cls.objective is not None,
            given=cls.given,
            servers=bucket.shape.servers,
            tp=bucket.shape.tp,
            tokens=max(1, 3 << bucket.exponent >> 1),
            history=max(1, 3 << bucket.history_bits >> 2) if bucket.history_bits else 0,
        )

    def _enter(self, chosen: Mapping[Bucket, Sequence[StrategyChoice]]) -> None:
        """Put a table in force that has these buckets, and those of classes that are in use."""
        old = self._newest.buckets
        buckets = {it: allowed for it, allowed in old.items() if it.row in self._classes}
        buckets |= {it: tuple(map(_allowed, choices)) for it, choices in chosen.items()}
        named = {it: {one.strategy: one for one in choices} for it, choices in chosen.items()}
        known = {**self._choices, **named}
        self._choices = {it: choice for it, choice in known.items() if it in buckets}
        self._put_in_force(replace(self._newest, buckets=buckets))

    # --- measuring -----------------------------------------------------------------------------

    def measured(self, command: RunStep, shape: GroupShape, took_s: float) -> None:
        """A step has ended: how long it took, computing and exchanging."""
        if self._refit is None:
            return
        if not self._note_option(command, shape, took_s):
            key = LatencyKey(strategy=command.strategy, sp=shape.sp, tp=shape.tp)
            rows = [(chunk.length, chunk.start) for chunk in command.chunks]
            try:
                self._refit.observe(key, rows, int(took_s * 1e9))
            except ConfigError:
                return  # nothing of this kind was ever profiled: there is nothing to correct
        self._steps += 1
        now = time.monotonic()
        if self._steps >= REFIT_STEPS and now - self._refitted_at >= REFIT_S:
            self._refitted_at, self._steps = now, 0
            self._put_in_force(
                replace(
                    self._newest,
                    latencies=self._refit.table(),
                    buckets=self._drift.corrected(self._newest.buckets),
                    overhead_ns=self._overhead.in_ns,
                )
            )

    def _note_option(self, command: RunStep, shape: GroupShape, took_s: float) -> bool:
        """Of a step by an option that is timed by the table, if it computes one prompt; false if
        its strategy has a latency model."""
        (chunk, *others) = command.chunks
        bucket = bucket_of(command.cls, shape, chunk.start, command.bounds[-1])
        found = self._newest.buckets.get(bucket, ())
        allowed = next((it for it in found if it.strategy == command.strategy), None)
        if allowed is None or allowed.permille == WHOLE_PERMILLE:
            return parse_option(command.strategy).csa is not None
        if not others:
            predicted_ns = self._newest.time_ns(allowed, shape, chunk.start, chunk.length)
            self._drift.observe(bucket, allowed.strategy, took_s * 1e9 / predicted_ns)
        return True

    def record_first_token(self, handle: RequestHandle) -> None:
        """The first token of an answer has come."""
        plan, ttft_s = handle.plan, handle.timings.ttft_s
        if plan is None or plan.predicted_ttft_ms is None or ttft_s is None:
            return
        self._overhead.observe(round(ttft_s * 1e9 - plan.predicted_ttft_ms * MILLION))

    # --- tables --------------------------------------------------------------------------------

    def _put_in_force(self, table: CostTable) -> None:
        if table.digest == self._newest.digest:
            return
        self._newest = table
        self._store.pop(table.digest, None)  # tables stand in the order in which they were told
        self._store[table.digest] = table
        if self._store_table is not None:
            self._store_table(table)
        assert self._post_event is not None, "measured or asked before it was started"
        self._post_event(CostTableUpdated(digest=table.digest))
        self._discard_former()

    def _discard_former(self) -> None:
        """Tables from before the one in force; later ones are about to be."""
        for digest in list(self._store):
            if digest == self.costs.table.digest:
                return
            del self._store[digest]


def _allowed(choice: StrategyChoice) -> Allowed:
    """Of what nobody can say the loss of there is nothing to choose from."""
    loss = choice.loss or 0.0
    return Allowed(choice.strategy, choice.permille, math.ceil(loss * MILLION))
