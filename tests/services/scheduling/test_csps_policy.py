"""The default policy: what it may never do, over random states, and what it does in plain ones."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from policy_view import TOKEN_NS, Busy, Picture, group, numbers, plans, sizes, waiting
from property_examples import examples

from csps.protocols.core.topology import Location
from csps.services.scheduling.deciding.decisions import Blocked, WakeAt
from csps.services.scheduling.events.events import index_of
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.state.state import Request

OPTIONS: dict[str, object] = {
    "spt_tokens": 1000,
    "short_tokens": 100,
    "spread_tokens": 2000,
    "overtaking_s": 0.0,
}
POLICY = make_policy("csps", OPTIONS)
"""Without a bound of its own, a step is delayed by no more than its own time."""
PATIENT = settings(
    max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

REQUESTS = st.lists(
    st.builds(
        lambda prompt, output, cls, blocked: (prompt, output, cls, blocked),
        st.one_of(st.integers(1, 150), st.integers(1, 9000)),
        st.integers(1, 500),
        st.sampled_from(["exact", "exact", "a", "b"]),
        st.sampled_from([None, None, None, 0, 50 * TOKEN_NS]),
    ),
    max_size=12,
).map(
    lambda them: [
        waiting(number, prompt, output, cls=cls, blocked_ns=blocked)
        for number, (prompt, output, cls, blocked) in enumerate(them)
    ]
)
LONG = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 5000)), max_size=2).map(tuple)
PREFILL = st.lists(
    st.builds(
        Busy,
        free=st.integers(0, 4000),
        long=LONG,
        high_priority=st.integers(0, 500),
        urgent_steps=st.integers(0, 2),
        place=st.just(""),
    ),
    min_size=1,
    max_size=5,
)
DECODE = st.lists(
    st.builds(Busy, free=st.integers(0, 9000), requests=st.integers(0, 30)), min_size=1, max_size=4
)
PICTURES = st.builds(Picture, requests=REQUESTS, prefill=PREFILL, decode=DECODE)


@given(PICTURES)
@PATIENT
def test_decisions_are_whole_and_fit(picture: Picture) -> None:
    started = plans(picture.ask(POLICY))
    by_number = {request.id: request for request in picture.requests}
    placed = [placement for plan in started for placement in plan.decode]
    assert max(Counter(placement.request_id for placement in placed).values(), default=1) == 1
    prefill_used: Counter[int] = Counter()
    decode_used: Counter[int] = Counter()
    long_steps = Counter({index: len(busy.long) for index, busy in enumerate(picture.prefill)})
    urgent_steps = Counter({index: busy.urgent_steps for index, busy in enumerate(picture.prefill)})
    for plan in started:
        (step,) = plan.steps
        prefill_used.update(sizes(plan))
        lengths = [by_number[number].prompt_tokens for number in numbers(plan)]
        assert {by_number[number].cls for number in numbers(plan)} == {
            by_number[numbers(plan)[0]].cls
        }
        assert [chunk.length for chunk in step.chunks] == lengths
        assert (step.bounds[0], step.bounds[-1]) == (0, sum(lengths))
        assert list(step.bounds) == sorted(set(step.bounds))
        instances = [picture.pairs[0].prefill.instances[instance] for instance in group(plan)]
        assert [instance.order for instance in instances] == sorted(
            instance.order for instance in instances
        )
        if step.high_priority:
            assert len(step.group) == 1
            assert max(lengths) <= 100
            assert sum(lengths) <= 2048
            urgent_steps.update(group(plan))
        else:
            long_steps.update(group(plan))
    for placement in placed:
        request = by_number[placement.request_id]
        covered = [p for kv_slice in placement.slices for p in range(kv_slice.start, kv_slice.stop)]
        assert covered == list(range(request.prompt_tokens))
        for kv_slice in placement.slices:
            decode_used[index_of(kv_slice.instance)] += kv_slice.stop - kv_slice.start
        decode_used[index_of(placement.master)] += request.output_tokens
    for index, busy in enumerate(picture.prefill):
        assert prefill_used[index] <= busy.free
        assert long_steps[index] <= max(2, len(busy.long))
        assert urgent_steps[index] <= 2
    for index, busy in enumerate(picture.decode):
        assert decode_used[index] <= busy.free


@given(PICTURES)
@PATIENT
def test_longer_prompts_start_in_order_of_admission(picture: Picture) -> None:
    """The first request of every long step is the oldest long one that waits."""
    started = plans(picture.ask(POLICY))
    left = [request.id for request in picture.requests if request.priority == "low"]
    for plan in started:
        if not plan.steps[0].high_priority:
            assert numbers(plan)[0] == left[0]
            assert numbers(plan) == sorted(numbers(plan))
            left = [request for request in left if request not in numbers(plan)]


@given(PICTURES)
@PATIENT
def test_urgent_steps_never_exceed_what_a_long_step_has_left_to_be_delayed(
    picture: Picture,
) -> None:
    high_priority: Counter[int] = Counter()
    for plan in plans(picture.ask(POLICY)):
        if plan.steps[0].high_priority:
            high_priority[group(plan)[0]] += plan.steps[0].predicted_ns
    for index, busy in enumerate(picture.prefill):
        for tokens, delayed in busy.long:
            if high_priority[index]:
                assert delayed * TOKEN_NS + high_priority[index] <= tokens * TOKEN_NS


@given(PICTURES)
@example(
    Picture(  # a bound that ends at time zero is a bound
        requests=[
            *(waiting(number, 1, 1) for number in range(5)),
            waiting(5, 1, 2),
            waiting(6, 1, 1, blocked_ns=50 * TOKEN_NS),
            waiting(7, 1, 1),
        ],
        prefill=[Busy(free=6)],
        decode=[Busy(free=12)],
    )
)
@PATIENT
def test_nobody_passes_whom_it_would_delay_beyond_the_bound(picture: Picture) -> None:
    """With a bound of no time at all, nobody starts who is younger than a blocked request."""
    decisions = picture.ask(POLICY)
    blocked = [decision.request_id for decision in decisions if isinstance(decision, Blocked)]
    started = [request for plan in plans(decisions) for request in numbers(plan)]
    old = [request.id for request in picture.blocked if request.id not in started]
    oldest = min([*blocked, *old], default=1 << 60)
    high_priority = [request.id for request in picture.requests if request.priority == "high"]
    assert not [request for request in started if request > oldest and request in high_priority]


@given(
    st.lists(
        st.builds(Location, *[st.integers(0, last) for last in (1, 1, 3)]),
        min_size=1,
        max_size=8,
        unique=True,
    ),
    st.integers(101, 9000),
)
def test_an_idle_gang_takes_neighbours_in_topology_order(
    places: list[Location], tokens: int
) -> None:
    picture = Picture([waiting(1, tokens)], [Busy(place=str(place)) for place in places])
    (plan,) = plans(picture.ask(POLICY))
    chosen = [places[instance] for instance in group(plan)]
    assert chosen == sorted(chosen)
    assert len(chosen) == min(len(places), -(-tokens // 1000))


# --- plain cases -------------------------------------------------------------------------------


def ask(
    requests: list[Request], prefill: list[Busy] | None = None, decode: list[Busy] | None = None
) -> Picture:
    return Picture(
        requests,
        prefill if prefill is not None else [Busy() for _ in range(4)],
        decode if decode is not None else [Busy(50_000), Busy(50_000)],
    )


@pytest.mark.parametrize(
    ("prompt", "instances"), [(101, 1), (1000, 1), (1001, 2), (3500, 4), (20_000, 4)]
)
def test_the_spt_length_decides_how_many_instances(prompt: int, instances: int) -> None:
    (plan,) = plans(ask([waiting(1, prompt)]).ask(POLICY))
    parts = list(sizes(plan).values())
    assert len(parts) == instances
    assert max(parts) - min(parts) <= 1


def test_fewer_free_slots_make_shorter_spts() -> None:
    prefill = [Busy(400), Busy(300), Busy(500), Busy(10)]
    (plan,) = plans(ask([waiting(1, 1200)], prefill).ask(POLICY))
    assert sizes(plan) == {0: 400, 1: 300, 2: 500}


def test_the_freest_instances_in_topology_order() -> None:
    prefill = [Busy(800), Busy(2000), Busy(900), Busy(3000)]
    (plan,) = plans(ask([waiting(1, 1500)], prefill).ask(POLICY))
    assert group(plan) == [1, 3]


TWO_SERVERS = ["0-0-0", "0-0-1", "0-1-0", "0-1-1"]


def standing_at(places: list[str], free: list[int]) -> list[Busy]:
    return [Busy(slots, place) for slots, place in zip(free, places, strict=True)]


@pytest.mark.parametrize(
    ("free", "prompt", "chosen"),
    [
        ([10_000, 9_000, 10_000, 9_000], 1500, [0, 1]),
        ([10_000, 900, 1_000, 1_000], 1950, [2, 3]),
        ([10_000, 6_000, 9_000, 9_000], 1500, [2, 3]),
        ([10_000, 8_000, 9_000, 9_000], 1000, [0]),
    ],
)
def test_a_server_that_has_room_is_enough(free: list[int], prompt: int, chosen: list[int]) -> None:
    (plan,) = plans(ask([waiting(1, prompt)], standing_at(TWO_SERVERS, free)).ask(POLICY))
    assert group(plan) == chosen


def test_a_server_whose_instances_have_enough_to_do_has_no_room() -> None:
    prefill = standing_at(TWO_SERVERS, [10_000, 9_000, 8_000, 7_000])
    prefill[0].long = ((900, 0),) * 2
    (plan,) = plans(ask([waiting(1, 1500)], prefill).ask(POLICY))
    assert group(plan) == [2, 3]


@pytest.mark.parametrize(
    ("prompt", "chosen"), [(2000, [3, 4]), (2500, [0, 1, 2]), (3500, [0, 1, 3, 4])]
)
def test_what_no_server_holds_goes_to_the_nearest_too(prompt: int, chosen: list[int]) -> None:
    """The other rack's server, although it is freer, only when there is no room in one rack."""
    places = ["0-0-0", "0-0-1", "0-1-0", "1-0-0", "1-0-1"]
    prefill = standing_at(places, [3000, 3000, 3000, 4000, 4000])
    (plan,) = plans(ask([waiting(1, prompt)], prefill).ask(POLICY))
    assert group(plan) == chosen


