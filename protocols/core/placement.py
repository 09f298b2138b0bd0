"""Placement: which token positions of a sequence lie, or are computed, on which instance.

A `Span` has a stride, so that contiguous, zigzag, striped and round-robin layouts are a few spans
each, whatever their length. A chunk has three placements: who computes its rows
(`PrefillChunk.rows`), who holds the KV they attend to (`history`), and who stores the new KV
(`placement`). Ranks, the scheduler, the simulator and the configurator divide positions and heads
by the same functions.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd
from operator import attrgetter

import msgspec


@dataclass(frozen=True)
class Span:
    """Token positions of one sequence: start, start + step, … below stop.

    Equal sets of positions are equal spans: `stop` follows the last position, a span of one
    position has step 1, an empty one is (0, 0).
    """

    start: int
    stop: int
    step: int = 1

    def __post_init__(self) -> None:
        if self.step == 1 and 0 <= self.start < self.stop:  # the usual case
            return
        if not 0 <= self.start <= self.stop or self.step < 1:
            raise ValueError(
                f"span [{self.start}, {self.stop}) with step {self.step} is not a range of "
                "positions; allowed: 0 <= start <= stop, step >= 1"
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
        """All positions, ascending."""
        return range(self.start, self.stop, self.step)

    def intersection(self, other: Span) -> Span:
        """Return the positions that are in both spans.

        They solve two congruences, start + i·step = other.start + j·other.step. By the Chinese
        remainder theorem these leave one residue modulo the steps' least common multiple, or none.
        """
        if self.start >= other.stop or other.start >= self.stop:
            return Span(0, 0)
        if self.step == other.step == 1:
            return Span(max(self.start, other.start), min(self.stop, other.stop))
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
        """Return the positions that are not in the other span, as few spans."""
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
        """Return True if the parts have each position of this span once, and no others."""
        return (
            sum(part.length for part in parts) == self.length
            and all(part.intersection(self) == part for part in parts)
            and disjoint(parts)
        )

    def shifted(self, tokens: int) -> Span:
        """Return the span `tokens` further on."""
        return Span(self.start + tokens, self.stop + tokens, self.step) if self.length else self

    def part(self, rows: slice) -> Span:
        """Return some of the positions, selected by their indices in the span."""
        chosen = self.positions[rows]
        return Span(chosen.start, chosen.stop, chosen.step)

    def rows_of(self, part: Span) -> slice:
        """Return the indices that the positions of a part have in this span."""
        if not part.length:
            return slice(0, 0)
        first, step = (part.start - self.start) // self.step, max(1, part.step // self.step)
        return slice(first, first + (part.length - 1) * step + 1, step)


def near_ring(window: int, prompt_tokens: int, stop: int) -> Span:
    """Return the first positions that take slots in layers with a window, at the master of a
    sequence that decodes; later ones take the same slots again, in turns.

    Args:
        window: positions that a row sees, its own included.
        prompt_tokens: positions before the first that is decoded.
        stop: end of the positions that ever have KV.
    """
    first = max(0, prompt_tokens - window + 1)
    return Span(first, min(first + window, max(prompt_tokens, stop)))


class SpanIndex:
    """Index of many spans that finds those which may intersect a given span.

    A placement over a large group has hundreds of spans, each of which meets few others; comparing
    all pairs takes tens of milliseconds. Spans with the same step and remainder are sorted, so the
    ones that a span meets are neighbors.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        found: dict[int, dict[int, list[tuple[int, int, int]]]] = {}
        for index, span in enumerate(spans):
            by_remainder = found.setdefault(span.step, {})
            remainder = span.start % span.step
            by_remainder.setdefault(remainder, []).append((span.start, span.stop, index))
        self._steps = [(step, _StepSpans(by_remainder)) for step, by_remainder in found.items()]

    def near(self, span: Span) -> list[int]:
        """Return the indices of spans that may intersect one, ascending: all that do, perhaps
        others."""
        return sorted([index for step, spans in self._steps for index in spans.near(span, step)])


