"""Locations of ranks: Rack-Server-GPU ids, their order, and the levels of proximity (CSPS §3.2.4).

Sequence partitions (SPTs) are placed on ranks in the order of their ids, so near tokens lie on near
GPUs, and the ranks that share a server, or a rack, are neighbors. `GroupShape` is what traffic,
times and strategies need to know of the instances of a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple

from csps.protocols.core.errors import ConfigError, abridged

Segments = tuple[range, ...]
"""A partition of places 0 .. n-1 into runs of neighbors."""
MAX_LEVELS = 4
"""Most levels of proximity: SPT, server, rack and all."""
_ID = re.compile("-".join([r"(0|[1-9]\d{0,8})"] * 3), re.ASCII)


@dataclass(frozen=True, order=True)
class Location:
    """One GPU; locations compare as their ids do."""

    rack: int
    server: int
    gpu: int

    @classmethod
    def parse(cls, text: str) -> Location:
        """Parse an id like "0-3-2".

        The paper writes the same place in binary, "0-11-010". That is refused, because "0-11-10"
        would be a place in both notations.

        Raises:
            ConfigError: the text is not three decimal numbers.
        """
        match = _ID.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"{abridged(text)} is not a Rack-Server-GPU id; allowed are three decimal numbers "
                "of at most 9 digits, without leading zeros, like 0-3-2"
            )
        rack, server, gpu = map(int, match.groups())
        return cls(rack, server, gpu)

    @property
    def server_id(self) -> tuple[int, int]:
        """Rack and server, which the GPUs of one machine share."""
        return self.rack, self.server

    def __str__(self) -> str:
        return f"{self.rack}-{self.server}-{self.gpu}"


@dataclass(frozen=True)
class Topology:
    """Locations of places 0, 1, …: the ranks of a gang, or the members of a group.

    Raises:
        ConfigError: there is no location, or one is named twice.
    """

    locations: tuple[Location, ...]

    def __post_init__(self) -> None:
        if not self.locations:
            raise ConfigError("a topology names at least one location")
        taken: dict[Location, int] = {}
        for place, location in enumerate(self.locations):
            if (other := taken.setdefault(location, place)) != place:
                raise ConfigError(
                    f"topology puts both {other} and {place} at {location}; allowed is one rank "
                    "per place"
                )

    @classmethod
    def of(cls, ids: Sequence[str]) -> Topology:
        """Parse the id of each place."""
        return cls(tuple(Location.parse(text) for text in ids))

    @classmethod
    def of_gang(cls, ids: Sequence[str], *, ranks: int, tp: int) -> Topology:
        """Parse the id of each rank of a gang, in which `tp` consecutive ranks are an instance.

        Raises:
            ConfigError: the number of ids is not `ranks`, or an instance is on two servers.
        """
        if len(ids) != ranks:
            raise ConfigError(
                f"{len(ids)} locations for a gang of {ranks} ranks; allowed is one "
                "Rack-Server-GPU id per rank, in rank order"
            )
        topology = cls.of(ids)
        for first in range(0, ranks, tp):
            topology._require_one_server(range(first, min(first + tp, ranks)))
        return topology

    def _require_one_server(self, instance: range) -> None:
        """Check that all ranks of an instance are on one server."""
        # Levels, hierarchical collectives and costs treat an instance as one place.
        first = self.locations[instance.start]
        for rank in instance:
            if (found := self.locations[rank]).server_id != first.server_id:
                raise ConfigError(
                    f"ranks {instance.start} to {instance.stop - 1} are one instance, but rank "
                    f"{instance.start} is at {first} and rank {rank} at {found}; allowed is one "
                    "server for all ranks of an instance"
                )

    @property
    def order(self) -> tuple[int, ...]:
        """Places in ascending order of their ids, in which SPTs are placed."""
        return tuple(sorted(range(len(self.locations)), key=self.locations.__getitem__))

    def subset(self, places: Sequence[int]) -> Topology:
        """Return the topology of some places, renumbered in the order given."""
        return Topology(tuple(self.locations[place] for place in places))

    def require_order(self) -> None:
        """Check that the places are in ascending order of their ids.

        Raises:
            ConfigError: they are not.
        """
        for before, after in zip(self.locations, self.locations[1:], strict=False):
            if after < before:
                raise ConfigError(
                    f"{before} stands before {after}; allowed is ascending order of "
                    "Rack-Server-GPU ids, so that near tokens lie on near GPUs"
                )

    @property
    def servers(self) -> Segments:
        """Runs of places that share a server; needs ascending order."""
        return self._runs(lambda location: location.server_id)

    @property
    def racks(self) -> Segments:
        """Runs of places that share a rack; needs ascending order."""
        return self._runs(lambda location: location.rack)

    @cached_property
    def granularities(self) -> tuple[Segments, ...]:
        """Granularities of the topology, finest first: those of SPT, server, rack and all that
        differ from the one before. The last one is a single segment.

        With one GPU per server, for instance, servers equal SPTs and are left out.
        """
        size = len(self.locations)
        distinct: list[Segments] = []
        single = tuple(range(place, place + 1) for place in range(size))
        for segments in (single, self.servers, self.racks, (range(size),)):
            if segments not in distinct:
                distinct.append(segments)
        return tuple(distinct)

    def levels(self, count: int) -> tuple[Segments, ...]:
        """Return the segments of `count` levels (the paper's N_v), level 1 first.

        The levels are the finest `count - 1` granularities, and all. So 1 is one level over
        everything, 2 is SPT and all, and 3 is SPT, server and all (or SPT, rack and all where each
        server has one GPU).

        Raises:
            ConfigError: there are more levels than the topology distinguishes.
        """
        allowed = len(self.granularities)
        if not 1 <= count <= allowed:
            raise ConfigError(
                f"levels must be 1 to {allowed} here (places {len(self.locations)}, servers "
                f"{len(self.servers)}, racks {len(self.racks)}), not {count}"
            )
        return (*self.granularities[: count - 1], self.granularities[-1])

    def _runs(self, key: Callable[[Location], object]) -> Segments:
        runs, begin = [], 0
        for _, group in groupby(self.locations, key=key):
            size = sum(1 for _ in group)
            runs.append(range(begin, begin + size))
            begin += size
        return tuple(runs)


class GroupShape(NamedTuple):
    """Instances of `tp` ranks each; the ranks of an instance share a server."""

    servers: tuple[int, ...]
    """Instances on each server, in topology order; at least one each."""
    tp: int = 1
    """Ranks of each instance."""
    racks: tuple[int, ...] = ()
    """Servers in each rack, in topology order; empty if all are in one rack."""

    @classmethod
    def of(cls, places: Iterable[Location], tp: int) -> GroupShape:
        """Return the shape of instances at these places, which are in ascending order of their
        ids."""
        runs = groupby(places, key=attrgetter("server_id"))
        counts = [(rack, sum(1 for _ in run)) for (rack, _), run in runs]
        racks = tuple([sum(1 for _ in run) for _, run in groupby(counts, key=itemgetter(0))])
        servers = tuple([instances for _, instances in counts])
        return cls(servers, tp, racks if len(racks) > 1 else ())

    @property
    def places(self) -> tuple[str, ...]:
        """Rack-Server-GPU ids of the instances of such a group, numbered from 0."""
        instances = iter(self.servers)
        return tuple(
            f"{rack}-{server}-{place}"
            for rack, servers in enumerate(self.racks or (len(self.servers),))
            for server in range(servers)
            for place in range(next(instances))
        )

    @property
    def sp(self) -> int:
        """Number of instances of the group."""
        return sum(self.servers)

    @property
    def ranks(self) -> int:
        """Number of ranks of the group (N in the CSPS paper)."""
        return self.sp * self.tp

    @property
    def instance_servers(self) -> tuple[int, ...]:
        """Server of each instance, counted from 0."""
        return tuple(server for server, count in enumerate(self.servers) for _ in range(count))

    @property
    def rank_servers(self) -> tuple[int, ...]:
        """Server of each rank, counted from 0."""
        return tuple(server for server in self.instance_servers for _ in range(self.tp))
