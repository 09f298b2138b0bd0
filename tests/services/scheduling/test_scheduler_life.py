"""States of a request on gangs that work: what leads to the next, and what is given back."""

from __future__ import annotations

import pytest
from scheduler_harness import LINK, MS, SECOND, SMALL, SchedulerHarness, Sent, only, sent

from csps.protocols.gang.step_messages import PrefillChunk
from csps.services.scheduling.deciding.decisions import Policy
from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.events import COUNTER_BITS
from csps.services.scheduling.state.state import GangPair


def reserved(harness: SchedulerHarness) -> float:
    return harness.scheduler.counts.decode_kv


def test_a_request_runs_from_submission_to_its_last_token() -> None:
    harness = SchedulerHarness().ready()
    commands = harness.turn(harness.submit(prompt=3000, output=10))
    assert [type(command) for command in commands] == [cmd.Reserve, cmd.RunStep]
    plan = sent(commands)
    assert plan.step.chunks == (
        PrefillChunk(plan.sequence, 0, 3000, destinations=plan.reserve.message.slices),
    )
    assert plan.step.bounds == (0, 1500, 3000)
    assert (plan.step.strategy, plan.step.high_priority) == ("ulysses", False)
    assert plan.run.cls == "exact"
    assert [(kv_slice.start, kv_slice.stop) for kv_slice in plan.reserve.message.slices] == [
        (0, 1500),
        (1500, 3000),
    ]
    assert harness.scheduler.counts.running == 1
    assert harness.turn(plan.first_token, *plan.steps_done()) == []
    assert harness.turn(*plan.kv_received()) == [cmd.SetGroup(gang=2, joined=(plan.sequence,))]
    assert harness.turn(plan.finished()) == []
    assert harness.scheduler.counts.running == 0
    assert reserved(harness) == 3010 / 18000
    assert harness.turn(*plan.freed()) == []
    assert not any(harness.scheduler.counts)
    assert harness.wake_at_ns is None or harness.wait(until_ns=harness.now_ns + 10**12) == []


def test_a_step_ends_when_those_before_it_have_ended() -> None:
    """The predicted time of a token is shared by the group."""
    harness = SchedulerHarness().ready()
    alone = harness.start(3000).run
    behind = harness.start(3000).run
    predicted_ns = alone.ends_ns - (harness.now_ns - MS)
    assert behind.ends_ns == alone.ends_ns + predicted_ns
    short = harness.start(50).run
    assert short.step.high_priority
    assert harness.now_ns < short.ends_ns < alone.ends_ns


def test_a_step_ends_after_those_that_a_short_prompt_has_delayed() -> None:
    harness = SchedulerHarness()
    harness.turn(harness.prefill(1, 9000), harness.decode(), LINK)
    first = harness.start(2000)
    predicted_ns = first.run.ends_ns - harness.now_ns
    harness.start(2000)
    short = harness.start(50)
    assert short.step.high_priority
    harness.turn(*short.joined())
    harness.turn(*first.joined(), after_ns=predicted_ns)
    second_began_ns = harness.now_ns
    assert harness.start(2000).run.ends_ns == second_began_ns + 2 * predicted_ns


def test_a_step_begins_when_the_one_before_it_is_computed() -> None:
    """That one is reported later, when its KV was sent."""
    harness = SchedulerHarness()
    harness.turn(harness.prefill(1, 9000), harness.decode(), LINK)
    first = harness.start(2000)
    predicted_ns, began_ns = first.run.ends_ns - harness.now_ns, harness.now_ns
    harness.start(2000)
    done = first.steps_done(took_ns=predicted_ns - 10 * MS)
    harness.turn(first.first_token, *done, after_ns=predicted_ns)
    assert harness.start(2000).run.ends_ns == began_ns + 3 * predicted_ns - 10 * MS


def test_ids_contain_the_highest_generation_and_are_unique() -> None:
    harness = SchedulerHarness()
    harness.turn(harness.prefill(generation=7), harness.decode(generation=3), LINK)
    plans = [harness.start() for _ in range(3)]
    assert {plan.sequence >> COUNTER_BITS for plan in plans} == {7}
    assert {plan.step.step_id >> COUNTER_BITS for plan in plans} == {7}
    assert len({plan.sequence for plan in plans}) == len({plan.step.step_id for plan in plans}) == 3
    assert [plan.step.step_id for plan in plans] == sorted(plan.step.step_id for plan in plans)


