"""How much memory the large bodies of requests take, from their first byte until they are read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from csps.protocols.errors import QueueFull

LARGE_BODY_BYTES = 256 * 1024
"""Some 60,000 tokens: beyond, reading a body takes longer than a short request's prefill."""
MAX_LARGE_BYTES = 256 * 1024 * 1024
"""Of all large bodies that arrive, wait to be read or are read."""
RETRY_AFTER_S = 2.0


class LargeBytes:
    """The bytes of all large bodies together. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.held = 0

    def take(self, more: int, *, own: int) -> None:
        """Count `more` bytes of a body of which `own` are counted already.

        Raises:
            QueueFull: they are too many beside those of others; alone, a body may have any length.
        """
        with self._lock:
            if self.held > own and self.held + more > MAX_LARGE_BYTES:
                raise QueueFull("too many long prompts are being read", retry_after_s=RETRY_AFTER_S)
            self.held += more

    def give_back(self, size: int) -> None:
        """They are not here any more."""
        with self._lock:
            self.held -= size


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

    def let_go(self) -> None:
        """The handler does not need it any more."""
        if self.reading is None:
            self._give_back(None)
        else:
            self.reading.add_done_callback(self._give_back)

    def _give_back(self, _: object) -> None:
        self._large_bytes.give_back(self._counted)


@contextmanager
def holding(large_bytes: LargeBytes) -> Iterator[BodyBudget]:
    """A body from before its first byte until the handler has done with it."""
    held = BodyBudget(large_bytes)
    try:
        yield held
    finally:
        held.let_go()
