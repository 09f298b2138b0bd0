"""What Tetris decides: groups, slots, decode instances, rates of improvement."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_view import Busy, Picture, plans, waiting

from csps.protocols.core.errors import ConfigError
from csps.protocols.core.placement import Span, outside, tokens_on, within
from csps.services.scheduling.deciding.decisions import Blocked, StartPlan, digest_of
from csps.services.scheduling.deciding.step_layout import histories_of
from csps.services.scheduling.events.events import index_of
from csps.services.scheduling.policies.registry import check_pairing, make_policy
from csps.services.scheduling.policies.tetris.options import ImprovementRates, TetrisOptions
from csps.services.scheduling.policies.tetris.policy import Tetris


def tetris(**options: object) -> Tetris:
    options = {"improvement_rate": 0.05, "min_chunk": 1, **options}
    made = make_policy("tetris", options)
    assert isinstance(made, Tetris)
    return made


def groups(plan: StartPlan) -> list[list[int]]:
    return [[index_of(instance) for instance in step.group] for step in plan.steps]


def test_a_prompt_begins_on_idle_instances_and_goes_on_with_all() -> None:
    """A microsecond a token: 3,000 of 2,000 tokens' time are computed by half of them."""
    busy = ((2000, 0),)
    view = Picture(
        [waiting(1, 10_000)],
        [Busy(), Busy(), Busy(long=busy), Busy(long=busy)],
    )
    (plan,) = plans(view.ask(tetris()))
    assert groups(plan) == [[0, 1], [0, 1, 2, 3]]
    first, second = plan.steps
    assert (first.chunks[0].length, second.chunks[0].length) == (4000, 6000)
    assert second.chunks[0].start == 4000
    assert (first.predicted_ns, second.predicted_ns) == (2_000_000, 1_500_000)
    (single,) = plans(view.ask(tetris(chunked=False)))
    assert len(single.steps) == 1


def test_later_requests_are_planned_behind_earlier_ones() -> None:
    view = Picture([waiting(1, 4000), waiting(2, 100)])
    first, second = plans(view.ask(tetris(improvement_rate=0.9)))
    assert groups(first) == [[0]]
    assert groups(second) == [[1]]


def test_instances_without_slots_make_a_group_larger() -> None:
    view = Picture([waiting(1, 900)], [Busy(free=300) for _ in range(4)])
    (plan,) = plans(view.ask(tetris(improvement_rate=0.9)))
    assert groups(plan) == [[0, 1, 2, 3]]


def test_who_holds_history_takes_part_without_slots() -> None:
    """Instance 0 is filled by the first chunk, which the second one reads there."""
    busy = ((2000, 0),)
    view = Picture(
        [waiting(1, 10_000)],
        [Busy(free=2000), Busy(), Busy(long=busy), Busy(long=busy)],
    )
    (plan,) = plans(view.ask(tetris()))
    assert groups(plan) == [[0, 1], [0, 1, 2, 3]]
    assert plan.steps[1].bounds[:2] == (0, 0)


def test_history_is_even_over_each_chunks_group() -> None:
    """As far as there are slots: in the second world one of those that come has room for 300."""
    busy = ((2000, 0),)
    for room, held in ((5000, [1000, 1000, 1000, 1000]), (1800, [1234, 1233, 1233, 300])):
        view = Picture(
            [waiting(1, 10_000)], [Busy(), Busy(), Busy(long=busy), Busy(free=room, long=busy)]
        )
        (plan,) = plans(view.ask(tetris()))
        _, (history,) = histories_of(plan, {}, in_place=False)
        (chunk,) = plan.steps[1].chunks
        lying = tokens_on(
            (*outside(history, chunk.placement), *within(chunk.placement, Span(0, 4000)))
        )
        assert list(lying.values()) == held
        assert tokens_on(chunk.placement)[plan.steps[1].group[3]] == held[3] + 1500
        stored = tokens_on(within(chunk.placement, Span(4000, 10_000)))
        assert sum(stored.values()) == chunk.length


def test_who_finds_no_slots_blocks_those_behind() -> None:
    view = Picture([waiting(1, 1500), waiting(2, 10)], [Busy(free=300) for _ in range(4)])
    assert view.ask(tetris()) == [Blocked(request_id=1)]


