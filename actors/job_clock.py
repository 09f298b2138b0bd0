"""Where the time of one prefill job goes on one rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class JobClock:
    """Seconds since the job was received, by what they were spent on."""

    received: float = field(default_factory=time.monotonic)
    started: float = 0.0
    finished: float = 0.0
    communication_s: float = 0.0
    """Waiting for exchanges inside the group; what computing hid does not count."""
    yielded_s: float = 0.0
    """Urgent jobs that ran between two layers."""

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Count the time inside as communication."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.communication_s += time.monotonic() - begin

    @contextmanager
    def yielding(self) -> Iterator[None]:
        """Count the time inside as given to other jobs."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.yielded_s += time.monotonic() - begin

    @property
    def queue_s(self) -> float:
        """From arrival to the start of computing."""
        return self.started - self.received

    @property
    def compute_s(self) -> float:
        """Computing alone."""
        return self.finished - self.started - self.communication_s - self.yielded_s
