"""LoongServe's dispatching, allocation, scaling and waiting against numbers worked by hand, and
against what must hold whatever the numbers are (§5.1, §5.2, §5.4, App. A)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csps.services.scheduling.policies.loongserve.allocation import Migration, MoveNs, allocate
from csps.services.scheduling.policies.loongserve.batching import Dispatched, Dispatcher
from csps.services.scheduling.policies.loongserve.inputs import (
    DecodeGroup,
    Decoding,
    Elastic,
    Eq7,
    PendingPrompt,
    PrefillModel,
    saved_ns,
    wait_ns,
    worth_waiting,
)
from csps.services.scheduling.policies.loongserve.scaling import KvPlacement, place_kv

# T = 100 + 1000/dop * tokens: tips at 200, which is at dop/10 tokens.
MODEL = PrefillModel(lambda dop: Eq7(100.0, 1000.0 / dop, 0.0))
FLAT = PrefillModel(lambda dop: Eq7(1000.0, 2.0 / dop, 0.0))


def instance(number: int, unused: int, used: int = 0) -> Elastic:
    return Elastic(number, number, unused, used)


def per_slot(ns: float | None) -> MoveNs:
    """A slot's KV takes so long."""
    return lambda move: None if ns is None else ns * sum(slots for _, slots in move.targets)


def placed_of(
    prompts: list[PendingPrompt],
    group: list[Elastic],
    others: list[Elastic],
    mastered: dict[int, int],
    *,
    most_sequences: int,
) -> tuple[KvPlacement, ...]:
    """Return the placements of one batch."""
    (found,) = place_kv(
        [(prompts, group)], [*group, *others], mastered, most_sequences=most_sequences
    )
    return found


def dispatcher(
    model: PrefillModel = FLAT,
    *,
    future: int = 10**9,
    average_ns: int = 0,
    most: int = 100,
    ooe: int = 2,
) -> Dispatcher:
    return Dispatcher(
        model, future_slots=future, average_decode_ns=average_ns, most=most, max_num_ooe=ooe
    )


def ids(found: Dispatched) -> list[int]:
    return [prompt.id for prompt in found.prompts]


# --- the model ---------------------------------------------------------------------------------


def test_equation_7_by_hand() -> None:
    model = PrefillModel(lambda dop: Eq7(10.0, 3.0 / dop, 0.5))
    assert model.ns([2, 4], 1) == 10 + 3 * 6 + 0.5 * (4 + 16)
    assert model.ns([2, 4], 3) == 10 + 6 + 10


def test_the_tipping_point() -> None:
    assert FLAT.tipping_ns(4) == 2000
    assert PrefillModel(FLAT.eq7, tipping_tokens=50).tipping_ns(4) == 1000 + 50 * 0.5


# --- §5.1 --------------------------------------------------------------------------------------


def test_equations_1_and_2_by_hand() -> None:
    """T = 1000 + 2/4 * 400 = 1200 ns on four; the batch has generated 10 and 40 tokens, waits at
    least 5000 - 2000 ns; prompts of 100 and 300 tokens."""
    planner = dispatcher(average_ns=5000)
    batch = DecodeGroup((instance(1, 1000),), (Decoding(10, 2000), Decoding(40, 9000)))
    prompts = [PendingPrompt(1, 100, 5), PendingPrompt(2, 300, 5)]
    assert planner.cost(prompts, 4, batch) == 1200 / 10 + 1200 / 40
    assert planner.gain(prompts, batch) == 3000 / 100 + 3000 / 300
    late = DecodeGroup(batch.instances, (Decoding(10, 6000),))
    assert planner.gain(prompts, late) == 0


def test_first_come_first_served_up_to_the_tipping_point() -> None:
    """On two instances 1000 + tokens: 1000 tokens tip, and are still taken."""
    prompts = [PendingPrompt(n, 400, 1) for n in range(1, 6)]
    assert ids(dispatcher().dispatch(prompts, [instance(0, 9999), instance(1, 9999)], [])) == [1, 2]
    alone = dispatcher().dispatch([PendingPrompt(1, 5000, 1)], [instance(0, 9999)], [])
    assert ids(alone) == [1], "the oldest goes however long it is"


