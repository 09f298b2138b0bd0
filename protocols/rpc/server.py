"""The answering end of MessagePack-RPC connections (conventions: `csps.protocols.rpc.wire`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import CoroutineType
from typing import Any

from csps.protocols.core.errors import (
    Cancelled,
    ConnectionLost,
    CspsError,
    DeadlineExceeded,
    ProtocolError,
    abridged,
    nearest,
    to_wire,
)
from csps.protocols.rpc import trace_context
from csps.protocols.rpc.tls import Tls
from csps.protocols.rpc.wire import (
    CANCEL,
    LINGER_S,
    NOTIFICATION,
    PING,
    PONG,
    RESPONSE,
    SCHEMA_VERSION,
    RpcConnection,
    RpcLimits,
    ServerHandshake,
    payload_and_meta,
)

_log = logging.getLogger(__name__)

Handler = Callable[[Any, "Peer"], Any]
"""`(payload, peer) -> result`; an ordinary function runs at once, a coroutine function as a task.

Ordinary functions see messages in order of arrival. They run on the event loop: do not block.
"""

_NO_TRACE: AbstractContextManager[None] = nullcontext()


class Peer(RpcConnection):
    """A client, as the server's handlers see it."""

    def __init__(self, server: RpcServer) -> None:
        super().__init__(server.limits)
        self._server = server
        self._handshake = ServerHandshake(server.secret, server.version)
        self._calls: dict[int, _Call] = {}
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def identity(self) -> str:
        """Name that the client gave itself."""
        return self._handshake.name

    @property
    def authenticated(self) -> bool:
        """True once the client has proved that it knows the cluster secret."""
        return self._handshake.done

    @property
    def tasks(self) -> set[asyncio.Task[Any]]:
        """Handlers that still run for this client."""
        return {call.task for call in self._calls.values()} | self._background

    # --- RpcConnection ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.peers.add(self)
        seconds = self._limits.handshake_s
        self._handshake_timer = self._loop.call_later(
            seconds, self.refuse, DeadlineExceeded("rpc handshake", seconds)
        )

    def request_received(self, msgid: int, method: str, params: list[Any]) -> None:
        if not self.authenticated:
            return self._answer_handshake(msgid, method, params)
        if msgid in self._calls:
            raise ProtocolError(f"msgid {msgid} is already in use")
        try:
            payload, meta = payload_and_meta(params)
            handler, deadline_s = self._server.handler(method), _deadline_s(meta)
            with _traced(meta):
                result = handler(payload, self)
                if isinstance(result, CoroutineType):
                    self._calls[msgid] = _Call(self, msgid, method, result, deadline_s)
                    return None
        except Exception as exc:
            return self.answer_error(msgid, method, exc)
        return self.answer(msgid, method, result)

    def notification_received(self, method: str, params: list[Any]) -> None:
        if not self.authenticated:
            return None  # a notification has no answer; some clients introduce themselves this way
        payload, meta = payload_and_meta(params)
        if method == CANCEL:
            return self._cancel(payload)
        if method == PING:
            return self.send((NOTIFICATION, PONG, ()))
        try:
            with _traced(meta):
                result = self._server.handler(method)(payload, self)
                if isinstance(result, CoroutineType):
                    self._run_in_background(method, result)
        except Exception:
            _log.exception("notification %s from %s failed", method, self.identity)
        return None

    def response_received(self, msgid: int, error: Any, result: Any) -> None:
        raise ProtocolError(f"unexpected response {msgid}: a server makes no calls")

    def connection_closed(self, reason: ConnectionLost) -> None:
        self._handshake_timer.cancel()
        for task in self.tasks:
            task.cancel()
        self._server.disconnected(self)

    # --- answering ---

    def _answer_handshake(self, msgid: int, method: str, params: list[Any]) -> None:
        try:
            payload, _ = payload_and_meta(params)
            self.send((RESPONSE, msgid, None, self._handshake.answer(method, payload)))
        except CspsError as exc:
            _log.warning("refused a client: %s", exc)
            self.send((RESPONSE, msgid, to_wire(exc), None))
            self.refuse(exc)
            return
        if self.authenticated:
            self._handshake_timer.cancel()
            self.trusted()
            _log.debug("client %s connected", self.identity)

    def _cancel(self, msgid: Any) -> None:
        if isinstance(msgid, int) and (call := self._calls.get(msgid)) is not None:
            call.task.cancel()

    def finish_call(self, msgid: int) -> None:
        """Forget a call that was answered."""
        del self._calls[msgid]

    def answer(self, msgid: int, method: str, result: Any) -> None:
        """Answer a call; send an error if MessagePack cannot carry the result."""
        try:
            self.send((RESPONSE, msgid, None, result))
        except Exception as exc:  # too long, or not expressible in MessagePack
            self.answer_error(msgid, method, exc)

    def answer_error(self, msgid: int, method: str, exc: Exception) -> None:
        """Answer a call with an error."""
        if not isinstance(exc, CspsError):
            _log.error("handler of %s failed", method, exc_info=exc)
        self.send((RESPONSE, msgid, to_wire(exc), None))

    def _run_in_background(self, method: str, work: Coroutine[Any, Any, Any]) -> None:
        async def run() -> None:
            try:
                await work
            except Exception:
                _log.exception("notification %s from %s failed", method, self.identity)

        task = self._loop.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class _Call:
    """A request whose handler is a task, until it is answered."""

    def __init__(
        self,
        peer: Peer,
        msgid: int,
        method: str,
        work: Coroutine[Any, Any, Any],
        deadline_s: float | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._peer, self._msgid, self._method = peer, msgid, method
        self._deadline_s = deadline_s
        self._expired = False
        self._timer = None if deadline_s is None else loop.call_later(deadline_s, self._expire)
        # The handler's coroutine is the task itself. If another task awaited it, a cancellation
        # before the first step would end that task without running any of the handler.
        self.task = loop.create_task(work)
        self.task.add_done_callback(self._finish)

    def _expire(self) -> None:
        self._expired = True
        self.task.cancel()

    def _finish(self, task: asyncio.Task[Any]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._peer.finish_call(self._msgid)
        if task.cancelled():
            self._peer.answer_error(self._msgid, self._method, self._reason())
        elif isinstance(exc := task.exception(), Exception):
            self._peer.answer_error(self._msgid, self._method, exc)
        elif exc is None:
            self._peer.answer(self._msgid, self._method, task.result())

    def _reason(self) -> CspsError:
        if self._expired and self._deadline_s is not None:
            return DeadlineExceeded(f"rpc {self._method}", self._deadline_s)
        return Cancelled(f"rpc {self._method} was cancelled")


class RpcServer:
    """Answers calls of authenticated clients with `handlers`, by method name."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        secret: bytes,
        limits: RpcLimits | None = None,
        on_disconnect: Callable[[Peer], None] | None = None,
        version: int = SCHEMA_VERSION,
        tls: Tls | None = None,
    ) -> None:
        self._handlers = dict(handlers)
        self._on_disconnect = on_disconnect
        self.secret, self.version = secret, version
        self.limits = limits or RpcLimits()
        self._tls = tls
        self._listener: asyncio.Server | None = None
        self.peers: set[Peer] = set()
        """Open connections, authenticated or not."""
        ServerHandshake(secret, version)  # an empty secret is refused here, not on first contact

    async def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listen, and return the address; the system chooses the port if `port` is 0."""
        loop = asyncio.get_running_loop()
        encryption: dict[str, Any] = {}
        if self._tls is not None:
            # A peer exists from the end of TLS's handshake on, which needs a limit of its own.
            encryption = {
                "ssl": self._tls.server,
                "ssl_handshake_timeout": self.limits.handshake_s,
                "ssl_shutdown_timeout": LINGER_S,
            }
        self._listener = await loop.create_server(lambda: Peer(self), host, port, **encryption)
        bound_host, bound_port = self._listener.sockets[0].getsockname()[:2]
        return bound_host, bound_port

    async def close(self, grace_s: float) -> None:
        """Stop listening, let handlers finish for `grace_s`, cancel the rest and close
        connections."""
        if self._listener is not None:
            self._listener.close()
        if tasks := _all_tasks(self.peers):
            await asyncio.wait(tasks, timeout=grace_s)
        leftover, peers = _all_tasks(self.peers), list(self.peers)
        for task in leftover:
            task.cancel()
        if leftover:
            await asyncio.wait(leftover, timeout=LINGER_S)
        for peer in peers:
            peer.end(ConnectionLost("the server shut down"))
        if peers:
            await asyncio.wait([peer.closed for peer in peers])

    def handler(self, method: str) -> Handler:
        """Return the handler of `method`; `ProtocolError` if there is none."""
        try:
            return self._handlers[method]
        except KeyError:
            raise ProtocolError(
                f"unknown method {abridged(method)}{nearest(method, self._handlers)}"
            ) from None

    def disconnected(self, peer: Peer) -> None:
        """Forget a peer whose connection closed."""
        self.peers.discard(peer)
        if peer.authenticated:
            _log.debug("client %s disconnected", peer.identity)
            if self._on_disconnect is not None:
                self._on_disconnect(peer)


def _all_tasks(peers: Iterable[Peer]) -> set[asyncio.Task[Any]]:
    return set().union(*(peer.tasks for peer in peers))


def _traced(meta: dict[str, Any]) -> AbstractContextManager[None]:
    return trace_context.attached(meta) if "traceparent" in meta else _NO_TRACE


def _deadline_s(meta: dict[str, Any]) -> float | None:
    deadline_ms = meta.get("deadline_ms")
    if deadline_ms is None:
        return None
    if type(deadline_ms) is not int:
        raise ProtocolError(f"deadline_ms must be an integer, got {abridged(deadline_ms)}")
    return deadline_ms / 1000
