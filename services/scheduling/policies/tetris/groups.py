"""Which instances compute a chunk: GetGroup of Tetris §5.1.

A group grows from chunk to chunk and loses nobody. Servers are what the paper calls nodes. Within a
server, whoever is free first is taken first, so a group is a number of instances on each server.
Ties are broken by the order in which instances are free, then by their numbers.

Planning asks a group only when those that it may grow to are free, by the index of their size:
that is a `GroupChoice`. `Pool` and `PooledGroup` answer it for any servers, `even_servers.py` sooner where all
servers have as many instances.

GetGroup where all servers have as many instances: what it chooses is known without trying.

If every size is a part of a server or whole servers, a group that grows fills up the server that
it began on, its *home*, and then takes the servers that are wholly free first. So all groups that
begin at one home are the beginnings of one line of instances, and no group has to be written down
before a plan is chosen. Equal to `groups.Group`, by test, and some ten times as fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, Self

NUMBER_BITS = 20
NUMBER = (1 << NUMBER_BITS) - 1

Lane = list[int]
"""A server's instances, the first to be free first: each is its time and its number in one integer,
because a list of integers is sorted five times as fast as one of tuples."""


class GroupChoice(Protocol):
    """A group, or none yet, and those that it may grow to."""

    @property
    def free_ns(self) -> Sequence[int]:
        """When all instances of the group of each size are free."""
        ...

    def inside(self, top: int) -> GroupChoice:
        """The same group, where only instances of the one that it would grow to may be added."""
        ...

    def taken(self, index: int) -> GroupChoice:
        """The group after it has grown."""
        ...

    def members(self, index: int) -> tuple[int, ...]:
        """Numbers of the instances of the group that it would grow to, ascending."""
        ...


def lanes_of(servers: Sequence[int], free_ns: Sequence[int]) -> list[Lane]:
    """Instances by server, in the order in which they are free.

    Args:
        servers: instances on each; they are numbered server by server.
        free_ns: by number.
    """
    keys = [free << NUMBER_BITS | number for number, free in enumerate(free_ns)]
    lanes, start = [], 0
    for count in servers:
        lanes.append(sorted(keys[start : start + count]))
        start += count
    return lanes


class Pool:
    """Instances that may be taken.

    Args:
        lanes: by server.
        server_of: by number.
    """

    def __init__(self, lanes: Mapping[int, Lane], server_of: Sequence[int]) -> None:
        self.lanes, self.server_of = lanes, server_of

    def within(self, counts: Mapping[int, int]) -> Pool:
        """A group's instances alone."""
        lanes = {server: self.lanes[server][:count] for server, count in counts.items()}
        return Pool(lanes, self.server_of)

    def grown(self, counts: Mapping[int, int], size: int) -> dict[int, int]:
        """Instances on each server when a group has grown to a size."""
        more = dict(counts)
        missing = size - sum(counts.values())
        if counts and missing:
            missing = self._fill(more, missing)
        if missing:
            self._add_servers(more, missing)
        return more

    def free_ns(self, counts: Mapping[int, int]) -> int:
        """When all of a group are free."""
        # Of held instances, which come first, any may be the last.
        keys = [max(self.lanes[server][:count]) for server, count in counts.items()]
        return max(keys) >> NUMBER_BITS

    def members(self, counts: Mapping[int, int]) -> tuple[int, ...]:
        """Numbers of a group's instances, ascending."""
        keys = [key for server, count in counts.items() for key in self.lanes[server][:count]]
        return tuple(sorted([key & NUMBER for key in keys]))

    def _fill(self, counts: dict[int, int], missing: int) -> int:
        """Take instances of servers that the group is on. Returns how many are still missing."""
        rest = sorted([key for at, count in counts.items() for key in self.lanes[at][count:]])
        for key in rest[:missing]:
            counts[self.server_of[key & NUMBER]] += 1
        return max(0, missing - len(rest))

    def _add_servers(self, counts: dict[int, int], missing: int) -> None:
        """Take whole servers, the first to be wholly free first, until what is missing is found on
        one server, whose instances of that number are the first to be free."""
        while missing:
            others = [lane for at, lane in self.lanes.items() if at not in counts]
            fitting = [lane[missing - 1] for lane in others if len(lane) >= missing]
            key = min(fitting or [lane[-1] for lane in others])
            server = self.server_of[key & NUMBER]
            counts[server] = min(missing, len(self.lanes[server]))
            missing -= counts[server]


