"""Faults: requests when gangs, links and sequences fail."""

from __future__ import annotations

import pytest
from scheduler_harness import LINK, MS, SECOND, SchedulerHarness, Sent, only, sent, steps_of

from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.events import instance_id
from csps.services.scheduling.events.limits import QueueLimits, SchedulerDeadlines

PREFILL_DOWN = ev.GangDown(gang=1, reason="rank 0 died")
DECODE_DOWN = ev.GangDown(gang=2, reason="rank 0 died")
PAUSE_NS = SchedulerDeadlines().retry_pause_ns


def replaced_prefill(harness: SchedulerHarness) -> list[ev.AnyEvent]:
    return [harness.prefill(3), ev.LinkUp(prefill=3, decode=2)]


def replaced_decode(harness: SchedulerHarness) -> list[ev.AnyEvent]:
    return [harness.decode(4), ev.LinkUp(prefill=1, decode=4)]


def error_of(commands: list[cmd.AnyCommand]) -> ev.WireError:
    (fail,) = only(commands, cmd.Fail)
    return fail.error


# --- gangs -----------------------------------------------------------------------------------


def test_prefill_lost_before_the_first_token_is_retried() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start()
    cancel, restart = harness.turn(PREFILL_DOWN)
    assert cancel == cmd.Cancel(sequence_id=plan.sequence, gangs=(2,))
    assert isinstance(restart, cmd.Restart)
    assert (restart.request_id, restart.sequence_id) == (plan.request, plan.sequence)
    assert restart.error.code == "GangLost"
    again = sent(harness.turn(*replaced_prefill(harness)))
    assert again.request == plan.request
    assert again.sequence > plan.sequence
    assert (again.reserve.message.prompt_tokens, again.reserve.message.output_tokens) == (500, 10)


def test_prefill_lost_after_the_first_token_resumes_with_the_second() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start(3000)
    harness.turn(*plan.prefilled(), plan.kv_received()[0])
    commands = harness.turn(PREFILL_DOWN)
    assert [type(command) for command in commands] == [cmd.Cancel, cmd.Restart]
    again = sent(harness.turn(*replaced_prefill(harness)))
    assert (again.reserve.message.prompt_tokens, again.reserve.message.output_tokens) == (3001, 9)
    assert again.step.chunks[0].length == 3001
    harness.turn(*again.joined())
    harness.turn(again.finished(10), *again.freed(), *plan.freed())
    assert not any(harness.scheduler.counts)


def test_decoding_goes_on_while_prefill_is_replaced() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start()
    harness.turn(*plan.joined())
    assert harness.turn(PREFILL_DOWN) == []
    assert harness.turn(plan.finished()) == []
    harness.turn(*plan.freed())
    assert not any(harness.scheduler.counts)


@pytest.mark.parametrize("generated", [0, 1, 7])
def test_lost_decode_gang_restarts_all_its_sequences(generated: int) -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start()
    if generated:
        harness.turn(*plan.joined())
    progress = ev.Progress(generated_tokens=((plan.sequence, generated),))
    commands = harness.turn(progress, DECODE_DOWN)
    cancels = [] if generated else [cmd.Cancel(sequence_id=plan.sequence, gangs=(1,))]
    assert only(commands, cmd.Cancel) == cancels
    assert len(only(commands, cmd.Restart)) == 1
    again = sent(harness.turn(*plan.steps_done(), *replaced_decode(harness)))
    assert again.reserve.message.prompt_tokens == 500 + generated
    assert again.reserve.message.output_tokens == 10 - generated


def test_tokens_generated_before_several_faults_add_up() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start()
    harness.turn(*plan.joined())
    harness.turn(ev.Progress(generated_tokens=((plan.sequence, 4),)), DECODE_DOWN)
    second = sent(harness.turn(*replaced_decode(harness)))
    assert (second.reserve.message.prompt_tokens, second.reserve.message.output_tokens) == (504, 6)
    harness.turn(*second.joined())
    harness.turn(second.failed(9))
    third = sent(harness.wait())
    assert (third.reserve.message.prompt_tokens, third.reserve.message.output_tokens) == (509, 1)


