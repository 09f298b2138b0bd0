"""The connection that a gang's log travels on: rank 0 to each other rank, and reports back.

A plain stream of frames and not a process group: an entry is sent without waiting for its receiver,
who may compute for a long time before it reads, and reports of all ranks are waited for at once.
Rank 0 listens (`log_listener`); the others connect, and both sides prove that they know the cluster
secret (`rpc_handshake`) before anything else is read.

    frame = length (4 bytes, big-endian) | that many bytes of MessagePack

Where rank 0 waits for the other ranks of its gang, who come to its log one by one.

Whoever connects proves that it knows the cluster secret before anything else is read. Handshakes go
on side by side: a stranger who connects and says nothing, or little by little, holds up nobody.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from csps.protocols.core.errors import ConnectionLost, CspsError, DeadlineExceeded, ProtocolError
from csps.protocols.rpc.wire import (
    AUTHENTICATE,
    HELLO,
    ClientHandshake,
    ServerHandshake,
    keep_alive,
)

LOG_VERSION = 1
MAX_FRAME = 1 << 20
"""Bytes; entries and reports are far shorter."""
UNANSWERED_S = 30.0
"""Of what was sent, after which the other side's host counts as gone."""
_HEADER = 4


class LogSocket:
    """Frames over one connection. Any thread may send, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            unanswered_ms = int(UNANSWERED_S * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unanswered_ms)
        self._sock = sock
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._whole: list[bytes] = []

    def fileno(self) -> int:
        """For a selector."""
        return self._sock.fileno()

    def send(self, frame: bytes) -> None:
        """Send one frame; returns before it is read.

        Raises:
            ConnectionLost: the other side is gone.
        """
        assert len(frame) <= MAX_FRAME
        try:
            with self._sending:
                self._sock.sendall(len(frame).to_bytes(_HEADER, "big") + frame)
        except OSError as exc:
            raise ConnectionLost(f"the connection of the log: {exc}") from exc

    def receive(self) -> bytes:
        """Wait for the next frame.

        Raises:
            ConnectionLost: the other side is gone, or this one was closed.
            ProtocolError: what comes is no frame.
        """
        while not self._whole:
            self._whole = self.arrived()
        return self._whole.pop(0)

    def arrived(self) -> list[bytes]:
        """Read once, waiting for something to come; the frames that are complete now."""
        try:
            received = self._sock.recv(1 << 16)
        except OSError as exc:
            raise ConnectionLost(f"the connection of the log: {exc}") from exc
        if not received:
            raise ConnectionLost("the connection of the log was closed")
        self._buffer += received
        return list(self._cut())

    def _cut(self) -> Iterator[bytes]:
        while len(self._buffer) >= _HEADER:
            length = int.from_bytes(self._buffer[:_HEADER], "big")
            if length > MAX_FRAME:
                raise ProtocolError(f"a frame of {length} bytes on the connection of the log")
            stop = _HEADER + length
            if len(self._buffer) < stop:
                return
            yield bytes(self._buffer[_HEADER:stop])
            del self._buffer[:stop]

    def deadline(self, seconds: float | None) -> None:
        """How long a read may wait from now on; None for ever."""
        self._sock.settimeout(seconds)

    def close(self) -> None:
        """Hang up; wakes whoever waits for a frame, on both sides."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def join_log(host: str, port: int, *, rank: int, secret: bytes, deadline_s: float) -> LogSocket:
    """Connect to rank 0.

    Raises:
        FaultError: it cannot be reached in time, or does not know the secret.
    """
    try:
        connection = LogSocket(socket.create_connection((host, port), deadline_s))
    except OSError as exc:
        raise ConnectionLost(f"rank 0 at {host}:{port} cannot be reached: {exc}") from exc
    try:
        connection.deadline(deadline_s)
        handshake = ClientHandshake(secret, LOG_VERSION, str(rank))
        reply = _call(connection, HELLO, handshake.hello())
        handshake.verify(_call(connection, AUTHENTICATE, handshake.authenticate(reply)))
        connection.deadline(None)
    except BaseException:
        connection.close()
        raise
    return connection


def _call(connection: LogSocket, method: str, payload: object) -> object:
    connection.send(msgspec.msgpack.encode((method, payload)))
    return decoded(connection.receive())


def decoded(frame: bytes) -> object:
    """What a frame of the handshake says.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return msgspec.msgpack.decode(frame)
    except (ValueError, RecursionError) as exc:  # such as bad text, or lists in lists in lists
        raise ProtocolError(f"a frame of the log's handshake: {exc}") from exc


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
        admission = _Admission(self._listener, ranks, secret)
        try:
            while len(admission.admitted) < len(ranks):
                if time.monotonic() >= ends:
                    raise DeadlineExceeded("the other ranks at the gang's log", deadline_s)
                admission.attend(ends)
        finally:
            admission.close()
        return admission.admitted

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


class _Admission:
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
                self._receive(key.data)
        now = time.monotonic()
        for caller in [it for it in self._callers if it.ends <= now]:
            self._drop(caller)
            caller.connection.close()

    def _greet(self) -> None:
        with suppress(OSError):  # who it was is gone again
            caller = _Caller(LogSocket(self._listener.accept()[0]), self._secret)
            self._selector.register(caller.connection, selectors.EVENT_READ, caller)
            self._callers.add(caller)

    def _receive(self, caller: _Caller) -> None:
        try:
            name = caller.answer()
            if name is not None:
                self._admit(caller, name)
        except CspsError:
            self._drop(caller)
            caller.connection.close()

    def _admit(self, caller: _Caller, name: str) -> None:
        rank = int(name) if name.isdecimal() else -1
        if rank not in self._ranks or rank in self.admitted:
            raise ProtocolError(f"{name} is no rank that is waited for")
        self._drop(caller)
        caller.connection.deadline(None)
        self.admitted[rank] = caller.connection

    def _drop(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        self._callers.remove(caller)

    def close(self) -> None:
        """Hang up on who has not been admitted."""
        for caller in self._callers:
            caller.connection.close()
        self._selector.close()
