"""What comes in with a request: its body, within bounds, and the client's leaving.

How much memory the large bodies of requests take, from their first byte until they are read.

Threads that turn bodies into requests: large bodies have a lane of their own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
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
    """The whole body.

    Args:
        grown: told its length as it comes; what it raises ends the reading.

    Raises:
        PayloadTooLarge: it is longer than `limit` bytes; the rest is not read.
        BodyTooSlow: it, or a part of it, did not come in time.
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


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    The body must have been read before: what `receive` still brings is the client's leaving.

    Raises:
        ClientDisconnect: nobody waits for the answer any more.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _end(task, watcher)


async def _disconnected(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The request body is larger than this server's limit of {limit} bytes.")


LARGE_BODY_BYTES = 256 * 1024
"""Some 60,000 tokens: beyond, reading a body takes longer than a short request's prefill."""
MAX_LARGE_BYTES = 256 * 1024 * 1024
"""Of all large bodies that arrive, wait to be read or are read."""
RETRY_AFTER_S = 2.0


class LargeBytes:
    """The bytes of all large bodies together. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.in_use = 0

    def take(self, more: int, *, own: int) -> None:
        """Count `more` bytes of a body of which `own` are counted already.

        Raises:
            QueueFull: they are too many beside those of others; alone, a body may have any length.
        """
        with self._lock:
            if self.in_use > own and self.in_use + more > MAX_LARGE_BYTES:
                raise QueueFull("too many long prompts are being read", retry_after_s=RETRY_AFTER_S)
            self.in_use += more

    def free(self, size: int) -> None:
        """They are not here any more."""
        with self._lock:
            self.in_use -= size


class BodyBudget:
    """One body, counted from when it is a large one until nobody needs it any more."""

    def __init__(self, large_bytes: LargeBytes) -> None:
        self._large_bytes = large_bytes
        self._counted = 0
        self.reading: Future[Any] | None = None
        """What a thread does with it, also when the handler has been cancelled meanwhile."""

    def grown(self, size: int) -> None:
        """It has so many bytes by now.

        Raises:
            QueueFull: too many bytes of others are here.
        """
        if size > LARGE_BODY_BYTES:
            self._large_bytes.take(size - self._counted, own=self._counted)
            self._counted = size

    def release(self) -> None:
        """The handler does not need it any more."""
        if self.reading is None:
            self._free(None)
        else:
            self.reading.add_done_callback(self._free)

    def _free(self, _: object) -> None:
        self._large_bytes.free(self._counted)


@contextmanager
def counted_body(large_bytes: LargeBytes) -> Iterator[BodyBudget]:
    """A body from before its first byte until the handler has done with it."""
    budget = BodyBudget(large_bytes)
    try:
        yield budget
    finally:
        budget.release()


LARGE_AT_ONCE = 2


class TokenizerPool:
    """Parses and tokenizes beside the event loop, where it would stop everybody's tokens.

    Small bodies take the loop's own threads. With those alone, as many large bodies as there are
    threads would keep every short request waiting. A semaphore in front of them does not help: a
    client that goes away cancels the wait, but not the thread.
    """

    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(LARGE_AT_ONCE, thread_name_prefix="large bodies")
        self.large_bytes = LargeBytes()

    def counted_body(self) -> AbstractContextManager[BodyBudget]:
        """To be entered before the first byte of a body comes, and left after `run`."""
        return counted_body(self.large_bytes)

    async def run(self, body: bytes, read: Callable[[bytes], T], budget: BodyBudget) -> T:
        """`read(body)` on a thread."""
        if len(body) <= LARGE_BODY_BYTES:
            return await asyncio.to_thread(read, body)
        # A read that is cancelled in the queue stays there until a thread takes it: without this
        # it would keep its body, which nobody counts any more.
        pending = [body]
        budget.reading = reading = self._large.submit(lambda: read(pending.pop()))
        try:
            return await asyncio.wrap_future(reading)
        finally:
            pending.clear()

    def close(self) -> None:
        """Read nothing more. What a thread is at goes on to its end."""
        self._large.shutdown(wait=False, cancel_futures=True)
