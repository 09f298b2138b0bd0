"""Plans of several steps: a prompt in chunks, the slots of all of them reserved at once."""

from __future__ import annotations

import msgspec
import pytest
from scheduler_harness import SchedulerHarness, only, steps_of
from scripted_policies import Scripted

from csps.protocols.core.placement import KvSlice
from csps.services.scheduling.deciding.decisions import (
    Decision,
    DecodePlacement,
    PlannedChunk,
    PlannedStep,
    StartPlan,
    WakeAt,
)
from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.events import instance_id

P0, P1, D0, D1 = (instance_id(gang, index) for gang in (1, 2) for index in (0, 1))


def step(group: tuple[int, ...], bounds: tuple[int, ...], *chunks: PlannedChunk) -> PlannedStep:
    return PlannedStep(
        group=group, bounds=bounds, chunks=chunks, strategy="ring_kv", predicted_ns=1000
    )


CHUNKS = StartPlan(
    steps=(
        step((P0,), (0, 100), PlannedChunk(1, 0, 100)),
        step((P1, P0), (0, 150, 300), PlannedChunk(1, 100, 300)),
        step((P0, P1), (0, 10, 200), PlannedChunk(1, 400, 100), PlannedChunk(2, 0, 100)),
    ),
    decode=(
        DecodePlacement(1, (KvSlice(D0, 0, 500),), D0),
        DecodePlacement(2, (KvSlice(D0, 0, 100),), D0),
    ),
)


def scripted(*decisions: Decision) -> SchedulerHarness:
    made = SchedulerHarness(Scripted(*decisions))  # type: ignore[arg-type]
    made.ready()
    return made


def submitted(made: SchedulerHarness) -> list[cmd.AnyCommand]:
    return made.turn(made.submit(500, 10), made.submit(100, 10))


def test_later_chunks_know_where_the_kv_of_earlier_ones_lies() -> None:
    commands = submitted(scripted(CHUNKS))
    first, second, third = steps_of(commands)
    first_id, two = (reserve.message.sequence_id for reserve in only(commands, cmd.Reserve))
    assert first.chunks[0].history == ()
    assert second.chunks[0].history == (KvSlice(P0, 0, 100),)
    history = (
        KvSlice(P0, 0, 100),
        KvSlice(P1, 100, 250),
        KvSlice(P0, 250, 400),
    )
    assert [(chunk.sequence_id, chunk.start, chunk.length) for chunk in third.chunks] == [
        (first_id, 400, 100),
        (two, 0, 100),
    ]
    assert [chunk.history for chunk in third.chunks] == [history, ()]
    assert [chunk.last for chunk in third.chunks] == [True, True]
    assert [type(command) for command in commands] == [cmd.Reserve] * 2 + [cmd.RunStep] * 3


def test_kv_with_another_holder_is_history_there_and_takes_slots_there() -> None:
    """Striped rows that the second instance keeps, then all of it kept by turns."""
    striped = (KvSlice(P0, 0, 99, 2), KvSlice(P1, 1, 100, 2))
    turns = (KvSlice(P0, 0, 499, 2), KvSlice(P1, 1, 500, 2))
    moved = PlannedChunk(1, 0, 100, striped, (KvSlice(P1, 0, 100),))
    plan = StartPlan(
        steps=(
            step((P0, P1), (0, 50, 100), moved),
            step((P0, P1), (0, 400, 400), PlannedChunk(1, 100, 400, (), turns)),
        ),
        decode=(DecodePlacement(1, (KvSlice(D0, 0, 500),), D0),),
    )
    made = scripted(plan)
    first, second = steps_of(made.turn(made.submit(500, 10)))
    assert first.chunks[0].rows == striped
    assert second.chunks[0].history == (KvSlice(P1, 0, 100),)
    assert second.chunks[0].placement == turns
    # 50 computed and 50 + 50 kept; then 400 computed, 50 that come back and 200 that are kept.
    assert made.scheduler.counts.prefill_kv == (50 + 100 + 400 + 50 + 200) / 8000


