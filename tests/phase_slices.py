"""A rank's phases as slices, as a timeline of their spans draws them."""

from __future__ import annotations

from collections.abc import Iterable

from csps.actors.timeline import TRANSFERS, Event
from csps.services.telemetry.traces import slices
from csps.services.telemetry.traces.slices import Slice, process_trace


def rank_trace(events: Iterable[Event]) -> list[slices.Event]:
    """Of one process."""
    return process_trace(
        [
            Slice(
                it.name if it.name in TRANSFERS else "compute",
                it.name,
                it.start_ns,
                it.end_ns,
                {"layer": it.layer, "level": it.level, "micro": it.micro},
            )
            for it in events
        ],
        pid=7,
        name="rank 7",
    )
