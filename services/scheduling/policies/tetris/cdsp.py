"""Chunkwise dynamic sequence parallelism: Algs. 1-3 of Tetris §5.1, corrected.

A prompt is cut into chunks; each is computed by a group of its own size, which contains the groups
before it, so that a long prompt begins on instances that are free while those that it wants in the
end are still busy. Where the paper's text leaves it open or is wrong:

- Alg. 2 compares times from *now*, or from the end of the chunk before: on absolute times, a rate
  of improvement would ask for more and more as the clock goes on, until every group is one
  instance.
- Alg. 1 ends where a chunk takes all that is left, and recurses on no empty chunk. A chunk that is
  shorter than the least one, or whose budget does not pay for its constant part, is no chunk; one
  that would leave less than that for the last one is cut shorter.
- Eq. 2 subtracts time from the queues of a copied state. The same in absolute times needs no copy:
  instances have times at which they are free, and a chunk begins when its last instance is, but not
  before the chunk before it has ended.
- Alg. 3 solves a quadratic: its positive root, floored.

A plan costs some 50 µs because most of Alg. 1's branches are cut off by lower bounds, which never
changes the result: only a branch that could not be taken in the end is left out.

All in plain floats, one operation at a time, which gives the same result on every machine.
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
"""By which a bound has to exceed the best plan, so that no rounding decides."""
_NEVER = float("inf")


class Coefficients(Protocol):
    """Eq. 1 for groups of one size: a + b L + c C L + d L^2 (`latency.StepCost`)."""

    @property
    def in_ns(self) -> tuple[float, float, float, float]:
        """(a, b, c, d) in nanoseconds."""
        ...


class CdspChunk(msgspec.Struct, frozen=True, gc=False):
    """Positions [start, start + length) of a prompt."""

    start: int
    length: int
    members: tuple[int, ...]
    """Numbers of the instances that compute it, ascending."""
    begin_ns: int
    """From now, as predicted: all of them are free, and the chunk before is computed."""
    end_ns: int


_Link = tuple[GroupChoice, int, int, "_Link | None"]
"""A chunk and those after it: a choice and the index of the size to which it grows, tokens, rest.
Plain tuples, here and as answers: most of them are thrown away."""


def group_sizes(instances: int) -> list[int]:
    """Candidates for the sizes of groups: powers of two, which leave fewest fragments (§7.1), and
    all instances."""
    return sorted({1 << exponent for exponent in range(instances.bit_length())} | {instances})


class Cdsp:
    """Plans chunks for the instances of a gang.

    Args:
        servers: instances on each server. Instances are numbered from 0, server by server.
        costs: coefficients by group size; the sizes are the candidates.
        min_chunk: tokens of the shortest chunk of a prompt that is cut.
        chunked: whether prompts are cut at all; without it this is Alg. 2, one chunk a prompt.
    """

    def __init__(
        self,
        servers: Sequence[int],
        costs: Mapping[int, Coefficients],
        *,
        min_chunk: int = 1,
        chunked: bool = True,
    ) -> None:
        assert min_chunk >= 1, "an empty chunk"
        self._servers, self.sizes = tuple(servers), sorted(costs)
        assert self.sizes[-1] <= sum(servers), "a group of more instances than there are"
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
        held: Sequence[int] = (),
    ) -> list[CdspChunk]:
        """Chunks for `length` tokens.

        Args:
            free_ns: when each instance will be free, by number; 0 is now.
            rate: by which a larger group has to improve the time to the first token, in [0, 1).
            least: size of the smallest group.
            past: tokens that are computed already.
            held: instances that have computed them.
        """
        low = bisect_left(self.sizes, max(least, len(held)))
        assert low < len(self.sizes), "no candidate is large enough"
        choice: GroupChoice
        if self._even and not held:
            choice = AnyHome(lanes_of(self._servers, free_ns), self.sizes)
        else:
            choice = PooledGroup.of(self._servers, self.sizes, free_ns, held)
        min_chunk = self._min_chunk if self._chunked else length + 1
        search = _Search(self._costs, self._bounds, rate, min_chunk)
        _, chunks = search.schedule(length, past, choice, 0.0, low, len(self.sizes), _NEVER)
        return self._timed(chunks, past)

    def _timed(self, link: _Link | None, start: int) -> list[CdspChunk]:
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
    """What any chunks on groups up to a size take at least.

    Splitting a chunk saves nothing of b and c; of d it saves at most what c charges for the pairs
    of tokens that are in different chunks then.
    """

    def __init__(self, costs: Sequence[tuple[float, float, float, float]]) -> None:
        b = accumulate([cost[1] for cost in costs], min)
        c = accumulate([cost[2] for cost in costs], min)
        d = accumulate([min(cost[3], cost[2] / 2) for cost in costs], min)
        self.work = list(zip(b, c, d, strict=True))
        """Over all sizes up to each: earlier chunks may be on smaller groups."""
        self.constant = [
            list(accumulate([cost[0] for cost in costs[low:]], min)) for low in range(len(costs))
        ]
        """Over sizes from one to another, so many further on."""


class _Search:
    """Alg. 1 for one prompt."""

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
        """Alg. 1: the best chunks for what is left of a prompt, and when they end.

        Args:
            choice: beginning with the instances of the chunks before, which end at `end`.
            low: index of the first candidate that may be used, and `high` of the one after the
                last.
            limit: only what ends before is of use; anything else may be wrong.
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
            # The budget of any chunk ends when the last instance that may be used is free.
            if latest - begin > costs[current][0]:
                better = self._begin_on(current, left, past, choice, begin, top, limit)
                if better is not None:
                    best, chunks = better
                    limit = best
        return best, chunks

    def _single(
        self, left: int, past: int, free_ns: Sequence[int], end: float, low: int, high: int
    ) -> tuple[float, int]:
        """Alg. 2: the end of a single chunk, and the index of its size."""
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
        """Two chunks or more cannot end before the limit, and one cannot while others wait."""
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
        """The best plan whose next chunk is computed by a group of the size `current`, for any
        size to follow (Alg. 3), if it ends before the limit."""
        a, b, c, d = self._costs[current]
        linear, least = b + c * past, self._min_chunk
        found: tuple[float, _Link] | None = None
        b_least, c_least, d_least = self._bounds.work[top]
        grown = choice.taken(current)
        free_ns = grown.free_ns
        shortest = begin + a + least * (linear + d * least)
        for following in range(current + 1, top + 1):
            budget_end = free_ns[following]
            if budget_end < shortest:
                continue
            length = _longest(budget_end - begin - a, linear, d, left)
            if length < left and left - length < least:
                length = left - least
            if length < least:
                continue
            rest, seen = left - length, past + length
            chunk_end = begin + a + length * (linear + d * length)
            if not rest:
                if chunk_end < limit:
                    limit = chunk_end
                    found = chunk_end, (choice, current, length, None)
                continue
            constant = self._bounds.constant[following][top - following]
            work = rest * (b_least + c_least * seen + d_least * rest)
            if chunk_end + constant + work - _SLACK_NS >= limit:
                continue
            after = self.schedule(rest, seen, grown, chunk_end, following, top + 1, limit)
            if after[0] < limit:
                limit = after[0]
                found = limit, (choice, current, length, after[1])
        return found


def _longest(room: float, linear: float, d: float, at_most: int) -> int:
    """The positive root of linear L + d L^2 = room, floored (Alg. 3)."""
    if room <= 0.0:
        return 0
    slope = linear + sqrt(linear * linear + 4.0 * d * room)
    length = int(2.0 * room / slope) if slope else at_most
    return length if length < at_most else at_most
