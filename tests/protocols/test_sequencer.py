"""The sequencer, rule by rule, and in worlds of ranks that wait for each other."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from sequencer_world import (
    DEEPEST,
    NS,
    QUANTUM,
    Deadlock,
    Delays,
    Scenario,
    TimedStep,
    World,
    random_scenario,
    replay,
)

from csps.protocols.core.errors import ProtocolError
from csps.protocols.core.placement import Span
from csps.protocols.sequencer import steps
from csps.protocols.sequencer.log_entries import (
    Abort,
    Change,
    EndOwner,
    Free,
    Iterate,
    Iterated,
    LogEntry,
    Op,
    PlaceSequence,
    Prepared,
    RanQuantum,
    RunQuantum,
    Shutdown,
    pack_entries,
    pack_reports,
    unpack_entries,
    unpack_reports,
)
from csps.protocols.sequencer.sequencer import SHORT_STEP_TOKENS, Sequencer
from csps.protocols.sequencer.steps import StepSpec

OWNER = 1


class DrivenSequencer(Sequencer):
    """A sequencer whose entries tests read and execute one by one."""

    def ops(self) -> list[Op]:
        """Return the operations of new entries."""
        return [entry.op for entry in self.entries()]

    def entries(self) -> list[LogEntry]:
        return [entry for entry, _ in self.take()]

    def step(
        self,
        step: int,
        *ranks: int,
        high_priority: bool = False,
        yield_points: int = 4,
        sequences: tuple[int, ...] = (),
        prepared: bool = True,
    ) -> None:
        """Submit a step, and prepare it everywhere."""
        self.submit(
            StepSpec(
                id=step,
                ranks=ranks,
                high_priority=high_priority,
                yield_points=yield_points,
                sequences=sequences,
                owner=OWNER,
            )
        )
        for rank in ranks if prepared else ():
            self.prepared(step, rank)

    def move(
        self,
        step: int,
        sequence: int,
        *ranks: int,
        places: tuple[int, ...],
        master: int = 0,
        yield_points: int = 1,
    ) -> None:
        """Submit a move of a sequence, and prepare it everywhere."""
        task = StepSpec(
            id=step,
            ranks=ranks,
            high_priority=True,
            yield_points=yield_points,
            sequences=(sequence,),
            owner=OWNER,
            places=places,
            master=master,
        )
        self.submit(task)
        for rank in ranks:
            self.prepared(step, rank)

    def open_with_sequence(self, batch: int, *ranks: int) -> None:
        """Open a batch and let a sequence of the same number join."""
        self.open_batch(batch, ranks)
        self.join(batch, batch, 0, OWNER)

    def executed(self, entry: LogEntry, milliseconds: int = 1) -> None:
        """Report an entry, as its leader or only master."""
        match entry.op:
            case RunQuantum(step, until):
                running = self._steps.get(step)
                leader = 0 if running is None else running.task.leader
                self.ran(leader, entry.seq, step, until, milliseconds * NS)
            case Iterate(batch):
                iterating = self._batches.get(batch)
                assert iterating is not None
                self.iterated(iterating.ranks[0], entry.seq, batch, milliseconds * NS)


# 0. Sequences that need some ranks


def groups(sequencer: DrivenSequencer) -> list[tuple[int, ...]]:
    """Return the ranks of the new grants."""
    return [ranks for entry, ranks in sequencer.take() if isinstance(entry.op, Iterate)]


def test_sequences_without_a_common_rank_are_iterated_apart() -> None:
    sequencer = DrivenSequencer(4)
    sequencer.open_batch(0, (0, 1, 2, 3), masters=(0, 1, 2, 3))
    sequencer.join(0, 7, 0, OWNER, ranks=(0, 1))
    sequencer.join(0, 8, 0, OWNER, ranks=(2,))
    log = sequencer.take()
    grants = [(entry.op, ranks) for entry, ranks in log if isinstance(entry.op, Iterate)]
    assert sorted(set(grants), key=str) == [
        (Iterate(0, 1, 1, (0, 1)), (0, 1)),
        (Iterate(0, 1, 1, (2,)), (2,)),
    ]
    assert [ranks for entry, ranks in log if isinstance(entry.op, Change)] == [(0, 1, 2, 3)]


def test_groups_merge_and_part_with_the_sequences_that_join_them() -> None:
    sequencer = DrivenSequencer(3)
    sequencer.open_batch(0, (0, 1, 2), masters=(0, 1, 2))
    for sequence, ranks in ((7, (0,)), (8, (1,)), (9, (0, 1))):
        sequencer.join(0, sequence, 0, OWNER, ranks=ranks)
    assert set(groups(sequencer)) == {(0, 1)}
    sequencer.cancel(9)
    for seq in (2, 3):
        for rank in (0, 1):
            sequencer.iterated(rank, seq, 0, NS)
    assert set(groups(sequencer)) == {(0,), (1,)}
    sequencer.move(1, 7, 0, 1, 2, places=(2, 1), master=2)
    log: list[tuple[LogEntry, tuple[int, ...]]] = []
    for seq, rank in ((5, 0), (6, 1), (7, 0), (8, 1)):
        sequencer.iterated(rank, seq, 0, NS)
        log += sequencer.take()
    ops = [(entry.op, ranks) for entry, ranks in log if not isinstance(entry.op, Iterate)]
    assert ops == [(RunQuantum(1, 1), (0, 1, 2)), (PlaceSequence(7, (1, 2), 2), (0, 1, 2))]
    moved = log.index(
        next(appended for appended in log if isinstance(appended[0].op, PlaceSequence))
    )
    after = [ranks for entry, ranks in log[moved:] if isinstance(entry.op, Iterate)]
    assert set(after) == {(1, 2)}


def test_a_step_waits_for_no_group_but_those_on_its_ranks() -> None:
    sequencer = DrivenSequencer(2)
    sequencer.open_batch(0, (0, 1), masters=(0, 1))
    sequencer.join(0, 7, 0, OWNER, ranks=(0,))
    sequencer.step(1, 1)
    log = sequencer.take()
    assert [ranks for entry, ranks in log if isinstance(entry.op, RunQuantum)] == [(1,), (1,)]
    assert [ranks for entry, ranks in log if isinstance(entry.op, Iterate)] == [(0,), (0,)]


# 1. What is startable


def test_a_step_waits_until_every_member_has_prepared_it() -> None:
    sequencer = DrivenSequencer(3)
    sequencer.step(1, 0, 2, prepared=False)
    sequencer.prepared(1, 2)
    assert sequencer.ops() == []
    sequencer.prepared(1, 0)
    assert [(entry.op, ranks) for entry, ranks in sequencer.take()][:1] == [
        (RunQuantum(1, 1), (0, 2))
    ]


def test_steps_that_one_side_never_names_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are cancelled before all have prepared them; the routers of others are gone."""
    monkeypatch.setattr(steps, "REMEMBERED", 3)
    sequencer = DrivenSequencer(2)
    for number in range(10):
        sequencer.step(number, 0, 1, sequences=(number,), prepared=False)
        sequencer.cancel(number)
        sequencer.prepared(100 + number, 0)
    assert len(sequencer._steps._late) == len(sequencer._steps._early) == 3
    sequencer.prepared(109, 1)
    sequencer.take()
    sequencer.step(109, 0, 1, yield_points=1, prepared=False)
    assert sequencer.ops() == [RunQuantum(109, 1)]


