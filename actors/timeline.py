"""What one rank did when: the phases of a prefill, which become spans of its trace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

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
    "kv transfer",
    "wait",
]
"""What a span of time went to. All-to-alls, rings, all-gathers and reduce-scatters are transfers,
which go on beside the others, and so are moves: of history (`balancing`) and of new KV (`placing`)
to where they are kept, and of KV to the gang that decodes it (`kv transfer`). `wait` is the time in
which computing stood still for one."""

TRANSFERS: frozenset[str] = frozenset(
    {
        "first all-to-all",
        "second all-to-all",
        "importance exchange",
        "history exchange",
        "ring",
        "balancing",
        "placing",
        "kv transfer",
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
