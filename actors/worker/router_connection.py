"""A rank's connection to the router that commands it: one router at a time, never an older one
again.

`RpcThread` is an RPC server on an event loop in a thread of its own. It does not share the hosting
process's loop: a Serve replica's loop runs health checks, which token traffic must not delay.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import uvloop

from csps.actors.comm.layout import name_digest
from csps.protocols.core.errors import ConnectionLost, DeadlineExceeded, ProtocolError, Superseded
from csps.protocols.gang.members import Fence
from csps.protocols.gang.messages import Attach
from csps.protocols.rpc import schema
from csps.protocols.rpc.server import Handler, Peer, RpcServer
from csps.protocols.rpc.tls import Tls

T = TypeVar("T")

_log = logging.getLogger(__name__)

START_S = 10.0
"""Seconds for the server to listen."""
CLOSE_GRACE_S = 1.0
"""Seconds for handlers to finish at the end."""
CATCH_UP_S = 0.05
"""Seconds for reading what a seemingly silent router has sent: perhaps this process was stalled."""


class RouterAttachment:
    """The router attached to one rank; used on its RPC loop."""

    def __init__(self) -> None:
        self.on_end: Callable[[int], None] = lambda owner: None
        """Function called with the owner whose work is to be dropped: its router is gone or was
        replaced."""
        self._fence = Fence()
        self._router: Peer | None = None
        self._router_id = ""

    @property
    def attached(self) -> bool:
        """Return whether a router commands this rank."""
        return self._router is not None

    @property
    def owner(self) -> int:
        """Return the present router's attachment, as the log names it."""
        return name_digest(self._router_id)

    async def may_attach(self, generation: int) -> None:
        """Check that a router may attach now; raises as `Fence.check`."""
        if self._fence.lapsed(time.monotonic()):
            await asyncio.sleep(CATCH_UP_S)
        self._fence.check(generation, time.monotonic())

    async def attach(self, message: Attach, peer: Peer) -> None:
        """Obey a router from now on; raises as `Fence.check`."""
        await self.may_attach(message.generation)
        # No await from here on: another router may be attaching as well.
        self._fence.check(message.generation, time.monotonic())
        if (former := self._router) is not peer:
            self._end()
            if former is not None:
                _log.info("router generation %d takes over this rank", message.generation)
                former.refuse(Superseded(f"router generation {message.generation} has taken over"))
            self._router, self._router_id = peer, message.router_id
        self._fence.take(message.generation, time.monotonic())
        _log.debug("router %s (generation %d) attached", message.router_id, message.generation)

    def heartbeat(self, peer: Peer) -> None:
        """Note a heartbeat of the attached router; others' are ignored."""
        if peer is self._router:
            self._fence.heartbeat(time.monotonic())

    def disconnected(self, peer: Peer) -> None:
        """End the attachment if its router has disconnected."""
        if peer is self._router:
            self._end()

    def _end(self) -> None:
        if self._router is None:
            return
        _log.info("router %s is gone; its work is dropped", self._router_id)
        self._router = None
        self._fence.release()
        self.on_end(self.owner)

    def require(self, peer: Peer) -> None:
        """Check that the attached router is calling: two routers at once would be two sequencers.

        Raises:
            ProtocolError: another one is calling.
        """
        if peer is not self._router:
            raise ProtocolError(f"{peer.identity} is not, or no longer, attached to this rank")

    def notify(self, method: str, message: Any) -> None:
        """Notify the router. Without a router the message is dropped, as its work was cancelled."""
        if self._router is not None and not self._router.closed.done():
            self._router.notify(method, schema.pack(message))

    def disconnect(self, why: str) -> None:
        """Disconnect the router, so that it does not wait for this rank."""
        if self._router is not None:
            self._router.end(ConnectionLost(why))


class RpcThread:
    """Serves handlers until closed; handlers run on the loop and must not block."""

    def __init__(
        self, *, secret: bytes, on_disconnect: Callable[[Peer], None], tls: Tls | None = None
    ) -> None:
        self._secret, self._tls = secret, tls
        self._on_disconnect = on_disconnect
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rpc", daemon=True)
        self._calls: list[Callable[[], None]] = []
        self._calls_lock = threading.Lock()
        self._closed = False
        self._server: RpcServer | None = None

    def start(self, host: str, handlers: Mapping[str, Handler]) -> tuple[str, int]:
        """Listen on a free port of `host`; return the address."""
        self._thread.start()
        listening = asyncio.run_coroutine_threadsafe(self._listen(host, handlers), self._loop)
        try:
            return listening.result(START_S)
        except TimeoutError:
            raise DeadlineExceeded("start of the RPC server", START_S) from None

    async def _listen(self, host: str, handlers: Mapping[str, Handler]) -> tuple[str, int]:
        self._server = RpcServer(
            handlers, secret=self._secret, on_disconnect=self._on_disconnect, tls=self._tls
        )
        return await self._server.start(host)

    def soon(self, call: Callable[..., None], *arguments: Any) -> None:
        """Run a call on the loop, in order, from any thread; a burst of calls wakes the loop once.

        Nothing happens once this is closed.
        """
        with self._calls_lock:
            self._calls.append(partial(call, *arguments))
            if len(self._calls) == 1 and not self._closed:
                self._loop.call_soon_threadsafe(self._run_calls)

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Run a call on the loop after a while, unless this is closed by then; from the loop
        only."""
        self._loop.call_later(delay_s, call)

    def _run_calls(self) -> None:
        with self._calls_lock:
            calls = list(self._calls)
            self._calls.clear()
        for call in calls:
            try:
                call()
            except Exception:
                _log.exception("a call on the RPC loop failed")

    async def in_thread(self, name: str, body: Callable[[], T], discard: Callable[[T], None]) -> T:
        """Run a blocking function in a thread of its own and wait for it on the loop.

        Args:
            discard: takes the result if the wait was cancelled; it may block as well.
        """
        done: asyncio.Future[T] = self._loop.create_future()

        def fail(error: Exception) -> None:
            if not done.cancelled():
                done.set_exception(error)

        def finish(result: T) -> None:
            if done.cancelled():
                _start_thread(name, partial(discard, result))
            else:
                done.set_result(result)

        def run() -> None:
            try:
                result = body()
            except Exception as exc:
                self.soon(fail, exc)
            else:
                self.soon(finish, result)

        _start_thread(name, run)
        try:
            return await done
        except asyncio.CancelledError:
            # The result may have come in the same iteration of the loop.
            if done.done() and not done.cancelled() and done.exception() is None:
                _start_thread(name, partial(discard, done.result()))
            raise

    def close(self) -> None:
        """Disconnect and end the thread. Call it only once."""
        if self._server is not None:
            closing = asyncio.run_coroutine_threadsafe(
                self._server.close(CLOSE_GRACE_S), self._loop
            )
            closing.result(START_S)
        with self._calls_lock:
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread.is_alive():
            self._thread.join(START_S)
        self._loop.close()


def _start_thread(name: str, body: Callable[[], None]) -> None:
    threading.Thread(target=body, name=name, daemon=True).start()
