"""What becomes of requests when gangs, connections and sequences fail."""

from __future__ import annotations

import pytest
from scheduler_harness import LINK, MS, SECOND, Desk, Sent, only, sent

from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.events import instance_id
from csps.services.scheduling.events.limits import QueueLimits, SchedulerDeadlines

PREFILL_DOWN = ev.GangDown(gang=1, reason="rank 0 died")
DECODE_DOWN = ev.GangDown(gang=2, reason="rank 0 died")
PAUSE_NS = SchedulerDeadlines().retry_pause_ns


def replaced_prefill(desk: Desk) -> list[ev.AnyEvent]:
    return [desk.prefill(3), ev.LinkUp(prefill=3, decode=2)]


def replaced_decode(desk: Desk) -> list[ev.AnyEvent]:
    return [desk.decode(4), ev.LinkUp(prefill=1, decode=4)]


def error_of(commands: list[cmd.AnyCommand]) -> ev.WireError:
    (fail,) = only(commands, cmd.Fail)
    return fail.error


# --- gangs -----------------------------------------------------------------------------------


def test_prefill_lost_before_the_first_token_is_tried_again() -> None:
    desk = Desk().ready()
    plan = desk.start()
    cancel, restart = desk.turn(PREFILL_DOWN)
    assert cancel == cmd.Cancel(sequence_id=plan.sequence, gangs=(2,))
    assert isinstance(restart, cmd.Restart)
    assert (restart.request_id, restart.sequence_id) == (plan.request, plan.sequence)
    assert restart.error.code == "GangLost"
    again = sent(desk.turn(*replaced_prefill(desk)))
    assert again.request == plan.request
    assert again.sequence > plan.sequence
    assert (again.reserve.prompt_tokens, again.reserve.output_tokens) == (500, 10)


def test_prefill_lost_after_the_first_token_goes_on_with_the_second() -> None:
    desk = Desk().ready()
    plan = desk.start(3000)
    desk.turn(*plan.prefilled(), plan.landed()[0])
    commands = desk.turn(PREFILL_DOWN)
    assert [type(command) for command in commands] == [cmd.Cancel, cmd.Restart]
    again = sent(desk.turn(*replaced_prefill(desk)))
    assert (again.reserve.prompt_tokens, again.reserve.output_tokens) == (3001, 9)
    assert again.step.chunks[0].length == 3001
    desk.turn(*again.joined())
    desk.turn(again.finished(10), *again.freed(), *plan.freed())
    assert desk.scheduler.counts == (0, 0, 0.0, 0.0)


def test_decoding_goes_on_while_prefill_is_replaced() -> None:
    desk = Desk().ready()
    plan = desk.start()
    desk.turn(*plan.joined())
    assert desk.turn(PREFILL_DOWN) == []
    assert desk.turn(plan.finished()) == []
    desk.turn(*plan.freed())
    assert desk.scheduler.counts == (0, 0, 0.0, 0.0)


@pytest.mark.parametrize("drawn", [0, 1, 7])
def test_decode_lost_restarts_all_that_it_held(drawn: int) -> None:
    desk = Desk().ready()
    plan = desk.start()
    if drawn:
        desk.turn(*plan.joined())
    progress = ev.Progress(generated_tokens=((plan.sequence, drawn),))
    commands = desk.turn(progress, DECODE_DOWN)
    cancels = [] if drawn else [cmd.Cancel(sequence_id=plan.sequence, gangs=(1,))]
    assert only(commands, cmd.Cancel) == cancels
    assert len(only(commands, cmd.Restart)) == 1
    again = sent(desk.turn(*plan.steps_done(), *replaced_decode(desk)))
    assert again.reserve.prompt_tokens == 500 + drawn
    assert again.reserve.output_tokens == 10 - drawn


