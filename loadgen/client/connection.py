"""One HTTP/1.1 connection of a load generator: bytes out, stamped bytes in.

A protocol on the event loop itself, with httptools' parser: pieces are stamped when they are read
from the socket, not when a task gets to run. httpx spends three times the processor time on a
streamed answer and more, and on a machine that also runs the server the load generator would
measure itself; aiohttp spends as much as this (docs/load-testing.md has the figures).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

import httptools

from csps.protocols.errors import ConnectionLost, ProtocolError

OnBody = Callable[[bytes, int], None]
"""Gets a piece of the body and when it was read (`time.perf_counter_ns`)."""


class Connection(asyncio.Protocol):
    """Carries one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[int] | None = None
        self._on_body: OnBody = _ignore
        self._read_ns = 0
        self._ends_at_eof = False

    @property
    def reusable(self) -> bool:
        """Whether another request can be sent on it."""
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: bytes, on_body: OnBody) -> int:
        """Write a request and wait for the whole answer; returns its HTTP status.

        Whoever is cancelled while waiting has to close the connection.

        Raises:
            ConnectionLost: it broke before the answer had ended.
            ProtocolError: what came is no HTTP.
        """
        if self._transport is None:
            raise ConnectionLost("the server hung up: nothing was sent")
        assert self._done is None, "one request at a time"
        self._done = asyncio.get_running_loop().create_future()
        self._on_body = on_body
        self._transport.write(request)
        try:
            return await self._done
        finally:
            self._done, self._on_body = None, _ignore

    def close(self) -> None:
        """Hang up; the server sees a client that has gone."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._read_ns = time.perf_counter_ns()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ProtocolError(f"the server does not speak HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if exc is None and self._ends_at_eof:
            self.on_message_complete()
        self._fail(ConnectionLost(f"the server hung up: {exc or 'end of stream'}"))

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    # httptools' callbacks

    def on_message_begin(self) -> None:
        self._ends_at_eof = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_at_eof = False

    def on_body(self, body: bytes) -> None:
        self._on_body(body, self._read_ns)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(self._parser.get_status_code())


def _ignore(body: bytes, read_ns: int) -> None:
    """Of an answer that nobody waits for any more."""
