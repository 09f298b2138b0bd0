"""The connection that a gang's log travels on: rank 0 to each other rank, and reports back.

A plain stream of frames and not a process group: an entry is sent without waiting for its receiver,
who may compute for a long time before it reads, and reports of all ranks are waited for at once.
Rank 0 listens (`log_listener`); the others connect, and both sides prove that they know the cluster
secret (`rpc_handshake`) before anything else is read.

    frame = length (4 bytes, big-endian) | that many bytes of MessagePack
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from csps.protocols.errors import ConnectionLost, ProtocolError
from csps.protocols.rpc_handshake import AUTHENTICATE, HELLO, ClientHandshake
from csps.protocols.rpc_wire import keep_alive

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