def test_of_several_servers_the_first_is_filled_before_the_next_begins() -> None:
    places = ["0-0-0", "0-0-1", "0-1-0", "0-1-1", "0-1-2"]
    prefill = standing_at(places, [4000, 4000, 3000, 3000, 3000])
    (plan,) = plans(ask([waiting(1, 4000)], prefill).ask(POLICY))
    assert group(plan) == [0, 2, 3, 4]


def test_slack_of_the_last_spt_is_filled_with_those_who_would_wait() -> None:
    requests = [waiting(1, 1700), waiting(2, 600), waiting(3, 250), waiting(4, 200)]
    first, *others = plans(ask(requests, [Busy(), Busy()]).ask(POLICY))
    assert numbers(first) == [1, 3]
    assert first.steps[0].bounds == (0, 975, 1950)
    assert [numbers(plan) for plan in others] == [[2, 4]]


def test_slack_is_not_filled_past_a_prompt_of_another_class() -> None:
    requests = [waiting(1, 1700), waiting(2, 250, cls="fast"), waiting(3, 250)]
    first, second = plans(ask(requests, [Busy(), Busy()]).ask(POLICY))
    assert numbers(first) == [1, 3]
    assert numbers(second) == [2]


def test_slack_is_not_filled_past_somebody_who_is_or_would_be_blocked() -> None:
    decode = [Busy(2500)]
    requests = [waiting(1, 1700), waiting(2, 600), waiting(3, 250)]
    first, *others = plans(ask(requests, [Busy(), Busy()], decode).ask(POLICY))
    assert numbers(first) == [1]
    assert [numbers(other) for other in others] == [[2]]
    requests = [waiting(1, 1700), waiting(2, 600, blocked_ns=0), waiting(3, 250)]
    first, *_ = plans(ask(requests, [Busy(), Busy()]).ask(POLICY))
    assert numbers(first) == [1]


