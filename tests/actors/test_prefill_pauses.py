"""A step may stand still after every block of a layer's attention, and inside no phase."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise

import pytest
import torch
from small_blocks import blocks_of
from strategy_ranks import (
    LAYERS,
    Gangs,
    RankResult,
    StrategyRanks,
    check_scattered_history,
    step_of,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from uniform_plan import uniform_plan

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.base.strategy import Strategy
from csps.actors.attention.base.yield_points import query_blocks
from csps.actors.attention.choice import strategy_of
from csps.actors.timing.timeline import TRANSFERS, PhaseEvent, PhaseTimeline
from csps.protocols.gang.step_messages import PrefillStep

ROWS = 4
"""Of a block."""
PIECES = (5, 40, 3)
WHOLE_ROWS = 12
"""The blocks of all pieces together."""
STRATEGIES = [("ulysses", 2, 1), ("gathered_weights", 2, 2), ("sp_tp", 2, 1), ("sp_tp", 2, 2)]


class Watched:
    """Makes the strategy of a step, and notes when each rank has passed a point."""

    def __init__(self) -> None:
        self.given: dict[int, list[int]] = defaultdict(list)

    def __call__(self, group: SpGroup, engine: Engine) -> AbstractContextManager[Strategy]:
        group.clock.timeline = PhaseTimeline(on=True)
        return strategy_of(group, engine)

    def part(self, rank: int, number: int) -> None:
        self.given[rank].append(time.time_ns())


def ran(gang: StrategyRanks, step: PrefillStep) -> list[RankResult]:
    """The step on all ranks, which have given way where they must, and have the right rows."""
    watched = Watched()
    results = gang.run(step, watched, watched.part)
    gang.check(step, results, gang.forwards(step))
    for rank, result in enumerate(results):
        check_given(result.clock.timeline.events, watched.given[rank])
    return results


def check_given(events: Sequence[PhaseEvent], given: Sequence[int]) -> None:
    computing = [e for e in events if e.name not in TRANSFERS and e.name != "wait"]
    computing.sort(key=lambda event: event.start_ns)
    for event in computing:
        assert not any(event.start_ns < now < event.end_ns for now in given)
    for one, other in pairwise(computing):
        if one.name == "attention":
            assert any(one.end_ns <= now <= other.start_ns for now in given)


def attention_phases(result: RankResult) -> Counter[int | None]:
    """How many each layer had."""
    return Counter(e.layer for e in result.clock.timeline.events if e.name == "attention")


@pytest.mark.parametrize(("strategy", "instances", "tp"), STRATEGIES)
def test_after_every_block(gangs: Gangs, strategy: str, instances: int, tp: int) -> None:
    step = step_of([0, 21, 48], PIECES, strategy=strategy)
    with blocks_of(ROWS):
        results = ran(gangs("gqa", instances, tp), step)
    blocks = sum(-(-length // ROWS) for length in PIECES)
    expected = blocks if strategy == "ulysses" else WHOLE_ROWS
    assert all(
        attention_phases(result) == dict.fromkeys(range(LAYERS), expected) for result in results
    )


@pytest.mark.parametrize(("strategy", "instances", "tp"), STRATEGIES)
def test_after_every_block_that_attends_to_history(
    gangs: Gangs, strategy: str, instances: int, tp: int
) -> None:
    watched, clocks = Watched(), []

    def make(group: SpGroup, engine: Engine) -> AbstractContextManager[Strategy]:
        clocks.append((engine.rank, group.clock))
        return watched(group, engine)

    with blocks_of(ROWS):
        check_scattered_history(gangs("gqa", instances, tp), make, watched.part, strategy=strategy)
    assert len(clocks) == instances * tp
    for rank, clock in clocks:
        check_given(clock.timeline.events, watched.given[rank])


def test_after_every_block_of_a_micro_partition(gangs: Gangs) -> None:
    """And a micro-partition of six rows is two blocks."""
    locations = ("0-0-0", "0-0-1", "0-1-0", "0-1-1")
    plan = uniform_plan(locations, levels=1, layers=LAYERS, micro_partitions=2)
    step = step_of([0, 12, 24, 36, 48], PIECES, strategy="sp_tp", csa=plan)
    gang = gangs("gqa", 4, 1)
    whole = ran(gang, step)
    with blocks_of(ROWS):
        cut = ran(gang, step)
    for one, other in zip(whole, cut, strict=True):
        assert attention_phases(other) == {i: 2 * n for i, n in attention_phases(one).items()}


@pytest.mark.parametrize("strategy", ["sp_tp", "sp_tp_flat"])
def test_sp_tp_after_its_products_too(gangs: Gangs, strategy: str) -> None:
    """Of all rows' queries, keys and values."""
    watched = Watched()
    step = step_of([0, 21, 48], PIECES, strategy=strategy)
    gangs("gqa", 2, 1).run(step, watched, watched.part)
    handed_on = len(step.group)
    # One where a layer begins, and one before each exchange: what is handed on, and what follows.
    closed = 1 + handed_on + 1
    for given in watched.given.values():
        assert len(given) == LAYERS * (1 + 1 + closed)


def test_a_gpu_is_handed_attention_as_a_whole() -> None:
    with FakeTensorMode(), blocks_of(ROWS):
        sizes = {
            device: [
                rows.stop - rows.start
                for rows in query_blocks(torch.empty(10, 2, 8, device=device), 10)
            ]
            for device in ("cpu", "cuda")
        }
    assert sizes == {"cpu": [4, 4, 2], "cuda": [10]}
