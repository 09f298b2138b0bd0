"""Slots of a KV pool that have something in common: free ones, or those that a request shares."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence


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
        """Take the slots of a run into the set."""
        # Runs that only touch `run` are joined with it, therefore left and right here and the
        # other way round in `_overlapping`.
        first = bisect_left(self._stops, run.start)
        last = bisect_right(self._starts, run.stop)
        start, stop = run.start, run.stop
        if first < last:
            start = min(start, self._starts[first])
            stop = max(stop, self._stops[last - 1])
        self._replace(first, last, [range(start, stop)])

    def remove(self, run: range) -> None:
        """Leave out the slots of a run, those that are there."""
        first, last = self._overlapping(run)
        if first < last:
            left = range(self._starts[first], run.start)
            right = range(run.stop, self._stops[last - 1])
            self._replace(first, last, [side for side in (left, right) if side])

    def within(self, run: range) -> list[range]:
        """The part of the set that lies in `run`."""
        first, last = self._overlapping(run)
        return [
            range(max(run.start, self._starts[i]), min(run.stop, self._stops[i]))
            for i in range(first, last)
        ]

    def outside(self, run: range) -> list[range]:
        """The part of `run` that is not in the set."""
        inside = self.within(run)
        starts = (run.start, *(part.stop for part in inside))
        stops = (*(part.start for part in inside), run.stop)
        return [range(a, b) for a, b in zip(starts, stops, strict=True) if a < b]

    def fewest_runs(self, count: int, *, after: int | None) -> list[range]:
        """Parts of the set with `count` slots altogether, ascending; the set has that many.

        A run that starts at slot `after` comes first if it is long enough, then the tightest run
        that is (best fit leaves the long ones to long prompts), then the longest ones together.
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
        """Indices [first, last) of the runs that share a slot with `run`."""
        return bisect_right(self._stops, run.start), bisect_left(self._starts, run.stop)

    def _replace(self, first: int, last: int, runs: Sequence[range]) -> None:
        gone = sum(self._stops[first:last]) - sum(self._starts[first:last])
        self.size += sum(map(len, runs)) - gone
        self._starts[first:last] = [run.start for run in runs]
        self._stops[first:last] = [run.stop for run in runs]
