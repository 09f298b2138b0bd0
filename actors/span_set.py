"""Spans of which no two may overlap."""

from __future__ import annotations

from bisect import bisect_right

from csps.protocols.messages import Span


class SpanSet:
    """Positions taken span by span, in any order; a span costs a binary search."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, span: Span) -> bool:
        """Take a span that is not empty; False, and nothing changes, if part of it is taken."""
        at = bisect_right(self._stops, span.start)  # the first span that ends behind its start
        if at < len(self._starts) and self._starts[at] < span.stop:
            return False
        self._starts.insert(at, span.start)
        self._stops.insert(at, span.stop)
        return True
