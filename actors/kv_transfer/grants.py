"""What a receiver tells one sender, in one order, by whichever of its threads."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

from csps.actors.kv_transfer.connection import SILENCE, Grant, KvConnection
from csps.actors.kv_transfer.turns import Turn
from csps.actors.process_group import PeerLost, Pending


class Grants:
    """To one peer. Nothing waits for its listening but `settle`, which its own thread calls: a
    sender that has died holds up no other."""

    def __init__(self, connection: KvConnection, peer: int, window: int) -> None:
        """
        Args:
            window: bytes that may be under way.
        """
        self._connection, self._peer, self._window = connection, peer, window
        self._lock = threading.Lock()
        self._landed = 0
        self._pending: deque[Pending] = deque()

    def landed(self, charge: int) -> None:
        """So many more bytes are not under way any more.

        Raises:
            PeerLost: the connection is closed.
        """
        with self._lock:
            self._landed += charge
            self._post(Grant(self._window, self._landed))

    def answer(self, turn: Turn, wanted: bool) -> None:
        """Say whether a turn may begin. A sender that is gone need not know."""
        with self._lock, suppress(PeerLost):
            self._post(Grant(self._window, self._landed, turn, wanted))

    def _post(self, grant: Grant) -> None:
        self._pending.append(self._connection.grant(self._peer, grant))

    def settle(self) -> None:
        """Wait until all of it was heard; PeerLost if the sender does not listen."""
        while self._pending:
            self._pending[0].wait(SILENCE)
            self._pending.popleft()
