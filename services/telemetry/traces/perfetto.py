"""Spans of time as Chrome's trace format has them, which Perfetto reads.

A trace as a timeline for Perfetto: all processes on one time axis, with arrows between them.

A rank is a process with a row for its jobs, one for computing and rows for each kind of transfer;
router and configurator are processes with a row each. Arrows lead from what was under way in a
process to what it began in another, and from a rank's prefill to where its KV has landed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

from csps.actors.engine.step_trace import BYTES, LAYER, LEVEL, MICRO, PHASE
from csps.actors.timing.timeline import TRANSFERS
from csps.services.telemetry.traces.spans import RecordedSpan, Trace

Event = dict[str, Any]
TICK_NS = 125
"""Times are written in eighths of a microsecond: Perfetto multiplies what it reads by 1000, in
floating point, and whole nanoseconds come out of these. It drops slices that cross, be it by one.
"""


@dataclass(frozen=True, slots=True)
class Slice:
    """A span of time as Perfetto draws it."""

    row: str
    name: str
    start_ns: int
    """From a moment near the trace's first: Unix time has too many digits."""
    end_ns: int
    arguments: Mapping[str, Any]
    id: str = ""
    """By which arrows find it."""


@dataclass(frozen=True, slots=True)
class Track:
    """Where a slice is drawn."""

    pid: int
    tid: int


def process_trace(
    slices: Iterable[Slice], *, pid: int, name: str, tracks: dict[str, Track] | None = None
) -> list[Event]:
    """Slices of one process, microseconds, from the first to the last.

    Args:
        pid: more than the process has rows: Perfetto takes row 0, and the one that is numbered like
            its process, for one and the same.
        places: is given where each slice with an id was drawn.
    """
    rows: dict[str, int] = {}
    trace: list[Event] = [_named("process_name", pid, 0, name)]
    for it, row in _without_crossings(slices):
        start_us, end_us = microseconds(it.start_ns), microseconds(it.end_ns)
        tid = rows.setdefault(row, 1 + len(rows))
        if tracks is not None:
            tracks[it.id] = Track(pid, tid)
        trace.append(
            {
                "ph": "X",
                "name": it.name,
                "pid": pid,
                "tid": tid,
                "ts": start_us,
                "dur": end_us - start_us,
                "args": it.arguments,
            }
        )
    return trace + [_named("thread_name", pid, tid, row) for row, tid in rows.items()]


def flow(
    number: int, begin: Track, begin_ns: int, end: Track, end_ns: int, *, name: str
) -> list[Event]:
    """An arrow from the innermost slice that is open at one place to that at another."""
    common = {"cat": "flow", "name": name, "id": number}
    return [
        {**common, "ph": "s", "pid": begin.pid, "tid": begin.tid, "ts": microseconds(begin_ns)},
        {
            **common,
            "ph": "f",
            "bp": "e",
            "pid": end.pid,
            "tid": end.tid,
            "ts": microseconds(end_ns),
        },
    ]


def microseconds(ns: int) -> float:
    """As times are written."""
    return ns // TICK_NS / 8


def _without_crossings(slices: Iterable[Slice]) -> Iterator[tuple[Slice, str]]:
    """Each slice with the row that has room for it: its own, or "its own 2" and so on. On one row
    Perfetto draws slices one after the other or one inside another, and drops those that cross."""
    open_ends: dict[str, list[int]] = {}
    for it in sorted(slices, key=lambda it: (it.start_ns, -it.end_ns)):
        for row in chain([it.row], (f"{it.row} {lane}" for lane in count(2))):
            ends = open_ends.setdefault(row, [])
            while ends and ends[-1] <= it.start_ns:
                ends.pop()
            if not ends or it.end_ns <= ends[-1]:
                break
        ends.append(it.end_ns)
        yield it, row


def _named(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


LANDING, PREFILL = "kv.landing", "prefill.compute"
INSIDE_NS = 1000
"""So long before its end a slice is open for certain, by the microseconds of the format."""
_PID = 1000
"""The first process; the second one is twice that."""
_ORDER = ("csps-router", "csps-configurator", "csps-prefill", "csps-elastic", "csps-decode")
Process = tuple[str, int]
"""Service, and rank or -1."""


def trace_events(trace: Trace) -> list[Event]:
    """In Chrome's trace format, from the beginning of the first span on."""
    first_ns = trace.spans[0].start_ns
    spans = [
        replace(it, start_ns=it.start_ns - first_ns, end_ns=it.end_ns - first_ns)
        for it in trace.spans
    ]
    processes: dict[Process, list[RecordedSpan]] = defaultdict(list)
    for span in spans:
        processes[_process(span)].append(span)
    tracks: dict[str, Track] = {}
    events: list[Event] = []
    for number, process in enumerate(sorted(processes, key=_order), 1):
        slices = [_slice(span) for span in processes[process]]
        events += process_trace(slices, pid=_PID * number, name=_name(process), tracks=tracks)
    return events + list(_arrows(spans, tracks))


def _process(span: RecordedSpan) -> Process:
    return span.service, -1 if span.rank is None else span.rank


def _order(process: Process) -> tuple[int, str, int]:
    service, rank = process
    return _ORDER.index(service) if service in _ORDER else len(_ORDER), service, rank


def _name(process: Process) -> str:
    service, rank = process
    name = service.removeprefix("csps-")
    return name if rank < 0 else f"{name} rank {rank}"


def _slice(span: RecordedSpan) -> Slice:
    """Phases in rows of their kinds, all else in the row of the process."""
    if not span.is_phase:
        row = "spans" if span.rank is None else "jobs"
        return Slice(row, span.name, span.start_ns, span.end_ns, span.attributes, span.span_id)
    phase = span.attributes[PHASE]
    where = {"layer": LAYER, "level": LEVEL, "micro": MICRO}
    if phase in TRANSFERS:
        where["bytes"] = BYTES
    arguments = {name: span.attributes.get(key) for name, key in where.items()}
    row = phase if phase in TRANSFERS else "compute"
    return Slice(row, phase, span.start_ns, span.end_ns, arguments, span.span_id)


def _arrows(spans: Sequence[RecordedSpan], tracks: dict[str, Track]) -> Iterator[Event]:
    numbers = count(1)
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        parent = by_id.get(span.parent_id or "")
        if parent is not None and _process(parent) != _process(span):
            begin, end = tracks[parent.span_id], tracks[span.span_id]
            at = span.start_ns
            yield from flow(next(numbers), begin, at, end, at, name=span.name)
    jobs = [span for span in spans if span.name == PREFILL]
    for landing in (span for span in spans if span.name == LANDING):
        for job in jobs:
            # Inside of both; clocks of two machines may differ, and no arrow leads back in time.
            landed_ns = landing.end_ns - INSIDE_NS
            at = min(job.end_ns - INSIDE_NS, landed_ns)
            begin, end = tracks[job.span_id], tracks[landing.span_id]
            yield from flow(next(numbers), begin, at, end, landed_ns, name="KV")
