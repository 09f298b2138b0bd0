"""Spans of which no two may overlap."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from csps.protocols.span import Span


class SpanSet:
    """Positions taken span by span, in any order; a span costs a binary search, and a look at each
    of those that have another step or another remainder."""

    def __init__(self) -> None:
        self._classes: dict[tuple[int, int], _Class] = defaultdict(_Class)
        """By step and remainder: spans of one class overlap if their ends do."""

    def add(self, span: Span) -> bool:
        """Take a span that is not empty; False, and nothing changes, if part of it is taken."""
        own = span.step, span.start % span.step
        for key, others in self._classes.items():
            if key != own and any(it.intersection(span).length for it in others.spans):
                return False
        return self._classes[own].add(span)


class _Class:
    def __init__(self) -> None:
        self._stops: list[int] = []
        self.spans: list[Span] = []

    def add(self, span: Span) -> bool:
        at = bisect_right(self._stops, span.start)  # the first span that ends behind its start
        if at < len(self.spans) and self.spans[at].start < span.stop:
            return False
        self._stops.insert(at, span.stop)
        self.spans.insert(at, span)
        return True
