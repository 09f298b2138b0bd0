"""Generations of routers at one rank: only up, one at a time, and no newer one before its turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.core.errors import RanksHeld, Superseded
from csps.protocols.gang.members import LIVENESS_TIMEOUT_S, Fence


def test_a_newer_router_waits_for_the_attached_one_to_leave() -> None:
    fence = Fence()
    fence.take(3, now=0.0)
    with pytest.raises(RanksHeld):
        fence.take(4, now=1.0)
    fence.release()
    fence.take(4, now=1.0)
    assert fence.generation == 4


def test_a_newer_router_waits_for_the_lease_to_end() -> None:
    fence = Fence()
    fence.take(3, now=0.0)
    fence.heartbeat(now=2.0)
    with pytest.raises(RanksHeld):
        fence.check(4, now=2.0 + LIVENESS_TIMEOUT_S)
    fence.take(4, now=2.1 + LIVENESS_TIMEOUT_S)


def test_a_silent_router_keeps_ranks_that_no_other_router_wants() -> None:
    fence = Fence()
    fence.take(3, now=0.0)
    fence.take(3, now=1000.0)
    assert fence.generation == 3


def test_a_rank_never_goes_back() -> None:
    fence = Fence()
    fence.take(4, now=0.0)
    fence.release()
    with pytest.raises(Superseded):
        fence.take(3, now=1000.0)


steps = st.one_of(
    st.tuples(st.just("take"), st.integers(1, 6)),
    st.tuples(st.just("hear"), st.just(0)),
    st.tuples(st.just("release"), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 5)),
)


@given(st.lists(steps, max_size=30))
def test_generations_only_grow_and_a_living_holder_is_left_alone(
    script: list[tuple[str, int]],
) -> None:
    fence, now, holder, last = Fence(), 0.0, 0, 0.0
    newest = 0
    for what, number in script:
        if what == "wait":
            now += number
        elif what == "hear" and holder:
            fence.heartbeat(now)
            last = now
        elif what == "release":
            fence.release()
            holder = 0
        elif what == "take":
            alive = holder and now - last <= LIVENESS_TIMEOUT_S
            try:
                fence.take(number, now)
            except Superseded:
                assert number < newest
            except RanksHeld:
                assert alive
                assert number > holder
            else:
                assert number >= newest
                assert not alive or number == holder
                holder, newest, last = number, number, now
        assert fence.generation == newest
