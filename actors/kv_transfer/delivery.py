"""All that one step sends: its slots stay until the last of it has landed, and then it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable

from csps.actors.slot_allocator import PinnedSpan, SlotAllocator
from csps.actors.timeline import Timeline
from csps.protocols.span import Span


class Delivery:
    """Counts what is on its way. Any thread may call anything."""

    def __init__(
        self,
        slots: SlotAllocator,
        on_sent: Callable[[Exception | None], None],
        on_step: Callable[[], None] = lambda: None,
        *,
        traced: bool = False,
    ) -> None:
        """Nothing is on its way yet.

        Args:
            on_sent: told once, when nothing more will be posted and all that was has landed, was
                withdrawn or failed: why something failed, if anything did.
            on_step: told of each message that has landed, and now and then while some wait for
                their turn.
            traced: the timeline is wanted.
        """
        self._slots = slots
        self.timeline = Timeline(on=traced)
        """What was under way when."""
        self._on_sent, self._on_step = on_sent, on_step
        self._lock = threading.Lock()
        self._open = 1
        """Sendings under way or waiting, and one until nothing more comes."""
        self._failure: Exception | None = None
        self._pinned: dict[tuple[int, Span], PinnedSpan] = {}

    @property
    def failed(self) -> bool:
        """Something will never arrive."""
        return self._failure is not None

    def pin(self, rid: int, span: Span) -> PinnedSpan:
        """Where a span lies, which stays there until all is sent. Only while something is open."""
        with self._lock:
            if (rid, span) not in self._pinned:
                self._pinned[rid, span] = self._slots.pin(rid, span)
            return self._pinned[rid, span]

    def posted(self) -> None:
        """There is one more to send."""
        with self._lock:
            self._open += 1

    def landed(self) -> None:
        """One has arrived."""
        self._on_step()
        self._close_one(None)

    def waits(self) -> None:
        """A receiver lives and will have one later."""
        self._on_step()

    def given_up(self, failure: Exception | None = None) -> None:
        """One will not be sent: nobody wants it any more, or it cannot be."""
        self._close_one(failure)

    def fail(self, failure: Exception) -> None:
        """Something could not even be posted."""
        with self._lock:
            self._failure = self._failure or failure

    def finish(self) -> None:
        """Nothing more will be posted."""
        self._close_one(None)

    def _close_one(self, failure: Exception | None) -> None:
        with self._lock:
            assert self._open > 0, "more has ended than was posted"
            self._failure = self._failure or failure
            self._open -= 1
            if self._open:
                return
        for pinned in self._pinned.values():
            self._slots.unpin(pinned)
        self._on_sent(self._failure)
