"""What LoongServe decides about requests that decode, against numbers worked by hand and against
trying everything (§4, §5.2, §5.4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csps.configurator.costs.cost_table import LARGEST_BATCH, CostTable, Unmeasured
from csps.configurator.costs.latency import DecodeCost, LatencyKey, LinearDecodeCost, LinkCost
from csps.configurator.costs.latency_tables import SHIPPED
from csps.protocols.core.placement import KvSlice, tokens_on
from csps.protocols.core.topology import Location
from csps.services.scheduling.policies.loongserve.allocation import Migration, MoveCosts
from csps.services.scheduling.policies.loongserve.inputs import (
    DecodeGroup,
    Decoding,
    Elastic,
    PendingPrompt,
)
from csps.services.scheduling.policies.loongserve.scaling import Regrouping, hand_over, levelled

PER_SLOT = 3.0


def per_slot(migration: Migration) -> float:
    return PER_SLOT * sum(slots for _, slots in migration.targets)


def iteration_ns(dop: int, rows: int, context: int) -> int:
    """10 of each instance, 2 of each row, and one of ten tokens."""
    return 10 * dop + 2 * rows + context // 10


def regrouping(average_ns: int, most: int = 100) -> Regrouping:
    return Regrouping(iteration_ns, per_slot, average_decode_ns=average_ns, most_sequences=most)


def instance(number: int, unused: int, used: int) -> Elastic:
    return Elastic(number, number, unused, used)


def batch(instances: list[Elastic], *executed_ns: int, context: int = 0) -> DecodeGroup:
    rows = tuple(Decoding(max(1, executed // 10), executed) for executed in executed_ns)
    return DecodeGroup(tuple(instances), rows, context)


# --- a group on fewer instances ----------------------------------------------------------------


def test_a_group_shrinks_when_its_requests_gain_more_than_moving_takes() -> None:
    """Two instances: 20 + 2 ns an iteration of one row, which has generated 44 tokens in 440 ns and
    has (1100 - 440) / 22 = 30 to come: each takes 10 ns less on one instance, 300 in all. Moving
    40 slots takes 120, moving 90 takes 270, and 110 slots take 330."""
    for used, shrinks in ((40, True), (90, True), (110, False)):
        group = batch([instance(0, 1000, used), instance(1, 1000, 500)], 440)
        found = regrouping(1100).shrink(group, {0, 1})
        assert (found is not None) == shrinks
        assert found is None or found == Migration(0, ((1, used),))


def test_it_does_not_shrink_where_it_may_not() -> None:
    small, large = instance(0, 1000, 10), instance(1, 1000, 50)
    group = batch([small, large], 0, 0)
    assert regrouping(10_000).shrink(group, {0, 1}) == Migration(0, ((1, 10),))
    assert regrouping(10_000).shrink(group, {1}) == Migration(1, ((0, 50),))
    assert regrouping(10_000).shrink(group, set()) is None
    assert regrouping(10_000, most=1).shrink(group, {0, 1}) is None, "too many for one master"
    assert regrouping(0).shrink(group, {0, 1}) is None, "nobody knows how long answers are"
    full = batch([small, instance(1, 9, 500)], 0)
    assert regrouping(10_000).shrink(full, {0}) is None, "no room"


elastic = st.builds(
    instance, st.just(0), st.integers(0, 300), st.integers(1, 300)
)  # numbered where they are used
rows_of = st.lists(st.integers(0, 3_000), min_size=1, max_size=4)


def numbered(found: list[Elastic], first: int = 0) -> list[Elastic]:
    return [instance._replace(id=first + n, order=first + n) for n, instance in enumerate(found)]


def rest(executed_ns: int, average_ns: int, each_ns: int) -> float:
    return max(0, average_ns - executed_ns) / each_ns


@given(
    instances=st.lists(elastic, min_size=1, max_size=4).map(numbered),
    executed=rows_of,
    average_ns=st.integers(0, 6_000),
    context=st.integers(0, 500),
)
def test_who_is_left_out_is_the_best_of_all(
    instances: list[Elastic], executed: list[int], average_ns: int, context: int
) -> None:
    """Brute force over the instances of a group."""
    group = batch(instances, *executed, context=context)
    found = regrouping(average_ns).shrink(group, {instance.id for instance in instances})
    dop, rows = len(instances), len(executed)
    best, chosen = 0.0, None
    for candidate in instances if dop > 1 else []:
        if candidate.used > sum(other.unused for other in instances if other != candidate):
            continue
        net, each = 0.0, iteration_ns(dop, rows, context)
        faster = each - iteration_ns(dop - 1, rows, context)
        for row in group.requests:
            left = rest(row.executed_ns, average_ns, each)
            net += (left * faster - PER_SLOT * candidate.used) / (row.generated_tokens + left)
        if net > best + 1e-9:
            best, chosen = net, candidate.id
    assert (None if found is None else found.source) == chosen


# --- an instance for those that wait -----------------------------------------------------------


def test_an_instance_is_freed_if_what_it_starts_is_spared_more_than_the_move_takes() -> None:
    """Answers take 1000, and the first group has 1000 - 600 to go. 133 slots take 399 ns, 134 take
    402; as does a prompt that takes that long itself. All prompts count, by their lengths."""
    other = instance(1, 500, 300)
    for used, alone_ns, frees in ((133, 0.0, True), (134, 0.0, False), (134, 403.0, True)):
        one = instance(0, 500, used)
        batches = [batch([one], 600, 900), batch([other], 999)]
        found = regrouping(1000).free(
            [one, other], batches, lambda _: [PendingPrompt(1, 10, 1)], lambda _, ns=alone_ns: ns
        )
        assert (found is not None) == frees
        assert found is None or found.migration == Migration(0, ((1, used),))
    nothing = regrouping(1000).free([one, other], batches, lambda _: [], lambda _: 1e9)
    assert nothing is None, "for nobody"


@given(
    groups=st.lists(
        st.tuples(st.lists(elastic, min_size=1, max_size=2), rows_of), min_size=1, max_size=3
    ),
    prompts=st.lists(st.integers(1, 400), max_size=3),
    average_ns=st.integers(0, 6_000),
    alone_ns=st.integers(0, 2_000),
)
def test_who_is_freed_is_emptied_soonest_of_those_that_pay(
    groups: list[tuple[list[Elastic], list[int]]],
    prompts: list[int],
    average_ns: int,
    alone_ns: int,
) -> None:
    """Brute force over all instances; each could start as much as it has slots for."""
    batches, count = [], 0
    for members, executed in groups:
        batches.append(batch(numbered(members, count), *executed))
        count += len(members)
    everyone = [instance for group in batches for instance in group.instances]

    def startable(instance: Elastic) -> list[PendingPrompt]:
        return [
            PendingPrompt(n, tokens, 1)
            for n, tokens in enumerate(prompts)
            if tokens <= instance.unused
        ]

    found = regrouping(average_ns).free(everyone, batches, startable, lambda _: alone_ns)
    paying = []
    for group in batches:
        youngest = min(request.executed_ns for request in group.requests)
        for instance in group.instances:
            spared, takes = max(alone_ns, average_ns - youngest), PER_SLOT * instance.used
            fits = instance.used <= sum(other.unused for other in everyone if other != instance)
            if fits and startable(instance) and spared > takes:
                paying.append(takes)
    assert (found is None) == (not paying)
    assert found is None or PER_SLOT * found.instance.used == min(paying)


# --- masters -----------------------------------------------------------------------------------


def measured(tipping: int, small: list[float], large: list[float]) -> DecodeCost:
    lines = (LinearDecodeCost.of_seconds(a * 1e-3, 1e-7, c * 1e-3) for a, c in (small, large))
    return DecodeCost(small=next(lines), large=next(lines), tipping_batch=tipping)


BOUND_BY_MEMORY = measured(95, [10, 0.02], [5, 0.073])
TWO = measured(95, [11, 0.0133], [6, 0.0377])


@pytest.mark.parametrize(
    ("one", "two", "rows"),
    [
        (BOUND_BY_MEMORY, TWO, 95),  # a master is compute-bound from 96 rows on
        (measured(9, [1, 1], [1, 1]), measured(9, [4, 0.5], [4, 0.5]), 6),  # equal with six
        (measured(9, [4, 1], [4, 1]), measured(9, [1, 1], [1, 1]), 0),
        (measured(9, [1, 1], [1, 1]), measured(9, [4, 1], [4, 1]), LARGEST_BATCH),
    ],
)
def test_masters_draw_as_many_rows_as_two_would_not_draw_faster(
    one: DecodeCost, two: DecodeCost, rows: int
) -> None:
    table = replace(
        SHIPPED,
        decode=tuple(
            (LatencyKey(strategy="decode", sp=sp), times) for sp, times in ((1, one), (2, two))
        ),
    )
    assert CostTable(latencies=table).rows_alone(1) == rows


def test_masters_stay_as_they_are_up_to_the_threshold() -> None:
    assert levelled({1: 8, 2: 1}, [1, 2, 3], 8) == {1: 8, 2: 1}
    assert levelled({1: 9}, [1], 8) == {1: 9}, "there is nobody else"


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    idle=st.integers(0, 3),
    most=st.integers(1, 20),
)
def test_masters_are_level_and_as_few_as_will_do(counts: list[int], idle: int, most: int) -> None:
    mastered = {n: rows for n, rows in enumerate(counts) if rows}
    line = list(range(len(counts) + idle))
    found = levelled(mastered, line, most)
    assert sum(found.values()) == sum(counts)
    if max(counts) > most:
        assert max(found.values()) - min(found.values()) <= 1
        enough = -(-sum(counts) // most)
        assert len(found) == max(len(mastered), min(enough, len(line)))
        assert mastered.keys() <= found.keys()
    else:
        assert found == mastered


class Row:
    """A row of 100 positions of prompt on instance 7, whose answer instance 1 holds up to 140, and
    instance 2 behind."""

    id, request_id, master_id, joined_ns, is_moving = 5, 5, 1, 0, False
    slices = (KvSlice(7, 0, 100),)
    answer = (KvSlice(1, 100, 140), KvSlice(2, 140, 160))
    answer_span = (100, 160)


@pytest.mark.parametrize(("seen", "room"), [(100, 99), (110, 99), (110, 20), (140, 99), (300, 9)])
def test_what_was_generated_stays_when_another_master_goes_on(seen: int, room: int) -> None:
    unused = {1: 0, 2: 0, 3: room, 7: 0}
    row: Any = Row()
    placement = hand_over(row, 3, seen, unused).placement
    assert placement.master == 3
    assert placement.slices == Row.slices
    positions = sorted(p for kv_slice in placement.answer for p in kv_slice.span.positions)
    assert positions == list(range(100, 160)), "each position once"
    taken = tokens_on(placement.answer).get(3, 0)
    assert taken == min(room, max(0, 140 - seen)) == room - unused[3]
    assert all(
        kv_slice.instance != 3 for kv_slice in placement.answer if kv_slice.start < min(seen, 140)
    )


# --- what moving takes -------------------------------------------------------------------------


def gang(rows: list[Any], *places: str, kv_bytes: int = 1_000) -> Any:
    instances = [
        SimpleNamespace(id=n, place=Location.parse(place)) for n, place in enumerate(places)
    ]
    decoding = dict(enumerate(rows))
    return SimpleNamespace(instances=instances, decoding=decoding, kv_bytes_per_token=kv_bytes)


def test_moving_takes_what_the_links_say_of_the_kv_that_there_is() -> None:
    """Instance 1 holds up to 40 tokens of the row's answer, of which 10 were generated: 10 kB. Each
    row that has slots there takes an iteration besides."""
    cost: Any = CostTable(latencies=SHIPPED)
    here = gang([Row()], "0-0-0", "0-0-1", "0-0-2", "0-1-0")
    moving = MoveCosts(here, cost, lambda _: 10, 0)
    assert moving.stored == {7: 100, 1: 10, 2: 0}
    expected = round((3.4e-5 + 10_000 * 2.576e-10) * 1e6) * 1000
    assert moving.ns(Migration(1, ((0, 40),))) == expected
    halves = round((3.4e-5 + 5_000 * 2.576e-10) * 1e6) * 1000
    assert moving.ns(Migration(1, ((0, 20), (2, 20)))) == 2 * halves
    assert moving.ns(Migration(1, ((3, 40),))) is None, "nobody has measured links between servers"
    several = gang([Row(), Row(), Row()], "0-0-0", "0-0-1")
    stored = round((3.4e-5 + 30_000 * 2.576e-10) * 1e6) * 1000
    each = MoveCosts(several, cost, lambda _: 10, 7_000_000)
    assert each.ns(Migration(1, ((0, 120),))) == stored + 3 * 7_000_000


def test_moving_between_racks_takes_what_their_link_says_or_that_between_servers() -> None:
    links = dict(SHIPPED.links)
    links["between"] = LinkCost.of_seconds(1e-4, 1e-9)
    to_rack = Migration(1, ((3, 40),))
    for kinds, bytes_s in (
        (links, 1e-9),
        ({**links, "racks": LinkCost.of_seconds(1e-4, 4e-9)}, 4e-9),
    ):
        cost: Any = CostTable(latencies=replace(SHIPPED, links=tuple(kinds.items())))
        there = gang([Row()], "0-0-0", "0-0-1", "0-1-0", "1-0-0")
        moving = MoveCosts(there, cost, lambda _: 10, 0)
        assert moving.ns(to_rack) == pytest.approx((1e-4 + 10_000 * bytes_s) * 1e9, abs=1_000)


def unknown() -> Iterator[tuple[Any, Any]]:
    yield CostTable(latencies=Unmeasured()), gang([Row()], "0-0-0", "0-0-1")
    yield CostTable(latencies=SHIPPED), gang([Row()], "0-0-0", "0-0-1", kv_bytes=0)


@pytest.mark.parametrize(("cost", "of"), list(unknown()))
def test_nothing_moves_where_nobody_knows_what_it_takes(cost: Any, of: Any) -> None:
    assert MoveCosts(of, cost, lambda _: 10, 0).ns(Migration(1, ((0, 40),))) is None
