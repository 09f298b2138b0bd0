"""History cut and placed anywhere, under every strategy, against dense forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from csa_cases import locations, scattered
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from property_examples import examples
from strategy_ranks import LAYERS, Gangs, StrategyRanks, step_of
from uniform_plan import uniform_plan

from csps.actors.attention.choice import strategy_of
from csps.protocols.attention.csa import CsaPlan
from csps.protocols.core.placement import KvSlice
from csps.protocols.core.topology import Topology
from csps.protocols.gang.step_messages import PrefillStep

STRATEGIES = ["ulysses", "gathered_weights", "ring_kv", "ring_q", "levels", "sp_tp", "sp_tp_flat"]

several = settings(max_examples=examples(12), suppress_health_check=list(HealthCheck))


@st.composite
def exact_plans(draw: st.DrawFn, members: int, longest: int) -> CsaPlan:
    where = draw(locations(members))
    plan = uniform_plan(
        where,
        levels=draw(st.integers(1, len(Topology.of(where).granularities))),
        layers=LAYERS,
        micro_partitions=draw(st.integers(1, min(3, longest))),
    )
    return replace(plan, pipelined=draw(st.booleans()))


@st.composite
def steps(draw: st.DrawFn, strategy: str, members: int) -> PrefillStep:
    """Return steps with chunks in the middle of prompts, on members of which some have no rows."""
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    starts = [draw(st.integers(0, 15)) for _ in lengths]
    cuts = st.integers(0, sum(lengths))
    inner = sorted(draw(cuts) for _ in range(members - 1))
    bounds = [0, *inner, sum(lengths)]
    longest = max(stop - start for start, stop in pairwise(bounds))
    planned = strategy == "levels" or (strategy.startswith("sp_tp") and draw(st.booleans()))
    return step_of(
        bounds,
        lengths,
        starts=starts,
        history=[draw(scattered(start, members)) for start in starts],
        group=draw(st.permutations(range(members))),
        strategy=strategy,
        csa=draw(exact_plans(members, longest)) if planned else None,
    )


def check(gang: StrategyRanks, step: PrefillStep) -> None:
    forwards = gang.forwards(step)
    gang.hold_history(step, forwards)
    try:
        gang.check(step, gang.run(step, strategy_of), forwards)
    finally:
        for engine in gang.engines:
            for chunk in step.chunks:
                engine.pool.slots.free_sequence(chunk.sequence_id)


def on_gangs(
    *sizes: tuple[int, int], rings: Sequence[tuple[int, int]]
) -> list[tuple[str, int, int]]:
    """Return (strategy, members, tp); fewer sizes for rings, which have tests of their own."""
    return [
        (strategy, members, tp)
        for strategy in STRATEGIES
        for members, tp in (rings if strategy.startswith("ring") else sizes)
    ]


@pytest.mark.parametrize(
    ("strategy", "members", "tp"),
    on_gangs((1, 1), (3, 1), (4, 1), (1, 2), (2, 2), rings=((3, 1), (2, 2))),
)
@several
@given(data=st.data())
def test_every_strategy_merges_history(
    gangs: Gangs, strategy: str, members: int, tp: int, data: st.DataObject
) -> None:
    model = data.draw(st.sampled_from(("gqa", "mqa")))
    check(gangs(model, members, tp), data.draw(steps(strategy, members)))


@pytest.mark.parametrize("strategy", ["ulysses", "sp_tp"])
def test_members_without_heads_answer_for_history(gangs: Gangs, strategy: str) -> None:
    """Two of six members own no query head, and have the history."""
    slices = [
        KvSlice(5, 0, 7),
        KvSlice(4, 7, 9),
    ]
    bounds = [0, 9, 14, 30, 30, 40, 48]
    step = step_of(bounds, [48], starts=[9], history=[slices], strategy=strategy)
    check(gangs("gqa", 6, 1), step)
