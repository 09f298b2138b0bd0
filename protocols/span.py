"""Token positions of one request, in equal steps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd


@dataclass(frozen=True)
class Span:
    """Token positions of one request: start, start + step, … below stop.

    Of equal positions there is one span only: `stop` follows the last one, a span of one has step
    1, an empty one is (0, 0). So contiguous, zigzag, striped and round-robin layouts are a few
    spans each, whatever their length (`protocols.placement`).
    """

    start: int
    stop: int
    step: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop or self.step < 1:
            raise ValueError(
                f"span [{self.start}, {self.stop}) in steps of {self.step} is not a range of "
                "positions"
            )
        n = self.length
        if n < 2:
            object.__setattr__(self, "step", 1)
        if n == 0:
            object.__setattr__(self, "start", 0)
        object.__setattr__(self, "stop", self.start + (n - 1) * self.step + 1 if n else 0)

    @property
    def length(self) -> int:
        """Tokens in the span."""
        return -(-(self.stop - self.start) // self.step)

    @property
    def positions(self) -> range:
        """All of them, ascending."""
        return range(self.start, self.stop, self.step)

    def intersection(self, other: Span) -> Span:
        """Positions of both.

        They solve two congruences, start + i·step = other.start + j·other.step, which by the
        Chinese remainder theorem leaves one residue modulo the steps' least common multiple, or
        none.
        """
        common = gcd(self.step, other.step)
        apart = other.start - self.start
        if not self.length or not other.length or apart % common:
            return Span(0, 0)
        modulus = other.step // common
        turns = apart // common * pow(self.step // common, -1, modulus) % modulus
        step, first = self.step * modulus, self.start + turns * self.step
        # `first` is the least solution from `self.start` on; the other span may begin later.
        start = first + max(0, -(-(other.start - first) // step)) * step
        return Span(start, max(start, min(self.stop, other.stop)), step)

    def without(self, other: Span) -> tuple[Span, ...]:
        """Positions that the other one does not have, in as few spans as it takes."""
        cut = self.intersection(other)
        if not cut.length:
            return (self,) if self.length else ()
        behind = cut.stop - 1 + self.step
        rest = [
            Span(self.start, cut.start, self.step),
            *(
                Span(start, cut.stop, cut.step)
                for start in range(cut.start, cut.stop, self.step)[1 : cut.step // self.step]
            ),
            Span(behind, max(behind, self.stop), self.step),
        ]
        return tuple(span for span in rest if span.length)

    def parted_by(self, parts: Sequence[Span]) -> bool:
        """Whether the parts have each of its positions once, and no others."""
        return (
            sum(it.length for it in parts) == self.length
            and all(it.intersection(self) == it for it in parts)
            and disjoint(parts)
        )

    def shifted(self, tokens: int) -> Span:
        """The span `tokens` further on."""
        return Span(self.start + tokens, self.stop + tokens, self.step) if self.length else self

    def part(self, rows: slice) -> Span:
        """Some of the positions, by their numbers in the span."""
        chosen = self.positions[rows]
        return Span(chosen.start, chosen.stop, chosen.step)

    def rows_of(self, part: Span) -> slice:
        """The numbers that the positions of a part have in this span."""
        if not part.length:
            return slice(0, 0)
        first, step = (part.start - self.start) // self.step, max(1, part.step // self.step)
        return slice(first, first + (part.length - 1) * step + 1, step)


EVERYTHING: tuple[Span, ...] = (Span(0, 2**62),)
"""All positions that a sequence has."""


class SpanIndex:
    """Many spans, of which those are found that one may have positions in common with.

    A placement over a large group has hundreds of spans, of which each meets few others; comparing
    all with all takes tens of milliseconds. Spans of one step and one remainder lie on a *line*,
    on which those that a span meets are neighbours, or few.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        found: dict[int, dict[int, list[tuple[int, int, int]]]] = {}
        for number, it in enumerate(spans):
            lines = found.setdefault(it.step, {})
            lines.setdefault(it.start % it.step, []).append((it.start, it.stop, number))
        self._steps = [(step, _Lines(lines)) for step, lines in found.items()]

    def near(self, span: Span) -> list[int]:
        """Numbers of the spans that may have positions in common with one, ascending: all that do,
        and perhaps others."""
        return sorted([it for step, lines in self._steps for it in lines.near(span, step)])


class _Lines:
    """Spans of one step, by remainder."""

    def __init__(self, lines: dict[int, list[tuple[int, int, int]]]) -> None:
        self._lines = {remainder: _Line(spans) for remainder, spans in lines.items()}
        self._start = min(it.starts[0] for it in self._lines.values())
        self._stop = max(it.reached[-1] for it in self._lines.values())

    def near(self, span: Span, step: int) -> Iterator[int]:
        if span.stop <= self._start or self._stop <= span.start:
            return
        if span.step % step == 0 or span.length == 1:
            line = self._lines.get(span.start % step)
            if line is not None:
                yield from line.near(span)
            return
        common = gcd(span.step, step)
        for remainder, line in self._lines.items():
            if (span.start - remainder) % common == 0:
                yield from line.near(span)


class _Line:
    """Spans of one step and one remainder: (start, stop, number) of each."""

    def __init__(self, spans: list[tuple[int, int, int]]) -> None:
        spans.sort()
        self.starts = [start for start, _, _ in spans]
        self.reached = list(accumulate([stop for _, stop, _ in spans], max))
        """Where all spans up to each have ended."""
        self._numbers = [number for _, _, number in spans]

    def near(self, span: Span) -> list[int]:
        first = bisect_right(self.reached, span.start)
        return self._numbers[first : bisect_left(self.starts, span.stop)]


def disjoint(spans: Sequence[Span]) -> bool:
    """Whether no two of them have a position in common."""
    index = SpanIndex(spans)
    return not any(
        other < number and spans[other].intersection(it).length
        for number, it in enumerate(spans)
        for other in index.near(it)
    )
