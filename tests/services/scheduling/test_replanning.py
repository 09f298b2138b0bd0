"""Steps that ranks hear of shortly before they begin, and plans that are made again until then."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from random_executor import RandomCell
from scheduler_harness import LINK, MS, SECOND, SchedulerHarness, only, steps_of
from scripted_policies import Scripted

from csps.configurator.costs.cost_table import Costs, CostTable, Unmeasured
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.step_messages import PrefillStep
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.deciding.decisions import (
    Decision,
    DecodePlacement,
    PlannedChunk,
    PlannedStep,
    Replan,
    SchedulerView,
    StartPlan,
)
from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.events import instance_id
from csps.services.scheduling.policies.tetris.options import TetrisOptions
from csps.services.scheduling.policies.tetris.policy import Tetris

P0, P1, D0 = instance_id(1, 0), instance_id(1, 1), instance_id(2, 0)
AHEAD_NS = 200 * MS
SLOTS = 8000
"""Of both prefill instances."""


def step(group: tuple[int, ...], start: int, length: int, request: int = 1) -> PlannedStep:
    """A second on some instances, evenly."""
    bounds = tuple(length * index // len(group) for index in range(len(group) + 1))
    return PlannedStep(
        group=group,
        bounds=bounds,
        chunks=(PlannedChunk(request, start, length),),
        strategy="ring_kv",
        predicted_ns=SECOND,
    )


def plan(
    *steps: PlannedStep, request: int = 1, length: int = 500, ahead_ns: int = AHEAD_NS
) -> StartPlan:
    placement = DecodePlacement(request, (KvSlice(D0, 0, length),), D0)
    return StartPlan(steps=steps, decode=(placement,), ahead_ns=ahead_ns)


CHUNKS = plan(step((P0,), 0, 100), step((P0, P1), 100, 300), step((P0, P1), 400, 100))


class Seeing(Scripted):
    """What it is told, and what it sees."""

    def __init__(self, *decisions: Decision) -> None:
        super().__init__(*decisions)
        self.seen: list[tuple[int, int, list[int]]] = []
        """(sequence, version, starts of unsent chunks)."""

    def decide(self, view: SchedulerView) -> Sequence[Decision]:
        self.seen = [
            (
                request.id,
                request.plan.version,
                [unsent.command.step.chunks[0].start for unsent in request.plan.unsent],
            )  # type: ignore[union-attr]
            for request in view.planned
        ]
        return super().decide(view)


class Line(SchedulerHarness):
    """Return a scheduler whose policy decides what the test says."""

    def __init__(self, *decisions: Decision) -> None:
        self.policy = Seeing(*decisions)
        super().__init__(self.policy)  # type: ignore[arg-type]
        self.ready()

    def decide(self, *decisions: Decision) -> list[cmd.AnyCommand]:
        """What follows when the policy is asked again."""
        self.policy.decisions = decisions
        return self.turn(LINK)

    @property
    def taken(self) -> int:
        """Slots of the gang that prefills."""
        return round(self.scheduler.counts.prefill_kv * SLOTS)


def started(made: Line) -> tuple[int, PrefillStep]:
    """The request's sequence, and the one step that the ranks hear of."""
    commands = made.turn(made.submit(500, 10))
    (reserve,), (first,) = only(commands, cmd.Reserve), steps_of(commands)
    return reserve.message.sequence_id, first


def done(step: PrefillStep) -> list[ev.AnyEvent]:
    return [ev.StepDone(step_id=step.step_id, instance=at, took_ns=SECOND) for at in step.group]


def test_a_step_is_sent_shortly_before_it_begins() -> None:
    """Whether the one before it has been reported or not, which it is when its KV has left."""
    made = Line(CHUNKS)
    begin_ns = made.now_ns + MS
    _, first = started(made)
    assert first.group == (P0,)
    assert made.taken == 500
    second = sent_at(made, begin_ns + SECOND - AHEAD_NS)
    assert second.step.chunks[0].start == 100
    assert second.ends_ns == begin_ns + 2 * SECOND
    third = sent_at(made, begin_ns + 2 * SECOND - AHEAD_NS)
    assert third.step.chunks[0].history[0] == KvSlice(P0, 0, 100)


