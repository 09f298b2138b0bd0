"""Requests for sparse attention, from submission to what ranks and clients see."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from fake_gangs import SHAPE, FakeCell, FakeGang, fake_cell, until

from csps.configurator.plan.strategy_rules import StrategyRules
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import StrategyChoices, StrategyQuestions
from csps.protocols.core.errors import ConfigError, InvalidRequest
from csps.protocols.gang.messages import DroppedMass, PrefillDone, Sampling
from csps.services.requests.request_handle import DroppedMassByLayer, RequestHandle, Timings
from csps.services.requests.request_spec import RequestSpec

RULES = StrategyRules(SHAPE)
SETTINGS = CsaSettings(drop_ratios=((0.5,),))


async def configure(questions: StrategyQuestions) -> StrategyChoices:
    return RULES.answer(questions)


def cell_of(instances: int = 2, **options: Any) -> Any:
    gang = FakeGang("prefill", "p1", instances=instances)
    return fake_cell(**{"prefill": gang, "configure": configure, **options})


def submit(cell: FakeCell, tokens: int, **options: Any) -> RequestHandle:
    return cell.submit(tokens=tokens, attention="csa", csa=CsaSettings(**options))


async def test_a_plan_reaches_every_rank_with_the_locations_of_its_group() -> None:
    async with cell_of(instances=3) as cell:
        handle = submit(
            cell, 1500, levels=2, drop_ratios=((0.5,),), micro_partitions=((3,),), strategy="ntp",
            importance_window=9, pipelined=False,
        )  # fmt: skip
        step = await cell.prefilling(handle)
        assert [rank.steps[0].csa for rank in cell.prefill.ranks] == [step.csa] * 3
        assert step.strategy == "csa"
        assert step.csa is not None
        assert step.csa.locations == tuple(f"0-0-{instance}" for instance in step.group)
        assert len(step.csa.locations) == 2
        assert (step.csa.importance_window, step.csa.pipelined) == (9, False)
        layers = step.csa.layer_groups[0]
        assert (layers.first, layers.stop) == (0, 2)
        assert layers.drop_ratios == ((0.5,),)
        assert layers.micro_partitions == (3, 3)
        plan = handle.explain()["plan"]
        assert plan["csa"]["locations"] == step.csa.locations
        assert (plan["attention"], plan["predicted_accuracy_loss"]) == ("csa", None)


@pytest.mark.parametrize("kept_only", [False, True])
async def test_decode_ranks_learn_whether_they_get_kept_tokens_only(kept_only: bool) -> None:
    async with cell_of() as cell:
        handle = submit(cell, 1500, drop_ratios=((0.5,),), decode_kept_only=kept_only)
        step = await cell.prefilling(handle)
        assert step.csa is not None
        assert step.csa.decode_kept_only == kept_only
        sequence_id = cell.sequence_id_of(handle)
        assert {rank.reserved[sequence_id].kept_only for rank in cell.decode.ranks} == {kept_only}


async def test_a_short_prompt_on_one_instance_is_explained_as_exact() -> None:
    async with cell_of() as cell:
        handle = submit(cell, 50, levels=2, drop_ratios=((0.5,),))
        step = await cell.prefilling(handle)
        assert step.high_priority
        assert step.csa is not None
        assert step.csa.levels == 1
        plan = handle.explain()["plan"]
        assert plan["csa"]["levels"] == 1
        assert plan["reason"].endswith("one instance, which attends exactly")


async def test_only_requests_with_equal_plans_are_in_one_step() -> None:
    async with cell_of(instances=1) as cell:
        cell.decode.may_reserve.clear()
        sparse = [submit(cell, 50, drop_ratios=((ratio,),)) for ratio in (0.5, 0.25, 0.5)]
        exact = [cell.submit(tokens=50) for _ in range(2)]
        cell.decode.may_reserve.set()
        steps = cell.prefill.leader.steps
        await until(lambda: len(steps) == 2)  # an instance has no more at a time
        for chunk in steps[0].chunks:
            cell.prefill.sample(chunk.sequence_id, 0)
        cell.prefill.finish_step(steps[0])
        await until(lambda: len(steps) == 3)
        together = [[chunk.sequence_id for chunk in step.chunks] for step in steps]
        expected = [[sparse[0], sparse[2]], [sparse[1]], exact]
        assert together == [[cell.sequence_id_of(handle) for handle in group] for group in expected]
        assert steps[2].csa is None


async def test_a_retry_lowers_the_request_again() -> None:
    async with cell_of(instances=1) as cell:
        handle = submit(cell, 1500, levels=1, drop_ratios=((0.5,),))
        await cell.prefilling(handle)
        sequence_id = cell.sequence_id_of(handle)
        cell.prefill.fail(sequence_id, "TransferError")
        await until(lambda: len(cell.prefill.leader.steps) == 2)
        first, second = cell.prefill.leader.steps
        assert first.csa == second.csa


@pytest.mark.parametrize(
    ("options", "param"),
    [({"levels": 3}, "csps.levels"), ({"micro_partitions": ((51,),)}, "csps.micro_partitions")],
)
async def test_a_plan_that_the_cluster_cannot_run_is_refused_at_submission(
    options: dict[str, Any], param: str
) -> None:
    async with cell_of() as cell:
        with pytest.raises(InvalidRequest) as refused:
            submit(cell, 50, **options)
        assert refused.value.param == param
        await until(lambda: not cell.service.counts.waiting)


async def test_an_open_strategy_is_explained_once_it_was_compared() -> None:
    may_answer = asyncio.Event()

    async def later(questions: StrategyQuestions) -> StrategyChoices:
        await may_answer.wait()
        return RULES.answer(questions)

    async with cell_of(configure=later) as cell:
        for _ in range(2):
            handle = submit(cell, 1500, drop_ratios=((0.5,),))
            await cell.prefilling(handle)
            assert handle.plan is not None
            if not may_answer.is_set():
                assert handle.plan.strategy == "csa"
                assert "nothing was compared yet" in handle.plan.reason
                before = cell.costs.costs.table.digest
                may_answer.set()
                await until(lambda before=before: cell.costs.costs.table.digest != before)
            handle.cancel()
        assert "because nothing moves less" in handle.plan.reason


async def test_a_step_that_no_group_can_run_fails_only_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Settings are checked at submission, so such a step is a bug."""

    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("no group can run this")

    async with cell_of() as cell:
        other = cell.submit(tokens=900)
        await cell.decoding(other)
        monkeypatch.setattr(CsaSettings, "for_group", refuse)
        bad = RequestSpec(
            client_request_id="bad",
            prompt=np.arange(1500, dtype=np.int32),
            sampling=Sampling(max_tokens=2),
            attention="csa",
            csa=SETTINGS,
        )
        handle = cell.service.submit(bad)
        with pytest.raises(ConfigError, match="no group can run this"):
            await anext(handle)
        cell.service.check_health()
        assert cell.service.ready
        other.cancel()
        await cell.wait_until_free()


