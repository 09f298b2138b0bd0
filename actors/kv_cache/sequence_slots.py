"""The slots of one sequence in a KV pool, and sets of slots.

`SlotMap` says where the tokens of a sequence lie. `KeptSpan` does so for the tokens that each KV
head keeps (`CsaPlan.decode_kept_only`).

Shape suffixes: t = tokens, h = KV heads, d = head dim, s = slots of a pool, n = kept (head, token)
pairs, head by head and each head's by position.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from csps.protocols.core.placement import Span


class SlotSet:
    """A set of slots as sorted, disjoint runs that do not touch each other."""

    def __init__(self, runs: Iterable[range] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.size = 0
        for run in runs:
            self.add(run)

    def __iter__(self) -> Iterator[range]:
        return map(range, self._starts, self._stops)

    def add(self, run: range) -> None:
        """Add the slots of a run."""
        # Runs that only touch `run` are joined with it, so `bisect` sides are the opposite of
        # those in `_overlapping`.
        first = bisect_left(self._stops, run.start)
        last = bisect_right(self._starts, run.stop)
        start, stop = run.start, run.stop
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._replace(first, last, [range(start, stop)])

    def remove(self, run: range) -> None:
        """Remove those slots of a run that are in the set."""
        first, last = self._overlapping(run)
        if first < last:
            left = range(self._starts[first], run.start)
            right = range(run.stop, self._stops[last - 1])
            self._replace(first, last, [side for side in (left, right) if side])

    def within(self, run: range) -> list[range]:
        """Return the part of the set that lies in `run`."""
        first, last = self._overlapping(run)
        return [
            range(max(run.start, self._starts[i]), min(run.stop, self._stops[i]))
            for i in range(first, last)
        ]

    def outside(self, run: range) -> list[range]:
        """Return the part of `run` that is not in the set."""
        inside = self.within(run)
        starts = (run.start, *(part.stop for part in inside))
        stops = (*(part.start for part in inside), run.stop)
        return [range(a, b) for a, b in zip(starts, stops, strict=True) if a < b]

    def fewest_runs(self, count: int, *, after: int | None) -> list[range]:
        """Return parts of the set with `count` slots altogether, ascending; the set has at least
        that many.

        A run that starts at slot `after` comes first if it is long enough. Then comes the tightest
        run that is: best fit leaves the long runs to long prompts. Then come the longest runs
        together.
        """
        neighbour = next((run for run in self if run.start == after), range(0))
        if len(neighbour) >= count:
            return [neighbour[:count]]
        longest_first = sorted(self, key=len, reverse=True)
        whole = 0
        while len(longest_first[whole]) < count:
            count -= len(longest_first[whole])
            whole += 1
        tightest = min((run for run in longest_first[whole:] if len(run) >= count), key=len)
        return sorted([*longest_first[:whole], tightest[:count]], key=lambda run: run.start)

    def _overlapping(self, run: range) -> tuple[int, int]:
        """Return the indices [first, last) of the runs that share a slot with `run`."""
        return bisect_right(self._stops, run.start), bisect_left(self._starts, run.stop)

    def _replace(self, first: int, last: int, runs: Sequence[range]) -> None:
        removed = sum(self._stops[first:last]) - sum(self._starts[first:last])
        self.size += sum(map(len, runs)) - removed
        self._starts[first:last] = [run.start for run in runs]
        self._stops[first:last] = [run.stop for run in runs]


@dataclass(frozen=True)
class KeptKv:
    """One layer's kept keys and values of some tokens and neighboring KV heads."""

    kept_ht: Tensor
    """Mask (bool) of the kept tokens."""
    k_nd: Tensor
    v_nd: Tensor

    @classmethod
    def of(cls, k_thd: Tensor, v_thd: Tensor, kept_ht: Tensor) -> KeptKv:
        """Pick the kept ones from the keys and values of all tokens."""
        return cls(kept_ht, k_thd.transpose(0, 1)[kept_ht], v_thd.transpose(0, 1)[kept_ht])


class KeptBlock(NamedTuple):
    """Slots that hold a kept token for each of some neighboring KV heads."""

    heads: slice
    slots: range


@dataclass(frozen=True, kw_only=True)
class KeptSpan:
    """Slots of the kept tokens of a span in one layer of a pool.

    Each head's i-th kept token lies in the span's i-th slot. Decoding needs no positions, so this
    reads like a shorter prompt, as slices. With tokens in their own slots, each iteration would
    have to gather them first: as much to read and to write as attention then reads once more.
    """

    span: Span
    heads: slice
    """Heads of the pool."""
    kept_ht: Tensor
    slots: tuple[range, ...]
    """Slots of all tokens of the span, by position."""

    @cached_property
    def blocks(self) -> tuple[KeptBlock, ...]:
        """Return all kept tokens as blocks."""
        return tuple(
            KeptBlock(heads, slots)
            for heads, count in self._equal_heads
            for slots in first_slots(self.slots, count)
        )

    def write(self, pool_shd: Tensor, x_nd: Tensor) -> None:
        """Write keys or values into their slots."""
        begin = 0
        for heads, count in self._equal_heads:
            end = begin + count * (heads.stop - heads.start)
            x_htd = x_nd[begin:end].view(-1 if count else 0, count, x_nd.shape[1])
            done = 0
            for slots in first_slots(self.slots, count):
                rows_htd = x_htd[:, done : done + len(slots)]
                pool_shd[slots.start : slots.stop, heads].copy_(rows_htd.transpose(0, 1))
                done += len(slots)
            begin = end

    @cached_property
    def _equal_heads(self) -> tuple[tuple[slice, int], ...]:
        """Return runs of heads that keep equally many tokens, with their number; mostly one run."""
        runs, head = [], self.heads.start
        for count, run in groupby(self.kept_ht.sum(dim=1).tolist()):
            stop = head + len(list(run))
            runs.append((slice(head, stop), count))
            head = stop
        return tuple(runs)


