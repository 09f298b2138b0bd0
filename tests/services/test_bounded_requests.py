"""Requests with bounds, from submission to what ranks and clients see.

The options that the configurator found are the ones that run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_gangs import FakeCell, FakeGang, fake_cell, until

from csps.configurator.costs.cost_table import CostTable, Unmeasured
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import (
    BOUNDED,
    Objective,
    StrategyChoice,
    StrategyChoices,
    StrategyQuestion,
    StrategyQuestions,
    option_name,
)
from csps.protocols.core.errors import BoundNotMet
from csps.services.requests.request_handle import RequestHandle

TOKENS = 1500
DROPS = CsaSettings(
    levels=2, drop_ratios=((0.5,),), importance_layer="same", micro_partitions=((4, 2),)
)
MORE = replace(DROPS, drop_ratios=((0.9,),))
TIMES = Unmeasured(step_ns=0, pair_ns=0)
"""Latencies: 0.1 ms per token, half of that on two instances."""


def found(asked: StrategyQuestion) -> tuple[StrategyChoice, ...]:
    if not asked.bounded:
        return (StrategyChoice(strategy="ulysses", reason="exact as ever"),)
    given = {name: getattr(asked.csa, name) for name in asked.given}
    return (
        StrategyChoice(strategy="ulysses", reason="whole"),
        StrategyChoice(
            strategy=option_name("csa", replace(DROPS, **given)),
            reason="half",
            permille=500,
            loss=0.01,
        ),
        StrategyChoice(
            strategy=option_name("csa", replace(MORE, **given)),
            reason="a tenth",
            permille=100,
            loss=0.05,
        ),
    )


async def configure(questions: StrategyQuestions) -> StrategyChoices:
    return StrategyChoices(chosen=tuple(map(found, questions.asked)))


def cell_of(**options: Any) -> Any:
    """Yield a cell of two instances whose buckets are filled after the first request."""
    gang = FakeGang("prefill", "p1", instances=2)
    table = CostTable(latencies=TIMES)
    return fake_cell(**{"prefill": gang, "configure": configure, "table": table, **options})


async def warmed(cell: FakeCell, **options: Any) -> None:
    """Fill the bucket by a first request, which misses and runs exactly."""
    first = submit(cell, **options)
    step = await cell.prefilling(first)
    assert step.strategy == ("csa" if options.get("csa") else "ulysses")
    row = first.spec.cls.row
    await until(lambda: any(bucket.row == row for bucket in cell.costs.costs.table.buckets))
    cell.finish(await cell.decoding(first), 4)
    await cell.wait_until_free()


def submit(cell: FakeCell, *, objective: Objective, **options: Any) -> RequestHandle:
    return cell.submit(tokens=TOKENS, **{"objective": objective, "open": True, **options})


@pytest.mark.parametrize(
    ("bounds", "ratio", "loss"),
    [
        ({"max_accuracy_loss": 0.0}, None, 0.0),
        ({"max_accuracy_loss": 0.02}, 0.5, 0.01),
        ({"max_accuracy_loss": 0.05}, 0.9, 0.05),
        ({"kind": "accuracy", "max_ttft_ms": 50_000.0}, None, 0.0),
        ({"kind": "accuracy", "max_ttft_ms": 70.0}, 0.5, 0.01),
    ],
)
async def test_bounds_change_what_is_computed(
    bounds: dict[str, Any], ratio: float | None, loss: float
) -> None:
    wanted = Objective(**bounds)
    async with cell_of() as cell:
        await warmed(cell, objective=Objective(max_accuracy_loss=0.3))
        handle = submit(cell, objective=wanted)
        step = await cell.prefilling(handle)
        plan = handle.plan
        assert plan is not None
        assert plan.predicted_accuracy_loss == loss
        assert plan.bounds_met
        if ratio is None:
            assert (step.strategy, step.csa, plan.attention) == ("ulysses", None, "exact")
            return
        assert (step.strategy, plan.strategy, plan.attention) == ("csa", "csa", "csa")
        assert step.csa is not None
        (group,) = step.csa.layer_groups
        assert (group.drop_ratios, group.micro_partitions) == (((ratio,),), (4, 2))
        assert (step.csa.importance_layer, step.csa.levels) == ("same", 2)


async def test_fields_that_the_client_fixes_stay() -> None:
    fixed = CsaSettings(tail=100, importance_layer="same")
    options: dict[str, Any] = {
        "objective": Objective(max_accuracy_loss=0.05),
        "attention": "csa",
        "csa": fixed,
        "given": ("tail",),
    }
    async with cell_of() as cell:
        await warmed(cell, **options)
        step = await cell.prefilling(submit(cell, **options))
        assert step.csa is not None
        assert step.csa.tail == 100
        assert step.csa.layer_groups[0].drop_ratios == ((0.9,),)


async def test_a_bound_that_cannot_be_met_is_flagged_or_refused() -> None:
    impossible = Objective(kind="accuracy", max_ttft_ms=0.001)
    async with cell_of() as cell:
        await warmed(cell, objective=impossible)
        handle = submit(cell, objective=impossible)
        step = await cell.prefilling(handle)
        assert step.csa is not None
        assert step.csa.layer_groups[0].drop_ratios == ((0.9,),), "not what comes nearest"
        assert handle.explain()["plan"]["bounds_met"] is False
        handle.cancel()
        cell.prefill.finish_step(step)
        refused = submit(cell, objective=impossible, refuse_unmet=True)
        with pytest.raises(BoundNotMet, match="ms to the first token and a loss of accuracy of"):
            await anext(refused)
        cell.service.check_health()


async def test_overhead_is_learned_when_the_step_of_a_first_token_has_ended() -> None:
    async with cell_of() as cell:
        learned: list[int] = []
        cell.costs._overhead.observe = learned.append  # type: ignore[method-assign]
        handle = submit(cell, objective=Objective(max_accuracy_loss=0.3))
        step = await cell.prefilling(handle)
        cell.prefill.sample(cell.sequence_id_of(handle), 0)
        await anext(handle)
        assert not learned
        cell.prefill.finish_step(step)
        await until(lambda: learned)
        handle.cancel()
        await cell.wait_until_free()
        assert len(learned) == 1


async def test_queueing_counts_against_a_bound_on_ttft() -> None:
    """An option of 75 ms is too slow for a bound of 460 ms behind a step of 450 ms."""
    wanted = Objective(kind="accuracy", max_ttft_ms=460.0)
    async with cell_of() as cell:
        await warmed(cell, objective=wanted)
        ahead = cell.submit(tokens=9_000)
        await cell.prefilling(ahead)
        waits = submit(cell, objective=wanted)
        step = await cell.prefilling(waits)
        assert step.csa is not None
        assert step.csa.layer_groups[0].drop_ratios == ((0.9,),)


async def test_attention_is_exact_under_a_policy_that_cuts_prompts() -> None:
    async with cell_of(policy="tetris") as cell:
        handle = submit(cell, objective=Objective(max_accuracy_loss=1.0))
        step = await cell.prefilling(handle)
        assert step.csa is None
        assert all(bucket.row != BOUNDED for bucket in cell.costs.costs.table.buckets)


async def test_requests_of_different_bounds_share_no_step() -> None:
    async with cell_of(prefill=FakeGang("prefill", "p1", instances=1)) as cell:
        cell.decode.may_reserve.clear()
        bounds = (0.0, 0.5, 0.5)
        sent = [
            cell.submit(tokens=50, open=True, objective=Objective(max_accuracy_loss=bound))
            for bound in bounds
        ]
        cell.decode.may_reserve.set()
        strict, wide, same = [await cell.prefilling(handle) for handle in sent]
        assert wide == same
        assert strict.step_id != wide.step_id