def test_request_whose_whole_answer_was_delivered_is_over() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start(output=5)
    harness.turn(*plan.joined())
    assert harness.turn(ev.Progress(generated_tokens=((plan.sequence, 5),)), DECODE_DOWN) == []
    assert not any(harness.scheduler.counts)


def test_token_delivered_after_a_fault_of_the_same_round_is_not_sampled_again() -> None:
    """The executor learns of the restart only when the round is over."""
    harness = SchedulerHarness().ready()
    plan = harness.start()
    commands = harness.turn(DECODE_DOWN, plan.first_token)
    assert len(only(commands, cmd.Restart)) == 1
    again = sent(harness.turn(*plan.steps_done(), *replaced_decode(harness)))
    assert (again.reserve.message.prompt_tokens, again.reserve.message.output_tokens) == (501, 9)


def test_answer_that_ended_after_a_fault_of_the_same_round_is_over() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start(output=1)
    harness.turn(DECODE_DOWN, plan.first_token, plan.finished(1), *plan.steps_done())
    assert not any(harness.scheduler.counts)
    assert harness.turn(*replaced_decode(harness)) == []


def test_answer_that_ended_early_after_a_fault_of_the_same_round_is_over() -> None:
    """By a stop token: more tokens were allowed."""
    harness = SchedulerHarness().ready()
    plan = harness.start(output=10)
    harness.turn(*plan.joined())
    harness.turn(DECODE_DOWN, plan.finished(5), *plan.steps_done())
    assert not any(harness.scheduler.counts)
    assert harness.turn(*replaced_decode(harness)) == []


def test_gang_that_went_down_in_the_same_round_gets_no_command() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start()
    commands = harness.turn(ev.RequestCancelled(request_id=plan.request), PREFILL_DOWN, DECODE_DOWN)
    assert commands == []
    assert not any(harness.scheduler.counts)


def test_retried_request_keeps_its_place_in_the_queue() -> None:
    harness = SchedulerHarness()
    harness.turn(harness.prefill(1, 4000), harness.decode(2, 2100), LINK)
    first = harness.start(2000)
    waiting = [harness.submit(2000), harness.submit(2000)]
    harness.turn(*waiting)
    harness.turn(PREFILL_DOWN)
    again = sent(
        harness.turn(*first.freed(), harness.prefill(3, 4000), ev.LinkUp(prefill=3, decode=2))
    )
    assert again.request == first.request


def test_request_is_retried_up_to_the_limit() -> None:
    harness = SchedulerHarness(limits=QueueLimits(max_attempts=2)).ready()
    plan, other = harness.start(), harness.start()
    harness.turn(PREFILL_DOWN)
    again = sorted(
        (
            reserve.request_id
            for reserve in only(harness.turn(*replaced_prefill(harness)), cmd.Reserve)
        ),
    )
    assert again == [plan.request, other.request]
    commands = harness.turn(ev.GangDown(gang=3, reason="rank 1 died"))
    assert [fail.request_id for fail in only(commands, cmd.Fail)] == again
    assert error_of(commands[:2]).code == "GangLost"
    assert harness.scheduler.counts.running == harness.scheduler.counts.waiting == 0


def many_attempts() -> SchedulerHarness:
    return SchedulerHarness(limits=QueueLimits(max_attempts=10)).ready()


def lose(harness: SchedulerHarness, gang: int) -> list[cmd.AnyCommand]:
    return harness.turn(ev.GangDown(gang=gang, reason="rank 1 died"))


@pytest.mark.parametrize("second", ["prefill", "decode"])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_request_alone_in_two_lost_gangs_fails(first: str, second: str) -> None:
    """The gang dies while it computes the prompt or while it decodes."""
    harness = many_attempts()
    gangs = {"prefill": 1, "decode": 2}
    plan = harness.start()
    if first == "decode":
        harness.turn(*plan.joined())
    assert len(only(lose(harness, gangs[first]), cmd.Restart)) == 1
    gangs[first] = 3
    up = harness.prefill(3) if first == "prefill" else harness.decode(3)
    again = sent(harness.turn(*plan.freed(), up, ev.LinkUp(**gangs)))
    if second == "decode":
        harness.turn(*again.joined())
    commands = lose(harness, gangs[second])
    assert [fail.request_id for fail in only(commands, cmd.Fail)] == [plan.request]


