"""Arithmetic on token counts, bounds and slices in any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter

from csps.protocols.core.placement import Layout, Span, rest_of, rests_of
from csps.services.scheduling.events.commands import PlacedSlice
from csps.services.scheduling.events.events import InstanceId


def level_sizes(total: int, limits: Sequence[int]) -> list[int] | None:
    """Cut `total` into sizes as equal as `limits` allow; return None if their sum is less.

    Water-filling: the holders with the least room are filled first, the others level what is left.

    >>> level_sizes(10, [9, 9, 2])
    [4, 4, 2]
    """
    if sum(limits) < total:
        return None
    shares = [0] * len(limits)
    left = total
    ascending = sorted(range(len(limits)), key=limits.__getitem__)
    for holders_left, index in zip(range(len(limits), 0, -1), ascending, strict=True):
        shares[index] = min(limits[index], -(-left // holders_left))
        left -= shares[index]
    return shares


def bounds_of(shares: Sequence[int]) -> tuple[int, ...]:
    """Return where contiguous sizes begin and end: 0, s0, s0 + s1, ..., the total."""
    return (0, *accumulate(shares))


# --- in any layout -----------------------------------------------------------------------------


def laid_out(
    group: Sequence[InstanceId], layout: Layout, start: int = 0
) -> tuple[PlacedSlice, ...]:
    """Place tokens from `start` on on the instances of a group, by a layout of
    `protocols.core.placement`."""
    return tuple(
        PlacedSlice.of(instance, span.shifted(start))
        for instance, spans in zip(group, layout, strict=True)
        for span in spans
    )


def tokens_on(shares: Iterable[PlacedSlice]) -> dict[InstanceId, int]:
    """Return the tokens of each instance, of whichever source."""
    tokens: dict[InstanceId, int] = {}
    for share in shares:
        tokens[share.instance] = tokens.get(share.instance, 0) + share.tokens
    return tokens


def own(shares: Iterable[PlacedSlice]) -> Iterator[PlacedSlice]:
    """Yield the slices that need slots: those of other sequences have theirs."""
    return (share for share in shares if not share.source)


def shifted(shares: Iterable[PlacedSlice], tokens: int) -> tuple[PlacedSlice, ...]:
    """Return the slices so many tokens further on."""
    return tuple(share.cut(share.span.shifted(tokens)) for share in shares)


def within(shares: Iterable[PlacedSlice], span: Span) -> tuple[PlacedSlice, ...]:
    """Return the slices' positions that lie in the span."""
    cuts = (share.cut(share.span.intersection(span)) for share in shares)
    return tuple(cut for cut in cuts if cut.tokens)


def outside(
    shares: Iterable[PlacedSlice], others: Iterable[PlacedSlice]
) -> tuple[PlacedSlice, ...]:
    """Return the slices' positions that none of the others has, on whichever instance."""
    shares = list(shares)
    rests = rests_of((share.span for share in shares), [other.span for other in others])
    return tuple(
        kv_slice.cut(rest) for kv_slice, left in zip(shares, rests, strict=True) for rest in left
    )


def covers_once(span: Span, shares: Iterable[PlacedSlice]) -> bool:
    """Return whether the slices have each position of a span once, and no others."""
    if span.step == 1:
        return placed_once(span.start, span.stop, tuple(shares))
    return span.partitioned_by([share.span for share in shares])


def placed_once(start: int, stop: int, shares: Sequence[PlacedSlice]) -> bool:
    """Return whether the slices have each position in [start, stop) once, and no others."""
    position = start
    # Mostly one follows upon another, and a span takes microseconds to make.
    for share in sorted(shares, key=attrgetter("start")):
        if not (share.start == position < share.stop and share.step == 1):
            return Span(start, stop).partitioned_by([share.span for share in shares])
        position = share.stop
    return position == stop


def same_placement(some: Iterable[PlacedSlice], others: Iterable[PlacedSlice]) -> bool:
    """Return whether both place the same positions of the same sources on the same instances,
    perhaps in other spans."""
    first, other = _spans_of(some), _spans_of(others)
    return first.keys() == other.keys() and all(
        sum(span.length for span in spans) == sum(other_span.length for other_span in other[place])
        and not any(rest_of(span, other[place]) for span in spans)
        for place, spans in first.items()
    )


def _spans_of(shares: Iterable[PlacedSlice]) -> dict[tuple[InstanceId, int], list[Span]]:
    spans: dict[tuple[InstanceId, int], list[Span]] = {}
    for share in shares:
        spans.setdefault((share.instance, share.source), []).append(share.span)
    return spans
