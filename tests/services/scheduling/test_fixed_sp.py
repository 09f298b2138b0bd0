"""The baseline: groups of one size, and strictly first come, first served."""

from __future__ import annotations

import pytest
from policy_view import Busy, Picture, group, numbers, plans, waiting

from csps.services.scheduling.deciding.decisions import Blocked
from csps.services.scheduling.policies.registry import make_policy

PLACES = ["0-1-1", "0-0-0", "0-1-0", "0-0-1"]


def policy(sp: int, **options: object) -> object:
    return make_policy("fixed_sp", {"sp": sp, "spread_tokens": 100_000, **options})


def ask(picture: Picture, sp: int, **options: object) -> list[object]:
    return list(picture.ask(policy(sp, **options)))  # type: ignore[arg-type]


def test_every_prompt_goes_to_a_group_of_neighbours_short_ones_too() -> None:
    picture = Picture([waiting(1, 50), waiting(2, 5000)], [Busy(place=place) for place in PLACES])
    first, second = plans(ask(picture, 2))  # type: ignore[arg-type]
    assert (numbers(first), group(first)) == ([1], [1, 3])
    assert (numbers(second), group(second)) == ([2], [2, 0])
    assert not first.steps[0].high_priority
    assert second.steps[0].bounds == (0, 2500, 5000)


def test_a_prompt_goes_to_the_group_that_is_free_first() -> None:
    """Twice to the one that is soon done, rather than behind a long step."""
    prefill = [Busy(long=((900, 0),)), Busy(long=((200, 0),))]
    requests = [waiting(1, 300), waiting(2, 300), waiting(3, 300)]
    started = plans(ask(Picture(requests, prefill), 1, steps_per_group=9))  # type: ignore[arg-type]
    assert [group(plan) for plan in started] == [[1], [1], [1]]
    requests[1] = waiting(2, 800)
    started = plans(ask(Picture(requests, prefill), 1, steps_per_group=9))  # type: ignore[arg-type]
    assert [group(plan) for plan in started] == [[1], [1], [0]]


def test_a_group_is_given_so_many_steps_at_a_time() -> None:
    picture = Picture([waiting(n, 100) for n in range(9)], [Busy(), Busy(long=((10, 0),))])
    decisions = ask(picture, 1)
    assert len(decisions) == 3
    assert not [decision for decision in decisions if isinstance(decision, Blocked)]


def test_when_the_oldest_finds_no_slots_all_wait() -> None:
    picture = Picture([waiting(1, 2000), waiting(2, 50)], decode=[Busy(1000)])
    assert ask(picture, 1) == [Blocked(request_id=1)]


def test_a_group_without_slots_is_left_out() -> None:
    picture = Picture([waiting(1, 500)], [Busy(100), Busy(1000, long=((900, 0),))])
    (plan,) = plans(ask(picture, 1))  # type: ignore[arg-type]
    assert group(plan) == [1]


@pytest.mark.parametrize(("sp", "groups"), [(1, 5), (2, 2), (3, 1), (5, 1), (8, 1)])
def test_what_is_left_over_computes_nothing(sp: int, groups: int) -> None:
    picture = Picture([waiting(n, 100) for n in range(20)], [Busy() for _ in range(5)])
    started = plans(ask(picture, sp, steps_per_group=1))  # type: ignore[arg-type]
    assert len(started) == groups
    assert {len(group(plan)) for plan in started} == {min(sp, 5)}
