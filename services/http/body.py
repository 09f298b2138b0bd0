"""Request bodies: reading them within bounds, and counting what is read and what waits to be sent.

`while_connected` cancels work when the client disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from csps.protocols.core.errors import QueueFull
from csps.services.http.errors import BodyTooSlow, PayloadTooLarge
from csps.services.settings.settings import HttpSettings

T = TypeVar("T")


async def read_body(
    request: Request,
    limit: int,
    *,
    grown: Callable[[int], None] = lambda size: None,
    deadlines: HttpSettings,
) -> bytes:
    """Return the whole body.

    Args:
        limit: most bytes that a body may have.
        grown: called with the length after each chunk; an exception from it ends the reading.

    Raises:
        PayloadTooLarge: the body is longer than `limit` bytes; the rest is not read.
        BodyTooSlow: the body, or its next chunk, missed its deadline.
    """
    whole_s, chunk_s = deadlines.body_deadline_s, deadlines.body_silence_s
    try:
        async with asyncio.timeout(whole_s), asyncio.timeout(chunk_s) as chunk_timeout:
            return await _read(
                request, limit, grown, on_chunk=partial(_postpone, chunk_timeout, chunk_s)
            )
    except TimeoutError:
        rule = (
            f"Nothing of the request body came for {chunk_s:g} s."
            if chunk_timeout.expired()
            else f"The request body did not arrive within {whole_s:g} s."
        )
        raise BodyTooSlow(rule) from None


async def _read(
    request: Request, limit: int, grown: Callable[[int], None], on_chunk: Callable[[], None]
) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
        grown(len(body))
        on_chunk()
    return bytes(body)


def _postpone(timeout: asyncio.Timeout, seconds: float) -> None:
    timeout.reschedule(asyncio.get_running_loop().time() + seconds)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The request body is larger than this server's limit of {limit} bytes.")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it if the client disconnects.

    The body must have been read before, so that `receive` brings only the disconnect.

    Raises:
        ClientDisconnect: the client is gone.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await end_tasks(task, watcher)


async def _disconnected(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended; their errors are nobody's any more."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task


MAX_BYTES = 256 * 1024 * 1024
"""Limit on all bodies that arrive or are parsed, and on all answers that wait to be sent."""
RETRY_AFTER_S = 2.0


class ByteBudget:
    """Bytes that all requests may hold together for one purpose.

    Args:
        what: what they hold, for the error.
        exempt: bytes that each may hold in any case.
    """

    def __init__(self, what: str, *, exempt: int = 0) -> None:
        self._what, self._exempt = what, exempt
        self.in_use = 0

    @contextmanager
    def share(self) -> Iterator[ByteShare]:
        """Count the bytes of one request until this context ends."""
        share = ByteShare(self)
        try:
            yield share
        finally:
            self.in_use -= share.bytes

    def take(self, more: int, *, own: int) -> None:
        """Count `more` bytes of a request of which `own` are counted already.

        Raises:
            QueueFull: others leave too little room; a request alone may hold any number.
        """
        others = self.in_use - own
        if others and own + more > self._exempt and self.in_use + more > MAX_BYTES:
            raise QueueFull(f"too many {self._what}", retry_after_s=RETRY_AFTER_S)
        self.in_use += more


class ByteShare:
    """Bytes of one request."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.bytes = 0

    def grown(self, size: int) -> None:
        """Count the request's bytes anew.

        Raises:
            QueueFull: other requests leave too little room.
        """
        self._budget.take(size - self.bytes, own=self.bytes)
        self.bytes = size


class RequestsBeingRead:
    """Counts requests, and the bytes of their bodies, until the scheduler counts them."""

    def __init__(self) -> None:
        self.count = 0
        self._bytes = ByteBudget("long prompts are being read")

    @property
    def bytes(self) -> int:
        """Return the bytes of their bodies."""
        return self._bytes.in_use

    @contextmanager
    def place(self) -> Iterator[ByteShare]:
        """Count a request from before its body's first byte until this context ends."""
        self.count += 1
        try:
            with self._bytes.share() as share:
                yield share
        finally:
            self.count -= 1
