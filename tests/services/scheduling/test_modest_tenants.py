"""A tenant that uses less than half its share is served almost as if it were alone, and the others
go on: who is modest against a count of all tokens, and every policy on simulated ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_view import Busy, Picture, group, plans, waiting
from property_examples import examples
from recorded_workloads import MS, SECOND, elastic, pair

from csps.configurator.costs.cost_table import Costs, CostTable
from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import load_cluster
from csps.loadgen.simulator.kernel import Simulator
from csps.loadgen.simulator.requests import Arrival, RequestOutcome
from csps.services.scheduling.core.queue import RecentTokens
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.events.limits import QueueLimits
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.state.state import Round

# --- who is modest ---------------------------------------------------------------------------

EVENTS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, SECOND, 20 * SECOND, 40 * SECOND, 90 * SECOND]),
        st.sampled_from(["begin", "begin", "start", "leave", "serve"]),
        st.integers(0, 3),
        st.integers(0, 5000),
    ),
    max_size=60,
)


@settings(max_examples=examples(200))
@given(EVENTS)
def test_modest_is_who_uses_at_most_half_its_share(
    events: list[tuple[int, str, int, int]],
) -> None:
    """The oracle keeps every token and counts those of this window and the one before."""
    this_round = Round()
    recent = RecentTokens(this_round)
    served: list[tuple[int, int, int]] = []
    queue: list[tuple[int, int]] = []
    for gap_ns, kind, tenant, tokens in events:
        this_round.now_ns += gap_ns
        window = this_round.now_ns // RecentTokens.WINDOW_NS
        if kind == "begin":
            modest = recent.begin(tenant, tokens)
            served.append((window, tenant, 0))
            queue.append((tenant, tokens))
            lately = [(who, count) for at, who, count in served if at >= window - 1]
            own_waiting = sum(count for who, count in queue if who == tenant)
            own = sum(count for who, count in lately if who == tenant) + own_waiting
            share = (sum(count for _, count in lately) + own_waiting) / len(dict(lately))
            assert modest == (len(dict(lately)) > 1 and own <= share / 2)
        elif kind == "serve":
            recent.serve(tenant, tokens)
            served.append((window, tenant, tokens))
        elif queue:
            who, count = queue.pop(tokens % len(queue))
            recent.leave(who, count)
            if kind == "start":
                recent.serve(who, count)
                served.append((window, who, count))


def test_gangs_are_shared_while_two_tenants_come_now_and_then() -> None:
    this_round = Round()
    recent = RecentTokens(this_round)
    for _ in range(3):
        recent.begin(1, 10)
    assert not recent.shared
    recent.begin(2, 10)
    assert recent.shared
    for _ in range(9):
        this_round.now_ns += 60 * SECOND
        recent.begin(1, 10)
        assert recent.shared
    this_round.now_ns += 60 * SECOND
    recent.begin(1, 10)
    assert not recent.shared, "the other one has sent nothing for ten minutes"


# --- policies on simulated ranks -------------------------------------------------------------

PAIR, ELASTIC = pair(20_000), elastic(20_000)
LOCAL = load_cluster("local")
"""On the slow links of `PAIR`, rings would wait for the KV transfers of the flood."""
GREEDY, MODEST = 1, 2
LIMITS = QueueLimits(max_waiting=1 << 20, max_waiting_tokens=1 << 40)


def simulated(
    policy: str, options: dict[str, Any], cluster: ClusterModel, arrivals: Sequence[Arrival]
) -> list[RequestOutcome]:
    scheduler = Scheduler(
        make_policy(policy, options), Costs(CostTable(latencies=cluster.table)), limits=LIMITS
    )
    simulator = Simulator(scheduler, cluster, sorted(arrivals, key=lambda arrival: arrival.at_ns))
    outcomes = simulator.run().outcomes
    simulator.gangs.check_idle()
    scheduler.check_invariants()
    assert not any(outcome.error for outcome in outcomes)
    return list(outcomes)


def modest_arrivals(prompt: int, *, count: int, every_ns: int) -> list[Arrival]:
    return [
        Arrival(at_ns=MS + number * every_ns, prompt_tokens=prompt, output_tokens=8, tenant=MODEST)
        for number in range(count)
    ]


def flood(prompts: tuple[int, ...], output: int, *, rate: float, seconds: float) -> list[Arrival]:
    """Draw more requests than the cluster can serve, at random times."""
    rng = random.Random(1)
    gaps = accumulate(rng.expovariate(rate) for _ in range(round(rate * seconds)))
    return [
        Arrival(
            at_ns=round(at_s * SECOND),
            prompt_tokens=rng.choice(prompts),
            output_tokens=output,
            tenant=GREEDY,
        )
        for at_s in gaps
    ]


def p95_ns(outcomes: Sequence[RequestOutcome], tenant: int) -> int:
    """Return the time to first token that one request of a tenant in twenty exceeds, without the
    first one: until it came, the others were alone, and what they had started goes on."""
    times = [outcome.ttft_ns for outcome in outcomes if outcome.arrival.tenant == tenant][1:]
    return sorted(times)[int(0.95 * len(times))]


def share_of(outcomes: Sequence[RequestOutcome], until_ns: int) -> float:
    """Return the modest tenant's share of all prompt tokens that were computed by then."""
    tokens = {GREEDY: 0, MODEST: 0}
    for outcome in outcomes:
        if 0 <= outcome.first_token_ns <= until_ns:
            tokens[outcome.arrival.tenant] += outcome.arrival.prompt_tokens
    return tokens[MODEST] / sum(tokens.values())


