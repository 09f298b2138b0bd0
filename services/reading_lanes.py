"""Threads that turn bodies into requests: large bodies have a lane of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from csps.protocols.errors import QueueFull

LARGE_BODY_BYTES = 256 * 1024
"""Some 60,000 tokens: beyond, reading a body takes longer than a short request's prefill."""
LARGE_AT_ONCE = 2
MAX_LARGE_BYTES = 256 * 1024 * 1024
"""Of all large bodies that are read or wait for it."""
RETRY_AFTER_S = 2.0

T = TypeVar("T")


class ReadingLanes:
    """Parses and tokenizes beside the event loop, where it would stop everybody's tokens.

    Small bodies take the loop's own threads. With those alone, as many large bodies as there are
    threads would keep every short request waiting. A semaphore in front of them does not help: a
    client that goes away cancels the wait, but not the thread.
    """

    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(LARGE_AT_ONCE, thread_name_prefix="large bodies")
        self._held_bytes = 0

    async def run(self, body: bytes, read: Callable[[bytes], T]) -> T:
        """`read(body)` on a thread.

        Raises:
            QueueFull: too many bytes wait for it already.
        """
        if len(body) <= LARGE_BODY_BYTES:
            return await asyncio.to_thread(read, body)
        # A read that is cancelled in the queue stays there until a thread takes it: without this
        # it would keep its body, which nobody counts any more.
        held = [body]
        with self._holding(len(body)):
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._large, lambda: read(held.pop()))
            finally:
                held.clear()

    def close(self) -> None:
        """Read nothing more. What a thread is at goes on to its end."""
        self._large.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _holding(self, size: int) -> Iterator[None]:
        if self._held_bytes and self._held_bytes + size > MAX_LARGE_BYTES:
            raise QueueFull("too many long prompts are being read", retry_after_s=RETRY_AFTER_S)
        self._held_bytes += size
        try:
            yield
        finally:
            self._held_bytes -= size