def test_holders_of_an_answer_have_its_slots() -> None:
    made = SchedulerHarness(
        Scripted(changed(answer=(KvSlice(D0, 500, 509, 2), KvSlice(D1, 501, 510, 2))))
    )  # type: ignore[arg-type]
    made.ready()
    (reserve,) = only(made.turn(made.submit(500, 10)), cmd.Reserve)
    assert reserve.message.answer[1] == KvSlice(D1, 501, 510, 2)
    freed = [
        ev.Freed(sequence_id=reserve.message.sequence_id, instance=instance)
        for instance in (D0, D1)
    ]
    made.turn(ev.RequestCancelled(request_id=1))
    made.turn(freed[0])
    assert made.scheduler.counts.decode_kv == 5 / 18_000
    made.turn(freed[1])
    assert made.scheduler.counts.decode_kv == 0


def test_slots_of_all_chunks_are_taken_until_the_last_is_computed() -> None:
    made = scripted(CHUNKS)
    commands = submitted(made)
    steps = steps_of(commands)
    first_id, two = (reserve.message.sequence_id for reserve in only(commands, cmd.Reserve))
    done = [
        ev.StepDone(step_id=step.step_id, instance=instance, took_ns=10)
        for step in steps
        for instance in step.group
    ]
    for event in done[:-1]:
        assert made.turn(event) == []
        assert made.scheduler.counts.prefill_kv == 600 / 8000
    made.turn(ev.FirstToken(sequence_id=first_id), ev.FirstToken(sequence_id=two), done[-1])
    assert made.scheduler.counts.prefill_kv == 0


def test_missing_first_token_is_an_error_only_after_the_last_chunk() -> None:
    made = scripted(CHUNKS)
    steps = steps_of(submitted(made))
    done = [
        ev.StepDone(step_id=step.step_id, instance=instance, took_ns=10)
        for step in steps
        for instance in step.group
    ]
    assert made.turn(*done[:-1]) == []
    assert len(only(made.turn(done[-1]), cmd.Restart)) == 2


def test_gang_that_dies_between_chunks_frees_all_slots() -> None:
    made = scripted(CHUNKS)
    commands = submitted(made)
    first = steps_of(commands)[0]
    made.turn(ev.StepDone(step_id=first.step_id, instance=P0, took_ns=10))
    commands = made.turn(ev.GangDown(gang=1, reason="died"))
    assert len(only(commands, cmd.Restart)) == 2
    assert made.scheduler.counts.waiting == 2


# --- decisions that are not sound --------------------------------------------------------------


def changed(**changes: object) -> StartPlan:
    """Make a plan of one step for request 1, with something wrong."""
    sound = {
        "group": (P0, P1),
        "bounds": (0, 250, 500),
        "chunks": (PlannedChunk(1, 0, 500),),
        "slices": (KvSlice(D0, 0, 500),),
        "master": D0,
        **changes,
    }
    planned = step(sound["group"], sound["bounds"], *sound["chunks"])  # type: ignore[arg-type,misc]
    answer = sound.get("answer", ())
    placement = DecodePlacement(1, sound["slices"], sound["master"], answer)  # type: ignore[arg-type]
    return StartPlan(steps=(planned,), decode=(placement,))


def with_rows(*rows: KvSlice) -> StartPlan:
    return changed(chunks=(PlannedChunk(1, 0, 500, rows),))


