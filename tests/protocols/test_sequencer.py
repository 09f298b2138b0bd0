"""The conductor, rule by rule, and in worlds of ranks that wait for each other."""

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
    Job,
    Scenario,
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
    Entry,
    Free,
    Iterate,
    Iterated,
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


class Desk(Sequencer):
    """A conductor whose entries are numbered and asked for as a test reads them."""

    def ops(self) -> list[Op]:
        """What is appended now."""
        return [entry.op for entry in self.entries()]

    def entries(self) -> list[Entry]:
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
        self, step: int, row: int, *ranks: int, places: tuple[int, ...], yield_points: int = 1
    ) -> None:
        """Submit a move of a row, and prepare it everywhere."""
        task = StepSpec(
            id=step,
            ranks=ranks,
            high_priority=True,
            yield_points=yield_points,
            sequences=(row,),
            owner=OWNER,
            places=places,
        )
        self.submit(task)
        for rank in ranks:
            self.prepared(step, rank)

    def rows(self, stream: int, *ranks: int) -> None:
        """Open a stream and give it a row of the same number."""
        self.open_batch(stream, ranks)
        self.join(stream, stream, 0, OWNER)

    def executed(self, entry: Entry, milliseconds: int = 1) -> None:
        """The leader, or the only master, reports an entry."""
        match entry.op:
            case RunQuantum(step, until):
                running = self._steps.get(step)
                leader = 0 if running is None else running.task.leader
                self.ran(leader, entry.seq, step, until, milliseconds * NS)
            case Iterate(stream):
                iterating = self._batches.get(stream)
                assert iterating is not None
                self.iterated(iterating.ranks[0], entry.seq, stream, milliseconds * NS)


# 0. Rows that concern some ranks


def groups(desk: Desk) -> list[tuple[int, ...]]:
    """Ranks of the leases that the log has now."""
    return [ranks for entry, ranks in desk.take() if isinstance(entry.op, Iterate)]


def test_rows_without_a_common_rank_are_iterated_apart() -> None:
    desk = Desk(4)
    desk.open_batch(0, (0, 1, 2, 3), masters=(0, 1, 2, 3))
    desk.join(0, 7, 0, OWNER, ranks=(0, 1))
    desk.join(0, 8, 0, OWNER, ranks=(2,))
    log = desk.take()
    grants = [(entry.op, ranks) for entry, ranks in log if isinstance(entry.op, Iterate)]
    assert sorted(set(grants), key=str) == [
        (Iterate(0, 1, 1, (0, 1)), (0, 1)),
        (Iterate(0, 1, 1, (2,)), (2,)),
    ]
    assert [ranks for entry, ranks in log if isinstance(entry.op, Change)] == [(0, 1, 2, 3)]


def test_groups_merge_and_part_with_the_rows_that_join_them() -> None:
    desk = Desk(3)
    desk.open_batch(0, (0, 1, 2), masters=(0, 1, 2))
    for sequence, ranks in ((7, (0,)), (8, (1,)), (9, (0, 1))):
        desk.join(0, sequence, 0, OWNER, ranks=ranks)
    assert set(groups(desk)) == {(0, 1)}
    desk.cancel(9)
    for seq in (2, 3):
        for rank in (0, 1):
            desk.iterated(rank, seq, 0, NS)
    assert set(groups(desk)) == {(0,), (1,)}
    desk.move(1, 7, 0, 1, 2, places=(2, 1))
    log: list[tuple[Entry, tuple[int, ...]]] = []
    for seq, rank in ((5, 0), (6, 1), (7, 0), (8, 1)):
        desk.iterated(rank, seq, 0, NS)
        log += desk.take()
    ops = [(entry.op, ranks) for entry, ranks in log if not isinstance(entry.op, Iterate)]
    assert ops == [(RunQuantum(1, 1), (0, 1, 2)), (PlaceSequence(7, (1, 2)), (0, 1, 2))]
    moved = log.index(next(it for it in log if isinstance(it[0].op, PlaceSequence)))
    after = [ranks for entry, ranks in log[moved:] if isinstance(entry.op, Iterate)]
    assert set(after) == {(1, 2)}


