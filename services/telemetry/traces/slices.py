"""Spans of time as Chrome's trace format has them, which Perfetto reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

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
class Place:
    """Where a slice is drawn."""

    pid: int
    tid: int


def process_trace(
    slices: Iterable[Slice], *, pid: int, name: str, places: dict[str, Place] | None = None
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
        if places is not None:
            places[it.id] = Place(pid, tid)
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
    number: int, begin: Place, begin_ns: int, end: Place, end_ns: int, *, name: str
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
