"""Latencies that follow measurements, and tables for deployments that were never profiled."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from fake_gangs import until
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples

from csps.configurator.costs import cost_table
from csps.configurator.costs.cost_table import Allowed, Bucket, CostTable
from csps.configurator.costs.latency_tables import SHIPPED
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import (
    Objective,
    RequestClass,
    StrategyChoice,
    StrategyChoices,
    StrategyQuestion,
    StrategyQuestions,
)
from csps.protocols.core.topology import GroupShape
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep
from csps.services.router import cost_table_service as cost_book
from csps.services.router.cost_table_service import CostTableService
from csps.services.scheduling.events.commands import RunStep
from csps.services.scheduling.events.events import AnyEvent, CostTableUpdated, instance_id

TABLE = CostTable(latencies=SHIPPED)
TOKENS = 4096


async def silent(questions: StrategyQuestions) -> StrategyChoices:
    raise LookupError


def step(number: int, strategy: str = "ulysses") -> RunStep:
    prefill = PrefillStep(
        step_id=number,
        group=(instance_id(1, 0), instance_id(1, 1)),
        bounds=(0, TOKENS // 2, TOKENS),
        chunks=(PrefillChunk(number, 0, TOKENS),),
        strategy=strategy,
    )
    return RunStep(step=prefill, cls="auto", ends_ns=0)


def test_predictions_follow_a_machine_that_became_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cost_book, "REFIT_S", 0.0)
    told: list[AnyEvent] = []
    book = CostTableService(TABLE, silent)
    book.start(told.append)
    shape = GroupShape((2,))
    before = book.costs.best("exact", shape, 0, TOKENS).time_ns
    for number in range(100):
        book.measured(step(number), GroupShape((2,)), 3 * before / 1e9)
        for event in told:
            assert isinstance(event, CostTableUpdated)
            book.costs.use(event.digest)
        told.clear()
    after = book.costs.best("exact", shape, 0, TOKENS).time_ns
    assert after == pytest.approx(3 * before, rel=0.1)


def test_a_strategy_without_profile_is_ignored() -> None:
    book = CostTableService(TABLE, silent)
    for number in range(100):
        book.measured(step(number, "ring_of_saturn"), GroupShape((2,), 3), 1.0)
    assert book.costs.table is TABLE


SHAPE = GroupShape((2,))
AT = TOKENS.bit_length() - 1
RING = "ring_kv"


def offering(**by_row: tuple[Allowed, ...]) -> CostTable:
    return CostTable(
        latencies=SHIPPED,
        buckets={Bucket(row, SHAPE, AT): options for row, options in by_row.items()},
    )


def learned(book: CostTableService, steps: list[tuple[RunStep, float]]) -> CostTable:
    """Return the table in force after measured steps, given their seconds."""
    told: list[AnyEvent] = []
    book.start(told.append)
    for command, took_s in steps:
        book.measured(command, SHAPE, took_s)
        for event in told:
            assert isinstance(event, CostTableUpdated)
            book.costs.use(event.digest)
        told.clear()
    return book.costs.table


def test_a_correction_holds_for_requests_with_other_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: exact attention was predicted too slow for every bound on TTFT, although
    requests without bounds had measured it."""
    monkeypatch.setattr(cost_book, "REFIT_S", 0.0)
    offered = (Allowed(RING, 900), Allowed("csa#{}", 400, 100))
    table = offering(auto=(Allowed(RING, 900),), bounded=offered)
    took_s = 0.5 * table.time_ns(Allowed(RING, 900), SHAPE, 0, TOKENS) / 1e9
    book = CostTableService(table, silent)
    after = learned(book, [(step(number, RING), took_s) for number in range(40)])
    assert after.buckets[Bucket("auto", SHAPE, AT)] == (Allowed(RING, 450),)
    assert after.buckets[Bucket("bounded", SHAPE, AT)] == (Allowed(RING, 450), offered[1])


def test_a_corrected_time_is_never_taken_for_that_of_a_latency_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cost_book, "REFIT_S", 0.0)
    table = offering(auto=(Allowed(RING, 500),))
    took_s = 2 * table.time_ns(Allowed(RING, 500), SHAPE, 0, TOKENS) / 1e9
    book = CostTableService(table, silent)
    after = learned(book, [(step(number, RING), took_s) for number in range(40)])
    assert after.buckets[Bucket("auto", SHAPE, AT)] == (Allowed(RING, 1001),)


async def test_buckets_that_come_later_are_corrected_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cost_book, "REFIT_S", 0.0)

    async def ring(questions: StrategyQuestions) -> StrategyChoices:
        choice = StrategyChoice(strategy=RING, reason="", permille=900)
        return StrategyChoices(chosen=tuple((choice,) for _ in questions.asked))

    table = offering(auto=(Allowed(RING, 900),))
    took_s = 0.5 * table.time_ns(Allowed(RING, 900), SHAPE, 0, TOKENS) / 1e9
    book = CostTableService(table, ring)
    learned(book, [(step(number, RING), took_s) for number in range(40)])
    told: list[AnyEvent] = []
    book.start(told.append)
    cls = RequestClass(objective=Objective(max_accuracy_loss=0.1))
    assert book.costs.best(cls.key, SHAPE, 0, TOKENS).cache_miss
    book.request_misses()
    await until(lambda: bool(told))
    (event,) = told
    assert isinstance(event, CostTableUpdated)
    book.costs.use(event.digest)
    assert book.costs.table.buckets[Bucket("bounded", SHAPE, AT)] == (Allowed(RING, 450),)
    await book.close()


