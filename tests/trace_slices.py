"""Perfetto's slices on one row, one after the other or one inside another.

A rank's phases are drawn as slices by a timeline of their spans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations
from typing import Any

from csps.actors.timing.timeline import TRANSFERS, PhaseEvent
from csps.services.telemetry.traces import perfetto as slices
from csps.services.telemetry.traces.perfetto import Slice, process_trace

PerfettoEvent = dict[str, Any]


def by_row(trace: Iterable[PerfettoEvent]) -> dict[tuple[str, str], list[PerfettoEvent]]:
    """Return slices by the names of their process and row. Perfetto confuses row 0 with the row
    that is numbered like its process.
    """
    trace = list(trace)
    assert not [event for event in trace if event["ph"] in "XM" and event["tid"] == event["pid"]]
    assert not [event for event in trace if event["ph"] == "X" and event["tid"] == 0]
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in trace
        if event["ph"] == "M"
    }
    processes = {pid: name for (kind, pid, _), name in names.items() if kind == "process_name"}
    rows: dict[tuple[str, str], list[PerfettoEvent]] = defaultdict(list)
    for event in trace:
        if event["ph"] == "X":
            rows[processes[event["pid"]], names["thread_name", event["pid"], event["tid"]]].append(
                event
            )
    return dict(rows)


def crossings(trace: Iterable[PerfettoEvent]) -> list[tuple[PerfettoEvent, PerfettoEvent]]:
    """Return pairs on one row of which each has time that the other has not, and time in common."""
    return [
        (one, other)
        for slices in by_row(trace).values()
        for one, other in combinations(slices, 2)
        if _cross(*_span(one), *_span(other)) or _cross(*_span(other), *_span(one))
    ]


def _cross(begin: int, end: int, later_begin: int, later_end: int) -> bool:
    return begin < later_begin < end < later_end


def _span(event: PerfettoEvent) -> tuple[int, int]:
    """Return nanoseconds, as Perfetto reads microseconds: in floating point, one by one."""
    begin = int(event["ts"] * 1000.0)
    return begin, begin + int(event["dur"] * 1000.0)


def rank_trace(events: Iterable[PhaseEvent]) -> list[slices.Event]:
    """Return the trace of one process, from its first event on."""
    events = list(events)
    first_ns = min(event.start_ns for event in events)
    return process_trace(
        [
            Slice(
                event.name if event.name in TRANSFERS else "compute",
                event.name,
                event.start_ns - first_ns,
                event.end_ns - first_ns,
                {"layer": event.layer, "level": event.level, "micro": event.micro},
            )
            for event in events
        ],
        pid=700,
        name="rank 7",
    )