def test_lost_gang_that_a_request_has_left_does_not_count_against_it() -> None:
    harness = many_attempts()
    plan = harness.start()
    harness.turn(*plan.joined())
    for gang in range(3, 9):
        assert lose(harness, 1 if gang == 3 else gang - 1) == []
        harness.turn(harness.prefill(gang), ev.LinkUp(prefill=gang, decode=2))
    assert len(only(lose(harness, 2), cmd.Restart)) == 1


def test_lost_gang_with_several_prefills_counts_against_none() -> None:
    harness = many_attempts()
    harness.start()
    harness.start()
    harness.turn(PREFILL_DOWN)
    for gang in range(3, 9):
        harness.turn(harness.prefill(gang), ev.LinkUp(prefill=gang, decode=2))
        commands = lose(harness, gang)
        assert len(only(commands, cmd.Restart)) == 2


def test_lost_gang_with_several_decoding_requests_counts_against_none() -> None:
    """Not even where the others are over, and only their slots are still held."""
    harness = many_attempts()
    gang = 2
    first = harness.start()
    harness.turn(*first.joined())
    for number in range(3, 9):
        other = harness.start()
        harness.turn(*other.joined())
        harness.turn(ev.RequestCancelled(request_id=other.request))
        assert len(only(lose(harness, gang), cmd.Restart)) == 1
        gang = number
        first = sent(harness.turn(harness.decode(gang), ev.LinkUp(prefill=1, decode=gang)))
        harness.turn(*first.joined())


def test_request_that_waits_too_long_for_gangs_fails() -> None:
    harness = SchedulerHarness(deadlines=SchedulerDeadlines(gang_recovery_ns=5 * SECOND)).ready()
    harness.turn(PREFILL_DOWN)
    early = harness.submit()
    harness.turn(early)
    harness.wait(until_ns=harness.now_ns + 3 * SECOND)
    late = harness.submit()
    harness.turn(late)
    commands = harness.wait(until_ns=harness.now_ns + 3 * SECOND)
    assert [fail.request_id for fail in only(commands, cmd.Fail)] == [early.request_id]
    error = error_of(commands)
    assert (error.code, error.message) == ("GangLost", "no gangs to serve the request for 5 s")
    assert harness.scheduler.counts.waiting == 1
    assert sent(harness.turn(*replaced_prefill(harness))).request == late.request_id


def test_requests_wait_while_another_router_finishes_its_own() -> None:
    """A redeployed router stands by for `drain_s`, which may be longer than gangs take to come."""
    harness = SchedulerHarness(deadlines=SchedulerDeadlines(gang_recovery_ns=60 * SECOND))
    commands = harness.turn(ev.Standby(waits=True))
    for _ in range(30):
        commands += harness.turn(harness.submit(), after_ns=10 * SECOND)
        commands += harness.wait(until_ns=harness.now_ns)
    assert commands == []
    harness.turn(ev.Standby(waits=False))
    assert harness.wait(until_ns=harness.now_ns + 59 * SECOND) == []
    fails = only(harness.wait(until_ns=harness.now_ns + 5 * SECOND), cmd.Fail)
    assert len(fails) == 30, "gangs that nobody holds have as long to come as ever"


def test_restarted_request_waits_for_gangs_from_its_restart_on() -> None:
    """It decoded while there was no prefill gang."""
    harness = SchedulerHarness(deadlines=SchedulerDeadlines(gang_recovery_ns=5 * SECOND)).ready()
    plan = harness.start()
    harness.turn(*plan.joined())
    harness.turn(PREFILL_DOWN)
    assert harness.wait(until_ns=harness.now_ns + 20 * SECOND) == []
    assert len(only(harness.turn(plan.failed(1)), cmd.Restart)) == 1
    assert harness.wait(until_ns=harness.now_ns + 4 * SECOND) == []
    commands = harness.wait(until_ns=harness.now_ns + 4 * SECOND)
    assert [fail.request_id for fail in only(commands, cmd.Fail)] == [plan.request]