def test_slots_are_reserved_before_the_step_that_fills_them() -> None:
    harness = SchedulerHarness()
    commands = harness.turn(
        harness.prefill(), harness.decode(), LINK, *[harness.submit(prompt=50) for _ in range(4)]
    )
    seen: set[int] = set()
    for command in commands:
        if isinstance(command, cmd.Reserve):
            seen.add(command.message.sequence_id)
        elif isinstance(command, cmd.RunStep):
            assert {chunk.sequence_id for chunk in command.step.chunks} <= seen
    assert len(seen) == 4


def test_the_time_to_reserve_grows_with_the_prompt() -> None:
    harness = SchedulerHarness().ready()
    short, long = harness.start(50), harness.start(3000)
    begin_ns = dict.fromkeys((short, long), harness.now_ns)
    begin_ns[short] -= MS
    waits = [plan.reserve.deadline_ns - begin_ns[plan] for plan in (short, long)]
    assert waits == [10_000 * MS + 50 * 10_000, 10_000 * MS + 3000 * 10_000]


def test_decode_takes_over_only_when_all_kv_is_received() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start(3000)
    first, second = plan.kv_received()
    assert harness.turn(first) == []
    assert harness.turn(second) == []
    assert harness.turn(plan.first_token) == [cmd.SetGroup(gang=2, joined=(plan.sequence,))]


def test_sequences_that_join_in_a_round_join_with_one_command() -> None:
    harness = SchedulerHarness().ready()
    plans = [harness.start() for _ in range(3)]
    commands = harness.turn(*[event for plan in plans for event in plan.joined()])
    assert commands == [cmd.SetGroup(gang=2, joined=tuple(plan.sequence for plan in plans))]


def test_an_answer_that_ends_early_frees_the_reservation_by_cancelling_it() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start()
    commands = harness.turn(*plan.kv_received(), plan.first_token, plan.finished(1))
    assert commands == [cmd.Cancel(sequence_id=plan.sequence, gangs=(2,))]
    harness.turn(*plan.freed())
    assert reserved(harness) == 0


def test_answer_of_one_token_reserves_no_decode_slots() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start(output=1)
    assert plan.reserve.message.slices == ()
    assert reserved(harness) == 0
    harness.scheduler.check_invariants()
    assert harness.turn(plan.finished(1), *plan.steps_done()) == []
    assert not any(harness.scheduler.counts)


def test_last_token_of_a_restarted_answer_reserves_nothing() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start(output=10)
    harness.turn(*plan.joined())
    harness.turn(plan.failed(generated=9))
    harness.turn(*plan.freed())
    again = only(harness.wait(until_ns=harness.now_ns + SECOND), cmd.Reserve)
    assert [
        (command.message.prompt_tokens, command.message.output_tokens, command.message.slices)
        for command in again
    ] == [(509, 1, ())]


def test_prefill_slots_are_freed_instance_by_instance() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start(3000)
    first, second = plan.steps_done()
    harness.turn(plan.first_token, first)
    assert harness.scheduler.counts.prefill_kv == 1500 / 8000
    harness.turn(second)
    assert harness.scheduler.counts.prefill_kv == 0


def test_event_reported_twice_counts_once() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start(3000)
    events = plan.joined()
    harness.turn(*events)
    assert harness.turn(*plan.steps_done(), plan.finished(), plan.finished()) == []
    harness.turn(*plan.freed(), *plan.freed(), *plan.steps_done())
    assert not any(harness.scheduler.counts)


def test_request_waits_until_slots_are_free() -> None:
    harness = SchedulerHarness()
    harness.turn(harness.prefill(1, 4000), harness.decode(2, 600), LINK)
    first = harness.start(500)
    assert harness.turn(harness.submit(500)) == []
    assert harness.scheduler.counts.waiting == 1
    harness.turn(*first.joined(), first.finished())
    second = sent(harness.turn(*first.freed()))
    assert second.request == 2


# --- cancelled -----------------------------------------------------------------------------


def test_request_cancelled_in_the_queue_is_over() -> None:
    harness = SchedulerHarness()
    submitted = harness.submit()
    harness.turn(submitted)
    assert harness.turn(ev.RequestCancelled(request_id=submitted.request_id)) == []
    assert not any(harness.scheduler.counts)
    assert harness.turn(harness.prefill(), harness.decode(), LINK) == []


def test_request_that_leaves_the_queue_unblocks_the_next() -> None:
    harness = SchedulerHarness()
    harness.turn(harness.prefill(), harness.decode(2, 3000), LINK)
    holder = harness.start(1000)
    blocked, next_one = harness.submit(2500), harness.submit(1500)
    assert harness.turn(blocked, next_one) == []
    plan = sent(harness.turn(ev.RequestCancelled(request_id=blocked.request_id)))
    assert plan.request == next_one.request_id
    assert holder.sequence != plan.sequence