async def test_coverages_run_by_sp_ntp_and_their_loss_is_unknown() -> None:
    async with cell_of() as cell:
        for _ in range(2):  # before and after the configurator has answered
            handle = submit(cell, 1500, coverages=((0.9,),))
            step = await cell.prefilling(handle)
            assert step.strategy == "csa"
            assert step.csa is not None
            assert step.csa.layer_groups[0].coverages == ((0.9,),)
            assert handle.plan is not None
            assert handle.plan.predicted_accuracy_loss is None
            before = cell.costs.costs.table.digest
            if "nothing was compared yet" in handle.plan.reason:
                await until(lambda before=before: cell.costs.costs.table.digest != before)
            handle.cancel()
        assert "where a coverage saves bytes" in handle.plan.reason


@pytest.mark.parametrize("coverage", [((0.9, 0.8, 0.7),), ((0.9,),) * 3])
async def test_coverages_of_another_model_are_refused(coverage: Any) -> None:
    async with cell_of() as cell:
        with pytest.raises(InvalidRequest) as refused:
            submit(cell, 1500, coverages=coverage)
        assert refused.value.param == "csps.coverage"


def mass(first: int, dropped: list[list[float]], total: list[list[float]]) -> DroppedMass:
    return DroppedMass(
        sequence_id=1,
        layers=tuple(range(1, 1 + len(dropped))),
        first_kv_head=first,
        dropped=np.array(dropped, np.float32).tobytes(),
        total=np.array(total, np.float32).tobytes(),
    )


def test_dropped_mass_adds_up_over_ranks_before_heads_are_compared() -> None:
    """Two members have parts of heads 0 and 1; another rank has head 2."""
    masses = DroppedMassByLayer()
    first = mass(0, [[0.5, 0.0], [0.0, 0.0]], [[1.5, 1.0], [1.0, 1.0]])
    second = mass(0, [[0.0, 0.1], [0.0, 0.2]], [[0.5, 1.0], [1.0, 1.0]])
    other = mass(2, [[0.7], [0.0]], [[2.0], [2.0]])
    masses.add_chunk(100, [first, second, other])
    one, two = masses.by_layer()
    assert one == {
        "layer": 1,
        "mean": pytest.approx((0.25 + 0.05 + 0.35) / 3),
        "worst_head": pytest.approx(0.35),
    }
    assert two == {
        "layer": 2,
        "mean": pytest.approx(0.1 / 3),
        "worst_head": pytest.approx(0.1),
    }


def test_dropped_mass_of_chunks_is_weighted_by_their_tokens() -> None:
    masses = DroppedMassByLayer()
    masses.add_chunk(100, [mass(0, [[0.2]], [[1.0]])])
    masses.add_chunk(300, [])  # a chunk on one instance drops nothing
    assert masses.by_layer() == [
        {"layer": 1, "mean": pytest.approx(0.05), "worst_head": pytest.approx(0.2)}
    ]


def test_hidden_communication_covers_all_ranks() -> None:
    timings = Timings()
    timings.add_figures([_done(waited_s=1.0, exchange_s=2.0), _done(waited_s=0.0, exchange_s=2.0)])
    assert (timings.communication_s, timings.exchange_s) == (1.0, 2.0)
    assert timings.hidden_communication == 0.75
    timings.add_figures([_done(waited_s=0.0, exchange_s=0.0)])
    assert timings.hidden_communication is None


def _done(*, waited_s: float, exchange_s: float) -> PrefillDone:
    return PrefillDone(
        step_id=1, rank=0, cancelled=False, queue_s=0.0, compute_s=0.0, transfer_s=0.0,
        yielded_s=0.0, communication_s=waited_s, exchange_s=exchange_s,
    )  # fmt: skip