class _StepSpans:
    """Spans of one step, by remainder."""

    def __init__(self, by_remainder: dict[int, list[tuple[int, int, int]]]) -> None:
        self._by_remainder = {
            remainder: _RemainderSpans(spans) for remainder, spans in by_remainder.items()
        }
        self._start = min(same.starts[0] for same in self._by_remainder.values())
        self._stop = max(same.reached[-1] for same in self._by_remainder.values())

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
    """Spans of one step and one remainder, as (start, stop, index)."""

    def __init__(self, spans: list[tuple[int, int, int]]) -> None:
        spans.sort()
        self.starts = [start for start, _, _ in spans]
        self.reached = list(accumulate([stop for _, stop, _ in spans], max))
        """Largest stop among the spans up to each one."""
        self._indices = [index for _, _, index in spans]

    def near(self, span: Span) -> list[int]:
        first = bisect_right(self.reached, span.start)
        return self._indices[first : bisect_left(self.starts, span.stop)]


def disjoint(spans: Sequence[Span]) -> bool:
    """Return True if no two of the spans have a position in common."""
    index = SpanIndex(spans)
    return not any(
        other < number and spans[other].intersection(span).length
        for number, span in enumerate(spans)
        for other in index.near(span)
    )


def even_share(total: int, parts: int, index: int) -> range:
    """Return part `index` of `total` things cut into contiguous parts that differ by one at
    most."""
    return range(index * total // parts, (index + 1) * total // parts)


Layout = tuple[tuple[Span, ...], ...]
"""Spans of each part of a group, for a chunk whose first token is at 0."""


# A round of the scheduler makes thousands of slices: a struct is made in a tenth of the time that a
# frozen dataclass with a span takes, and the span is made where it is needed.
class KvSlice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Positions start, start + step, … below stop of a sequence, on an instance.

    The scheduler numbers instances over all gangs. In messages they are indices in the gang.
    """

    instance: int
    start: int
    stop: int
    step: int = 1
    source: int = 0
    """Sequence that computed the KV and whose slots hold it; 0 means this sequence.

    KV of a source is read where it lies, neither computed again nor copied. Whoever names it
    references its slots until its own end, even if the source ends earlier.
    """

    @classmethod
    def of(cls, instance: int, span: Span, source: int = 0) -> KvSlice:
        """Make the slice of a span's positions."""
        return cls(instance, span.start, span.stop, span.step, source)

    def cut(self, span: Span) -> KvSlice:
        """Return the slice of some of the positions."""
        return KvSlice(self.instance, span.start, span.stop, span.step, self.source)

    @property
    def span(self) -> Span:
        """Positions of the slice."""
        return Span(self.start, self.stop, self.step)

    @property
    def tokens(self) -> int:
        """Number of positions."""
        return -(-(self.stop - self.start) // self.step)


def contiguous(bounds: Sequence[int]) -> Layout:
    """Return the spans of each part: from each bound to the next one, none for an empty part.

    Args:
        bounds: one more than there are parts, ascending.
    """
    assert all(a <= b for a, b in pairwise(bounds)), f"bounds must ascend: {list(bounds)}"
    return tuple(_spans(Span(a, b)) for a, b in pairwise(bounds))


def even(length: int, parts: int) -> Layout:
    """Return one contiguous span for each part, equally long give or take a token."""
    return contiguous([length * i // parts for i in range(parts + 1)])


def zigzag(length: int, parts: int) -> Layout:
    """Return chunks i and 2·parts - 1 - i, of 2·parts even chunks, for each part i.

    Under causal attention all parts then have about as many pairs of tokens (Context Parallelism).
    """
    cuts = [length * i // (2 * parts) for i in range(2 * parts + 1)]
    chunks = [Span(a, b) for a, b in pairwise(cuts)]
    return tuple(_spans(chunks[i], chunks[-1 - i]) for i in range(parts))


def zigzag_of(tokens: Sequence[int]) -> Layout:
    """Return a zigzag layout whose parts have the given numbers of tokens.

    Half of a part's tokens come from the beginning, half from the end. Equal parts give `zigzag`,
    give or take a token; of unequal parts, those with fewer tokens also have fewer pairs.
    """
    late = [count // 2 for count in tokens]
    early = [count - half for count, half in zip(tokens, late, strict=True)]
    cuts = list(accumulate([*early, *reversed(late)], initial=0))
    chunks = [Span(a, b) for a, b in pairwise(cuts)]
    return tuple(_spans(chunks[i], chunks[-1 - i]) for i in range(len(tokens)))


def striped(length: int, parts: int) -> Layout:
    """Return every `parts`-th token for each part (Striped Attention, LoongServe)."""
    return tuple(_spans(Span(i, max(i, length), parts)) for i in range(parts))


def striped_of(tokens: Sequence[int]) -> Layout:
    """Return a striped layout whose parts have the given numbers of tokens.

    Parts alternate from the beginning on, until each has its tokens. Equal parts give `striped`.
    """
    spans: list[list[Span]] = [[] for _ in tokens]
    start = reached = 0
    for count in sorted(set(tokens)):
        taking = [part for part, needed in enumerate(tokens) if needed >= count]
        stop = start + (count - reached) * len(taking)
        for index, part in enumerate(taking):
            spans[part].append(Span(start + index, max(start + index, stop), len(taking)))
        start, reached = stop, count
    return tuple(_spans(*span) for span in spans)


RING_LAYOUTS: Mapping[str, Callable[[Sequence[int]], Layout]] = {
    "zigzag": zigzag_of,
    "striped": striped_of,
}
"""Layouts that divide causal attention evenly: functions of the number of tokens of each part."""

LAYOUTS: Mapping[str, Callable[[int, int], Layout]] = {
    "contiguous": even,
    "zigzag": zigzag,
    "striped": striped,
}
"""Layouts by the papers' names: functions of a chunk's length and the number of parts."""


def round_robin(start: int, stop: int, instances: Sequence[int]) -> dict[int, Span]:
    """Return the instances that store tokens decoded from `start` to `stop`, beginning with the
    first."""
    step = len(instances)
    return {
        instance: Span(start + i, max(start + i, stop), step)
        for i, instance in enumerate(instances)
    }


def place(
    instances: Sequence[int], layout: Sequence[Sequence[Span]], *, start: int = 0
) -> tuple[KvSlice, ...]:
    """Place tokens from `start` on by a layout: part i on instance i."""
    return tuple(
        KvSlice.of(instance, span.shifted(start))
        for instance, spans in zip(instances, layout, strict=True)
        for span in spans
    )


def rest_of(span: Span, others: Iterable[Span]) -> tuple[Span, ...]:
    """Return the positions that none of the other spans has."""
    rest = _spans(span)
    for other in others:
        rest = tuple(part for span in rest for part in span.without(other))
    return rest


def rests_of(spans: Iterable[Span], others: Sequence[Span]) -> Iterator[tuple[Span, ...]]:
    """Yield, for each span, the positions that none of the others has."""
    index = SpanIndex(others)
    for span in spans:
        yield rest_of(span, [others[near] for near in index.near(span)])


def _spans(*spans: Span) -> tuple[Span, ...]:
    return tuple(span for span in spans if span.length)


def level_sizes(total: int, limits: Sequence[int]) -> list[int] | None:
    """Cut `total` into sizes as equal as `limits` allow; return None if their sum is less.

    Water-filling: the holders with the least room are filled first, the others level what is left.

    >>> level_sizes(10, [9, 9, 2])
    [4, 4, 2]
    """
    if sum(limits) < total:
        return None
    sizes = [0] * len(limits)
    left = total
    ascending = sorted(range(len(limits)), key=limits.__getitem__)
    for holders_left, index in zip(range(len(limits), 0, -1), ascending, strict=True):
        sizes[index] = min(limits[index], -(-left // holders_left))
        left -= sizes[index]
    return sizes


def bounds_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return where contiguous sizes begin and end: 0, s0, s0 + s1, ..., the total."""
    return (0, *accumulate(sizes))


def tokens_on(slices: Iterable[KvSlice]) -> dict[int, int]:
    """Return the tokens of each instance, of whichever source."""
    tokens: dict[int, int] = {}
    for kv_slice in slices:
        tokens[kv_slice.instance] = tokens.get(kv_slice.instance, 0) + kv_slice.tokens
    return tokens


def own(slices: Iterable[KvSlice]) -> Iterator[KvSlice]:
    """Yield the slices that need slots: those of other sequences have theirs."""
    return (kv_slice for kv_slice in slices if not kv_slice.source)


def shifted(slices: Iterable[KvSlice], tokens: int) -> tuple[KvSlice, ...]:
    """Return the slices so many tokens further on."""
    return tuple(kv_slice.cut(kv_slice.span.shifted(tokens)) for kv_slice in slices)


def within(slices: Iterable[KvSlice], span: Span) -> tuple[KvSlice, ...]:
    """Return the slices' positions that lie in the span."""
    cuts = (kv_slice.cut(kv_slice.span.intersection(span)) for kv_slice in slices)
    return tuple(cut for cut in cuts if cut.tokens)


def joined(slices: Iterable[KvSlice]) -> tuple[KvSlice, ...]:
    """Return the slices, with those that continue one another as one."""
    found: list[KvSlice] = []
    last: dict[tuple[int, int], int] = {}
    """Index of the last slice of each instance and source."""
    for kv_slice in slices:
        of = kv_slice.instance, kv_slice.source
        before = found[last[of]] if of in last else None
        if (
            before is not None
            and before.step == kv_slice.step
            and before.stop - 1 + before.step == kv_slice.start
        ):
            found[last[of]] = before.cut(Span(before.start, kv_slice.stop, before.step))
        else:
            last[of] = len(found)
            found.append(kv_slice)
    return tuple(found)


def outside(slices: Iterable[KvSlice], others: Iterable[KvSlice]) -> tuple[KvSlice, ...]:
    """Return the slices' positions that none of the others has, on whichever instance."""
    slices = list(slices)
    rests = rests_of((kv_slice.span for kv_slice in slices), [other.span for other in others])
    return tuple(
        kv_slice.cut(rest) for kv_slice, left in zip(slices, rests, strict=True) for rest in left
    )


def covers_once(span: Span, slices: Iterable[KvSlice]) -> bool:
    """Return whether the slices have each position of a span once, and no others."""
    if span.step == 1:
        return placed_once(span.start, span.stop, tuple(slices))
    return span.partitioned_by([kv_slice.span for kv_slice in slices])


def placed_once(start: int, stop: int, slices: Sequence[KvSlice]) -> bool:
    """Return whether the slices have each position in [start, stop) once, and no others."""
    position = start
    # Mostly one follows upon another, and a span takes microseconds to make.
    for kv_slice in sorted(slices, key=attrgetter("start")):
        if not (kv_slice.start == position < kv_slice.stop and kv_slice.step == 1):
            return Span(start, stop).partitioned_by([kv_slice.span for kv_slice in slices])
        position = kv_slice.stop
    return position == stop


def same_placement(some: Iterable[KvSlice], others: Iterable[KvSlice]) -> bool:
    """Return whether both place the same positions of the same sources on the same instances,
    perhaps in other spans."""
    first, other = _spans_of(some), _spans_of(others)
    return first.keys() == other.keys() and all(
        sum(span.length for span in spans) == sum(other_span.length for other_span in other[place])
        and not any(rest_of(span, other[place]) for span in spans)
        for place, spans in first.items()
    )


def _spans_of(slices: Iterable[KvSlice]) -> dict[tuple[int, int], list[Span]]:
    spans: dict[tuple[int, int], list[Span]] = {}
    for kv_slice in slices:
        spans.setdefault((kv_slice.instance, kv_slice.source), []).append(kv_slice.span)
    return spans
