"""A watchdog: no callback of the event loop, and no thread, keeps the others from running for long.

Callbacks are measured in processor time of the loop's thread, and holders of the interpreter's lock
by a thread that wants it every millisecond. Neither counts what the machine does besides; where it
does much, shorter holds of the lock go unnoticed.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from asyncio.events import Handle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIMIT_S = 0.05
_SAMPLE_S = 0.001
_SCHEDULED = Path("/proc/thread-self/schedstat")


@contextmanager
def watched_loop(limit_s: float = LIMIT_S) -> Iterator[None]:
    """Fail unless every callback and every hold of the interpreter within was shorter."""
    # As the router does at its start: what was imported would be searched in the middle of it.
    gc.collect()
    gc.freeze()
    callbacks = _Callbacks()
    holds = _Holds()
    with callbacks.measured(), holds.measured():
        yield
    slow = [what for what in (callbacks.slowest, holds.longest) if what[0] > limit_s]
    assert not slow, "; ".join(f"{1e3 * seconds:.0f} ms: {what}" for seconds, what in slow)


class _Callbacks:
    def __init__(self) -> None:
        self.slowest = (0.0, "")

    @contextmanager
    def measured(self) -> Iterator[None]:
        run = Handle._run  # type: ignore[attr-defined]
        loop_thread = threading.get_ident()

        def timed(handle: Handle) -> None:
            before = time.thread_time()
            run(handle)
            spent = time.thread_time() - before
            if spent > self.slowest[0] and threading.get_ident() == loop_thread:
                self.slowest = spent, repr(handle)

        assert "uvloop" not in type(asyncio.get_running_loop()).__module__, "its handles are C"
        Handle._run = timed  # type: ignore[attr-defined]
        try:
            yield
        finally:
            Handle._run = run  # type: ignore[attr-defined]


class _Holds:
    """The longest time for which the watchdog waited for a thread beside the loop's to let go of
    the interpreter, and not for a processor.

    What the loop's own thread runs is excluded, because its callbacks are measured: it lets go of
    the interpreter between them, but takes it again before a thread on another core wakes up.
    """

    def __init__(self) -> None:
        self.longest = (0.0, "")
        self._over = threading.Event()
        self._loop_clock = time.pthread_getcpuclockid(threading.get_ident())

    @contextmanager
    def measured(self) -> Iterator[None]:
        thread = threading.Thread(target=self._sample, name="watchdog")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _sample(self) -> None:
        while not self._over.is_set():
            began, used, queued = time.perf_counter(), self._used_s(), _queued_s()
            time.sleep(_SAMPLE_S)
            waited = time.perf_counter() - began - _SAMPLE_S - (_queued_s() - queued)
            # Whoever held the lock ran: without that, the holder waited for a processor itself.
            held = min(waited, self._used_s() - used)
            if held > self.longest[0]:
                self.longest = held, "a thread held the interpreter"

    def _used_s(self) -> float:
        """Return the processor time of all threads but the loop's."""
        return time.process_time() - time.clock_gettime(self._loop_clock)


def _queued_s() -> float:
    """Return how long this thread has waited for a processor."""
    return int(_SCHEDULED.read_text().split()[1]) / 1e9
