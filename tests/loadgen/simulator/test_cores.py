"""Ranks that share cores."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from csps.loadgen.simulator.cluster import GangModel, InstanceModel
from csps.loadgen.simulator.timeline import Cores, EventTimeline

MS = 1_000_000
INSTANCES = 6


def gang(*cores: int | None, tp: int = 1) -> GangModel:
    """Return instances one after the other over servers with so many cores."""
    kinds = len(cores)
    instances = tuple(
        InstanceModel(location=f"0-{index % kinds}-{index}", kv_slots=1, cores=cores[index % kinds])
        for index in range(INSTANCES)
    )
    return GangModel(instances=instances, tp=tp)


def ends(model: GangModel, *jobs: tuple[int, tuple[int, ...], int]) -> list[int]:
    """Return the end of each (start, group, time alone)."""
    clock, found = EventTimeline(), [-1] * len(jobs)
    cores = Cores(clock, model)

    def begin(number: int) -> None:
        _, group, work_ns = jobs[number]
        cores.compute(group, work_ns, lambda: found.__setitem__(number, clock.now_ns))

    for number, (start_ns, _, _) in enumerate(jobs):
        clock.at(start_ns, lambda number=number: begin(number))
    while not clock.empty:
        clock.step()
    return found


def test_alone_a_group_takes_what_it_was_profiled_to_take() -> None:
    for size in range(1, INSTANCES + 1):
        assert ends(gang(2), (5, tuple(range(size)), 30 * MS)) == [5 + 30 * MS]


def test_as_many_ranks_as_cores_do_not_slow_each_other_and_more_do() -> None:
    two = ends(gang(2), (0, (0,), 30 * MS), (0, (1,), 30 * MS))
    three = ends(gang(2), *((0, (rank,), 30 * MS) for rank in range(3)))
    assert (two, three) == ([30 * MS] * 2, [45 * MS] * 3)


def test_a_group_profiled_with_less_than_a_core_slows_down_less() -> None:
    # Four ranks had half a core each; beside a fifth they have 2/5, which itself had a whole one.
    assert ends(gang(2), (0, (0, 1, 2, 3), 40 * MS), (0, (4,), 16 * MS)) == [48 * MS, 40 * MS]


def test_a_group_over_two_servers_waits_for_the_slower_one() -> None:
    busy = [(0, (rank,), 60 * MS) for rank in (2, 4)]  # three ranks on server 0
    assert ends(gang(2, 2), (0, (0, 1), 20 * MS), *busy)[0] == 30 * MS
    assert ends(gang(None, 2), (0, (0, 1), 20 * MS), *busy)[0] == 20 * MS


def test_ranks_of_an_instance_count_each() -> None:
    assert ends(gang(2, tp=2), (0, (0,), 10 * MS), (0, (1,), 10 * MS)) == [20 * MS] * 2


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(
            st.integers(0, 40 * MS), st.sets(st.integers(0, 5), min_size=1), st.integers(1, 40 * MS)
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_all_work_is_done_at_the_speed_that_whoever_computed_beside_it_allowed(
    cores: int, jobs: list[tuple[int, set[int], int]]
) -> None:
    found = ends(gang(cores), *((at, tuple(group), work) for at, group, work in jobs))
    spans = [(at, end, len(group)) for (at, group, _), end in zip(jobs, found, strict=True)]
    moments = sorted({time for at, end, _ in spans for time in (at, end)})
    for (at, end, ranks), (_, _, work_ns) in zip(spans, jobs, strict=True):
        done = 0.0
        for begin, stop in pairwise(moments):
            if at <= begin and stop <= end:
                computing = sum(n for a, e, n in spans if a <= begin and stop <= e)
                alone, here = min(1, cores / ranks), min(1, cores / computing)
                done += (stop - begin) * here / alone
        assert abs(done - work_ns) <= 2 * len(jobs)  # ends are whole nanoseconds