def test_a_member_may_have_prepared_before_the_step_is_submitted() -> None:
    sequencer = DrivenSequencer(2)
    sequencer.prepared(1, 0)
    sequencer.prepared(1, 1)
    sequencer.step(1, 0, 1, yield_points=1, prepared=False)
    assert sequencer.ops() == [RunQuantum(1, 1)]


def test_steps_of_one_sequence_run_in_the_order_of_their_submission() -> None:
    sequencer = DrivenSequencer(2)
    sequencer.step(1, 0, yield_points=1, sequences=(7,), prepared=False)
    sequencer.step(2, 1, yield_points=1, sequences=(7,))
    assert sequencer.ops() == []
    sequencer.prepared(1, 0)
    (first,) = sequencer.entries()
    assert first.op == RunQuantum(1, 1)
    sequencer.executed(first)
    assert sequencer.ops() == [RunQuantum(2, 1)]


# 2. Priorities


def test_a_high_priority_step_preempts_a_low_priority_one_until_it_is_finished() -> None:
    sequencer = DrivenSequencer(2)
    sequencer.step(1, 0, 1, yield_points=9)
    first, second = sequencer.entries()
    sequencer.step(2, 1, high_priority=True, yield_points=1)
    (high_priority,) = sequencer.entries()
    assert high_priority.op == RunQuantum(2, 1)
    sequencer.executed(first)
    sequencer.executed(second)
    assert sequencer.ops() == []
    sequencer.executed(high_priority)
    sequencer.ran(1, high_priority.seq, 2, 1, NS)
    assert [type(op) for op in sequencer.ops()] == [RunQuantum, RunQuantum]