def test_running_request_does_not_fail_without_gangs() -> None:
    harness = SchedulerHarness(deadlines=SchedulerDeadlines(gang_recovery_ns=5 * SECOND)).ready()
    plan = harness.start()
    harness.turn(*plan.joined())
    harness.turn(PREFILL_DOWN)
    assert harness.wait(until_ns=harness.now_ns + 20 * SECOND) == []
    assert harness.scheduler.counts.running == 1


# --- the connection for KV -----------------------------------------------------------------------


def test_kv_in_transfer_over_a_lost_link_is_computed_again() -> None:
    harness = SchedulerHarness().ready()
    receiving, decoding = harness.start(3000), harness.start(50)
    harness.turn(receiving.kv_received()[0], *decoding.joined())
    commands = harness.turn(ev.LinkDown(prefill=1, decode=2, reason="peer hung up"))
    assert [type(command) for command in commands] == [cmd.Cancel, cmd.Restart]
    assert commands[0] == cmd.Cancel(sequence_id=receiving.sequence, gangs=(1, 2))
    assert not harness.scheduler.ready
    assert harness.turn(*receiving.steps_done(), *receiving.freed()) == []
    again = sent(harness.turn(LINK))
    assert again.request == receiving.request


def test_received_kv_does_not_need_the_link() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start()
    harness.turn(*plan.kv_received())
    assert harness.turn(ev.LinkDown(prefill=1, decode=2, reason="cut")) == []
    assert harness.turn(plan.first_token) == [cmd.SetGroup(gang=2, joined=(plan.sequence,))]


# --- sequences -----------------------------------------------------------------------------------


def test_attempt_that_fails_on_living_gangs_is_retried_after_a_pause() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start()
    commands = harness.turn(plan.failed())
    assert [type(command) for command in commands] == [cmd.Cancel, cmd.Restart]
    assert harness.scheduler.counts.waiting == 1
    assert harness.wake_at_ns == harness.now_ns + PAUSE_NS
    assert harness.turn(harness.submit(50)) != []  # the others go on
    assert sent(harness.wait()).request == plan.request


def test_token_delivered_after_a_failure_of_the_same_round_does_not_end_the_pause() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start()
    progress = ev.Progress(generated_tokens=((plan.sequence, 3),))
    commands = harness.turn(plan.failed(), plan.first_token, progress)
    assert [type(command) for command in commands] == [cmd.Cancel, cmd.Restart]
    failed_ns = harness.now_ns
    again = sent(harness.wait())
    assert harness.now_ns == failed_ns + PAUSE_NS
    assert (again.reserve.message.prompt_tokens, again.reserve.message.output_tokens) == (503, 7)


def test_request_cancelled_in_its_pause_is_over() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start()
    harness.turn(plan.failed())
    assert harness.turn(ev.RequestCancelled(request_id=plan.request)) == []
    harness.turn(*plan.freed(), *plan.steps_done())
    assert not any(harness.scheduler.counts)
    assert harness.wait(until_ns=harness.now_ns + 10 * SECOND) == []


def test_error_of_the_client_is_not_retried() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start()
    cancel, fail = harness.turn(plan.failed(retryable=False))
    assert cancel == cmd.Cancel(sequence_id=plan.sequence, gangs=(1, 2))
    assert fail == cmd.Fail(request_id=plan.request, error=ev.WireError("TransferError", "bad KV"))


def test_refused_slots_do_not_count_as_taken() -> None:
    """An instance that refuses holds nothing, and says so."""
    harness = SchedulerHarness().ready()
    plan = harness.start(3000)
    refusing = plan.holders[0]
    harness.turn(ev.Freed(sequence_id=plan.sequence, instance=refusing), plan.failed())
    held = {
        kv_slice.instance: kv_slice.stop - kv_slice.start
        for kv_slice in plan.reserve.message.slices
    }
    left = sum(n for instance, n in held.items() if instance != refusing)
    left += 10 * (plan.reserve.message.master != refusing)
    assert harness.scheduler.counts.decode_kv == left / 18000


@pytest.mark.parametrize("more", [-1, 1])
def test_wrong_number_of_received_tokens_is_a_fault(more: int) -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start(3000)
    commands = harness.turn(*plan.prefilled(), plan.kv_received(more)[0])
    assert [type(command) for command in commands] == [cmd.Cancel, cmd.Restart]
    restart = only(commands, cmd.Restart)[0]
    assert restart.error.code == "ProtocolError"
    assert f"KV of {1500 + more} tokens" in restart.error.message


