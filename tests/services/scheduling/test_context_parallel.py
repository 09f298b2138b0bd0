"""Context parallelism: groups as large as pays, rings by cost, and holders that take turns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_view import Busy, Picture, gang, group, numbers, plans, sizes, waiting
from property_examples import examples
from random_executor import gang_up
from scheduler_harness import SchedulerHarness, only, steps_of

from csps.configurator.costs.cost_table import Costs
from csps.protocols.attention.ring_choice import RingModel, RingRules, RingSpeeds
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.placement import KvSlice, Span, covers_once, joined, tokens_on, within
from csps.services.scheduling.deciding.decisions import Blocked, Decision
from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.events import instance_id
from csps.services.scheduling.policies.context_parallel.pair import KvHolders, interleaved, levelled
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.policies.rounds.decode_overlay import Placed
from csps.services.scheduling.policies.rounds.prefill_overlay import NOTHING
from csps.services.scheduling.state.ledger import decode_slots
from csps.services.scheduling.state.state import Cached, Request

SPEEDS = RingSpeeds(flops=515e12, bytes_per_s=26.1e9)
RULES = RingRules(
    model=RingModel(heads=128, kv_heads=8, element_bytes=2), inside=SPEEDS, between=SPEEDS
)


def ask(picture: Picture, **options: object) -> list[Decision]:
    return picture.ask(make_policy("context_parallel", {"short_tokens": 100, **options}))


# --- groups ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("least_saving", "size"), [(0.0, 5), (0.1, 5), (0.3, 4), (0.8, 1)])
def test_a_group_is_as_large_as_pays(least_saving: float, size: int) -> None:
    """Four take a quarter of the time of one here, and five four fifths of that."""
    picture = Picture([waiting(1, 20_000)], [Busy(50_000) for _ in range(5)])
    (plan,) = plans(ask(picture, least_saving=least_saving))
    assert len(group(plan)) == size
    assert plan.steps[0].strategy == "ring_kv"
    assert not plan.steps[0].high_priority


def test_a_group_does_not_wait_for_whoever_is_long_busy() -> None:
    prefill = [Busy(long=((9000, 0),)), Busy(), Busy(), Busy(long=((9000, 0),))]
    (plan,) = plans(ask(Picture([waiting(1, 4000)], prefill)))
    assert sizes(plan) == {1: 2000, 2: 2000}


def test_a_group_without_slots_is_left_out() -> None:
    prefill = [Busy(100), Busy(3000, long=((90, 0),)), Busy(3000, long=((90, 0),))]
    (plan,) = plans(ask(Picture([waiting(1, 4000)], prefill)))
    assert sum(sizes(plan).values()) == 4000
    assert {1, 2} <= set(group(plan))
    assert sizes(plan).get(0, 0) <= 100


def test_an_instance_is_given_so_many_steps_at_a_time() -> None:
    requests = [waiting(n, 1000) for n in range(1, 9)]
    decisions = ask(Picture(requests, [Busy()]), jobs_per_instance=3)
    assert [numbers(plan) for plan in plans(decisions)] == [[1], [2], [3]]
    assert len(decisions) == 3, "the others wait for instances, not for slots"


# --- rings -----------------------------------------------------------------------------------


class Conversation(Picture):
    """The prefill gang retains the beginning of every prompt, on its first two instances."""

    prefix = Cached(0, ())

    def retain(self, tokens: int) -> None:
        self.cost = Costs(replace(self.cost.table, rings=RULES))
        half = tokens // 2
        first, second = instance_id(1, 0), instance_id(1, 1)
        slices = (
            KvSlice(first, 0, half, source=9),
            KvSlice(second, half, tokens, source=9),
        )
        self.prefix = Cached(tokens, slices, {first: half, second: tokens - half})

    def cached(self, request: Request, gang: int) -> Cached | None:
        return self.prefix if gang == self.pairs[0].prefill.id else None


@pytest.mark.parametrize(("new", "ring"), [(200, "ring_q"), (60_000, "ring_kv")])
def test_what_goes_round_follows_from_how_much_is_new(new: int, ring: str) -> None:
    picture = Conversation(
        [waiting(1, 60_000 + new)],
        [Busy(100_000) for _ in range(4)],
        [Busy(100_000) for _ in range(2)],
    )
    picture.retain(60_000)
    (plan,) = plans(ask(picture, least_saving=0.0))
    (step,) = plan.steps
    assert step.strategy == ring
    assert {0, 1} <= set(group(plan)), "who holds what is reused"
    (chunk,) = step.chunks
    assert (chunk.start, chunk.length) == (60_000, new)
    assert covers_once(Span(60_000, 60_000 + new), chunk.rows)
    assert max(sizes(plan).values()) - min(sizes(plan).values()) <= 1


def test_a_request_may_ask_for_the_other_variant() -> None:
    picture = Picture([waiting(1, 4000, cls="ring_q/exact")])
    (plan,) = plans(ask(picture))
    assert plan.steps[0].strategy == "ring_q"


# --- short prompts, and those without slots --------------------------------------------------


def test_short_prompts_run_inside_of_long_steps_where_they_wait_least() -> None:
    prefill = [Busy(long=((5000, 0),), high_priority=50), Busy(long=((9000, 0),))]
    requests = [waiting(1, 8000), waiting(2, 80)]
    long, short = plans(ask(Picture(requests, prefill)))
    assert long.steps[0].high_priority is False
    assert (group(short), short.steps[0].high_priority) == ([1], True)


def test_a_long_step_is_delayed_for_so_long_and_no_longer() -> None:
    prefill = [Busy(long=((50, 10),))]
    requests = [waiting(1, 60), waiting(2, 30)]
    assert ask(Picture(requests, prefill), overtaking_s=0) == []
    requests = [waiting(1, 30), waiting(2, 30)]
    (plan,) = plans(ask(Picture(requests, prefill), overtaking_s=0))
    assert numbers(plan) == [1]


def test_when_the_oldest_finds_no_slots_all_wait_short_ones_too() -> None:
    picture = Picture([waiting(1, 2000), waiting(2, 50)], decode=[Busy(1000)])
    assert ask(picture) == [Blocked(request_id=1)]


def test_a_batch_is_as_large_as_it_may_be() -> None:
    requests = [waiting(n, 10) for n in range(1, 9)]
    decisions = ask(Picture(requests, decode=[Busy(requests=2), Busy()]), max_batch=5)
    assert [type(decision).__name__ for decision in decisions] == ["StartPlan"] * 3 + ["Blocked"]


# --- holders ---------------------------------------------------------------------------------


def held_at(placed: Placed, stop: int, instances: list[int]) -> list[int]:
    """Tokens below a position on each instance."""
    slices = (*placed.slices, *placed.answer)
    return [
        sum(
            p < stop
            for kv_slice in slices
            if kv_slice.instance == one
            for p in kv_slice.span.positions
        )
        for one in instances
    ]


@settings(max_examples=examples(100))
@given(st.integers(1, 7), st.integers(1, 60), st.integers(1, 40))
def test_kv_is_even_to_within_one_token_at_any_time(n: int, prompt: int, output: int) -> None:
    holders = KvHolders(gang(2, [Busy(1000)] * n, prefill=False), 4)
    request = waiting(1, prompt, output)
    instances = list(holders.free)
    placed = holders.spread(request, None)
    assert placed.master in instances
    for stop in range(prompt, prompt + output + 1):
        held = held_at(placed, stop, instances)
        assert sum(held) == stop
        assert max(held) - min(held) <= 1
    masters = []
    for _ in range(n):
        holders.take(placed)
        masters.append(placed.master)
        placed = holders.spread(request, None)
    assert sorted(masters) == sorted(instances), "masters take turns as well"


@pytest.mark.parametrize("output", [16, 4000])
@pytest.mark.parametrize("n", [2, 4])
def test_a_long_conversation_has_few_slices_and_stays_even(n: int, output: int) -> None:
    """The client may name the length of its answers, or leave it to the default."""
    new, answered, turns = 64, 16, 400
    slices, total = tuple[KvSlice, ...](), 0
    for _ in range(turns):
        holders = KvHolders(gang(2, [Busy(100_000)] * n, prefill=False), 4)
        prompt = total + new
        cached = Cached(total, slices, {}) if total else None
        placed = holders.spread(waiting(1, prompt, output), cached)
        assert covers_once(Span(0, prompt), placed.slices)
        assert covers_once(Span(prompt, prompt + output), placed.answer)
        total = prompt + answered
        slices = joined(within((*placed.slices, *placed.answer), Span(0, total)))
        assert max(tokens_on(slices).values()) <= total / n + total / 8 + 1
    assert len(slices) < turns / 2


def test_a_turn_is_spread_if_its_instance_has_no_slots() -> None:
    holders = KvHolders(gang(2, [Busy(39), Busy(500)], prefill=False), 4)
    full, other = holders.free
    cached = Cached(640, (KvSlice(other, 0, 320), KvSlice(full, 320, 640)), {})
    placed = holders.spread(waiting(1, 670, 100), cached)
    assert tokens_on(placed.slices) == {full: 335, other: 335}
    assert covers_once(Span(670, 770), placed.answer)


@settings(max_examples=examples(100))
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(lambda unused: sum(unused) > 1),
    st.data(),
)
def test_who_has_no_slots_left_drops_out(free: list[int], data: st.DataObject) -> None:
    total = data.draw(st.integers(2, sum(free)))
    prompt = data.draw(st.integers(1, total - 1))
    holders = KvHolders(gang(2, [Busy(slots) for slots in free], prefill=False), 1)
    assert holders.has_room(total)
    assert not holders.has_room(sum(free) + 1)
    placed = holders.spread(waiting(1, prompt, total - prompt), None)
    assert covers_once(Span(0, prompt), placed.slices)
    assert covers_once(Span(prompt, total), placed.answer)
    holders.take(placed)
    assert min(holders.free.values()) >= 0
    assert sum(holders.free.values()) == sum(free) - total
    assert not holders.has_room(1), "a batch of one"


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6), st.data()
)
def test_what_is_new_goes_first_to_whoever_holds_less(
    holders: list[tuple[int, int]], data: st.DataObject
) -> None:
    """As token by token to whoever has fewest then."""
    held, room = [tokens for tokens, _ in holders], [unused for _, unused in holders]
    tokens = data.draw(st.integers(0, sum(room)))
    more = levelled(tokens, held, room)
    assert all(0 <= given <= most for given, most in zip(more, room, strict=True))
    one_by_one = list(held)
    for _ in range(tokens):
        roomy = [
            index for index in range(len(held)) if one_by_one[index] < held[index] + room[index]
        ]
        one_by_one[min(roomy, key=one_by_one.__getitem__)] += 1
    assert sorted(a + b for a, b in zip(held, more, strict=True)) == sorted(one_by_one)


def test_turns_by_hand() -> None:
    turns = interleaved(10, 8, [(7, 4), (8, 1), (9, 9)])
    placed = sorted((p, turn.instance) for turn in turns for p in turn.span.positions)
    assert placed == list(zip(range(10, 18), [7, 8, 9, 7, 9, 7, 9, 7], strict=True))


def test_on_one_gang_kv_stays_where_it_was_computed() -> None:
    """And the answer's goes there, or anywhere if there are no slots left."""
    holders = KvHolders(gang(2, [Busy(50), Busy(50), Busy(50)], prefill=False), 4)
    first, second, third = holders.free
    rows = (KvSlice(first, 0, 10), KvSlice(second, 10, 20), KvSlice(first, 20, 29))
    placed = holders.in_place(waiting(1, 29, 21), NOTHING, rows)
    assert placed.slices == rows
    assert tokens_on(placed.answer) == {second: 11, first: 10}
    assert tokens_on(holders.in_place(waiting(1, 29, 121), NOTHING, rows).answer)[third] == 50


