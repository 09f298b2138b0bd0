"""The simulator's loop against queueing theory, with a scheduler of a few lines."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from single_group_scheduler import SingleGroupScheduler, cluster

from csps.configurator.costs.latency import StepCost
from csps.loadgen.simulator.cluster import LinkModel
from csps.loadgen.simulator.kernel import Abandoned, GangFault, SimulationResult, Simulator
from csps.loadgen.simulator.requests import Arrival
from csps.services.scheduling.events.events import Submitted

KV: dict[str, Any] = {
    "between": LinkModel(bytes_per_s=10**9, latency_ns=5, shared=True),
    "kv_bytes_per_token": 10,
}
"""A nanosecond a byte."""


def poisson(rng: random.Random, requests: int, mean_gap_ns: float) -> list[int]:
    now, times = 0.0, []
    for _ in range(requests):
        now += rng.expovariate(1 / mean_gap_ns)
        times.append(round(now))
    return times


def run(arrivals: Sequence[Arrival], **options: Any) -> SimulationResult:
    model = cluster(**options)
    simulator = Simulator(SingleGroupScheduler(sp=len(model.prefill.instances)), model, arrivals)
    found = simulator.run()
    simulator.gangs.check_idle()
    return found


def prompts(times: list[int], lengths: list[int]) -> list[Arrival]:
    return [
        Arrival(at_ns=at, prompt_tokens=length, output_tokens=1)
        for at, length in zip(times, lengths, strict=True)
    ]


def chats(rng: random.Random, requests: int, mean_gap_ns: float = 2000) -> list[Arrival]:
    return [
        Arrival(at_ns=at, prompt_tokens=rng.randint(1, 3000), output_tokens=rng.randint(1, 40))
        for at in poisson(rng, requests, mean_gap_ns)
    ]


def test_one_group_is_lindleys_recursion_bit_for_bit() -> None:
    rng = random.Random(1)
    times = poisson(rng, 3000, 1000)
    lengths = [rng.randint(1, 1800) for _ in times]
    cost = StepCost.of_seconds(50e-9, 0.7e-9, 0.0, 1e-13)
    outcomes = run(prompts(times, lengths), step=cost).outcomes
    free_ns = 0
    for outcome, at, length in zip(outcomes, times, lengths, strict=True):
        began = max(at, free_ns)
        free_ns = began + cost.predict_ns(length)
        assert (outcome.started_ns, outcome.first_token_ns) == (began, free_ns)


@pytest.mark.parametrize(
    "load",
    [pytest.param(0.5, marks=pytest.mark.slow), 0.8, pytest.param(0.9, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("constant", [False, True])
def test_the_mean_wait_is_pollaczek_and_khinchines(load: float, constant: bool) -> None:
    """M/G/1 and, with constant lengths, M/D/1. Independent runs, for the error of the mean."""
    means: list[float] = []
    mean_ns = 1000.0
    for seed in range(10):
        rng = random.Random(seed)
        times = poisson(rng, 1200, mean_ns / load)
        lengths = [1000 if constant else rng.choice((100, 1900)) for _ in times]
        outcomes = run(prompts(times, lengths)).outcomes[200:]
        means.append(
            sum(outcome.started_ns - outcome.arrival.at_ns for outcome in outcomes) / len(outcomes)
        )
    square = mean_ns**2 if constant else (100**2 + 1900**2) / 2
    expected = load / mean_ns * square / 2 / (1 - load)
    mean = sum(means) / len(means)
    error = math.sqrt(
        sum((mean_wait - mean) ** 2 for mean_wait in means) / (len(means) - 1) / len(means)
    )
    assert abs(mean - expected) < 3 * error


def test_littles_law() -> None:
    """Requests in the system, integrated over time, are the sum of the times that they spend."""
    outcomes = run(chats(random.Random(5), 500)).outcomes
    steps = sorted(
        [(outcome.arrival.at_ns, 1) for outcome in outcomes]
        + [(outcome.ended_ns, -1) for outcome in outcomes]
    )
    inside = area = 0
    for (at, change), (later, _) in pairwise(steps):
        inside += change
        area += inside * (later - at)
    assert area == sum(outcome.ended_ns - outcome.arrival.at_ns for outcome in outcomes)


def test_every_token_is_drawn_and_every_slot_comes_back() -> None:
    arrivals = chats(random.Random(7), 300)
    found = run(arrivals, decode=3)
    assert [outcome.generated_tokens for outcome in found.outcomes] == [
        arrival.output_tokens for arrival in arrivals
    ]
    assert found.decoded == sum(arrival.output_tokens - 1 for arrival in arrivals)
    for outcome in found.outcomes:
        times = outcome.token_ns
        assert len(times) == outcome.generated_tokens
        assert times == sorted(times)
        assert (times[0], times[-1]) == (outcome.first_token_ns, outcome.ended_ns)


def test_two_groups_by_least_queue_are_a_queue_with_two_servers() -> None:
    """Choosing the shorter queue serves requests of constant length in order of arrival."""
    rng = random.Random(11)
    times, work = poisson(rng, 2000, 600), 1000
    free = [0, 0]

    def least_queue(submitted: Submitted) -> tuple[int, int]:
        at = times[submitted.request_id - 1]
        group = min((0, 1), key=lambda server: (max(free[server], at), server))
        free[group] = max(free[group], at) + work
        return group * 2, 2

    arrivals = prompts(times, [work] * len(times))
    outcomes = (
        Simulator(SingleGroupScheduler(choose=least_queue), cluster(), arrivals).run().outcomes
    )
    servers = [0, 0]
    for outcome in outcomes:
        servers.sort()
        began = max(outcome.arrival.at_ns, servers[0])
        servers[0] = began + work
        assert outcome.started_ns == began


def test_the_log_of_a_run_does_not_know_the_future() -> None:
    """Cutting the trace, or changing tokens that are not sampled yet, changes no earlier round."""
    rng = random.Random(3)
    arrivals = [
        Arrival(at_ns=at, prompt_tokens=rng.randint(1, 2000), output_tokens=20, max_tokens=64)
        for at in poisson(rng, 60, 2000)
    ]
    cut_ns = arrivals[30].at_ns

    def rounds(changed: Sequence[Arrival]) -> list[str]:
        seen: list[str] = []

        def observe(now_ns: int, events: object, commands: object) -> None:
            if now_ns < cut_ns:
                seen.append(f"{now_ns} {events} {commands}")

        Simulator(SingleGroupScheduler(sp=4), cluster(decode=2), changed, observer=observe).run()
        return seen

    whole = rounds(arrivals)
    outcomes = Simulator(SingleGroupScheduler(sp=4), cluster(decode=2), arrivals).run().outcomes
    later = [
        Arrival(
            at_ns=arrival.at_ns,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=arrival.output_tokens if outcome.ended_ns < cut_ns else 50,
            max_tokens=64,
        )
        for arrival, outcome in zip(arrivals, outcomes, strict=True)
    ]
    assert whole == rounds(arrivals[:30])
    assert whole == rounds(later)
    assert len(whole) > 30


def test_slower_machines_and_lower_rates_scale_all_times() -> None:
    rng = random.Random(13)
    times = poisson(rng, 200, 1000)
    lengths = [rng.randint(1, 1500) for _ in times]
    cost = StepCost(a=3 << 48, b=1 << 48, c=0, d=1 << 38)
    slow = StepCost(a=7 * cost.a, b=7 * cost.b, c=0, d=7 * cost.d)
    once = run(prompts(times, lengths), step=cost).outcomes
    sevenfold = run(prompts([7 * at for at in times], lengths), step=slow).outcomes
    for a, b in zip(once, sevenfold, strict=True):
        # Each of the steps before was rounded down by less than a nanosecond.
        assert 0 <= b.first_token_ns - 7 * a.first_token_ns < 7 * len(times)


@pytest.mark.parametrize("options", [{}, {"receiving_backends": 1, **KV}])
def test_requests_outlive_their_gangs(options: dict[str, Any]) -> None:
    """Killed and replaced gangs lose no token, no slot and no backend."""
    arrivals = chats(random.Random(17), 100)
    faults = [
        GangFault(at_ns=40_000, role="decode"),
        GangFault(at_ns=60_000, role="decode", up=True),
        GangFault(at_ns=90_000, role="prefill"),
        GangFault(at_ns=120_000, role="prefill", up=True),
    ]
    simulator = Simulator(
        SingleGroupScheduler(sp=4), cluster(decode=2, **options), arrivals, faults=faults
    )
    outcomes = simulator.run().outcomes
    assert [outcome.generated_tokens for outcome in outcomes] == [
        arrival.output_tokens for arrival in arrivals
    ]
    assert max(outcome.sequences for outcome in outcomes) > 1
    for outcome in outcomes:
        assert len(outcome.token_ns) == outcome.generated_tokens
        assert outcome.token_ns == sorted(outcome.token_ns)
    simulator.gangs.check_idle()


@pytest.mark.parametrize(("layers", "received_ns"), [(1, 100 + 1000), (2, 1000)])
def test_kv_takes_its_time_and_leaves_while_a_step_computes(layers: int, received_ns: int) -> None:
    """1,000 bytes at one a nanosecond: after the step, or all layers but the last one during it."""
    link = LinkModel(bytes_per_s=10**9, latency_ns=5, shared=True)
    arrivals = [Arrival(at_ns=0, prompt_tokens=100, output_tokens=3)]
    model = {"between": link, "kv_bytes_per_token": 10, "layers": layers}
    outcome = run(arrivals, instances=1, **model).outcomes[0]
    assert outcome.first_token_ns == 100
    begin_ns = received_ns + 5
    assert outcome.token_ns == [100, begin_ns + 1000, begin_ns + 2000]


@pytest.mark.parametrize(("backends", "ends_ns"), [(None, (2005, 2105)), (1, (1105, 2110))])
def test_transfers_wait_for_slots(backends: int | None, ends_ns: tuple[int, int]) -> None:
    """The second prompt is computed when the first one's 1,000 bytes have been under way for 100
    ns: they share the link, or the first one has all of it until it is there."""
    arrivals = [Arrival(at_ns=0, prompt_tokens=100, output_tokens=2)] * 2
    found = run(arrivals, instances=1, receiving_backends=backends, **KV).outcomes
    joined = [ends_ns[0], max(ends_ns[1], ends_ns[0] + 1000)]
    assert [outcome.token_ns[1] - 1000 for outcome in found] == joined


def test_with_one_backend_each_everything_lands() -> None:
    """Whatever the order: several senders, and chats that come while others land."""
    arrivals = chats(random.Random(23), 200, mean_gap_ns=20_000)
    found = run(arrivals, decode=3, receiving_backends=1, **KV)
    assert [outcome.generated_tokens for outcome in found.outcomes] == [
        arrival.output_tokens for arrival in arrivals
    ]


def test_gaps_and_messages_take_their_time() -> None:
    arrivals = [Arrival(at_ns=0, prompt_tokens=100, output_tokens=3)]
    gaps = {"notice_ns": 500, "step_gap_ns": 7, "iteration_gap_ns": 50}
    outcome = run(arrivals, **gaps).outcomes[0]
    first_ns = 500 + 107
    assert (outcome.started_ns, outcome.first_token_ns) == (500, first_ns)
    begin_ns = first_ns + 500 + 500
    assert outcome.token_ns == [first_ns, begin_ns + 1050, begin_ns + 2100]


def test_the_front_delay_shifts_all_times() -> None:
    arrivals = chats(random.Random(7), 50, mean_gap_ns=20_000)
    at_once, later = run(arrivals), run(arrivals, front_ns=900)
    for before, after in zip(at_once.outcomes, later.outcomes, strict=True):
        assert after.ttft_ns == before.ttft_ns + 900
        assert after.token_ns == [stamp + 900 for stamp in before.token_ns]


def test_a_cancelled_request_generates_nothing_more() -> None:
    arrivals = [Arrival(at_ns=0, prompt_tokens=100, output_tokens=50)]
    gone = [Abandoned(at_ns=10_500, request=1)]
    simulator = Simulator(SingleGroupScheduler(sp=4), cluster(), arrivals, abandoned=gone)
    outcome = simulator.run().outcomes[0]
    simulator.gangs.check_idle()
    assert (outcome.error, outcome.ended_ns) == ("Cancelled", 10_500)


def test_a_run_that_cannot_end_raises() -> None:
    class Deaf:
        def handle(self, events: object, now_ns: int) -> tuple[tuple[()], None]:
            return (), None

    arrivals = [Arrival(at_ns=5, prompt_tokens=1, output_tokens=1)]
    with pytest.raises(RuntimeError, match="1 requests are waiting and no event is left"):
        Simulator(Deaf(), cluster(), arrivals).run()