def test_a_batch_is_preempted_only_for_a_gain() -> None:
    """Three prompts of 10 tokens beside a batch of one request: on one instance T = 1060."""
    prompts = [PendingPrompt(n, 10, 1) for n in (1, 2, 3)]
    busy = DecodeGroup((instance(1, 100),), (Decoding(20, 0),))
    # cost 1060 / 20 = 53; gain 3 * average / 10
    assert ids(dispatcher(average_ns=176).dispatch(prompts, [], [busy])) == []
    found = dispatcher(average_ns=180).dispatch(prompts, [], [busy])
    assert (ids(found), found.preempted) == ([1, 2, 3], (busy,))


def test_batches_with_most_unused_slots_are_asked_first() -> None:
    batches = [DecodeGroup((instance(n, 10 * n),), (Decoding(100, 0),)) for n in (1, 3, 2)]
    found = dispatcher(average_ns=10**9).dispatch([PendingPrompt(1, 25, 1)], [], batches)
    assert found.preempted == (batches[1],)


def test_batches_give_way_together_where_none_has_slots_enough() -> None:
    """The oldest needs two of three. T = 1000 + 2/2 * 250 = 1250, and they have generated 100 each:
    cost 25, and what is spared counts over 250 tokens."""
    batches = [DecodeGroup((instance(n, 130 - n),), (Decoding(100, 50),)) for n in range(3)]
    line = [PendingPrompt(1, 250, 1), PendingPrompt(2, 300, 1)]
    found = dispatcher(average_ns=50 + 6251).dispatch(line, [], batches)
    assert (ids(found), found.preempted) == ([1], tuple(batches[:2]))
    found = dispatcher(average_ns=50 + 6250).dispatch(line, [], batches)
    assert (ids(found), found.preempted) == ([], ())
    assert (
        dispatcher(average_ns=10**9).dispatch([PendingPrompt(1, 400, 1)], [], batches).prompts == ()
    )


def test_who_goes_on_for_longer_than_estimated_is_preempted_in_time() -> None:
    """Cost 1020 / 10 = 102 a token, of 10: 1020 ns have to be waited."""
    prompt = PendingPrompt(1, 10, 1, waited_ns=700)
    busy = DecodeGroup((instance(1, 100),), (Decoding(10, 900),))
    found = dispatcher(average_ns=100).dispatch([prompt], [], [busy])
    assert (ids(found), found.again_in_ns) == ([], 1020 - 700 + 1)
    waited = prompt._replace(waited_ns=1021)
    gone_on = busy._replace(requests=(Decoding(10, 900 + 321),))
    assert ids(dispatcher(average_ns=100).dispatch([waited], [], [gone_on])) == [1]
    young = busy._replace(requests=(Decoding(1, 900),))
    assert dispatcher().dispatch([prompt], [], [young]).again_in_ns == 1020 + 1, "T is a while"


def test_younger_ones_pass_who_finds_no_slots_but_not_for_ever() -> None:
    idle = [instance(0, 100)]
    line = [PendingPrompt(1, 500, 1), PendingPrompt(2, 50, 1)]
    found = dispatcher(ooe=2).dispatch(line, idle, [])
    assert ids(found) == [2]
    tired = [line[0]._replace(bypassed_rounds=2), line[1]]
    assert ids(dispatcher(ooe=2).dispatch(tired, idle, [])) == []
    assert ids(dispatcher(ooe=0).dispatch(line, idle, [])) == []


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300), st.integers(0, 3)), max_size=12),
    st.lists(st.integers(0, 400), max_size=4),
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 50), st.integers(0, 900)), max_size=3),
    st.integers(0, 1500),
    st.integers(0, 10_000),
)
def test_whatever_goes_has_slots_now_and_for_all_its_future(
    line: list[tuple[int, int, int]],
    idle: list[int],
    batches: list[tuple[int, int, int]],
    future: int,
    average_ns: int,
) -> None:
    prompts = [PendingPrompt(n, *sizes) for n, sizes in enumerate(line)]
    free = [instance(n, unused) for n, unused in enumerate(idle)]
    busy = [
        DecodeGroup((instance(10 + n, unused),), (Decoding(generated, executed),))
        for n, (unused, generated, executed) in enumerate(batches)
    ]
    found = dispatcher(future=future, average_ns=average_ns).dispatch(prompts, free, busy)
    room = sum(instance.unused for instance in free) + sum(
        instance.unused for instance in found.preempted
    )
    assert sum(prompt.tokens for prompt in found.prompts) <= room
    assert sum(prompt.future for prompt in found.prompts) <= future
    youngest = max(ids(found), default=-1)
    passed = [prompt for prompt in prompts[: max(0, youngest)] if prompt not in found.prompts]
    assert all(prompt.bypassed_rounds < 2 for prompt in passed), "passed once too often"
    assert len(set(ids(found))) == len(found.prompts)


