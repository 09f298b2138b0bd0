"""A rank's end of its gang's log: entries come in, reports go out.

Rank 0 hosts the sequencer in a thread of its own, which appends entries while the rank computes.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

from csps.protocols.core.errors import ConnectionLost
from csps.protocols.sequencer.log_connection import LogSocket
from csps.protocols.sequencer.log_entries import (
    Leaving,
    LogEntry,
    Report,
    pack_entries,
    pack_reports,
    unpack_entries,
    unpack_reports,
)
from csps.protocols.sequencer.sequencer import Sequencer


class LogEnd(Protocol):
    """A rank's end of the log. Only the engine thread reads; any thread may report."""

    def next(self) -> LogEntry:
        """Wait for the rank's next entry; raise ConnectionLost when the gang is gone."""
        ...

    def report(self, report: Report) -> None:
        """Send a report to the sequencer. If the sequencer is gone, `next` raises, not this."""
        ...

    def leave(self) -> None:
        """End the log at all ranks, because this one is being closed."""
        ...

    def close(self) -> None:
        """Wake whoever waits for an entry, and return no further ones. Idempotent."""
        ...


class MemberEnd:
    """End of every rank but the first."""

    def __init__(self, connection: LogSocket) -> None:
        self._connection = connection
        self._entries: deque[LogEntry] = deque()

    def next(self) -> LogEntry:
        while not self._entries:
            self._entries.extend(unpack_entries(self._connection.receive()))
        return self._entries.popleft()

    def report(self, report: Report) -> None:
        # The log may have ended with an entry that is not read yet: then nobody listens any more.
        with suppress(ConnectionLost):
            self._connection.send(pack_reports([report]))

    def leave(self) -> None:
        self.report(Leaving())

    def close(self) -> None:
        self._connection.close()


class SequencerEnd:
    """End of rank 0. `run` is the body of the sequencer's thread; `post` hands it events."""

    def __init__(self, sequencer: Sequencer, members: Mapping[int, LogSocket]) -> None:
        """Args:
        members: connections to all other ranks.
        """
        self._sequencer = sequencer
        self._members = members
        self._own: SimpleQueue[LogEntry | None] = SimpleQueue()
        self._events: deque[Callable[[Sequencer], None]] = deque()
        self._woken, self._waker = socket.socketpair()
        self._awake = threading.Lock()
        self._wake_sent = False
        self._closed = False

    def next(self) -> LogEntry:
        entry = self._own.get()
        if entry is None:
            self._own.put(None)
            raise ConnectionLost("the gang's log was closed")
        return entry

    def report(self, report: Report) -> None:
        self.post(lambda sequencer: sequencer.report(report))

    def leave(self) -> None:
        self.post(Sequencer.shutdown)

    def post(self, event: Callable[[Sequencer], None]) -> None:
        """Queue an event for the sequencer, in the order of calls; from any thread."""
        self._events.append(event)
        with self._awake:
            if not (self._wake_sent or self._closed):
                self._wake_sent = True
                self._waker.send(b"\0")

    def run(self) -> None:
        """Run the sequencer until this is closed. A lost member is an error unless the log has
        ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ, None)
            for connection in self._members.values():
                selector.register(connection, selectors.EVENT_READ, connection)
            try:
                while not self._closed:
                    for key, _ in selector.select():
                        self._read(key.data)
                    self._append_entries()
            except ConnectionLost:
                if not (self._closed or self._sequencer.closed):
                    raise

    def _read(self, connection: LogSocket | None) -> None:
        if connection is None:
            with self._awake:
                self._woken.recv(16)
                self._wake_sent = False
            return
        for frame in connection.arrived():
            for report in unpack_reports(frame):
                self._sequencer.report(report)

    def _append_entries(self) -> None:
        while self._events:
            self._events.popleft()(self._sequencer)
        by_rank: dict[int, list[LogEntry]] = {}
        for entry, ranks in self._sequencer.take():
            for rank in ranks:
                by_rank.setdefault(rank, []).append(entry)
        # This rank last: once it has read the last entry, it disconnects from the others.
        own = by_rank.pop(0, [])
        for rank, entries in by_rank.items():
            self._members[rank].send(pack_entries(entries))
        for entry in own:
            self._own.put(entry)

    def close(self) -> None:
        with self._awake:
            if self._closed:
                return
            self._closed = True
            self._waker.send(b"\0")
        self._own.put(None)
        for connection in self._members.values():
            connection.close()
