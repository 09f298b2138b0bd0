"""MessagePack-RPC over one TCP connection: framing, handshake, and what both ends share.

The messages are those of the MessagePack-RPC specification, so a foreign implementation can take
part::

    request       [0, msgid, method, params]
    response      [1, msgid, error, result]
    notification  [2, method, params]

Conventions on top of it:

- `params` is `[]`, `[payload]` or `[payload, meta]`. `meta` is a map with the optional keys
  `deadline_ms` (int, from arrival; the server then cancels the call) and `traceparent`,
  `tracestate` (W3C trace context).
- `error` is nil or the map `{code, message, data?}` of `errors.to_wire`.
- The first two calls on a connection are `hello` and `authenticate` (see `ServerHandshake`).
- The notification `$cancel [msgid]` cancels a call; it is still answered, usually by `Cancelled`.
- The notification `$closing [error]` precedes the end of a connection that broke a rule.
- A server answers the notification `$ping` of an authenticated client by `$pong`.
- Messages are handled in the order of their arrival, notifications included.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any, Literal, cast

import msgpack  # type: ignore[import-untyped]

from csps.protocols.core.errors import (
    AuthenticationFailed,
    ConfigError,
    ConnectionLost,
    CspsError,
    ProtocolError,
    ProtocolMismatch,
    abridged,
    from_wire,
    to_wire,
)
from csps.protocols.rpc.schema import pack, unpack

SCHEMA_VERSION = 8
"""Version of all messages; two processes with different versions refuse each other."""

REQUEST, RESPONSE, NOTIFICATION = 0, 1, 2
CANCEL, CLOSING, PING, PONG = "$cancel", "$closing", "$ping", "$pong"

_HANDSHAKE_FRAME_BYTES = 64 * 1024
LINGER_S = 1.0
"""Time that closing a connection may take before it is cut."""
_READ_BYTES = 1 << 20
"""Bytes at once that no event loop exceeds when it calls `data_received`."""


@dataclass(frozen=True, kw_only=True)
class RpcLimits:
    """Limits of one connection."""

    max_frame_bytes: int = 64 << 20
    """Longest message that is sent or accepted."""
    high_water_bytes: int = 1 << 20
    """Unsent bytes above which `drain()` waits."""
    max_backlog_bytes: int = 32 << 20
    """Unsent bytes above which nothing more is queued and the connection is cut: the peer does not
    read. One message is queued whatever its length, so a peer costs at most this and one message.
    The prompts that may wait at a router together are half as long."""
    handshake_s: float = 5.0
    """Time that a client has to authenticate itself."""

    def __post_init__(self) -> None:
        if min(astuple(self)) <= 0:
            raise ValueError(f"limits must be positive: {self}")


class FrameReader:
    """Cuts a byte stream, however chunked, into MessagePack objects. No I/O.

    msgpack allocates memory for the bytes that have arrived, never for a length that a peer
    announces. A message is refused as soon as `max_frame_bytes` of it have arrived.
    """

    def __init__(self, max_frame_bytes: int, *, ceiling: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        """Longest message accepted; it may be raised later, up to `ceiling`."""
        self._unpacker = msgpack.Unpacker(
            max_buffer_size=ceiling + _READ_BYTES, raw=False, strict_map_key=False
        )
        self._fed = 0
        self._frame_start = 0

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the objects that `data` completes; `ProtocolError` if they cannot be read."""
        self._fed += len(data)
        try:
            self._unpacker.feed(data)
            for message in self._unpacker:
                end = self._unpacker.tell()
                self._check_size(end)
                self._frame_start = end
                yield message
        except ProtocolError:
            raise
        except msgpack.BufferFull:
            raise ProtocolError(f"{len(data)} bytes at once, {_READ_BYTES} allowed") from None
        except Exception as exc:  # ValueError, TypeError, StackError, ...: no documented set
            raise ProtocolError(f"not MessagePack: {exc or type(exc).__name__}") from exc
        self._check_size(self._fed)

    def _check_size(self, end: int) -> None:
        if (size := end - self._frame_start) > self.max_frame_bytes:
            raise ProtocolError(
                f"message too long: {size} bytes received, {self.max_frame_bytes} allowed"
            )


