"""Capacity check: what fits, by a policy's `fits`, is what its `decide` starts on idle gangs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_view import PLAIN, waiting
from random_executor import gang_up

from csps.configurator.costs.cost_table import Costs, CostTable
from csps.services.scheduling.deciding.decisions import (
    CapacityCheck,
    PiggybackPlan,
    Policy,
    SchedulerView,
    StartPlan,
)
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.state.state import Gang, GangPair, Priority, Request, new_gang

POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("csps", {"spt_tokens": 100, "short_tokens": 20}),
    ("csps", {"spt_tokens": 100, "short_tokens": 0, "spread_tokens": 50}),
    ("context_parallel", {"short_tokens": 20}),
    ("fixed_sp", {"sp": 2}),
    ("tetris", {}),
    ("chunked_prefill", {"spread_tokens": 50}),
    ("loongserve", {}),
    ("loongserve", {"static_dop": 2}),
]
SLOTS = st.lists(st.integers(1, 500), min_size=1, max_size=6)


def idle_gang(gang: int, slots: list[int], *, elastic: bool = False) -> Gang:
    places = [f"0-{index // 2}-{index % 2}" for index in range(len(slots))]
    prefill = gang == 1
    up = gang_up(gang, slots, prefill=prefill, decode=elastic or not prefill, places=places)
    return new_gang(up, 0)


def starts(policy: Policy, pair: GangPair, prompt: int, output: int) -> bool:
    """Ask the policy to decide on a request that is alone on idle gangs."""
    request = waiting(1, prompt, output)
    request.priority = policy.priority(prompt, [pair])
    queues: dict[Priority, list[Request]] = {"high": [], "low": []}
    queues[request.priority].append(request)
    decisions = policy.decide(
        SchedulerView(
            now_ns=0,
            cost=Costs(CostTable(latencies=PLAIN)),
            pairs=[pair],
            queues=queues,
            planned=(),
            blocked=(),
            blocked_ns=lambda request: 0,
            cached=lambda request, gang: None,
            rate_30s=1,
        )
    )
    return any(isinstance(decision, StartPlan | PiggybackPlan) for decision in decisions)


@pytest.mark.parametrize(("name", "options"), POLICIES)
@settings(max_examples=40)
@given(prefill=SLOTS, decode=SLOTS, prompt=st.integers(1, 2000), output=st.integers(2, 500))
def test_request_starts_on_idle_gangs_exactly_if_it_fits(
    name: str,
    options: dict[str, Any],
    prefill: list[int],
    decode: list[int],
    prompt: int,
    output: int,
) -> None:
    policy = make_policy(name, options)
    if name == "loongserve":
        gang = idle_gang(1, prefill, elastic=True)
        pair = GangPair(prefill=gang, decode=gang)
    else:
        pair = GangPair(prefill=idle_gang(1, prefill), decode=idle_gang(2, decode))
    assert policy.fits(pair, prompt, output) == starts(policy, pair, prompt, output)


@given(prefill=SLOTS, decode=SLOTS, prompt=st.integers(1, 2000))
def test_longest_answer_fits_and_one_token_more_does_not(
    prefill: list[int], decode: list[int], prompt: int
) -> None:
    check = CapacityCheck(make_policy("csps"))
    check.use([GangPair(prefill=idle_gang(1, prefill), decode=idle_gang(2, decode))])
    longest = check.longest_answer(prompt)
    assert longest <= 0 or check.fits(prompt, longest)
    assert not check.fits(prompt, max(longest, 0) + 1)