def test_a_low_priority_step_does_not_begin_over_a_high_priority_one() -> None:
    sequencer = DrivenSequencer(2)
    sequencer.step(1, 0, high_priority=True, yield_points=1)
    (high_priority,) = sequencer.entries()
    sequencer.step(2, 0, 1)
    assert sequencer.ops() == []
    sequencer.executed(high_priority)
    assert sequencer.ops()[0] == RunQuantum(2, 1)


def test_a_rank_has_one_started_step_of_a_priority() -> None:
    for high_priority in (True, False):
        sequencer = DrivenSequencer(2)
        sequencer.step(1, 0, 1, high_priority=high_priority, yield_points=1)
        (first,) = sequencer.entries()
        sequencer.step(2, 1, high_priority=high_priority, yield_points=1)
        assert sequencer.ops() == []
        sequencer.executed(first)
        assert sequencer.ops() == [RunQuantum(2, 1)]


# 3. Reservation


def test_a_startable_step_that_cannot_start_keeps_younger_ones_off_its_ranks() -> None:
    sequencer = DrivenSequencer(3)
    sequencer.step(1, 0, yield_points=1)
    (first,) = sequencer.entries()
    sequencer.step(2, 0, 1, yield_points=1)
    sequencer.step(3, 1, 2, yield_points=1)
    sequencer.step(4, 2, yield_points=1)
    assert sequencer.ops() == []
    sequencer.executed(first)
    (second,) = sequencer.entries()
    assert second.op == RunQuantum(2, 1)
    sequencer.executed(second)
    assert sequencer.ops() == [RunQuantum(3, 1)]


def test_high_priority_steps_pass_low_priority_ones_that_wait() -> None:
    sequencer = DrivenSequencer(2)
    sequencer.step(1, 0, yield_points=1)
    sequencer.take()
    sequencer.step(2, 0, 1)
    sequencer.step(3, 0, 1, high_priority=True, yield_points=1)
    assert sequencer.ops() == [RunQuantum(3, 1)]


# 4. Quanta


def test_quanta_grow_to_what_fits_their_time_and_at_most_double() -> None:
    sequencer = DrivenSequencer(1)
    sequencer.open_with_sequence(0, 0)
    sequencer.step(1, 0, yield_points=60)
    sizes, yield_points = [], 0
    while yield_points < 60:
        for entry in sequencer.entries():
            if isinstance(entry.op, RunQuantum):
                sizes.append(entry.op.until - yield_points)
                yield_points = entry.op.until
                sequencer.executed(entry, milliseconds=4 * sizes[-1])
            else:
                sequencer.executed(entry)
    assert sizes == [1, 2, 4, 8, 12, 12, 12, 9]


def test_two_quanta_are_outstanding_only_where_nothing_else_can_have_the_ranks() -> None:
    sequencer = DrivenSequencer(3)
    sequencer.step(1, 0, 1, yield_points=9)
    assert sequencer.ops() == [RunQuantum(1, 1), RunQuantum(1, 2)]
    sequencer = DrivenSequencer(3)
    sequencer.open_with_sequence(0, 1, 2)
    sequencer.step(1, 0, 1, yield_points=9)
    assert [op for op in sequencer.ops() if isinstance(op, RunQuantum)] == [RunQuantum(1, 1)]


@pytest.mark.parametrize(("rank", "seq"), [(1, 1), (0, 2)])
def test_an_unexpected_report_is_refused(rank: int, seq: int) -> None:
    sequencer = DrivenSequencer(2)
    sequencer.step(1, 0, 1)
    sequencer.take()
    with pytest.raises(ProtocolError):
        sequencer.report(RanQuantum(rank, seq, 1, 1, NS))


def test_an_iteration_of_no_batch_is_refused() -> None:
    with pytest.raises(ProtocolError):
        DrivenSequencer(1).report(Iterated(0, 1, 9, NS))


# 5. Grants


