"""Ledger, queue and timers, each against something plainer; and what costs and settings refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from locality_reference import near_places
from policy_view import waiting
from property_examples import examples
from random_executor import gang_up

from csps.configurator.costs.cost_table import (
    Allowed,
    Bucket,
    Costs,
    CostTable,
    StepLatency,
    Unmeasured,
)
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import BOUNDED, Objective, RequestClass, option_name
from csps.protocols.attention.ring_choice import RingModel, RingRules, RingSpeeds
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import GroupShape, Location
from csps.services.scheduling.core.requests import Queue
from csps.services.scheduling.deciding.decisions import digest_of
from csps.services.scheduling.events.limits import QueueLimits, SchedulerDeadlines, Timer, Timers
from csps.services.scheduling.policies.csps.locality import LocalityAllocator
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.policies.rounds.prefill_overlay import PrefillOverlay
from csps.services.scheduling.state.ledger import Ledger
from csps.services.scheduling.state.state import Priority, Request, new_gang

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# --- slots -----------------------------------------------------------------------------------

CAPACITIES = (10, 20, 5)
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "give_back"]),
        st.integers(0, 1),
        st.integers(0, 4),
        st.lists(st.integers(0, 12), min_size=3, max_size=3),
    ),
    max_size=60,
)


@PATIENT
@given(MOVES, st.booleans())
def test_ledger_agrees_with_a_list_of_owners(
    moves: list[tuple[str, int, int, list[int]]], dies: bool
) -> None:
    """Two ledgers, one for steps and one for sequences, share the instances."""
    gang = new_gang(gang_up(1, list(CAPACITIES), prefill=True), 0)
    ledgers = [Ledger(), Ledger()]
    for ledger in ledgers:
        ledger.add(gang)
    ids = [instance.id for instance in gang.instances]
    held: dict[tuple[int, int, int], int] = {}
    for kind, which, owner, amounts in moves:
        ledger = ledgers[which]
        used = [sum(n for (_, _, at), n in held.items() if at == i) for i in range(3)]
        owns = any((of, who) == (which, owner) for of, who, _ in held)
        fits = all(u + n <= c for u, n, c in zip(used, amounts, CAPACITIES, strict=True))
        wanted = dict(zip(ids, amounts, strict=True))
        if kind == "reserve" and fits and not owns:
            ledger.reserve(owner, dict(wanted))
            held |= {(which, owner, at): n for at, n in enumerate(amounts)}
        elif kind == "reserve":
            with pytest.raises(AssertionError):
                ledger.reserve(owner, dict(wanted))
        else:
            at = amounts[0] % 3
            ledger.free(owner, ids[at])
            held.pop((which, owner, at), None)
        expected = [sum(n for (_, _, at), n in held.items() if at == i) for i in range(3)]
        assert [instance.used for instance in gang.instances] == expected
        sums = [ledger.sums(gang.instances) for ledger in ledgers]
        assert [sums[0][identifier] + sums[1][identifier] for identifier in ids] == expected
    if dies:
        for ledger in ledgers:
            ledger.drop(gang)
            assert len(ledger) == 0


# --- the line --------------------------------------------------------------------------------

LINES: list[Priority] = ["high", "low"]


@PATIENT
@given(st.lists(st.tuples(st.sampled_from(["push", "remove"]), st.integers(0, 30)), max_size=80))
def test_queue_stays_in_order_of_admission(moves: list[tuple[str, int]]) -> None:
    queue, expected = Queue(), set[int]()
    requests = {number: waiting(number, 10) for number in range(31)}
    for number, request in requests.items():
        request.priority = LINES[number % 2]
    for move, number in moves:
        request: Request = requests[number]
        if move == "push" and number not in expected:
            queue.push(request)
            expected.add(number)
        elif move == "remove":
            queue.remove(request)
            expected.discard(number)
        assert (request in queue) == (number in expected)
        assert len(queue) == len(expected)
        for parity, line in enumerate(LINES):
            numbers = [request.id for request in queue.startable[line]]
            assert numbers == sorted(number for number in expected if number % 2 == parity)
    assert {request.id for request in queue.everyone()} == expected


# --- time ------------------------------------------------------------------------------------


@PATIENT
@given(
    st.lists(
        st.tuples(st.sampled_from(["at", "at", "off", "run"]), st.integers(0, 100)), max_size=300
    )
)
def test_timers_run_in_order_unless_cancelled(moves: list[tuple[str, int]]) -> None:
    timers, made, ran = Timers(), list[tuple[int, Timer]](), list[int]()
    on: dict[int, int] = {}
    now_ns = 0
    for move, value in moves:
        if move == "at":
            number = len(made)
            made.append((number, timers.at(now_ns + value, lambda n=number: ran.append(n))))  # type: ignore[misc]
            on[number] = now_ns + value
        elif move == "off" and made:
            number, timer = made[value % len(made)]
            timers.cancel(timer)
            on.pop(number, None)
        elif move == "run":
            now_ns += value
            due = sorted(
                (number for number in on if on[number] <= now_ns),
                key=lambda number: (on[number], number),
            )
            ran.clear()
            timers.run_due(now_ns)
            assert ran == due
            for number in due:
                del on[number]
        assert len(timers) == len(on)
        assert timers.next_ns == min(on.values(), default=None)


def test_cancelled_timers_do_not_pile_up() -> None:
    timers = Timers()
    for number in range(10_000):
        timers.cancel(timers.at(10**15 + number, lambda: None))
    assert len(timers._heap) <= 2 * Timers.MINORITY


def test_timer_that_sets_a_due_timer_runs_it() -> None:
    timers, ran = Timers(), list[str]()

    def again() -> None:
        ran.append("first")
        timers.at(5, lambda: ran.append("second"))

    timers.at(5, again)
    timers.run_due(5)
    assert ran == ["first", "second"]


# --- near rooms ------------------------------------------------------------------------------


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.builds(Location, *[st.integers(0, last) for last in (2, 2, 4)]),
        min_size=1,
        max_size=12,
        unique=True,
    ),
    st.data(),
)
def test_locality_allocator_chooses_the_nearest_places(
    places: list[Location], data: st.DataObject
) -> None:
    """Some instances may have been given something to do."""
    count, most = len(places), data.draw(st.integers(1, 60))
    free = data.draw(st.lists(st.integers(1, 80), min_size=count, max_size=count))
    gang = new_gang(gang_up(1, free, prefill=True, places=[str(place) for place in places]), 0)
    overlay = PrefillOverlay(gang, 0)
    rooms = LocalityAllocator(overlay.candidates, most, steps=2)
    for _ in range(data.draw(st.integers(0, 6))):
        spot = overlay.candidates[data.draw(st.integers(0, count - 1))]
        tokens = data.draw(st.integers(0, spot.free))
        overlay.start_low_priority(waiting(1, 1), [spot], [tokens], data.draw(st.integers(0, 5)))
        rooms.update(spot)
    wanted = data.draw(st.integers(1, 500))
    open_spots = [candidate for candidate in overlay.candidates if candidate.low_priority_steps < 2]
    freest = sorted(
        open_spots, key=lambda candidate: (-candidate.free, candidate.free_at_ns, candidate.place)
    )
    expected = near_places(
        {candidate.place: min(most, candidate.free) for candidate in freest}, wanted
    )
    chosen = rooms.nearest(wanted)
    assert (chosen is None) == (expected is None)
    if chosen is not None and expected is not None:
        assert [candidate.place for candidate in chosen] == sorted(expected)


# --- costs -----------------------------------------------------------------------------------


class PlantedTimes:
    digest = "planted"

    def step(self, sp: int, tp: int = 1, strategy: str = "") -> StepLatency:
        if strategy == "unheard_of":
            raise ConfigError("not measured")
        return Unmeasured(
            step_ns={"": 0, "ulysses": 0, "ring_kv": 500_000}[strategy],
            token_ns={"": 9_000, "ulysses": 9_000, "ring_kv": 5_000}[strategy],
            pair_ns=0,
        ).step(sp, tp)

    def iteration(self, sp: int, tp: int = 1) -> object:
        return Unmeasured().iteration(sp, tp)


TWO = GroupShape((1, 1), tp=2)
_SPEEDS = RingSpeeds(flops=1e14, bytes_per_s=1e10)
RINGS = RingRules(
    model=RingModel(heads=32, kv_heads=8, element_bytes=2), inside=_SPEEDS, between=_SPEEDS
)


def planted(*allowed: Allowed) -> CostTable:
    both = {Bucket("fast", TWO, exponent): allowed for exponent in (6, 7, 8, 9)}
    return CostTable(latencies=PlantedTimes(), buckets=both)  # type: ignore[arg-type]


def test_the_cheapest_allowed_strategy_depends_on_the_length() -> None:
    table = planted(Allowed("ulysses"), Allowed("ring_kv"))
    assert table.best("fast", TWO, 0, 400).strategy == "ulysses"
    assert table.best("fast", TWO, 0, 1000).strategy == "ring_kv"
    assert table.best("fast", TWO, 0, 1000).time_ns == 500_000 + 5_000 * 1000 // 4
    assert table.best("exact", TWO, 0, 1000).strategy == "ulysses"


def test_a_strategy_may_be_cheaper_than_its_latency_model_says() -> None:
    """Then its time is a part of exact attention's, as the configurator has compared the two."""
    table = planted(Allowed("ulysses"), Allowed("ring_kv", permille=100))
    choice = table.best("fast", TWO, 0, 400)
    assert (choice.strategy, choice.time_ns) == ("ring_kv", 90_000)


