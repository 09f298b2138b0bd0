"""Threads that turn bodies into requests: large bodies have a lane of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

from csps.services.http.body_budget import LARGE_BODY_BYTES, BodyBudget, LargeBytes, holding

LARGE_AT_ONCE = 2

T = TypeVar("T")


class TokenizerPool:
    """Parses and tokenizes beside the event loop, where it would stop everybody's tokens.

    Small bodies take the loop's own threads. With those alone, as many large bodies as there are
    threads would keep every short request waiting. A semaphore in front of them does not help: a
    client that goes away cancels the wait, but not the thread.
    """

    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(LARGE_AT_ONCE, thread_name_prefix="large bodies")
        self.large_bytes = LargeBytes()

    def holding(self) -> AbstractContextManager[BodyBudget]:
        """To be entered before the first byte of a body comes, and left after `run`."""
        return holding(self.large_bytes)

    async def run(self, body: bytes, read: Callable[[bytes], T], held: BodyBudget) -> T:
        """`read(body)` on a thread."""
        if len(body) <= LARGE_BODY_BYTES:
            return await asyncio.to_thread(read, body)
        # A read that is cancelled in the queue stays there until a thread takes it: without this
        # it would keep its body, which nobody counts any more.
        kept = [body]
        held.reading = reading = self._large.submit(lambda: read(kept.pop()))
        try:
            return await asyncio.wrap_future(reading)
        finally:
            kept.clear()

    def close(self) -> None:
        """Read nothing more. What a thread is at goes on to its end."""
        self._large.shutdown(wait=False, cancel_futures=True)
