"""Limits for HTTP connections: a deadline for headers, after which a client is answered 408; a size
of headers, beyond which it is answered 431; a deadline for clients to read their answers.

Neither Serve nor uvicorn, its HTTP server, has any: half a request line would occupy a connection,
and with it a file descriptor, for as long as the client likes, and a header without end would
occupy the event loop, before any key was asked for. HAProxy has both: a deadline that
`services.launch.reverse_proxy` sets, and a buffer of 16 KiB. These limits are for Serve's own
proxies and for the router's port behind them.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from typing import Any

import uvicorn.config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from csps.protocols.core.errors import (
    ConfigError,
    InvalidRequest,
    QueueFull,
    RequestError,
    abridged,
)
from csps.protocols.openai.responses import error_body
from csps.services.http.errors import HeadersTooLarge

HEADER_DEADLINE_S = 10.0
"""Deadline for a request's headers, from the first byte of the connection or request."""
VARIABLE = "CSPS_HEADER_DEADLINE_S"
"""Environment variable that changes the deadline; Ray's proxies start before the settings are
read."""
WRITE_DEADLINE_S = 30.0
"""Deadline for a client to take `LEAST_TAKEN_BYTES` of an answer that waits for it."""
LEAST_TAKEN_BYTES = 16 * 1024
MAX_CONNECTIONS = 2048
"""Limit of connections to one HTTP server of this process. Each may hold 64 KiB of headers and
what one read brings of a body."""
CONNECTIONS_VARIABLE = "CSPS_MAX_CONNECTIONS"
"""Environment variable that changes the limit."""
HOOK = "csps.services.http.header_deadline:install"
"""Value of `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`."""

MAX_HEADER_BYTES = 64 * 1024
"""Limit of a request's line, header names and values together; trailers count as well. It is also
the limit of bytes in which the parser finds nothing whole: it concatenates these again and again,
so a header of 64 MiB would take 20 s."""
MAX_HEADERS = 128
TEXT_HEADERS = frozenset(
    {
        b"authorization",
        b"x-request-disconnect-disabled",
        b"x-request-id",
        b"x-request-timeout-seconds",
        b"x-slo-e2e-ms",
        b"x-slo-tpot-ms",
        b"x-slo-ttft-ms",
        b"x-slo-unmet",
    }
)
"""Headers that Serve or the application answer to, which must be UTF-8. Others are dropped if they
are not: Serve decodes some of them, and would answer 500, and a header that a proxy added is no
mistake of the client's."""
MAX_PIPELINED = 16
"""Limit of requests that a client sends on one connection before their answers."""

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


def connections_allowed(variable: str, default: int) -> int:
    """Return a limit of connections: an environment variable's, or else `default`.

    Raises:
        ConfigError: the variable is not a number of connections.
    """
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:10]) < 2**31):
        raise ConfigError(f"{variable} is {abridged(text)}: expected a number from 1 on")
    return int(text)