def sent_at(made: Line, time_ns: int) -> cmd.RunStep:
    """The one step that is sent at a time and not before."""
    assert only(made.wait(until_ns=time_ns - 1), cmd.RunStep) == []
    (run,) = only(made.wait(until_ns=time_ns), cmd.RunStep)
    return run


def test_a_step_whose_turn_has_come_early_is_sent_at_once() -> None:
    """And its end is predicted anew."""
    made = Line(CHUNKS)
    _, first = started(made)
    (second,) = only(made.turn(*done(first)), cmd.RunStep)
    assert second.step.chunks[0].start == 100
    assert second.ends_ns == made.now_ns + SECOND


def test_a_step_that_nothing_but_high_priority_steps_precede_is_sent_at_once() -> None:
    short = msgspec.structs.replace(step((P0,), 0, 500), high_priority=True)
    placement = DecodePlacement(1, (KvSlice(D0, 0, 500),), D0)
    made = Line(StartPlan(steps=(short,), decode=(placement,)))
    made.turn(made.submit(500, 10))
    made.policy.decisions = (plan(step((P0,), 0, 100, 2), step((P0,), 100, 400, 2), request=2),)
    (first,) = steps_of(made.turn(made.submit(500, 10)))
    assert first.chunks[0].start == 0


def test_a_step_is_not_sent_before_an_older_one_of_the_same_instance() -> None:
    """Although it is to be sent far ahead."""
    younger = plan(step((P1,), 0, 500, 2), request=2, ahead_ns=10 * SECOND)
    made = Line(plan(step((P0,), 0, 100), step((P1, P0), 100, 400)))
    begin_ns = made.now_ns + MS
    sequence, _ = started(made)
    made.policy.decisions = (younger,)
    assert only(made.turn(made.submit(500, 10)), cmd.RunStep) == []
    second, third = steps_of(made.wait(until_ns=begin_ns + SECOND - AHEAD_NS))
    assert second.chunks[0].sequence_id == sequence
    assert third.chunks[0].sequence_id == sequence + 1


THREE = plan(step((P0,), 0, 100), step((P0,), 100, 100), step((P0,), 200, 300))


