"""Token positions of one request, in equal steps.

How rows and heads are cut, by the ranks as by whoever predicts what they will send.

Which of a sequence's tokens lie, or are computed, on which instance.

Spans have a step, so that contiguous, zigzag, striped and round-robin layouts are a few spans each,
whatever their length. Who computes rows, who holds what they see and who keeps what they add are
three placements (`PrefillChunk.rows`, `history`, `placement`), each in any layout.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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
        multiples = apart // common * pow(self.step // common, -1, modulus) % modulus
        step, first = self.step * modulus, self.start + multiples * self.step
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

    def partitioned_by(self, parts: Sequence[Span]) -> bool:
        """Whether the parts have each of its positions once, and no others."""
        return (
            sum(part.length for part in parts) == self.length
            and all(part.intersection(self) == part for part in parts)
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
            by_remainder = found.setdefault(it.step, {})
            by_remainder.setdefault(it.start % it.step, []).append((it.start, it.stop, number))
        self._steps = [(step, _StepSpans(by_remainder)) for step, by_remainder in found.items()]

    def near(self, span: Span) -> list[int]:
        """Numbers of the spans that may have positions in common with one, ascending: all that do,
        and perhaps others."""
        return sorted(
            [it for step, by_remainder in self._steps for it in by_remainder.near(span, step)]
        )


class _StepSpans:
    """Spans of one step, by remainder."""

    def __init__(self, by_remainder: dict[int, list[tuple[int, int, int]]]) -> None:
        self._by_remainder = {
            remainder: _RemainderSpans(spans) for remainder, spans in by_remainder.items()
        }
        self._start = min(it.starts[0] for it in self._by_remainder.values())
        self._stop = max(it.reached[-1] for it in self._by_remainder.values())

    def near(self, span: Span, step: int) -> Iterator[int]:
        if span.stop <= self._start or self._stop <= span.start:
            return
        if span.step % step == 0 or span.length == 1:
            spans_of_remainder = self._by_remainder.get(span.start % step)
            if spans_of_remainder is not None:
                yield from spans_of_remainder.near(span)
            return
        common = gcd(span.step, step)
        for remainder, spans_of_remainder in self._by_remainder.items():
            if (span.start - remainder) % common == 0:
                yield from spans_of_remainder.near(span)


class _RemainderSpans:
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


def even_share(total: int, parts: int, index: int) -> range:
    """Part `index` of `total` things cut into contiguous parts that differ by one at most."""
    return range(index * total // parts, (index + 1) * total // parts)


Layout = tuple[tuple[Span, ...], ...]
"""Of a chunk over the parts of a group: per part its spans, the chunk's first token at 0."""


@dataclass(frozen=True, kw_only=True)
class KvSlice:
    """The instance that holds (or is to hold) the KV of one span of a request."""

    instance: int
    span: Span
    source: int | None = None
    """The sequence that has computed it, and under whose rid it lies there; None: this one. What
    lies there already is read where it lies, neither computed again nor copied: whoever names it
    holds its slots from then on to its own end, whatever becomes of the origin."""


def contiguous(bounds: Sequence[int]) -> Layout:
    """Per part its spans: from each bound to the next one. Parts without tokens have none.

    Args:
        bounds: one more than there are parts, ascending.
    """
    assert all(a <= b for a, b in pairwise(bounds)), "bounds descend"
    return tuple(_spans(Span(a, b)) for a, b in pairwise(bounds))


def even(length: int, parts: int) -> Layout:
    """Per part its span: contiguous, as long as the others' give or take a token."""
    return contiguous([length * i // parts for i in range(parts + 1)])


def zigzag(length: int, parts: int) -> Layout:
    """Per part its spans: of 2·parts even chunks the i-th and the i-th from the end, so that under
    causal attention all parts have about as many pairs of tokens (Context Parallelism)."""
    cuts = [length * i // (2 * parts) for i in range(2 * parts + 1)]
    chunks = [Span(a, b) for a, b in pairwise(cuts)]
    return tuple(_spans(chunks[i], chunks[-1 - i]) for i in range(parts))


def zigzag_of(tokens: Sequence[int]) -> Layout:
    """Zigzag whose parts have so many tokens each: half of a part's from the beginning on, half
    from the end. Of equal parts it is `zigzag`, give or take a token; of others whoever has fewer
    tokens also has fewer pairs."""
    late = [count // 2 for count in tokens]
    early = [count - half for count, half in zip(tokens, late, strict=True)]
    cuts = list(accumulate([*early, *reversed(late)], initial=0))
    chunks = [Span(a, b) for a, b in pairwise(cuts)]
    return tuple(_spans(chunks[i], chunks[-1 - i]) for i in range(len(tokens)))


def striped(length: int, parts: int) -> Layout:
    """Per part its spans: every `parts`-th token (Striped Attention, LoongServe)."""
    return tuple(_spans(Span(i, max(i, length), parts)) for i in range(parts))


def striped_of(tokens: Sequence[int]) -> Layout:
    """Striped whose parts have so many tokens each: parts take turns, from the beginning on, until
    they have theirs. Of equal parts it is `striped`."""
    spans: list[list[Span]] = [[] for _ in tokens]
    start = reached = 0
    for count in sorted(set(tokens)):
        taking = [part for part, wanted in enumerate(tokens) if wanted >= count]
        stop = start + (count - reached) * len(taking)
        for index, part in enumerate(taking):
            spans[part].append(Span(start + index, max(start + index, stop), len(taking)))
        start, reached = stop, count
    return tuple(_spans(*span) for span in spans)


RING_LAYOUTS: Mapping[str, Callable[[Sequence[int]], Layout]] = {
    "zigzag": zigzag_of,
    "striped": striped_of,
}
"""Those that share causal attention evenly, from how many tokens each part has."""

LAYOUTS: Mapping[str, Callable[[int, int], Layout]] = {
    "contiguous": even,
    "zigzag": zigzag,
    "striped": striped,
}
"""By the names of the papers: from the length of a chunk and the number of parts."""


def round_robin(start: int, stop: int, instances: Sequence[int]) -> dict[int, Span]:
    """Which instance keeps which of the tokens decoded from `start` to `stop`: in turn, the first
    instance that at `start`."""
    step = len(instances)
    return {
        instance: Span(start + i, max(start + i, stop), step)
        for i, instance in enumerate(instances)
    }


def place(
    instances: Sequence[int], layout: Sequence[Sequence[Span]], *, start: int = 0
) -> tuple[KvSlice, ...]:
    """Tokens from `start` on, on instances, part by part of a layout of as many tokens."""
    return tuple(
        KvSlice(instance=instance, span=span.shifted(start))
        for instance, spans in zip(instances, layout, strict=True)
        for span in spans
    )


def rest_of(span: Span, others: Iterable[Span]) -> tuple[Span, ...]:
    """Positions that none of the others has."""
    rest = _spans(span)
    for other in others:
        rest = tuple(part for it in rest for part in it.without(other))
    return rest


def rests_of(spans: Iterable[Span], others: Sequence[Span]) -> Iterator[tuple[Span, ...]]:
    """Of each span, the positions that none of the others has."""
    index = SpanIndex(others)
    for span in spans:
        yield rest_of(span, [others[it] for it in index.near(span)])


def _spans(*spans: Span) -> tuple[Span, ...]:
    return tuple(span for span in spans if span.length)