def keeping(*keep: KvSlice) -> StartPlan:
    return changed(chunks=(PlannedChunk(1, 0, 500, (), keep),))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (changed(group=(P0, P0)), "group and bounds"),
        (changed(bounds=(0, 500)), "group and bounds"),
        (changed(bounds=(1, 250, 500)), "first token"),
        (changed(bounds=(0, 250, 499)), "bounds miss tokens"),
        (changed(bounds=(0, 0, 500)), "computes and stores nothing"),
        (changed(group=(P0, D0)), "another gang"),
        (changed(group=(D0,), bounds=(0, 500)), "no pair"),
        (changed(master=P0), "no pair"),
        (changed(slices=(KvSlice(P0, 0, 500),)), "another gang"),
        (changed(slices=(KvSlice(D0, 0, 499),)), "not placed once"),
        (changed(slices=(KvSlice(D0, 1, 500),)), "not placed once"),
        (changed(chunks=(PlannedChunk(1, 0, 400),), bounds=(0, 200, 400)), "not the whole prompt"),
        (changed(chunks=(PlannedChunk(1, 100, 500),)), "out of order"),
        (changed(chunks=(PlannedChunk(9, 0, 500),)), "is over"),
        (with_rows(KvSlice(P0, 0, 499), KvSlice(P1, 250, 500)), "each once"),
        (with_rows(KvSlice(P0, 0, 500, 2), KvSlice(P1, 0, 500, 2)), "each once"),
        (
            with_rows(KvSlice(P0, 0, 499), KvSlice(P1, 499, 500)),
            "not those of the rows",
        ),
        (
            with_rows(KvSlice(P0, 0, 250), KvSlice(D0, 250, 500)),
            "outside of the group",
        ),
        (keeping(KvSlice(P0, 0, 499)), "is not placed once"),
        (keeping(KvSlice(P0, 0, 500), KvSlice(P1, 499, 500)), "is not placed once"),
        (keeping(KvSlice(D0, 0, 500)), "outside of the group"),
        (keeping(KvSlice(P0, 0, 500), KvSlice(P0, 500, 501)), "not earlier KV"),
        (changed(answer=(KvSlice(D0, 500, 509),)), "answer's KV is not placed once"),
        (changed(answer=(KvSlice(P0, 500, 510),)), "another gang"),
        (
            changed(
                chunks=(PlannedChunk(1, 0, 500), PlannedChunk(2, 0, 100)), bounds=(0, 250, 600)
            ),
            "a placement for every request",
        ),
        (
            changed(chunks=(PlannedChunk(3, 0, 100),), bounds=(0, 50, 100)),
            "not the whole prompt",
        ),
    ],
)
def test_unsound_decision_changes_nothing(plan: StartPlan, message: str) -> None:
    made = scripted(plan)
    with pytest.raises(AssertionError, match=message):
        made.turn(made.submit(500, 10), made.submit(100, 10), made.submit(100, 10, cls="fast"))
    made.scheduler.check_invariants()
    assert made.scheduler.counts == (0, 3, 0.0, 0.0, 0.0)


def test_sound_plan_beside_an_unsound_one_is_not_applied() -> None:
    twice = changed()
    made = scripted(twice, twice)
    with pytest.raises(AssertionError, match="is started twice"):
        made.turn(made.submit(500, 10))
    assert made.scheduler.counts == (0, 1, 0.0, 0.0, 0.0)


def test_plans_together_must_fit_the_free_slots() -> None:
    """Each plan would fit alone."""
    whole = changed(group=(P0,), bounds=(0, 3000), chunks=(PlannedChunk(1, 0, 3000),),
                    slices=(KvSlice(D0, 0, 3000),))  # fmt: skip
    (planned,), (placement,) = whole.steps, whole.decode
    other = StartPlan(
        steps=(msgspec.structs.replace(planned, chunks=(PlannedChunk(2, 0, 3000),)),),
        decode=(msgspec.structs.replace(placement, request_id=2),),
    )
    made = scripted(whole, other)
    with pytest.raises(AssertionError, match="6000 slots of 4000 free ones"):
        made.turn(made.submit(3000, 10), made.submit(3000, 10))


def test_requests_of_several_classes_in_a_step_are_refused() -> None:
    plan = StartPlan(
        steps=(step((P0,), (0, 200), PlannedChunk(1, 0, 100), PlannedChunk(2, 0, 100)),),
        decode=(
            DecodePlacement(1, (KvSlice(D0, 0, 100),), D0),
            DecodePlacement(2, (KvSlice(D0, 0, 100),), D0),
        ),
    )
    made = scripted(plan)
    with pytest.raises(AssertionError, match="several classes"):
        made.turn(made.submit(100, 10), made.submit(100, 10, cls="fast"))


def test_policy_that_names_a_time_decides_again_then() -> None:
    policy = Scripted(WakeAt(at_ns=5_000_000_000))
    made = SchedulerHarness(policy).ready()  # type: ignore[arg-type]
    made.turn(made.submit(500, 10))
    assert made.wake_at_ns == 5_000_000_000
    policy.decisions = (changed(),)
    assert len(steps_of(made.wait())) == 1
    assert made.wake_at_ns != 5_000_000_000


def test_wake_that_no_policy_needs_any_more_is_dropped() -> None:
    policy = Scripted(WakeAt(at_ns=5_000_000_000))
    made = SchedulerHarness(policy).ready()  # type: ignore[arg-type]
    made.turn(made.submit(500, 10))
    made.turn(ev.RequestCancelled(request_id=1))
    made.wait()
    assert made.wake_at_ns is None