def first_slots(slots: Sequence[range], count: int) -> Iterator[range]:
    """Yield the first `count` slots as runs."""
    for run in slots:
        if count <= 0:
            return
        yield run[:count]
        count -= len(run)


SlotIndices = npt.NDArray[np.int64]
_LOOKUPS_CACHED = 16


class SlotRows(NamedTuple):
    """Slots, and the rows of a span that belong into them (one row for each position); as slices
    where they are evenly spaced."""

    slots: slice | SlotIndices
    rows: slice | SlotIndices

    @property
    def tokens(self) -> int:
        """Return the number of slots."""
        if isinstance(self.slots, slice):
            return len(range(self.slots.start, self.slots.stop, self.slots.step))
        return len(self.slots)


class SlotMap:
    """The slots of one sequence, by position.

    Args:
        positions: position of each slot of the pool.
    """

    def __init__(self, positions: SlotIndices) -> None:
        self._positions = positions
        self.runs: list[range] = []
        """Runs of slots by first position; inside a run positions ascend."""
        self._lookups: dict[Span, list[range]] = {}
        """Runs of slots of recently looked-up spans."""
        self._places: dict[Span, list[SlotRows]] = {}
        self.shared = SlotSet()
        """Slots with KV that other sequences have computed."""
        self.kept: dict[int, list[KeptSpan]] = {}
        """Spans with kept tokens only, by layer."""

    @property
    def end(self) -> int | None:
        """Return the slot after the last run, where the sequence would best grow."""
        return self.runs[-1].stop if self.runs else None

    def add(self, runs: Iterable[range]) -> None:
        """Add runs of slots."""
        self._replace([*self.runs, *runs])

    def remove(self, slots: SlotSet) -> None:
        """Remove slots."""
        for run in slots:
            self.shared.remove(run)
        self._replace([part for run in self.runs for part in slots.outside(run)])

    def locate(self, span: Span) -> list[range]:
        """Return the runs of slots of the positions in a span."""
        # Every layer asks for the same few spans.
        if span not in self._lookups:
            if len(self._lookups) >= _LOOKUPS_CACHED:
                self._lookups.clear()
            self._lookups[span] = [part for run in self.runs for part in self._inside(run, span)]
        return self._lookups[span]

    def places(self, span: Span) -> list[SlotRows]:
        """Return where the rows of a span belong, one run of slots at a time. If the members of a
        ring take positions in turns, a span has every N-th slot of a run."""
        if span not in self._places:
            if len(self._places) >= _LOOKUPS_CACHED:
                self._places.clear()
            hits = [hit for run in self.runs if len(hit := self._hits(run, span))]
            rows = [(self._positions[hit] - span.start) // span.step for hit in hits]
            self._places[span] = [
                SlotRows(_as_slice(slots), _as_slice(own))
                for slots, own in zip(hits, rows, strict=True)
            ]
        return self._places[span]

    def slots(self, span: Span) -> SlotIndices | None:
        """Return the slots of a span by position; None if some are missing."""
        slots, found = np.empty(span.length, dtype=np.int64), 0
        for run in self.locate(span):
            rows = (self._positions[run.start : run.stop] - span.start) // span.step
            slots[rows] = np.arange(run.start, run.stop)
            found += len(run)
        return slots if found == span.length else None

    def _inside(self, run: range, span: Span) -> list[range]:
        """Return the slots of a run whose positions lie in `span`: neighbors if the run has all
        positions between its first and its last one."""
        if span.step > 1:
            return runs_of(self._hits(run, span))
        between = self._between(run, span)
        return [between] if between else []

    def _hits(self, run: range, span: Span) -> SlotIndices:
        """Return the same slots as `_inside`, one by one."""
        between = self._between(run, span)
        slots = np.arange(between.start, between.stop)
        positions = self._positions[between.start : between.stop]
        hits: SlotIndices = slots[(positions - span.start) % span.step == 0]
        return hits

    def _between(self, run: range, span: Span) -> range:
        """Return the slots of a run, whose positions ascend, from a span's first position to its
        last."""
        positions = self._positions[run.start : run.stop]
        first, last = map(int, positions.searchsorted((span.start, span.stop)))
        return run[first:last]

    def _replace(self, runs: list[range]) -> None:
        """Order runs by first position, and join those whose slots and positions both continue."""
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


def slots_in(runs: Iterable[range]) -> SlotIndices:
    """Return the slots of runs, in their order."""
    parts = [np.arange(run.start, run.stop) for run in runs]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def runs_of(slots: SlotIndices) -> list[range]:
    """Return slots as runs of neighbors, in their order."""
    if not len(slots):
        return []
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    starts, stops = slots[[0, *cuts]], slots[[*(cuts - 1), -1]]
    return [range(a, b + 1) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]


def _as_slice(indices: SlotIndices) -> slice | SlotIndices:
    """Return ascending indices as a slice if they are evenly spaced."""
    first, last = int(indices[0]), int(indices[-1])
    step = int(indices[1]) - first if len(indices) > 1 else 1
    even = last - first == step * (len(indices) - 1) and (np.diff(indices) == step).all()
    return slice(first, last + 1, step) if even else indices


def positions_of(spans: Sequence[Span]) -> SlotIndices:
    """Return all positions of some spans, ascending."""
    parts = [np.arange(span.start, span.stop, span.step) for span in spans]
    # A stable sort takes almost no time for positions that are in order already.
    return np.sort(np.concatenate(parts), kind="stable")
