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
    Entry,
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
    """A conductor, in a thread, and the other ranks' ends."""

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

    def next(self, rank: int) -> Entry:
        return self._threads.submit(self.ends[rank].next).result(WAIT_S)

    def ops(self, rank: int, count: int) -> list[Op]:
        return [self.next(rank).op for _ in range(count)]

    def close(self) -> None:
        for end in self.ends:
            end.close()


@contextmanager
def gang(ranks: int) -> Iterator[Gang]:
    with ThreadPoolExecutor(8) as threads:
        it = Gang(ranks, threads)
        try:
            yield it
        finally:
            it.close()


def test_a_step_goes_around() -> None:
    with gang(3) as it:
        it.submit(7, 1, 2, yield_points=2)
        for rank in (1, 2):
            it.ends[rank].report(Prepared(rank, 7))
        first = it.next(1)
        assert first.op == RunQuantum(7, 1)
        assert it.ops(1, 1) == [RunQuantum(7, 2)]
        assert it.ops(2, 2) == [RunQuantum(7, 1), RunQuantum(7, 2)]
        it.ends[1].report(RanQuantum(1, first.seq, 7, 1, 1000))
        it.submit(8, 0)
        it.leader.report(Prepared(0, 8))
        assert it.ops(0, 1) == [RunQuantum(8, 1)]


def test_what_many_threads_tell_is_all_heard() -> None:
    with gang(1) as it:

        def tell(thread: int) -> None:
            for number in range(50):
                it.leader.report(Prepared(0, 50 * thread + number))

        tellers = [threading.Thread(target=tell, args=(thread,)) for thread in range(4)]
        for teller in tellers:
            teller.start()
        for step in range(200):
            it.submit(step, 0)
        for step in range(200):
            entry = it.next(0)
            assert entry.op == RunQuantum(step, 1)
            it.leader.report(RanQuantum(0, entry.seq, step, 1, 1000))
        for teller in tellers:
            teller.join(WAIT_S)


def test_the_others_have_the_last_entry_before_its_own_rank_can_hang_up() -> None:
    with gang(3) as it:
        it.leader.post(Sequencer.shutdown)
        assert it.ops(0, 1) == [Shutdown()]
        it.leader.close()
        assert it.ops(1, 1) == it.ops(2, 1) == [Shutdown()]
        it.conducting.result(WAIT_S)


def test_a_member_that_leaves_ends_the_log_in_order() -> None:
    """Also if it hangs up at once, and others report to nobody."""
    with gang(3) as it:
        it.members[0].leave()
        assert it.ops(0, 1) == it.ops(1, 1) == it.ops(2, 1) == [Shutdown()]
        it.members[0].close()
        it.conducting.result(WAIT_S)
        it.leader.close()
        it.members[1].report(Prepared(2, 7))
        with pytest.raises(ConnectionLost):
            it.next(2)


def test_closing_in_the_middle_of_an_entry_is_no_fault() -> None:
    with gang(2) as it:

        def end(sequencer: Sequencer) -> None:
            sequencer.shutdown()
            it.leader.close()

        it.leader.post(end)
        it.conducting.result(WAIT_S)


@pytest.mark.parametrize("gone", [0, 1])
def test_whoever_goes_takes_all_along(gone: int) -> None:
    """What a rank does when its log has ended is to close its end of it."""
    with gang(3) as it:
        it.ends[gone].close()
        if gone:
            with pytest.raises(ConnectionLost):
                it.conducting.result(WAIT_S)
            it.leader.close()
        for rank in range(3):
            with pytest.raises(ConnectionLost):
                it.next(rank)


def test_a_report_that_nobody_asked_for_ends_the_conductor() -> None:
    with gang(2) as it:
        it.submit(7, 0, 1)
        for rank in (0, 1):
            it.ends[rank].report(Prepared(rank, 7))
        it.members[0].report(RanQuantum(1, it.next(1).seq, 7, 1, 0))  # it does not lead
        with pytest.raises(ProtocolError, match="unasked"):
            it.conducting.result(WAIT_S)


def test_closing_ends_who_waits_and_does_so_twice() -> None:
    with gang(2) as it, ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(it.leader.next)
        it.leader.close()
        it.leader.close()
        with pytest.raises(ConnectionLost):
            waiting.result(WAIT_S)
        with pytest.raises(ConnectionLost):
            it.leader.next()
        it.leader.post(Sequencer.shutdown)
