"""Choosing places near each other, so that a group exchanges little over slow links (CSPS §3.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from csps.protocols.core.topology import Location

Near = Callable[[Location], object]
"""Function that maps near places to equal values."""


def near_places(room: Mapping[Location, int], wanted: int) -> list[Location] | None:
    """Return places whose room is `wanted` together; None if there is not as much.

    They are on one server if there is one with room for all, else in one rack, else anywhere: the
    fewest racks, there the fewest servers, and of these the fewest places. Where several are needed
    those with the most room come first, as with the paper's servers with the most free GPUs. Of
    equally good choices it is the one whose least preferred place is preferred to the others'.

    Args:
        room: of each place, in order of preference.
    """
    choice = _Choice(room, wanted)
    for near in (_server, _rack, _anywhere):
        groups = [group for part in choice.parts(room, near) if (group := choice.group(part))]
        if groups:
            return min(groups, key=choice.cost)
    return None


@dataclass(frozen=True)
class _Choice:
    room: Mapping[Location, int]
    wanted: int

    def parts(self, places: Iterable[Location], near: Near) -> list[list[Location]]:
        """Return places that are near each other, in the order given."""
        parts: dict[object, list[Location]] = {}
        for place in places:
            parts.setdefault(near(place), []).append(place)
        return list(parts.values())

    def group(self, places: list[Location]) -> list[Location] | None:
        """Return the fewest of these places that hold what is wanted, on the fewest servers and
        racks.
        """
        # Which rack a server is in has done its part: of equal ones the preferred is taken.
        chosen = sorted(self._fewest(places, _rack), key=places.index)
        for near in (_server, _itself):
            chosen = self._fewest(chosen, near)
        return chosen if self._room_of(chosen) >= self.wanted else None

    def _fewest(self, places: list[Location], near: Near) -> list[Location]:
        """Return the fewest sufficient parts, or all, those with the most room first.

        Equal parts keep their order.
        """
        chosen: list[Location] = []
        for part in sorted(self.parts(places, near), key=self._room_of, reverse=True):
            if self._room_of(chosen) < self.wanted:
                chosen += part
        return chosen

    def cost(self, group: list[Location]) -> tuple[int, int, int]:
        """Return a group's cost; among groups on equally many racks, the least is the best."""
        preference = list(self.room)
        servers = len({place.server_id for place in group})
        return servers, len(group), max(map(preference.index, group))

    def _room_of(self, places: list[Location]) -> int:
        return sum(self.room[place] for place in places)


def _itself(place: Location) -> object:
    return place


def _server(place: Location) -> object:
    return place.server_id


def _rack(place: Location) -> object:
    return place.rack


def _anywhere(_: Location) -> object:
    return None
