"""Groups of instances that compute the chunks of a prompt: GetGroup of Tetris §5.1.

A group grows from chunk to chunk and loses no member. Servers are the paper's nodes. Within a
server, the instance that is free first is taken first, so a group is a number of instances on each
server. Ties are broken by the order in which instances are free, then by index.

Planning uses the `GroupChoice` interface. `PooledGroup` implements it for any servers. `AnyHome`
and `Home` implement it about ten times faster if all servers have equally many instances and every
size is a part of a server or whole servers: a group then fills up the server on which it began, its
*home*, and continues with the servers that are wholly free first. So all groups of one home are
prefixes of one sequence of instances, and none is materialized before a plan is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, Self

INDEX_BITS = 20
INDEX_MASK = (1 << INDEX_BITS) - 1

Lane = list[int]
"""A server's instances, the first to be free first. Each key is the time and the index in one
integer, because a list of integers sorts five times as fast as one of tuples."""


class GroupChoice(Protocol):
    """A group, empty at first, and the larger ones that it may grow to, by index of their size."""

    @property
    def free_ns(self) -> Sequence[int]:
        """Times at which all instances of the group of each size are free."""
        ...

    def inside(self, top: int) -> GroupChoice:
        """Return the group, restricted to instances of the group of size `top`."""
        ...

    def taken(self, index: int) -> GroupChoice:
        """Return the group after it has grown to a size."""
        ...

    def members(self, index: int) -> tuple[int, ...]:
        """Return the instances of the group of a size, ascending."""
        ...


def lanes_of(servers: Sequence[int], free_ns: Sequence[int]) -> list[Lane]:
    """Return the instances by server, in the order in which they are free.

    Args:
        servers: number of instances of each; they are numbered server by server.
        free_ns: time at which each instance is free.
    """
    keys = [free << INDEX_BITS | instance for instance, free in enumerate(free_ns)]
    lanes, start = [], 0
    for count in servers:
        lanes.append(sorted(keys[start : start + count]))
        start += count
    return lanes


class Pool:
    """Instances that a group may take.

    Args:
        lanes: instances by server.
        server_of: server of each instance.
    """

    def __init__(self, lanes: Mapping[int, Lane], server_of: Sequence[int]) -> None:
        self.lanes, self.server_of = lanes, server_of

    def within(self, counts: Mapping[int, int]) -> Pool:
        """Return a pool of a group's instances only."""
        lanes = {server: self.lanes[server][:count] for server, count in counts.items()}
        return Pool(lanes, self.server_of)

    def grown(self, counts: Mapping[int, int], size: int) -> dict[int, int]:
        """Return the number of instances on each server after a group has grown to a size."""
        more = dict(counts)
        missing = size - sum(counts.values())
        if counts and missing:
            missing = self._fill(more, missing)
        if missing:
            self._add_servers(more, missing)
        return more

    def free_ns(self, counts: Mapping[int, int]) -> int:
        """Return the time at which all instances of a group are free."""
        # The holders come first in a lane, whenever they are free, so take the maximum.
        keys = [max(self.lanes[server][:count]) for server, count in counts.items()]
        return max(keys) >> INDEX_BITS

    def members(self, counts: Mapping[int, int]) -> tuple[int, ...]:
        """Return a group's instances, ascending."""
        keys = [key for server, count in counts.items() for key in self.lanes[server][:count]]
        return tuple(sorted([key & INDEX_MASK for key in keys]))

    def _fill(self, counts: dict[int, int], missing: int) -> int:
        """Take instances on the group's servers; return how many are still missing."""
        rest = sorted(
            [key for server, count in counts.items() for key in self.lanes[server][count:]]
        )
        for key in rest[:missing]:
            counts[self.server_of[key & INDEX_MASK]] += 1
        return max(0, missing - len(rest))

    def _add_servers(self, counts: dict[int, int], missing: int) -> None:
        """Take whole servers, the first to be wholly free first, and then a part of a server.

        The part is on the server whose missing number of instances is free first.
        """
        while missing:
            others = [lane for server, lane in self.lanes.items() if server not in counts]
            fitting = [lane[missing - 1] for lane in others if len(lane) >= missing]
            key = min(fitting or [lane[-1] for lane in others])
            server = self.server_of[key & INDEX_MASK]
            counts[server] = min(missing, len(self.lanes[server]))
            missing -= counts[server]


