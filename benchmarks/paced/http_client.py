"""A client on raw sockets, which leaves the shared processor to router and ranks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ANSWER_S = 300.0
"""Time limit of a whole answer."""
_END = b"data: [DONE]"


@dataclass
class Answer:
    """Times of an answer by `time.monotonic()`."""

    sent: float
    status: int = 0
    first: float = 0.0
    """Time of the first event of the stream."""
    last: float = 0.0
    events: int = 0
    stamps: list[float] = field(default_factory=list)
    """Times of every read with events in it, if requested."""
    body: bytes = b""
    """Body of an answer that is no stream."""

    @property
    def ttft_s(self) -> float:
        """Return the time to the first token."""
        return self.first - self.sent


class Connection:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.events = 0
        """Events of all streams so far."""
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Connect."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    def close(self) -> None:
        """Close the connection."""
        if self._writer is not None:
            self._writer.close()

    async def ask(self, body: Mapping[str, Any], *, stamps: bool = False) -> Answer:
        """Send POST /v1/completions and read the whole answer."""
        return await self.ask_raw(json.dumps(body).encode(), stamps=stamps)

    async def ask_raw(
        self, content: bytes, *, stamps: bool = False, headers: bytes = b""
    ) -> Answer:
        """Send a request whose body is JSON already, and read the whole answer.

        Args:
            headers: further ones, each with its end of line.
        """
        assert self._reader is not None
        assert self._writer is not None
        self._writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: paced\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n%b\r\n" % (len(content), headers) + content
        )
        answer = Answer(sent=time.monotonic())
        async with asyncio.timeout(ANSWER_S):
            head = await self._reader.readuntil(b"\r\n\r\n")
            answer.status = int(head[9:12])
            length = _content_length(head)
            if length is not None:
                answer.body = await self._reader.readexactly(length)
                answer.last = time.monotonic()
            else:
                await self._stream(self._reader, answer, stamps)
        return answer

    async def _stream(self, reader: asyncio.StreamReader, answer: Answer, stamps: bool) -> None:
        """Count events as they come; a chunked answer ends with `[DONE]` and a chunk of 0."""
        tail = b""
        while True:
            data = await reader.read(1 << 16)
            if not data:
                raise ConnectionError("the router closed the connection")
            now = time.monotonic()
            # A "data:" may be cut in two; nothing else of the stream contains it.
            joined = tail + data
            events = joined.count(b"data:") - tail.count(b"data:")
            if events:
                answer.events += events
                self.events += events
                answer.first = answer.first or now
                if stamps:
                    answer.stamps.append(now)
            tail = joined[-64:]
            if b"0\r\n\r\n" in tail and _END in joined[-256:]:
                answer.last = now
                answer.events -= 1
                return


def _content_length(head: bytes) -> int | None:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    return None
