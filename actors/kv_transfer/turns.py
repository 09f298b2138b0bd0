"""Whose turn it is to send KV to this rank (Tetris §4.2).

What receives KV is limited: a rank has so many *backends*, and `ReceivingBackends` says who gets
one. A sender asks for each step of each request, and sends when it is told to begin. A request that
nobody expects here any more gets no turn: its senders are told that it is unwanted. Backends gate
sends and never steps; what waits stays in the senders' pools.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from csps.actors.kv_transfer.reservation import Reservation
from csps.protocols.receiving_backends import ReceivingBackends, Transfer


class Turn(NamedTuple):
    """What one sender sends of one step of a request."""

    rid: int
    number: int
    """Of the sender's turns at this receiver."""


class ReceivingTurns:
    """Of one rank. Any thread may call anything."""

    def __init__(
        self,
        backends: int,
        find: Callable[[int], Reservation | None],
        tell: Callable[[int, Turn, bool], None],
    ) -> None:
        """
        Args:
            backends: how many turns there are at a time.
            find: what is expected of a request; None if there is none.
            tell: a sender (as a peer) whether it may begin its turn, or nobody wants it. It must
                not wait.
        """
        self._find, self._tell = find, tell
        self._lock = threading.Lock()
        self._backends = ReceivingBackends(backends)
        self._since: dict[Transfer, float] = {}
        """When the transfers that wait have asked."""

    @property
    def idle(self) -> bool:
        """All backends are free and nobody waits."""
        with self._lock:
            self._backends.check_integrity()
            return self._backends.free == self._backends.total and not self._since

    def ask(self, peer: int, turn: Turn) -> None:
        """A sender shakes hands."""
        transfer = Transfer(turn.rid, turn.number, peer)
        with self._lock:
            reservation = self._find(turn.rid)
            if reservation is not None:
                # Before it is looked whether it has left: either this is seen there, or that here.
                reservation.give_back = partial(self.release, turn.rid)
            if reservation is None or reservation.closed:
                self._tell(peer, turn, False)
                return
            self._since[transfer] = time.monotonic()
            self._begin(self._backends.handshake(transfer))

    def end(self, peer: int, turn: Turn) -> None:
        """A turn is over, or its sender wants it no more."""
        transfer = Transfer(turn.rid, turn.number, peer)
        with self._lock:
            self._since.pop(transfer, None)
            self._begin(self._backends.landed(transfer))

    def release(self, rid: int) -> None:
        """All KV of a request has landed, or nobody wants it any more."""
        with self._lock:
            for transfer in self._backends.waiting_of(rid):
                del self._since[transfer]
                self._tell(transfer.sender, Turn(rid, transfer.chunk), False)
            self._begin(self._backends.release(rid))

    def _begin(self, granted: list[Transfer]) -> None:
        now = time.monotonic()
        for transfer in granted:
            waited = now - self._since.pop(transfer)
            if (reservation := self._find(transfer.request)) is not None:
                reservation.waited = max(reservation.waited, waited)
            self._tell(transfer.sender, Turn(transfer.request, transfer.chunk), True)