class PooledGroup:
    """A `GroupChoice` on any servers."""

    def __init__(self, pool: Pool, sizes: Sequence[int], counts: Mapping[int, int]) -> None:
        self._pool, self._sizes, self._counts = pool, sizes, counts
        size = sum(counts.values())
        self._grown = {
            index: pool.grown(counts, it) for index, it in enumerate(sizes) if it >= max(size, 1)
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
        held: Sequence[int],
    ) -> Self:
        """The group that has computed earlier chunks, among all instances."""
        server_of = [at for at, count in enumerate(servers) for _ in range(count)]
        lanes = dict(enumerate(lanes_of(servers, free_ns)))
        counts: dict[int, int] = {}
        for number in held:
            server = server_of[number]
            counts[server] = counts.get(server, 0) + 1
        first = set(held)
        for server in counts:  # a group is the beginning of each lane
            lanes[server].sort(key=lambda key: (key & NUMBER not in first, key))
        return cls(Pool(lanes, server_of), sizes, counts)

    def inside(self, top: int) -> PooledGroup:
        """As `GroupChoice`."""
        pool = self._pool.within(self._grown[top])
        return PooledGroup(pool, self._sizes[: top + 1], self._counts)

    def taken(self, index: int) -> PooledGroup:
        """As `GroupChoice`."""
        return PooledGroup(self._pool, self._sizes, self._grown[index])

    def members(self, index: int) -> tuple[int, ...]:
        """As `GroupChoice`."""
        return self._pool.members(self._grown[index])


def are_even(servers: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether this module's groups are those of `groups.py`."""
    width = servers[0]
    even = all(server == width for server in servers)
    return even and all(size <= width or size % width == 0 for size in sizes)


class AnyHome:
    """A `Choice` that begins with no group.

    Args:
        lanes: of the servers.
        sizes: of groups, ascending.
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
        self.free_ns = [key >> NUMBER_BITS for key in keys]
        self._homes: dict[int, Home] = {}

    def inside(self, top: int) -> AnyHome | Home:
        """As `groups.Choice`."""
        size, width = self._sizes[top], self._width
        if size <= width:
            return self.taken(top)
        last = self._by_last[size // width - 1]
        lanes = [lane for lane in self._lanes if lane[-1] <= last]
        return AnyHome(lanes, self._sizes[: top + 1])

    def taken(self, index: int) -> Home:
        """As `groups.Choice`."""
        size = self._sizes[index]
        if size <= self._width:
            lane = min(self._lanes, key=lambda it: it[size - 1])
        else:
            lane = min(self._lanes, key=lambda it: it[-1])
        home = self._homes.get(lane[0])
        if home is None:
            home = self._homes[lane[0]] = Home(lane, self._by_last, self._sizes)
        return home

    def members(self, index: int) -> tuple[int, ...]:
        """As `groups.Choice`."""
        return self.taken(index).members(index)


class Home:
    """A `Choice` of groups that begin on one server."""

    __slots__ = ("_by_last", "_lane", "_sizes", "free_ns")

    def __init__(self, lane: Lane, by_last: list[int], sizes: Sequence[int]) -> None:
        self._lane, self._by_last, self._sizes = lane, by_last, sizes
        width, place = len(lane), by_last.index(lane[-1])
        keys = [
            lane[size - 1] if size <= width else by_last[max(size // width - 1, place)]
            for size in sizes
        ]
        self.free_ns = [key >> NUMBER_BITS for key in keys]

    def inside(self, top: int) -> Home:
        """As `groups.Choice`; the beginning of a line has the beginnings that the line has."""
        return self

    def taken(self, index: int) -> Home:
        """As `groups.Choice`."""
        return self

    def members(self, index: int) -> tuple[int, ...]:
        """As `groups.Choice`."""
        lane, size = self._lane, self._sizes[index]
        width = len(lane)
        if size <= width:
            return tuple(sorted([request & NUMBER for request in lane[:size]]))
        others = [it for it in self._by_last if it != lane[-1]]
        lasts = [lane[-1], *others[: size // width - 1]]
        starts = sorted([(last & NUMBER) // width * width for last in lasts])
        return tuple([number for start in starts for number in range(start, start + width)])
