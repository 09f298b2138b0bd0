"""What one rank did when: the phases of a prefill, for a timeline that opens in Perfetto."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Literal

Phase = Literal[
    "qkv",
    "select",
    "first all-to-all",
    "attention",
    "second all-to-all",
    "merge",
    "importance",
    "linear",
    "mlp",
    "last rows",
    "all-gather",
    "reduce-scatter",
    "importance exchange",
    "history exchange",
    "ring",
    "balancing",
    "placing",
    "wait",
]
"""What a span of time went to. All-to-alls, rings, all-gathers and reduce-scatters are transfers,
which go on beside the others, and so are moves: of history (`balancing`) and of new KV (`placing`)
to where they are kept. `wait` is the time in which computing stood still for one."""

TRANSFERS: frozenset[str] = frozenset(
    {
        "first all-to-all",
        "second all-to-all",
        "importance exchange",
        "history exchange",
        "ring",
        "balancing",
        "placing",
        "all-gather",
        "reduce-scatter",
    }
)


@dataclass(frozen=True, slots=True)
class Event:
    """One phase on one rank."""

    name: Phase
    start_ns: int
    """Unix time, so that timelines of several ranks can be laid side by side."""
    end_ns: int
    layer: int | None = None
    level: int | None = None
    """1 is the nearest."""
    micro: int | None = None
    """Micro-partition, from 0."""
    cpu_ns: int = 0
    """Of it on a core, the computing thread alone; 0 for transfers, which have none. With more
    ranks than cores the rest was waiting for one."""
    bytes: int = 0
    """Of a transfer, sent by this rank."""


class Timeline:
    """Collects events of one job; `Timeline(on=False)` collects nothing at the cost of one call."""

    def __init__(self, *, on: bool) -> None:
        self.on = on
        self.events: list[Event] = []

    def phase(
        self,
        name: Phase,
        *,
        layer: int | None = None,
        level: int | None = None,
        micro: int | None = None,
    ) -> AbstractContextManager[None]:
        """The time inside becomes an event."""
        return self._timed(name, layer, level, micro) if self.on else _NOTHING

    def add(self, event: Event) -> None:
        """Note what was timed elsewhere; called from any thread."""
        if self.on:
            self.events.append(event)

    @contextmanager
    def _timed(
        self, name: Phase, layer: int | None, level: int | None, micro: int | None
    ) -> Iterator[None]:
        start_ns, start_cpu_ns = time.time_ns(), time.thread_time_ns()
        try:
            yield
        finally:
            end_ns, cpu_ns = time.time_ns(), time.thread_time_ns() - start_cpu_ns
            self.events.append(Event(name, start_ns, end_ns, layer, level, micro, cpu_ns))


_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class Slice:
    """A span of time as Perfetto draws it."""

    row: str
    name: str
    start_ns: int
    end_ns: int
    arguments: Mapping[str, Any]


def chrome_trace(events: Iterable[Event], *, rank: int) -> list[dict[str, Any]]:
    """Complete events in Chrome's trace format, microseconds; lists of several ranks concatenate
    to the `traceEvents` of one file. A rank is a process with a row for computing and rows for
    each kind of transfer."""
    slices = [
        Slice(
            event.name if event.name in TRANSFERS else "compute",
            event.name,
            event.start_ns,
            event.end_ns,
            _arguments(event),
        )
        for event in events
    ]
    return process_trace(slices, pid=rank, name=f"rank {rank}")


def _arguments(event: Event) -> dict[str, Any]:
    places: dict[str, Any] = {"layer": event.layer, "level": event.level, "micro": event.micro}
    return places | {"bytes": event.bytes} if event.name in TRANSFERS else places


def process_trace(slices: Iterable[Slice], *, pid: int, name: str) -> list[dict[str, Any]]:
    """Slices of one process in Chrome's trace format, from the first to the last."""
    rows: dict[str, int] = {}
    trace: list[dict[str, Any]] = [_named("process_name", pid, 0, name)]
    for it, row in _without_crossings(slices):
        start_us, end_us = it.start_ns / 1000, it.end_ns / 1000
        trace.append(
            {
                "ph": "X",
                "name": it.name,
                "pid": pid,
                "tid": rows.setdefault(row, len(rows)),
                "ts": start_us,
                # Of what is written: a quarter of a microsecond is all that Unix time leaves.
                "dur": end_us - start_us,
                "args": it.arguments,
            }
        )
    return trace + [_named("thread_name", pid, tid, row) for row, tid in rows.items()]


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


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
