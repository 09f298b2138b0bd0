"""A sequence that is moved while it ends: instances tell in any order, and every slot comes back.

It is decoded by instances 0 and 1 of an elastic gang, and moved to 1 and 2.
"""

from __future__ import annotations

from random_executor import gang_up
from scheduler_harness import Desk, Sent, only
from scripted_policies import OneMove

from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.events import instance_id

FIRST, SECOND, THIRD = (instance_id(1, index) for index in range(3))
PROMPT, OUTPUT = 10, 6


def decoding() -> tuple[Desk, Sent]:
    desk = Desk(OneMove())  # type: ignore[arg-type]
    desk.turn(gang_up(1, [100] * 3, prefill=True, decode=True))
    plan = desk.start(PROMPT, OUTPUT)
    desk.turn(*plan.joined())
    return desk, plan


def moving() -> tuple[Desk, Sent]:
    desk, plan = decoding()
    (move,) = only(desk.turn(desk.submit()), cmd.MoveKv)
    assert move.sequence_id == plan.sequence
    return desk, plan


def used(desk: Desk) -> list[int]:
    gang = desk.scheduler._gangs.by_id[1]
    return [instance.used for instance in gang.instances]


def freed(plan: Sent, *instances: int) -> list[ev.AnyEvent]:
    return [ev.Freed(sequence_id=plan.sequence, instance=instance) for instance in instances]


def test_it_has_slots_in_both_places_until_it_has_moved() -> None:
    desk, plan = decoding()
    assert used(desk) == [5 + OUTPUT, 5, 0]
    desk.turn(desk.submit())
    assert used(desk) == [5 + OUTPUT, 10, OUTPUT]
    desk.turn(ev.Moved(sequence_id=plan.sequence))
    assert used(desk) == [0, 10, OUTPUT]


def test_who_has_freed_it_before_others_say_that_it_has_moved_frees_it_once() -> None:
    desk, plan = moving()
    desk.turn(*freed(plan, SECOND))
    desk.turn(ev.Moved(sequence_id=plan.sequence))
    desk.turn(plan.finished(OUTPUT))
    assert used(desk) == [0, 0, OUTPUT]
    desk.turn(*freed(plan, THIRD))
    assert used(desk) == [0, 0, 0]


def test_what_it_has_left_is_free_though_it_was_cancelled_in_the_same_turn() -> None:
    desk, plan = moving()
    desk.turn(ev.RequestCancelled(request_id=plan.request), ev.Moved(sequence_id=plan.sequence))
    assert used(desk) == [0, 10, OUTPUT]
    desk.turn(*freed(plan, SECOND, THIRD))
    assert used(desk) == [0, 0, 0]


def test_nothing_is_moved_of_what_an_instance_has_freed() -> None:
    """Its last token is on its way."""
    desk, plan = decoding()
    desk.turn(*freed(plan, SECOND))
    assert not only(desk.turn(desk.submit()), cmd.MoveKv)
    desk.turn(plan.finished(OUTPUT))
    desk.turn(*freed(plan, FIRST))
    assert used(desk) == [0, 0, 0]