def test_what_was_drawn_before_several_faults_adds_up() -> None:
    desk = Desk().ready()
    plan = desk.start()
    desk.turn(*plan.joined())
    desk.turn(ev.Progress(generated_tokens=((plan.sequence, 4),)), DECODE_DOWN)
    second = sent(desk.turn(*replaced_decode(desk)))
    assert (second.reserve.prompt_tokens, second.reserve.output_tokens) == (504, 6)
    desk.turn(*second.joined())
    desk.turn(second.failed(9))
    third = sent(desk.wait())
    assert (third.reserve.prompt_tokens, third.reserve.output_tokens) == (509, 1)


def test_a_request_whose_whole_answer_has_left_is_over() -> None:
    desk = Desk().ready()
    plan = desk.start(output=5)
    desk.turn(*plan.joined())
    assert desk.turn(ev.Progress(generated_tokens=((plan.sequence, 5),)), DECODE_DOWN) == []
    assert desk.scheduler.counts == (0, 0, 0.0, 0.0)


def test_a_token_delivered_after_the_fault_in_the_same_turn_is_not_drawn_again() -> None:
    """The executor learns of the restart only when the turn is over."""
    desk = Desk().ready()
    plan = desk.start()
    commands = desk.turn(DECODE_DOWN, plan.first_token)
    assert len(only(commands, cmd.Restart)) == 1
    again = sent(desk.turn(*plan.steps_done(), *replaced_decode(desk)))
    assert (again.reserve.prompt_tokens, again.reserve.output_tokens) == (501, 9)


def test_an_answer_that_ended_after_the_fault_in_the_same_turn_is_over() -> None:
    desk = Desk().ready()
    plan = desk.start(output=1)
    desk.turn(DECODE_DOWN, plan.first_token, plan.finished(1), *plan.steps_done())
    assert desk.scheduler.counts == (0, 0, 0.0, 0.0)
    assert desk.turn(*replaced_decode(desk)) == []


def test_nothing_is_said_to_a_gang_that_went_down_in_the_same_turn() -> None:
    desk = Desk().ready()
    plan = desk.start()
    commands = desk.turn(ev.RequestCancelled(request_id=plan.request), PREFILL_DOWN, DECODE_DOWN)
    assert commands == []
    assert desk.scheduler.counts == (0, 0, 0.0, 0.0)


def test_a_request_keeps_its_place_when_it_is_tried_again() -> None:
    desk = Desk()
    desk.turn(desk.prefill(1, 4000), desk.decode(2, 2100), LINK)
    first = desk.start(2000)
    waiting = [desk.submit(2000), desk.submit(2000)]
    desk.turn(*waiting)
    desk.turn(PREFILL_DOWN)
    again = sent(desk.turn(*first.freed(), desk.prefill(3, 4000), ev.LinkUp(prefill=3, decode=2)))
    assert again.request == first.request


def test_a_request_is_tried_so_often_and_no_more() -> None:
    desk = Desk(limits=QueueLimits(max_attempts=2)).ready()
    plan, other = desk.start(), desk.start()
    desk.turn(PREFILL_DOWN)
    again = sorted(
        (it.request_id for it in only(desk.turn(*replaced_prefill(desk)), cmd.Reserve)),
    )
    assert again == [plan.request, other.request]
    commands = desk.turn(ev.GangDown(gang=3, reason="rank 1 died"))
    assert [it.request_id for it in only(commands, cmd.Fail)] == again
    assert error_of(commands[:2]).code == "GangLost"
    assert desk.scheduler.counts.running == desk.scheduler.counts.waiting == 0


def many_attempts() -> Desk:
    return Desk(limits=QueueLimits(max_attempts=10)).ready()


def lose(desk: Desk, gang: int) -> list[cmd.AnyCommand]:
    return desk.turn(ev.GangDown(gang=gang, reason="rank 1 died"))


