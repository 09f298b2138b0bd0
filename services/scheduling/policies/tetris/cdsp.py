"""The planner of chunkwise dynamic sequence parallelism: Algs. 1-3 of Tetris §5.1, corrected.

A prompt is cut into chunks. A group of its own size computes each chunk and contains the previous
groups, so a long prompt begins on free instances while others are still busy.

A plan takes about 50 µs, because lower bounds prune most branches of Alg. 1. Pruning never changes
the result. All arithmetic is in plain floats, one operation at a time, so that the result is the
same on every machine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import sqrt
from typing import Protocol

import msgspec

from csps.services.scheduling.policies.tetris.groups import (
    AnyHome,
    GroupChoice,
    PooledGroup,
    are_even,
    lanes_of,
)

_SLACK_NS = 1.0
"""Margin by which a bound must exceed the best plan, so that rounding decides nothing."""
_NEVER = float("inf")


class Coefficients(Protocol):
    """Coefficients of Eq. 1 for groups of one size: a + b L + c C L + d L^2 (`StepCost`)."""

    @property
    def in_ns(self) -> tuple[float, float, float, float]:
        """Coefficients (a, b, c, d) in nanoseconds."""
        ...


class CdspChunk(msgspec.Struct, frozen=True, gc=False):
    """Positions [start, start + length) of a prompt, and the group that computes them."""

    start: int
    length: int
    members: tuple[int, ...]
    """Indices of the instances that compute it, ascending."""
    begin_ns: int
    """Predicted start from now: all members are free, and the previous chunk is computed."""
    end_ns: int
    """Predicted end from now."""


_Link = tuple[GroupChoice, int, int, "_Link | None"]
"""A chunk and its successors: group, index of the size to which it grows, tokens, rest.
A plain tuple, because most links are discarded."""


def group_sizes(instances: int) -> list[int]:
    """Return the sizes of groups: powers of two, with fewest fragments (§7.1), and the gang."""
    return sorted({1 << exponent for exponent in range(instances.bit_length())} | {instances})


class Cdsp:
    """Planner of chunks for the instances of a gang.

    Args:
        servers: number of instances on each server. Instances are numbered from 0, server by
            server.
        costs: coefficients by group size; these sizes are the candidates.
        min_chunk: tokens of the shortest chunk of a prompt that is cut.
        chunked: False for one chunk per prompt (Alg. 2).
    """

    def __init__(
        self,
        servers: Sequence[int],
        costs: Mapping[int, Coefficients],
        *,
        min_chunk: int = 1,
        chunked: bool = True,
    ) -> None:
        assert min_chunk >= 1, f"min_chunk must be at least 1, not {min_chunk}"
        self._servers, self.sizes = tuple(servers), sorted(costs)
        assert self.sizes[-1] <= sum(servers), (
            f"a group of {self.sizes[-1]} instances on a gang of {sum(servers)}"
        )
        self.instances = sum(servers)
        self._costs = [costs[size].in_ns for size in self.sizes]
        self._bounds = _Bounds(self._costs)
        self._even = are_even(servers, self.sizes)
        self._min_chunk, self._chunked = min_chunk, chunked

    def plan(
        self,
        length: int,
        free_ns: Sequence[int],
        rate: float,
        *,
        least: int = 1,
        past: int = 0,
        holders: Sequence[int] = (),
    ) -> list[CdspChunk]:
        """Plan chunks for `length` tokens.

        Args:
            free_ns: time at which each instance is free; 0 is now.
            rate: share of the time to the first token that a larger group must save, in [0, 1).
            least: size of the smallest group.
            past: tokens that are computed already.
            holders: indices of the instances that hold the KV of these tokens.
        """
        low = bisect_left(self.sizes, max(least, len(holders)))
        assert low < len(self.sizes), (
            f"no group size for {least} instances and {len(holders)} holders among {self.sizes}"
        )
        choice: GroupChoice
        if self._even and not holders:
            choice = AnyHome(lanes_of(self._servers, free_ns), self.sizes)
        else:
            choice = PooledGroup.of(self._servers, self.sizes, free_ns, holders)
        min_chunk = self._min_chunk if self._chunked else length + 1
        search = _Search(self._costs, self._bounds, rate, min_chunk)
        _, chunks = search.schedule(length, past, choice, 0.0, low, len(self.sizes), _NEVER)
        return self._timed(chunks, past)

    def _timed(self, link: _Link | None, start: int) -> list[CdspChunk]:
        """Return the chunks of a chain of links with their predicted times."""
        # Eq. 2 subtracts time from the queues of a copied state. Absolute times need no copy.
        chunks, end = [], 0.0
        while link is not None:
            choice, index, length, link = link
            a, b, c, d = self._costs[index]
            begin = max(end, float(choice.free_ns[index]))
            end = begin + a + length * (b + c * start + d * length)
            chunks.append(CdspChunk(start, length, choice.members(index), int(begin), int(end)))
            start += length
        return chunks


class _Bounds:
    """Lower bounds on the time of any chunks on groups up to a size."""

    def __init__(self, costs: Sequence[tuple[float, float, float, float]]) -> None:
        b = accumulate([cost[1] for cost in costs], min)
        c = accumulate([cost[2] for cost in costs], min)
        # Splitting a chunk saves nothing of b and c. Of d it saves at most the charge of c for the
        # pairs of tokens that are in different chunks then.
        d = accumulate([min(cost[3], cost[2] / 2) for cost in costs], min)
        self.work = list(zip(b, c, d, strict=True))
        """Least b, c and d over all sizes up to each: earlier chunks may have smaller groups."""
        self.constant = [
            list(accumulate([cost[0] for cost in costs[low:]], min)) for low in range(len(costs))
        ]
        """Least a over the sizes from index `low` to `low + n`, at `constant[low][n]`."""


class _Search:
    """The search for one prompt (Alg. 1)."""

    __slots__ = ("_bounds", "_costs", "_gain", "_min_chunk")

    def __init__(
        self,
        costs: list[tuple[float, float, float, float]],
        bounds: _Bounds,
        rate: float,
        min_chunk: int,
    ) -> None:
        self._costs, self._bounds = costs, bounds
        self._gain, self._min_chunk = 1.0 - rate, min_chunk

    def schedule(
        self,
        left: int,
        past: int,
        choice: GroupChoice,
        end: float,
        low: int,
        high: int,
        limit: float,
    ) -> tuple[float, _Link]:
        """Return the end of the best chunks for the rest of a prompt, and the chunks (Alg. 1).

        Args:
            choice: group of the previous chunks, which end at `end`.
            low: index of the first size that may be used.
            high: index after the last size that may be used.
            limit: end before which a plan is useful; the result may be wrong otherwise.
        """
        best, top = self._single(left, past, choice.free_ns, end, low, high)
        chunks: _Link = (choice, top, left, None)
        if best < limit:
            limit = best
        latest = choice.free_ns[top]
        if top == low or self._hopeless(left, past, end, low, top, latest, limit):
            return best, chunks
        choice = choice.inside(top)
        free_ns, costs = choice.free_ns, self._costs
        for current in range(low, top):
            free = free_ns[current]
            begin = free if free > end else end
            # The budget of any chunk ends at the time at which the last usable instance is free. It
            # must pay for the constant part of the chunk.
            if latest - begin > costs[current][0]:
                better = self._begin_on(current, left, past, choice, begin, top, limit)
                if better is not None:
                    best, chunks = better
                    limit = best
        return best, chunks

    def _single(
        self, left: int, past: int, free_ns: Sequence[int], end: float, low: int, high: int
    ) -> tuple[float, int]:
        """Return the end of a single chunk, and the index of its size (Alg. 2)."""
        # Times count from the end of the previous chunk, not as absolute times as in the paper: the
        # rate would otherwise ask for more and more as the clock advances.
        gain, best, top, index = self._gain, _NEVER, low, low
        for a, b, c, d in self._costs[low:high]:
            took = a + left * (b + c * past + d * left)
            if (free := free_ns[index]) > end:
                took += free - end
            if took < best * gain:
                best, top = took, index
            index += 1
        return end + best, top

    def _hopeless(
        self, left: int, past: int, end: float, low: int, top: int, latest: int, limit: float
    ) -> bool:
        """Return True if no two chunks end before the limit."""
        constant = self._bounds.constant[low]
        b, c, d = self._bounds.work[top]
        least = constant[top - 1 - low] + left * (b + c * past + d * left)
        if latest - end + _SLACK_NS >= least:
            return False
        return end + least + constant[top - low] - _SLACK_NS >= limit

    def _begin_on(
        self,
        current: int,
        left: int,
        past: int,
        choice: GroupChoice,
        begin: float,
        top: int,
        limit: float,
    ) -> tuple[float, _Link] | None:
        """Return the best plan whose next chunk has the size `current`, or None (Alg. 3).

        All sizes are tried for the chunk after it. The plan must end before the limit.
        """
        a, b, c, d = self._costs[current]
        linear, least = b + c * past, self._min_chunk
        best: tuple[float, _Link] | None = None
        b_least, c_least, d_least = self._bounds.work[top]
        grown = choice.taken(current)
        free_ns = grown.free_ns
        shortest = begin + a + least * (linear + d * least)
        for following in range(current + 1, top + 1):
            budget_end = free_ns[following]
            if budget_end < shortest:
                continue
            length = _longest(budget_end - begin - a, linear, d, left)
            # The paper leaves open what a remainder shorter than the least chunk is: cut the chunk
            # shorter for it, and make none that is itself too short.
            if length < left and left - length < least:
                length = left - least
            if length < least:
                continue
            rest, seen = left - length, past + length
            chunk_end = begin + a + length * (linear + d * length)
            if not rest:
                if chunk_end < limit:
                    limit = chunk_end
                    best = chunk_end, (choice, current, length, None)
                continue
            constant = self._bounds.constant[following][top - following]
            work = rest * (b_least + c_least * seen + d_least * rest)
            if chunk_end + constant + work - _SLACK_NS >= limit:
                continue
            after = self.schedule(rest, seen, grown, chunk_end, following, top + 1, limit)
            if after[0] < limit:
                limit = after[0]
                best = limit, (choice, current, length, after[1])
        return best


def _longest(room: float, linear: float, d: float, at_most: int) -> int:
    """Return the positive root of linear L + d L^2 = room, floored (Alg. 3)."""
    if room <= 0.0:
        return 0
    slope = linear + sqrt(linear * linear + 4.0 * d * room)
    length = int(2.0 * room / slope) if slope else at_most
    return length if length < at_most else at_most
