"""Priorities and objectives order waiting requests, within a bound on being passed: hand-made
orders, a brute-force order, and simulated ranks under four policies."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from recorded_workloads import SECOND, elastic, pair
from scheduler_harness import MS, SchedulerHarness, only, steps_of

from csps.configurator.costs.cost_table import Costs, CostTable, Unmeasured
from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.kernel import Simulator
from csps.loadgen.simulator.requests import Arrival, RequestOutcome
from csps.services.scheduling.core.promises import OVERDUE, Promises
from csps.services.scheduling.core.queue import Queue
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.events import Promise
from csps.services.scheduling.events.limits import QueueLimits
from csps.services.scheduling.policies.fixed_sp import FixedSp
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.state.gangs import Gangs
from csps.services.scheduling.state.state import Request, Round, order_key

LIMITS = QueueLimits(max_waiting=1 << 20, max_waiting_tokens=1 << 40, patience_s=5)
PATIENCE_NS = LIMITS.patience_s * SECOND
TABLE = CostTable(latencies=Unmeasured())
ALONE_NS = TABLE.exact(1, 1).predict_ns(500)
"""Predicted time of a prompt of 500 tokens."""


def one_at_a_time() -> SchedulerHarness:
    """Make a scheduler whose gangs have room for one request of 500 + 10 tokens."""
    harness = SchedulerHarness(FixedSp(), limits=LIMITS)
    harness.turn(harness.prefill(1, 4000), harness.decode(2, 600), ev.LinkUp(prefill=1, decode=2))
    return harness


def submitted(number: int, *, ttft_ms: float | None = None, **fields: Any) -> ev.Submitted:
    promise = None if ttft_ms is None else Promise(ttft_ns=int(ttft_ms * MS))
    defaults = {"prompt_tokens": 500, "output_tokens": 10, "promise": promise}
    return ev.Submitted(request_id=number, **(defaults | fields))  # type: ignore[arg-type]


def serve_all(harness: SchedulerHarness, commands: list[cmd.AnyCommand]) -> list[int]:
    """Serve what starts, one after the other; return the requests in the order of their starts."""
    order: list[int] = []
    while reserves := only(commands, cmd.Reserve):
        (reserve,), (step,) = reserves, steps_of(commands)
        order.append(reserve.request_id)
        sequence = reserve.message.sequence_id
        (instance,) = {kv_slice.instance for kv_slice in reserve.message.slices}
        commands = harness.turn(
            ev.FirstToken(sequence_id=sequence),
            ev.StepDone(step_id=step.step_id, instance=step.group[0], took_ns=1),
            ev.KvReceived(sequence_id=sequence, instance=instance, tokens=500),
            ev.Finished(sequence_id=sequence, generated_tokens=10),
            ev.Freed(sequence_id=sequence, instance=instance),
        )
    return order


def test_lower_priorities_start_first() -> None:
    harness = one_at_a_time()
    events = [submitted(1), *(submitted(n, priority=p) for n, p in ((2, 3), (3, 0), (4, -1)))]
    assert serve_all(harness, harness.turn(*events)) == [4, 1, 3, 2]


def test_least_slack_starts_first_and_before_those_without_an_objective() -> None:
    harness = one_at_a_time()
    events = [submitted(1), submitted(2, ttft_ms=4000), submitted(3, ttft_ms=2000), submitted(4)]
    assert serve_all(harness, harness.turn(*events)) == [3, 2, 1, 4]


def test_slack_counts_what_a_prompt_takes() -> None:
    """The longer prompt has to start earlier to be ready at the same time."""
    harness = one_at_a_time()
    longer = submitted(2, ttft_ms=5000, prompt_tokens=550)
    commands = harness.turn(submitted(1, ttft_ms=5000), longer)
    (reserve,) = only(commands, cmd.Reserve)
    assert reserve.request_id == 2


def test_an_objective_later_than_the_patience_waits_behind_those_without_one() -> None:
    harness = one_at_a_time()
    events = [submitted(1), submitted(2, ttft_ms=60_000), submitted(3)]
    assert serve_all(harness, harness.turn(*events)) == [1, 2, 3]


def test_an_objective_that_cannot_be_kept_gives_way() -> None:
    """Request 2 could be in time if it started at once; while it waits, its slack passes."""
    harness = one_at_a_time()
    (reserve,) = only(harness.turn(submitted(1)), cmd.Reserve)
    harness.turn(submitted(2, ttft_ms=ALONE_NS / MS + 100), submitted(3, ttft_ms=4000))
    assert harness.wake_at_ns is not None
    harness.wait(until_ns=harness.now_ns + 200 * MS)
    commands = harness.turn(ev.RequestCancelled(request_id=1))
    (instance,) = {kv_slice.instance for kv_slice in reserve.message.slices}
    commands += harness.turn(ev.Freed(sequence_id=reserve.message.sequence_id, instance=instance))
    assert serve_all(harness, commands) == [3, 2]


def test_nobody_passes_a_request_whose_patience_is_over() -> None:
    harness = one_at_a_time()
    (reserve,) = only(harness.turn(submitted(1)), cmd.Reserve)
    harness.turn(submitted(2, priority=5), submitted(3))
    harness.wait(until_ns=harness.now_ns + PATIENCE_NS)
    harness.turn(submitted(4, ttft_ms=5000), submitted(5, priority=-9))
    (instance,) = {kv_slice.instance for kv_slice in reserve.message.slices}
    commands = harness.turn(ev.RequestCancelled(request_id=1))
    commands += harness.turn(ev.Freed(sequence_id=reserve.message.sequence_id, instance=instance))
    assert serve_all(harness, commands) == [2, 3, 5, 4]


def test_tenants_share_tokens_whatever_their_objectives() -> None:
    """A tenant cannot go first with all its requests by asking for little time."""
    harness = one_at_a_time()
    hasty = [submitted(n, tenant=1, ttft_ms=2000) for n in range(1, 7)]
    others = [submitted(n, tenant=2) for n in range(7, 10)]
    assert serve_all(harness, harness.turn(*hasty, *others)) == [1, 7, 2, 8, 3, 9, 4, 5, 6]


# --- early refusal ---------------------------------------------------------------------------


def refusing(number: int, ttft_ms: float) -> ev.Submitted:
    return submitted(number, promise=Promise(ttft_ns=int(ttft_ms * MS), refuse=True))


def test_a_request_is_refused_at_once_with_the_predicted_time() -> None:
    harness = one_at_a_time()
    queued = [submitted(n) for n in range(1, 11)]
    harness.turn(*queued)
    commands = harness.turn(refusing(11, ttft_ms=1000))  # least slack: goes before all others
    assert not only(commands, cmd.Refuse)
    commands = harness.turn(refusing(12, ttft_ms=ALONE_NS / MS - 1))
    (refuse,) = only(commands, cmd.Refuse)
    assert refuse.request_id == 12
    assert refuse.error.code == "SloNotMet"
    assert refuse.error.data is not None
    predicted_ms = refuse.error.data["predicted_ms"]
    assert isinstance(predicted_ms, float)
    # What runs, nine that wait, request 11, and its own prompt: it cannot be in time any more, so
    # it would wait for all of them.
    assert predicted_ms == pytest.approx(12 * ALONE_NS / MS, rel=0.02)
    assert f"{predicted_ms:.0f} ms" in refuse.error.message


def test_a_request_that_wants_it_is_refused_when_its_slack_is_over() -> None:
    harness = one_at_a_time()
    harness.turn(submitted(1))
    commands = harness.turn(refusing(2, ttft_ms=5 * ALONE_NS / MS))
    assert not only(commands, cmd.Refuse)
    commands = harness.wait(until_ns=harness.now_ns + 5 * ALONE_NS)
    (fail,) = only(commands, cmd.Fail)
    assert (fail.request_id, fail.error.code) == (2, "SloNotMet")


def test_without_the_wish_nobody_is_refused() -> None:
    harness = one_at_a_time()
    commands = harness.turn(*(submitted(n, ttft_ms=1) for n in range(1, 20)))
    assert not only(commands, cmd.Refuse)
    assert len(serve_all(harness, commands)) == 19


# --- the order against a brute force ---------------------------------------------------------


def due(request: Request, now_ns: int) -> tuple[int, int]:
    """Return the place of a lone tenant's request by the rule's own words."""
    patient_ns = request.submitted_ns + PATIENCE_NS
    if now_ns >= patient_ns:
        return OVERDUE, patient_ns
    latest_ns = request.latest_start_ns
    if latest_ns is None or latest_ns < now_ns:
        latest_ns = patient_ns
    return request.client_priority, sorted((request.submitted_ns, latest_ns, patient_ns))[1]


@settings(max_examples=examples(200))
@given(seed=st.integers(0, 1 << 30), tenants=st.integers(1, 3))
def test_order_is_that_of_the_rule(seed: int, tenants: int) -> None:
    rng, this_round = random.Random(seed), Round()
    gangs = Gangs(this_round)
    harness = SchedulerHarness()
    for event in (harness.prefill(1, 4000, 4000), harness.decode(2, 9000)):
        gangs.up(event)
    gangs.link(1, 2)
    promises = Promises(this_round, gangs, Costs(TABLE), LIMITS, lambda request, gang: None)
    queue, waiting = Queue(promises), list[Request]()
    for number in range(1, 60):
        this_round.begin(this_round.now_ns + rng.randrange(SECOND))
        now_ns = this_round.now_ns
        if rng.random() < 0.7 or not waiting:
            request = Request(
                id=number,
                tenant=rng.randrange(tenants),
                cls="exact",
                prompt_tokens=rng.choice((20, 500, 3000)),
                output_tokens=10,
                deadline_ns=None,
                submitted_ns=now_ns,
                waiting_since_ns=now_ns,
                priority=rng.choice(("high", "low")),
                client_priority=rng.choice((0, 0, 0, -1, 2)),
                promise=rng.choice((None, Promise(ttft_ns=rng.randrange(1, 8 * SECOND)))),
            )
            promises.predict(request)
            queue.begin(request.tenant)
            queue.push(request)
            waiting.append(request)
        else:
            request = waiting.pop(rng.randrange(len(waiting)))
            queue.remove(request)
            queue.leave(request.tenant)
        queue.check()
        found = sorted(queue.everyone(), key=order_key)
        assert set(map(id, found)) == set(map(id, waiting))
        plain = not any(one.promise or one.client_priority for one in waiting)
        if tenants == 1:
            by_rule = sorted(waiting, key=lambda one: (() if plain else due(one, now_ns), one.id))
            assert [one.id for one in found] == [one.id for one in by_rule]
        for index, request in enumerate(found):
            for passing in found[:index]:
                assert (
                    plain
                    or tenants > 1
                    or passing.submitted_ns <= request.submitted_ns + PATIENCE_NS
                )


# --- simulated ranks -------------------------------------------------------------------------

PAIR, ELASTIC = pair(40_000), elastic(40_000)
FOUR: list[tuple[str, dict[str, Any], ClusterModel]] = [
    ("csps", {"spt_tokens": 1000, "short_tokens": 0}, PAIR),
    ("context_parallel", {"short_tokens": 0}, PAIR),
    ("tetris", {"min_chunk": 64}, PAIR),
    ("loongserve", {}, ELASTIC),
]
NAMES = [name for name, *_ in FOUR]


def overload(seed: int, count: int = 100) -> list[Arrival]:
    """Draw more than the clusters serve, of one length, half with objectives."""
    rng, at_ns, arrivals = random.Random(seed), 0, []
    for _ in range(count):
        at_ns += int(rng.expovariate(15.0) * SECOND)
        objective = Promise(ttft_ns=rng.choice((SECOND // 2, 2 * SECOND)))
        arrivals.append(
            Arrival(
                at_ns=at_ns,
                prompt_tokens=6000,
                output_tokens=5,
                promise=rng.choice((None, objective)),
            )
        )
    return arrivals


def simulated(
    policy: str,
    options: dict[str, Any],
    cluster: ClusterModel,
    arrivals: list[Arrival],
    *,
    patience_s: int = 60,
) -> tuple[RequestOutcome, ...]:
    costs = Costs(CostTable(latencies=cluster.table))
    limits = QueueLimits(max_waiting=1000, max_waiting_tokens=1 << 40, patience_s=patience_s)
    scheduler = Scheduler(make_policy(policy, options), costs, limits=limits)
    simulator = Simulator(scheduler, cluster, arrivals)
    outcomes = simulator.run().outcomes
    assert not any(outcome.error for outcome in outcomes)
    scheduler.check_invariants()
    return outcomes


def passed_ns(outcomes: tuple[RequestOutcome, ...]) -> int:
    """Return how much later than a request any one came that started before it."""
    latest_ns, worst_ns = 0, 0
    for outcome in sorted(outcomes, key=lambda one: (one.started_ns, one.arrival.at_ns)):
        worst_ns = max(worst_ns, latest_ns - outcome.arrival.at_ns)
        latest_ns = max(latest_ns, outcome.arrival.at_ns)
    return worst_ns


@pytest.mark.parametrize(("policy", "options", "cluster"), FOUR, ids=NAMES)
def test_nobody_is_passed_by_who_came_more_than_the_patience_later(
    policy: str, options: dict[str, Any], cluster: ClusterModel
) -> None:
    arrivals = overload(1)
    bounded = passed_ns(simulated(policy, options, cluster, arrivals, patience_s=2))
    unbounded = passed_ns(simulated(policy, options, cluster, arrivals, patience_s=1000))
    assert 0 < bounded <= 2 * SECOND < unbounded


@pytest.mark.parametrize(("policy", "options", "cluster"), FOUR, ids=NAMES)
def test_more_objectives_are_kept_than_in_order_of_arrival(
    policy: str, options: dict[str, Any], cluster: ClusterModel
) -> None:
    arrivals = overload(2)

    def kept(told: bool) -> int:
        given = [replace(arrival, told=told) for arrival in arrivals]
        outcomes = simulated(policy, options, cluster, given)
        return sum(
            one.arrival.promise is not None and one.ttft_ns <= (one.arrival.promise.ttft_ns or 0)
            for one in outcomes
        )

    assert kept(told=True) > 1.2 * kept(told=False)
