"""Riders: from the decision of `chunked_prefill` to the last slot."""

from __future__ import annotations

import pytest
from policy_view import Busy, Picture, waiting
from random_executor import gang_up
from scheduler_harness import LINK, MS, SECOND, SchedulerHarness, messages, only

from csps.protocols.core.errors import ConfigError
from csps.protocols.gang.messages import JoinBatch
from csps.services.scheduling.deciding.decisions import Blocked, Decision, PiggybackPlan
from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.events import index_of, instance_id
from csps.services.scheduling.events.limits import SchedulerDeadlines
from csps.services.scheduling.policies.registry import make_policy

GANG = 1


def riding(**options: object) -> SchedulerHarness:
    """An elastic gang of two instances."""
    harness = SchedulerHarness(make_policy("chunked_prefill", {"spread_tokens": 1000, **options}))
    harness.turn(gang_up(GANG, [4000, 4000], prefill=True, decode=True))
    return harness


def piggybacked(harness: SchedulerHarness, prompt: int = 500, output: int = 10) -> cmd.Reserve:
    commands = harness.turn(harness.submit(prompt, output))
    (reserve,), (join,) = only(commands, cmd.Reserve), only(commands, cmd.ToGang)
    assert commands == [reserve, join], "and nothing else"
    assert join == cmd.ToGang(
        gang=GANG, message=JoinBatch(sequence_id=reserve.message.sequence_id, budget=128)
    )
    return reserve


def freed(reserve: cmd.Reserve) -> list[ev.AnyEvent]:
    holders = sorted(
        {kv_slice.instance for kv_slice in reserve.message.slices} | {reserve.message.master}
    )
    return [
        ev.Freed(sequence_id=reserve.message.sequence_id, instance=holder) for holder in holders
    ]


def ask(requests: list[object], decode: list[Busy], **options: object) -> list[Decision]:
    picture = Picture(requests, decode=decode)  # type: ignore[arg-type]
    return picture.ask(make_policy("chunked_prefill", {"spread_tokens": 1000, **options}))


# --- the policy ------------------------------------------------------------------------------


def test_whoever_has_room_is_piggybacked_at_once_in_order_of_admission() -> None:
    requests = [waiting(1, 3000), waiting(2, 50), waiting(3, 200)]
    decisions = ask(requests, [Busy(5000), Busy(5000)], token_budget=100)
    assert [type(decision) for decision in decisions] == [PiggybackPlan] * 3
    first = decisions[0]
    assert isinstance(first, PiggybackPlan)
    assert first.budget == 100
    assert [kv_slice.stop - kv_slice.start for kv_slice in first.placement.slices] == [1500, 1500]
    masters = [
        index_of(decision.placement.master)
        for decision in decisions
        if isinstance(decision, PiggybackPlan)
    ]
    assert masters.count(0) in (1, 2), "masters take turns"


def test_when_the_oldest_finds_no_slots_all_wait() -> None:
    decisions = ask([waiting(1, 2000), waiting(2, 50)], [Busy(1000)])
    assert decisions == [Blocked(request_id=1)]


def test_a_batch_is_as_large_as_it_may_be() -> None:
    decisions = ask([waiting(n, 10) for n in range(1, 9)], [Busy(requests=2)], max_batch=5)
    assert [type(decision) for decision in decisions] == [PiggybackPlan] * 3 + [Blocked]


def test_a_budget_that_rows_use_up_is_refused() -> None:
    make_policy("chunked_prefill", {"token_budget": 8, "max_batch": 8})
    with pytest.raises(ConfigError, match="token_budget must be at least max_batch, 9, not 8"):
        make_policy("chunked_prefill", {"token_budget": 8, "max_batch": 9})
    with pytest.raises(ConfigError, match="token_budget must be at least 1, not 0"):
        make_policy("chunked_prefill", {"token_budget": 0})
    with pytest.raises(ConfigError, match="did you mean 'token_budget'"):
        make_policy("chunked_prefill", {"token_budgets": 8})


# --- the life of a piggybacked request -------------------------------------------------------


def test_a_piggybacked_request_is_reserved_with_its_prompt_and_joins_at_once() -> None:
    harness = riding()
    reserve = piggybacked(harness, 1500)
    assert reserve.piggybacked
    assert [kv_slice.stop - kv_slice.start for kv_slice in reserve.message.slices] == [750, 750]
    assert harness.scheduler.counts.decode_kv == (1500 + 10) / 8000
    assert harness.turn(ev.FirstToken(sequence_id=reserve.message.sequence_id)) == []
    assert (
        harness.turn(ev.Finished(sequence_id=reserve.message.sequence_id, generated_tokens=10))
        == []
    )
    assert harness.scheduler.counts.decode_kv > 0
    harness.turn(*freed(reserve))
    assert not any(harness.scheduler.counts)