PREEMPTING: list[tuple[str, dict[str, Any], ClusterModel]] = [
    ("csps", {"spt_tokens": 2048, "spread_tokens": 40_000}, PAIR),
    ("context_parallel", {}, LOCAL),
]


@pytest.mark.parametrize(("policy", "options", "cluster"), PREEMPTING)
@pytest.mark.parametrize("prompt", [2000, 6000])
def test_a_modest_tenant_does_not_wait_for_a_flood_of_prompts(
    policy: str, options: dict[str, Any], cluster: ClusterModel, prompt: int
) -> None:
    """Before, its prompts waited for two whole steps of each instance: 4 to 8 times as long."""
    modest = modest_arrivals(prompt, count=9, every_ns=2 * SECOND)
    alone = simulated(policy, options, cluster, modest)
    beside = simulated(
        policy, options, cluster, [*modest, *flood((2000, 4000), 8, rate=60, seconds=17)]
    )
    assert p95_ns(beside, MODEST) <= 1.5 * p95_ns(alone, MODEST)
    assert 0.01 < share_of(beside, 17 * SECOND) < 0.25, "it uses less than half of its half"
    assert p95_ns(beside, GREEDY) > 5 * p95_ns(alone, MODEST), "there is no flood"


BOUNDED = [
    pytest.param("context_parallel", {}, ELASTIC, 3.0, marks=pytest.mark.slow),
    ("fixed_sp", {"sp": 2}, PAIR, 5.0),
    ("tetris", {"improvement_rate": 0.3, "launch_ahead_s": 0.2}, PAIR, 6.0),
    ("chunked_prefill", {"token_budget": 256}, ELASTIC, 9.0),
    pytest.param("loongserve", {}, ELASTIC, 5.0, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("policy", "options", "cluster", "most"), BOUNDED)
def test_a_modest_tenant_waits_for_little_where_nothing_is_preempted(
    policy: str, options: dict[str, Any], cluster: ClusterModel, most: float
) -> None:
    """Steps that have begun end first, or share an elastic gang with iterations. `tetris` planned,
    and `chunked_prefill` began, all prompts for which there were slots: 50 times as long as
    alone."""
    modest = modest_arrivals(2000, count=9, every_ns=2 * SECOND)
    alone = simulated(policy, options, cluster, modest)
    beside = simulated(
        policy, options, cluster, [*modest, *flood((2000, 4000), 8, rate=60, seconds=17)]
    )
    assert p95_ns(beside, MODEST) <= most * p95_ns(alone, MODEST)


ANSWERING: list[tuple[str, dict[str, Any], ClusterModel]] = [
    PREEMPTING[0],
    ("context_parallel", {}, PAIR),
    ("fixed_sp", {"sp": 2}, PAIR),
    ("tetris", {"improvement_rate": 0.3, "launch_ahead_s": 0.2}, PAIR),
    ("chunked_prefill", {"token_budget": 256}, ELASTIC),
]


@pytest.mark.parametrize(("policy", "options", "cluster"), ANSWERING)
@pytest.mark.parametrize(("prompt", "rate"), [(200, 8.0), (4000, 4.0)])
def test_a_modest_tenant_does_not_wait_until_long_answers_end(
    policy: str, options: dict[str, Any], cluster: ClusterModel, prompt: int, rate: float
) -> None:
    """Short prompts of others fill the batch, long ones the slots."""
    options = {**options, "max_batch": 16}
    modest = modest_arrivals(300, count=8, every_ns=3 * SECOND)
    alone = simulated(policy, options, cluster, modest)
    beside = simulated(
        policy, options, cluster, [*modest, *flood((prompt,), 600, rate=rate, seconds=25)]
    )
    assert p95_ns(beside, GREEDY) > 5 * SECOND, "there is no flood"
    assert p95_ns(beside, MODEST) <= p95_ns(alone, MODEST) + 250 * MS


def test_many_modest_tenants_do_not_stop_the_others() -> None:
    """Together they may preempt for half of what is served, and need no more here."""
    modest = [
        Arrival(
            at_ns=MS + number * 100 * MS,
            prompt_tokens=1500,
            output_tokens=4,
            tenant=MODEST + number % 10,
        )
        for number in range(200)
    ]
    outcomes = simulated(
        "csps", PREEMPTING[0][1], PAIR, [*modest, *flood((4000,), 4, rate=40, seconds=20)]
    )
    served = {GREEDY: 0, MODEST: 0}
    for outcome in outcomes:
        if outcome.first_token_ns <= 20 * SECOND:
            served[min(outcome.arrival.tenant, MODEST)] += outcome.arrival.prompt_tokens
    assert served[GREEDY] >= served[MODEST]


# --- one round -------------------------------------------------------------------------------

OPTIONS: dict[str, object] = {"spt_tokens": 1000, "short_tokens": 100, "spread_tokens": 9000}


@pytest.mark.parametrize("policy", ["csps", "context_parallel"])
@pytest.mark.parametrize(("prompt", "instances"), [(900, 1), (1900, 2)])
def test_a_prompt_of_a_modest_tenant_preempts_on_as_many_instances_as_it_fills(
    policy: str, prompt: int, instances: int
) -> None:
    request = waiting(1, prompt)
    busy = [Busy(long=((5000, 0), (5000, 0))) for _ in range(3)]
    options = OPTIONS if policy == "csps" else {"short_tokens": 100}
    made = make_policy(policy, options)
    picture = Picture(requests=[request], prefill=busy)
    assert plans(picture.ask(made)) == []
    request.modest = True
    (plan,) = plans(picture.ask(made))
    assert plan.steps[0].high_priority
    assert len(group(plan)) == instances or policy == "context_parallel"


@pytest.mark.parametrize("policy", ["csps", "context_parallel"])
def test_what_runs_is_preempted_within_its_budget(policy: str) -> None:
    """Steps of 5 ms may be delayed by 5 ms, of which 4.5 are spent."""
    request = waiting(1, 900)
    request.modest = True
    options = {"short_tokens": 100, "overtaking_s": 0.0}
    spent = [Busy(long=((5000, 4500), (5000, 0))) for _ in range(3)]
    picture = Picture(requests=[request], prefill=spent)
    assert plans(picture.ask(make_policy(policy, options))) == []


def test_it_starts_as_others_do_where_nothing_runs() -> None:
    """So that short prompts may preempt it."""
    request = waiting(1, 900)
    request.modest = True
    for policy in ("csps", "context_parallel"):
        made = make_policy(policy, {"short_tokens": 100})
        (plan,) = plans(Picture(requests=[request]).ask(made))
        assert not plan.steps[0].high_priority