@pytest.mark.parametrize(
    ("happened", "gangs"),
    [
        ("nothing", (1, 2)),
        ("first token", (1, 2)),
        ("received", (1, 2)),
        ("step done", (1, 2)),
        ("joined", (2,)),
    ],
)
def test_cancelled_sequence_has_its_slots_until_the_ranks_free_them(
    happened: str, gangs: tuple[int, ...]
) -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start(3000)
    events: dict[str, list[ev.AnyEvent]] = {
        "nothing": [],
        "first token": [plan.first_token],
        "received": plan.kv_received(),
        "step done": plan.prefilled(),
        "joined": plan.joined(),
    }
    harness.turn(*events[happened])
    commands = harness.turn(ev.RequestCancelled(request_id=plan.request))
    assert commands == [cmd.Cancel(sequence_id=plan.sequence, gangs=gangs)]
    assert harness.turn(ev.RequestCancelled(request_id=plan.request)) == []
    assert harness.scheduler.counts.running == 0
    assert reserved(harness) > 0
    harness.turn(*plan.freed(), *plan.steps_done())
    assert not any(harness.scheduler.counts)


def test_request_of_a_batch_is_cancelled_alone() -> None:
    harness = SchedulerHarness()
    requests = [harness.submit(prompt=50), harness.submit(prompt=40)]
    commands = harness.turn(harness.prefill(1, 4000), harness.decode(), LINK, *requests)
    (run,), (first, other) = only(commands, cmd.RunStep), only(commands, cmd.Reserve)
    assert [chunk.length for chunk in run.step.chunks] == [50, 40]
    assert harness.turn(ev.RequestCancelled(request_id=first.request_id)) == [
        cmd.Cancel(sequence_id=first.message.sequence_id, gangs=(1, 2))
    ]
    left = Sent(other, run)
    assert harness.turn(*left.joined()) == [
        cmd.SetGroup(gang=2, joined=(other.message.sequence_id,))
    ]
    harness.turn(left.finished(), *left.freed(), *Sent(first, run).freed())
    assert not any(harness.scheduler.counts)


def test_request_cancelled_when_its_kv_was_just_received_does_not_join() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start()
    commands = harness.turn(*plan.joined(), ev.RequestCancelled(request_id=plan.request))
    assert commands == [cmd.Cancel(sequence_id=plan.sequence, gangs=(1, 2))]


# --- asking the policy ---------------------------------------------------------------------


class Counted:
    """Policy that starts nothing and counts its rounds."""

    name = "counted"
    whole_prompts = True
    regroups = False

    def __init__(self, real: Policy) -> None:
        self._real, self.asked = real, 0

    def priority(self, prompt_tokens: int, pairs: object) -> str:
        return "low"

    def decide(self, view: object) -> list[object]:
        self.asked += 1
        return []

    def fits(self, pair: GangPair, prompt_tokens: int, output_tokens: int) -> bool:
        return self._real.fits(pair, prompt_tokens, output_tokens)


def test_policy_decides_once_a_round_and_only_after_a_change() -> None:
    from csps.services.scheduling.policies.registry import make_policy

    policy = Counted(make_policy("csps"))
    harness = SchedulerHarness(policy)  # type: ignore[arg-type]
    harness.turn(harness.submit(), harness.submit())
    assert policy.asked == 0  # no gangs
    harness.turn(harness.prefill(), harness.decode(), LINK)
    assert policy.asked == 1
    harness.turn(ev.Heartbeat(instances=(65536,)))
    harness.turn()
    harness.turn(ev.Wake())
    assert policy.asked == 1
    harness.turn(harness.submit(), harness.submit(), ev.RequestCancelled(request_id=1))
    assert policy.asked == 2


def test_due_round_without_requests_does_not_wake_again() -> None:
    """The rest of a queue that was longer than one round has gone, or its gangs have."""
    from csps.services.scheduling.policies.registry import make_policy

    harness = SchedulerHarness(make_policy("csps", {**SMALL, "most_starts": 1})).ready()
    first = sent(harness.turn(harness.submit(50), harness.submit(50)))
    soon = harness.now_ns + 1  # the simulator's time must go on
    assert harness.wake_at_ns == soon
    harness.turn(ev.RequestCancelled(request_id=2))
    assert harness.wake_at_ns != soon
    harness.turn(first.finished(), *first.steps_done(), *first.freed())
    assert harness.wake_at_ns is None
    sent(harness.turn(harness.submit(50), harness.submit(50), harness.submit(50)))
    assert harness.wake_at_ns == harness.now_ns + 1
    harness.turn(ev.GangDown(gang=1, reason="as the test says"))
    assert harness.wake_at_ns is not None
    assert harness.wake_at_ns > harness.now_ns + 1
