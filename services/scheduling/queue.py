"""The lines of requests without a place."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from csps.services.scheduling.state import Line, Request

_number = attrgetter("id")


class Queue:
    """Waiting requests by line, each in order of admission.

    A request that comes back after a fault stands where it stood: before all that came after it.
    Sorted lists, because nearly all arrive at the end and leave near the front, and moving the
    rest of ten thousand pointers costs two microseconds; a list that marks the dead would make
    every round skip them.
    """

    def __init__(self) -> None:
        self._lines: dict[Line, list[Request]] = {"urgent": [], "long": []}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __contains__(self, request: Request) -> bool:
        line = self._lines[request.line]
        at = bisect_left(line, request.id, key=_number)
        return at < len(line) and line[at] is request

    def line(self, line: Line) -> list[Request]:
        """The requests of a line; not to be changed, and not to be kept."""
        return self._lines[line]

    def everyone(self) -> Iterator[Request]:
        """All requests, line after line; the queue must not change meanwhile."""
        for line in self._lines.values():
            yield from line

    def push(self, request: Request) -> None:
        """Join the line that the request names."""
        line = self._lines[request.line]
        if not line or line[-1].id < request.id:
            line.append(request)
        else:
            line.insert(bisect_left(line, request.id, key=_number), request)

    def remove(self, request: Request) -> None:
        """Leave the line; who is not in it may leave as well."""
        line = self._lines[request.line]
        at = bisect_left(line, request.id, key=_number)
        if at < len(line) and line[at] is request:
            del line[at]
