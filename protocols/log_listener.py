"""Where rank 0 waits for the other ranks of its gang, who come to its log one by one.

Whoever connects proves that it knows the cluster secret before anything else is read. Handshakes go
on side by side: a stranger who connects and says nothing, or little by little, holds up nobody.
"""

from __future__ import annotations

import selectors
import socket
import time
from contextlib import suppress

import msgspec

from csps.protocols.errors import CspsError, DeadlineExceeded, ProtocolError
from csps.protocols.log_connection import LOG_VERSION, LogSocket, decoded
from csps.protocols.rpc_handshake import ServerHandshake

HANDSHAKE_S = 10.0
"""From connecting to the end of the handshake."""


class LogListener:
    """Listens on a free port."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]

    def accept(self, ranks: range, *, secret: bytes, deadline_s: float) -> dict[int, LogSocket]:
        """One connection to each of these ranks. Strangers are hung up on.

        Raises:
            DeadlineExceeded: not all of them came in time.
        """
        ends = time.monotonic() + deadline_s
        reception = _Reception(self._listener, ranks, secret)
        try:
            while len(reception.admitted) < len(ranks):
                if time.monotonic() >= ends:
                    raise DeadlineExceeded("the other ranks at the gang's log", deadline_s)
                reception.attend(ends)
        finally:
            reception.close()
        return reception.admitted

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()


class _Caller:
    """Somebody who has connected and has yet to prove who it is."""

    def __init__(self, connection: LogSocket, secret: bytes) -> None:
        connection.deadline(HANDSHAKE_S)
        self.connection = connection
        self.ends = time.monotonic() + HANDSHAKE_S
        self._handshake = ServerHandshake(secret, LOG_VERSION)

    def answer(self) -> str | None:
        """Answer what has come; the caller's name once it has proved that it knows the secret.

        Raises:
            CspsError: it does not know it, is gone or says something else.
        """
        for frame in self.connection.arrived():
            call = decoded(frame)
            if not (isinstance(call, list) and len(call) == 2 and isinstance(call[0], str)):
                raise ProtocolError("a connection of the log starts with a handshake")
            self.connection.send(msgspec.msgpack.encode(self._handshake.answer(*call)))
        return self._handshake.name if self._handshake.done else None


class _Reception:
    """All handshakes under way."""

    def __init__(self, listener: socket.socket, ranks: range, secret: bytes) -> None:
        self.admitted: dict[int, LogSocket] = {}
        self._listener, self._ranks, self._secret = listener, ranks, secret
        self._callers: set[_Caller] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)

    def attend(self, ends: float) -> None:
        """Wait until somebody says something, or for one deadline or another, and see to it."""
        first_end = min([ends, *(caller.ends for caller in self._callers)])
        for key, _ in self._selector.select(max(0.0, first_end - time.monotonic())):
            if key.data is None:
                self._greet()
            else:
                self._hear(key.data)
        now = time.monotonic()
        for caller in [it for it in self._callers if it.ends <= now]:
            self._part_with(caller)
            caller.connection.close()

    def _greet(self) -> None:
        with suppress(OSError):  # who it was is gone again
            caller = _Caller(LogSocket(self._listener.accept()[0]), self._secret)
            self._selector.register(caller.connection, selectors.EVENT_READ, caller)
            self._callers.add(caller)

    def _hear(self, caller: _Caller) -> None:
        try:
            name = caller.answer()
            if name is not None:
                self._admit(caller, name)
        except CspsError:
            self._part_with(caller)
            caller.connection.close()

    def _admit(self, caller: _Caller, name: str) -> None:
        rank = int(name) if name.isdecimal() else -1
        if rank not in self._ranks or rank in self.admitted:
            raise ProtocolError(f"{name} is no rank that is waited for")
        self._part_with(caller)
        caller.connection.deadline(None)
        self.admitted[rank] = caller.connection

    def _part_with(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        self._callers.remove(caller)

    def close(self) -> None:
        """Hang up on who has not been admitted."""
        for caller in self._callers:
            caller.connection.close()
        self._selector.close()
