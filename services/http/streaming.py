"""Server-sent events over ASGI: deterministic clean-up, and signs of life during a long prefill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from csps.services.http.body import while_connected

HEARTBEAT_S = 15.0
"""Between comment lines while there is nothing to say; proxies cut silent connections at 30-60 s.
"""
HEARTBEAT = b": still working\n\n"


class EventStream(Response):
    """Sends what an asynchronous generator yields, then calls `close`, however it ends.

    Starlette's own streaming response leaves closing the generator to the garbage collector, and
    with it the slots of a request whose client has gone.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        close: Callable[[], Awaitable[None]],
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._close = close
        self._heartbeat_s = heartbeat_s
        self._sent = 0
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs until the last event, or until the client has gone."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(ClientDisconnect):
                await while_connected(receive, self._send_all(send))
        finally:
            await self._events.aclose()
            await self._close()

    async def _send_all(self, send: Send) -> None:
        heart = asyncio.ensure_future(self._beat(send))
        try:
            async for event in self._events:
                self._sent += 1
                await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            heart.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _beat(self, send: Send) -> None:
        while True:
            before = self._sent
            await asyncio.sleep(self._heartbeat_s)
            if self._sent == before:
                await send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})
