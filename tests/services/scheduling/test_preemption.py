"""Nobody starves, counted in seconds: what passes whom, played in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from property_examples import examples
from scheduler_harness import SECOND, SchedulerHarness
from scripted_policies import Scripted
from timed_gangs import MS, TimedCell, Watched

from csps.configurator.costs.cost_table import Unmeasured
from csps.services.scheduling.deciding.decisions import Blocked, Decision, Policy, SchedulerView
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.policies.registry import make_policy

PATIENT = settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
LATENCIES = Unmeasured(step_ns=2 * MS, token_ns=MS, pair_ns=0, iteration_time_ns=5 * MS)
OVERTAKING_NS = 300 * MS
OPTIONS: dict[str, object] = {
    "spt_tokens": 400,
    "short_tokens": 50,
    "urgent_batch_tokens": 100,
    "spread_tokens": 500,
    "overtaking_s": OVERTAKING_NS / 1e9,
}


def cell(
    prefill: list[int], decode: list[int], *, measured: float = 1.0, block: int = 0
) -> TimedCell:
    policy = make_policy("csps", OPTIONS)
    return TimedCell(policy, prefill, decode, LATENCIES, measured=measured, block=block)


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 20).map(lambda gap: gap * MS),
        st.one_of(st.integers(1, 50), st.integers(1, 50), st.integers(51, 900)),
        st.integers(1, 40),
    ),
    min_size=1,
    max_size=40,
).map(lambda gaps: _absolute(gaps))


def _absolute(gaps: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    at_ns, arrivals = 0, []
    for gap_ns, prompt, output in gaps:
        at_ns += gap_ns
        arrivals.append((at_ns, prompt, output))
    return arrivals


def hold_ups(played: TimedCell, came_ns: dict[int, int]) -> dict[int, tuple[int, int]]:
    """Of each request that is not urgent: how long younger ones that were urgent ran on an instance
    of its step until that ended, on the one that was held up most; and how long it took without."""
    high_priority = [
        ended_step for ended_step in played.ended_steps if ended_step.command.step.high_priority
    ]
    found = {}
    for step in played.ended_steps:
        if step.command.step.high_priority:
            continue
        request = played.requests_of(step)[0]
        held_ns = max(
            sum(
                played.predicted_ns(other.command.step)
                for other in high_priority
                if instance in other.command.step.group
                and min(played.requests_of(other)) > request
                and other.ended_ns <= step.ended_ns
            )
            for instance in step.command.step.group
        )
        found[request] = held_ns, step.ended_ns - came_ns[request] - held_ns
    return found


@given(ARRIVALS, st.lists(st.integers(450, 1200), min_size=2, max_size=4))
@PATIENT
def test_a_long_step_is_delayed_no_longer_than_the_bound(
    arrivals: list[tuple[int, int, int]], prefill: list[int]
) -> None:
    played = cell(prefill, [2000, 2000])
    played.play(arrivals)
    assert len(played.finished) == len(arrivals)
    for step in played.ended_steps:
        if not step.command.step.high_priority:
            bound_ns = max(OVERTAKING_NS, played.predicted_ns(step.command.step))
            assert step.delayed_ns <= bound_ns


LINES = st.lists(
    st.tuples(
        st.integers(0, 30).map(lambda gap: gap * MS),
        st.one_of(st.integers(1, 50), st.integers(20, 50), st.integers(51, 300)),
        st.just(1),
    ),
    min_size=10,
    max_size=120,
).map(_absolute)
"""More than an instance can compute, so that several long prompts stand in line."""


def check_altogether(played: TimedCell, arrivals: list[tuple[int, int, int]]) -> None:
    """Nobody is held up longer than the bound, or than somebody takes without that who came no
    later; bounds of those in line do not add up."""
    assert len(played.finished) == len(arrivals)
    came_ns = {number: at_ns for number, (at_ns, *_) in enumerate(arrivals, 1)}
    bound_ns = OVERTAKING_NS
    for held_ns, alone_ns in (times for _, times in sorted(hold_ups(played, came_ns).items())):
        bound_ns = max(bound_ns, alone_ns)
        assert held_ns <= bound_ns


@given(LINES)
@PATIENT
def test_the_bounds_of_several_long_steps_in_line_do_not_add_up(
    arrivals: list[tuple[int, int, int]],
) -> None:
    played = cell([4000], [100_000])
    played.play(arrivals)
    check_altogether(played, arrivals)


def test_a_prompt_behind_many_long_steps_is_held_up_by_one_bound() -> None:
    """Six long prompts of 53 ms at once, and short ones without end."""
    longs, shorts = [(0, 51, 1)] * 6, [(n * 10 * MS, 40, 1) for n in range(1, 100)]
    played = cell([4000], [100_000])
    played.play([*longs, *shorts])
    check_altogether(played, [*longs, *shorts])
    held = hold_ups(played, dict.fromkeys(range(1, 7), 0))
    alone_ns = 6 * 53 * MS
    assert max(alone_ns, OVERTAKING_NS) - 42 * MS < held[6][0] <= max(alone_ns, OVERTAKING_NS)


def test_short_prompts_do_not_wait_for_a_whole_line_of_long_ones() -> None:
    """Whoever has waited may be held up for as long again: a step of 302 ms ends, or two."""
    longs = [(0, 300, 1)] * 12
    shorts = [(MS + n * 120 * MS, 40, 1) for n in range(30)]
    arrivals = sorted([*longs, *shorts])
    played = cell([8000], [100_000])
    played.play(arrivals)
    waits = [
        played.finished[number] - at_ns
        for number, (at_ns, prompt, _) in enumerate(arrivals, 1)
        if prompt == 40
    ]
    assert max(waits) < 2 * 302 * MS


@given(ARRIVALS, st.lists(st.integers(500, 1000), min_size=1, max_size=3))
@PATIENT
def test_nobody_waits_for_overtakers_longer_than_the_bound(
    arrivals: list[tuple[int, int, int]], decode: list[int]
) -> None:
    """Whoever passes a blocked request has drawn its last token when the bound is over."""
    sizes = [arrival for arrival in arrivals if arrival[1] + arrival[2] <= sum(decode)]
    played = cell([900, 900], decode)
    played.play(sizes)
    assert len(played.finished) == len(sizes)
    for blocked, since_ns in played.policy.blocked.items():
        for other, started_ns in played.policy.started.items():
            if other > blocked and since_ns <= started_ns < played.policy.started[blocked]:
                assert played.finished[other] <= since_ns + OVERTAKING_NS


class Blocking(Watched):
    """Works out since when each request is blocked, from the decisions alone, and compares."""

    def __init__(self, policy: Policy, arrivals: list[tuple[int, int, int]]) -> None:
        super().__init__(policy)
        self._came_ns = dict(enumerate([at_ns for at_ns, *_ in arrivals], 1))
        self._since_ns: int | None = None
        """Time since when every round has found somebody blocked."""
        self.expected: dict[int, int] = {}

    def decide(self, view: SchedulerView) -> Sequence[Decision]:
        for request in view.blocked:
            assert view.blocked_ns(request) == self.expected[request.id]
        decisions = super().decide(view)
        blocked = [it.request_id for it in decisions if isinstance(it, Blocked)]
        if not blocked:
            self._since_ns = None
        elif self._since_ns is None:
            self._since_ns = view.now_ns
        for number in blocked:
            assert self._since_ns is not None
            self.expected.setdefault(number, max(self._since_ns, self._came_ns[number]))
        return decisions


CROWDS = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 60), st.integers(0, 60), st.just(2000)).map(lambda gap: gap * MS),
        st.one_of(st.integers(1, 50), st.integers(51, 900)),
        st.integers(1, 60),
    ),
    min_size=20,
    max_size=40,
).map(_absolute)
"""The queue is blocked, and empty, several times."""


@given(CROWDS)
@PATIENT
def test_a_request_is_blocked_since_it_waits_in_a_blocked_queue(
    arrivals: list[tuple[int, int, int]],
) -> None:
    watched = Blocking(make_policy("csps", OPTIONS), arrivals)
    played = TimedCell(watched, [900, 900], [1000], LATENCIES)  # type: ignore[arg-type]
    played.play(arrivals)
    assert len(played.finished) == len(arrivals)


class Viewed(Scripted):
    """Decides what it is told, and remembers since when waiting requests count as blocked."""

    def decide(self, view: SchedulerView) -> Sequence[Decision]:
        self.blocked_ns = {it.id: view.blocked_ns(it) for it in view.waiting("low")}
        return super().decide(view)


def test_a_queue_that_moved_on_is_blocked_anew() -> None:
    """Nobody was blocked for a while, although somebody waited."""
    policy = Viewed(Blocked(request_id=1))
    harness = SchedulerHarness(policy).ready()  # type: ignore[arg-type]
    first, second = harness.submit(), harness.submit()
    harness.turn(first, second)
    first_ns = harness.now_ns
    harness.turn(ev.LinkUp(prefill=1, decode=2), after_ns=SECOND)
    assert policy.blocked_ns == {1: first_ns, 2: first_ns}
    policy.decisions = (Blocked(request_id=2),)
    harness.turn(ev.RequestCancelled(request_id=1), after_ns=SECOND)
    second_ns = harness.now_ns
    harness.turn(ev.LinkUp(prefill=1, decode=2), after_ns=SECOND)
    assert policy.blocked_ns == {2: second_ns}


def test_an_endless_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    """It waits for decode slots, while short ones keep coming as others leave."""
    played = cell([4000], [2500])
    older = [(0, 4, 80 + 2 * n) for n in range(20)]
    arrivals = [*older, (MS, 2000, 300), *((2 * MS * n, 4, 10) for n in range(1, 1000))]
    played.play(arrivals)
    long = len(older) + 1
    blocked_ns, started_ns = played.policy.blocked[long], played.policy.started[long]
    last_of_older_ns = max(played.finished[request] for request in range(1, long))
    passed = [
        request
        for request, at_ns in played.policy.started.items()
        if request > long and at_ns < started_ns
    ]
    assert len(passed) > 20
    assert started_ns <= max(blocked_ns + OVERTAKING_NS, last_of_older_ns)


@pytest.mark.parametrize("measured", [0.5, 1.0, 2.0])
def test_what_was_measured_takes_the_place_of_what_was_predicted(measured: float) -> None:
    """Short prompts of 42 ms pass a step of 350 ms until its own time is used up: as many more as
    they took less. Each comes when the one before it is over."""
    played = cell([4000], [100_000], measured=measured)
    played.play([(0, 348, 1)] + [(MS + n * 85 * MS, 40, 1) for n in range(60)])
    (long,) = (
        ended_step for ended_step in played.ended_steps if not ended_step.command.step.high_priority
    )
    passing_ns = 42 * MS * measured
    allowed = (350 * MS - 42 * MS) // passing_ns + 1
    came = (long.delayed_ns + 350 * MS * measured) // (85 * MS) + 1
    assert long.delayed_ns == passing_ns * min(allowed, came)
    (instance,) = played.scheduler._gangs.by_id[1].instances
    assert instance.preemption_delay_ns == long.delayed_ns, "requests that wait count it as well"