def test_a_batch_alone_gets_two_grants_of_as_many_iterations_as_fit() -> None:
    sequencer = DrivenSequencer(2)
    sequencer.open_with_sequence(0, 0, 1)
    change, *grants = sequencer.entries()
    assert change.op == Change(0, 1, ((0, 0),))
    assert [grant.op for grant in grants] == [Iterate(0, 1, 1)] * 2
    sequencer.executed(grants[0], milliseconds=5)
    assert sequencer.ops() == [Iterate(0, 1, 4)]
    sequencer = DrivenSequencer(1)
    sequencer.open_with_sequence(0, 0)
    sequencer.executed(sequencer.entries()[1], milliseconds=1)
    assert sequencer.ops() == [Iterate(0, 1, 8)]


def test_batches_that_share_a_rank_alternate_by_one_iteration() -> None:
    sequencer = DrivenSequencer(3)
    sequencer.open_with_sequence(0, 0, 1)
    sequencer.open_with_sequence(1, 1, 2)
    order: list[Iterate] = []
    waiting = sequencer.entries()
    while len(order) < 20:
        entry = waiting.pop(0)
        order += [entry.op] if isinstance(entry.op, Iterate) else []
        sequencer.executed(entry)
        waiting += sequencer.entries()
    assert {op.iterations for op in order} == {1}
    assert all(a.batch != b.batch for a, b in pairwise(order))


def test_a_batch_and_a_step_alternate() -> None:
    sequencer = DrivenSequencer(2)
    sequencer.open_with_sequence(0, 0)
    sequencer.step(1, 0, 1, yield_points=4)
    waiting, order = sequencer.entries(), []
    while len(order) < 12:
        entry = waiting.pop(0)
        order.append(type(entry.op))
        sequencer.executed(entry)
        waiting += sequencer.entries()
    # Quanta of 1, 2 and 1 yield points; the last grant before the report of the end is short.
    assert order[:7] == [Change, Iterate, RunQuantum, Iterate, RunQuantum, Iterate, RunQuantum]
    assert set(order[7:]) == {Iterate}


def test_a_batch_does_not_wait_for_a_steps_report() -> None:
    sequencer = DrivenSequencer(2)
    sequencer.open_with_sequence(0, 0)
    sequencer.step(1, 0, 1, yield_points=4)
    waiting = [entry for entry in sequencer.entries() if isinstance(entry.op, Iterate)]
    for _ in range(9):
        sequencer.executed(waiting.pop(0))
        waiting += sequencer.entries()
        assert all(entry.op == Iterate(0, 1, 1) for entry in waiting)
        assert waiting


def test_a_high_priority_steps_late_report_stops_no_batch_beside_the_low_priority_step() -> None:
    """A batch on {0, 1}, a low-priority step on {1, 2} and a high-priority one on {2}."""
    sequencer = DrivenSequencer(3)
    sequencer.open_with_sequence(0, 0, 1)
    sequencer.step(1, 1, 2, yield_points=9)
    low_priority = next(entry for entry in sequencer.entries() if isinstance(entry.op, RunQuantum))
    sequencer.step(2, 2, high_priority=True, yield_points=1)
    sequencer.take()
    sequencer.executed(low_priority)
    for seq in (2, 4):
        sequencer.iterated(0, seq, 0, NS)
    grants = sequencer.entries()
    assert [entry.op for entry in grants] == [Iterate(0, 1, 1)] * 2


# 6. Sequences


def test_no_master_runs_ahead_of_another() -> None:
    """Masters may be independent until a sequence of both, or a step, makes them wait."""
    sequencer = DrivenSequencer(3)
    sequencer.open_batch(0, (0, 1, 2), masters=(0, 2))
    sequencer.join(0, 0, 0, OWNER)
    _, first, second = sequencer.entries()
    for grant in (first, second):
        sequencer.iterated(2, grant.seq, 0, NS)
    assert sequencer.ops() == []
    sequencer.iterated(0, first.seq, 0, 10 * NS)
    assert sequencer.ops() == [Iterate(0, 1, 2)], "of 20 ms, by the slower master"
    with pytest.raises(ProtocolError):
        sequencer.iterated(0, first.seq, 0, NS)
    with pytest.raises(ProtocolError):
        sequencer.iterated(1, second.seq, 0, NS)


def test_sequences_join_and_leave_before_the_next_grant() -> None:
    sequencer = DrivenSequencer(1)
    sequencer.open_with_sequence(0, 0)
    _, first, _ = sequencer.entries()
    sequencer.join(0, 5, 77, OWNER)
    sequencer.join(0, 6, 78, OWNER)
    sequencer.cancel(6)
    assert sequencer.ops() == []
    sequencer.iterated(0, first.seq, 0, NS, (0,))
    assert sequencer.ops() == [Change(0, 2, ((5, 77),), (6, 0)), Iterate(0, 2, 8)]


