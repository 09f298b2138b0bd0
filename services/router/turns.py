"""Drives the scheduler on an event loop: one batch of events, and so one decision, a turn."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from csps.services.scheduling.commands import Command
from csps.services.scheduling.events import AnyEvent, Wake
from csps.services.scheduling.scheduler import Scheduler

_log = logging.getLogger(__name__)

CarryOut = Callable[[Sequence[Command]], None]


class Recorder(Protocol):
    """Keeps what a scheduler was told, so that it can be told again (`scheduling.log`)."""

    def record(self, now_ns: int, events: Sequence[AnyEvent]) -> None:
        """One batch."""
        ...


class Turns:
    """Collects what happens in one turn of the loop and has the scheduler handle it at its end.

    A burst of a hundred requests is one scheduling round, and whatever a command leads to at once
    is handled in the next turn: the scheduler is never entered twice.

    Args:
        recorder: of the log of this run, if one is kept.
        clock: nanoseconds; only their differences matter.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        recorder: Recorder | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._scheduler = scheduler
        self._carry_out: CarryOut | None = None
        self._recorder, self._clock = recorder, clock
        self._events: list[AnyEvent] = []
        self._due: asyncio.Handle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._closed = False
        self.fault: Exception | None = None
        """What a turn has failed with: a mistake of ours, after which nothing is decided."""

    def start(self, carry_out: CarryOut) -> None:
        """Hand the scheduler's commands to `carry_out`, which may `tell` again."""
        self._carry_out = carry_out

    def tell(self, event: AnyEvent) -> None:
        """Something has happened."""
        self._events.append(event)
        if self._due is None and not self._closed:
            self._due = asyncio.get_running_loop().call_soon(self._turn)

    def close(self) -> None:
        """Decide nothing more."""
        self._closed = True
        for handle in (self._due, self._alarm):
            if handle is not None:
                handle.cancel()

    def _turn(self) -> None:
        self._due = None
        if self.fault is not None:
            return
        assert self._carry_out is not None, "told before it was started"
        events, self._events = self._events, []
        now_ns = self._clock()
        try:
            if self._recorder is not None:
                self._recorder.record(now_ns, events)
            outcome = self._scheduler.handle(events, now_ns)
            self._carry_out(outcome.commands)
        except Exception as exc:
            _log.exception("a scheduling turn failed")
            self.fault = exc
            return
        self._set_alarm(outcome.wake_at_ns, now_ns)

    def _set_alarm(self, wake_at_ns: int | None, now_ns: int) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if wake_at_ns is not None:
            delay_s = max(0, wake_at_ns - now_ns) / 1e9
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self.tell, Wake())
