"""Members of a job wait for each other, and can tell whether they still have to."""

from __future__ import annotations

import threading

import pytest
from mesh_threads import on_ranks

from csps.actors.meeting import Meeting
from csps.actors.mesh import Mesh, PeerLost

WAIT_S = 60.0


def test_it_is_complete_when_the_last_one_has_come() -> None:
    first_two_came, told = threading.Barrier(3), [threading.Event() for _ in range(3)]

    def body(mesh: Mesh) -> None:
        others = [rank for rank in range(3) if rank != mesh.rank]
        if mesh.rank == 2:  # has come to nothing before the others have looked
            first_two_came.wait(WAIT_S)
        meeting = Meeting(mesh, others, on_complete=told[mesh.rank].set)
        if mesh.rank < 2:
            Meeting(mesh, [1 - mesh.rank]).wait()  # so each has heard the other in the first
            assert not meeting.complete
            first_two_came.wait(WAIT_S)
        meeting.wait()
        assert told[mesh.rank].wait(WAIT_S)
        assert meeting.complete

    on_ranks(3, body)


def test_meetings_of_overlapping_groups_in_one_order() -> None:
    groups = [(0, 1), (1, 2), (0, 1, 2), (0, 1), (2, 0)]

    def body(mesh: Mesh) -> int:
        mine = [group for group in groups if mesh.rank in group]
        for group in mine:
            Meeting(mesh, [rank for rank in group if rank != mesh.rank]).wait()
        return len(mine)

    assert on_ranks(3, body) == [4, 4, 3]


def test_nobody_waits_for_one_that_is_gone() -> None:
    def body(mesh: Mesh) -> None:
        if mesh.rank == 1:
            mesh.close()
            return
        told = threading.Event()
        with pytest.raises(PeerLost):
            Meeting(mesh, [1], on_complete=told.set).wait()
        assert told.wait(WAIT_S)

    on_ranks(2, body)
