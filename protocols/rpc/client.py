"""The calling end of a MessagePack-RPC connection (conventions: `csps.protocols.rpc.wire`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Self

from csps.protocols.core.errors import (
    ConnectionLost,
    DeadlineExceeded,
    ProtocolError,
    abridged,
    from_wire,
    to_wire,
)
from csps.protocols.rpc import trace_context
from csps.protocols.rpc.tls import Tls
from csps.protocols.rpc.wire import (
    AUTHENTICATE,
    CANCEL,
    HELLO,
    NOTIFICATION,
    PING,
    PONG,
    REQUEST,
    RESPONSE,
    SCHEMA_VERSION,
    ClientHandshake,
    RpcConnection,
    RpcLimits,
    payload_and_meta,
)

_log = logging.getLogger(__name__)

OnNotification = Callable[[str, Any], None]
"""Called with method and payload, in order of arrival, on the event loop: it must not block."""

_MSGID_MASK = 0xFFFF_FFFF


class RpcClient(RpcConnection):
    """One authenticated connection to an `RpcServer`; `connect` makes it."""

    def __init__(self, limits: RpcLimits, on_notification: OnNotification | None) -> None:
        super().__init__(limits)
        self._on_notification = on_notification
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._last_msgid = 0
        self._authenticated = False
        self.unanswered = 0
        """Number of pings since the server answered one."""

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        *,
        secret: bytes,
        name: str,
        deadline_s: float,
        on_notification: OnNotification | None = None,
        limits: RpcLimits | None = None,
        version: int = SCHEMA_VERSION,
        tls: Tls | None = None,
    ) -> Self:
        """Connect, and authenticate both sides to each other.

        Raises
        ------
        ConnectionLost
            Nothing listens at that address, or the connection broke.
        ProtocolMismatch, AuthenticationFailed
            The listener speaks another version, or does not know the secret.
        DeadlineExceeded
            Connecting took longer than `deadline_s`.
        """
        handshake = ClientHandshake(secret, version, name)
        client = cls(limits or RpcLimits(), on_notification)
        try:
            async with asyncio.timeout(deadline_s):
                await client._open(host, port, tls)
                await client._authenticate(handshake, deadline_s)
        except (TimeoutError, DeadlineExceeded):
            raise DeadlineExceeded(f"connecting to {host}:{port}", deadline_s) from None
        finally:
            if not client._authenticated and client.connected:
                client.abort(ConnectionLost("the handshake failed"))
        return client

    async def _open(self, host: str, port: int, tls: Tls | None) -> None:
        try:
            await self._loop.create_connection(
                lambda: self, host, port, ssl=None if tls is None else tls.client
            )
        except OSError as exc:
            raise ConnectionLost(f"cannot connect to {host}:{port}: {exc}") from exc

    async def _authenticate(self, handshake: ClientHandshake, deadline_s: float) -> None:
        reply = await self.call(HELLO, handshake.hello(), deadline_s=deadline_s)
        proof = handshake.authenticate(reply)
        handshake.verify(await self.call(AUTHENTICATE, proof, deadline_s=deadline_s))
        self._authenticated = True
        self.trusted()

    async def call(self, method: str, payload: Any = None, *, deadline_s: float) -> Any:
        """Call a method and wait for the answer; cancelling the wait cancels the call at the
        server.

        The current trace context travels along.

        Raises
        ------
        CspsError
            The handler raised it; the class is the same if it belongs to the tree of `errors`.
        ConnectionLost
            The connection closed before the answer came.
        DeadlineExceeded
            No answer came within `deadline_s`, sending included.
        """
        if self.closed.done():
            raise ConnectionLost(str(self.closed.result()))
        msgid = self._next_msgid()
        answer = self._pending[msgid] = self._loop.create_future()
        meta = {"deadline_ms": int(deadline_s * 1000), **trace_context.inject()}
        # A timer is 3 us cheaper than `asyncio.timeout`. There is no `drain()` before sending: a
        # caller waits for its answer anyway, and `max_backlog_bytes` bounds the queue of all calls.
        timer = self._loop.call_later(deadline_s, _expire, answer, method, deadline_s)
        try:
            self.send((REQUEST, msgid, method, (payload, meta)))
            return await answer
        finally:
            timer.cancel()
            if self._pending.pop(msgid, None) is not None:  # not answered: cancelled
                self.send((NOTIFICATION, CANCEL, (msgid,)))

    def ping(self) -> None:
        """Ask the server for a sign of life; do nothing if the connection is gone."""
        self.unanswered += 1
        self.send((NOTIFICATION, PING, ()))

    async def close(self) -> None:
        """Send what is queued and close; pending calls fail. Idempotent."""
        self.end(ConnectionLost("closed by this side"))
        await asyncio.shield(self.closed)

    def _next_msgid(self) -> int:
        """Return the next free 32-bit message id."""
        # A long call may still be pending when the counter wraps around, so used ids are skipped.
        msgid = (self._last_msgid + 1) & _MSGID_MASK
        while msgid in self._pending:
            msgid = (msgid + 1) & _MSGID_MASK
        self._last_msgid = msgid
        return msgid

    # --- RpcConnection ---

    def response_received(self, msgid: int, error: Any, result: Any) -> None:
        answer = self._pending.pop(msgid, None)
        if answer is None or answer.done():  # cancelled before the answer came
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(from_wire(error))

    def notification_received(self, method: str, params: list[Any]) -> None:
        if method == PONG:
            self.unanswered = 0
            return
        if self._on_notification is None or not self._authenticated:
            return
        payload, _ = payload_and_meta(params)
        try:
            self._on_notification(method, payload)
        except Exception:
            _log.exception("handling notification %s failed", method)

    def request_received(self, msgid: int, method: str, params: list[Any]) -> None:
        refusal = ProtocolError(f"call {abridged(method)} refused: a client answers no calls")
        self.send((RESPONSE, msgid, to_wire(refusal), None))

    def connection_closed(self, reason: ConnectionLost) -> None:
        pending, self._pending = self._pending, {}
        for answer in pending.values():
            if not answer.done():
                answer.set_exception(ConnectionLost(str(reason)))


def _expire(answer: asyncio.Future[Any], method: str, deadline_s: float) -> None:
    if not answer.done():
        answer.set_exception(DeadlineExceeded(f"rpc {method}", deadline_s))
