"""Conversations on simulated gangs that keep KV."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from single_group_scheduler import cluster
from test_piggyback_simulated import LINE, STEP

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import load_cluster
from csps.loadgen.simulator.kernel import Abandoned, GangFault, SimulationResult, Simulator
from csps.loadgen.simulator.requests import Arrival, arrivals_of, chained
from csps.loadgen.simulator.simulate import scheduler_of
from csps.loadgen.workloads.request import HASH_BLOCK_TOKENS, WorkloadRequest
from csps.protocols.core.errors import ConfigError
from csps.services.scheduling.events.limits import ReuseSettings

MS = 1_000_000
BLOCK = 64
POLICIES: dict[str, dict[str, Any]] = {
    "csps": {"spt_tokens": 500, "short_tokens": 200, "spread_tokens": 400},
    "fixed_sp": {"sp": 2, "spread_tokens": 400},
    "chunked_prefill": {"token_budget": 256, "spread_tokens": 400},
    "context_parallel": {"short_tokens": 200},
    "tetris": {"spread_tokens": 400},
    "loongserve": {},
}
CELLS = [(name, False) for name in POLICIES if name != "loongserve"]
CELLS += [("chunked_prefill", True), ("loongserve", True)]


def model(elastic: bool, kv_slots: int = 40_000) -> ClusterModel:
    pair = cluster(instances=4, decode=2, step=STEP, regime=LINE, kv_slots=kv_slots)
    parts = dict(vars(pair))
    if elastic:
        parts["prefill"] = parts["decode"]
    return ClusterModel(**parts)


def conversations(seed: int, count: int = 8, turns: int = 4) -> list[Arrival]:
    """Return turns half a second apart, each of which begins with all of the one before."""
    rng = random.Random(seed)
    arrivals = []
    for number in range(count):
        blocks = 0
        for turn in range(turns):
            blocks += rng.randint(1, 6)
            names = chained([1000 * number + block for block in range(blocks)])
            at_ns = turn * 500 * MS + rng.randint(0, 100) * MS
            tokens = blocks * BLOCK + rng.randint(1, BLOCK)
            arrivals.append(
                Arrival(at_ns=at_ns, prompt_tokens=tokens, output_tokens=5, hashes=names)
            )
    return sorted(arrivals, key=lambda arrival: arrival.at_ns)


def run(
    arrivals: list[Arrival],
    policy: str,
    elastic: bool,
    *,
    kv_slots: int = 40_000,
    piggyback_tokens: int = 0,
    notice_ns: int = 0,
    **more: Any,
) -> SimulationResult:
    at = replace(model(elastic, kv_slots), notice_ns=notice_ns)
    reuse = ReuseSettings(enabled=True, block_tokens=BLOCK)
    options = {
        **POLICIES[policy],
        **({"prefill_tokens_max": piggyback_tokens} if piggyback_tokens else {}),
    }
    scheduler = scheduler_of(at, policy, options, reuse)
    simulator = Simulator(scheduler, at, arrivals, **more)
    found = simulator.run()
    simulator.gangs.check_idle()
    scheduler.check_invariants()
    return found


@pytest.mark.parametrize(("policy", "elastic"), CELLS)
def test_later_turns_begin_where_the_one_before_ended(policy: str, elastic: bool) -> None:
    arrivals = conversations(1)
    found = run(arrivals, policy, elastic)
    known: dict[bytes, int] = {}
    for outcome in found.outcomes:  # in order of arrival, and far enough apart
        hashes = outcome.arrival.hashes
        expected = known.get(hashes[0], 0) * BLOCK
        # LoongServe starts a prompt on idle instances while those that retain it are busy.
        assert outcome.cached in ((0, expected) if policy == "loongserve" else (expected,))
        known[hashes[0]] = len(hashes)
    again = run([replace(arrival, hashes=()) for arrival in arrivals], policy, elastic)
    reused, all_computed = (
        sum(outcome.ttft_ns for outcome in result.outcomes) for result in (found, again)
    )
    assert reused < all_computed


@pytest.mark.parametrize(("policy", "elastic"), CELLS)
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_where_room_is_short_and_gangs_die(
    policy: str, elastic: bool, seed: int
) -> None:
    faults = [
        GangFault(at_ns=at * MS, role=role, up=up)  # type: ignore[arg-type]
        for at, role, up in (
            [(700, "elastic", False), (900, "elastic", True)]
            if elastic
            else [(600, "prefill", False), (800, "prefill", True)]
        )
    ]
    found = run(
        conversations(seed),
        policy,
        elastic,
        kv_slots=1800,
        faults=faults,
        abandoned=[Abandoned(at_ns=601 * MS, request=number) for number in (9, 10, 11)],
    )
    assert all(outcome.ended_ns >= 0 for outcome in found.outcomes)


@pytest.mark.parametrize("policy", ["csps", "context_parallel"])
def test_ends_of_prompts_are_piggybacked_on_the_decode_gang(policy: str) -> None:
    """The gang that prefills dies between two turns, with all that it retains; the other one
    retains as much."""
    arrivals = conversations(1)
    faults = [
        GangFault(at_ns=at * MS, role="prefill", up=up) for at, up in ((450, False), (460, True))
    ]
    found, without = (
        {
            outcome.arrival.at_ns: outcome.cached
            for outcome in run(arrivals, policy, False, **more).outcomes
        }
        for more in ({"piggyback_tokens": 448, "faults": faults}, {"faults": faults})
    )
    second = [arrival for arrival in arrivals if 500 * MS <= arrival.at_ns < 1000 * MS]
    assert not any(without[arrival.at_ns] for arrival in second)
    assert all(found[arrival.at_ns] for arrival in second)


def test_a_cluster_without_hybrid_costs_is_rejected_before_the_run() -> None:
    """The decode instances have eight GPUs, on which no prompt was measured."""
    published = load_cluster("tetris-16")
    scheduler_of(published, "csps", {})
    reuse = ReuseSettings(enabled=True)
    with pytest.raises(ConfigError, match=r"no latencies of .* with tp=8"):
        scheduler_of(published, "csps", {"prefill_tokens_max": 64}, reuse)


def test_piggybacked_prefill_without_a_prefix_cache_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"needs --kv-reuse: .*; try `--kv-reuse 0.5`"):
        scheduler_of(load_cluster("local"), "csps", {"prefill_tokens_max": 64})


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_where_room_is_short_and_the_gang_that_decodes_dies(seed: int) -> None:
    faults = [
        GangFault(at_ns=at * MS, role="decode", up=up) for at, up in ((600, False), (800, True))
    ]
    found = run(
        conversations(seed), "csps", False, piggyback_tokens=256, kv_slots=1800, faults=faults
    )
    assert all(outcome.ended_ns >= 0 for outcome in found.outcomes)


def test_a_turn_may_reuse_kv_that_is_about_to_be_retained() -> None:
    """An iteration is under way when the gang is told to retain the KV and to begin the next
    turn.
    """
    beside = Arrival(at_ns=0, prompt_tokens=20_000, output_tokens=2000)
    first = Arrival(at_ns=0, prompt_tokens=200, output_tokens=5, hashes=chained([1, 2, 3]))
    alone = run([beside, first], "csps", False, notice_ns=MS)
    next_turn = replace(first, at_ns=alone.outcomes[1].ended_ns, prompt_tokens=250)
    found = run([beside, first, next_turn], "csps", False, notice_ns=MS)
    assert found.outcomes[2].cached == 3 * BLOCK


def test_hash_ids_of_a_trace_name_blocks() -> None:
    one, other = (
        WorkloadRequest(arrival_ns=0, input_length=1100, output_length=1, hash_ids=ids)
        for ids in ((1, 2, 3), (1, 9, 3))
    )
    first, second = arrivals_of([one, other])
    assert len(first.hashes) == 1100 // HASH_BLOCK_TOKENS == 2
    assert first.hashes[0] == second.hashes[0]
    assert first.hashes[1] != second.hashes[1]


@settings(max_examples=examples(20))
@pytest.mark.parametrize(("policy", "elastic"), CELLS)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(4, 12),
    kv_slots=st.sampled_from((800, 1000, 1500)),
    notice_ns=st.sampled_from((0, 2 * MS)),
)
def test_conversations_end_on_slots_for_one_or_two(
    policy: str, elastic: bool, seed: int, count: int, kv_slots: int, notice_ns: int
) -> None:
    """A start has to evict most of what is cached."""
    arrivals = conversations(seed, count=count)
    found = run(arrivals, policy, elastic, kv_slots=kv_slots, notice_ns=notice_ns)
    assert all(not outcome.error for outcome in found.outcomes)


@settings(max_examples=examples(20))
@pytest.mark.parametrize("policy", ["csps", "context_parallel"])
@given(
    count=st.integers(129, 200),
    cached=st.booleans(),
    kv_slots=st.sampled_from((4000, 40_000)),
    notice_ns=st.sampled_from((0, 2 * MS)),
)
def test_more_requests_start_at_once_than_one_round_takes(
    policy: str, count: int, cached: bool, kv_slots: int, notice_ns: int
) -> None:
    """A round starts 128 of them, and the next one follows at once, unless the others wait for
    slots of cached KV."""
    crowd = [
        Arrival(at_ns=2000 * MS, prompt_tokens=20, output_tokens=2, hashes=()) for _ in range(count)
    ]
    before = conversations(1, count=4) if cached else []
    many = {**POLICIES[policy], "max_batch": 1 << 20}
    at = replace(model(elastic=False, kv_slots=kv_slots), notice_ns=notice_ns)
    scheduler = scheduler_of(at, policy, many, ReuseSettings(enabled=True, block_tokens=BLOCK))
    found = Simulator(scheduler, at, [*before, *crowd]).run()
    assert all(not outcome.error for outcome in found.outcomes)