@pytest.mark.parametrize("second", ["prefill", "decode"])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_request_that_may_be_killing_gangs_gets_two_of_them(first: str, second: str) -> None:
    """Whether it dies while its prompt is computed or while it decodes."""
    desk = many_attempts()
    gangs = {"prefill": 1, "decode": 2}
    plan = desk.start()
    if first == "decode":
        desk.turn(*plan.joined())
    assert len(only(lose(desk, gangs[first]), cmd.Restart)) == 1
    gangs[first] = 3
    up = desk.prefill(3) if first == "prefill" else desk.decode(3)
    again = sent(desk.turn(*plan.freed(), up, ev.LinkUp(**gangs)))
    if second == "decode":
        desk.turn(*again.joined())
    commands = lose(desk, gangs[second])
    assert [it.request_id for it in only(commands, cmd.Fail)] == [plan.request]


def test_gangs_that_a_request_has_left_alone_do_not_count() -> None:
    desk = many_attempts()
    plan = desk.start()
    desk.turn(*plan.joined())
    for gang in range(3, 9):
        assert lose(desk, 1 if gang == 3 else gang - 1) == []
        desk.turn(desk.prefill(gang), ev.LinkUp(prefill=gang, decode=2))
    assert len(only(lose(desk, 2), cmd.Restart)) == 1


def test_a_request_in_company_is_not_suspected() -> None:
    desk = many_attempts()
    desk.start()
    desk.start()
    desk.turn(PREFILL_DOWN)
    for gang in range(3, 9):
        desk.turn(desk.prefill(gang), ev.LinkUp(prefill=gang, decode=2))
        commands = lose(desk, gang)
        assert len(only(commands, cmd.Restart)) == 2


def test_a_request_that_decodes_in_company_is_not_suspected() -> None:
    """Not even where the others are over, and only their slots are still held."""
    desk = many_attempts()
    gang = 2
    first = desk.start()
    desk.turn(*first.joined())
    for number in range(3, 9):
        other = desk.start()
        desk.turn(*other.joined())
        desk.turn(ev.RequestCancelled(request_id=other.request))
        assert len(only(lose(desk, gang), cmd.Restart)) == 1
        gang = number
        first = sent(desk.turn(desk.decode(gang), ev.LinkUp(prefill=1, decode=gang)))
        desk.turn(*first.joined())


def test_waiting_for_a_gang_has_an_end() -> None:
    desk = Desk(deadlines=SchedulerDeadlines(gang_recovery_ns=5 * SECOND)).ready()
    desk.turn(PREFILL_DOWN)
    early = desk.submit()
    desk.turn(early)
    desk.wait(until_ns=desk.now_ns + 3 * SECOND)
    late = desk.submit()
    desk.turn(late)
    commands = desk.wait(until_ns=desk.now_ns + 3 * SECOND)
    assert [it.request_id for it in only(commands, cmd.Fail)] == [early.request_id]
    error = error_of(commands)
    assert (error.code, error.message) == ("GangLost", "no gangs to serve the request for 5 s")
    assert desk.scheduler.counts.waiting == 1
    assert sent(desk.turn(*replaced_prefill(desk))).request == late.request_id


def test_a_request_that_runs_is_not_failed_for_want_of_gangs() -> None:
    desk = Desk(deadlines=SchedulerDeadlines(gang_recovery_ns=5 * SECOND)).ready()
    plan = desk.start()
    desk.turn(*plan.joined())
    desk.turn(PREFILL_DOWN)
    assert desk.wait(until_ns=desk.now_ns + 20 * SECOND) == []
    assert desk.scheduler.counts.running == 1


# --- the connection for KV -----------------------------------------------------------------------


def test_kv_on_a_connection_that_breaks_is_computed_again() -> None:
    desk = Desk().ready()
    landing, decoding = desk.start(3000), desk.start(50)
    desk.turn(landing.landed()[0], *decoding.joined())
    commands = desk.turn(ev.LinkDown(prefill=1, decode=2, reason="peer hung up"))
    assert [type(command) for command in commands] == [cmd.Cancel, cmd.Restart]
    assert commands[0] == cmd.Cancel(sequence_id=landing.sequence, gangs=(1, 2))
    assert not desk.scheduler.ready
    assert desk.turn(*landing.steps_done(), *landing.freed()) == []
    again = sent(desk.turn(LINK))
    assert again.request == landing.request