def test_kv_received_where_none_was_expected_is_a_fault() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start(50)
    other = next(instance_id(2, i) for i in range(2) if instance_id(2, i) not in plan.holders)
    commands = harness.turn(ev.KvReceived(sequence_id=plan.sequence, instance=other, tokens=50))
    assert len(only(commands, cmd.Restart)) == 1


def test_step_without_a_first_token_is_retried() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start(3000)
    first, second = plan.steps_done()
    assert harness.turn(first) == []
    commands = harness.turn(second)
    assert only(commands, cmd.Restart)[0].error.message == (
        f"step {plan.step.step_id} ended without the first token of sequence {plan.sequence}"
    )


def test_events_of_a_sequence_after_its_end_are_ignored() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start()
    harness.turn(plan.failed())
    assert (
        harness.turn(plan.first_token, *plan.kv_received(), plan.failed(5), plan.finished(10)) == []
    )
    again = sent(harness.wait())
    assert again.reserve.message.prompt_tokens == 500


# --- deadlines -----------------------------------------------------------------------------------


def test_late_kv_transfer_fails_the_attempt() -> None:
    limits = SchedulerDeadlines(transfer_ns=20 * SECOND, transfer_token_ns=2 * MS)
    harness = SchedulerHarness(deadlines=limits).ready()
    plan = harness.start(3000)
    harness.turn(*plan.prefilled(), plan.kv_received()[0])
    due_ns = harness.now_ns + 26 * SECOND
    assert harness.wait(until_ns=due_ns - 1) == []
    commands = harness.turn(ev.Wake(), after_ns=1)
    restart = only(commands, cmd.Restart)[0]
    assert restart.error.message == "KV transfer did not finish within 26 s"


def test_kv_received_in_time_has_no_deadline() -> None:
    harness = SchedulerHarness(deadlines=SchedulerDeadlines(transfer_ns=SECOND)).ready()
    plan = harness.start(3000)
    harness.turn(*plan.prefilled())
    harness.turn(*plan.kv_received())
    assert harness.wait(until_ns=harness.now_ns + 60 * SECOND) == []


@pytest.mark.parametrize("state", ["waiting", "running", "pausing"])
def test_a_request_with_a_deadline_fails_at_it(state: str) -> None:
    harness = SchedulerHarness(deadlines=SchedulerDeadlines(retry_pause_ns=10 * SECOND))
    if state != "waiting":
        harness.ready()
    commands = harness.turn(harness.submit(deadline_ns=harness.now_ns + 3 * SECOND + MS))
    plan = sent(commands) if state != "waiting" else None
    if state == "pausing" and plan is not None:
        harness.turn(plan.failed())
    commands = harness.wait(until_ns=harness.now_ns + 4 * SECOND)
    assert error_of(commands).message == "the request did not finish within 3 s"
    assert bool(only(commands, cmd.Cancel)) == (state == "running")
    assert harness.scheduler.counts.running == harness.scheduler.counts.waiting == 0


def test_ended_request_has_no_deadline() -> None:
    harness = SchedulerHarness().ready()
    plan = sent(harness.turn(harness.submit(deadline_ns=harness.now_ns + 3 * SECOND)))
    harness.turn(*plan.joined(), plan.finished(), *plan.freed())
    assert harness.wait(until_ns=harness.now_ns + 10 * SECOND) == []
    assert harness.wake_at_ns is None


# --- silence -------------------------------------------------------------------------------------


SHORT = SchedulerDeadlines(prefill_liveness_ns=20 * SECOND, decode_liveness_ns=30 * SECOND)


def watch(
    harness: SchedulerHarness, seconds: int, *heard: int, steps: tuple[int, ...] = ()
) -> list[cmd.AnyCommand]:
    """Seconds in which some instances decode and some steps advance, once a second."""
    commands: list[cmd.AnyCommand] = []
    for _ in range(seconds):
        heartbeat = ev.Heartbeat(instances=heard, steps=steps)
        commands += harness.turn(heartbeat, ev.Wake(), after_ns=SECOND)
    return commands