def test_the_last_sequence_leaves_without_a_grant() -> None:
    sequencer = DrivenSequencer(1)
    sequencer.open_with_sequence(0, 0)
    sequencer.take()
    sequencer.cancel(0)
    assert sequencer.ops() == [Change(0, 2, (), (0,))]
    assert sequencer.ops() == []


def test_a_step_as_short_as_others_before_is_one_quantum() -> None:
    """The first one is unknown, and attention takes most of the time of long ones."""
    sequencer = DrivenSequencer(1)
    begins = []
    for number, tokens in enumerate((100, 120, 3 * SHORT_STEP_TOKENS, 100)):
        sequencer.submit(
            StepSpec(
                id=number,
                ranks=(0,),
                high_priority=False,
                yield_points=8,
                sequences=(number,),
                rows=tokens,
                owner=OWNER,
            )
        )
        sequencer.prepared(number, 0)
        runs = deque(sequencer.entries())
        begins.append(runs[0].op.until)
        while runs:
            entry = runs.popleft()
            sequencer.ran(0, entry.seq, number, entry.op.until, 100)
            runs.extend(sequencer.entries())
    assert begins == [1, 8, 1, 8]


def test_a_sequence_cancelled_before_it_joined_does_not_join() -> None:
    """Ranks hold slots for it, and free them when the log says so."""
    sequencer = DrivenSequencer(1)
    sequencer.open_batch(0, (0,))
    sequencer.cancel(5)
    sequencer.join(0, 5, 9, OWNER)
    assert sequencer.ops() == [Change(0, 1, (), (5,))]
    assert sequencer.ops() == []


def test_a_sequence_with_piggybacked_prefill_brings_its_budget() -> None:
    sequencer = DrivenSequencer(1)
    sequencer.open_batch(0, (0,))
    sequencer.join(0, 5, None, OWNER, 512)
    sequencer.join(0, 6, 9, OWNER)
    assert sequencer.ops()[0] == Change(0, 1, ((5, None), (6, 9)), (), 512)


# 7. Cancel


def test_a_waiting_step_that_is_cancelled_is_aborted() -> None:
    sequencer = DrivenSequencer(3)
    sequencer.step(1, 0, 2, sequences=(4, 5), prepared=False)
    sequencer.cancel(4)
    assert sequencer.take() == []
    sequencer.cancel(5)
    assert sequencer.take() == [(LogEntry(1, Abort(1)), (0, 2))]
    sequencer.prepared(1, 0)
    sequencer.prepared(1, 2)
    assert sequencer.take() == []


def test_a_running_step_learns_of_cancelled_sequences_once_and_is_aborted_with_the_last() -> None:
    sequencer = DrivenSequencer(1)
    sequencer.open_with_sequence(0, 0)
    sequencer.step(1, 0, yield_points=99, sequences=(4, 5, 6))
    waiting = sequencer.entries()
    sequencer.cancel(5)
    sequencer.cancel(5)
    runs: list[RunQuantum] = []
    while len(runs) < 3:
        entry = waiting.pop(0)
        if isinstance(entry.op, RunQuantum):
            runs.append(entry.op)
        sequencer.executed(entry)
        waiting += sequencer.entries()
    assert [run.cancelled for run in runs] == [(), (5,), ()]
    sequencer.cancel(4)
    sequencer.cancel(6)
    assert sequencer.ops()[0] == Abort(1)


def test_a_step_whose_last_quantum_is_on_its_way_finishes() -> None:
    sequencer = DrivenSequencer(1)
    sequencer.step(1, 0, yield_points=1, sequences=(4,))
    (last,) = sequencer.entries()
    sequencer.cancel(4)
    assert sequencer.ops() == []
    sequencer.executed(last)
    sequencer.step(2, 0, yield_points=1, sequences=(4,))
    assert sequencer.ops() == [RunQuantum(2, 1)]


def test_an_unknown_sequence_is_not_cancelled() -> None:
    sequencer = DrivenSequencer(1)
    sequencer.cancel(99)
    assert sequencer.take() == []


