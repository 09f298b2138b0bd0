"""A word now and then that a rank gets on with prompts, so that its silence means that it hangs."""

from __future__ import annotations

import time

from csps.actors.announce import Notify
from csps.protocols.messages import PrefillProgress

REPORT_S = 1.0
"""Seconds between two words, at least. What takes longer between two points of a job at which
there is anything to tell is not cut short: the router's deadline is far longer."""


class ProgressReport:
    """Told of every part of a step and every piece that rides, tells the router of some. Any thread
    may; two at once may both tell, and count as one."""

    def __init__(self, notify: Notify, *, rank: int) -> None:
        self._notify = notify
        self._rank = rank
        self._told = 0.0

    def step(self) -> None:
        """A part of a step is computed, or sent, or a piece of a prompt that rides."""
        now = time.monotonic()
        if now - self._told >= REPORT_S:
            self._told = now
            self._notify("prefill_progress", PrefillProgress(rank=self._rank))