def test_cache_miss_answers_exact_and_is_remembered_once() -> None:
    costs = Costs(planted(Allowed("ring_kv")))
    for length in (2000, 2047):
        assert costs.best("fast", TWO, 0, length).strategy == "ulysses"
    assert costs.best("fast", TWO, 0, 1000).strategy == "ring_kv"
    assert costs.cache_misses() == [Bucket("fast", TWO, 10)]
    assert costs.cache_misses() == []


def test_a_class_that_names_a_strategy_begins_with_it() -> None:
    costs = Costs(planted())
    assert costs.best("ring_kv/whatever", TWO, 0, 100).strategy == "ring_kv"
    unmeasured = costs.best("unheard_of/1", TWO, 0, 100)
    assert (unmeasured.strategy, unmeasured.time_ns) == ("unheard_of", 225_000)
    assert [cache_miss.row for cache_miss in costs.cache_misses()] == [
        "ring_kv/whatever",
        "unheard_of/1",
    ]


DROPS = option_name("csa", CsaSettings(levels=2, drop_ratios=((0.5,),)))
DROPS_MORE = option_name("csa", CsaSettings(levels=2, drop_ratios=((0.9,),)))
MS = 1_000_000


def bounded(**bounds: Any) -> str:
    return RequestClass(objective=Objective(**bounds)).key


