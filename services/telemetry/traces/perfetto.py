"""Write a trace as a timeline for Perfetto, in Chrome's trace format.

All processes share one time axis. A rank is a process with a row for its jobs, one for computing
and one for each kind of transfer; router and configurator are processes with a row each. Arrows
lead from a process's open span to the span that it started in another process, and from a rank's
prefill to the place that received its KV.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

from csps.actors.timing.timeline import BYTES, LAYER, LEVEL, MICRO, PHASE, TRANSFERS
from csps.services.telemetry.traces.spans import RecordedSpan, Trace

Event = dict[str, Any]
TICK_NS = 125
"""Resolution of times, an eighth of a microsecond. Perfetto multiplies times by 1000 in floating
point, which yields whole nanoseconds for these. It drops slices that cross, be it by one."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A bar on Perfetto's timeline."""

    row: str
    name: str
    start_ns: int
    """Start relative to a time near the trace's first span: Unix time has too many digits."""
    end_ns: int
    arguments: Mapping[str, Any]
    id: str = ""
    """Key by which arrows find the slice."""


@dataclass(frozen=True, slots=True)
class Track:
    """Location of a slice: process and row."""

    pid: int
    tid: int


def process_trace(
    slices: Iterable[Slice], *, pid: int, name: str, tracks: dict[str, Track] | None = None
) -> list[Event]:
    """Write the slices of one process, in microseconds, from the first to the last.

    Args:
        pid: larger than the number of rows: Perfetto confuses row 0 with the row whose id equals
            that of its process.
        tracks: receives the location of each slice with an id.
    """
    rows: dict[str, int] = {}
    trace: list[Event] = [_named("process_name", pid, 0, name)]
    for bar, row in _without_crossings(slices):
        start_us, end_us = microseconds(bar.start_ns), microseconds(bar.end_ns)
        tid = rows.setdefault(row, 1 + len(rows))
        if tracks is not None:
            tracks[bar.id] = Track(pid, tid)
        trace.append(
            {
                "ph": "X",
                "name": bar.name,
                "pid": pid,
                "tid": tid,
                "ts": start_us,
                "dur": end_us - start_us,
                "args": bar.arguments,
            }
        )
    return trace + [_named("thread_name", pid, tid, row) for row, tid in rows.items()]


def flow(
    flow_id: int, begin: Track, begin_ns: int, end: Track, end_ns: int, *, name: str
) -> list[Event]:
    """Return an arrow from the innermost open slice of one track to that of another."""
    common = {"cat": "flow", "name": name, "id": flow_id}
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
    """Convert a time to the unit of the format."""
    return ns // TICK_NS / 8


def _without_crossings(slices: Iterable[Slice]) -> Iterator[tuple[Slice, str]]:
    """Yield each slice with a row that has room for it: its own, or "its own 2" and so on.

    On one row Perfetto draws slices one after the other or one inside another, and drops those that
    cross.
    """
    open_ends: dict[str, list[int]] = {}
    for bar in sorted(slices, key=lambda bar: (bar.start_ns, -bar.end_ns)):
        for row in chain([bar.row], (f"{bar.row} {lane}" for lane in count(2))):
            ends = open_ends.setdefault(row, [])
            while ends and ends[-1] <= bar.start_ns:
                ends.pop()
            if not ends or bar.end_ns <= ends[-1]:
                break
        ends.append(bar.end_ns)
        yield bar, row


def _named(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


RECEIVE, PREFILL = "kv.landing", "prefill.compute"
INSIDE_NS = 1000
"""Distance from its end at which a slice is open for certain, given the format's resolution."""
_PID = 1000
"""Id of the first process; the second one has twice that."""
_ORDER = ("csps-router", "csps-configurator", "csps-prefill", "csps-elastic", "csps-decode")
Process = tuple[str, int]
"""Type of a process: service, and rank or -1."""


def trace_events(trace: Trace) -> list[Event]:
    """Return the trace in Chrome's format, from the beginning of the first span."""
    first_ns = trace.spans[0].start_ns
    spans = [
        replace(span, start_ns=span.start_ns - first_ns, end_ns=span.end_ns - first_ns)
        for span in trace.spans
    ]
    processes: dict[Process, list[RecordedSpan]] = defaultdict(list)
    for span in spans:
        processes[_process(span)].append(span)
    tracks: dict[str, Track] = {}
    events: list[Event] = []
    for position, process in enumerate(sorted(processes, key=_order), 1):
        slices = [_slice(span) for span in processes[process]]
        events += process_trace(slices, pid=_PID * position, name=_name(process), tracks=tracks)
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
    """Return a phase in the row of its kind, any other span in the row of the process."""
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
    flow_ids = count(1)
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        parent = by_id.get(span.parent_id or "")
        # KV is expected before the prefill begins that it belongs to: no arrow leads back in time.
        inside = parent is not None and parent.start_ns <= span.start_ns <= parent.end_ns
        if parent is not None and inside and _process(parent) != _process(span):
            begin, end = tracks[parent.span_id], tracks[span.span_id]
            at = span.start_ns
            yield from flow(next(flow_ids), begin, at, end, at, name=span.name)
    jobs = [span for span in spans if span.name == PREFILL]
    for receiving in (span for span in spans if span.name == RECEIVE):
        for job in jobs:
            # Inside both slices. Clocks of two machines may differ; no arrow leads back in time.
            received_ns = receiving.end_ns - INSIDE_NS
            at = min(job.end_ns - INSIDE_NS, received_ns)
            begin, end = tracks[job.span_id], tracks[receiving.span_id]
            yield from flow(next(flow_ids), begin, at, end, received_ns, name="KV")
