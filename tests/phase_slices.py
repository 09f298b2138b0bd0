"""A rank's phases as slices, as a timeline of their spans draws them."""

from __future__ import annotations

from collections.abc import Iterable

from csps.actors.timeline import TRANSFERS, Event
from csps.services.telemetry.traces import slices
from csps.services.telemetry.traces.slices import Slice, process_trace


def rank_trace(events: Iterable[Event]) -> list[slices.Event]:
    """Of one process, from its first event on."""
    events = list(events)
    first_ns = min(it.start_ns for it in events)
    return process_trace(
        [
            Slice(
                it.name if it.name in TRANSFERS else "compute",
                it.name,
                it.start_ns - first_ns,
                it.end_ns - first_ns,
                {"layer": it.layer, "level": it.level, "micro": it.micro},
            )
            for it in events
        ],
        pid=700,
        name="rank 7",
    )