@given(
    free=st.lists(st.integers(0, 500), min_size=1, max_size=6),
    prompt=st.integers(1, 3000),
)
def test_what_fits_an_idle_pair_is_started_there(free: list[int], prompt: int) -> None:
    """And what does not is not."""
    policy = tetris()
    view = Picture([waiting(1, prompt)], [Busy(free=slots) for slots in free])
    fits = policy.fits(view.pairs[0], prompt, 10)
    assert fits == (prompt <= sum(free))
    assert bool(plans(view.ask(policy))) == fits


@given(st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 5)), min_size=1, max_size=5))
def test_kv_goes_to_the_instance_with_most_freeness(instances: list[tuple[int, int]]) -> None:
    """Free slots, without those that are promised to requests whose KV is not received, for each
    request, those included; the first of equals."""
    decode = [Busy(free=free, requests=requests) for free, requests in instances]
    view = Picture([waiting(1, 500, 10)], decode=decode)
    roomy = [busy for busy in decode if busy.free >= 510]
    chosen = plans(view.ask(tetris()))
    if not roomy:
        assert not chosen or len(chosen[0].decode[0].slices) > 1
        return
    best = max(roomy, key=lambda busy: busy.free / max(1, busy.requests))
    (placement,) = chosen[0].decode
    assert index_of(placement.master) == decode.index(best)
    (kv_slice,) = placement.slices
    assert kv_slice.instance == placement.master


def test_a_landing_request_counts_at_once() -> None:
    """The second request of the same round goes elsewhere."""
    view = Picture([waiting(1, 500), waiting(2, 500)], decode=[Busy(5000), Busy(5000)])
    first, second = plans(view.ask(tetris()))
    assert first.decode[0].master != second.decode[0].master


# --- the rate of improvement ----------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 20), st.floats(0.05, 0.75)), min_size=1),
    st.integers(0, 700),
)
def test_the_rate_is_that_of_the_nearest_load(
    records: list[tuple[int, float]], requests: int
) -> None:
    halves = [(load / 2, rate) for load, rate in records]
    found = ImprovementRates(halves).at(requests)
    distance = min(abs(load - requests / 30) for load, _ in halves)
    assert found in [rate for load, rate in halves if abs(load - requests / 30) == distance]


def test_a_higher_rate_keeps_groups_small() -> None:
    """Looked up by the requests of the last 30 s."""
    records = [[0.5, 0.05], [10, 0.75]]
    policy = tetris(improvement_rate="auto", improvement_rates=records)

    def first_group(requests: int) -> int:
        view = Picture([waiting(request, 10) for request in range(1, requests + 1)])
        return len(groups(plans(view.ask(policy))[0])[0])

    assert (first_group(1), first_group(300)) == (4, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"improvement_rate": "aut"}, "did you mean 'auto'"),
        ({"improvement_rate": 1}, r"must be in \[0, 1\), not 1"),
        ({"improvement_rate": True}, "must be a number"),
        ({"improvement_rats": 0.3}, "did you mean 'improvement_rates'"),
        ({"improvement_rates": 3}, "must be pairs of numbers"),
        ({"improvement_rates": [[1, 2, 3]]}, "must be pairs of numbers"),
        ({"improvement_rates": [[1, "x"]]}, "must be a number"),
        ({"improvement_rates": [[1, 2]]}, r"a rate in \[0, 1\), not \[1, 2\]"),
        ({"min_chunk": 0}, "must be at least 1"),
        ({"min_chnk": 5}, "did you mean 'min_chunk'"),
        ({"chunked": 1}, "must be true or false"),
        ({"layout": "stripe"}, "did you mean 'striped'"),
        ({"sp": 8}, "it is one of fixed_sp"),
    ],
)
def test_wrong_options_are_answered_with_the_nearest_right_ones(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy("tetris", options)


def test_it_needs_a_pair_of_gangs() -> None:
    check_pairing("tetris", "pair")
    with pytest.raises(
        ConfigError, match="csps, fixed_sp and tetris need prefill and decode gangs"
    ):
        check_pairing("tetris", "elastic")


def test_equal_options_have_equal_digests() -> None:
    assert digest_of(Tetris(TetrisOptions())) == digest_of(Tetris())
    assert digest_of(Tetris(TetrisOptions(min_chunk=5))) != digest_of(Tetris())