def test_a_sequence_that_ends_with_its_retained_kv_leaves_first() -> None:
    """Wherever it computed, ranks free slots when nothing writes them any more."""
    sequencer = DrivenSequencer(2)
    sequencer.open_batch(0, (0,))
    sequencer.join(0, 5, 9, OWNER)
    sequencer.take()
    sequencer.retain(5, (Span(7, 9),))
    ended = [(entry.op, ranks) for entry, ranks in sequencer.take()]
    assert ended == [(Change(0, 2, (), (5,)), (0,)), (Free(5, (Span(7, 9),)), (0, 1))]
    sequencer.evict(5, (Span(0, 7, 2),))
    assert sequencer.ops() == [Free(5, (Span(0, 7, 2),))]
    sequencer.shutdown()
    sequencer.take()
    sequencer.retain(6, ())
    assert sequencer.take() == []


# 8. Moves


def test_a_sequence_that_has_left_is_not_moved() -> None:
    """A running move stops, too, when its sequence finishes, is cancelled, or is retained."""
    sequencer = DrivenSequencer(2)
    sequencer.open_batch(0, (0, 1), masters=(0, 1))
    sequencer.move(1, 7, 0, 1, places=(1,))
    assert sequencer.take() == [(LogEntry(1, Abort(1)), (0, 1))]
    for step, end in enumerate(
        (sequencer.cancel, lambda sequence: sequencer.retain(sequence, ())), 2
    ):
        sequencer.join(0, step, 0, OWNER, ranks=(0,))
        sequencer.move(step, step, 0, 1, places=(1,), yield_points=9)
        assert isinstance(sequencer.ops()[0], Change)
        end(step)
        assert sequencer.ops()[0] == Abort(step)


def test_a_sequence_that_finishes_takes_its_move_along() -> None:
    sequencer = DrivenSequencer(2)
    sequencer.open_with_sequence(0, 0, 1)
    sequencer.move(1, 0, 0, 1, places=(1,), yield_points=9)
    first = next(entry for entry in sequencer.entries() if isinstance(entry.op, Iterate))
    sequencer.iterated(0, first.seq, 0, NS, (0,))
    assert sequencer.ops()[:2] == [Abort(1), Change(0, 2, (), (0,))]


def test_ranks_know_a_sequence_before_it_is_moved() -> None:
    sequencer = DrivenSequencer(1)
    sequencer.open_with_sequence(0, 0)
    sequencer.take()
    sequencer.join(0, 5, 9, OWNER)
    sequencer.move(1, 5, 0, places=(0,))
    assert sequencer.ops()[0] == Change(0, 2, ((5, 9),))


# 9. Owners


def test_work_of_an_owner_ends_with_it() -> None:
    sequencer = DrivenSequencer(3)
    sequencer.open_with_sequence(0, 0)
    sequencer.step(1, 1, 2, yield_points=9)
    sequencer.step(2, 1, prepared=False)
    sequencer.take()
    sequencer.end_owner(OWNER)
    ended = [(entry.op, ranks) for entry, ranks in sequencer.take()]
    assert ended == [
        (Abort(1), (1, 2)),
        (Change(0, 2, (), (0,)), (0,)),
        (EndOwner(OWNER), (0, 1, 2)),
    ]
    sequencer.step(3, 0)
    sequencer.join(0, 5, 0, OWNER)
    sequencer.end_owner(OWNER)
    assert sequencer.take() == []


def test_nothing_follows_a_shutdown() -> None:
    sequencer = DrivenSequencer(2)
    sequencer.step(1, 0, yield_points=9)
    sequencer.take()
    sequencer.shutdown()
    assert sequencer.ops() == [Abort(1), Shutdown()]
    sequencer.step(2, 0)
    sequencer.shutdown()
    assert sequencer.take() == []


# Frames


def test_frames_come_back_as_they_were() -> None:
    ops: list[Op] = [
        RunQuantum(1, 2, (3,)),
        Iterate(1, 2, 3),
        Change(1, 2, ((3, 4),), (5,)),
        Abort(1),
        EndOwner(2),
        Shutdown(),
        Free(1, (Span(2, 9, 3), Span(0, 2**62))),
        PlaceSequence(7, (1, 2), 1),
    ]
    entries = [LogEntry(seq, op) for seq, op in enumerate(ops, 1)]
    assert unpack_entries(pack_entries(entries)) == entries
    reports = [Prepared(0, 1), RanQuantum(0, 1, 2, 3, 4), Iterated(0, 1, 2, 3, (4, 5))]
    assert unpack_reports(pack_reports(reports)) == reports


