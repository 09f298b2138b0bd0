"""SP-TP against the forward pass of one member that has everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategy_ranks import StrategyRanks, job_of, strategy_ranks
from tiny_checkpoints import make_checkpoint

from csps.actors.engine import Engine
from csps.actors.strategies.group import SpGroup
from csps.actors.strategies.sp_tp import SpTp
from csps.protocols.csa import CsaPlan
from csps.protocols.messages import KvShare, Span

LAYERS = 3
MODELS: dict[str, dict[str, Any]] = {
    "gqa": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "mqa": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "mha": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6},
    "biased": {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True},
    "qk-norm": {"family": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2},
}
TWO_SERVERS = ("0-0-0", "0-0-1", "0-1-0", "0-1-1")

Gangs = Callable[..., StrategyRanks]


@pytest.fixture(scope="module")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gangs]:
    """Starts each gang once."""
    started: dict[tuple[str, int, int], StrategyRanks] = {}
    with ExitStack() as stack:

        def gang(model: str, instances: int, tp: int = 1) -> StrategyRanks:
            key = model, instances, tp
            if key not in started:
                config = {"num_hidden_layers": LAYERS, **MODELS[model]}
                path = make_checkpoint(tmp_path_factory.mktemp(model), **config)
                started[key] = stack.enter_context(strategy_ranks(path, instances=instances, tp=tp))
            return started[key]

        yield gang


def exact(group: SpGroup, engine: Engine) -> SpTp:
    return SpTp(group, engine, None)


def pipelined(
    locations: tuple[str, ...], micro_partitions: int, *, hierarchical: bool = True
) -> Callable[[SpGroup, Engine], SpTp]:
    plan = CsaPlan.uniform(
        locations, levels=1, layers=LAYERS, micro_partitions=micro_partitions, pipelined=True
    )
    return lambda group, engine: SpTp(group, engine, plan, hierarchical=hierarchical)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("instances", [1, 2, 4])
def test_exact_equals_one_member(gangs: Gangs, model: str, instances: int) -> None:
    gang = gangs(model, instances)
    bounds = [*[0, 23, 31, 31][:instances], 48]
    job = job_of(bounds, [5, 40, 3])
    gang.check(job, gang.run(job, exact), gang.forwards(job))


@pytest.mark.parametrize("model", ["gqa", "mqa"])
@pytest.mark.parametrize("hierarchical", [True, False])
@pytest.mark.parametrize("micro_partitions", [1, 3])
def test_pipelined_equals_one_member(
    gangs: Gangs, model: str, hierarchical: bool, micro_partitions: int
) -> None:
    gang = gangs(model, 4)
    job = job_of([0, 9, 14, 30, 48], [5, 40, 3])
    make = pipelined(TWO_SERVERS, micro_partitions, hierarchical=hierarchical)
    results = gang.run(job, make)
    gang.check(job, results, gang.forwards(job))
    assert all(result.clock.exchange_s > 0 for result in results)
    assert all(0 <= result.clock.hidden <= 1 for result in results)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    model=st.sampled_from(("gqa", "mqa", "mha")),
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=4),
    cuts=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    servers=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    micro_partitions=st.integers(1, 4),
    hierarchical=st.booleans(),
)
def test_pipelined_equals_not_pipelined(
    gangs: Gangs,
    model: str,
    lengths: list[int],
    cuts: list[float],
    servers: list[int],
    micro_partitions: int,
    hierarchical: bool,
) -> None:
    gang, total = gangs(model, 4), sum(lengths)
    job = job_of([0, *sorted(int(total * cut) for cut in cuts), total], lengths)
    locations = tuple(f"0-{server}-{place}" for place, server in enumerate(sorted(servers)))
    make = pipelined(locations, micro_partitions, hierarchical=hierarchical)
    for one, other in zip(gang.run(job, make), gang.run(job, exact), strict=True):
        torch.testing.assert_close(one.x_td, other.x_td, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tp", [2, 4])
def test_members_of_tensor_parallel_instances(gangs: Gangs, tp: int) -> None:
    gang = gangs("gqa", 2, tp)
    job = job_of([0, 21, 48], [5, 40, 3])
    forwards = gang.forwards(job)
    gang.check(job, gang.run(job, exact), forwards)
    gang.check(job, gang.run(job, pipelined(("0-0-0", "0-1-0"), 2)), forwards)
    gang.check(job, gang.run(job, pipelined(("0-0-0", "0-0-1"), 2)), forwards)


def test_more_members_than_heads(gangs: Gangs) -> None:
    gang = gangs("gqa", 6)
    job = job_of([0, 9, 14, 30, 30, 40, 48], [48])
    locations = tuple(f"0-{member // 2}-{member % 2}" for member in range(6))
    forwards = gang.forwards(job)
    gang.check(job, gang.run(job, exact), forwards)
    gang.check(job, gang.run(job, pipelined(locations, 2)), forwards)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_history_wherever_it_lies(gangs: Gangs, tp: int) -> None:
    gang = gangs("gqa", 2, tp)
    shares = [
        KvShare(instance=1, span=Span(start=0, stop=7)),
        KvShare(instance=0, span=Span(start=7, stop=19)),
        KvShare(instance=1, span=Span(start=19, stop=20)),
    ]
    job = job_of([0, 12, 25], [4, 15, 6], starts=[0, 20, 0], history=[[], shares, []])
    forwards = gang.forwards(job)
    gang.hold_history(job, forwards)
    try:
        gang.check(job, gang.run(job, exact), forwards)
    finally:
        for engine in gang.engines:
            engine.pool.free_request(1)