# `asyncio.Protocol` rather than streams: a stream costs a task switch per message, more than
# everything else here.
class RpcConnection(asyncio.Protocol):
    """One end of a connection: frames in and out, backpressure, and an orderly close.

    All writes of one iteration of the event loop leave in one system call.
    """

    def __init__(self, limits: RpcLimits) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._reader = FrameReader(
            min(_HANDSHAKE_FRAME_BYTES, limits.max_frame_bytes), ceiling=limits.max_frame_bytes
        )
        self._packer = msgpack.Packer()
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._reason: CspsError | None = None
        self._abort_timer: asyncio.TimerHandle | None = None
        self.closed: asyncio.Future[ConnectionLost] = self._loop.create_future()
        """Future that resolves to the reason when the connection is gone; it never raises."""

    # --- overridden by client and server ---

    def request_received(self, msgid: int, method: str, params: list[Any]) -> None:
        """Handle a request."""
        raise NotImplementedError

    def response_received(self, msgid: int, error: Any, result: Any) -> None:
        """Handle a response."""
        raise NotImplementedError

    def notification_received(self, method: str, params: list[Any]) -> None:
        """Handle a notification other than `$closing`."""
        raise NotImplementedError

    def connection_closed(self, reason: ConnectionLost) -> None:
        """Handle the end of the connection."""
        raise NotImplementedError

    # --- reading ---

    connected = False
    """True once there has been a connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.connected = True
        # uvloop's transports do not derive from asyncio's, so `isinstance` would fail.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._limits.high_water_bytes)
        notice_silence(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        try:
            for message in () if self._ending() else self._reader.feed(data):
                self._dispatch(message)
                if self._ending():
                    return
        except ProtocolError as exc:
            self.refuse(exc)

    def _dispatch(self, message: Any) -> None:
        # Guards take 0.1 us, class patterns such as `str(method)` 1.5 us.
        match message:
            case [2, method, params] if type(method) is str and type(params) is list:
                if method == CLOSING:
                    self.end(from_wire(params[0] if params else None))
                else:
                    self.notification_received(method, params)
            case [0, msgid, method, params] if (
                type(msgid) is int and type(method) is str and type(params) is list
            ):
                self.request_received(msgid, method, params)
            case [1, msgid, error, result] if type(msgid) is int:
                self.response_received(msgid, error, result)
            case [0 | 2, *_, bytes(method), params]:
                # Some clients send names as raw bytes, a type of an older MessagePack.
                self._dispatch([*message[:-2], method.decode(errors="replace"), params])
            case _:
                raise ProtocolError("not a MessagePack-RPC message")

    def trusted(self) -> None:
        """Accept long messages from now on: the peer is authenticated."""
        self._reader.max_frame_bytes = self._limits.max_frame_bytes

    # --- writing ---

    def notify(self, method: str, payload: Any = None) -> None:
        """Send a notification, which has no answer; `ConnectionLost` if the peer is gone.

        The call never waits: a peer that does not read is cut off at `max_backlog_bytes`. A caller
        that can wait should call `await drain()` now and then.
        """
        if self.closed.done():
            raise ConnectionLost(str(self.closed.result()))
        self.send((NOTIFICATION, method, (payload,)))

    def send(self, message: tuple[Any, ...]) -> None:
        """Queue a message; do nothing if the connection is gone.

        Raises
        ------
        ProtocolError
            The message is longer than the limit.
        TypeError, ValueError, OverflowError
            MessagePack cannot express it.
        """
        frame: bytes = self._packer.pack(message)
        if len(frame) > self._limits.max_frame_bytes:
            raise ProtocolError(
                f"message too long: {len(frame)} bytes, {self._limits.max_frame_bytes} allowed"
            )
        if self._ending():
            return
        if self._unsent_bytes > self._limits.max_backlog_bytes:
            self._cut_off()
            return
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(frame)
        self._outbox_bytes += len(frame)
        if self._outbox_bytes > self._limits.high_water_bytes:
            self._flush()  # otherwise a burst within one iteration would see no backpressure

    @property
    def _unsent_bytes(self) -> int:
        return self._outbox_bytes + self._transport.get_write_buffer_size()

    def _cut_off(self) -> None:
        limit = self._limits.max_backlog_bytes
        self.abort(ConnectionLost(f"the peer left more than {limit} bytes unread"))

    def _flush(self) -> None:
        if not self._outbox or self._transport.is_closing():
            return
        self._transport.write(b"".join(self._outbox))
        self._outbox.clear()
        self._outbox_bytes = 0

    async def drain(self) -> None:
        """Wait until less than `high_water_bytes` are unsent, or the connection is gone."""
        if not self._writable.is_set():
            await self._writable.wait()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # --- ending ---

    def _ending(self) -> bool:
        return self._reason is not None or self.closed.done()

    def end(self, reason: CspsError) -> None:
        """Send what is queued, then close."""
        if not self._ending():
            self._flush()
            self._reason = reason
            self._transport.close()
            self._abort_later()

    def refuse(self, reason: CspsError) -> None:
        """Send the peer the rule that it broke, and stop reading."""
        if not self._ending():
            self.send((NOTIFICATION, CLOSING, (to_wire(reason),)))
            self._flush()
            self._reason = reason
            # Only our half is closed at first. Closing a socket with unread data makes TCP drop
            # what was sent last, and the peer would never learn the reason.
            with suppress(OSError):  # reset by the peer, and not read yet
                if self._transport.can_write_eof():
                    self._transport.write_eof()
                else:  # TLS, which tells the peer of the end itself
                    self._transport.close()
            self._abort_later()

    def abort(self, reason: CspsError) -> None:
        """Cut the connection; unsent messages are lost."""
        self._reason = self._reason or reason
        self._transport.abort()

    def _abort_later(self) -> None:
        self._abort_timer = self._loop.call_later(LINGER_S, self._transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        cause = self._reason or exc or "the peer closed the connection"
        reason = cause if isinstance(cause, ConnectionLost) else ConnectionLost(str(cause))
        reason.__cause__ = exc
        self._outbox.clear()
        self._writable.set()
        self.closed.set_result(reason)
        self.connection_closed(reason)


def payload_and_meta(params: list[Any]) -> tuple[Any, dict[str, Any]]:
    """Split `params` as the module's conventions say."""
    match params:
        case []:
            return None, {}
        case [payload]:
            return payload, {}
        case [payload, meta] if type(meta) is dict:
            return payload, meta
        case _:
            raise ProtocolError("params must be [], [payload] or [payload, meta]")