def test_slack_is_left_alone_while_an_instance_is_idle() -> None:
    first, second = plans(ask([waiting(1, 1700), waiting(2, 200)]).ask(POLICY))
    assert (numbers(first), numbers(second)) == ([1], [2])
    assert not set(group(first)) & set(group(second))


def test_short_prompts_are_spread_and_batched() -> None:
    started = plans(ask([waiting(n, 90) for n in range(8)]).ask(POLICY))
    assert all(plan.steps[0].high_priority for plan in started)
    assert sorted(len(numbers(plan)) for plan in started) == [2, 2, 2, 2]


def test_a_batch_of_short_prompts_has_an_end() -> None:
    started = plans(ask([waiting(n, 100) for n in range(25)], [Busy()]).ask(POLICY))
    assert [len(numbers(plan)) for plan in started] == [20, 5]


def test_short_prompts_without_a_turn_wait_and_share_a_step_later() -> None:
    """One step to run and one to follow, on each instance; what is not sent can be put together."""
    busy = [Busy(high_priority=90, urgent_steps=2), Busy(high_priority=90, urgent_steps=1)]
    requests = [waiting(n, 90) for n in range(14)]
    (plan,) = plans(ask(requests, busy).ask(POLICY))
    assert (group(plan), numbers(plan)) == ([1], list(range(14)))
    busy[1].urgent_steps = 2
    assert not ask(requests, busy).ask(POLICY)
    long = waiting(20, 1500)
    (plan,) = plans(ask([*requests, long], busy).ask(POLICY))
    assert numbers(plan) == [20], "it runs beside what they wait for"


