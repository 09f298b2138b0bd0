"""Clients that stop in the middle of a request, as bytes on a socket."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

HEADERS = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
IN_THE_HEADERS = {
    "half a line": b"POST /v1/comp",
    "half the headers": HEADERS,
}
IN_THE_BODY = {
    "no byte of the body": HEADERS + b"content-length: 100\r\n\r\n",
    "half the body": HEADERS + b'content-length: 100\r\n\r\n{"model"',
    "a large body": HEADERS + b"content-length: 100000\r\n\r\n" + b" " * 50_000,
    "a chunk": HEADERS + b'transfer-encoding: chunked\r\n\r\n8\r\n{"model"\r\n',
}
REFUSED_EARLY = {
    "unknown path": HEADERS.replace(b"completions", b"nothing") + b"content-length: 9\r\n\r\n{",
    "too long": HEADERS + b"content-length: 100000000000\r\n\r\n{",
}
HALF_SENT = IN_THE_HEADERS | IN_THE_BODY | REFUSED_EARLY


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The server's reaction to a stalled client."""

    status: int
    """Status of the answer."""
    open_s: float
    """Time until the server closed the connection."""


async def outcome(host: str, port: int, sent: bytes, *, deadline_s: float) -> Outcome:
    """Send this much and wait until the server closes the connection.

    Raises:
        TimeoutError: the connection stays open.
    """
    began = time.monotonic()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(sent)
        async with asyncio.timeout(deadline_s):
            answer = await reader.read()
    finally:
        writer.close()
    return Outcome(status=int(answer.split()[1]), open_s=time.monotonic() - began)