UNACKNOWLEDGED_S = 5.0
"""Time without a TCP acknowledgement, or with the peer's window closed, after which a connection is
lost. Packets that are lost by chance are repeated several times within it."""


def notice_silence(sock: socket.socket) -> None:
    """Let the kernel notice a lost host within `UNACKNOWLEDGED_S`, or a second later if nothing is
    sent."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Several probes fit in: Linux gives up at the first one that is late by then.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        # Keep-alive probes are not sent while data is unacknowledged. Without this limit the kernel
        # retransmits for a quarter of an hour.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            unacknowledged_ms = int(UNACKNOWLEDGED_S * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unacknowledged_ms)


HELLO, AUTHENTICATE = "hello", "authenticate"
_NONCE_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Hello:
    protocol_version: int
    client_nonce: bytes
    name: str
    """Name that the client gives itself, for logs; the secret does not authenticate it."""


@dataclass(frozen=True, kw_only=True)
class HelloReply:
    protocol_version: int
    server_nonce: bytes


@dataclass(frozen=True, kw_only=True)
class Proof:
    proof: bytes


def _proof(
    secret: bytes, role: Literal["client", "server"], hello: Hello, server_nonce: bytes
) -> bytes:
    """Return the HMAC-SHA256, under the secret, of role, version, name and both nonces."""
    mac = hmac.new(secret, digestmod="sha256")
    version = str(hello.protocol_version).encode()
    for field in (role.encode(), version, hello.name.encode(), hello.client_nonce, server_nonce):
        # Without the lengths, two different lists of fields could give the same bytes.
        mac.update(len(field).to_bytes(4, "big") + field)
    return mac.digest()


def _check_secret(secret: bytes) -> None:
    if not secret:
        raise ConfigError("the cluster secret must not be empty")


def _check_version(ours: int, theirs: object) -> None:
    """Refuse a peer of another version."""
    if type(theirs) is not int:
        raise ProtocolError(f"protocol_version must be an integer, got {abridged(theirs)}")
    if theirs != ours:
        raise ProtocolMismatch(ours=ours, theirs=theirs)


class ServerHandshake:
    """The server's half of the handshake of one connection.

    ::

        hello         {protocol_version, client_nonce, name}  ->  {protocol_version, server_nonce}
        authenticate  {proof: P("client")}                    ->  {proof: P("server")}

    `P(role)` is `_proof`. Fresh nonces of both sides prevent a replay of a recorded handshake; the
    role prevents one side's proof from being sent back as the other's. The client proves itself
    first, so a stranger receives nothing against which guesses of the secret could be tested.

    The handshake authenticates the peers once. It encrypts nothing: without TLS
    (`protocols.rpc.tls`) the network between the nodes of a cluster is trusted.
    """

    def __init__(self, secret: bytes, version: int) -> None:
        _check_secret(secret)
        self._secret, self._version = secret, version
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._hello: Hello | None = None
        self.done = False

    @property
    def name(self) -> str:
        """Name that the client gave itself; empty before `hello`."""
        return self._hello.name if self._hello else ""

    def answer(self, method: str, payload: Any) -> dict[str, Any]:
        """Return the result of a call that arrives before the handshake is done.

        Raises
        ------
        ProtocolMismatch, AuthenticationFailed, ProtocolError
            The connection must be closed.
        """
        if method == HELLO and self._hello is None:
            return self._greet(payload)
        if method == AUTHENTICATE and self._hello is not None:
            return self._authenticate(self._hello, payload)
        raise AuthenticationFailed(
            f"call {abridged(method)} refused: a connection starts with one "
            f"'{HELLO}' and then '{AUTHENTICATE}'"
        )

    def _greet(self, payload: Any) -> dict[str, Any]:
        _check_version(
            self._version, payload.get("protocol_version") if isinstance(payload, dict) else None
        )  # first of all: other fields may differ in another version
        hello = unpack(Hello, payload)
        if len(hello.client_nonce) != _NONCE_BYTES:
            raise ProtocolError(
                f"client_nonce must have {_NONCE_BYTES} bytes, got {len(hello.client_nonce)}"
            )
        self._hello = hello
        return pack(HelloReply(protocol_version=self._version, server_nonce=self._nonce))

    def _authenticate(self, hello: Hello, payload: Any) -> dict[str, Any]:
        expected = _proof(self._secret, "client", hello, self._nonce)
        if not hmac.compare_digest(unpack(Proof, payload).proof, expected):
            raise AuthenticationFailed("the client does not know the cluster secret")
        self.done = True
        return pack(Proof(proof=_proof(self._secret, "server", hello, self._nonce)))


class ClientHandshake:
    """The client's half of the handshake."""

    def __init__(self, secret: bytes, version: int, name: str) -> None:
        _check_secret(secret)
        self._secret = secret
        self._hello = Hello(
            protocol_version=version, client_nonce=secrets.token_bytes(_NONCE_BYTES), name=name
        )

    def hello(self) -> dict[str, Any]:
        """Return the payload of `hello`."""
        return pack(self._hello)

    def authenticate(self, reply: Any) -> dict[str, Any]:
        """Return the payload of `authenticate` for the answer to `hello`."""
        self._server_nonce = unpack(HelloReply, reply).server_nonce
        return pack(Proof(proof=_proof(self._secret, "client", self._hello, self._server_nonce)))

    def verify(self, reply: Any) -> None:
        """Check the answer to `authenticate`; `AuthenticationFailed` if it proves another
        secret."""
        expected = _proof(self._secret, "server", self._hello, self._server_nonce)
        if not hmac.compare_digest(unpack(Proof, reply).proof, expected):
            raise AuthenticationFailed("the server does not know the cluster secret")
