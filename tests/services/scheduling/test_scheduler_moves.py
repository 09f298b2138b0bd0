"""A sequence that is moved while it ends: instances tell in any order, and every slot comes back.

It is decoded by instances 0 and 1 of an elastic gang, and moved to 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from random_executor import gang_up
from scheduler_harness import SchedulerHarness, Sent, messages
from scripted_policies import OneMove

from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.step_messages import MoveSequence
from csps.services.scheduling.deciding.decisions import DecodePlacement, MovePlan
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


def mastered(harness: SchedulerHarness) -> list[int]:
    gang = harness.scheduler._gangs.by_id[1]
    assert gang.mastered == sum(instance.mastered for instance in gang.instances)
    return [instance.mastered for instance in gang.instances]


def test_move_names_the_placement_that_the_policy_chose() -> None:
    harness, plan = decoding()
    (move,) = messages(harness.turn(harness.submit()), MoveSequence)
    assert (move.sequence_id, move.before.master, move.after.master) == (
        plan.sequence, FIRST, THIRD,
    )  # fmt: skip
    assert positions(move.after.slices) == dict.fromkeys(range(PROMPT), SECOND)
    assert positions(move.after.answer) == dict.fromkeys(range(PROMPT, PROMPT + OUTPUT), THIRD)


def positions(slices: Iterable[KvSlice]) -> dict[int, int]:
    return {position: part.instance for part in slices for position in part.span.positions}


def test_moved_sequence_is_sampled_by_its_new_master() -> None:
    harness, plan = moving()
    assert mastered(harness) == [1, 0, 0]
    harness.turn(ev.Moved(sequence_id=plan.sequence))
    assert mastered(harness) == [0, 0, 1]
    (sequence,) = harness.scheduler._gangs.by_id[1].decoding.values()
    assert sequence.master_id == THIRD
    assert positions(sequence.slices) == dict.fromkeys(range(PROMPT), SECOND)
    assert positions(sequence.answer) == dict.fromkeys(range(PROMPT, PROMPT + OUTPUT), THIRD)


def test_sequence_is_moved_again_only_when_it_has_moved() -> None:
    harness, plan = moving()
    (sequence,) = harness.scheduler._gangs.by_id[1].decoding.values()
    back = DecodePlacement(
        plan.request, sequence.slices, FIRST, (KvSlice(FIRST, PROMPT, PROMPT + OUTPUT),)
    )
    policy = harness.scheduler._policy
    policy.decide = lambda view: [MovePlan(sequence_id=plan.sequence, placement=back)]  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=f"sequence {plan.sequence} is moving already"):
        harness.turn(harness.submit())
    (again,) = messages(harness.turn(ev.Moved(sequence_id=plan.sequence)), MoveSequence)
    assert (again.before.master, again.after.master) == (THIRD, FIRST)
    policy.decide = lambda view: []  # type: ignore[method-assign]
    harness.turn(ev.Moved(sequence_id=plan.sequence), plan.finished(OUTPUT))
    assert used(harness) == [5 + OUTPUT, 5, 0]


def test_two_moves_of_one_sequence_in_one_round_are_refused_before_either_begins() -> None:
    harness, plan = decoding()
    policy = harness.scheduler._policy
    once = policy.decide
    policy.decide = lambda view: list(once(view)) * 2  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=f"two moves of sequence {plan.sequence}"):
        harness.turn(harness.submit())
    assert used(harness) == [5 + OUTPUT, 5, 0]


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
