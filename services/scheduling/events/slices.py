"""Arithmetic on token counts, bounds and slices in any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter

from csps.protocols.core.placement import KvSlice, Span, rest_of, rests_of
from csps.services.scheduling.events.events import InstanceId


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


def tokens_on(slices: Iterable[KvSlice]) -> dict[InstanceId, int]:
    """Return the tokens of each instance, of whichever source."""
    tokens: dict[InstanceId, int] = {}
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


def _spans_of(slices: Iterable[KvSlice]) -> dict[tuple[InstanceId, int], list[Span]]:
    spans: dict[tuple[InstanceId, int], list[Span]] = {}
    for kv_slice in slices:
        spans.setdefault((kv_slice.instance, kv_slice.source), []).append(kv_slice.span)
    return spans