def test_what_has_landed_does_not_need_the_connection() -> None:
    desk = Desk().ready()
    plan = desk.start()
    desk.turn(*plan.landed())
    assert desk.turn(ev.LinkDown(prefill=1, decode=2, reason="cut")) == []
    assert desk.turn(plan.first_token) == [cmd.SetGroup(gang=2, joined=(plan.sequence,))]


# --- sequences -----------------------------------------------------------------------------------


def test_an_attempt_that_fails_on_living_gangs_is_followed_by_another_after_a_pause() -> None:
    desk = Desk().ready()
    plan = desk.start()
    commands = desk.turn(plan.failed())
    assert [type(command) for command in commands] == [cmd.Cancel, cmd.Restart]
    assert desk.scheduler.counts.waiting == 1
    assert desk.wake_at_ns == desk.now_ns + PAUSE_NS
    assert desk.turn(desk.submit(50)) != []  # the others go on
    assert sent(desk.wait()).request == plan.request


def test_a_request_may_be_cancelled_in_its_pause() -> None:
    desk = Desk().ready()
    plan = desk.start()
    desk.turn(plan.failed())
    assert desk.turn(ev.RequestCancelled(request_id=plan.request)) == []
    desk.turn(*plan.freed(), *plan.steps_done())
    assert desk.scheduler.counts == (0, 0, 0.0, 0.0)
    assert desk.wait(until_ns=desk.now_ns + 10 * SECOND) == []


def test_a_mistake_of_the_client_is_not_tried_again() -> None:
    desk = Desk().ready()
    plan = desk.start()
    cancel, fail = desk.turn(plan.failed(retryable=False))
    assert cancel == cmd.Cancel(sequence_id=plan.sequence, gangs=(1, 2))
    assert fail == cmd.Fail(request_id=plan.request, error=ev.WireError("TransferError", "bad KV"))


def test_refused_slots_are_not_counted_as_taken() -> None:
    """An instance that refuses holds nothing, and says so."""
    desk = Desk().ready()
    plan = desk.start(3000)
    refusing = plan.holders[0]
    desk.turn(ev.Freed(sequence_id=plan.sequence, instance=refusing), plan.failed())
    held = {kv_slice.instance: kv_slice.stop - kv_slice.start for kv_slice in plan.reserve.slices}
    left = sum(n for it, n in held.items() if it != refusing)
    left += 10 * (plan.reserve.master != refusing)
    assert desk.scheduler.counts.decode_kv == left / 18000


@pytest.mark.parametrize("more", [-1, 1])
def test_a_wrong_amount_of_kv_is_a_fault(more: int) -> None:
    desk = Desk().ready()
    plan = desk.start(3000)
    commands = desk.turn(*plan.prefilled(), plan.landed(more)[0])
    assert [type(command) for command in commands] == [cmd.Cancel, cmd.Restart]
    restart = only(commands, cmd.Restart)[0]
    assert restart.error.code == "ProtocolError"
    assert f"KV of {1500 + more} tokens" in restart.error.message


def test_kv_that_lands_where_none_was_promised_is_a_fault() -> None:
    desk = Desk().ready()
    plan = desk.start(50)
    other = next(instance_id(2, i) for i in range(2) if instance_id(2, i) not in plan.holders)
    commands = desk.turn(ev.KvReceived(sequence_id=plan.sequence, instance=other, tokens=50))
    assert len(only(commands, cmd.Restart)) == 1


def test_a_step_without_a_first_token_is_tried_again() -> None:
    desk = Desk().ready()
    plan = desk.start(3000)
    first, second = plan.steps_done()
    assert desk.turn(first) == []
    commands = desk.turn(second)
    assert only(commands, cmd.Restart)[0].error.message == (
        "a prefill step ended without its first token"
    )


def test_what_a_sequence_says_after_its_end_is_ignored() -> None:
    desk = Desk().ready()
    plan = desk.start()
    desk.turn(plan.failed())
    assert desk.turn(plan.first_token, *plan.landed(), plan.failed(5), plan.finished(10)) == []
    again = sent(desk.wait())
    assert again.reserve.prompt_tokens == 500


