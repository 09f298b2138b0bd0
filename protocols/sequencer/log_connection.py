"""Connections that carry a gang's log: rank 0 sends entries to the other ranks, which send reports.

Rank 0 listens; every other rank connects to it. Both sides prove that they know the cluster secret
(handshake of `csps.protocols.rpc.wire`) before anything else is read. Handshakes run concurrently,
so a stranger who connects and sends nothing, or little by little, delays nobody.

    frame = length (4 bytes, big-endian) | that many bytes of MessagePack
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from csps.protocols.core.errors import (
    ConnectionLost,
    CspsError,
    DeadlineExceeded,
    ProtocolError,
    ProtocolMismatch,
    abridged,
    from_wire,
    to_wire,
)
from csps.protocols.rpc.wire import (
    AUTHENTICATE,
    HELLO,
    ClientHandshake,
    ServerHandshake,
    notice_silence,
)

_log = logging.getLogger(__name__)

LOG_VERSION = 4
"""Version of log entries and reports; ranks with different versions refuse each other."""
MAX_FRAME = 1 << 20
"""Longest frame in bytes; entries and reports are far shorter."""
_HEADER = 4


# Sockets rather than a process group: an entry is sent without waiting for its receiver, which may
# compute for a long time before it reads, and reports of all ranks are awaited at once.
class LogSocket:
    """Frames over one connection. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_silence(sock)
        self._sock = sock
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._whole: list[bytes] = []

    def fileno(self) -> int:
        """Return the file descriptor, for a selector."""
        return self._sock.fileno()

    def send(self, frame: bytes) -> None:
        """Send one frame, without waiting until it is read.

        Raises:
            ConnectionLost: the other side is gone.
        """
        assert len(frame) <= MAX_FRAME
        try:
            with self._sending:
                self._sock.sendall(len(frame).to_bytes(_HEADER, "big") + frame)
        except OSError as exc:
            raise ConnectionLost(f"sending on the gang's log connection failed: {exc}") from exc

    def receive(self) -> bytes:
        """Wait for the next frame.

        Raises:
            ConnectionLost: the other side is gone, or this one was closed.
            ProtocolError: the received bytes are not a frame.
        """
        while not self._whole:
            self._whole = self.arrived()
        return self._whole.pop(0)

    def arrived(self) -> list[bytes]:
        """Wait for data, read once, and return the frames that are complete now."""
        try:
            received = self._sock.recv(1 << 16)
        except OSError as exc:
            raise ConnectionLost(f"reading the gang's log connection failed: {exc}") from exc
        if not received:
            raise ConnectionLost("the other side closed the gang's log connection")
        self._buffer += received
        return list(self._cut())

    def _cut(self) -> Iterator[bytes]:
        while len(self._buffer) >= _HEADER:
            length = int.from_bytes(self._buffer[:_HEADER], "big")
            if length > MAX_FRAME:
                raise ProtocolError(
                    f"gang log connection: frame of {length} bytes, {MAX_FRAME} allowed"
                )
            stop = _HEADER + length
            if len(self._buffer) < stop:
                return
            yield bytes(self._buffer[_HEADER:stop])
            del self._buffer[:stop]

    def deadline(self, seconds: float | None) -> None:
        """Set how long a read may wait from now on; None means forever."""
        self._sock.settimeout(seconds)

    def close(self) -> None:
        """Close the connection, and wake all threads that wait for a frame, on both sides."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def join_log(host: str, port: int, *, rank: int, secret: bytes, deadline_s: float) -> LogSocket:
    """Connect a rank to rank 0.

    Raises:
        ProtocolMismatch: rank 0 speaks another version of the log.
        FaultError: rank 0 cannot be reached in time, or does not know the secret.
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
    _log.debug("rank %d joined the gang's log at %s:%d", rank, host, port)
    return connection


def _call(connection: LogSocket, method: str, payload: object) -> object:
    connection.send(msgspec.msgpack.encode((method, payload)))
    match decoded(connection.receive()):
        case {"code": _} as error:
            raise from_wire(error)
        case reply:
            return reply


