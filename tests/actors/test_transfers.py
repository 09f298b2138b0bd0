"""Transfers with meshes whose peers send when the test says so."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from mesh_threads import FINISH_S, on_ranks
from torch._C._distributed_c10d import Work

from csps.actors.comm.mesh import BegunExchange, ControlTag, Mesh, Tag
from csps.actors.comm.process_group import Pending
from csps.actors.comm.transfers import Label, Transfers
from csps.actors.timing.timeline import PhaseTimeline, StepClock

LABEL = Label(phase="first all-to-all", layer=3, level=2, micro=1)


def test_time_under_way_is_counted_once_and_hidden_time_is_told_from_waiting() -> None:
    """Rank 0 has nothing to send before rank 1 has seen that two receives are under way."""
    go = threading.Event()

    def rank(mesh: Mesh) -> tuple[StepClock, float]:
        clock, begin = StepClock(timeline=PhaseTimeline(on=True)), time.monotonic()
        with Transfers(mesh, clock) as transfers:
            if mesh.rank == 0:
                assert go.wait(FINISH_S)
                both = [transfers.start([(1, torch.ones(4))], [], Tag.ROWS, LABEL) for _ in "ab"]
            else:
                room = [torch.zeros(4), torch.zeros(4)]
                both = [transfers.start([], [(0, buffer)], Tag.ROWS, LABEL) for buffer in room]
                assert not any(transfer.received.done() for transfer in both)
                go.set()
                transfers.wait(both[1])
                assert both[0].received.done()
                assert torch.stack(room).min() == 1
            assert len(both) == 2
        return clock, time.monotonic() - begin

    _, (receiver, took_s) = on_ranks(2, rank)
    events = [event for event in receiver.timeline.events if event.name == LABEL.phase]
    first, second = sorted(events, key=lambda event: event.start_ns)
    union = (max(first.end_ns, second.end_ns) - first.start_ns) / 1e9
    assert receiver.exchange_s == pytest.approx(union, rel=1e-6)
    assert 0 <= receiver.communication_s < took_s
    assert 0 <= receiver.hidden <= 1
    assert (first.layer, first.level, first.micro) == (3, 2, 1)


def test_waiting_does_other_work_while_there_is_any_and_nothing_has_arrived() -> None:
    """Rank 0 sends when rank 1 has done the last part of its work."""

    def rank(mesh: Mesh) -> list[int]:
        slices = [3, 2, 1]
        go = torch.zeros(1)

        def work() -> bool:
            if slices and slices.pop() == 3:
                mesh.send(go, 0, ControlTag.DECODE_TOKEN).wait()
            return bool(slices)

        with Transfers(mesh, StepClock()) as transfers:
            if mesh.rank == 0:
                mesh.recv(go, 1, ControlTag.DECODE_TOKEN).wait()
                transfers.start([(1, torch.ones(4))], [], Tag.ROWS, LABEL)
                return []
            transfer = transfers.start([], [(0, torch.zeros(4))], Tag.ROWS, LABEL)
            with transfers.meanwhile(work):
                transfers.wait(transfer)
            with transfers.meanwhile(lambda: pytest.fail("it has arrived")):
                transfers.wait(transfer)
        return slices

    assert on_ranks(2, rank) == [[], []]


def test_without_overlap_a_transfer_is_over_when_start_returns() -> None:
    def rank(mesh: Mesh) -> tuple[bool, bool]:
        other = 1 - mesh.rank
        with Transfers(mesh, StepClock(), overlap=False) as transfers:
            transfer = transfers.start(
                [(other, torch.ones(4))], [(other, torch.zeros(4))], Tag.ROWS, LABEL
            )
            return transfer.received.done(), transfer.sent.done()

    assert on_ranks(2, rank) == [(True, True), (True, True)]


def test_a_lost_peer_fails_the_wait_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())

    def rank(mesh: Mesh) -> None:
        if mesh.rank == 0:
            mesh.close()
            return
        with Transfers(mesh, StepClock()) as transfers:
            transfer = transfers.start([], [(0, torch.zeros(4))], Tag.ROWS, LABEL)
            with pytest.raises(RuntimeError):
                transfers.wait(transfer)
            raise KeyError("so that nothing more is waited for")

    with pytest.raises(KeyError):
        on_ranks(2, rank)
    # Not those that others have left: a mesh that is never closed keeps its threads.
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive(), thread


def test_the_mesh_counts_bytes_by_peer() -> None:
    def rank(mesh: Mesh) -> list[int]:
        if mesh.rank == 0:
            sends = [(1, torch.ones(4)), (2, torch.ones(2, 3, dtype=torch.bfloat16))]
            mesh.exchange(sends, [], Tag.ROWS).wait()
            mesh.exchange([(1, torch.ones(1))], [], Tag.ROWS).wait()
        elif mesh.rank == 1:
            mesh.exchange([], [(0, torch.zeros(4))], Tag.ROWS).wait()
            mesh.exchange([], [(0, torch.zeros(1))], Tag.ROWS).wait()
        else:
            room = torch.zeros(2, 3, dtype=torch.bfloat16)
            mesh.exchange([], [(0, room)], Tag.ROWS).wait()
        return mesh.bytes_sent

    assert on_ranks(3, rank) == [[0, 20, 12], [0, 0, 0], [0, 0, 0]]


def test_without_overlap_nobody_waits_for_what_a_continuation_begins() -> None:
    may_send, passed_on = threading.Event(), threading.Event()

    def rank(mesh: Mesh) -> None:
        clock = StepClock()
        with Transfers(mesh, clock, overlap=False) as transfers:
            if mesh.rank == 0:
                assert may_send.wait(30)
                transfers.start([(1, torch.ones(4))], [], Tag.ROWS, LABEL)
            elif mesh.rank == 1:
                room = torch.zeros(4)
                with transfers.as_one():
                    arrival = transfers.start([], [(0, room)], Tag.ROWS, LABEL)
                    task = transfers.pass_on(arrival, [(2, room)], Tag.RELAYED_ROWS, LABEL)
                    assert not task.ready
                    may_send.set()
                    transfers.join(task, LABEL)
                    passed_on.set()
            else:
                assert passed_on.wait(30)
                transfers.start([], [(1, torch.zeros(4))], Tag.RELAYED_ROWS, LABEL)
        assert clock.communication_s == pytest.approx(clock.exchange_s)

    on_ranks(3, rank)


def test_arrivals_are_passed_on_while_others_are_waited_for() -> None:
    """Rank 2 answers only when it has what rank 1 passes on."""

    def rank(mesh: Mesh) -> float:
        room, answer = torch.zeros(4), torch.zeros(4)
        with Transfers(mesh, StepClock()) as transfers:
            if mesh.rank == 0:
                transfers.start([(1, torch.ones(4))], [], Tag.ROWS, LABEL)
            elif mesh.rank == 1:
                late = transfers.start([], [(2, answer)], Tag.ROW_SUMS, LABEL)
                arrival = transfers.start([], [(0, room)], Tag.ROWS, LABEL)
                transfers.pass_on(arrival, [(2, room)], Tag.RELAYED_ROWS, LABEL)
                transfers.wait(late)
            else:
                arrival = transfers.start([], [(1, room)], Tag.RELAYED_ROWS, LABEL)
                transfers.wait(arrival)
                transfers.start([(1, 2 * room)], [], Tag.ROW_SUMS, LABEL)
        return float(answer.sum())

    assert on_ranks(3, rank) == [0, 8, 0]


def test_a_preempting_step_gets_none_of_the_paused_steps_rows() -> None:
    """Rank 1 owes rank 2 a row while both run a high-priority step with rows of the same kind."""

    def rank(mesh: Mesh) -> list[float]:
        room, high_priority = torch.zeros(1), torch.zeros(1)
        done = torch.zeros(1)
        with Transfers(mesh, StepClock()) as transfers:
            if mesh.rank == 1:
                arrival = transfers.start([], [(0, room)], Tag.ROWS, LABEL)
                transfers.pass_on(arrival, [(2, room)], Tag.RELAYED_ROWS, LABEL)
            elif mesh.rank == 2:
                arrival = transfers.start([], [(1, room)], Tag.RELAYED_ROWS, LABEL)
            with mesh.lane(1), Transfers(mesh, StepClock()) as inner:
                if mesh.rank == 1:
                    inner.start([(2, torch.full((1,), 9.0))], [], Tag.RELAYED_ROWS, LABEL)
                    mesh.recv(done, 2, ControlTag.DECODE_TOKEN).wait()
                    mesh.send(done, 0, ControlTag.DECODE_TOKEN).wait()
                elif mesh.rank == 2:
                    inner.wait(inner.start([], [(1, high_priority)], Tag.RELAYED_ROWS, LABEL))
                    mesh.send(done, 1, ControlTag.DECODE_TOKEN).wait()
            if mesh.rank == 0:
                mesh.recv(done, 1, ControlTag.DECODE_TOKEN).wait()
                transfers.start([(1, torch.ones(1))], [], Tag.ROWS, LABEL)
            else:
                transfers.wait(arrival)
        return [float(room), float(high_priority)]

    assert on_ranks(3, rank) == [[0, 0], [1, 0], [1, 9]]


def test_arrivals_are_passed_on_between_two_parts_of_computing() -> None:
    def rank(mesh: Mesh) -> float:
        room = torch.zeros(4)
        with Transfers(mesh, StepClock()) as transfers:
            if mesh.rank == 0:
                transfers.start([(1, torch.ones(4))], [], Tag.ROWS, LABEL)
            elif mesh.rank == 1:
                arrival = transfers.start([], [(0, room)], Tag.ROWS, LABEL)
                task = transfers.pass_on(arrival, [(2, room)], Tag.RELAYED_ROWS, LABEL)
                arrival.received.result(30)
                transfers.progress()
                assert task.ready
            else:
                transfers.wait(transfers.start([], [(1, room)], Tag.RELAYED_ROWS, LABEL))
        return float(room.sum())

    assert on_ranks(3, rank) == [0, 4, 4]


def test_without_overlap_a_collective_is_under_way_together_and_over_at_its_end() -> None:
    """Rank 1 takes them in another order than that in which rank 0 would, one by one."""

    def rank(mesh: Mesh) -> float:
        room = [torch.zeros(4), torch.zeros(4)]
        with Transfers(mesh, StepClock(), overlap=False) as transfers:
            with transfers.as_one():
                for tag in (Tag.ROWS, Tag.ROW_SUMS)[:: 1 - 2 * mesh.rank]:
                    if mesh.rank == 0:
                        begun = transfers.start([(1, torch.ones(4))], [], tag, LABEL)
                    else:
                        begun = transfers.start([], [(0, room.pop())], tag, LABEL)
            return float(begun.received.done() and begun.sent.done())

    assert on_ranks(2, rank) == [1, 1]


def test_arrivals_of_one_tag_are_noticed_while_another_ones_are_yet_to_come() -> None:
    noticed = threading.Event()

    def rank(mesh: Mesh) -> None:
        with Transfers(mesh, StepClock()) as transfers:
            if mesh.rank == 0:
                transfers.start([(1, torch.ones(4))], [], Tag.RELAYED_ROWS, LABEL)
                assert noticed.wait(30)
                transfers.start([(1, torch.ones(4))], [], Tag.ROWS, LABEL)
            else:
                first = transfers.start([], [(0, torch.zeros(4))], Tag.ROWS, LABEL)
                second = transfers.start([], [(0, torch.zeros(4))], Tag.RELAYED_ROWS, LABEL)
                second.received.result(30)
                assert not first.received.done()
                noticed.set()

    on_ranks(2, rank)


class _Work:
    """An NCCL operation: waiting returns at once."""

    def wait(self) -> bool:
        return True


class _CudaMesh:
    """Notes which tensors are under way."""

    in_order = True
    device = torch.device("cpu")

    def start_exchange(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        recvs: Sequence[tuple[int, torch.Tensor]],
        tag: Tag,
    ) -> BegunExchange:
        work, tensors = cast(Work, _Work()), [tensor for _, tensor in (*sends, *recvs)]
        return BegunExchange(received=Pending([work], tensors, in_order=True), sent=Pending([], []))


def on_cuda() -> Transfers:
    return Transfers(cast(Mesh, _CudaMesh()), StepClock())


def test_on_cuda_sends_are_freed_when_the_computing_stream_has_waited_for_later_exchanges() -> None:
    with on_cuda() as transfers:
        lost = []
        for _ in range(2):
            sent = torch.ones(4)
            lost.append(weakref.ref(sent))
            transfers.start([(1, sent)], [], Tag.ROWS, LABEL)
        arrival = transfers.start([], [(1, torch.zeros(4))], Tag.ROWS, LABEL)
        last = torch.ones(4)
        lost.append(weakref.ref(last))
        transfers.start([(1, last)], [], Tag.ROWS, LABEL)
        del sent, last
        arrival.received.result()
        assert all(ref() is not None for ref in lost), "another stream's wait is not enough"
        transfers.wait(arrival)
        assert [ref() is None for ref in lost] == [True, True, False]
        transfers.wait(arrival)
        assert lost[2]() is not None
    assert lost[2]() is None


def test_on_cuda_each_wait_does_one_share_of_the_other_work() -> None:
    slices = [2, 1, 0]
    with on_cuda() as transfers, transfers.meanwhile(lambda: bool(slices.pop())):
        for left in (2, 1):
            transfers.wait(transfers.start([], [(1, torch.zeros(4))], Tag.ROWS, LABEL))
            assert len(slices) == left
