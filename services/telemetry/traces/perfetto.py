"""A trace as a timeline for Perfetto: all processes on one time axis, with arrows between them.

A rank is a process with a row for its jobs, one for computing and rows for each kind of transfer;
router and configurator are processes with a row each. Arrows lead from what was under way in a
process to what it began in another, and from a rank's prefill to where its KV has landed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count

from csps.actors.timeline import TRANSFERS
from csps.actors.timeline_export import BYTES, LAYER, LEVEL, MICRO, PHASE
from csps.services.telemetry.traces.slices import Event, Place, Slice, flow, process_trace
from csps.services.telemetry.traces.spans import Span, Trace

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
    processes: dict[Process, list[Span]] = defaultdict(list)
    for span in spans:
        processes[_process(span)].append(span)
    places: dict[str, Place] = {}
    events: list[Event] = []
    for number, process in enumerate(sorted(processes, key=_order), 1):
        slices = [_slice(span) for span in processes[process]]
        events += process_trace(slices, pid=_PID * number, name=_name(process), places=places)
    return events + list(_arrows(spans, places))


def _process(span: Span) -> Process:
    return span.service, -1 if span.rank is None else span.rank


def _order(process: Process) -> tuple[int, str, int]:
    service, rank = process
    return _ORDER.index(service) if service in _ORDER else len(_ORDER), service, rank


def _name(process: Process) -> str:
    service, rank = process
    name = service.removeprefix("csps-")
    return name if rank < 0 else f"{name} rank {rank}"


def _slice(span: Span) -> Slice:
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


def _arrows(spans: Sequence[Span], places: dict[str, Place]) -> Iterator[Event]:
    numbers = count(1)
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        parent = by_id.get(span.parent_id or "")
        if parent is not None and _process(parent) != _process(span):
            begin, end = places[parent.span_id], places[span.span_id]
            at = span.start_ns
            yield from flow(next(numbers), begin, at, end, at, name=span.name)
    jobs = [span for span in spans if span.name == PREFILL]
    for landing in (span for span in spans if span.name == LANDING):
        for job in jobs:
            # Inside of both; clocks of two machines may differ, and no arrow leads back in time.
            landed_ns = landing.end_ns - INSIDE_NS
            at = min(job.end_ns - INSIDE_NS, landed_ns)
            begin, end = places[job.span_id], places[landing.span_id]
            yield from flow(next(numbers), begin, at, end, landed_ns, name="KV")