def test_short_prompts_of_different_classes_share_no_step() -> None:
    requests = [waiting(n, 50, cls="exact" if n % 2 else "fast") for n in range(4)]
    started = plans(ask(requests, [Busy()]).ask(POLICY))
    assert [numbers(plan) for plan in started] == [[0, 2], [1, 3]]


def test_short_prompts_pass_a_line_of_long_ones() -> None:
    busy = [Busy(long=((900, 0),) * 2) for _ in range(2)]
    requests = [waiting(1, 1500), waiting(2, 3000), waiting(3, 50)]
    (plan,) = plans(ask(requests, busy).ask(POLICY))
    assert plan.steps[0].high_priority
    assert numbers(plan) == [3]


def test_short_prompts_avoid_instances_with_long_steps() -> None:
    (plan,) = plans(ask([waiting(1, 50)], [Busy(long=((900, 0),)), Busy()]).ask(POLICY))
    assert group(plan) == [1]


def test_members_of_a_long_step_take_turns_with_short_prompts() -> None:
    busy = [Busy(long=((900, 50),)), Busy(long=((901, 0),))]
    (plan,) = plans(ask([waiting(1, 50)], busy).ask(POLICY))
    assert group(plan) == [1]


def test_a_long_step_is_delayed_by_its_own_time_and_no_more() -> None:
    busy = [Busy(long=((900, 850),))]
    (plan,) = plans(ask([waiting(1, 60), waiting(2, 40)], busy).ask(POLICY))
    assert numbers(plan) == [2]


def test_a_long_prompt_that_waits_for_instances_blocks_no_short_one() -> None:
    prefill = [Busy(long=((900, 0),) * 2), Busy()]
    requests = [waiting(1, 1900), waiting(2, 500), waiting(3, 50)]
    decisions = ask(requests, prefill).ask(POLICY)
    assert [numbers(plan) for plan in plans(decisions)] == [[3]]
    assert not [decision for decision in decisions if isinstance(decision, Blocked)]


