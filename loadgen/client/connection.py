"""HTTP/1.1 connections of the load generator to the server under load.

A connection is a protocol on the event loop with httptools' parser. Chunks are stamped when they
are read from the socket, not when a task runs. httpx takes three times the processor time or more
for a streamed answer, and on a machine that also runs the server the load generator would measure
itself. aiohttp takes as much as this (figures in docs/load-testing.md).
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from csps.protocols.core.errors import ConfigError, ConnectionLost, FaultError, ProtocolError

_log = logging.getLogger(__name__)

OnBody = Callable[[bytes, int], None]
"""Callback for a part of the body and its time of reading (`time.perf_counter_ns`)."""


class HttpConnection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[int] | None = None
        self._on_body: OnBody = _ignore
        self._read_ns = 0
        self._ends_at_eof = False

    @property
    def reusable(self) -> bool:
        """Return whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: bytes, on_body: OnBody) -> int:
        """Write a request and wait for the whole answer; return its HTTP status.

        A caller that is cancelled while waiting must close the connection.

        Raises:
            ConnectionLost: the connection broke before the answer had ended.
            ProtocolError: the answer is no HTTP.
        """
        if self._transport is None:
            raise ConnectionLost("the server closed the connection: nothing was sent")
        assert self._done is None, "the connection already carries a request"
        self._done = asyncio.get_running_loop().create_future()
        self._on_body = on_body
        self._transport.write(request)
        try:
            return await self._done
        finally:
            self._done, self._on_body = None, _ignore

    def close(self) -> None:
        """Abort the connection; the server sees that the client disconnects."""
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
        self._fail(ConnectionLost(f"the server closed the connection: {exc or 'end of stream'}"))

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
    """Drop the body of a cancelled request."""


CONNECT_S = 10.0
"""Time limit for opening a connection."""
ASK_S = 30.0
"""Time limit for an answer without computation, such as the list of models."""


class Server:
    """The server under load: its address and open connections."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        url = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"'{base_url}' is no http or https address")
        self._host, self._tls = url.hostname, url.scheme == "https"
        self._port = url.port or (443 if self._tls else 80)
        self._path = url.path.rstrip("/").removesuffix("/v1")
        own = {"Host": url.netloc.rpartition("@")[2], "Content-Type": "application/json"}
        self._headers = "".join(f"{k}: {v}\r\n" for k, v in (own | dict(headers or {})).items())
        self._free: list[HttpConnection] = []
        self.connections = 0
        """Connections opened so far."""

    def encode(self, path: str, body: bytes = b"", *, request_id: str = "") -> bytes:
        """Return the bytes of a POST, or of a GET without a body."""
        line = f"{'POST' if body else 'GET'} {self._path}{path} HTTP/1.1\r\n"
        extra = f"x-request-id: {request_id}\r\n" if request_id else ""
        return f"{line}{self._headers}{extra}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def send(self, request: bytes, on_body: OnBody) -> int:
        """Send what `encode` returned on a free or new connection; return the HTTP status.

        Raises:
            FaultError: the connection cannot be opened, or breaks.
        """
        connection = self._free.pop() if self._free else None
        if connection is None or not connection.reusable:
            connection = await self._connect()
        complete = False
        try:
            status = await connection.send(request, on_body)
            complete = True
            return status
        finally:
            if complete and connection.reusable:
                self._free.append(connection)
            else:
                connection.close()

    async def _connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    HttpConnection,
                    self._host,
                    self._port,
                    ssl=ssl.create_default_context() if self._tls else None,
                )
        except TimeoutError:
            raise ConnectionLost(f"no connection within {CONNECT_S:g} s") from None
        except OSError as error:
            raise ConnectionLost(f"no connection: {error.strerror or error}") from None
        self.connections += 1
        _log.debug("opened connection %d to %s:%d", self.connections, self._host, self._port)
        return connection

    async def ask(self, path: str) -> Any:
        """Get JSON from a path.

        Raises:
            FaultError: the server cannot be reached, or answers something else.
        """
        body = bytearray()
        async with asyncio.timeout(ASK_S):
            status = await self.send(self.encode(path), lambda data, _: body.extend(data))
        if status != 200:
            raise FaultError(f"{path}: the server answered {status}")
        try:
            return json.loads(body)
        except ValueError:
            raise FaultError(f"{path}: the server did not answer JSON") from None

    def close(self) -> None:
        """Close all free connections."""
        for connection in self._free:
            connection.close()
        self._free.clear()
