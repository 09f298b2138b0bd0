"""An RPC server on an event loop in a thread of its own.

The loop is not the hosting process's: a Serve replica's loop runs health checks and must not be
delayed by token traffic, nor delay it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import uvloop

from csps.protocols.errors import DeadlineExceeded
from csps.protocols.rpc_server import Handler, Peer, RpcServer

START_S = 10.0
"""For the server to listen."""
CLOSE_GRACE_S = 1.0
"""For handlers to finish at the end."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class RpcThread:
    """Serves handlers until closed; handlers run on the loop and must not block."""

    def __init__(self, *, secret: bytes, on_disconnect: Callable[[Peer], None]) -> None:
        self._secret = secret
        self._on_disconnect = on_disconnect
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rpc", daemon=True)
        self._calls: list[Callable[[], None]] = []
        self._calls_lock = threading.Lock()
        self._closed = False
        self._server: RpcServer | None = None

    def start(self, host: str, handlers: Mapping[str, Handler]) -> tuple[str, int]:
        """Listen on a free port of `host`; returns the address."""
        self._thread.start()
        listening = asyncio.run_coroutine_threadsafe(self._listen(host, handlers), self._loop)
        try:
            return listening.result(START_S)
        except TimeoutError:
            raise DeadlineExceeded("start of the RPC server", START_S) from None

    async def _listen(self, host: str, handlers: Mapping[str, Handler]) -> tuple[str, int]:
        self._server = RpcServer(handlers, secret=self._secret, on_disconnect=self._on_disconnect)
        return await self._server.start(host)

    def soon(self, call: Callable[[], None]) -> None:
        """Run on the loop, in order, from any thread; the loop is woken once per burst.

        Nothing happens once this is closed.
        """
        with self._calls_lock:
            self._calls.append(call)
            if len(self._calls) == 1 and not self._closed:
                self._loop.call_soon_threadsafe(self._run_calls)

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Run on the loop after a while, unless this is closed by then; from the loop only."""
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

    async def in_thread(self, name: str, body: Callable[[], T]) -> T:
        """Run something that blocks in a thread of its own and wait for it on the loop."""
        done: asyncio.Future[T] = self._loop.create_future()

        def settle(tell: Callable[[], None]) -> None:
            if not done.cancelled():
                tell()

        def run() -> None:
            try:
                result = body()
            except Exception as exc:
                self.soon(partial(settle, partial(done.set_exception, exc)))
            else:
                self.soon(partial(settle, partial(done.set_result, result)))

        threading.Thread(target=run, name=name, daemon=True).start()
        return await done

    def close(self) -> None:
        """Hang up and end the thread. Only once."""
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
