"""A server that does exactly what a test wants on the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Reply = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class RawServer:
    """Address of a server, and the requests that it received."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    """A client went before its answer had ended."""


@asynccontextmanager
async def raw_server(reply: Reply) -> AsyncIterator[RawServer]:
    """Answer every POST with `reply`, and `/v1/models` properly."""

    async def session(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = int(head.lower().partition("content-length: ")[2].partition("\r")[0] or 0)
                body = await reader.readexactly(length)
                if head.startswith("GET /v1/models"):
                    writer.write(whole({"data": [{"id": "raw", "max_model_len": 4096}]}))
                    continue
                found.heads.append(head)
                found.bodies.append(json.loads(body))
                await reply(found.bodies[-1], writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            found.hung_up.set()
        finally:
            writer.close()

    server = await asyncio.start_server(session, "127.0.0.1", 0)
    found = RawServer(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield found
    finally:
        server.close()


def whole(value: object, status: str = "200 OK") -> bytes:
    """Return a JSON answer."""
    body = json.dumps(value).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def event(data: object) -> bytes:
    """Return a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"data: {text}\n\n".encode()


def chunked(*chunks: bytes) -> bytes:
    """Return HTTP chunks, without the last, empty one."""
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)


END = b"0\r\n\r\n"


def text_events(*texts: str) -> list[bytes]:
    """Return a completion, token by token, with its usage."""
    last = len(texts) - 1
    choices = [
        {"choices": [{"text": text, "finish_reason": "stop" if number == last else None}]}
        for number, text in enumerate(texts)
    ]
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": len(texts)}}
    return [event(payload) for payload in [*choices, usage]] + [event("[DONE]")]


async def answer_ok(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Answer with three tokens."""
    writer.write(STREAM + chunked(*text_events(" a", " b", " c")) + END)