def test_a_step_waits_for_no_group_but_those_on_its_ranks() -> None:
    desk = Desk(2)
    desk.open_batch(0, (0, 1), masters=(0, 1))
    desk.join(0, 7, 0, OWNER, ranks=(0,))
    desk.step(1, 1)
    log = desk.take()
    assert [ranks for entry, ranks in log if isinstance(entry.op, RunQuantum)] == [(1,), (1,)]
    assert [ranks for entry, ranks in log if isinstance(entry.op, Iterate)] == [(0,), (0,)]


# 1. What is startable


def test_a_step_waits_until_every_member_has_prepared_it() -> None:
    desk = Desk(3)
    desk.step(1, 0, 2, prepared=False)
    desk.prepared(1, 2)
    assert desk.ops() == []
    desk.prepared(1, 0)
    assert [(entry.op, ranks) for entry, ranks in desk.take()][:1] == [(RunQuantum(1, 1), (0, 2))]


def test_steps_that_one_side_never_hears_of_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are given up before all have prepared them, or their router is gone."""
    monkeypatch.setattr(steps, "REMEMBERED", 3)
    desk = Desk(2)
    for number in range(10):
        desk.step(number, 0, 1, sequences=(number,), prepared=False)
        desk.cancel(number)
        desk.prepared(100 + number, 0)
    assert len(desk._steps._late) == len(desk._steps._early) == 3
    desk.prepared(109, 1)
    desk.take()
    desk.step(109, 0, 1, yield_points=1, prepared=False)
    assert desk.ops() == [RunQuantum(109, 1)]


def test_a_member_may_have_prepared_before_the_step_is_submitted() -> None:
    desk = Desk(2)
    desk.prepared(1, 0)
    desk.prepared(1, 1)
    desk.step(1, 0, 1, yield_points=1, prepared=False)
    assert desk.ops() == [RunQuantum(1, 1)]


def test_steps_of_one_sequence_run_in_the_order_of_their_submission() -> None:
    desk = Desk(2)
    desk.step(1, 0, yield_points=1, sequences=(7,), prepared=False)
    desk.step(2, 1, yield_points=1, sequences=(7,))
    assert desk.ops() == []
    desk.prepared(1, 0)
    (first,) = desk.entries()
    assert first.op == RunQuantum(1, 1)
    desk.executed(first)
    assert desk.ops() == [RunQuantum(2, 1)]


# 2. Classes


def test_an_urgent_step_interrupts_a_long_one_which_gets_nothing_until_it_is_finished() -> None:
    desk = Desk(2)
    desk.step(1, 0, 1, yield_points=9)
    first, second = desk.entries()
    desk.step(2, 1, high_priority=True, yield_points=1)
    (high_priority,) = desk.entries()
    assert high_priority.op == RunQuantum(2, 1)
    desk.executed(first)
    desk.executed(second)
    assert desk.ops() == []
    desk.executed(high_priority)
    desk.ran(1, high_priority.seq, 2, 1, NS)
    assert [type(op) for op in desk.ops()] == [RunQuantum, RunQuantum]


def test_a_long_step_does_not_begin_over_an_urgent_one() -> None:
    desk = Desk(2)
    desk.step(1, 0, high_priority=True, yield_points=1)
    (high_priority,) = desk.entries()
    desk.step(2, 0, 1)
    assert desk.ops() == []
    desk.executed(high_priority)
    assert desk.ops()[0] == RunQuantum(2, 1)


def test_a_rank_has_one_started_step_of_a_class() -> None:
    for high_priority in (True, False):
        desk = Desk(2)
        desk.step(1, 0, 1, high_priority=high_priority, yield_points=1)
        (first,) = desk.entries()
        desk.step(2, 1, high_priority=high_priority, yield_points=1)
        assert desk.ops() == []
        desk.executed(first)
        assert desk.ops() == [RunQuantum(2, 1)]


# 3. Reservation


def test_a_startable_step_that_cannot_start_keeps_younger_ones_off_its_ranks() -> None:
    desk = Desk(3)
    desk.step(1, 0, yield_points=1)
    (first,) = desk.entries()
    desk.step(2, 0, 1, yield_points=1)
    desk.step(3, 1, 2, yield_points=1)
    desk.step(4, 2, yield_points=1)
    assert desk.ops() == []
    desk.executed(first)
    (second,) = desk.entries()
    assert second.op == RunQuantum(2, 1)
    desk.executed(second)
    assert desk.ops() == [RunQuantum(3, 1)]


def test_urgent_steps_pass_long_ones_that_wait() -> None:
    desk = Desk(2)
    desk.step(1, 0, yield_points=1)
    desk.take()
    desk.step(2, 0, 1)
    desk.step(3, 0, 1, high_priority=True, yield_points=1)
    assert desk.ops() == [RunQuantum(3, 1)]


# 4. Quanta


def test_quanta_grow_to_what_fits_their_time_and_at_most_double() -> None:
    desk = Desk(1)
    desk.rows(0, 0)
    desk.step(1, 0, yield_points=60)
    sizes, yield_points = [], 0
    while yield_points < 60:
        for entry in desk.entries():
            if isinstance(entry.op, RunQuantum):
                sizes.append(entry.op.until - yield_points)
                yield_points = entry.op.until
                desk.executed(entry, milliseconds=4 * sizes[-1])
            else:
                desk.executed(entry)
    assert sizes == [1, 2, 4, 8, 12, 12, 12, 9]


def test_two_quanta_are_outstanding_only_where_nothing_else_can_have_the_ranks() -> None:
    desk = Desk(3)
    desk.step(1, 0, 1, yield_points=9)
    assert desk.ops() == [RunQuantum(1, 1), RunQuantum(1, 2)]
    desk = Desk(3)
    desk.rows(0, 1, 2)
    desk.step(1, 0, 1, yield_points=9)
    assert [op for op in desk.ops() if isinstance(op, RunQuantum)] == [RunQuantum(1, 1)]


@pytest.mark.parametrize(("rank", "seq"), [(1, 1), (0, 2)])
def test_a_report_that_nobody_asked_for_is_refused(rank: int, seq: int) -> None:
    desk = Desk(2)
    desk.step(1, 0, 1)
    desk.take()
    with pytest.raises(ProtocolError):
        desk.report(RanQuantum(rank, seq, 1, 1, NS))


def test_an_iteration_of_no_stream_is_refused() -> None:
    with pytest.raises(ProtocolError):
        Desk(1).report(Iterated(0, 1, 9, NS))


# 5. Leases


def test_a_stream_alone_gets_two_leases_of_as_many_iterations_as_fit() -> None:
    desk = Desk(2)
    desk.rows(0, 0, 1)
    change, *grants = desk.entries()
    assert change.op == Change(0, 1, ((0, 0),))
    assert [lease.op for lease in grants] == [Iterate(0, 1, 1)] * 2
    desk.executed(grants[0], milliseconds=5)
    assert desk.ops() == [Iterate(0, 1, 4)]
    desk = Desk(1)
    desk.rows(0, 0)
    desk.executed(desk.entries()[1], milliseconds=1)
    assert desk.ops() == [Iterate(0, 1, 8)]


def test_streams_that_share_a_rank_take_turns_of_one_iteration() -> None:
    desk = Desk(3)
    desk.rows(0, 0, 1)
    desk.rows(1, 1, 2)
    order: list[Iterate] = []
    waiting = desk.entries()
    while len(order) < 20:
        entry = waiting.pop(0)
        order += [entry.op] if isinstance(entry.op, Iterate) else []
        desk.executed(entry)
        waiting += desk.entries()
    assert {op.iterations for op in order} == {1}
    assert all(a.batch != b.batch for a, b in pairwise(order))


def test_a_stream_and_a_step_take_turns() -> None:
    desk = Desk(2)
    desk.rows(0, 0)
    desk.step(1, 0, 1, yield_points=4)
    waiting, order = desk.entries(), []
    while len(order) < 12:
        entry = waiting.pop(0)
        order.append(type(entry.op))
        desk.executed(entry)
        waiting += desk.entries()
    # Quanta of 1, 2 and 1 parts; the last lease before the step was reported to be over is short.
    assert order[:7] == [Change, Iterate, RunQuantum, Iterate, RunQuantum, Iterate, RunQuantum]
    assert set(order[7:]) == {Iterate}


def test_a_stream_does_not_wait_for_a_steps_report() -> None:
    desk = Desk(2)
    desk.rows(0, 0)
    desk.step(1, 0, 1, yield_points=4)
    waiting = [entry for entry in desk.entries() if isinstance(entry.op, Iterate)]
    for _ in range(9):
        desk.executed(waiting.pop(0))
        waiting += desk.entries()
        assert all(entry.op == Iterate(0, 1, 1) for entry in waiting)
        assert waiting


def test_an_urgent_steps_late_report_stops_no_stream_beside_the_long_step() -> None:
    """A stream on {0, 1}, a long step on {1, 2} and an urgent one on {2}."""
    desk = Desk(3)
    desk.rows(0, 0, 1)
    desk.step(1, 1, 2, yield_points=9)
    long = next(entry for entry in desk.entries() if isinstance(entry.op, RunQuantum))
    desk.step(2, 2, high_priority=True, yield_points=1)
    desk.take()
    desk.executed(long)
    for seq in (2, 4):
        desk.iterated(0, seq, 0, NS)
    grants = desk.entries()
    assert [entry.op for entry in grants] == [Iterate(0, 1, 1)] * 2


# 6. Rows


def test_no_master_runs_ahead_of_another() -> None:
    """They may need nothing of each other, until a row of both or a step makes them wait."""
    desk = Desk(3)
    desk.open_batch(0, (0, 1, 2), masters=(0, 2))
    desk.join(0, 0, 0, OWNER)
    _, first, second = desk.entries()
    for lease in (first, second):
        desk.iterated(2, lease.seq, 0, NS)
    assert desk.ops() == []
    desk.iterated(0, first.seq, 0, 10 * NS)
    assert desk.ops() == [Iterate(0, 1, 2)], "of 20 ms, by the slower master"
    with pytest.raises(ProtocolError):
        desk.iterated(0, first.seq, 0, NS)
    with pytest.raises(ProtocolError):
        desk.iterated(1, second.seq, 0, NS)


def test_rows_join_and_leave_before_the_next_lease() -> None:
    desk = Desk(1)
    desk.rows(0, 0)
    _, first, _ = desk.entries()
    desk.join(0, 5, 77, OWNER)
    desk.join(0, 6, 78, OWNER)
    desk.cancel(6)
    assert desk.ops() == []
    desk.iterated(0, first.seq, 0, NS, (0,))
    assert desk.ops() == [Change(0, 2, ((5, 77),), (6, 0)), Iterate(0, 2, 8)]


def test_the_last_row_leaves_without_a_lease() -> None:
    desk = Desk(1)
    desk.rows(0, 0)
    desk.take()
    desk.cancel(0)
    assert desk.ops() == [Change(0, 2, (), (0,))]
    assert desk.ops() == []


def test_a_step_as_short_as_others_before_is_one_quantum() -> None:
    """Nobody knows before the first one, and of long ones attention takes most of the time."""
    desk = Desk(1)
    begins = []
    for number, rows in enumerate((100, 120, 3 * SHORT_STEP_TOKENS, 100)):
        desk.submit(
            StepSpec(
                id=number,
                ranks=(0,),
                high_priority=False,
                yield_points=8,
                sequences=(number,),
                rows=rows,
                owner=OWNER,
            )
        )
        desk.prepared(number, 0)
        runs = deque(desk.entries())
        begins.append(runs[0].op.until)
        while runs:
            entry = runs.popleft()
            desk.ran(0, entry.seq, number, entry.op.until, 100)
            runs.extend(desk.entries())
    assert begins == [1, 8, 1, 8]


def test_what_was_given_up_before_it_joined_does_not_join() -> None:
    """Ranks hold slots for it, and give them back when the log says so."""
    desk = Desk(1)
    desk.open_batch(0, (0,))
    desk.cancel(5)
    desk.join(0, 5, 9, OWNER)
    assert desk.ops() == [Change(0, 1, (), (5,))]
    assert desk.ops() == []


def test_a_row_that_rides_brings_its_budget() -> None:
    desk = Desk(1)
    desk.open_batch(0, (0,))
    desk.join(0, 5, None, OWNER, 512)
    desk.join(0, 6, 9, OWNER)
    assert desk.ops()[0] == Change(0, 1, ((5, None), (6, 9)), (), 512)


# 7. Cancel


def test_a_waiting_step_that_nobody_wants_is_aborted() -> None:
    desk = Desk(3)
    desk.step(1, 0, 2, sequences=(4, 5), prepared=False)
    desk.cancel(4)
    assert desk.take() == []
    desk.cancel(5)
    assert desk.take() == [(Entry(1, Abort(1)), (0, 2))]
    desk.prepared(1, 0)
    desk.prepared(1, 2)
    assert desk.take() == []


def test_a_running_step_is_told_of_withdrawn_sequences_once_and_aborted_with_the_last() -> None:
    desk = Desk(1)
    desk.rows(0, 0)
    desk.step(1, 0, yield_points=99, sequences=(4, 5, 6))
    waiting = desk.entries()
    desk.cancel(5)
    desk.cancel(5)
    runs: list[RunQuantum] = []
    while len(runs) < 3:
        entry = waiting.pop(0)
        if isinstance(entry.op, RunQuantum):
            runs.append(entry.op)
        desk.executed(entry)
        waiting += desk.entries()
    assert [run.cancelled for run in runs] == [(), (5,), ()]
    desk.cancel(4)
    desk.cancel(6)
    assert desk.ops()[0] == Abort(1)


def test_a_step_whose_last_quantum_is_on_its_way_finishes() -> None:
    desk = Desk(1)
    desk.step(1, 0, yield_points=1, sequences=(4,))
    (last,) = desk.entries()
    desk.cancel(4)
    assert desk.ops() == []
    desk.executed(last)
    desk.step(2, 0, yield_points=1, sequences=(4,))
    assert desk.ops() == [RunQuantum(2, 1)]


def test_who_is_unknown_is_not_cancelled() -> None:
    desk = Desk(1)
    desk.cancel(99)
    assert desk.take() == []


def test_a_row_that_ends_with_what_is_kept_of_it_leaves_first() -> None:
    """Wherever it computed, ranks free slots when nothing writes them any more."""
    desk = Desk(2)
    desk.open_batch(0, (0,))
    desk.join(0, 5, 9, OWNER)
    desk.take()
    desk.retain(5, (Span(7, 9),))
    ended = [(entry.op, ranks) for entry, ranks in desk.take()]
    assert ended == [(Change(0, 2, (), (5,)), (0,)), (Free(5, (Span(7, 9),)), (0, 1))]
    desk.evict(5, (Span(0, 7, 2),))
    assert desk.ops() == [Free(5, (Span(0, 7, 2),))]
    desk.shutdown()
    desk.take()
    desk.retain(6, ())
    assert desk.take() == []


# 8. Moves


def test_a_row_that_has_left_is_not_moved() -> None:
    """Nor is one further that leaves: by its last token, given up, or kept."""
    desk = Desk(2)
    desk.open_batch(0, (0, 1), masters=(0, 1))
    desk.move(1, 7, 0, 1, places=(1,))
    assert desk.take() == [(Entry(1, Abort(1)), (0, 1))]
    for step, end in enumerate((desk.cancel, lambda row: desk.retain(row, ())), 2):
        desk.join(0, step, 0, OWNER, ranks=(0,))
        desk.move(step, step, 0, 1, places=(1,), yield_points=9)
        assert isinstance(desk.ops()[0], Change)
        end(step)
        assert desk.ops()[0] == Abort(step)


def test_a_row_that_finishes_takes_its_move_along() -> None:
    desk = Desk(2)
    desk.rows(0, 0, 1)
    desk.move(1, 0, 0, 1, places=(1,), yield_points=9)
    first = next(entry for entry in desk.entries() if isinstance(entry.op, Iterate))
    desk.iterated(0, first.seq, 0, NS, (0,))
    assert desk.ops()[:2] == [Abort(1), Change(0, 2, (), (0,))]


def test_ranks_know_a_row_before_it_is_moved() -> None:
    desk = Desk(1)
    desk.rows(0, 0)
    desk.take()
    desk.join(0, 5, 9, OWNER)
    desk.move(1, 5, 0, places=(0,))
    assert desk.ops()[0] == Change(0, 2, ((5, 9),))


# 9. Owners


def test_what_an_owner_has_ends_with_it() -> None:
    desk = Desk(3)
    desk.rows(0, 0)
    desk.step(1, 1, 2, yield_points=9)
    desk.step(2, 1, prepared=False)
    desk.take()
    desk.end_owner(OWNER)
    ended = [(entry.op, ranks) for entry, ranks in desk.take()]
    assert ended == [
        (Abort(1), (1, 2)),
        (Change(0, 2, (), (0,)), (0,)),
        (EndOwner(OWNER), (0, 1, 2)),
    ]
    desk.step(3, 0)
    desk.join(0, 5, 0, OWNER)
    desk.end_owner(OWNER)
    assert desk.take() == []


def test_nothing_follows_a_shutdown() -> None:
    desk = Desk(2)
    desk.step(1, 0, yield_points=9)
    desk.take()
    desk.shutdown()
    assert desk.ops() == [Abort(1), Shutdown()]
    desk.step(2, 0)
    desk.shutdown()
    assert desk.take() == []


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
        PlaceSequence(7, (1, 2)),
    ]
    entries = [Entry(seq, op) for seq, op in enumerate(ops, 1)]
    assert unpack_entries(pack_entries(entries)) == entries
    reports = [Prepared(0, 1), RanQuantum(0, 1, 2, 3, 4), Iterated(0, 1, 2, 3, (4, 5))]
    assert unpack_reports(pack_reports(reports)) == reports


@given(st.binary(max_size=60))
def test_what_is_no_frame_is_an_error_of_the_protocol(frame: bytes) -> None:
    for unpack in (unpack_entries, unpack_reports):
        with suppress(ProtocolError):
            unpack(frame)


@pytest.mark.parametrize("size", range(1, 8))
def test_a_frame_that_is_cut_off_is_an_error_of_the_protocol(size: int) -> None:
    with pytest.raises(ProtocolError):
        unpack_entries(pack_entries([Entry(1, RunQuantum(1, 2, (3,)))])[:-size])
    with pytest.raises(ProtocolError):
        unpack_reports(pack_reports([Prepared(0, 1)])[: -min(size, 4)])


@pytest.mark.parametrize("op", [RunQuantum(1, 0), Iterate(1, 1, 0), Abort(-1)])
def test_numbers_out_of_range_are_errors_of_the_protocol(op: Op) -> None:
    with pytest.raises(ProtocolError):
        unpack_entries(pack_entries([Entry(1, op)]))


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
    """What holds in every world, besides what its ranks assert."""
    for r, rank in enumerate(world.ranks.each):
        assert rank.executed == [entry.seq for entry, ranks in world.log if r in ranks]
        assert not any(rank.rows.values()), "a row stays for ever"
    assert [entry.seq for entry, _ in world.log] == list(range(1, len(world.log) + 1))
    check_steps(world)
    check_turns(world)


def check_steps(world: World) -> None:
    """All members finish a step, once, or none does; and all do where nobody gave it up."""
    given_up = {sequence for _, sequence in world.scenario.cancels}
    ended = {owner for _, owner in world.scenario.ends}
    for step, job in world.scenario.jobs.items():
        members = [world.ranks.each[r] for r in job.task.ranks]
        finished = [rank.finished.count(step) for rank in members]
        assert len(set(finished)) == 1
        assert finished[0] <= 1
        wanted = job.task.owner not in ended and given_up.isdisjoint(job.task.sequences)
        wanted = wanted and not job.task.places  # a row may end before it is moved
        assert finished[0] or not wanted, f"step {step} was never finished"
    for (step, sequence), yield_points in world.ranks.cancelled.items():
        assert sequence in given_up
        assert len(yield_points) == len(world.scenario.jobs[step].task.ranks)
        assert len(set(yield_points)) == 1


def check_turns(world: World) -> None:
    """Between two iterations of a stream, at most one quantum on each of their ranks. The log says
    that a row has left only when something else is to be said: until then, ranks that concerned
    nobody any more may have computed as they liked."""
    quanta: dict[tuple[int, int], int] = {}
    rows: dict[int, set[int]] = {stream: set() for stream in world.scenario.lines}
    concerns = dict(world.scenario.concerns)

    def forget_idle(stream: int) -> None:
        whole = world.scenario.lines[stream].ranks
        concerned = {r for row in rows[stream] for r in concerns.get(row, whole)}
        for r in whole:
            if r not in concerned:
                quanta.pop((stream, r), None)

    for entry, ranks in world.log:
        match entry.op:
            case Change(stream, _, joined, left):
                rows[stream] -= set(left)
                forget_idle(stream)
                rows[stream] |= {sequence for sequence, _ in joined}
            case PlaceSequence(sequence, placed):
                concerns[sequence] = placed
                forget_idle(next(it for it, known in rows.items() if sequence in known))
            case Iterate(stream):
                for r in ranks:
                    assert quanta.get((stream, r), 0) <= 1, f"no turn before {entry}"
                    quanta[stream, r] = 0
            case RunQuantum():
                for stream, r in quanta:
                    quanta[stream, r] += r in ranks


@settings(max_examples=examples(600))
@given(st.integers(0, 2**32))
def test_worlds_neither_deadlock_nor_starve(seed: int) -> None:
    check(random_world(seed))


@settings(max_examples=examples(300))
@given(st.integers(0, 2**32))
def test_nor_do_worlds_whose_rows_fall_into_groups(seed: int) -> None:
    check(random_world(seed, apart=True))


@settings(max_examples=examples(300))
@given(st.integers(0, 2**32), st.booleans())
def test_nor_do_worlds_in_which_rows_are_moved(seed: int, apart: bool) -> None:
    check(random_world(seed, apart=apart, moved=True))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(40))
def test_ten_thousand_worlds_neither_deadlock_nor_starve(part: int) -> None:
    for seed in range(250 * part, 250 * (part + 1)):
        check(random_world(seed, apart=bool(seed % 2), moved=seed % 4 > 1))


@settings(max_examples=examples(300))
@given(st.integers(0, 2**32))
def test_late_reports_of_steps_delay_no_stream(seed: int) -> None:
    """The gap of a stream is at most three quanta and an iteration."""
    rng = Random(seed)
    scenario = random_scenario(rng)
    world = World(scenario, Delays(steps=rng.choice((0, 50, 400)), prepares=100), rng)
    world.run()
    since = without_rows(world)
    for stream, ends in world.ranks.iterations.items():
        longest = 3 * QUANTUM + scenario.lines[stream].iteration_time
        for (before, begin), (entry, end) in pairwise(ends):
            if since[before] == since[entry]:
                assert end - begin <= longest


def without_rows(world: World) -> dict[int, int]:
    """For each lease, how often its stream had had no rows before."""
    rows: dict[int, set[int]] = {stream: set() for stream in world.scenario.lines}
    times = dict.fromkeys(rows, 0)
    grants = {}
    for entry, _ in world.log:
        match entry.op:
            case Change(stream, _, joined, left):
                rows[stream] -= set(left)
                times[stream] += not rows[stream]
                rows[stream] |= {sequence for sequence, _ in joined}
            case Iterate(stream):
                grants[entry.seq] = times[stream]
    return grants


@settings(max_examples=examples(100))
@given(st.integers(0, 2**32), st.integers(0, 300))
def test_the_same_calls_give_the_same_entries(seed: int, longest_delay: int) -> None:
    """And a log runs without its conductor, whatever the delays."""
    world = random_world(seed)
    assert random_world(seed).log == world.log
    again = replay(world.scenario, projections(world), longest_delay, Random(seed))
    for rank, original in zip(again.each, world.ranks.each, strict=True):
        assert rank.executed == original.executed
        assert rank.finished == original.finished


def projections(world: World) -> list[list[Entry]]:
    """What each rank was given."""
    return [[entry for entry, ranks in world.log if r in ranks] for r in range(world.scenario.size)]


def test_ranks_with_orders_of_their_own_deadlock() -> None:
    """So that worlds would show it if a conductor did this."""
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
    scenario = Scenario(2, {task.id: Job(task, 1) for task in tasks}, {}, {})
    long, high_priority, rest = (
        Entry(1, RunQuantum(0, 1)),
        Entry(2, RunQuantum(1, 2)),
        Entry(3, RunQuantum(0, 2)),
    )
    replay(scenario, [[long, high_priority, rest]] * 2, 3, Random(0))
    with pytest.raises(Deadlock):
        replay(scenario, [[long, high_priority, rest], [high_priority, long, rest]], 3, Random(0))


def test_a_rank_told_to_run_what_is_not_on_top_is_a_failure() -> None:
    task = StepSpec(
        id=0, ranks=(0,), high_priority=False, yield_points=2, sequences=(), owner=OWNER
    )
    other = StepSpec(
        id=1, ranks=(0,), high_priority=True, yield_points=2, sequences=(), owner=OWNER
    )
    scenario = Scenario(1, {0: Job(task, 1), 1: Job(other, 1)}, {}, {})
    log = [Entry(1, RunQuantum(0, 1)), Entry(2, RunQuantum(1, 1)), Entry(3, RunQuantum(0, 2))]
    with pytest.raises(AssertionError, match="not on top"):
        replay(scenario, [log], 0, Random(0))
    assert DEEPEST == 3