def install() -> list[Any]:
    """Make every HTTP server that this process starts from now on keep the limits.

    Serve calls it in each process that speaks HTTP, before the server starts, and expects
    middlewares. There are none: a middleware sees a request only once its headers are complete.
    """
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:BoundedHttpProtocol"
    return []


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's connection, with a deadline for headers, and limits of their size.

    The deadline also holds for the rest of a body behind its answer, which nobody reads. A body
    before its answer has deadlines of its own (`services.http.body`), and uvicorn has one for the
    next request of a kept-alive connection.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline_s = header_deadline_s()
        self._max_connections = connections_allowed(CONNECTIONS_VARIABLE, MAX_CONNECTIONS)
        self._deadline: asyncio.TimerHandle | None = None
        self._in_headers = False
        self._in_body = False
        self._write_deadline: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        """Bytes of the present request's line, header names and values so far."""
        self._unparsed_bytes = 0
        """Bytes since the parser last found something whole."""
        self._refusal: RequestError | None = None
        """Error after which nothing is parsed any more."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline with the connection, or refuse it if there are too many."""
        super().connection_made(transport)
        self._arm()
        if len(self.connections) > self._max_connections:
            self._refuse(QueueFull("too many connections are open", retry_after_s=1.0))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the deadlines."""
        self._disarm()
        self._stop_write_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless the connection is only open until its refusal was read."""
        for start in range(0, len(data), MAX_HEADER_BYTES):
            if self._refusal is not None:
                return
            piece = data[start : start + MAX_HEADER_BYTES]
            self._unparsed_bytes += len(piece)
            super().data_received(piece)
            if self._unparsed_bytes > MAX_HEADER_BYTES:
                self._refuse(_too_large())

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser rejected, or what one of the methods below raised."""
        self._refuse(InvalidRequest(msg))

    # --- called by the parser ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Start the deadline with the first byte of a request."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise self._refused(
                InvalidRequest(
                    f"At most {MAX_PIPELINED} requests of a connection may wait for an answer."
                )
            )
        super().on_message_begin()
        self._in_headers = True
        self._header_bytes = self._unparsed_bytes = 0
        self._arm()

    def on_url(self, url: bytes) -> None:
        """Count a part of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, or a trailer."""
        self._count(len(name) + len(value))
        if len(self.headers) >= MAX_HEADERS:
            raise self._refused(_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the deadline for the body."""
        if not all(value.isascii() for _, value in self.headers):
            self._keep_text()
        self._in_headers, self._in_body = False, True
        self._unparsed_bytes = 0
        self._disarm()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body; `services.http.body` limits it."""
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Stop the deadline with the last byte of a request that is answered already."""
        self._in_body = False
        self._unparsed_bytes = 0
        if self._answered():
            self._disarm()
        super().on_message_complete()

    def _should_upgrade_to_ws(self) -> bool:
        # Nothing here speaks WebSocket, and its protocol class would have no limits.
        return False

    def _unsupported_upgrade_warning(self) -> None: ...

    def _count(self, size: int) -> None:
        self._unparsed_bytes = 0
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            raise self._refused(_too_large())

    def _keep_text(self) -> None:
        """Drop the headers that are not UTF-8; refuse the request if it is one that matters."""
        for name, value in self.headers:
            if name in TEXT_HEADERS and not _is_utf8(value):
                shown = name.decode()
                raise self._refused(InvalidRequest(f"{shown}: must be UTF-8", param=shown))
        # In place: the application's scope has this list.
        self.headers[:] = [header for header in self.headers if _is_utf8(header[1])]

    # --- the deadline --------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Start the deadlines for the rest of the answer, and of a body that is answered early."""
        super().on_response_complete()
        self._start_write_deadline()
        if self._refusal is not None:
            self._send_refusal()
        elif self._in_body:
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
        if self._in_headers and self._refusal is None and not self.transport.is_closing():
            self.transport.write(_REQUEST_TIMEOUT)
        self._start_write_deadline()
        return self.transport.close()

    # --- answers that are not read -------------------------------------------------------------

    def pause_writing(self) -> None:
        """Start the deadline for an answer that the client does not take."""
        super().pause_writing()
        self._start_write_deadline()

    def resume_writing(self) -> None:
        """Stop the deadline."""
        super().resume_writing()
        self._stop_write_deadline()

    def _start_write_deadline(self) -> None:
        self._stop_write_deadline()
        waiting = self.transport.get_write_buffer_size()
        if waiting:
            self._write_deadline = self.loop.call_later(
                WRITE_DEADLINE_S, self._write_expired, waiting
            )

    def _stop_write_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _write_expired(self, waiting: int) -> None:
        """Drop the connection if the client has taken next to nothing of the `waiting` bytes."""
        left = self.transport.get_write_buffer_size()
        if left and waiting - left < LEAST_TAKEN_BYTES:
            self.transport.abort()  # `close` would wait for the client to read them
        else:
            self._start_write_deadline()

    # --- refusals ------------------------------------------------------------------------------

    def _refused(self, error: RequestError) -> RequestError:
        """Refuse the connection; return what ends the parser's work on it."""
        self._refuse(error)
        return error

    def _refuse(self, error: RequestError) -> None:
        """Parse nothing more, answer with this error and close the connection."""
        if self._refusal is not None:
            return
        self._refusal = error
        if self._in_body and not self._answered():
            # The application waits for the rest of the body: tell it that none will come.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
            self._send_refusal()
        elif self._answered():
            self._send_refusal()
        else:
            self.flow.pause_reading()  # until the answers before this one are complete

    def _send_refusal(self) -> None:
        if self.transport.is_closing() or self._refusal is None:
            return
        status, error, headers = error_body(self._refusal)
        body = json.dumps(error).encode()
        headers |= {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[status] + lines.encode() + b"\r\n" + body)
        if self.transport.can_write_eof():
            # Closing before the client's last byte would have the kernel drop the answer with it.
            self.transport.write_eof()
            self._arm()
        else:
            self.transport.close()


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _too_large() -> HeadersTooLarge:
    return HeadersTooLarge(
        f"The request line and headers are larger than this server's limit of {MAX_HEADER_BYTES} "
        f"bytes and {MAX_HEADERS} headers."
    )
