"""The simulator's timeline on the wall clock."""

from __future__ import annotations

import asyncio
import time

from csps.loadgen.simulator.timeline import Action, EventTimeline

EARLY_NS = 500_000
"""Time before an action at which waiting turns into spinning. Event loop timers have a resolution
of a millisecond.
"""


class PacedTimeline(EventTimeline):
    """A timeline of absolute times, so that lateness does not add up.

    While an action runs, `now_ns` is its planned time. Code outside of actions, such as a message
    handler, calls `catch_up` first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._armed_ns: int | None = None
        self._stepping = False
        self.now_ns = time.monotonic_ns()
        self.latest_ns = 0
        """Greatest lateness of an action."""

    def at(self, t_ns: int, action: Action) -> None:
        super().at(t_ns, action)
        if not self._stepping:
            self._arm()

    def catch_up(self) -> None:
        """Do all that is due, and set the time to the present."""
        self._stepping = True
        try:
            while not self.empty and self.next_ns <= (now_ns := time.monotonic_ns()):
                self.latest_ns = max(self.latest_ns, now_ns - self.next_ns)
                self.step()
        finally:
            self._stepping = False
        self.now_ns = max(self.now_ns, time.monotonic_ns())
        self._arm()

    def _arm(self) -> None:
        """Wake up when the next action is due."""
        if self.empty or self._armed_ns == self.next_ns:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed_ns = self.next_ns
        wait_ns = self.next_ns - time.monotonic_ns()
        if wait_ns > 2 * EARLY_NS:
            self._timer = self._loop.call_later((wait_ns - EARLY_NS) / 1e9, self._wake)
        else:
            self._timer = self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._armed_ns = None
        self.catch_up()
