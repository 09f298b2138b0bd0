"""Both ends of a gang's log, over real connections: who reads what, and how it ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from csps.actors.engine.log_end import MemberEnd, SequencerEnd
from csps.protocols.core.errors import ConnectionLost, ProtocolError
from csps.protocols.sequencer.log_connection import LogSocket
from csps.protocols.sequencer.log_entries import (
    LogEntry,
    Op,
    Prepared,
    RanQuantum,
    RunQuantum,
    Shutdown,
)
from csps.protocols.sequencer.sequencer import Sequencer
from csps.protocols.sequencer.steps import StepSpec

WAIT_S, OWNER = 60.0, 1


class Gang:
    """A sequencer in a thread, and the other ranks' ends."""

    def __init__(self, ranks: int, threads: ThreadPoolExecutor) -> None:
        connections: dict[int, LogSocket] = {}
        self.members: list[MemberEnd] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            for rank in range(1, ranks):
                self.members.append(
                    MemberEnd(LogSocket(socket.create_connection(server.getsockname())))
                )
                connections[rank] = LogSocket(server.accept()[0])
        self.leader = SequencerEnd(Sequencer(ranks), connections)
        self._threads = threads
        self.conducting: Future[None] = threads.submit(self.leader.run)

    @property
    def ends(self) -> list[SequencerEnd | MemberEnd]:
        return [self.leader, *self.members]

    def submit(self, step: int, *ranks: int, yield_points: int = 1) -> None:
        task = StepSpec(
            id=step,
            ranks=ranks,
            high_priority=False,
            yield_points=yield_points,
            sequences=(),
            owner=OWNER,
        )
        self.leader.post(lambda sequencer: sequencer.submit(task))

    def next(self, rank: int) -> LogEntry:
        return self._threads.submit(self.ends[rank].next).result(WAIT_S)

    def ops(self, rank: int, count: int) -> list[Op]:
        return [self.next(rank).op for _ in range(count)]

    def close(self) -> None:
        for end in self.ends:
            end.close()


@contextmanager
def gang(ranks: int) -> Iterator[Gang]:
    with ThreadPoolExecutor(8) as threads:
        group = Gang(ranks, threads)
        try:
            yield group
        finally:
            group.close()


def test_a_step_is_ordered_and_reported() -> None:
    with gang(3) as group:
        group.submit(7, 1, 2, yield_points=2)
        for rank in (1, 2):
            group.ends[rank].report(Prepared(rank, 7))
        first = group.next(1)
        assert first.op == RunQuantum(7, 1)
        assert group.ops(1, 1) == [RunQuantum(7, 2)]
        assert group.ops(2, 2) == [RunQuantum(7, 1), RunQuantum(7, 2)]
        group.ends[1].report(RanQuantum(1, first.seq, 7, 1, 1000))
        group.submit(8, 0)
        group.leader.report(Prepared(0, 8))
        assert group.ops(0, 1) == [RunQuantum(8, 1)]


def test_events_of_many_threads_all_arrive() -> None:
    with gang(1) as group:

        def tell(thread: int) -> None:
            for number in range(50):
                group.leader.report(Prepared(0, 50 * thread + number))

        tellers = [threading.Thread(target=tell, args=(thread,)) for thread in range(4)]
        for teller in tellers:
            teller.start()
        for step in range(200):
            group.submit(step, 0)
        ran = set()
        for _ in range(200):
            entry = group.next(0)
            assert isinstance(entry.op, RunQuantum)
            step = entry.op.step
            ran.add(step)
            group.leader.report(RanQuantum(0, entry.seq, step, 1, 1000))
        # In which order depends on which thread was first to say that its steps are prepared.
        assert ran == set(range(200))
        for teller in tellers:
            teller.join(WAIT_S)


def test_the_others_have_the_last_entry_before_rank_0_can_disconnect() -> None:
    with gang(3) as group:
        group.leader.post(Sequencer.shutdown)
        assert group.ops(0, 1) == [Shutdown()]
        group.leader.close()
        assert group.ops(1, 1) == group.ops(2, 1) == [Shutdown()]
        group.conducting.result(WAIT_S)


def test_a_member_that_leaves_ends_the_log_in_order() -> None:
    """The member may disconnect at once, while others report to nobody."""
    with gang(3) as group:
        group.members[0].leave()
        assert group.ops(0, 1) == group.ops(1, 1) == group.ops(2, 1) == [Shutdown()]
        group.members[0].close()
        group.conducting.result(WAIT_S)
        group.leader.close()
        group.members[1].report(Prepared(2, 7))
        with pytest.raises(ConnectionLost):
            group.next(2)


def test_closing_in_the_middle_of_an_entry_is_no_fault() -> None:
    with gang(2) as group:

        def end(sequencer: Sequencer) -> None:
            sequencer.shutdown()
            group.leader.close()

        group.leader.post(end)
        group.conducting.result(WAIT_S)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_lost_member_ends_the_log_of_all(gone: int) -> None:
    """A rank whose log has ended closes its end of it."""
    with gang(3) as group:
        group.ends[gone].close()
        if gone:
            with pytest.raises(ConnectionLost):
                group.conducting.result(WAIT_S)
            group.leader.close()
        for rank in range(3):
            with pytest.raises(ConnectionLost):
                group.next(rank)


def test_an_unexpected_report_ends_the_sequencer() -> None:
    with gang(2) as group:
        group.submit(7, 0, 1)
        for rank in (0, 1):
            group.ends[rank].report(Prepared(rank, 7))
        group.members[0].report(RanQuantum(1, group.next(1).seq, 7, 1, 0))  # it does not lead
        with pytest.raises(ProtocolError, match="unasked"):
            group.conducting.result(WAIT_S)


def test_closing_twice_ends_waiting_threads() -> None:
    with gang(2) as group, ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(group.leader.next)
        group.leader.close()
        group.leader.close()
        with pytest.raises(ConnectionLost):
            waiting.result(WAIT_S)
        with pytest.raises(ConnectionLost):
            group.leader.next()
        group.leader.post(Sequencer.shutdown)