# --- deadlines -----------------------------------------------------------------------------------


def test_kv_that_does_not_land_fails_the_attempt() -> None:
    limits = SchedulerDeadlines(transfer_ns=20 * SECOND, transfer_token_ns=2 * MS)
    desk = Desk(deadlines=limits).ready()
    plan = desk.start(3000)
    desk.turn(*plan.prefilled(), plan.landed()[0])
    due_ns = desk.now_ns + 26 * SECOND
    assert desk.wait(until_ns=due_ns - 1) == []
    commands = desk.turn(ev.Wake(), after_ns=1)
    restart = only(commands, cmd.Restart)[0]
    assert restart.error.message == "KV landing did not finish within 26 s"


def test_kv_that_landed_in_time_has_no_deadline() -> None:
    desk = Desk(deadlines=SchedulerDeadlines(transfer_ns=SECOND)).ready()
    plan = desk.start(3000)
    desk.turn(*plan.prefilled())
    desk.turn(*plan.landed())
    assert desk.wait(until_ns=desk.now_ns + 60 * SECOND) == []


@pytest.mark.parametrize("state", ["waiting", "running", "pausing"])
def test_a_request_with_a_deadline_fails_at_it(state: str) -> None:
    desk = Desk(deadlines=SchedulerDeadlines(retry_pause_ns=10 * SECOND))
    if state != "waiting":
        desk.ready()
    commands = desk.turn(desk.submit(deadline_ns=desk.now_ns + 3 * SECOND + MS))
    plan = sent(commands) if state != "waiting" else None
    if state == "pausing" and plan is not None:
        desk.turn(plan.failed())
    commands = desk.wait(until_ns=desk.now_ns + 4 * SECOND)
    assert error_of(commands).message == "the request did not finish within 3 s"
    assert bool(only(commands, cmd.Cancel)) == (state == "running")
    assert desk.scheduler.counts.running == desk.scheduler.counts.waiting == 0


def test_a_request_that_ended_has_no_deadline() -> None:
    desk = Desk().ready()
    plan = sent(desk.turn(desk.submit(deadline_ns=desk.now_ns + 3 * SECOND)))
    desk.turn(*plan.joined(), plan.finished(), *plan.freed())
    assert desk.wait(until_ns=desk.now_ns + 10 * SECOND) == []
    assert desk.wake_at_ns is None


# --- silence -------------------------------------------------------------------------------------


SHORT = SchedulerDeadlines(prefill_liveness_ns=20 * SECOND, decode_liveness_ns=30 * SECOND)


def watch(desk: Desk, seconds: int, *heard: int) -> list[cmd.AnyCommand]:
    """Seconds in which some instances give signs of life, once a second."""
    commands: list[cmd.AnyCommand] = []
    for _ in range(seconds):
        commands += desk.turn(ev.Heartbeat(instances=heard), ev.Wake(), after_ns=SECOND)
    return commands


def test_a_silent_prefill_gang_is_reset_once() -> None:
    desk = Desk(deadlines=SHORT).ready()
    desk.start()
    assert watch(desk, 19) == []
    (reset,) = watch(desk, 10)
    assert isinstance(reset, cmd.ResetGang)
    assert reset.gang == 1
    assert "the prefill gang owes an answer and was silent for" in reset.reason
    assert not desk.scheduler.ready
    assert desk.turn(desk.submit(50)) == []  # nothing is started on a gang that is being reset


def test_a_gang_that_owes_nothing_may_be_silent() -> None:
    desk = Desk(deadlines=SHORT).ready()
    assert watch(desk, 100) == []


def test_a_step_may_take_any_time_as_long_as_it_is_heard_of() -> None:
    desk = Desk(deadlines=SHORT).ready()
    plan = desk.start(3000)
    assert watch(desk, 100, *plan.step.group) == []
    assert watch(desk, 100, plan.step.group[0]) == []  # the other one waits for it