# --- §5.2 --------------------------------------------------------------------------------------


def test_idle_instances_are_enough_where_moving_costs_more() -> None:
    """From one instance to two, 100 tokens save 200 - 100 = 100 ns; 60 tokens of KV at 2 ns each
    cost 120, at 1.5 ns 90 (Eqs. 3-4)."""
    prompts, idle = [PendingPrompt(1, 100, 1)], [instance(0, 100)]
    decoding = [instance(1, 40, used=60), instance(2, 90, used=70)]
    for cost_ns, chosen in ((2.0, [0]), (1.5, [0, 1])):
        found = allocate(prompts, idle, decoding, FLAT, move_ns=per_slot(cost_ns))
        assert found is not None
        assert [instance.id for instance in found.instances] == chosen
    assert found.migrations == (Migration(1, ((2, 60),)),)
    assert found.preempted == ()


def test_kv_that_fits_nowhere_stays() -> None:
    """The batch is preempted instead where slots are needed, and left alone where they are not."""
    decoding = [instance(1, 300, used=60), instance(2, 50, used=70)]
    found = allocate([PendingPrompt(1, 250, 1)], [], decoding, FLAT, move_ns=per_slot(0.1))
    assert found is not None
    assert ([instance.id for instance in found.instances], found.preempted) == ([1], (1,))
    alone = allocate(
        [PendingPrompt(1, 50, 1)], [instance(0, 60)], decoding, FLAT, move_ns=per_slot(None)
    )
    assert alone is not None
    assert [instance.id for instance in alone.instances] == [0]


def test_instances_with_most_unused_slots_are_preempted_first() -> None:
    decoding = [instance(1, 100, 9), instance(2, 300, 9), instance(3, 200, 9)]
    found = allocate([PendingPrompt(1, 450, 1)], [], decoding, FLAT, move_ns=per_slot(None))
    assert found is not None
    assert found.preempted == (2, 3)
    assert allocate([PendingPrompt(1, 601, 1)], [], decoding, FLAT, move_ns=per_slot(None)) is None


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=4),
    st.lists(st.integers(0, 300), max_size=3),
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), max_size=4),
    st.floats(0, 3),
)
def test_what_moves_fits_where_it_goes(
    prompts: list[int], idle: list[int], busy: list[tuple[int, int]], cost_ns: float
) -> None:
    decoding = [instance(10 + n, unused, used) for n, (unused, used) in enumerate(busy)]
    free = [instance(n, unused) for n, unused in enumerate(idle)]
    requests = [PendingPrompt(n, tokens, 1) for n, tokens in enumerate(prompts)]
    found = allocate(requests, free, decoding, MODEL, move_ns=per_slot(cost_ns))
    if found is None:
        assert sum(prompts) > sum(idle) + sum(unused for unused, _ in busy)
        return
    chosen = {instance.id for instance in found.instances}
    room = {instance.id: instance.unused for instance in decoding}
    for move in found.migrations:
        assert move.source in chosen
        assert sum(n for _, n in move.targets) == busy[move.source - 10][1]
        for target, tokens in move.targets:
            assert target not in chosen
            room[target] -= tokens
    assert min(room.values(), default=0) >= 0
    assert sum(instance.unused for instance in found.instances) >= sum(prompts)


# --- §5.4 --------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=4),
    st.integers(1, 300),
    st.integers(1, 60),
)
def test_the_least_degree_that_holds_the_kv(unused: list[int], tokens: int, answer: int) -> None:
    """Of any choice of so many instances."""
    if sum(unused) < tokens + answer:
        return
    group = [instance(n, slots) for n, slots in enumerate(unused)]
    (placed,) = placed_of([PendingPrompt(1, tokens, answer)], group, [], {}, most_sequences=99)
    holders = {where for where, _ in (*placed.prompt, *placed.answer)}
    assert sum(sorted(unused, reverse=True)[: len(holders) - 1]) < tokens + answer


def test_a_batch_keeps_one_instance_if_that_holds_it_all() -> None:
    group = [instance(0, 300), instance(1, 400), instance(2, 200)]
    placed = placed_of(
        [PendingPrompt(1, 300, 50), PendingPrompt(2, 30, 20)], group, [], {}, most_sequences=9
    )
    assert [sequence.prompt for sequence in placed] == [((1, 300),), ((1, 30),)]
    assert [sequence.master for sequence in placed] == [1, 1]


