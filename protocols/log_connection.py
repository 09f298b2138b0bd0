"""The connection that a gang's log travels on: rank 0 to each other rank, and reports back.

A plain stream of frames and not a process group: an entry is sent without waiting for its receiver,
who may compute for a long time before it reads, and reports of all ranks are waited for at once.
Rank 0 listens; whoever connects proves that it knows the cluster secret (`rpc_handshake`) before
anything else is read.

    frame = length (4 bytes, big-endian) | that many bytes of MessagePack
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from csps.protocols.errors import (
    ConnectionLost,
    CspsError,
    DeadlineExceeded,
    ProtocolError,
)
from csps.protocols.rpc_handshake import AUTHENTICATE, HELLO, ClientHandshake, ServerHandshake

LOG_VERSION = 1
MAX_FRAME = 1 << 20
"""Bytes; entries and reports are far shorter."""
HANDSHAKE_S = 10.0
UNANSWERED_S = 30.0
"""Of what was sent, after which the other side's host counts as gone."""
_HEADER = 4


class LogSocket:
    """Frames over one connection. Any thread may send, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
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


class LogListener:
    """Where rank 0 waits for the others of its gang."""

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
        found: dict[int, LogSocket] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while len(found) < len(ranks):
                if not selector.select(max(0.0, ends - time.monotonic())):
                    raise DeadlineExceeded("the other ranks at the gang's log", deadline_s)
                self._greet(found, ranks, secret)
        return found

    def _greet(self, found: dict[int, LogSocket], ranks: range, secret: bytes) -> None:
        connection = LogSocket(self._listener.accept()[0])
        try:
            connection.deadline(HANDSHAKE_S)
            name = _admitted(connection, secret)
            rank = int(name) if name.isdecimal() else -1
            if rank not in ranks or rank in found:
                raise ProtocolError(f"{name} is no rank that is waited for")
            connection.deadline(None)
            found[rank] = connection
        except CspsError:
            connection.close()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()


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
    return _decoded(connection.receive())


def _admitted(connection: LogSocket, secret: bytes) -> str:
    """The peer's name, once it has proved that it knows the secret."""
    handshake = ServerHandshake(secret, LOG_VERSION)
    while not handshake.done:
        call = _decoded(connection.receive())
        if not (isinstance(call, list) and len(call) == 2 and isinstance(call[0], str)):
            raise ProtocolError("a connection of the log starts with a handshake")
        connection.send(msgspec.msgpack.encode(handshake.answer(*call)))
    return handshake.name


def _decoded(frame: bytes) -> object:
    try:
        return msgspec.msgpack.decode(frame)
    except msgspec.DecodeError as exc:
        raise ProtocolError(f"a frame of the log's handshake: {exc}") from exc
