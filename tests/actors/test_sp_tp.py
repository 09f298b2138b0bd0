"""SP-TP against the forward pass of one member that has everything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exchange_counter import counted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from property_examples import examples
from strategy_ranks import LAYERS, MODELS, Gangs, check_scattered_history, step_of
from uniform_plan import uniform_plan

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.sp_tp import head_attention
from csps.actors.attention.sp_tp.sp_tp import SpTp
from csps.actors.timing.timeline import TRANSFERS, PhaseTimeline

TWO_SERVERS = ("0-0-0", "0-0-1", "0-1-0", "0-1-1")


def exact(group: SpGroup, engine: Engine) -> SpTp:
    return SpTp(group, engine, None)


def pipelined(
    locations: tuple[str, ...], micro_partitions: int, *, hierarchical: bool = True
) -> Callable[[SpGroup, Engine], SpTp]:
    plan = uniform_plan(
        locations, levels=1, layers=LAYERS, micro_partitions=micro_partitions, pipelined=True
    )
    return lambda group, engine: SpTp(group, engine, plan, hierarchical=hierarchical)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("instances", [1, 2, 4])
def test_exact_equals_one_member(gangs: Gangs, model: str, instances: int) -> None:
    gang = gangs(model, instances, 1)
    bounds = [*[0, 23, 31, 31][:instances], 48]
    step = step_of(bounds, [5, 40, 3])
    gang.check(step, gang.run(step, exact), gang.forwards(step))


@pytest.mark.parametrize("kind", ["gangs", "gloo_gangs"])
@pytest.mark.parametrize("model", ["gqa", "mqa"])
@pytest.mark.parametrize("hierarchical", [True, False])
@pytest.mark.parametrize("micro_partitions", [1, 3])
def test_pipelined_equals_one_member(
    request: pytest.FixtureRequest,
    kind: str,
    model: str,
    hierarchical: bool,
    micro_partitions: int,
) -> None:
    """Cover relays that begin at once (NCCL's rules), and when rows have arrived (gloo)."""
    gang = request.getfixturevalue(kind)(model, 4, 1)
    step = step_of([0, 9, 14, 30, 48], [5, 40, 3])
    make = pipelined(TWO_SERVERS, micro_partitions, hierarchical=hierarchical)
    results = gang.run(step, make)
    gang.check(step, results, gang.forwards(step))
    if kind == "gloo_gangs":
        assert all(result.clock.exchange_s > 0 for result in results)
        assert all(0 <= result.clock.hidden <= 1 for result in results)


@pytest.mark.parametrize("hierarchical", [True, False])
@pytest.mark.parametrize("micro_partitions", [1, 3])
def test_rows_and_sums_travel_while_attention_is_computed(
    gangs: Gangs, hierarchical: bool, micro_partitions: int
) -> None:
    gang, step = gangs("gqa", 4, 1), step_of([0, 12, 24, 36, 48], [48])
    with counted(head_attention) as overlaps:
        gang.run(step, pipelined(TWO_SERVERS, micro_partitions, hierarchical=hierarchical))
    assert overlaps.share > 0.5
    assert overlaps.phases == {"all-gather", "reduce-scatter"}


@pytest.mark.parametrize("hierarchical", [True, False])
def test_not_pipelined_nothing_is_computed_while_anything_travels(
    gloo_gangs: Gangs, hierarchical: bool
) -> None:
    plan = uniform_plan(TWO_SERVERS, levels=1, layers=LAYERS, pipelined=False)

    def make(group: SpGroup, engine: Engine) -> SpTp:
        group.clock.timeline = PhaseTimeline(on=True)
        return SpTp(group, engine, plan, hierarchical=hierarchical)

    gang, step = gloo_gangs("gqa", 4, 1), step_of([0, 9, 14, 30, 48], [5, 40, 3])
    results = gang.run(step, make)
    gang.check(step, results, gang.forwards(step))
    for clock in (result.clock for result in results):
        assert clock.hidden == 0
        travels = [event for event in clock.timeline.events if event.name in TRANSFERS]
        computes = [
            event
            for event in clock.timeline.events
            if event.name not in TRANSFERS and event.name != "wait"
        ]
        assert {event.name for event in computes} == {"qkv", "attention", "linear"}
        for travel in travels:
            for compute in computes:
                assert travel.end_ns <= compute.start_ns or compute.end_ns <= travel.start_ns


def test_a_timeline_tells_level_and_micro_partition(gangs: Gangs) -> None:
    make = pipelined(TWO_SERVERS, 2)

    def with_timeline(group: SpGroup, engine: Engine) -> SpTp:
        group.clock.timeline = PhaseTimeline(on=True)
        return make(group, engine)

    results = gangs("gqa", 4, 1).run(step_of([0, 12, 24, 36, 48], [48]), with_timeline)
    for result in results:
        for name in ("qkv", "attention"):
            all_events = result.clock.timeline.events
            events = [event for event in all_events if event.name == name and event.level]
            expected = {(level, micro) for level in (1, 2, 3) for micro in (0, 1)}
            assert {(event.level, event.micro) for event in events} == expected


@pytest.mark.parametrize("instances", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
@settings(max_examples=examples(7), suppress_health_check=list(HealthCheck))
@given(
    model=st.sampled_from(("gqa", "mqa", "mha")),
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=4),
    micro_partitions=st.integers(1, 4),
    hierarchical=st.booleans(),
    data=st.data(),
)
def test_pipelined_equals_not_pipelined(
    gangs: Gangs,
    instances: int,
    model: str,
    lengths: list[int],
    micro_partitions: int,
    hierarchical: bool,
    data: st.DataObject,
) -> None:
    gang, total = gangs(model, instances, 1), sum(lengths)
    cuts = sorted(data.draw(st.integers(0, total)) for _ in range(instances - 1))
    servers = sorted(data.draw(st.integers(0, 2)) for _ in range(instances))
    step = step_of([0, *cuts, total], lengths)
    locations = tuple(f"0-{server}-{place}" for place, server in enumerate(servers))
    make = pipelined(locations, micro_partitions, hierarchical=hierarchical)
    for got, expected in zip(gang.run(step, make), gang.run(step, exact), strict=True):
        torch.testing.assert_close(got.x_td, expected.x_td, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tp", [2, 4])
def test_members_of_tensor_parallel_instances(gangs: Gangs, tp: int) -> None:
    gang = gangs("gqa", 2, tp)
    step = step_of([0, 21, 48], [5, 40, 3])
    forwards = gang.forwards(step)
    gang.check(step, gang.run(step, exact), forwards)
    gang.check(step, gang.run(step, pipelined(("0-0-0", "0-1-0"), 2)), forwards)
    gang.check(step, gang.run(step, pipelined(("0-0-0", "0-0-1"), 2)), forwards)


def test_more_members_than_heads(gangs: Gangs) -> None:
    gang = gangs("gqa", 6, 1)
    step = step_of([0, 9, 14, 30, 30, 40, 48], [48])
    locations = tuple(f"0-{member // 2}-{member % 2}" for member in range(6))
    forwards = gang.forwards(step)
    gang.check(step, gang.run(step, exact), forwards)
    gang.check(step, gang.run(step, pipelined(locations, 2)), forwards)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_history_wherever_it_lies(gangs: Gangs, tp: int) -> None:
    check_scattered_history(gangs("gqa", 2, tp), exact)