def test_a_piggybacked_request_on_a_pair_needs_only_the_gang_that_decodes() -> None:
    harness = SchedulerHarness(make_policy("chunked_prefill"))
    harness.turn(harness.prefill(), harness.decode(), LINK)
    (reserve,) = only(harness.turn(harness.submit()), cmd.Reserve)
    assert harness.turn(ev.GangDown(gang=1, reason="died")) == []
    harness.turn(ev.FirstToken(sequence_id=reserve.message.sequence_id))
    harness.turn(
        ev.Finished(sequence_id=reserve.message.sequence_id, generated_tokens=10), *freed(reserve)
    )
    assert not any(harness.scheduler.counts)


@pytest.mark.parametrize("sampled", [0, 1])
def test_a_cancelled_piggybacked_request_is_cancelled_on_its_gang(sampled: int) -> None:
    harness = riding()
    reserve = piggybacked(harness)
    if sampled:
        harness.turn(ev.FirstToken(sequence_id=reserve.message.sequence_id))
    assert harness.turn(ev.RequestCancelled(request_id=reserve.request_id)) == [
        cmd.Cancel(sequence_id=reserve.message.sequence_id, gangs=(GANG,))
    ]
    harness.turn(*freed(reserve))
    assert not any(harness.scheduler.counts)


def test_when_the_gang_dies_piggybacked_requests_go_on_with_their_next_token() -> None:
    harness = riding()
    sampling, computing = piggybacked(harness).message, piggybacked(harness).message
    harness.turn(ev.FirstToken(sequence_id=sampling.sequence_id))
    progress = ev.Progress(generated_tokens=((sampling.sequence_id, 4), (computing.sequence_id, 0)))
    commands = harness.turn(progress, ev.GangDown(gang=GANG, reason="died"))
    assert [restart.sequence_id for restart in only(commands, cmd.Restart)] == [
        sampling.sequence_id,
        computing.sequence_id,
    ]
    commands = harness.turn(gang_up(2, [4000], prefill=True, decode=True))
    again = only(commands, cmd.Reserve)
    assert [
        (reserve.message.prompt_tokens, reserve.message.output_tokens) for reserve in again
    ] == [
        (504, 6),
        (500, 10),
    ]
    assert [command.gang for command in only(commands, cmd.ToGang)] == [2, 2]


def test_a_piggybacked_request_alone_in_two_dying_gangs_fails() -> None:
    harness = riding()
    reserve = piggybacked(harness)
    harness.turn(ev.GangDown(gang=GANG, reason="died"))
    harness.turn(gang_up(2, [4000], prefill=True, decode=True))
    (fail,) = only(harness.turn(ev.GangDown(gang=2, reason="died")), cmd.Fail)
    assert fail.request_id == reserve.request_id


def test_a_refused_piggybacked_request_is_tried_again() -> None:
    harness = SchedulerHarness(
        make_policy("chunked_prefill"), deadlines=SchedulerDeadlines(retry_pause_ns=SECOND)
    )
    harness.turn(gang_up(GANG, [4000], prefill=True, decode=True))
    (reserve,) = only(harness.turn(harness.submit()), cmd.Reserve)
    error = ev.WireError("OutOfSlots", "full")
    failed = ev.Failed(
        sequence_id=reserve.message.sequence_id, generated_tokens=0, error=error, retryable=True
    )
    free = ev.Freed(sequence_id=reserve.message.sequence_id, instance=instance_id(GANG, 0))
    harness.turn(free, failed)
    (again,) = messages(harness.wait(until_ns=harness.now_ns + 2 * SECOND), JoinBatch)
    assert again.sequence_id != reserve.message.sequence_id


def test_a_gang_that_owes_a_piggybacked_request_its_token_and_is_silent_is_reset() -> None:
    harness = SchedulerHarness(
        make_policy("chunked_prefill"), deadlines=SchedulerDeadlines(decode_liveness_ns=3 * SECOND)
    )
    harness.turn(gang_up(GANG, [4000], prefill=True, decode=True))
    harness.turn(harness.submit())
    assert harness.wait(until_ns=harness.now_ns + 2 * SECOND) == []
    harness.turn(ev.Heartbeat(instances=(instance_id(GANG, 0),)))
    assert harness.wait(until_ns=harness.now_ns + 2 * SECOND) == []
    (reset,) = only(harness.wait(until_ns=harness.now_ns + 3 * SECOND), cmd.ResetGang)
    assert reset.gang == GANG


def test_what_an_iteration_takes_is_measured_from_the_first_token_on() -> None:
    harness = riding()
    reserve = piggybacked(harness)
    harness.turn(ev.FirstToken(sequence_id=reserve.message.sequence_id), after_ns=SECOND)
    harness.turn(
        ev.Finished(sequence_id=reserve.message.sequence_id, generated_tokens=10), after_ns=90 * MS
    )
    (pair,) = harness.scheduler._gangs.pairs
    assert pair.decode.iteration_ns == 10 * MS


def test_the_line_moves_when_a_piggybacked_request_has_left() -> None:
    harness = riding(max_batch=1)
    first = piggybacked(harness)
    second = harness.submit()
    assert harness.turn(second) == []
    commands = harness.turn(
        ev.FirstToken(sequence_id=first.message.sequence_id),
        ev.Finished(sequence_id=first.message.sequence_id, generated_tokens=10),
        *freed(first),
    )
    assert [reserve.request_id for reserve in only(commands, cmd.Reserve)] == [second.request_id]
