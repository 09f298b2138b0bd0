"""A sequence that is moved while it ends: instances tell in any order, and every slot comes back.

It is decoded by instances 0 and 1 of an elastic gang, and moved to 1 and 2.
"""

from __future__ import annotations

from random_executor import gang_up
from scheduler_harness import SchedulerHarness, Sent, messages
from scripted_policies import OneMove

from csps.protocols.gang.step_messages import MoveSequence
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.events import instance_id

FIRST, SECOND, THIRD = (instance_id(1, index) for index in range(3))
PROMPT, OUTPUT = 10, 6


def decoding() -> tuple[SchedulerHarness, Sent]:
    harness = SchedulerHarness(OneMove())  # type: ignore[arg-type]
    harness.turn(gang_up(1, [100] * 3, prefill=True, decode=True))
    plan = harness.start(PROMPT, OUTPUT)
    harness.turn(*plan.joined())
    return harness, plan


def moving() -> tuple[SchedulerHarness, Sent]:
    harness, plan = decoding()
    (move,) = messages(harness.turn(harness.submit()), MoveSequence)
    assert move.sequence_id == plan.sequence
    return harness, plan


def used(harness: SchedulerHarness) -> list[int]:
    gang = harness.scheduler._gangs.by_id[1]
    return [instance.used for instance in gang.instances]


def freed(plan: Sent, *instances: int) -> list[ev.AnyEvent]:
    return [ev.Freed(sequence_id=plan.sequence, instance=instance) for instance in instances]


def test_moving_sequence_has_slots_in_both_places() -> None:
    harness, plan = decoding()
    assert used(harness) == [5 + OUTPUT, 5, 0]
    harness.turn(harness.submit())
    assert used(harness) == [5 + OUTPUT, 10, OUTPUT]
    harness.turn(ev.Moved(sequence_id=plan.sequence))
    assert used(harness) == [0, 10, OUTPUT]


def test_instance_that_frees_before_the_move_is_reported_frees_once() -> None:
    harness, plan = moving()
    harness.turn(*freed(plan, SECOND))
    harness.turn(ev.Moved(sequence_id=plan.sequence))
    harness.turn(plan.finished(OUTPUT))
    assert used(harness) == [0, 0, OUTPUT]
    harness.turn(*freed(plan, THIRD))
    assert used(harness) == [0, 0, 0]


def test_slots_left_by_a_move_are_free_after_a_cancel_in_the_same_round() -> None:
    harness, plan = moving()
    harness.turn(ev.RequestCancelled(request_id=plan.request), ev.Moved(sequence_id=plan.sequence))
    assert used(harness) == [0, 10, OUTPUT]
    harness.turn(*freed(plan, SECOND, THIRD))
    assert used(harness) == [0, 0, 0]


def test_sequence_that_an_instance_has_freed_is_not_moved() -> None:
    """The event of the last token is under way."""
    harness, plan = decoding()
    harness.turn(*freed(plan, SECOND))
    assert not messages(harness.turn(harness.submit()), MoveSequence)
    harness.turn(plan.finished(OUTPUT))
    harness.turn(*freed(plan, FIRST))
    assert used(harness) == [0, 0, 0]
