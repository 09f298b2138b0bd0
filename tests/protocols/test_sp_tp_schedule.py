"""The order of steps: every causal pair once, nothing read before it is there."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.attention.sp_tp import (
    Attend,
    MicroPartition,
    Project,
    ScheduleStep,
    StartReduce,
    Wait,
    near_to_far,
    one_after_another,
    own_before_far,
)
from csps.protocols.core.placement import even_share


def parts_of(lengths: Sequence[int], micro_partitions: int) -> tuple[MicroPartition, ...]:
    parts, begin = [], 0
    for owner, length in enumerate(lengths):
        for index in range(micro_partitions):
            cut = even_share(length, micro_partitions, index)
            if cut:
                parts.append(MicroPartition(owner, begin + cut.start, begin + cut.stop, index))
        begin += length
    return tuple(parts)


@st.composite
def groups(draw: st.DrawFn) -> tuple[tuple[MicroPartition, ...], list[int]]:
    """Parts, and distances as they are for one member of a group in order."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    servers = sorted(draw(st.integers(0, 2)) for _ in lengths)
    member = draw(st.integers(0, len(lengths) - 1))
    distances = [
        0 if owner == member else 1 + (server != servers[member])
        for owner, server in enumerate(servers)
    ]
    return parts_of(lengths, draw(st.integers(1, 4))), distances


def check(steps: list[ScheduleStep], parts: Sequence[MicroPartition]) -> None:
    here: set[int] = set()
    projected: set[int] = set()
    seen: set[tuple[int, int]] = set()
    handed_on: list[MicroPartition] = []
    for step in steps:
        match step:
            case Wait(part):
                here.update(range(part.start, part.stop))
            case Project(start, stop):
                assert here.issuperset(range(start, stop))
                assert projected.isdisjoint(range(start, stop))
                projected.update(range(start, stop))
            case Attend(queries, keys):
                assert projected.issuperset(range(*queries))
                assert projected.issuperset(range(*keys))
                pairs = {(q, k) for q in range(*queries) for k in range(*keys) if k <= q}
                assert seen.isdisjoint(pairs)
                seen |= pairs
            case StartReduce(part):
                rows = range(part.start, part.stop)
                assert seen.issuperset((q, k) for q in rows for k in range(q + 1))
                handed_on.append(part)
    assert handed_on == list(parts), "members must hand on in one order"


@given(groups())
def test_every_pair_is_computed_once_and_rows_are_reduced_in_order(
    group: tuple[tuple[MicroPartition, ...], list[int]],
) -> None:
    parts, distances = group
    check(list(near_to_far(parts, distances)), parts)
    check(list(one_after_another(parts)), parts)
    check(list(own_before_far(parts, distances)), parts)


@given(groups())
def test_a_layer_that_scores_itself_reads_no_far_key_before_all_have_come(
    group: tuple[tuple[MicroPartition, ...], list[int]],
) -> None:
    parts, distances = group
    owner = {row: part.owner for part in parts for row in range(part.start, part.stop)}
    steps = list(own_before_far(parts, distances))
    arrivals = [at for at, step in enumerate(steps) if isinstance(step, Project)]
    for step in steps[: max(arrivals, default=0)]:
        if isinstance(step, Attend):
            assert {owner[q] for q in range(*step.queries)} == {owner[k] for k in range(*step.keys)}


def test_second_server_keeps_half_of_its_attention_for_the_reduce_scatter() -> None:
    """And the first one hands on its own rows before any far one has come."""
    parts = parts_of([4, 4, 4, 4], 2)

    def pairs(steps: Sequence[ScheduleStep]) -> int:
        attends = [step for step in steps if isinstance(step, Attend)]
        return sum(
            k <= q for step in attends for q in range(*step.queries) for k in range(*step.keys)
        )

    steps = list(near_to_far(parts, [2, 2, 1, 0]))
    last_wait = max(i for i, step in enumerate(steps) if isinstance(step, Wait))
    assert pairs(steps[last_wait:]) >= 0.45 * pairs(steps)

    steps = list(near_to_far(parts, [0, 1, 2, 2]))
    first_far = steps.index(Wait(parts[4]))
    assert [s.part for s in steps[:first_far] if isinstance(s, StartReduce)] == list(parts[:4])