def resets(commands: list[cmd.AnyCommand]) -> list[int]:
    """Return the gangs that are reset."""
    return [reset.gang for reset in only(commands, cmd.ResetGang)]


def test_a_silent_prefill_gang_is_reset_once() -> None:
    harness = SchedulerHarness(deadlines=SHORT).ready()
    harness.start()
    assert watch(harness, 19) == []
    (reset,) = watch(harness, 10)
    assert isinstance(reset, cmd.ResetGang)
    assert reset.gang == 1
    assert "the prefill gang owes an answer and was silent for" in reset.reason
    assert not harness.scheduler.ready
    assert (
        harness.turn(harness.submit(50)) == []
    )  # nothing is started on a gang that is being reset


def test_silent_gang_that_owes_nothing_is_not_reset() -> None:
    harness = SchedulerHarness(deadlines=SHORT).ready()
    assert watch(harness, 100) == []


def test_long_step_that_advances_is_not_reset() -> None:
    harness = SchedulerHarness(deadlines=SHORT).ready()
    plan = harness.start(3000)
    assert watch(harness, 100, steps=(plan.step.step_id,)) == []
    assert resets(watch(harness, 25)) == [1]


def test_hanging_step_is_found_while_others_advance() -> None:
    harness = SchedulerHarness(deadlines=SHORT).ready()
    hanging, other = harness.start(900), harness.start(900)
    assert not {*hanging.step.group} & {*other.step.group}
    assert resets(watch(harness, 30, steps=(other.step.step_id,))) == [1]


def test_hanging_step_is_found_while_its_instances_do_anything_else() -> None:
    """One of them never learned of the step; the other one computes short prompts and decodes."""
    harness = SchedulerHarness(deadlines=SHORT).ready()
    hanging = harness.start(3000)
    commands: list[cmd.AnyCommand] = []
    for _ in range(30):
        commands += (more := harness.turn(harness.submit(50, 1), after_ns=SECOND))
        for short in steps_of(more):
            assert {*short.group} < {*hanging.step.group}
            finished = ev.Finished(sequence_id=short.chunks[0].sequence_id, generated_tokens=1)
            done = [
                ev.StepDone(step_id=short.step_id, instance=instance, took_ns=20 * MS)
                for instance in short.group
            ]
            commands += harness.turn(ev.Heartbeat(instances=short.group), finished, *done)
    assert resets(commands) == [1]


def test_preempted_step_is_excused_for_what_others_cost_it() -> None:
    harness = SchedulerHarness(deadlines=SHORT).ready()
    low = harness.start(3000)
    high = harness.start(50)
    assert high.step.high_priority
    assert {*high.step.group} < {*low.step.group}
    assert watch(harness, 19, steps=(high.step.step_id,)) == []
    assert harness.turn(high.first_token, *high.steps_done(took_ns=19 * SECOND)) == []
    assert watch(harness, 19) == []
    assert resets(watch(harness, 5)) == [1]


def test_step_that_waits_for_others_of_the_gang_is_not_reset() -> None:
    """A step waits for the one before it on one instance, and so does the third step behind it."""
    harness = SchedulerHarness(deadlines=SHORT).ready()
    first, second, third = harness.start(900), harness.start(2500), harness.start(900)
    (first_member,), (other,) = first.step.group, third.step.group
    assert {*second.step.group} == {first_member, other}
    assert watch(harness, 60, steps=(first.step.step_id,)) == []
    done = next(
        event
        for event in second.steps_done()
        if isinstance(event, ev.StepDone) and event.instance == other
    )
    assert harness.turn(done) == []
    assert watch(harness, 19, steps=(first.step.step_id,)) == []
    # Nothing is in the third step's way any more.
    assert resets(watch(harness, 5, steps=(first.step.step_id,))) == [1]


@pytest.mark.parametrize("owes", ["tokens", "slots"])
def test_silent_decode_gang_that_owes_something_is_reset(owes: str) -> None:
    harness = SchedulerHarness(deadlines=SHORT).ready()
    plan = harness.start()
    harness.turn(*plan.joined())
    if owes == "slots":
        harness.turn(plan.finished())
    assert watch(harness, 28, plan.reserve.message.master) == []
    assert resets(watch(harness, 40)) == [2]


