"""States of a request on gangs that work: what leads to the next, and what is given back."""

from __future__ import annotations

import pytest
from scheduler_harness import LINK, MS, SECOND, SMALL, Desk, Sent, only, sent

from csps.services.scheduling.deciding.decisions import Policy
from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.events import COUNTER_BITS
from csps.services.scheduling.state.state import GangPair


def reserved(desk: Desk) -> float:
    return desk.scheduler.counts.decode_kv


def test_a_request_runs_from_submission_to_its_last_token() -> None:
    desk = Desk().ready()
    commands = desk.turn(desk.submit(prompt=3000, output=10))
    assert [type(command) for command in commands] == [cmd.Reserve, cmd.RunStep]
    plan = sent(commands)
    assert plan.step.chunks == (cmd.Chunk(plan.sequence, 0, 3000),)
    assert plan.step.bounds == (0, 1500, 3000)
    assert plan.step.history == ((),)
    assert (plan.step.strategy, plan.step.cls, plan.step.high_priority) == (
        "ulysses",
        "exact",
        False,
    )
    assert [(kv_slice.start, kv_slice.stop) for kv_slice in plan.reserve.slices] == [
        (0, 1500),
        (1500, 3000),
    ]
    assert desk.scheduler.counts.running == 1
    assert desk.turn(plan.first_token, *plan.steps_done()) == []
    assert desk.turn(*plan.landed()) == [cmd.SetGroup(gang=2, joined=(plan.sequence,))]
    assert desk.turn(plan.finished()) == []
    assert desk.scheduler.counts.running == 0
    assert reserved(desk) == 3010 / 18000
    assert desk.turn(*plan.freed()) == []
    assert desk.scheduler.counts == (0, 0, 0.0, 0.0)
    assert desk.wake_at_ns is None or desk.wait(until_ns=desk.now_ns + 10**12) == []


def test_a_step_ends_when_those_before_it_have_ended() -> None:
    """As predicted: a token takes as long as it takes, shared by the group."""
    desk = Desk().ready()
    alone = desk.start(3000).step
    behind = desk.start(3000).step
    predicted_ns = alone.ends_ns - (desk.now_ns - MS)
    assert behind.ends_ns == alone.ends_ns + predicted_ns
    short = desk.start(50).step
    assert short.high_priority
    assert desk.now_ns < short.ends_ns < alone.ends_ns


def test_ids_contain_the_highest_generation_and_never_come_again() -> None:
    desk = Desk()
    desk.turn(desk.prefill(generation=7), desk.decode(generation=3), LINK)
    plans = [desk.start() for _ in range(3)]
    assert {plan.sequence >> COUNTER_BITS for plan in plans} == {7}
    assert {plan.step.step_id >> COUNTER_BITS for plan in plans} == {7}
    assert len({plan.sequence for plan in plans}) == len({plan.step.step_id for plan in plans}) == 3
    assert [plan.step.step_id for plan in plans] == sorted(plan.step.step_id for plan in plans)


def test_slots_are_reserved_before_the_step_that_fills_them() -> None:
    desk = Desk()
    commands = desk.turn(
        desk.prefill(), desk.decode(), LINK, *[desk.submit(prompt=50) for _ in range(4)]
    )
    seen: set[int] = set()
    for command in commands:
        if isinstance(command, cmd.Reserve):
            seen.add(command.sequence_id)
        elif isinstance(command, cmd.RunStep):
            assert {chunk.sequence_id for chunk in command.chunks} <= seen
    assert len(seen) == 4


def test_the_time_to_reserve_grows_with_the_prompt() -> None:
    desk = Desk().ready()
    short, long = desk.start(50), desk.start(3000)
    begin_ns = dict.fromkeys((short, long), desk.now_ns)
    begin_ns[short] -= MS
    waits = [it.reserve.deadline_ns - begin_ns[it] for it in (short, long)]
    assert waits == [10_000 * MS + 50 * 10_000, 10_000 * MS + 3000 * 10_000]


def test_decode_takes_over_when_all_kv_has_landed_and_not_before() -> None:
    desk = Desk().ready()
    plan = desk.start(3000)
    first, second = plan.landed()
    assert desk.turn(first) == []
    assert desk.turn(second) == []
    assert desk.turn(plan.first_token) == [cmd.SetGroup(gang=2, joined=(plan.sequence,))]


