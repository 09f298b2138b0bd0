"""Clients that stop in the middle of their headers: answered with 408 and hung up on.

Neither Serve nor uvicorn, its HTTP server, has a deadline for headers: half a request line would
hold a connection, and with it a file descriptor, for as long as the client likes. HAProxy has one,
which `services.launch.http_front` sets; this is the same for Serve's own proxies and for the port
of the router behind them.
"""

from __future__ import annotations

import asyncio
import math
import os
from typing import Any

import uvicorn.config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from csps.protocols.core.errors import ConfigError, abridged

HEADER_DEADLINE_S = 10.0
"""For the headers of a request to come, from the connection's or the request's first byte."""
VARIABLE = "CSPS_HEADER_DEADLINE_S"
"""Changes it. The HTTP front belongs to Ray, which starts before an application has settings."""
HOOK = "csps.services.http.header_deadline:install"
"""For `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`."""

_REQUEST_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def header_deadline_s() -> float:
    """The deadline that holds in this process.

    Raises:
        ConfigError: the variable is not a number of seconds.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return HEADER_DEADLINE_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.001 <= seconds < math.inf:
        raise ConfigError(f"{VARIABLE} is {abridged(text)}: expected a number of seconds")
    return seconds


def install() -> list[Any]:
    """Have every HTTP server that this process starts from now on keep the deadline.

    Serve calls it in each process that speaks HTTP, before the server starts, and asks it for
    middlewares: none, because they see a request only when its headers are complete.
    """
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:HeaderDeadlineProtocol"
    return []


class HeaderDeadlineProtocol(HttpToolsProtocol):
    """uvicorn's connection, with a deadline for headers.

    It holds as well for the rest of a body after the answer, which is read by nobody. A body before
    its answer has deadlines of its own (`services.http.body`), and so has the wait for a next
    request on a connection that is kept alive (uvicorn's).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline_s = header_deadline_s()
        self._deadline: asyncio.TimerHandle | None = None
        self._in_headers = False
        self._in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._disarm()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Called by the parser with the first byte of a request."""
        super().on_message_begin()
        self._in_headers = True
        self._arm()

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._in_headers, self._in_body = False, True
        self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Called by the parser with the last byte of a request."""
        self._in_body = False
        if self._answered():
            self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Called by uvicorn."""
        super().on_response_complete()
        if self._in_body:
            self._arm()

    def _answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _arm(self) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(self._deadline_s, self._expired)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expired(self) -> None:
        if not self._answered():
            # These are headers of the next request, sent while this one is being answered.
            return self._arm()
        if self._in_headers and not self.transport.is_closing():
            self.transport.write(_REQUEST_TIMEOUT)
        return self.transport.close()
