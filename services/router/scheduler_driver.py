"""Drives the scheduler from the router's event loop, and numbers the gangs that it knows."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence

from csps.protocols.gang.client import GangClient
from csps.services.router.decision_log import DecisionLog
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.events.commands import Command
from csps.services.scheduling.events.events import AnyEvent, GangId, GangUp, InstanceUp, Wake

_log = logging.getLogger(__name__)

Execute = Callable[[Sequence[Command]], None]


class SchedulerDriver:
    """Collects the events of one event-loop iteration and hands them to the scheduler together.

    A burst of a hundred requests is one scheduling round. Events that a command causes at once are
    handled in the next round, so the scheduler is never entered twice.

    Args:
        recorder: writes the decision log of this run, if one is kept.
        clock: nanoseconds; only differences matter.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        recorder: DecisionLog | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._scheduler = scheduler
        self._execute: Execute | None = None
        self._recorder, self._clock = recorder, clock
        self._events: list[AnyEvent] = []
        self._due: asyncio.Handle | None = None
        self._wake_timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.fault: Exception | None = None
        """Error with which a round failed: a bug, after which nothing is scheduled."""

    def start(self, execute: Execute) -> None:
        """Pass the scheduler's commands to `execute`, which may post events itself."""
        self._execute = execute

    def post_event(self, event: AnyEvent) -> None:
        """Queue an event for the next scheduling round."""
        self._events.append(event)
        if self._due is None and not self._closed:
            self._due = asyncio.get_running_loop().call_soon(self._round)

    def close(self) -> None:
        """Schedule nothing more."""
        self._closed = True
        for handle in (self._due, self._wake_timer):
            if handle is not None:
                handle.cancel()

    def _round(self) -> None:
        self._due = None
        if self.fault is not None:
            return
        assert self._execute is not None, "event posted before the driver was started"
        events, self._events = self._events, []
        now_ns = self._clock()
        try:
            if self._recorder is not None:
                self._recorder.record(now_ns, events)
            outcome = self._scheduler.handle(events, now_ns)
            self._execute(outcome.commands)
        except Exception as exc:
            _log.exception("a scheduling round failed; nothing is scheduled any more")
            self.fault = exc
            if self._recorder is not None:
                self._recorder.flush()
            return
        self._set_wake_timer(outcome.wake_at_ns, now_ns)

    def _set_wake_timer(self, wake_at_ns: int | None, now_ns: int) -> None:
        if self._wake_timer is not None:
            self._wake_timer.cancel()
            self._wake_timer = None
        if wake_at_ns is not None:
            delay_s = max(0, wake_at_ns - now_ns) / 1e9
            self._wake_timer = asyncio.get_running_loop().call_later(
                delay_s, self.post_event, Wake()
            )


class AttachedGangs:
    """Numbers attached gangs; every incarnation of a gang gets a new number."""

    def __init__(self) -> None:
        self._by_number: dict[GangId, GangClient] = {}
        self._numbers = itertools.count(1)
        self._epochs: dict[GangId, str] = {}

    def add(self, gang: GangClient) -> GangId:
        """Give an attached gang its number."""
        # Never reused: late commands and notifications must not reach a gang's successor.
        gang_number = next(self._numbers)
        self._by_number[gang_number] = gang
        return gang_number

    def remove(self, gang: GangClient) -> GangId | None:
        """Forget a lost gang and return its number; None if it was never added."""
        gang_number = self.number_of(gang)
        if gang_number is not None:
            del self._by_number[gang_number]
            self._epochs.pop(gang_number, None)
        return gang_number

    def get(self, gang_number: GangId) -> GangClient | None:
        """Return the gang, or None once it is lost."""
        return self._by_number.get(gang_number)

    def number_of(self, gang: GangClient) -> GangId | None:
        """Return the number of an attached gang, or None."""
        return next((number for number, known in self._by_number.items() if known is gang), None)

    @property
    def prefill_locations(self) -> tuple[str, ...]:
        """Return the Rack-Server-GPU ids of prefill instances; empty while there are none."""
        found = (gang.locations for gang in self._by_number.values() if gang.role != "decode")
        return next(found, ())

    def linked(self, decode: GangClient, epoch: str) -> None:
        """Store the epoch under which a decode gang receives KV from now on."""
        gang_number = self.number_of(decode)
        assert gang_number is not None, f"link up for the detached decode gang {decode.gang_id}"
        self._epochs[gang_number] = epoch

    def epoch_of(self, decode: GangClient) -> str:
        """Return the epoch under which a decode gang receives KV; empty while it has no link."""
        gang_number = self.number_of(decode)
        return "" if gang_number is None else self._epochs.get(gang_number, "")


def gang_up(gang_number: GangId, gang: GangClient, *, generation: int) -> GangUp:
    """Return the event that tells the scheduler of a gang."""
    return GangUp(
        gang=gang_number,
        generation=generation,
        may_prefill=gang.role != "decode",
        may_decode=gang.role != "prefill",
        tp=gang.tp,
        instances=tuple(
            InstanceUp(location=location, kv_slots=slots, window_slots=window_slots)
            for location, slots, window_slots in zip(
                gang.locations, gang.capacities, gang.window_slots, strict=True
            )
        ),
        max_positions=min(description.max_positions for description in gang.descriptions),
        kv_bytes_per_token=max(description.kv_bytes_per_token for description in gang.descriptions),
        window=gang.window,
    )
