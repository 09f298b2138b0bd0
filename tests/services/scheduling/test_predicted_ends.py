"""When steps are said to end at their launch, against when they do where they take what was
predicted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from timed_gangs import MS, TimedCell

from csps.configurator.costs.cost_table import Unmeasured
from csps.services.scheduling.policies.registry import make_policy

LATENCIES = Unmeasured(step_ns=2 * MS, token_ns=MS, pair_ns=0, iteration_time_ns=5 * MS)
OPTIONS: dict[str, dict[str, object]] = {
    "csps": {"spt_tokens": 400, "short_tokens": 50},
    "fixed_sp": {"sp": 2},
    "tetris": {"improvement_rate": 0.05, "min_chunk": 1},
}
GANGS = st.lists(st.integers(1000, 3000), min_size=1, max_size=4)


def arrivals(shortest: int, longest: int) -> st.SearchStrategy[list[tuple[int, int, int]]]:
    times = st.integers(0, 400).map(lambda ms: ms * MS)
    requests = st.tuples(times, st.integers(shortest, longest), st.just(1))
    return st.lists(requests, min_size=1, max_size=15).map(sorted)


def check_ends(policy: str, prefill: list[int], coming: list[tuple[int, int, int]]) -> None:
    played = TimedCell(make_policy(policy, OPTIONS[policy]), prefill, [100_000], LATENCIES)
    played.play(coming)
    assert len(played.finished) == len(coming)
    for step in played.ended_steps:
        assert step.ended_ns == step.command.ends_ns


@given(coming=arrivals(51, 900), prefill=GANGS)
def test_long_steps_of_a_group_end_one_after_the_other(
    coming: list[tuple[int, int, int]], prefill: list[int]
) -> None:
    check_ends("fixed_sp", prefill, coming)


@given(coming=arrivals(51, 900), prefill=GANGS)
def test_long_steps_end_when_all_before_them_on_any_of_their_instances_have(
    coming: list[tuple[int, int, int]], prefill: list[int]
) -> None:
    """Where groups overlap, a step may begin later than its instances are through with others."""
    check_ends("csps", prefill, coming)


@given(coming=arrivals(1, 900), prefill=GANGS)
def test_chunks_end_when_they_were_planned_to(
    coming: list[tuple[int, int, int]], prefill: list[int]
) -> None:
    check_ends("tetris", prefill, coming)


@given(coming=arrivals(1, 50), prefill=GANGS)
def test_urgent_steps_end_one_after_the_other(
    coming: list[tuple[int, int, int]], prefill: list[int]
) -> None:
    check_ends("csps", prefill, coming)
