"""The shape of a group: what traffic, times and strategies depend on, of who computes a step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from csps.protocols.topology import Location


class GroupShape(NamedTuple):
    """Instances of `tp` ranks each; those of an instance share a server."""

    servers: tuple[int, ...]
    """Instances on each server, in topology order; at least one each."""
    tp: int = 1
    """Ranks of each instance."""

    @classmethod
    def of(cls, places: Iterable[Location], tp: int) -> GroupShape:
        """Of instances at these places, in ascending order of their ids."""
        runs = groupby(places, key=attrgetter("server_id"))
        return cls(tuple([sum(1 for _ in run) for _, run in runs]), tp)

    @property
    def sp(self) -> int:
        """Instances of the group."""
        return sum(self.servers)

    @property
    def ranks(self) -> int:
        """All ranks: CSPS' N."""
        return self.sp * self.tp

    @property
    def instance_servers(self) -> tuple[int, ...]:
        """The server of each instance, counted from 0."""
        return tuple(server for server, count in enumerate(self.servers) for _ in range(count))

    @property
    def rank_servers(self) -> tuple[int, ...]:
        """The same of each rank."""
        return tuple(server for server in self.instance_servers for _ in range(self.tp))
