"""Threads that wait for exchanges are lent from step to step."""

from __future__ import annotations

import threading
import time

import pytest

from csps.actors.comm.mesh import WaitingThread, WaitingThreads
from csps.actors.comm.process_group import PeerLost, Pending

WAIT_S = 60.0


class Watched(WaitingThreads):
    """Says when a thread has come back."""

    def __init__(self) -> None:
        super().__init__()
        self.back = threading.Event()

    def take_back(self, thread: WaitingThread) -> None:
        super().take_back(thread)
        self.back.set()


class Lost(Pending):
    """An operation with a peer that died."""

    def __init__(self) -> None:
        super().__init__([], [])

    def wait(self, *_: object) -> None:
        raise PeerLost("gone")


def test_the_next_step_gets_the_thread_of_the_one_before() -> None:
    before, threads = set(threading.enumerate()), Watched()
    first, other = threads.lend(), threads.lend()
    assert first is not other
    since = time.time_ns()
    assert since <= first.add(Pending([], [])).result(WAIT_S) <= time.time_ns()
    with pytest.raises(PeerLost):
        first.add(Lost()).result(WAIT_S)
    first.release()
    assert threads.back.wait(WAIT_S)
    assert threads.lend() is first
    threads.close()
    for lent in (first, other):
        lent.release()
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_an_idle_thread_ends_with_the_mesh() -> None:
    before, threads = set(threading.enumerate()), Watched()
    threads.lend().release()
    assert threads.back.wait(WAIT_S)
    (idle,) = set(threading.enumerate()) - before
    threads.close()
    idle.join(WAIT_S)
    assert not idle.is_alive()