@given(st.binary(max_size=60))
def test_an_invalid_frame_is_an_error_of_the_protocol(frame: bytes) -> None:
    for unpack in (unpack_entries, unpack_reports):
        with suppress(ProtocolError):
            unpack(frame)


@pytest.mark.parametrize("size", range(1, 8))
def test_a_frame_that_is_cut_off_is_an_error_of_the_protocol(size: int) -> None:
    with pytest.raises(ProtocolError):
        unpack_entries(pack_entries([LogEntry(1, RunQuantum(1, 2, (3,)))])[:-size])
    with pytest.raises(ProtocolError):
        unpack_reports(pack_reports([Prepared(0, 1)])[: -min(size, 4)])


@pytest.mark.parametrize("op", [RunQuantum(1, 0), Iterate(1, 1, 0), Abort(-1)])
def test_numbers_out_of_range_are_errors_of_the_protocol(op: Op) -> None:
    with pytest.raises(ProtocolError):
        unpack_entries(pack_entries([LogEntry(1, op)]))


# 10. Worlds


def random_world(seed: int, *, apart: bool = False, moved: bool = False) -> World:
    """A random scenario that has been run with random delays."""
    rng = Random(seed)
    scenario = random_scenario(rng, apart=apart, moved=moved)
    longest = rng.choice((0, 5, 50, 400))
    delays = Delays(*(rng.choice((0, longest)) for _ in range(4)))
    world = World(scenario, delays, rng)
    world.run()
    return world


def check(world: World) -> None:
    """Check what holds in every world, besides what its ranks assert."""
    for r, rank in enumerate(world.ranks.each):
        assert rank.executed == [entry.seq for entry, ranks in world.log if r in ranks]
        assert not any(rank.sequences.values()), "a sequence never leaves"
    assert [entry.seq for entry, _ in world.log] == list(range(1, len(world.log) + 1))
    check_steps(world)
    check_turns(world)


def check_steps(world: World) -> None:
    """Check that all members finish a step once, or none does, and all do unless it was
    cancelled."""
    cancelled = {sequence for _, sequence in world.scenario.cancels}
    ended = {owner for _, owner in world.scenario.ends}
    for step, timed in world.scenario.steps.items():
        members = [world.ranks.each[r] for r in timed.task.ranks]
        finished = [rank.finished.count(step) for rank in members]
        assert len(set(finished)) == 1
        assert finished[0] <= 1
        expected = timed.task.owner not in ended and cancelled.isdisjoint(timed.task.sequences)
        expected = expected and not timed.task.places  # a sequence may end before it is moved
        assert finished[0] or not expected, f"step {step} was never finished"
    for (step, sequence), yield_points in world.ranks.cancelled.items():
        assert sequence in cancelled
        assert len(yield_points) == len(world.scenario.steps[step].task.ranks)
        assert len(set(yield_points)) == 1


def check_turns(world: World) -> None:
    """Check that at most one quantum lies between two iterations of a batch on each of their ranks.

    The log says that a sequence has left only with its next entry. Until then, ranks that no
    sequence needs may compute as they like.
    """
    quanta: dict[tuple[int, int], int] = {}
    sequences: dict[int, set[int]] = {batch: set() for batch in world.scenario.batches}
    needed_ranks = dict(world.scenario.needed_ranks)

    def forget_idle(batch: int) -> None:
        whole = world.scenario.batches[batch].ranks
        needed = {r for sequence in sequences[batch] for r in needed_ranks.get(sequence, whole)}
        for r in whole:
            if r not in needed:
                quanta.pop((batch, r), None)

    for entry, ranks in world.log:
        match entry.op:
            case Change(batch, _, joined, left):
                sequences[batch] -= set(left)
                forget_idle(batch)
                sequences[batch] |= {sequence for sequence, _ in joined}
            case PlaceSequence(sequence, placed):
                needed_ranks[sequence] = placed
                forget_idle(next(batch for batch, known in sequences.items() if sequence in known))
            case Iterate(batch):
                for r in ranks:
                    assert quanta.get((batch, r), 0) <= 1, f"two quanta before {entry}"
                    quanta[batch, r] = 0
            case RunQuantum():
                for batch, r in quanta:
                    quanta[batch, r] += r in ranks


@settings(max_examples=examples(600))
@given(st.integers(0, 2**32))
def test_worlds_neither_deadlock_nor_starve(seed: int) -> None:
    check(random_world(seed))