def test_whoever_is_blocked_is_passed_by_what_ends_within_the_bound() -> None:
    """600 tokens' times are left; a short prompt costs its own time and that of its answer."""
    policy = make_policy("csps", {**OPTIONS, "overtaking_s": 600 * TOKEN_NS / 1e9})
    requests = [
        waiting(1, 1400),
        waiting(2, 60, 541),
        waiting(3, 60, 540),
        waiting(4, 60, 500),
        waiting(5, 40, 500),
    ]
    decisions = ask(requests, [Busy()], [Busy(700), Busy(700)]).ask(policy)
    assert [decision for decision in decisions if isinstance(decision, Blocked)] == [
        Blocked(request_id=1)
    ]
    # The fourth would be computed after the third, and the fifth would make it late in its step.
    assert [numbers(plan) for plan in plans(decisions)] == [[3], [5]]


def test_a_round_ends_after_so_many_requests_tried_in_vain() -> None:
    policy = make_policy("csps", {**OPTIONS, "look_ahead": 3})
    requests = [*(waiting(n, 90, 700) for n in range(3)), waiting(3, 50, 1)]
    assert not plans(ask(requests, decode=[Busy(600)]).ask(policy))
    patient = make_policy("csps", {**OPTIONS, "look_ahead": 4, "overtaking_s": 1.0})
    assert [numbers(plan) for plan in plans(ask(requests, decode=[Busy(600)]).ask(patient))] == [
        [3]
    ]


def test_a_round_that_has_started_enough_asks_for_the_next_one() -> None:
    policy = make_policy("csps", {**OPTIONS, "most_starts": 2})
    decisions = ask([waiting(n, 50) for n in range(5)]).ask(policy)
    assert len([n for plan in plans(decisions) for n in numbers(plan)]) == 2
    assert [decision.at_ns for decision in decisions if isinstance(decision, WakeAt)] == [0]


def test_nothing_is_started_without_gangs() -> None:
    picture = ask([waiting(1, 50), waiting(2, 5000)])
    picture.pairs = []
    assert picture.ask(POLICY) == [Blocked(request_id=1)]


# --- decode ------------------------------------------------------------------------------------


def decode_slots(requests: list[Request], decode: list[Busy]) -> dict[int, int] | None:
    """Slots by instance, the master's last."""
    started = plans(ask(requests, decode=decode).ask(POLICY))
    if not started:
        return None
    (placed,) = started[0].decode
    slots = {
        index_of(kv_slice.instance): kv_slice.stop - kv_slice.start for kv_slice in placed.slices
    }
    master = index_of(placed.master)
    slots[master] = slots.pop(master, 0) + requests[0].output_tokens
    return slots


def test_decode_takes_short_prompts_whole_and_spreads_long_ones() -> None:
    decode = [Busy(9000, requests=2), Busy(9000, requests=1), Busy(9000, requests=3)]
    assert decode_slots([waiting(1, 500)], decode) == {1: 510}
    assert decode_slots([waiting(1, 3001)], decode) == {0: 1500, 1: 1511}


def test_decode_uses_more_instances_when_few_have_no_room() -> None:
    decode = [Busy(300), Busy(400), Busy(300)]
    assert decode_slots([waiting(1, 900, 50)], decode) == {0: 300, 2: 300, 1: 350}
    assert decode_slots([waiting(1, 951, 50)], decode) is None


def test_decode_needs_room_for_the_whole_answer_in_one_place() -> None:
    decode = [Busy(300), Busy(400)]
    assert decode_slots([waiting(1, 10, 401)], decode) is None
    slots = decode_slots([waiting(1, 10, 400)], decode)
    assert slots is not None
    assert list(slots)[-1] == 1


def test_decode_batches_have_a_limit() -> None:
    policy = make_policy("csps", {**OPTIONS, "max_batch": 3})
    picture = ask([waiting(1, 50)], decode=[Busy(requests=2), Busy(requests=1)])
    assert picture.ask(policy) == [Blocked(request_id=1)]