class PooledGroup:
    """A `GroupChoice` on any servers."""

    def __init__(self, pool: Pool, sizes: Sequence[int], counts: Mapping[int, int]) -> None:
        self._pool, self._sizes, self._counts = pool, sizes, counts
        size = sum(counts.values())
        self._grown = {
            index: pool.grown(counts, larger)
            for index, larger in enumerate(sizes)
            if larger >= max(size, 1)
        }
        self.free_ns = [
            pool.free_ns(self._grown[index]) if index in self._grown else 0
            for index in range(len(sizes))
        ]

    @classmethod
    def of(
        cls,
        servers: Sequence[int],
        sizes: Sequence[int],
        free_ns: Sequence[int],
        holders: Sequence[int],
    ) -> Self:
        """Return the group of the holders of earlier chunks, among all instances."""
        server_of = [server for server, count in enumerate(servers) for _ in range(count)]
        lanes = dict(enumerate(lanes_of(servers, free_ns)))
        counts: dict[int, int] = {}
        for instance in holders:
            server = server_of[instance]
            counts[server] = counts.get(server, 0) + 1
        first = set(holders)
        for server in counts:  # A group is the beginning of each lane.
            lanes[server].sort(key=lambda key: (key & INDEX_MASK not in first, key))
        return cls(Pool(lanes, server_of), sizes, counts)

    def inside(self, top: int) -> PooledGroup:
        """Return the group restricted to a larger one (`GroupChoice`)."""
        pool = self._pool.within(self._grown[top])
        return PooledGroup(pool, self._sizes[: top + 1], self._counts)

    def taken(self, index: int) -> PooledGroup:
        """Return the group after it has grown (`GroupChoice`)."""
        return PooledGroup(self._pool, self._sizes, self._grown[index])

    def members(self, index: int) -> tuple[int, ...]:
        """Return the instances of the group of a size (`GroupChoice`)."""
        return self._pool.members(self._grown[index])


def are_even(servers: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return True if `AnyHome` chooses the same groups as `PooledGroup`."""
    width = servers[0]
    even = all(server == width for server in servers)
    return even and all(size <= width or size % width == 0 for size in sizes)


class AnyHome:
    """A `GroupChoice` on even servers that begins without a group.

    Args:
        lanes: instances of each server.
        sizes: group sizes, ascending.
    """

    __slots__ = ("_by_last", "_homes", "_lanes", "_sizes", "_width", "free_ns")

    def __init__(self, lanes: list[Lane], sizes: Sequence[int]) -> None:
        self._lanes, self._sizes = lanes, sizes
        self._width = width = len(lanes[0])
        self._by_last = by_last = sorted([lane[-1] for lane in lanes])
        keys = [
            min([lane[size - 1] for lane in lanes]) if size <= width else by_last[size // width - 1]
            for size in sizes
        ]
        self.free_ns = [key >> INDEX_BITS for key in keys]
        self._homes: dict[int, Home] = {}

    def inside(self, top: int) -> AnyHome | Home:
        """Return the choice restricted to a larger group (`GroupChoice`)."""
        size, width = self._sizes[top], self._width
        if size <= width:
            return self.taken(top)
        last = self._by_last[size // width - 1]
        lanes = [lane for lane in self._lanes if lane[-1] <= last]
        return AnyHome(lanes, self._sizes[: top + 1])

    def taken(self, index: int) -> Home:
        """Return the group after it has grown (`GroupChoice`)."""
        size = self._sizes[index]
        if size <= self._width:
            lane = min(self._lanes, key=lambda lane: lane[size - 1])
        else:
            lane = min(self._lanes, key=lambda lane: lane[-1])
        home = self._homes.get(lane[0])
        if home is None:
            home = self._homes[lane[0]] = Home(lane, self._by_last, self._sizes)
        return home

    def members(self, index: int) -> tuple[int, ...]:
        """Return the instances of the group of a size (`GroupChoice`)."""
        return self.taken(index).members(index)


class Home:
    """A `GroupChoice` on even servers whose groups begin on one of them."""

    __slots__ = ("_by_last", "_lane", "_sizes", "free_ns")

    def __init__(self, lane: Lane, by_last: list[int], sizes: Sequence[int]) -> None:
        self._lane, self._by_last, self._sizes = lane, by_last, sizes
        width, place = len(lane), by_last.index(lane[-1])
        keys = [
            lane[size - 1] if size <= width else by_last[max(size // width - 1, place)]
            for size in sizes
        ]
        self.free_ns = [key >> INDEX_BITS for key in keys]

    def inside(self, top: int) -> Home:
        """Return the group itself: the groups of a home are prefixes of one another."""
        return self

    def taken(self, index: int) -> Home:
        """Return the group itself: the groups of a home are prefixes of one another."""
        return self

    def members(self, index: int) -> tuple[int, ...]:
        """Return the instances of the group of a size (`GroupChoice`)."""
        lane, size = self._lane, self._sizes[index]
        width = len(lane)
        if size <= width:
            return tuple(sorted([key & INDEX_MASK for key in lane[:size]]))
        others = [last for last in self._by_last if last != lane[-1]]
        lasts = [lane[-1], *others[: size // width - 1]]
        starts = sorted([(last & INDEX_MASK) // width * width for last in lasts])
        return tuple([instance for start in starts for instance in range(start, start + width)])