def test_all_that_join_in_a_turn_join_with_one_command() -> None:
    desk = Desk().ready()
    plans = [desk.start() for _ in range(3)]
    commands = desk.turn(*[event for plan in plans for event in plan.joined()])
    assert commands == [cmd.SetGroup(gang=2, joined=tuple(plan.sequence for plan in plans))]


def test_an_answer_that_ends_early_frees_the_reservation_by_cancelling_it() -> None:
    desk = Desk().ready()
    plan = desk.start()
    commands = desk.turn(*plan.landed(), plan.first_token, plan.finished(1))
    assert commands == [cmd.Cancel(sequence_id=plan.sequence, gangs=(2,))]
    desk.turn(*plan.freed())
    assert reserved(desk) == 0


def test_an_answer_of_one_token_reserves_nothing_where_others_are_decoded() -> None:
    desk = Desk().ready()
    plan = desk.start(output=1)
    assert plan.reserve.slices == ()
    assert reserved(desk) == 0
    desk.scheduler.check_invariants()
    assert desk.turn(plan.finished(1), *plan.steps_done()) == []
    assert desk.scheduler.counts == (0, 0, 0.0, 0.0)


def test_the_last_token_of_an_answer_that_starts_over_reserves_nothing() -> None:
    desk = Desk().ready()
    plan = desk.start(output=10)
    desk.turn(*plan.joined())
    desk.turn(plan.failed(drawn=9))
    desk.turn(*plan.freed())
    again = only(desk.wait(until_ns=desk.now_ns + SECOND), cmd.Reserve)
    assert [(it.prompt_tokens, it.output_tokens, it.slices) for it in again] == [(509, 1, ())]


def test_prefill_slots_come_back_instance_by_instance() -> None:
    desk = Desk().ready()
    plan = desk.start(3000)
    first, second = plan.steps_done()
    desk.turn(plan.first_token, first)
    assert desk.scheduler.counts.prefill_kv == 1500 / 8000
    desk.turn(second)
    assert desk.scheduler.counts.prefill_kv == 0


def test_what_is_told_twice_counts_once() -> None:
    desk = Desk().ready()
    plan = desk.start(3000)
    events = plan.joined()
    desk.turn(*events)
    assert desk.turn(*plan.steps_done(), plan.finished(), plan.finished()) == []
    desk.turn(*plan.freed(), *plan.freed(), *plan.steps_done())
    assert desk.scheduler.counts == (0, 0, 0.0, 0.0)


def test_a_request_waits_for_slots_until_they_come_back() -> None:
    desk = Desk()
    desk.turn(desk.prefill(1, 4000), desk.decode(2, 600), LINK)
    first = desk.start(500)
    assert desk.turn(desk.submit(500)) == []
    assert desk.scheduler.counts.waiting == 1
    desk.turn(*first.joined(), first.finished())
    second = sent(desk.turn(*first.freed()))
    assert second.request == 2


# --- cancelled -----------------------------------------------------------------------------


def test_cancelled_in_the_queue() -> None:
    desk = Desk()
    submitted = desk.submit()
    desk.turn(submitted)
    assert desk.turn(ev.RequestCancelled(request_id=submitted.request_id)) == []
    assert desk.scheduler.counts == (0, 0, 0.0, 0.0)
    assert desk.turn(desk.prefill(), desk.decode(), LINK) == []


def test_a_request_that_leaves_the_line_lets_the_next_one_pass() -> None:
    desk = Desk()
    desk.turn(desk.prefill(), desk.decode(2, 3000), LINK)
    holder = desk.start(1000)
    blocked, next_one = desk.submit(2500), desk.submit(1500)
    assert desk.turn(blocked, next_one) == []
    plan = sent(desk.turn(ev.RequestCancelled(request_id=blocked.request_id)))
    assert plan.request == next_one.request_id
    assert holder.sequence != plan.sequence