def spread(harness: SchedulerHarness) -> tuple[Sent, int]:
    """Start a sequence on both decode instances; return it and its master."""
    plan = harness.start(3000)
    assert len(plan.holders) == 2
    return plan, plan.reserve.message.master


def test_silent_instance_that_frees_nothing_is_found_while_others_speak() -> None:
    harness = SchedulerHarness(deadlines=SHORT).ready()
    plan, master = spread(harness)
    harness.turn(ev.RequestCancelled(request_id=plan.request), *plan.steps_done())
    harness.turn(ev.Freed(sequence_id=plan.sequence, instance=master))
    assert watch(harness, 29, master) == []
    assert resets(watch(harness, 5, master)) == [2]


def test_silent_instance_is_found_while_every_attempt_on_the_gang_fails() -> None:
    """The router cannot reach it. What the other one frees after each attempt is no excuse."""
    harness = SchedulerHarness(deadlines=SHORT).ready()
    commands: list[cmd.AnyCommand] = []
    for _ in range(8):
        more = harness.turn(harness.submit(3000), after_ns=SECOND)
        for plan in [sent(more)] if only(more, cmd.Reserve) else []:
            failed = plan.failed(retryable=False)
            more += harness.turn(failed, *plan.steps_done(), after_ns=4 * SECOND)
            freed = ev.Freed(sequence_id=plan.sequence, instance=plan.reserve.message.master)
            more += harness.turn(freed)
        commands += more
    assert resets(commands) == [2]


def test_holder_owes_nothing_before_its_sequence_ends() -> None:
    """It says nothing while the master samples, and has time to free its slots afterwards."""
    harness = SchedulerHarness(deadlines=SHORT).ready()
    plan, master = spread(harness)
    harness.turn(*plan.joined())
    assert watch(harness, 100, master) == []
    harness.turn(plan.finished(), ev.Freed(sequence_id=plan.sequence, instance=master))
    assert watch(harness, 29) == []
    assert resets(watch(harness, 5)) == [2]


def test_silent_decode_gang_that_does_not_free_a_cancelled_sequence_is_reset() -> None:
    harness = SchedulerHarness(deadlines=SHORT).ready()
    plan = harness.start()
    harness.turn(ev.RequestCancelled(request_id=plan.request), *plan.steps_done())
    assert watch(harness, 29) == []
    assert resets(watch(harness, 5)) == [2]


def test_silent_decode_gang_that_has_freed_everything_is_not_reset() -> None:
    harness = SchedulerHarness(deadlines=SHORT).ready()
    plan = harness.start()
    harness.turn(*plan.joined(), plan.finished())
    harness.turn(*plan.freed())
    assert watch(harness, 100) == []


def test_resumed_prompt_that_no_longer_fits_fails_with_the_fault() -> None:
    """Prompt and delivered tokens together exceed what the prefill gang can hold."""
    harness = SchedulerHarness()
    harness.turn(harness.prefill(1, 1000), harness.decode(2, 5000), LINK)
    plan = sent(harness.turn(harness.submit(998, 100)))
    harness.turn(*plan.joined())
    commands = harness.turn(ev.Progress(generated_tokens=((plan.sequence, 50),)), DECODE_DOWN)
    assert error_of(commands).code == "GangLost"


def test_retry_uses_ids_of_its_own() -> None:
    harness = SchedulerHarness().ready()
    numbers = []
    for _ in range(3):
        plan = harness.start() if not numbers else sent(harness.wait())
        numbers.append(plan.sequence)
        harness.turn(plan.failed())
    assert len(set(numbers)) == 3


def test_received_sequence_goes_on_if_prefill_dies_in_the_same_round() -> None:
    harness = SchedulerHarness().ready()
    plan = harness.start(prompt=500)
    commands = harness.turn(
        plan.first_token, *plan.kv_received(), ev.GangDown(gang=1, reason="gone")
    )
    assert commands == [cmd.SetGroup(gang=2, joined=(plan.sequence,))]
    assert harness.turn(plan.finished(), *plan.freed()) == []
