"""Admission: refused requests, and admitted ones that start on idle gangs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from property_examples import examples
from random_executor import gang_up
from scheduler_harness import LINK, SECOND, SchedulerHarness, only, sent, steps_of

from csps.protocols.core.errors import ContextLengthExceeded, QueueFull, RateLimited, from_wire
from csps.protocols.gang.step_messages import PrefillStep
from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.events import gang_of
from csps.services.scheduling.events.limits import QueueLimits, SchedulerDeadlines
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.state.ledger import decode_slots

PATIENT = settings(
    max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def raised(error: ev.WireError | None) -> Exception:
    assert error is not None
    return from_wire({"code": error.code, "message": error.message, "data": error.data})


def test_full_queue_refuses_with_a_retry_time() -> None:
    harness = SchedulerHarness(limits=QueueLimits(max_waiting=2))
    first, second, third = (harness.submit() for _ in range(3))
    assert harness.turn(first, second) == []
    (refuse,) = harness.turn(third)
    assert isinstance(refuse, cmd.Refuse)
    error = raised(refuse.error)
    assert isinstance(error, QueueFull)
    assert str(error) == "2 requests are waiting"
    assert 1 <= error.retry_after_s <= 60
    for refusal in (harness.scheduler.refusal(500, 10), harness.scheduler.refusal_unread()):
        assert refusal == refuse.error
    harness.turn(ev.RequestCancelled(request_id=first.request_id))
    assert harness.scheduler.refusal_unread() is None
    assert harness.scheduler.refusal_unread(ahead=1) == refuse.error, "who is read counts as well"


def test_a_full_queue_has_places_for_a_tenant_of_which_few_requests_wait() -> None:
    harness = SchedulerHarness(limits=QueueLimits(max_waiting=16, max_waiting_tokens=16 * 510))
    assert harness.turn(*(harness.submit(tenant=1) for _ in range(16))) == []
    assert len(harness.turn(harness.submit(tenant=1))) == 1, "its queue is full"
    assert harness.scheduler.refusal_unread(1) is not None
    for _ in range(2):
        assert harness.scheduler.refusal_unread(2) is None
        assert harness.scheduler.refusal(500, 10, 2) is None
        assert harness.turn(harness.submit(tenant=2)) == []
    assert len(harness.turn(harness.submit(tenant=2))) == 1, "an eighth of the places is taken"
    assert len(harness.turn(harness.submit(tenant=3))) == 1, "all tenants together have no more"


def test_a_tenant_beyond_its_share_of_slots_is_refused() -> None:
    """900 of 18,000 slots for each tenant with a share."""
    harness = SchedulerHarness().ready()

    def submit(prompt: int, output: int, tenant: int, kv_permille: int = 50) -> ev.Submitted:
        made = harness.submit(prompt, output, tenant=tenant)
        return msgspec.structs.replace(made, kv_permille=kv_permille)

    first = sent(harness.turn(submit(500, 10, 1)))
    (refuse,) = harness.turn(submit(400, 10, 1))
    assert isinstance(refuse, cmd.Refuse)
    error = raised(refuse.error)
    assert isinstance(error, RateLimited)
    assert "may need 900 together, 510 are taken, and this one needs 410" in str(error)
    assert 1 <= error.retry_after_s <= 60
    assert harness.scheduler.refusal(400, 10, 1, 50) == refuse.error
    for tenant, prompt, kv_permille in ((1, 380, 50), (2, 400, 50), (1, 400, 1000)):
        assert harness.scheduler.refusal(prompt, 10, tenant, kv_permille) is None
    # Generated tokens are part of what was asked for.
    harness.turn(*first.joined())
    assert harness.scheduler.refusal(381, 10, 1, 50) is not None
    harness.turn(first.finished())
    assert harness.scheduler.refusal(400, 10, 1, 50) is None


def test_a_request_above_its_tenants_share_can_never_run() -> None:
    harness = SchedulerHarness().ready()
    error = raised(harness.scheduler.refusal(891, 10, 1, 50))
    assert isinstance(error, ContextLengthExceeded)
    assert error.limit == 900
    assert harness.scheduler.refusal(890, 10, 1, 50) is None


def test_before_the_first_gangs_nobody_knows_the_shares() -> None:
    assert SchedulerHarness().scheduler.refusal(100_000, 10, 1, 1) is None


def test_retry_time_follows_the_recent_pace() -> None:
    """Half of the line, at the pace of the last starts."""
    harness = SchedulerHarness(limits=QueueLimits(max_waiting=4))
    harness.turn(harness.prefill(), harness.decode(2, 520), LINK)
    plan = harness.start()
    harness.turn(*[harness.submit() for _ in range(4)])
    for _ in range(3):
        harness.turn(*plan.joined(), plan.finished())
        plan = sent(harness.turn(*plan.freed(), after_ns=6 * SECOND))
        harness.turn(harness.submit())
    harness.turn(after_ns=6 * SECOND)
    error = raised(harness.scheduler.refusal_unread())
    assert isinstance(error, QueueFull)
    assert error.retry_after_s == pytest.approx(12, abs=0.1)


def test_queue_with_too_many_tokens_is_full() -> None:
    harness = SchedulerHarness(limits=QueueLimits(max_waiting_tokens=1000))
    harness.turn(harness.submit(5000, 10))  # an empty line takes everyone
    (refuse,) = harness.turn(harness.submit(10, 1))
    assert isinstance(refuse, cmd.Refuse)
    assert refuse.error.message == "5010 tokens are waiting"


def test_draining_scheduler_refuses_new_requests_and_finishes_others() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start()
    harness.turn(ev.Drain())
    (refuse,) = harness.turn(harness.submit())
    assert isinstance(refuse, cmd.Refuse)
    assert refuse.error.message == "the server is shutting down"
    assert harness.scheduler.refusal_unread() == refuse.error
    assert harness.turn(*plan.joined()) == [cmd.SetGroup(gang=2, joined=(plan.sequence,))]


def capacity_desk() -> SchedulerHarness:
    harness = SchedulerHarness()
    harness.turn(
        harness.prefill(1, 100, 100), gang_up(2, [150, 60], decode=True, max_positions=205), LINK
    )
    return harness


@pytest.mark.parametrize(("prompt", "output"), [(1, 150), (200, 5), (55, 150), (100, 105)])
def test_request_that_idle_gangs_can_hold_fits(prompt: int, output: int) -> None:
    harness = capacity_desk()
    assert harness.scheduler.refusal(prompt, output) is None
    assert harness.scheduler.capacity.longest_answer(prompt) >= output
    assert sent(harness.turn(harness.submit(prompt, output)))


@pytest.mark.parametrize(
    ("prompt", "output", "limit"),
    [(1, 151, 151), (201, 1, 200), (200, 6, 205), (56, 150, 205), (300, 1, 200), (205, 1, 200)],
)
def test_request_that_idle_gangs_cannot_hold_is_refused_with_both_sizes(
    prompt: int, output: int, limit: int
) -> None:
    harness = capacity_desk()
    (refuse,) = harness.turn(harness.submit(prompt, output))
    assert isinstance(refuse, cmd.Refuse)
    error = raised(refuse.error)
    assert isinstance(error, ContextLengthExceeded)
    assert error.limit == limit
    assert f"{prompt + output} tokens" in str(error)


def test_capacity_check_answers_what_http_asks() -> None:
    capacity = capacity_desk().scheduler.capacity
    assert capacity.promised == 200
    assert [capacity.longest_answer(tokens) for tokens in (1, 55, 56, 100, 200)] == [
        150,
        150,
        149,
        105,
        5,
    ]
    assert capacity.longest_answer(201) <= 0


def test_request_before_the_gangs_is_admitted() -> None:
    harness = SchedulerHarness()
    assert not harness.scheduler.ready
    assert not harness.scheduler.capacity.known
    request = harness.submit()
    assert harness.turn(request) == []
    assert (
        sent(harness.turn(harness.prefill(), harness.decode(), LINK)).request == request.request_id
    )
    assert harness.scheduler.ready


def test_waiting_request_that_is_too_large_for_new_gangs_fails() -> None:
    harness = SchedulerHarness()
    large, small = harness.submit(5000, 10), harness.submit(100, 10)
    harness.turn(large, small)
    commands = harness.turn(harness.prefill(1, 1000), harness.decode(), LINK)
    (fail,) = only(commands, cmd.Fail)
    assert fail.request_id == large.request_id
    error = raised(fail.error)
    assert isinstance(error, ContextLengthExceeded)
    assert (error.prompt_tokens, error.output_tokens, error.limit) == (5000, 10, 1000)
    assert [reserve.request_id for reserve in only(commands, cmd.Reserve)] == [small.request_id]


def test_pausing_request_that_is_too_large_for_new_gangs_fails() -> None:
    harness = SchedulerHarness(deadlines=SchedulerDeadlines(retry_pause_ns=SECOND)).ready()
    plan = harness.start(3000)
    harness.turn(plan.failed())
    harness.turn(ev.GangDown(gang=1, reason="died"))
    harness.turn(harness.prefill(3, 1000), ev.LinkUp(prefill=3, decode=2))
    (fail,) = harness.wait(until_ns=harness.now_ns + 2 * SECOND)
    assert isinstance(fail, cmd.Fail)
    assert fail.error.code == "ContextLengthExceeded"


def test_short_prompt_that_fits_no_single_instance_is_spread_and_blocks_nobody() -> None:
    harness = SchedulerHarness(
        make_policy("csps", {"spt_tokens": 50, "short_tokens": 100, "spread_tokens": 500})
    )
    harness.turn(harness.prefill(1, 60, 60), harness.decode(), LINK)
    plan = sent(harness.turn(harness.submit(90)))
    assert len(plan.step.group) == 2
    assert not plan.step.high_priority


def test_priority_of_a_waiting_prompt_is_decided_again_when_gangs_come() -> None:
    harness = SchedulerHarness()
    harness.turn(harness.submit(90))
    plan = sent(harness.turn(harness.prefill(1, 60, 60), harness.decode(), LINK))
    assert not plan.step.high_priority


# --- whatever is admitted is placed ----------------------------------------------------------


SLOTS = st.lists(st.integers(1, 60), min_size=1, max_size=6)
PLACES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(0, 7)).map(
        lambda place: "-".join(map(str, place))
    ),
    min_size=6,
    max_size=6,
    unique=True,
)
DECODE_OPTIONS = {"spread_tokens": st.integers(1, 50), "max_batch": st.integers(1, 4)}
CSPS = st.fixed_dictionaries(
    {
        "spt_tokens": st.integers(1, 80),
        "short_tokens": st.integers(0, 80),
        "urgent_batch_tokens": st.integers(1, 80),
        "jobs_per_instance": st.integers(1, 3),
        "overtaking_s": st.sampled_from([0.0, 0.001, 10.0]),
        "look_ahead": st.integers(1, 3),
        "most_starts": st.integers(1, 3),
        **DECODE_OPTIONS,
    }
).map(lambda options: make_policy("csps", options))
FIXED = st.fixed_dictionaries(
    {"sp": st.integers(1, 8), "steps_per_group": st.integers(1, 2), **DECODE_OPTIONS}
).map(lambda options: make_policy("fixed_sp", options))
RINGS = st.fixed_dictionaries(
    {
        "short_tokens": st.integers(0, 80),
        "jobs_per_instance": st.integers(1, 3),
        "overtaking_s": st.sampled_from([0.0, 0.001, 10.0]),
        "least_saving": st.sampled_from([0.0, 0.3, 0.9]),
        "max_batch": st.integers(1, 4),
    }
).map(lambda options: make_policy("context_parallel", options))

CHUNKED = st.fixed_dictionaries({"token_budget": st.integers(4, 40), **DECODE_OPTIONS}).map(
    lambda options: make_policy("chunked_prefill", options)
)


@given(
    st.one_of(CSPS, FIXED, RINGS),
    SLOTS,
    SLOTS,
    PLACES,
    st.lists(st.tuples(st.integers(1, 250), st.integers(1, 80)), min_size=1, max_size=8),
)
@PATIENT
def test_admitted_request_starts_on_idle_gangs(
    policy: object, prefill: list[int], decode: list[int], places: list[str],
    requests: list[tuple[int, int]],
) -> None:  # fmt: skip
    """One after the other, each alone, it is refused or starts at once."""
    harness = SchedulerHarness(policy)  # type: ignore[arg-type]
    up = gang_up(1, prefill, prefill=True, places=places[: len(prefill)])
    harness.turn(up, gang_up(2, decode, decode=True, max_positions=300), LINK)
    for prompt, output in requests:
        refusal = harness.scheduler.refusal(prompt, output)
        commands = harness.turn(harness.submit(prompt, output))
        if refusal is not None:
            assert [refuse.error for refuse in only(commands, cmd.Refuse)] == [refusal]
            continue
        plan = sent(commands)
        harness.turn(*plan.joined(), plan.finished(output), *plan.freed())
    assert not any(harness.scheduler.counts)


@given(
    CHUNKED,
    SLOTS,
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 250), st.integers(1, 80)), min_size=1, max_size=8),
)
@PATIENT
def test_admitted_request_is_piggybacked_on_an_idle_gang(
    policy: object, slots: list[int], elastic: bool, requests: list[tuple[int, int]]
) -> None:
    """The gangs are an elastic one, or a pair of which the decode gang counts alone."""
    harness = SchedulerHarness(policy)  # type: ignore[arg-type]
    if elastic:
        harness.turn(gang_up(2, slots, prefill=True, decode=True, max_positions=300))
    else:
        small = gang_up(1, [1], prefill=True)
        harness.turn(small, gang_up(2, slots, decode=True, max_positions=300), LINK)
    for prompt, output in requests:
        refusal = harness.scheduler.refusal(prompt, output)
        commands = harness.turn(harness.submit(prompt, output))
        assert (refusal is None) == (
            prompt + output <= min(300, sum(slots)) and output <= max(slots)
        )
        if refusal is None:
            harness.turn(*_ridden(*only(commands, cmd.Reserve)))
    assert not any(harness.scheduler.counts)


def _ridden(reserve: cmd.Reserve) -> list[ev.AnyEvent]:
    holders = sorted(
        {kv_slice.instance for kv_slice in reserve.message.slices} | {reserve.message.master}
    )
    return [
        ev.FirstToken(sequence_id=reserve.message.sequence_id),
        ev.Finished(
            sequence_id=reserve.message.sequence_id, generated_tokens=reserve.message.output_tokens
        ),
        *(ev.Freed(sequence_id=reserve.message.sequence_id, instance=holder) for holder in holders),
    ]


@given(
    st.one_of(CSPS, FIXED, RINGS),
    SLOTS,
    SLOTS,
    st.lists(st.tuples(st.integers(1, 250), st.integers(1, 80)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
@PATIENT
def test_admitted_request_is_served_in_the_end(
    policy: object, prefill: list[int], decode: list[int],
    requests: list[tuple[int, int]], random: object,
) -> None:  # fmt: skip
    """All at once, before there are gangs, and played to the end in any order."""
    harness = SchedulerHarness(policy)  # type: ignore[arg-type]
    harness.turn(*[harness.submit(*request) for request in requests])
    commands = harness.turn(
        gang_up(1, prefill, prefill=True), gang_up(2, decode, decode=True), LINK
    )
    assert _play(harness, commands, random) == len(requests)
    assert not any(harness.scheduler.counts)


LIMITED = st.lists(
    st.tuples(SLOTS, SLOTS, st.integers(1, 200), st.integers(1, 200)), min_size=2, max_size=3
)
"""Pairs of gangs with slots and longest sequences of their own."""


@given(
    st.one_of(CSPS, FIXED, RINGS),
    LIMITED,
    st.lists(st.tuples(st.integers(1, 250), st.integers(1, 80)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
@PATIENT
def test_request_with_more_tokens_than_positions_is_not_placed(
    policy: object,
    pairs: list[tuple[list[int], list[int], int, int]],
    requests: list[tuple[int, int]],
    random: object,
) -> None:
    """Not even where another pair may serve it, and this one has the slots."""
    harness = SchedulerHarness(policy)  # type: ignore[arg-type]
    longest: dict[int, int] = {}
    up: list[ev.AnyEvent] = []
    for number, (prefill, decode, *limits) in enumerate(pairs):
        first, second = 2 * number + 1, 2 * number + 2
        up.append(gang_up(first, prefill, prefill=True, max_positions=limits[0]))
        up.append(gang_up(second, decode, decode=True, max_positions=limits[1]))
        up.append(ev.LinkUp(prefill=first, decode=second))
        longest[second] = min(limits)
    commands = harness.turn(*up, *[harness.submit(*request) for request in requests])
    refused = len(only(commands, cmd.Refuse))

    def check(reserve: cmd.Reserve) -> None:
        total = reserve.message.prompt_tokens + reserve.message.output_tokens
        assert total <= longest[gang_of(reserve.message.master)]

    assert refused + _play(harness, commands, random, check) == len(requests)


def _play(
    harness: SchedulerHarness,
    commands: list[cmd.AnyCommand],
    random: object,
    check: Callable[[cmd.Reserve], None] = lambda reserve: None,
) -> int:
    """Serve what is reserved, in any order, to the end. Returns how many were served or failed."""
    served = len(only(commands, cmd.Fail))
    running: list[tuple[cmd.Reserve, list[ev.AnyEvent]]] = []
    while True:
        steps = steps_of(commands)
        for reserve in only(commands, cmd.Reserve):
            check(reserve)
            (step,) = (
                s
                for s in steps
                if any(p.sequence_id == reserve.message.sequence_id for p in s.chunks)
            )
            running.append((reserve, _life(reserve, step)))
        if not running:
            if harness.wake_at_ns != harness.now_ns:
                return served
            commands = harness.turn(ev.Wake())
            continue
        reserve, events = running.pop(random.randrange(len(running)))  # type: ignore[attr-defined]
        commands = harness.turn(*events)
        served += 1


def _life(reserve: cmd.Reserve, step: PrefillStep) -> list[ev.AnyEvent]:
    """Return all that happens to a sequence, at once; the step's other members sample, too."""
    firsts = [ev.FirstToken(sequence_id=chunk.sequence_id) for chunk in step.chunks]
    done = [
        ev.StepDone(step_id=step.step_id, instance=instance, took_ns=1000)
        for instance in step.group
    ]
    sequence = reserve.message.sequence_id
    received = [
        ev.KvReceived(
            sequence_id=sequence, instance=kv_slice.instance, tokens=kv_slice.stop - kv_slice.start
        )
        for kv_slice in reserve.message.slices
    ]
    holders = sorted(decode_slots(reserve.message, reserve.message.output_tokens))
    finished = ev.Finished(sequence_id=sequence, generated_tokens=reserve.message.output_tokens)
    freed = [ev.Freed(sequence_id=sequence, instance=holder) for holder in holders]
    return [*firsts, *done, *received, finished, *freed]