@pytest.mark.parametrize(
    ("told", "gangs"),
    [
        ("nothing", (1, 2)),
        ("first token", (1, 2)),
        ("landed", (1, 2)),
        ("step done", (1, 2)),
        ("joined", (2,)),
    ],
)
def test_cancelled_at_work_gives_slots_back_when_the_ranks_say_so(
    told: str, gangs: tuple[int, ...]
) -> None:
    desk = Desk().ready()
    plan = desk.start(3000)
    events: dict[str, list[ev.AnyEvent]] = {
        "nothing": [],
        "first token": [plan.first_token],
        "landed": plan.landed(),
        "step done": plan.prefilled(),
        "joined": plan.joined(),
    }
    desk.turn(*events[told])
    commands = desk.turn(ev.RequestCancelled(request_id=plan.request))
    assert commands == [cmd.Cancel(sequence_id=plan.sequence, gangs=gangs)]
    assert desk.turn(ev.RequestCancelled(request_id=plan.request)) == []
    assert desk.scheduler.counts.running == 0
    assert reserved(desk) > 0
    desk.turn(*plan.freed(), *plan.steps_done())
    assert desk.scheduler.counts == (0, 0, 0.0, 0.0)


def test_one_of_a_batch_is_cancelled() -> None:
    desk = Desk()
    requests = [desk.submit(prompt=50), desk.submit(prompt=40)]
    commands = desk.turn(desk.prefill(1, 4000), desk.decode(), LINK, *requests)
    (step,), (one, other) = only(commands, cmd.RunStep), only(commands, cmd.Reserve)
    assert [chunk.length for chunk in step.chunks] == [50, 40]
    assert desk.turn(ev.RequestCancelled(request_id=one.request_id)) == [
        cmd.Cancel(sequence_id=one.sequence_id, gangs=(1, 2))
    ]
    left = Sent(other, step)
    assert desk.turn(*left.joined()) == [cmd.SetGroup(gang=2, joined=(other.sequence_id,))]
    desk.turn(left.finished(), *left.freed(), *Sent(one, step).freed())
    assert desk.scheduler.counts == (0, 0, 0.0, 0.0)


def test_cancelled_when_everything_has_just_landed() -> None:
    desk = Desk().ready()
    plan = desk.start()
    commands = desk.turn(*plan.joined(), ev.RequestCancelled(request_id=plan.request))
    assert commands == [cmd.Cancel(sequence_id=plan.sequence, gangs=(1, 2))]


# --- asking the policy ---------------------------------------------------------------------


class Counted:
    """A policy that starts nothing and counts how often it is asked."""

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


def test_the_policy_is_asked_once_a_turn_and_only_when_something_has_changed() -> None:
    from csps.services.scheduling.policies.registry import make_policy

    policy = Counted(make_policy("csps"))
    desk = Desk(policy)  # type: ignore[arg-type]
    desk.turn(desk.submit(), desk.submit())
    assert policy.asked == 0  # no gangs
    desk.turn(desk.prefill(), desk.decode(), LINK)
    assert policy.asked == 1
    desk.turn(ev.Heartbeat(instances=(65536,)))
    desk.turn()
    desk.turn(ev.Wake())
    assert policy.asked == 1
    desk.turn(desk.submit(), desk.submit(), ev.RequestCancelled(request_id=1))
    assert policy.asked == 2


def test_a_round_that_is_due_and_finds_nobody_does_not_wake_for_ever() -> None:
    """The rest of a line that was longer than one round has gone, or its gangs have."""
    from csps.services.scheduling.policies.registry import make_policy

    desk = Desk(make_policy("csps", {**SMALL, "most_starts": 1})).ready()
    first = sent(desk.turn(desk.submit(50), desk.submit(50)))
    assert desk.wake_at_ns == desk.now_ns
    desk.turn(ev.RequestCancelled(request_id=2))
    assert desk.wake_at_ns != desk.now_ns
    desk.turn(first.finished(), *first.steps_done(), *first.freed())
    assert desk.wake_at_ns is None
    sent(desk.turn(desk.submit(50), desk.submit(50), desk.submit(50)))
    assert desk.wake_at_ns == desk.now_ns
    desk.turn(ev.GangDown(gang=1, reason="as the test says"))
    assert desk.wake_at_ns is not None
    assert desk.wake_at_ns > desk.now_ns
