"""Cutting a number of tokens into shares."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def level_shares(total: int, limits: Sequence[int]) -> list[int] | None:
    """Cut `total` into shares as equal as `limits` allow; None if they do not allow it at all.

    Water-filling: the holders with the least room are filled first, the others level what is left.

    >>> level_shares(10, [9, 9, 2])
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
    """Where contiguous shares begin and end: 0, s0, s0 + s1, ..., the total."""
    return (0, *accumulate(shares))


def shares_of(bounds: Sequence[int]) -> tuple[int, ...]:
    """The inverse of `bounds_of`."""
    return tuple(stop - start for start, stop in pairwise(bounds))


def without(bounds: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """The bounds after tokens [start, stop) were taken out of the sequence that they cut."""
    return tuple(bound - max(0, min(bound, stop) - start) for bound in bounds)
