"""Random schedules of events, cancels and faults: every request ends, and the books balance."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_executor import MS, RandomCell
from scheduler_harness import messages, only

from csps.configurator.costs.cost_table import Costs, CostTable, Unmeasured
from csps.configurator.costs.latency import StepCost
from csps.configurator.costs.latency_tables import SHIPPED
from csps.protocols.gang.step_messages import MoveSequence
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.events.commands import ResetGang
from csps.services.scheduling.events.limits import QueueLimits, SchedulerDeadlines
from csps.services.scheduling.policies.registry import make_policy

SPREAD = {"spread_tokens": 700, "max_batch": 6}
RIDING = {"token_budget": 256, **SPREAD}
RINGS = {"short_tokens": 100, "max_batch": 6}
REPLANNING = {"replan_share": 0.01, "launch_ahead_s": 0}
"""Steps wait as long as they may, and every plan is looked at again."""
POLICIES = [
    ("csps", {"spt_tokens": 500, "short_tokens": 100, **SPREAD}, "pair"),
    ("fixed_sp", {"sp": 2, **SPREAD}, "pair"),
    ("tetris", {"improvement_rate": 0.05, "min_chunk": 1, **SPREAD}, "pair"),
    ("tetris", {"improvement_rate": 0.05, "min_chunk": 1, **REPLANNING, **SPREAD}, "pair"),
    ("context_parallel", RINGS, "pair"),
    ("context_parallel", RINGS, "elastic"),
    ("chunked_prefill", RIDING, "elastic"),
    ("chunked_prefill", RIDING, "pair"),
    ("loongserve", {"decode_iterations": 2, **SPREAD}, "elastic"),
    ("loongserve", {"decode_iterations": 0, "scale_up_batch": 1, **SPREAD}, "moving"),
]
MOVES = replace(
    SHIPPED,
    steps=tuple((key, StepCost.of_seconds(0.5, 1e-3, 0, 0)) for key, _ in SHIPPED.steps),
)
"""Moving takes no time beside prompts, so that it pays."""


IMPATIENT = SchedulerDeadlines(
    prefill_liveness_ns=400 * MS, decode_liveness_ns=400 * MS, liveness_check_ns=50 * MS
)
"""Gangs of random ranks are silent for longer now and then, and are reset."""


def storm(seed: int, deadlines: SchedulerDeadlines | None = None, window: int = 0) -> RandomCell:
    name, options, gangs = POLICIES[seed % len(POLICIES)]
    scheduler = Scheduler(
        make_policy(name, options),
        Costs(CostTable(latencies=MOVES if gangs == "moving" else Unmeasured())),
        limits=QueueLimits(max_waiting=8, max_waiting_tokens=30_000),
        deadlines=deadlines,
    )
    faults = (0.0, 0.05, 0.3)[seed // len(POLICIES) % 3]
    cell = RandomCell(scheduler, seed, faults=faults, elastic=gangs != "pair", window=window)
    cell.play(requests=25, turns=120)
    counts = scheduler.counts
    assert (counts.running, counts.waiting) == (0, 0)
    assert (counts.prefill_kv, counts.decode_kv, counts.window_kv) == (0.0, 0.0, 0.0)
    return cell


@pytest.mark.parametrize("seed", range(240))
def test_storm_loses_nothing(seed: int) -> None:
    storm(seed)


def test_storms_with_resets_lose_nothing() -> None:
    """Gangs are reset in the same round in which sequences join them, and steps are sent."""
    cells = [storm(seed, IMPATIENT) for seed in range(6 * len(POLICIES))]
    assert sum(len(only(cell.commands, ResetGang)) for cell in cells) > 50


IN_STEPS = [
    at
    for at, (name, _, gangs) in enumerate(POLICIES)
    if gangs == "pair" and name != "chunked_prefill"
]
"""Policies of a pair whose decode gang computes no prompts."""


@pytest.mark.parametrize("policy", IN_STEPS)
@pytest.mark.parametrize("window", [1, 40, 1000])
def test_storms_lose_no_slots_in_layers_with_a_window(policy: int, window: int) -> None:
    """Some instances have room for one sequence: its slots are what others wait for."""
    seeds = range(policy, 6 * len(POLICIES), len(POLICIES))
    cells = [storm(seed, window=window) for seed in seeds]
    assert sum(cell.full_windows for cell in cells) > 20


def test_sequences_move_in_storms() -> None:
    """More than a few, of gangs that may."""
    moving = range(len(POLICIES) - 1, 120, len(POLICIES))
    moves = [len(messages(storm(seed).commands, MoveSequence)) for seed in moving]
    assert sum(moves) > 3


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(100))
def test_ten_thousand_storms_lose_nothing(hundred: int) -> None:
    for seed in range(hundred * 100, hundred * 100 + 100):
        storm(seed)