@pytest.mark.parametrize("spread", [0.0, 0.15, 0.4, 9.0])
def test_the_error_is_that_of_the_table_in_force(
    spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias is corrected and is no error; what scatters is, within limits."""
    monkeypatch.setattr(cost_book, "REFIT_S", 0.0)
    option = Allowed(RING, 500)
    table = offering(auto=(option,))
    usual_s = 1.5 * table.time_ns(option, SHAPE, 0, TOKENS) / 1e9
    times = [usual_s] * 160 + [usual_s * (1 + spread), usual_s] * 8
    book = CostTableService(table, silent)
    after = learned(book, [(step(number, RING), took) for number, took in enumerate(times)])
    (corrected,) = after.buckets[Bucket("auto", SHAPE, AT)]
    predicted_s = after.time_ns(corrected, SHAPE, 0, TOKENS) / 1e9
    of_20_in_19 = sorted(abs(took_s / predicted_s - 1) for took_s in times[-64:])[60]
    assert after.error_permille == pytest.approx(1000 * min(max(of_20_in_19, 0.03), 0.9), abs=1)
    assert (after.error_permille == 30) == (spread == 0)
    assert (after.error_permille == 900) == (spread == 9)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_any_tensor_parallelism_has_a_prediction(tp: int) -> None:
    for strategy in ("auto", "csa/5e1f", "sp_tp/12"):
        assert TABLE.best(strategy, GroupShape((2, 2), tp), 0, TOKENS).time_ns > 0
    assert TABLE.iteration_ns(2, tp, 4, 10_000) > 0


async def test_a_bucket_without_an_answer_is_asked_for_again() -> None:
    """The second question gets an answer."""
    answers = [(), (StrategyChoice(strategy="ulysses", reason="at last"),)]

    async def later(questions: StrategyQuestions) -> StrategyChoices:
        return StrategyChoices(chosen=(answers.pop(0),))

    told: list[AnyEvent] = []
    book = CostTableService(TABLE, later)
    book.start(told.append)
    cls = RequestClass(objective=Objective(max_accuracy_loss=0.1))

    def misses() -> bool:
        assert book.costs.best(cls.key, GroupShape((2,)), 0, TOKENS).cache_miss
        book.request_misses()
        return not answers

    await until(misses)
    await until(lambda: bool(told))
    (event,) = told
    assert isinstance(event, CostTableUpdated)
    book.costs.use(event.digest)
    assert not book.costs.best(cls.key, GroupShape((2,)), 0, TOKENS).cache_miss
    await book.close()


async def test_a_question_names_the_racks_of_the_group() -> None:
    asked: list[StrategyQuestion] = []

    async def remember(questions: StrategyQuestions) -> StrategyChoices:
        asked.extend(questions.asked)
        return await quick(questions)

    book = CostTableService(TABLE, remember)
    book.start(lambda event: None)
    for racks in ((), (1, 1)):
        book.costs.best("auto", GroupShape((1, 1), racks=racks), 0, TOKENS)
    book.request_misses()
    await until(lambda: len(asked) == 2)
    assert [question.places for question in asked] == [("0-0-0", "0-1-0"), ("0-0-0", "1-0-0")]
    await book.close()


async def test_a_question_that_always_fails_ends_in_exact_attention_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others that were asked together with it get their answers."""
    monkeypatch.setattr(cost_book, "PAUSE_S", 0.0)
    poison, asked = 1 << 7, [0]

    async def fails(questions: StrategyQuestions) -> StrategyChoices:
        asked[0] += 1
        if any(poison <= question.tokens < 2 * poison for question in questions.asked):
            raise ValueError("cannot be simulated")
        return await quick(questions)

    book = CostTableService(TABLE, fails)
    told: list[AnyEvent] = []
    book.start(told.append)
    for exponent in range(4, 12):
        book.costs.best("auto", SHAPE, 0, 1 << exponent)
    book.request_misses()
    assert book._asking is not None
    await book._asking
    assert asked[0] <= cost_book.ATTEMPTS + 8
    buckets = {Bucket("auto", SHAPE, exponent): exponent for exponent in range(4, 12)}
    for bucket, exponent in buckets.items():
        failed = exponent == 7
        assert ("failed 6 times (cannot be simulated)" in book.why(bucket, "ulysses")) == failed
        assert book.loss(bucket, "ulysses") == 0.0
    assert "after 6 attempts, using exact attention" in caplog.text
    book.costs.use(told[-1].digest)  # type: ignore[union-attr]
    book.costs.best("auto", SHAPE, 0, poison)
    book.request_misses()
    assert book._asking.done(), "asked again"
    await book.close()


async def test_an_answer_formats_its_own_buckets_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each answer formatted all buckets on the event loop, 40 ms for ten thousand."""
    many = {
        Bucket(f"csa/{row:04x}", GroupShape((sp,)), exponent): (Allowed("csa#{}", 900),)
        for row in range(50)
        for sp in range(1, 5)
        for exponent in range(10)
    }
    formatted = CountedLines(monkeypatch)
    book = CostTableService(CostTable(latencies=SHIPPED, buckets=many), quick)
    told: list[AnyEvent] = []
    book.start(told.append)
    for length in (16, 64, 256):
        formatted.count = 0
        book.costs.best("auto", GroupShape((2,)), 0, length)
        book.request_misses()
        await until(lambda: bool(told))
        event = told.pop()
        assert isinstance(event, CostTableUpdated)
        book.costs.use(event.digest)
        whole = CostTable(latencies=SHIPPED, buckets=dict(book.costs.table.buckets))
        assert formatted.count == 1
        assert whole.digest == event.digest
    await book.close()


class CountedLines:
    """Counts the buckets that are formatted for digests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._line = 0, cost_table._line
        monkeypatch.setattr(cost_table, "_line", self)

    def __call__(self, bucket: Bucket, allowed: tuple[Allowed, ...]) -> bytes:
        self.count += 1
        return self._line(bucket, allowed)


async def quick(questions: StrategyQuestions) -> StrategyChoices:
    choice = StrategyChoice(strategy="ulysses", reason="it is quick")
    return StrategyChoices(chosen=tuple((choice,) for _ in questions.asked))


BUCKETS = st.builds(
    Bucket,
    st.sampled_from(["auto", "bounded", "csa/5e1f", "csa/5e1f0"]),
    st.sampled_from(
        [*map(GroupShape, [(1,), (2,), (1, 1), (11,)]), GroupShape((1, 1), racks=(1, 1))]
    ),
    st.integers(0, 20),
    st.integers(0, 3),
)
OPTIONS = st.lists(
    st.builds(Allowed, st.sampled_from(["ulysses", "csa#{}"]), st.integers(1, 1000)), max_size=3
).map(tuple)


@settings(max_examples=examples(200))
@given(
    first=st.dictionaries(BUCKETS, OPTIONS, max_size=30),
    changes=st.lists(
        st.tuples(st.dictionaries(BUCKETS, OPTIONS, max_size=5), st.lists(BUCKETS, max_size=5)),
        max_size=5,
    ),
)
def test_an_updated_table_is_the_same_as_a_new_one(
    first: dict[Bucket, tuple[Allowed, ...]],
    changes: list[tuple[dict[Bucket, tuple[Allowed, ...]], list[Bucket]]],
) -> None:
    table, expected = CostTable(latencies=SHIPPED, buckets=first), dict(first)
    for overhead_ns, (buckets, without) in enumerate(changes):
        error = 200 + 50 * overhead_ns
        table = table.updated(
            buckets, without=without, overhead_ns=overhead_ns, error_permille=error
        )
        for bucket in without:
            expected.pop(bucket, None)
        expected |= buckets
        new = CostTable(
            latencies=SHIPPED, buckets=expected, overhead_ns=overhead_ns, error_permille=error
        )
        assert table == new
        assert table.digest == new.digest == digest_by_definition(new)


def digest_by_definition(table: CostTable) -> str:
    """Digest as logs of version 0.1.0 have it, which know neither errors nor racks."""
    lines = sorted(
        f"{bucket} {allowed}".replace(" history_bits=", " kept=").replace(", racks=()", "")
        for bucket, allowed in table.buckets.items()
    )
    more = [str(table.overhead_ns)] if table.overhead_ns else []
    if table.error_permille != 200:
        more.append(f"error {table.error_permille}")
    return hashlib.sha256("\n".join([table.latencies.digest, *lines, *more]).encode()).hexdigest()


async def test_buckets_of_dropped_classes_leave_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_book, "MAX_CLASSES", 4)
    book = CostTableService(TABLE, quick)
    told: list[AnyEvent] = []
    book.start(told.append)
    rows = []
    for index in range(6):
        cls = RequestClass(csa=CsaSettings(sinks=index))
        rows.append(cls.row)
        book.register_class(cls)
        book.costs.best(cls.key, GroupShape((2,)), 0, TOKENS)
        book.request_misses()
        await until(lambda: bool(told))
        event = told.pop()
        assert isinstance(event, CostTableUpdated)
        book.costs.use(event.digest)
    assert {bucket.row for bucket in book.costs.table.buckets} == set(rows[-2:])
    await book.close()


async def test_dropped_classes_are_not_asked_for() -> None:
    asked: list[StrategyQuestions] = []

    async def note(questions: StrategyQuestions) -> StrategyChoices:
        asked.append(questions)
        raise LookupError

    book = CostTableService(TABLE, note)
    book.costs.best("csa/nobody", GroupShape((2,)), 0, TOKENS)
    book.request_misses()
    await asyncio.sleep(0)
    await book.close()
    assert asked == []
