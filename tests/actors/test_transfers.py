"""Transfers with meshes whose peers send when the test says so."""

from __future__ import annotations

import threading

import pytest
import torch
from mesh_threads import on_ranks

from csps.actors.job_clock import JobClock
from csps.actors.mesh import Mesh, Tag
from csps.actors.timeline import Timeline
from csps.actors.transfers import Label, Transfers

LABEL = Label(phase="first all-to-all", layer=3, level=2, micro=1)


def test_time_under_way_is_counted_once_and_hidden_time_is_told_from_waiting() -> None:
    """Rank 0 has nothing to send before rank 1 has seen that two receives are under way."""
    go = threading.Event()

    def rank(mesh: Mesh) -> JobClock:
        clock = JobClock(timeline=Timeline(on=True))
        with Transfers(mesh, clock) as transfers:
            if mesh.rank == 0:
                go.wait()
                both = [transfers.start([(1, torch.ones(4))], [], Tag.ROWS, LABEL) for _ in "ab"]
            else:
                room = [torch.zeros(4), torch.zeros(4)]
                both = [transfers.start([], [(0, x)], Tag.ROWS, LABEL) for x in room]
                assert not any(transfer.received.done() for transfer in both)
                go.set()
                transfers.wait(both[1])
                assert both[0].received.done()
                assert torch.stack(room).min() == 1
            assert len(both) == 2
        return clock

    _, receiver = on_ranks(2, rank)
    events = [event for event in receiver.timeline.events if event.name == LABEL.phase]
    first, second = sorted(events, key=lambda event: event.start_ns)
    union = (max(first.end_ns, second.end_ns) - first.start_ns) / 1e9
    assert receiver.exchange_s == pytest.approx(union, rel=1e-6)
    assert 0 <= receiver.communication_s <= receiver.exchange_s + 1e-3
    assert 0 <= receiver.hidden <= 1
    assert (first.layer, first.level, first.micro) == (3, 2, 1)


def test_waiting_does_other_work_while_there_is_any_and_nothing_has_arrived() -> None:
    """Rank 0 sends when rank 1 has done its last share of work."""

    def rank(mesh: Mesh) -> list[int]:
        shares = [3, 2, 1]
        go = torch.zeros(1)

        def work() -> bool:
            if shares and shares.pop() == 3:
                mesh.send(go, 0, Tag.PREFILL_ORDERS).wait()
            return bool(shares)

        with Transfers(mesh, JobClock()) as transfers:
            if mesh.rank == 0:
                mesh.recv(go, 1, Tag.PREFILL_ORDERS).wait()
                transfers.start([(1, torch.ones(4))], [], Tag.ROWS, LABEL)
                return []
            transfer = transfers.start([], [(0, torch.zeros(4))], Tag.ROWS, LABEL)
            with transfers.meanwhile(work):
                transfers.wait(transfer)
            with transfers.meanwhile(lambda: pytest.fail("it has arrived")):
                transfers.wait(transfer)
        return shares

    assert on_ranks(2, rank) == [[], []]


def test_without_overlap_a_transfer_is_over_when_start_returns() -> None:
    def rank(mesh: Mesh) -> tuple[bool, bool]:
        other = 1 - mesh.rank
        with Transfers(mesh, JobClock(), overlap=False) as transfers:
            transfer = transfers.start(
                [(other, torch.ones(4))], [(other, torch.zeros(4))], Tag.ROWS, LABEL
            )
            return transfer.received.done(), transfer.sent.done()

    assert on_ranks(2, rank) == [(True, True), (True, True)]


def test_a_lost_peer_fails_the_wait_and_leaves_no_thread() -> None:
    before = threading.active_count()

    def rank(mesh: Mesh) -> None:
        if mesh.rank == 0:
            mesh.close()
            return
        with Transfers(mesh, JobClock()) as transfers:
            transfer = transfers.start([], [(0, torch.zeros(4))], Tag.ROWS, LABEL)
            with pytest.raises(RuntimeError):
                transfers.wait(transfer)
            raise KeyError("so that nothing more is waited for")

    with pytest.raises(KeyError):
        on_ranks(2, rank)
    for thread in threading.enumerate():
        if thread.name in ("arrivals", "departures"):
            thread.join(10)
    assert threading.active_count() <= before


def test_the_mesh_counts_bytes_by_peer() -> None:
    def rank(mesh: Mesh) -> list[int]:
        if mesh.rank == 0:
            sends = [(1, torch.ones(4)), (2, torch.ones(2, 3, dtype=torch.bfloat16))]
            mesh.exchange(sends, [], Tag.ROWS).wait()
            mesh.send(torch.ones(1), 1, Tag.ROWS).wait()
        elif mesh.rank == 1:
            mesh.exchange([], [(0, torch.zeros(4))], Tag.ROWS).wait()
            mesh.recv(torch.zeros(1), 0, Tag.ROWS).wait()
        else:
            room = torch.zeros(2, 3, dtype=torch.bfloat16)
            mesh.exchange([], [(0, room)], Tag.ROWS).wait()
        return mesh.bytes_sent

    assert on_ranks(3, rank) == [[0, 20, 12], [0, 0, 0], [0, 0, 0]]