def with_bounds() -> CostTable:
    """Make a table where 1000 tokens take 2.25 ms exactly, or a half or a quarter of it."""
    options = (
        Allowed("ulysses"),
        Allowed(DROPS, permille=500, loss_ppm=10_000),
        Allowed(DROPS_MORE, permille=250, loss_ppm=50_000),
    )
    bucket = Bucket(BOUNDED, TWO, 9)
    return CostTable(latencies=PlantedTimes(), buckets={bucket: options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bounds", "waited_ms", "chosen"),
    [
        ({}, 0, "ulysses"),
        ({"max_accuracy_loss": 0.009}, 0, "ulysses"),
        ({"max_accuracy_loss": 0.01}, 0, DROPS),
        ({"max_accuracy_loss": 1.0}, 0, DROPS_MORE),
        ({"kind": "accuracy"}, 0, "ulysses"),
        ({"kind": "accuracy", "max_ttft_ms": 3.0}, 0, "ulysses"),
        ({"kind": "accuracy", "max_ttft_ms": 3.0}, 1, DROPS),
        ({"kind": "accuracy", "max_ttft_ms": 2.8}, 0, "ulysses"),
        ({"kind": "accuracy", "max_ttft_ms": 2.6}, 0, DROPS),  # exact would be in time by 16 %
        ({"kind": "accuracy", "max_ttft_ms": 1.4}, 0, DROPS),
        ({"kind": "accuracy", "max_ttft_ms": 1.2}, 0, DROPS_MORE),
        ({"kind": "accuracy", "max_ttft_ms": 3.0}, 2, DROPS_MORE),
        ({"kind": "accuracy", "max_ttft_ms": 3.0}, 100, DROPS_MORE),
        ({"kind": "accuracy", "max_ttft_ms": 0.1, "max_accuracy_loss": 0.02}, 0, DROPS),
        ({"kind": "ttft", "max_ttft_ms": 0.1}, 0, "ulysses"),
    ],
)
def test_bounds_choose_among_the_options_and_waiting_uses_them_up(
    bounds: dict[str, Any], waited_ms: int, chosen: str
) -> None:
    choice = with_bounds().best(bounded(**bounds), TWO, 0, 1000, waited_ms * MS)
    assert choice.strategy == chosen
    assert choice.time_ns == {"ulysses": 2_250_000, DROPS: 1_125_000}.get(chosen, 563_000)


@pytest.mark.parametrize(
    ("bounds", "chosen"),
    [
        ({"max_accuracy_loss": 0.0}, DROPS),
        ({"kind": "accuracy", "max_ttft_ms": 3.0}, "ulysses"),
        ({"kind": "accuracy", "max_ttft_ms": 2.0}, DROPS),
    ],
)
def test_option_predicted_to_lose_nothing_is_chosen_by_time(
    bounds: dict[str, Any], chosen: str
) -> None:
    table = with_bounds()
    options = {bucket: (of[0], of[1]._replace(loss_ppm=0)) for bucket, of in table.buckets.items()}
    table = replace(table, buckets=options)
    assert table.best(bounded(**bounds), TWO, 0, 1000).strategy == chosen


@pytest.mark.parametrize(
    ("error_permille", "chosen"), [(30, "ulysses"), (200, DROPS), (900, DROPS), (2000, DROPS_MORE)]
)
def test_bound_on_ttft_leaves_room_for_the_error_of_predictions(
    error_permille: int, chosen: str
) -> None:
    """Exact attention takes 2.25 ms and wins where it fits with its error."""
    table, cls = with_bounds(), bounded(kind="accuracy", max_ttft_ms=2.4)
    assert replace(table, error_permille=error_permille).best(cls, TWO, 0, 1000).strategy == chosen


def test_among_options_that_lose_nothing_a_bound_on_ttft_buys_as_little_dropping_as_it_needs() -> (
    None
):
    table = with_bounds()
    options = {
        bucket: tuple(option._replace(loss_ppm=0) for option in of)
        for bucket, of in table.buckets.items()
    }
    table = replace(table, buckets=options)
    chosen = [
        table.best(bounded(kind="accuracy", max_ttft_ms=most), TWO, 0, 1000).strategy
        for most in (3.0, 1.4, 0.7)
    ]
    assert chosen == ["ulysses", DROPS, DROPS_MORE]


def test_bound_on_ttft_leaves_room_for_time_outside_of_steps() -> None:
    table, cls = with_bounds(), bounded(kind="accuracy", max_ttft_ms=3.0)
    assert table.best(cls, TWO, 0, 1000).strategy == "ulysses"
    assert replace(table, overhead_ns=MS).best(cls, TWO, 0, 1000).strategy == DROPS
    assert replace(table, overhead_ns=MS).digest != table.digest


def test_request_with_bounds_behind_history_is_exact() -> None:
    costs = Costs(with_bounds())
    assert costs.best(bounded(max_accuracy_loss=1.0), TWO, 8, 1000).strategy == "ulysses"
    assert costs.cache_misses() == [Bucket("auto", TWO, 9, 4)]


def test_history_without_buckets_is_answered_as_if_there_were_none() -> None:
    whole, rest = Bucket("auto", TWO, 9), Bucket("auto", TWO, 9, 13)
    buckets = {whole: (Allowed("ring_kv"),), rest: (Allowed("ulysses"),)}
    costs = Costs(CostTable(latencies=PlantedTimes(), buckets=buckets))  # type: ignore[arg-type]
    assert costs.best("auto", TWO, 0, 1000).strategy == "ring_kv"
    assert costs.best("auto", TWO, 4096, 1000).strategy == "ulysses"
    assert costs.best("auto", TWO, 8191, 1000).strategy == "ulysses"
    assert costs.cache_misses() == []
    assert costs.best("auto", TWO, 8192, 1000).strategy == "ring_kv"
    assert costs.cache_misses() == [rest._replace(history_bits=14)]


def test_all_bounds_share_one_cache_miss() -> None:
    costs = Costs(planted())
    for bound in (0.0, 0.5):
        assert costs.best(bounded(max_accuracy_loss=bound), TWO, 0, 100).strategy == "ulysses"
    assert costs.cache_misses() == [Bucket(BOUNDED, TWO, 6)]


def test_the_better_ring_depends_on_what_is_cached() -> None:
    """The rule is a part of the table and of its digest."""
    plain = CostTable(latencies=Unmeasured())
    table = replace(plain, rings=RINGS)
    assert table.digest != plain.digest
    costs = Costs(table)
    assert costs.best("ring/exact", TWO, 0, 1000).strategy == "ring_kv"
    assert costs.best("ring/exact", TWO, 100_000, 1000).strategy == "ring_q"
    assert costs.best("ring/exact", GroupShape((1,)), 100_000, 1000).strategy == "ring_kv"
    assert plain.best("ring/exact", TWO, 100_000, 1000).strategy == "ring_kv"
    assert costs.best("ring_q/exact", TWO, 0, 1000).strategy == "ring_q"
    assert costs.cache_misses() == []


def test_table_named_by_its_digest_is_put_in_force() -> None:
    first, second = planted(Allowed("ulysses")), planted(Allowed("ring_kv"))
    assert first.digest != second.digest == planted(Allowed("ring_kv")).digest
    costs = Costs(first, {second.digest: second})
    costs.use(second.digest)
    assert costs.best("fast", TWO, 0, 100).strategy == "ring_kv"


# --- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cpss", {}, "unknown scheduling policy 'cpss'; did you mean 'csps'?"),
        ("zzz", {}, "unknown scheduling policy 'zzz'; allowed: chunked_prefill, context_parallel"),
        ("csps", {"spt_token": 5}, "has no option 'spt_token'; did you mean 'spt_tokens'?"),
        ("csps", {"sp": 5}, "policy csps has no option 'sp'"),
        ("fixed_sp", {"short_tokens": 5}, "policy fixed_sp has no option 'short_tokens'"),
        ("csps", {"spt_tokens": 0}, "option spt_tokens must be at least 1, not 0"),
        ("csps", {"look_ahead": 0}, "option look_ahead must be at least 1, not 0"),
        ("csps", {"overtaking_s": -1.0}, "option overtaking_s must be at least 0, not -1.0"),
        ("csps", {"short_tokens": -1}, "option short_tokens must be at least 0, not -1"),
        ("csps", {"spread_tokens": 0}, "option spread_tokens must be at least 1, not 0"),
        ("fixed_sp", {"max_batch": 0}, "option max_batch must be at least 1, not 0"),
        ("fixed_sp", {"sp": 0}, "option sp must be at least 1, not 0"),
        ("fixed_sp", {"sp": "4"}, "option sp must be a whole number, not '4'"),
        ("fixed_sp", {"sp": True}, "option sp must be a whole number, not True"),
        ("csps", {"spt_tokens": 4.5}, "option spt_tokens must be a whole number, not 4.5"),
        ("csps", {"overtaking_s": "10"}, "option overtaking_s must be a number, not '10'"),
    ],
)
def test_wrong_settings_are_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_policy(name, options)
    assert message in str(refusal.value)


def test_equal_options_have_equal_digests() -> None:
    assert digest_of(make_policy("csps")) == digest_of(make_policy("csps", {"spt_tokens": 4096}))
    assert digest_of(make_policy("csps")) != digest_of(make_policy("csps", {"spread_tokens": 1}))
    assert make_policy("csps", {"overtaking_s": 3}).name == "csps"


def test_limits_and_deadlines_are_checked() -> None:
    with pytest.raises(ConfigError, match="limits must be positive"):
        QueueLimits(max_attempts=0)
    with pytest.raises(ConfigError, match="transfer_ns must not be negative"):
        SchedulerDeadlines(transfer_ns=-1)
    with pytest.raises(ConfigError, match="liveness_check_ns must be positive"):
        SchedulerDeadlines(liveness_check_ns=0)
