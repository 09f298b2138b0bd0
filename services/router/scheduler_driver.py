"""Drives the scheduler on an event loop: one batch of events, and so one decision, a turn.

The gangs that the scheduler knows, by the numbers that it knows them by.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from csps.protocols.gang.client import GangClient
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.events.commands import Command
from csps.services.scheduling.events.events import AnyEvent, GangId, GangUp, InstanceUp, Wake

_log = logging.getLogger(__name__)

Execute = Callable[[Sequence[Command]], None]


class Recorder(Protocol):
    """Keeps what a scheduler was told, so that it can be told again (`scheduling.log`)."""

    def record(self, now_ns: int, events: Sequence[AnyEvent]) -> None:
        """One batch."""
        ...


class SchedulerDriver:
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
        self._execute: Execute | None = None
        self._recorder, self._clock = recorder, clock
        self._events: list[AnyEvent] = []
        self._due: asyncio.Handle | None = None
        self._wake_timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.fault: Exception | None = None
        """What a turn has failed with: a mistake of ours, after which nothing is decided."""

    def start(self, execute: Execute) -> None:
        """Hand the scheduler's commands to `execute`, which may `post_event` again."""
        self._execute = execute

    def post_event(self, event: AnyEvent) -> None:
        """Something has happened."""
        self._events.append(event)
        if self._due is None and not self._closed:
            self._due = asyncio.get_running_loop().call_soon(self._round)

    def close(self) -> None:
        """Decide nothing more."""
        self._closed = True
        for handle in (self._due, self._wake_timer):
            if handle is not None:
                handle.cancel()

    def _round(self) -> None:
        self._due = None
        if self.fault is not None:
            return
        assert self._execute is not None, "told before it was started"
        events, self._events = self._events, []
        now_ns = self._clock()
        try:
            if self._recorder is not None:
                self._recorder.record(now_ns, events)
            outcome = self._scheduler.handle(events, now_ns)
            self._execute(outcome.commands)
        except Exception as exc:
            _log.exception("a scheduling turn failed")
            self.fault = exc
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
    """Numbers every incarnation of a gang anew."""

    def __init__(self) -> None:
        self._by_number: dict[GangId, GangClient] = {}
        self._numbers = itertools.count(1)
        self._epochs: dict[GangId, str] = {}

    def add(self, gang: GangClient) -> GangId:
        """A gang was attached."""
        gang_number = next(self._numbers)
        self._by_number[gang_number] = gang
        return gang_number

    def remove(self, gang: GangClient) -> GangId | None:
        """A gang is gone; None if it was never added."""
        gang_number = self.number_of(gang)
        if gang_number is not None:
            del self._by_number[gang_number]
            self._epochs.pop(gang_number, None)
        return gang_number

    def get(self, gang_number: GangId) -> GangClient | None:
        """The gang, as long as it lives."""
        return self._by_number.get(gang_number)

    def number_of(self, gang: GangClient) -> GangId | None:
        """The number of a gang that is attached."""
        return next((it for it, known in self._by_number.items() if known is gang), None)

    @property
    def prefill_locations(self) -> tuple[str, ...]:
        """Rack-Server-GPU ids of the instances that compute prompts; none while there are none."""
        found = (gang.locations for gang in self._by_number.values() if gang.role != "decode")
        return next(found, ())

    def linked(self, decode: GangClient, epoch: str) -> None:
        """KV comes to a decode gang under this epoch from now on."""
        gang_number = self.number_of(decode)
        assert gang_number is not None, "linked, but not attached"
        self._epochs[gang_number] = epoch

    def epoch_of(self, decode: GangClient) -> str:
        """Of the KV that comes to a decode gang; empty while none can come."""
        gang_number = self.number_of(decode)
        return "" if gang_number is None else self._epochs.get(gang_number, "")


def gang_up(gang_number: GangId, gang: GangClient, *, generation: int) -> GangUp:
    """What the scheduler is told of a gang."""
    return GangUp(
        gang=gang_number,
        generation=generation,
        may_prefill=gang.role != "decode",
        may_decode=gang.role != "prefill",
        tp=gang.tp,
        instances=tuple(
            InstanceUp(location=location, kv_slots=slots)
            for location, slots in zip(gang.locations, gang.capacities, strict=True)
        ),
        max_positions=min(description.max_positions for description in gang.descriptions),
        kv_bytes_per_token=max(description.kv_bytes_per_token for description in gang.descriptions),
    )