# --- an elastic gang -------------------------------------------------------------------------


@settings(max_examples=examples(100))
@given(
    st.lists(st.integers(5, 120), min_size=1, max_size=6),
    st.integers(0, 80),
    st.lists(st.tuples(st.integers(1, 250), st.integers(1, 80)), min_size=1, max_size=8),
)
def test_whoever_is_admitted_starts_on_an_idle_elastic_gang(
    slots: list[int], short: int, requests: list[tuple[int, int]]
) -> None:
    harness = SchedulerHarness(make_policy("context_parallel", {"short_tokens": short}))
    harness.turn(gang_up(1, slots, prefill=True, decode=True, max_positions=300))
    for prompt, output in requests:
        refusal = harness.scheduler.refusal(prompt, output)
        commands = harness.turn(harness.submit(prompt, output))
        assert (refusal is None) == (prompt + output <= min(300, sum(slots)))
        if refusal is None:
            (reserve,), (step,) = only(commands, cmd.Reserve), steps_of(commands)
            done = [
                ev.StepDone(step_id=step.step_id, instance=instance, took_ns=1)
                for instance in step.group
            ]
            holders = decode_slots(reserve.message, output)
            assert sum(holders.values()) == prompt + output
            harness.turn(ev.FirstToken(sequence_id=reserve.message.sequence_id), *done)
            freed = [
                ev.Freed(sequence_id=reserve.message.sequence_id, instance=holder)
                for holder in holders
            ]
            harness.turn(
                ev.Finished(sequence_id=reserve.message.sequence_id, generated_tokens=output),
                *freed,
            )
    assert not any(harness.scheduler.counts)


# --- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"least_savings": 0.2}, "has no option 'least_savings'; did you mean 'least_saving'?"),
        ({"least_saving": 1.0}, r"option least_saving must be in \[0, 1\), not 1.0"),
        ({"jobs_per_instance": 0}, "option jobs_per_instance must be at least 1, not 0"),
        ({"short_tokens": -1}, "option short_tokens must be at least 0, not -1"),
        ({"spt_tokens": 5}, "has no option 'spt_tokens'; it is one of csps"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy("context_parallel", options)
    with pytest.raises(ConfigError, match="did you mean 'context_parallel'"):
        make_policy("context_paralel")
