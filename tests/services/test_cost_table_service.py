"""Latencies that follow measurements, and tables for deployments that were never profiled."""

from __future__ import annotations

import asyncio

import pytest
from fake_gangs import until

from csps.configurator.costs.cost_table import CostTable
from csps.configurator.costs.latency_tables import SHIPPED
from csps.protocols.attention.plan import (
    Objective,
    RequestClass,
    StrategyChoice,
    StrategyChoices,
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
