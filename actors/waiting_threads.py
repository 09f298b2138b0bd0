"""Threads that wait for operations with peers, lent to one job after another.

Whoever starts a thread waits until it lives. Where ranks have fewer cores than they could use that
is until another one's turn is over, milliseconds in the middle of a layer, so that threads are
kept for the next job.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from enum import Enum, auto
from queue import SimpleQueue

from csps.actors.process_group import Pending


class _Word(Enum):
    """What a thread is told beside what to wait for."""

    COME_BACK = auto()
    END = auto()


class WaitingThreads:
    """Of one rank's mesh. Any thread may call anything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[WaitingThread] = []
        self._closed = False

    def lend(self) -> WaitingThread:
        """One that waits for nothing; to be given back (`WaitingThread.give_back`)."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return WaitingThread(self)

    def close(self) -> None:
        """End all of them, those that are lent when they come back."""
        with self._lock:
            self._closed = True
            for thread in self._idle:
                thread.end()
            self._idle.clear()

    def come_back(self, thread: WaitingThread) -> None:
        """What it was to wait for has ended."""
        with self._lock:
            if self._closed:
                thread.end()
            else:
                self._idle.append(thread)


class WaitingThread:
    """Waits for pending operations one after the other."""

    def __init__(self, threads: WaitingThreads) -> None:
        self._threads = threads
        self._items: SimpleQueue[tuple[Pending, Future[int]] | _Word] = SimpleQueue()
        # A daemon: a peer that hangs must not keep a rank from ending.
        threading.Thread(target=self._run, name="waiting", daemon=True).start()

    def add(self, pending: Pending) -> Future[int]:
        """The time (Unix, ns) at which it has ended."""
        future: Future[int] = Future()
        self._items.put((pending, future))
        return future

    def give_back(self) -> None:
        """Others may have it when what was added has ended."""
        self._items.put(_Word.COME_BACK)

    def end(self) -> None:
        """Wait for nothing more."""
        self._items.put(_Word.END)

    def _run(self) -> None:
        while (item := self._items.get()) is not _Word.END:
            if item is _Word.COME_BACK:
                self._threads.come_back(self)
                continue
            pending, future = item
            try:
                pending.wait()
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(time.time_ns())
            del item, pending, future  # an idle thread keeps nothing alive
