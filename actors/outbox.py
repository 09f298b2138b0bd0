"""Waits for what jobs have sent, so that computing does not.

What is on its way is waited for in order, by a thread of its own, and let go of as it leaves: the
KV of a long chunk is not in memory twice until its last layer is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from csps.actors.mesh import Pending

J = TypeVar("J")


class Outbox(Generic[J]):
    """Sendings of jobs of any type; `run` is the thread's body."""

    def __init__(
        self,
        on_sent: Callable[[J, RuntimeError | None], None],
        on_step: Callable[[J], None] = lambda job: None,
    ) -> None:
        """Nothing is on its way yet.

        Args:
            on_sent: told, in order, about each finished job, and what stopped it if anything.
            on_step: told about each sending that has left.
        """
        self._on_sent, self._on_step = on_sent, on_step
        self._queue: SimpleQueue[tuple[J, Pending | None] | None] = SimpleQueue()
        self._failures: dict[J, RuntimeError] = {}

    def post(self, job: J, sending: Pending) -> None:
        """Something of a job is on its way."""
        self._queue.put((job, sending))

    def finish(self, job: J) -> None:
        """Nothing more will be sent for a job."""
        self._queue.put((job, None))

    def close(self) -> None:
        """End `run` after what is queued."""
        self._queue.put(None)

    def run(self) -> None:
        """Wait for one sending after another, until closed."""
        while (item := self._queue.get()) is not None:
            job, sending = item
            if sending is None:
                self._on_sent(job, self._failures.pop(job, None))
            else:
                self._wait(job, sending)

    def _wait(self, job: J, sending: Pending) -> None:
        try:
            sending.wait()
        except RuntimeError as exc:
            self._failures.setdefault(job, exc)
        else:
            self._on_step(job)
