"""Shares, bounds, jobs that shrink, the line, and capacity."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from csps.protocols.errors import ContextLengthExceeded
from csps.protocols.messages import KvShare, Span
from csps.services.scheduling.capacity import Capacity
from csps.services.scheduling.policy import DecodePlacement, JobDecision, JobMember
from csps.services.scheduling.prefill_load import PrefillLoad
from csps.services.scheduling.shares import bounds_of, level_shares, shares_of
from csps.services.scheduling.state import WaitingRequest
from csps.services.scheduling.waiting_queue import WaitingQueue

PATIENT = settings(suppress_health_check=[HealthCheck.too_slow])


@PATIENT
@given(st.integers(0, 300), st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_shares_are_level(total: int, limits: list[int]) -> None:
    shares = level_shares(total, limits)
    if sum(limits) < total:
        assert shares is None
        return
    assert shares is not None
    assert sum(shares) == total
    assert all(0 <= share <= limit for share, limit in zip(shares, limits, strict=True))
    # Level: nobody with room left has less than somebody else's share by more than one.
    for share, limit in zip(shares, limits, strict=True):
        assert share == limit or share >= max(shares) - 1


@PATIENT
@given(st.lists(st.integers(1, 9), min_size=1))
def test_bounds_and_shares_are_inverse(shares: list[int]) -> None:
    assert shares_of(bounds_of(shares)) == tuple(shares)


def member(number: int, length: int) -> JobMember:
    share = KvShare(instance=0, span=Span(start=0, stop=length))
    placement = DecodePlacement(shares=(share,), master=0, output_tokens=1)
    return JobMember(number=number, prompt_tokens=length, placement=placement)


def job(lengths: list[int], parts: list[int], *, urgent: bool = False) -> JobDecision:
    return JobDecision(
        group=tuple(range(len(parts))),
        bounds=bounds_of(parts),
        members=tuple(member(n, length) for n, length in enumerate(lengths)),
        urgent=urgent,
    )


@PATIENT
@given(st.lists(st.integers(1, 20), min_size=2, max_size=5), st.integers(1, 5), st.data())
def test_a_job_that_loses_a_member_keeps_every_other_token_in_place(
    lengths: list[int], instances: int, data: st.DataObject
) -> None:
    parts = level_shares(sum(lengths), [sum(lengths)] * instances)
    assert parts is not None
    whole = job(lengths, [part for part in parts if part])
    leaver = data.draw(st.integers(0, len(lengths) - 1))
    shrunk = whole.without_member(leaver)
    expected = [
        (number, position, instance)
        for number, position, instance in _tokens(whole)
        if number != leaver
    ]
    assert _tokens(shrunk) == expected


def _tokens(decision: JobDecision) -> list[tuple[int, int, int]]:
    """(request, position, instance) of every token of a job."""
    owners = [
        instance
        for instance, share in zip(decision.group, shares_of(decision.bounds), strict=True)
        for _ in range(share)
    ]
    tokens = [(m.number, p) for m in decision.members for p in range(m.prompt_tokens)]
    return [(*token, owner) for token, owner in zip(tokens, owners, strict=True)]


def test_prefill_load_counts_what_overtakes_a_long_job() -> None:
    load = PrefillLoad((100, 100), ("0-0-0", "0-0-1"))
    load.start(1, job([60], [30, 30]))
    load.start(2, job([5], [5], urgent=True))
    first, second = load.snapshot()
    assert first.long_jobs[0].overtaken_tokens == 5
    assert second.long_jobs[0].overtaken_tokens == 0
    assert (first.free_slots, first.urgent_tokens, first.outstanding_tokens) == (65, 5, 35)
    load.done(2, 0)
    load.done(1, 0)
    assert load.snapshot()[0].free_slots == 100
    assert load.snapshot()[1].free_slots == 70


def test_prefill_load_of_a_job_that_shrinks() -> None:
    load = PrefillLoad((100, 100), ("0-0-0", "0-0-1"))
    whole = job([40, 20], [30, 30])
    load.start(1, whole)
    load.shrink(1, whole.without_member(1))
    assert load.ledger.used == (30, 10)
    load.shrink(1, whole.without_member(0))
    assert load.ledger.used == (0, 20)
    load.shrink(1, None)
    assert load.ledger.used == (0, 0)
    assert not any(it.long_jobs for it in load.snapshot())
    load.ledger.check_integrity()


def request(number: int, tokens: int = 10) -> WaitingRequest:
    return WaitingRequest(number=number, prompt_tokens=tokens, output_tokens=1)


def test_the_line_keeps_order_and_counts_overtaking() -> None:
    queue = WaitingQueue()
    for number in (3, 1, 5, 2):
        queue.push(request(number))
    assert [it.number for it in queue.requests] == [1, 2, 3, 5]
    queue.take([2, 5])
    assert {it.number: it.overtaken_tokens for it in queue.requests} == {1: 22, 3: 11}
    queue.discard(1)
    queue.discard(1)
    assert len(queue) == 1
    with pytest.raises(AssertionError, match="only who waits"):
        queue.take([9])


CAPACITY = Capacity(prefill=(100, 100), decode=(150, 60), max_positions=205)


@pytest.mark.parametrize(("prompt", "output"), [(1, 150), (200, 5), (55, 150), (100, 105)])
def test_what_an_idle_cluster_can_hold_fits(prompt: int, output: int) -> None:
    CAPACITY.check(prompt, output)
    assert CAPACITY.longest_answer(prompt) >= output


@pytest.mark.parametrize(
    ("prompt", "output", "limit"),
    [(1, 151, 151), (201, 1, 200), (200, 6, 205), (56, 150, 205), (300, 1, 200), (205, 1, 200)],
)
def test_what_it_cannot_hold_is_refused_with_both_numbers(
    prompt: int, output: int, limit: int
) -> None:
    with pytest.raises(ContextLengthExceeded) as refusal:
        CAPACITY.check(prompt, output)
    assert refusal.value.limit == limit
    assert f"{prompt + output} tokens" in str(refusal.value)