def test_a_step_begins_no_sooner_than_it_was_sent() -> None:
    """The one before it was computed in half a second, but reported after the next was sent."""
    made = Line(THREE)
    begin_ns = made.now_ns + MS
    _, first = started(made)
    second = sent_at(made, begin_ns + SECOND - AHEAD_NS)
    sent_ns = made.now_ns
    made.turn(ev.StepDone(step_id=first.step_id, instance=P0, took_ns=SECOND // 2))
    third = sent_at(made, sent_ns + SECOND - AHEAD_NS)
    assert [it.step.chunks[0].start for it in (second, third)] == [100, 200]


def test_steps_behind_a_late_one_are_sent_later() -> None:
    """When another step is reported, the first one is half a second late."""
    placement = DecodePlacement(2, (KvSlice(D0, 0, 500),), D0)
    other = StartPlan(steps=(step((P1,), 0, 500, 2),), decode=(placement,))
    made = Line(THREE, other)
    begin_ns = made.now_ns + MS
    commands = made.turn(made.submit(500, 10), made.submit(500, 10))
    beside, _ = steps_of(commands)
    assert beside.group == (P1,)
    assert len(only(made.wait(until_ns=begin_ns + 3 * SECOND // 2 - MS), cmd.RunStep)) == 1
    token = ev.FirstToken(sequence_id=beside.chunks[0].sequence_id)
    made.turn(token, ev.StepDone(step_id=beside.step_id, instance=P1, took_ns=SECOND // 2))
    third = sent_at(made, begin_ns + 5 * SECOND // 2 - AHEAD_NS)
    assert third.step.chunks[0].start == 200


def test_a_step_begins_when_all_before_it_were_computed() -> None:
    """The one that is reported last was computed first."""
    plans = [
        StartPlan(
            steps=(step(group, 0, 500, number),),
            decode=(DecodePlacement(number, (KvSlice(D0, 0, 500),), D0),),
        )
        for number, group in enumerate([(P0,), (P1,), (P0, P1), (P0,)], 1)
    ]
    made = Line(*plans[:3])
    began_ns = made.now_ns + MS
    steps = steps_of(made.turn(*[made.submit(500, 10) for _ in range(3)]))
    tokens = [ev.FirstToken(sequence_id=it.chunks[0].sequence_id) for it in steps]
    made.turn(tokens[0], *done(steps[0]), after_ns=SECOND)
    late = ev.StepDone(step_id=steps[1].step_id, instance=P1, took_ns=SECOND // 2)
    made.turn(tokens[1], late, after_ns=SECOND // 5)
    made.policy.decisions = (plans[3],)
    (behind,) = only(made.turn(made.submit(500, 10)), cmd.RunStep)
    assert behind.ends_ns == began_ns + 3 * SECOND


def test_what_no_rank_has_heard_of_is_planned_again() -> None:
    """The new steps' slots are taken first; then the old ones' come back."""
    made = Line(CHUNKS)
    sequence, first = started(made)
    rest = step((P1, P0), 100, 400)
    assert not steps_of(made.decide(Replan(sequence_id=sequence, version=0, steps=(rest,))))
    assert made.taken == 500
    (second,) = steps_of(made.turn(*done(first)))
    assert (second.group, second.chunks[0].length) == ((P1, P0), 400)
    assert second.chunks[0].history == (KvSlice(P0, 0, 100),)
    made.turn(ev.FirstToken(sequence_id=sequence), *done(second))
    assert made.taken == 0


def test_a_new_plan_begins_without_the_time_of_the_old_one() -> None:
    made = Line(CHUNKS)
    begin_ns = made.now_ns + MS
    sequence, _ = started(made)
    made.decide(Replan(sequence_id=sequence, version=0, steps=(step((P1, P0), 100, 400),)))
    rest = sent_at(made, begin_ns + SECOND - AHEAD_NS)
    assert rest.ends_ns == begin_ns + 2 * SECOND


def test_a_plan_that_stays_is_measured_from_now_on() -> None:
    made = Line(CHUNKS)
    sequence, _ = started(made)
    made.decide(Replan(sequence_id=sequence, version=0, steps=()))
    made.decide()
    assert made.policy.seen == [(sequence, 1, [100, 400])]


def test_a_new_plan_keeps_its_place_in_the_line() -> None:
    """Before a younger request that is not sent yet either, wherever it goes now."""
    younger = plan(step((P1,), 0, 100, 2), step((P1,), 100, 400, 2), request=2)
    made = Line(CHUNKS)
    sequence, first = started(made)
    made.policy.decisions = (younger,)
    made.turn(made.submit(500, 10))
    rest = step((P0,), 100, 300), step((P0, P1), 400, 100)
    made.decide(Replan(sequence_id=sequence, version=0, steps=rest))
    assert [number for number, *_ in made.policy.seen] == [sequence, sequence + 1]
    sent = [first]
    while len(sent) < 5 and made.now_ns < 60 * SECOND:
        commands = made.turn(*done(sent[-1]))
        sent += steps_of(commands) or steps_of(made.wait())
    order = [(step.chunks[0].sequence_id - sequence, step.chunks[0].start) for step in sent]
    assert order == [(0, 0), (0, 100), (0, 400), (1, 0), (1, 100)]


def test_who_leaves_between_chunks_gives_everything_back() -> None:
    made = Line(CHUNKS)
    _, first = started(made)
    commands = made.turn(ev.RequestCancelled(request_id=1))
    assert [type(command) for command in commands] == [cmd.Cancel]
    made.turn(*done(first))
    assert made.taken == 0
    assert made.policy.seen == []


def test_younger_steps_move_up_when_a_sequence_leaves() -> None:
    younger = plan(step((P1,), 0, 500, 2), request=2)
    made = Line(CHUNKS)
    started(made)
    made.policy.decisions = (younger,)
    assert only(made.turn(made.submit(500, 10)), cmd.RunStep) == []
    (moved_up,) = only(made.turn(ev.RequestCancelled(request_id=1)), cmd.RunStep)
    assert moved_up.step.group == (P1,)
    assert moved_up.ends_ns == made.now_ns + SECOND


def test_a_gang_that_dies_takes_what_was_not_sent_along() -> None:
    made = Line(CHUNKS)
    started(made)
    commands = made.turn(ev.GangDown(gang=1, reason="died"))
    assert len(only(commands, cmd.Restart)) == 1
    made.wait(until_ns=made.now_ns + 10 * SECOND)
    assert made.scheduler.counts.waiting == 1


def test_who_was_told_nothing_is_not_silent() -> None:
    """A step far off in the line of an instance that has nothing else to do."""
    made = Line(plan(step((P0,), 0, 100), step((P0, P1), 100, 400)))
    _, first = started(made)
    del first
    limit_ns = 180 * SECOND
    made.decide()
    heard = [made.turn(ev.Heartbeat(instances=(P0,)), after_ns=limit_ns // 4) for _ in range(3)]
    assert not [command for commands in heard for command in only(commands, cmd.ResetGang)]


WRONG: list[tuple[dict[str, object], str]] = [
    ({"version": 1}, "replan of version 1, present is 0"),
    ({"steps": (step((P0, P1), 100, 300),)}, "not the whole prompt"),
    ({"steps": (step((P0, P1), 0, 500),)}, "out of order"),
    ({"steps": (step((P1,), 100, 400),)}, "outside of the group"),
    ({"steps": (step((P0, D0), 100, 400),)}, "another gang"),
    ({"steps": (step((P0, P1), 100, 400, 2),)}, "chunks of other requests than 1"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_a_rest_that_is_not_sound_changes_nothing(changes: dict[str, object], message: str) -> None:
    made = Line(CHUNKS)
    sequence, _ = started(made)
    sound = Replan(sequence_id=sequence, version=0, steps=(step((P0, P1), 100, 400),))
    with pytest.raises(AssertionError, match=message):
        made.decide(msgspec.structs.replace(sound, **changes))
    assert made.taken == 500


def test_a_rest_without_slots_beside_the_old_one_is_refused() -> None:
    made = Line(plan(step((P0,), 0, 100), step((P0, P1), 100, 5900), length=6000))
    commands = made.turn(made.submit(6000, 10))
    (reserve,) = only(commands, cmd.Reserve)
    rest = step((P0, P1), 100, 5900)
    with pytest.raises(AssertionError, match="slots of"):
        made.decide(Replan(sequence_id=reserve.message.sequence_id, version=0, steps=(rest,)))


class Counting(Tetris):
    """Counts the plans that it makes again."""

    made_again = 0

    def decide(self, view: SchedulerView) -> Sequence[Decision]:
        decisions = super().decide(view)
        self.made_again += sum(
            1 for decision in decisions if isinstance(decision, Replan) and decision.steps
        )
        return decisions


def test_plans_are_made_again_in_storms() -> None:
    """With faults and cancellations between chunks, and the books checked at every turn."""
    made_again = 0
    for seed in range(30):
        options = TetrisOptions(
            improvement_rate=0.05, min_chunk=1, replan_share=0.01, launch_ahead_s=0
        )
        policy = Counting(options)
        scheduler = Scheduler(policy, Costs(CostTable(latencies=Unmeasured())))
        RandomCell(scheduler, seed, faults=0.1).play(requests=30, turns=120)
        made_again += policy.made_again
    assert made_again > 10
