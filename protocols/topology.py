"""Where ranks stand: Rack-Server-GPU ids, their order, and the levels of proximity (CSPS §3.2.4).

Sequence partitions (SPTs) are placed on ranks in the order of their ids, so near tokens lie on
near GPUs, and every set of ranks that share a server, or a rack, is a run of neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal

from csps.protocols.errors import ConfigError

Notation = Literal["decimal", "binary"]
Segments = tuple[range, ...]
"""A partition of places 0 .. n-1 into runs of neighbours."""


@dataclass(frozen=True, order=True)
class Location:
    """One GPU; locations compare as their ids do."""

    rack: int
    server: int
    gpu: int

    @classmethod
    def parse(cls, text: str, notation: Notation = "decimal") -> Location:
        """From "0-3-2", or from the paper's binary "0-11-010", which is the same place.

        The notation is not guessed, because "0-11-10" is a place in both.

        Raises:
            ConfigError: not three such numbers.
        """
        fields = text.split("-")
        if len(fields) != 3 or not all(_is_number(field, notation) for field in fields):
            form = "0-3-2" if notation == "decimal" else "0-11-010"
            raise ConfigError(
                f"'{text}' is not a Rack-Server-GPU id; allowed are three {notation} numbers "
                f"like {form}"
            )
        rack, server, gpu = (int(field, 10 if notation == "decimal" else 2) for field in fields)
        return cls(rack, server, gpu)

    def __str__(self) -> str:
        return f"{self.rack}-{self.server}-{self.gpu}"


def _is_number(field: str, notation: Notation) -> bool:
    if notation == "binary":
        return bool(field) and set(field) <= {"0", "1"}
    # A leading zero is taken for the binary form by mistake.
    return field.isascii() and field.isdigit() and str(int(field)) == field


@dataclass(frozen=True)
class Topology:
    """Locations of places 0, 1, … : the ranks of a gang, or the members of a group.

    Raises:
        ConfigError: no location, or one that is named twice.
    """

    locations: tuple[Location, ...]

    def __post_init__(self) -> None:
        if not self.locations:
            raise ConfigError("a topology names at least one location")
        taken: dict[Location, int] = {}
        for place, location in enumerate(self.locations):
            if (other := taken.setdefault(location, place)) != place:
                raise ConfigError(f"topology puts both {other} and {place} at {location}")

    @classmethod
    def of(cls, ids: Sequence[str], notation: Notation = "decimal") -> Topology:
        """Place i stands at `ids[i]`."""
        return cls(tuple(Location.parse(text, notation) for text in ids))

    @classmethod
    def of_ranks(
        cls, entries: Iterable[tuple[int, str]], *, ranks: int, notation: Notation = "decimal"
    ) -> Topology:
        """From (rank, id) pairs that name each of 0 .. ranks-1 once, in any order.

        Raises:
            ConfigError: a rank is missing, unknown or named twice, or two share a location.
        """
        ids: dict[int, str] = {}
        for rank, text in entries:
            if rank in ids:
                raise ConfigError(f"topology names rank {rank} twice: {ids[rank]} and {text}")
            if not 0 <= rank < ranks:
                raise ConfigError(f"topology names rank {rank}; allowed are 0 to {ranks - 1}")
            ids[rank] = text
        if missing := [rank for rank in range(ranks) if rank not in ids]:
            raise ConfigError(f"topology misses rank {missing[0]} of 0 to {ranks - 1}")
        return cls.of([ids[rank] for rank in range(ranks)], notation)

    @property
    def order(self) -> tuple[int, ...]:
        """Places in ascending order of their ids: the order in which SPTs are placed."""
        return tuple(sorted(range(len(self.locations)), key=self.locations.__getitem__))

    def subset(self, places: Sequence[int]) -> Topology:
        """The topology of some places, renumbered in the order given."""
        return Topology(tuple(self.locations[place] for place in places))

    def require_order(self) -> None:
        """Raises ConfigError unless the places stand in ascending order of their ids."""
        for before, after in zip(self.locations, self.locations[1:], strict=False):
            if after < before:
                raise ConfigError(
                    f"{before} stands before {after}; allowed is ascending order of "
                    "Rack-Server-GPU ids, so that near tokens lie on near GPUs"
                )

    @property
    def servers(self) -> Segments:
        """Runs of places that share a server; needs ascending order."""
        return self._runs(lambda location: (location.rack, location.server))

    @property
    def racks(self) -> Segments:
        """Runs of places that share a rack; needs ascending order."""
        return self._runs(lambda location: location.rack)

    @cached_property
    def granularities(self) -> tuple[Segments, ...]:
        """What the topology can tell apart, finest first: of SPT, server, rack and all, those
        that differ from the one before. With one GPU a server, for instance, servers are not
        told apart from SPTs. The last one is a single segment."""
        size = len(self.locations)
        distinct: list[Segments] = []
        single = tuple(range(place, place + 1) for place in range(size))
        for segments in (single, self.servers, self.racks, (range(size),)):
            if segments not in distinct:
                distinct.append(segments)
        return tuple(distinct)

    def levels(self, count: int) -> tuple[Segments, ...]:
        """Segments of `count` levels (the paper's N_v), level 1 first: the finest `count - 1`
        granularities, and all. So 1 is one level over everything, 2 is SPT and all, and 3 is SPT,
        server and all (or SPT, rack and all where each server has one GPU).

        Raises:
            ConfigError: more levels than the topology tells apart.
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