def test_a_step_that_hangs_is_noticed_while_others_go_on() -> None:
    desk = Desk(deadlines=SHORT).ready()
    hanging = desk.start(900)
    (other,) = (it for it in (instance_id(1, 0), instance_id(1, 1)) if it not in hanging.step.group)
    resets = watch(desk, 30, other)
    assert [it.gang for it in only(resets, cmd.ResetGang)] == [1]


def test_a_step_may_wait_for_what_others_of_the_gang_compute() -> None:
    """An instance is silent while it waits for the other one in the second step, and so is the
    third step behind it."""
    desk = Desk(deadlines=SHORT).ready()
    first, second, third = desk.start(900), desk.start(2500), desk.start(900)
    (one,), (other,) = first.step.group, third.step.group
    assert {*second.step.group} == {one, other}
    assert watch(desk, 60, one) == []
    done = next(
        it for it in second.steps_done() if isinstance(it, ev.StepDone) and it.instance == other
    )
    assert desk.turn(done) == []
    assert watch(desk, 19, one) == []
    # Nothing is in the third step's way any more.
    assert [it.gang for it in only(watch(desk, 5, one), cmd.ResetGang)] == [1]


@pytest.mark.parametrize("owes", ["tokens", "slots"])
def test_a_decode_gang_that_owes_something_and_is_silent_is_reset(owes: str) -> None:
    desk = Desk(deadlines=SHORT).ready()
    plan = desk.start()
    desk.turn(*plan.joined())
    if owes == "slots":
        desk.turn(plan.finished())
    assert watch(desk, 28, plan.holders[0]) == []
    resets = watch(desk, 40)
    assert [it.gang for it in only(resets, cmd.ResetGang)] == [2]


def test_a_decode_gang_that_does_not_free_what_was_cancelled_is_reset() -> None:
    desk = Desk(deadlines=SHORT).ready()
    plan = desk.start()
    desk.turn(ev.RequestCancelled(request_id=plan.request), *plan.steps_done())
    assert watch(desk, 29) == []
    assert [it.gang for it in only(watch(desk, 5), cmd.ResetGang)] == [2]


def test_a_decode_gang_that_has_freed_everything_may_be_silent() -> None:
    desk = Desk(deadlines=SHORT).ready()
    plan = desk.start()
    desk.turn(*plan.joined(), plan.finished())
    desk.turn(*plan.freed())
    assert watch(desk, 100) == []


def test_a_resumed_prompt_that_fits_no_more_fails_with_the_fault() -> None:
    """Prompt and delivered tokens together exceed what the prefill gang can hold."""
    desk = Desk()
    desk.turn(desk.prefill(1, 1000), desk.decode(2, 5000), LINK)
    plan = sent(desk.turn(desk.submit(998, 100)))
    desk.turn(*plan.joined())
    commands = desk.turn(ev.Progress(generated_tokens=((plan.sequence, 50),)), DECODE_DOWN)
    assert error_of(commands).code == "GangLost"


def test_plans_use_ids_that_ranks_of_a_former_attempt_do_not_know() -> None:
    desk = Desk().ready()
    numbers = []
    for _ in range(3):
        plan = desk.start() if not numbers else Sent(*_pair(desk.wait()))
        numbers.append(plan.sequence)
        desk.turn(plan.failed())
    assert len(set(numbers)) == 3


def _pair(commands: list[cmd.AnyCommand]) -> tuple[cmd.Reserve, cmd.RunStep]:
    plan = sent(commands)
    return plan.reserve, plan.step


def test_what_has_landed_goes_on_even_if_prefill_dies_in_the_same_turn() -> None:
    desk = Desk().ready()
    plan = desk.start(prompt=500)
    commands = desk.turn(plan.first_token, *plan.landed(), ev.GangDown(gang=1, reason="gone"))
    assert commands == [cmd.SetGroup(gang=2, joined=(plan.sequence,))]
    assert desk.turn(plan.finished(), *plan.freed()) == []