def test_600k_on_100_200_and_400_thousand_slots() -> None:
    """§4.1's example: reactive migration needs 200K on each, and the first has 100K."""
    group = [instance(0, 100), instance(1, 200), instance(2, 400)]
    (placed,) = placed_of([PendingPrompt(1, 600, 50)], group, [], {}, most_sequences=9)
    assert sorted(placed.prompt) == [(1, 200), (2, 400)]
    assert sum(tokens for _, tokens in placed.answer) == 50


def test_the_six_slots_of_figure_4() -> None:
    """Two instances of three slots, two and one of them taken: three free ones in all serve a
    request of three tokens, which no group that keeps requests together can."""
    (placed,) = placed_of(
        [PendingPrompt(1, 2, 1)], [instance(0, 1, 2), instance(1, 2, 1)], [], {}, most_sequences=9
    )
    assert (placed.prompt, placed.answer) == (((1, 2),), ((0, 1),))


def test_who_decodes_already_is_preferred() -> None:
    """So that idle instances stay idle: batches merge."""
    group = [instance(0, 900), instance(1, 100, used=800)]
    (placed,) = placed_of([PendingPrompt(1, 60, 20)], group, [], {1: 4}, most_sequences=9)
    assert placed.master == 1


def test_masters_share_a_large_batch_evenly() -> None:
    group = [instance(n, 10_000) for n in range(4)]
    prompts = [PendingPrompt(n, 10, 10) for n in range(11)]
    placed = placed_of(prompts, group, [], {}, most_sequences=4)
    counts = [sum(sequence.master == n for sequence in placed) for n in range(4)]
    assert sorted(counts) == [0, 3, 4, 4]


def test_an_answer_without_room_in_the_group_goes_on_elsewhere() -> None:
    (placed,) = placed_of(
        [PendingPrompt(1, 90, 30)], [instance(0, 100)], [instance(1, 500)], {}, most_sequences=9
    )
    assert placed.answer == ((0, 10), (1, 20))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 100)), min_size=1, max_size=6),
    st.lists(st.integers(0, 500), min_size=1, max_size=4),
    st.lists(st.integers(0, 500), max_size=3),
    st.integers(1, 5),
)
def test_every_token_has_a_slot(
    sizes: list[tuple[int, int]], unused: list[int], others: list[int], threshold: int
) -> None:
    group = [instance(n, slots) for n, slots in enumerate(unused)]
    spare = [instance(10 + n, slots) for n, slots in enumerate(others)]
    prompts = [PendingPrompt(n, *size) for n, size in enumerate(sizes)]
    tokens = sum(prompt.tokens for prompt in prompts)
    if tokens > sum(unused) or sum(prompt.future for prompt in prompts) > sum(unused) + sum(others):
        return
    taken = dict.fromkeys([member.id for member in (*group, *spare)], 0)
    for prompt, sequence in zip(
        prompts, placed_of(prompts, group, spare, {}, most_sequences=threshold), strict=True
    ):
        assert sum(n for _, n in sequence.prompt) == prompt.tokens
        assert sum(n for _, n in sequence.answer) == prompt.answer
        assert {where for where, _ in sequence.prompt} <= set(range(len(group)))
        for where, n in (*sequence.prompt, *sequence.answer):
            taken[where] += n
    assert all(taken[member.id] <= member.unused for member in (*group, *spare))


# --- App. A ------------------------------------------------------------------------------------


def test_waiting_by_hand() -> None:
    """One of four instances is free: 1000 + 2 * 800 = 2600 ns now, 1400 on all four."""
    assert wait_ns([Decoding(5, 300), Decoding(5, 100)], 1000) == 900
    assert wait_ns([Decoding(5, 2000)], 1000) == 0
    assert saved_ns(10**6, [Decoding(5, 100)], 1000) == 900
    assert saved_ns(700, [Decoding(5, 2000)], 1000) == 700, "all that it has waited"
    assert saved_ns(700, [Decoding(5, 1300)], 1000) == 300, "what they were too long"
    prompts = [PendingPrompt(1, 800, 1)]
    assert worth_waiting(prompts, 1, 4, 1199, FLAT)
    assert not worth_waiting(prompts, 1, 4, 1200, FLAT)
    assert not worth_waiting(prompts, 4, 4, 0, FLAT)


def test_an_answer_grows_where_its_prompt_lies() -> None:
    with pytest.raises(AssertionError):
        placed_of([PendingPrompt(1, 90, 30)], [instance(0, 100)], [], {}, most_sequences=9)