@settings(max_examples=examples(300))
@given(st.integers(0, 2**32))
def test_nor_do_worlds_whose_sequences_fall_into_groups(seed: int) -> None:
    check(random_world(seed, apart=True))


@settings(max_examples=examples(300))
@given(st.integers(0, 2**32), st.booleans())
def test_nor_do_worlds_in_which_sequences_are_moved(seed: int, apart: bool) -> None:
    check(random_world(seed, apart=apart, moved=True))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(40))
def test_ten_thousand_worlds_neither_deadlock_nor_starve(block: int) -> None:
    for seed in range(250 * block, 250 * (block + 1)):
        check(random_world(seed, apart=bool(seed % 2), moved=seed % 4 > 1))


@settings(max_examples=examples(300))
@given(st.integers(0, 2**32))
def test_late_reports_of_steps_delay_no_batch(seed: int) -> None:
    """The gap of a batch is at most three quanta and an iteration."""
    rng = Random(seed)
    scenario = random_scenario(rng)
    world = World(scenario, Delays(steps=rng.choice((0, 50, 400)), prepares=100), rng)
    world.run()
    since = times_empty(world)
    for batch, ends in world.ranks.iterations.items():
        longest = 3 * QUANTUM + scenario.batches[batch].iteration_time
        for (before, begin), (entry, end) in pairwise(ends):
            if since[before] == since[entry]:
                assert end - begin <= longest


def times_empty(world: World) -> dict[int, int]:
    """Return, for each grant, how often its batch was empty before."""
    sequences: dict[int, set[int]] = {batch: set() for batch in world.scenario.batches}
    times = dict.fromkeys(sequences, 0)
    grants = {}
    for entry, _ in world.log:
        match entry.op:
            case Change(batch, _, joined, left):
                sequences[batch] -= set(left)
                times[batch] += not sequences[batch]
                sequences[batch] |= {sequence for sequence, _ in joined}
            case Iterate(batch):
                grants[entry.seq] = times[batch]
    return grants


@settings(max_examples=examples(100))
@given(st.integers(0, 2**32), st.integers(0, 300))
def test_the_same_calls_give_the_same_entries(seed: int, longest_delay: int) -> None:
    """The log also runs without its sequencer, whatever the delays."""
    world = random_world(seed)
    assert random_world(seed).log == world.log
    again = replay(world.scenario, projections(world), longest_delay, Random(seed))
    for rank, original in zip(again.each, world.ranks.each, strict=True):
        assert rank.executed == original.executed
        assert rank.finished == original.finished


def projections(world: World) -> list[list[LogEntry]]:
    """Return the entries of each rank."""
    return [[entry for entry, ranks in world.log if r in ranks] for r in range(world.scenario.size)]


def test_ranks_with_orders_of_their_own_deadlock() -> None:
    """Worlds would show it if a sequencer did this."""
    tasks = [
        StepSpec(
            id=step,
            ranks=(0, 1),
            high_priority=bool(step),
            yield_points=2,
            sequences=(),
            owner=OWNER,
        )
        for step in (0, 1)
    ]
    scenario = Scenario(2, {task.id: TimedStep(task, 1) for task in tasks}, {}, {})
    low_priority, high_priority, rest = (
        LogEntry(1, RunQuantum(0, 1)),
        LogEntry(2, RunQuantum(1, 2)),
        LogEntry(3, RunQuantum(0, 2)),
    )
    replay(scenario, [[low_priority, high_priority, rest]] * 2, 3, Random(0))
    with pytest.raises(Deadlock):
        replay(
            scenario,
            [[low_priority, high_priority, rest], [high_priority, low_priority, rest]],
            3,
            Random(0),
        )


def test_a_rank_asked_to_run_what_is_not_on_top_is_a_failure() -> None:
    task = StepSpec(
        id=0, ranks=(0,), high_priority=False, yield_points=2, sequences=(), owner=OWNER
    )
    other = StepSpec(
        id=1, ranks=(0,), high_priority=True, yield_points=2, sequences=(), owner=OWNER
    )
    scenario = Scenario(1, {0: TimedStep(task, 1), 1: TimedStep(other, 1)}, {}, {})
    orders = [RunQuantum(0, 1), RunQuantum(1, 1), RunQuantum(0, 2)]
    log = [LogEntry(seq, order) for seq, order in enumerate(orders, 1)]
    with pytest.raises(AssertionError, match="not on top"):
        replay(scenario, [log], 0, Random(0))
    assert DEEPEST == 3
