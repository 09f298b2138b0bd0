"""Where the tokens of one request lie in a pool's slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from csps.actors.kept_kv import KeptSpan
from csps.actors.slot_set import SlotSet
from csps.protocols.span import Span

Slots = npt.NDArray[np.int64]
_LOOKUPS_KEPT = 16


class Place(NamedTuple):
    """Slots, and which of the rows of a span, one for each of its positions, belong into them;
    as slices where they are evenly spaced."""

    slots: slice | Slots
    rows: slice | Slots

    @property
    def tokens(self) -> int:
        """How many."""
        if isinstance(self.slots, slice):
            return len(range(self.slots.start, self.slots.stop, self.slots.step))
        return len(self.slots)


class Holding:
    """The slots of one request, by position.

    Args:
        positions: by slot of the pool, the position of what lies there.
    """

    def __init__(self, positions: Slots) -> None:
        self._positions = positions
        self.runs: list[range] = []
        """Slot runs by first position; inside a run positions ascend."""
        self._lookups: dict[Span, list[range]] = {}
        """Slot runs of the spans that were asked for lately."""
        self._places: dict[Span, list[Place]] = {}
        self.shared = SlotSet()
        """Slots of what others have computed."""
        self.kept: dict[int, list[KeptSpan]] = {}
        """By layer, spans of which it has kept tokens only."""

    @property
    def end(self) -> int | None:
        """The slot behind the last run, where the request would best grow."""
        return self.runs[-1].stop if self.runs else None

    def add(self, runs: Iterable[range]) -> None:
        """It has these slots as well."""
        self._replace([*self.runs, *runs])

    def remove(self, slots: SlotSet) -> None:
        """It has these slots no more."""
        for run in slots:
            self.shared.remove(run)
        self._replace([part for run in self.runs for part in slots.outside(run)])

    def locate(self, span: Span) -> list[range]:
        """Slot runs of the positions in a span."""
        # Every layer asks for the same few spans.
        if span not in self._lookups:
            if len(self._lookups) >= _LOOKUPS_KEPT:
                self._lookups.clear()
            self._lookups[span] = [part for run in self.runs for part in self._inside(run, span)]
        return self._lookups[span]

    def places(self, span: Span) -> list[Place]:
        """Where the rows of a span belong, run of slots by run: of spans that members of a ring
        take in turns, each has every so many slots of one."""
        if span not in self._places:
            if len(self._places) >= _LOOKUPS_KEPT:
                self._places.clear()
            hits = [hit for run in self.runs if len(hit := self._hits(run, span))]
            rows = [(self._positions[hit] - span.start) // span.step for hit in hits]
            self._places[span] = [Place(*map(_as_slice, it)) for it in zip(hits, rows, strict=True)]
        return self._places[span]

    def slots(self, span: Span) -> Slots | None:
        """By position; None if it does not have all of them."""
        slots, found = np.empty(span.length, dtype=np.int64), 0
        for run in self.locate(span):
            rows = (self._positions[run.start : run.stop] - span.start) // span.step
            slots[rows] = np.arange(run.start, run.stop)
            found += len(run)
        return slots if found == span.length else None

    def _inside(self, run: range, span: Span) -> list[range]:
        """The slots of a run whose positions lie in `span`: neighbours if it has all positions
        between its first and its last one."""
        if span.step > 1:
            return runs_of(self._hits(run, span))
        between = self._between(run, span)
        return [between] if between else []

    def _hits(self, run: range, span: Span) -> Slots:
        """As `_inside`, one by one."""
        between = self._between(run, span)
        slots = np.arange(between.start, between.stop)
        held = self._positions[between.start : between.stop]
        hits: Slots = slots[(held - span.start) % span.step == 0]
        return hits

    def _between(self, run: range, span: Span) -> range:
        """The slots of a run, whose positions ascend, from a span's first position to its last."""
        held = self._positions[run.start : run.stop]
        first, last = map(int, held.searchsorted((span.start, span.stop)))
        return run[first:last]

    def _replace(self, runs: list[range]) -> None:
        """Orders runs by first position, and joins those whose slots and positions both go on."""
        position = self._positions
        self.runs = []
        self._lookups.clear()
        self._places.clear()
        for run in sorted(runs, key=lambda run: int(position[run.start])):
            last = self.runs[-1] if self.runs else range(0)
            if last and last.stop == run.start and position[last.stop - 1] < position[run.start]:
                self.runs[-1] = range(last.start, run.stop)
            else:
                self.runs.append(run)


def slots_in(runs: Iterable[range]) -> Slots:
    """Runs as slots, in their order."""
    parts = [np.arange(run.start, run.stop) for run in runs]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def runs_of(slots: Slots) -> list[range]:
    """Slots as runs of neighbours, in their order."""
    if not len(slots):
        return []
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    starts, stops = slots[[0, *cuts]], slots[[*(cuts - 1), -1]]
    return [range(a, b + 1) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]


def _as_slice(numbers: Slots) -> slice | Slots:
    """Ascending numbers, as a slice if they are evenly spaced."""
    first, last = int(numbers[0]), int(numbers[-1])
    step = int(numbers[1]) - first if len(numbers) > 1 else 1
    even = last - first == step * (len(numbers) - 1) and (np.diff(numbers) == step).all()
    return slice(first, last + 1, step) if even else numbers


def positions_of(spans: Sequence[Span]) -> Slots:
    """All positions of some spans, ascending."""
    parts = [np.arange(it.start, it.stop, it.step) for it in spans]
    # Stable, because that takes no time for what is in order already.
    return np.sort(np.concatenate(parts), kind="stable")