def decoded(frame: bytes) -> object:
    """Decode a frame of the handshake.

    Raises:
        ProtocolError: the frame is not MessagePack.
    """
    try:
        return msgspec.msgpack.decode(frame)
    except (ValueError, RecursionError) as exc:  # invalid UTF-8, or deeply nested lists
        raise ProtocolError(f"gang log handshake: not MessagePack: {exc}") from exc


HANDSHAKE_S = 10.0
"""Time from connecting to the end of the handshake."""


class LogListener:
    """Rank 0's listening socket, on a free port."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]

    def accept(self, ranks: range, *, secret: bytes, deadline_s: float) -> dict[int, LogSocket]:
        """Return one connection to each of these ranks, dropping strangers.

        Raises:
            DeadlineExceeded: some ranks did not connect in time.
        """
        ends = time.monotonic() + deadline_s
        admission = _Admission(self._listener, ranks, secret)
        try:
            while len(admission.admitted) < len(ranks):
                if time.monotonic() >= ends:
                    missing = sorted(set(ranks) - set(admission.admitted))
                    _log.debug("ranks %s have not joined the gang's log", missing)
                    raise DeadlineExceeded("the other ranks at the gang's log", deadline_s)
                admission.wait(ends)
        finally:
            admission.close()
        return admission.admitted

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()


class _Caller:
    """A connection whose handshake is not done."""

    def __init__(self, connection: LogSocket, secret: bytes) -> None:
        connection.deadline(HANDSHAKE_S)
        self.connection = connection
        self.ends = time.monotonic() + HANDSHAKE_S
        self._handshake = ServerHandshake(secret, LOG_VERSION)

    def answer(self) -> str | None:
        """Answer the frames that arrived; return the caller's name once its proof was accepted.

        Raises:
            CspsError: the caller does not know the secret, is gone or breaks the protocol.
        """
        for frame in self.connection.arrived():
            call = decoded(frame)
            if not (isinstance(call, list) and len(call) == 2 and isinstance(call[0], str)):
                raise ProtocolError("a gang log connection starts with a handshake")
            self.connection.send(msgspec.msgpack.encode(self._handshake.answer(*call)))
        return self._handshake.name if self._handshake.done else None


class _Admission:
    """All handshakes in progress."""

    def __init__(self, listener: socket.socket, ranks: range, secret: bytes) -> None:
        self.admitted: dict[int, LogSocket] = {}
        self._listener, self._ranks, self._secret = listener, ranks, secret
        self._callers: set[_Caller] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, None)

    def wait(self, ends: float) -> None:
        """Wait for a connection, a frame or the next deadline, and handle it."""
        first_end = min([ends, *(caller.ends for caller in self._callers)])
        for key, _ in self._selector.select(max(0.0, first_end - time.monotonic())):
            if key.data is None:
                self._accept()
            else:
                self._receive(key.data)
        now = time.monotonic()
        for caller in [caller for caller in self._callers if caller.ends <= now]:
            self._drop(caller)
            caller.connection.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the caller is gone again
            caller = _Caller(LogSocket(self._listener.accept()[0]), self._secret)
            self._selector.register(caller.connection, selectors.EVENT_READ, caller)
            self._callers.add(caller)

    def _receive(self, caller: _Caller) -> None:
        try:
            name = caller.answer()
            if name is not None:
                self._admit(caller, name)
        except CspsError as error:
            _log.warning("refused a connection to the gang's log: %s", error)
            if isinstance(error, ProtocolMismatch):
                # Strangers get no answer, but a rank of another release must learn the reason.
                with suppress(ConnectionLost):
                    caller.connection.send(msgspec.msgpack.encode(to_wire(error)))
            self._drop(caller)
            caller.connection.close()

    def _admit(self, caller: _Caller, name: str) -> None:
        rank = next((rank for rank in self._ranks if str(rank) == name), -1)
        if rank < 0 or rank in self.admitted:
            raise ProtocolError(f"rank {abridged(name)} is not expected at the gang's log")
        self._drop(caller)
        caller.connection.deadline(None)
        self.admitted[rank] = caller.connection

    def _drop(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        self._callers.remove(caller)

    def close(self) -> None:
        """Close the connections that were not admitted."""
        for caller in self._callers:
            caller.connection.close()
        self._selector.close()
