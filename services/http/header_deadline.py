"""A deadline for HTTP headers: a client that stalls within them is answered 408 and disconnected.

Neither Serve nor uvicorn, its HTTP server, has such a deadline: half a request line would occupy a
connection, and with it a file descriptor, for as long as the client likes. HAProxy has one, set by
`services.launch.reverse_proxy`. This one is for Serve's own proxies and for the router's port
behind them.
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
"""Deadline for a request's headers, from the first byte of the connection or request."""
VARIABLE = "CSPS_HEADER_DEADLINE_S"
"""Environment variable that changes the deadline; Ray's proxies start before the settings are
read."""
HOOK = "csps.services.http.header_deadline:install"
"""Value of `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`."""

_REQUEST_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def header_deadline_s() -> float:
    """Return the deadline that holds in this process, in seconds.

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
        raise ConfigError(
            f"{VARIABLE} is {abridged(text)}: expected a number of seconds, at least 0.001"
        )
    return seconds


def install() -> list[Any]:
    """Make every HTTP server that this process starts from now on keep the deadline.

    Serve calls it in each process that speaks HTTP, before the server starts, and expects
    middlewares. There are none: a middleware sees a request only once its headers are complete.
    """
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:HeaderDeadlineProtocol"
    return []


class HeaderDeadlineProtocol(HttpToolsProtocol):
    """uvicorn's connection, with a deadline for headers.

    The deadline also holds for the rest of a body behind its answer, which nobody reads. A body
    before its answer has deadlines of its own (`services.http.body`), and uvicorn has one for the
    next request of a kept-alive connection.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline_s = header_deadline_s()
        self._deadline: asyncio.TimerHandle | None = None
        self._in_headers = False
        self._in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline with the connection."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the deadline."""
        self._disarm()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Start the deadline with the first byte of a request."""
        super().on_message_begin()
        self._in_headers = True
        self._arm()

    def on_headers_complete(self) -> None:
        """Stop the deadline for the body."""
        self._in_headers, self._in_body = False, True
        self._disarm()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Stop the deadline with the last byte of a request that is answered already."""
        self._in_body = False
        if self._answered():
            self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the deadline for the rest of a body that is answered already."""
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
            # A pipelined request's headers: closing now would cut off the answer before it.
            return self._arm()
        if self._in_headers and not self.transport.is_closing():
            self.transport.write(_REQUEST_TIMEOUT)
        return self.transport.close()
