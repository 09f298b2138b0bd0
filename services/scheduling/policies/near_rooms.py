"""Choosing instances near each other for a prompt (CSPS §3.2), many times a round.

Instances are kept sorted by server, so that a choice costs a few look-ups instead of a walk over
all of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.policies.prefill_overlay import Spot


class Seat(NamedTuple):
    """A spot as it is sorted: in order of preference, and no two are equal."""

    minus_free: int
    free_at_ns: int
    order: int
    spot: Spot


class Group(NamedTuple):
    """Instances for a prompt, in topology order."""

    spots: list[Spot]
    room: list[int]
    """Tokens that each may be given."""


class _Server:
    """The instances of a server that may be chosen, the most preferred first."""

    __slots__ = ("rack", "room", "seats")

    def __init__(self, rack: int) -> None:
        self.rack = rack
        self.seats: list[Seat] = []
        self.room = 0
        """Tokens that they can take together."""


class NearRooms:
    """The instances whose line is not full.

    Args:
        spots: all of the gang.
        most: tokens that an instance is given, if it has slots for so many.
        steps: long steps that an instance may have at a time.
    """

    def __init__(self, spots: Sequence[Spot], most: int, steps: int) -> None:
        self._all, self._most, self._steps = len(spots), most, steps
        self._servers: dict[tuple[int, int], _Server] = {}
        self._seats: dict[InstanceId, Seat] = {}
        for spot in spots:
            if spot.long_steps < steps:
                self._server(spot).seats.append(self._seat(spot))
        for server in self._servers.values():
            server.seats.sort()
            server.room = sum(min(most, -seat.minus_free) for seat in server.seats)

    def update(self, spot: Spot) -> None:
        """The instance was given something to do."""
        seat = self._seats.pop(spot.id, None)
        if seat is None:
            return
        server = self._server(spot)
        del server.seats[bisect_left(server.seats, seat)]
        server.room -= min(self._most, -seat.minus_free)
        if spot.long_steps < self._steps:
            insort(server.seats, self._seat(spot))
            server.room += min(self._most, spot.free)

    def group(self, tokens: int) -> Group | None:
        """The smallest group whose SPTs hold a prompt: most tokens of each, in topology order.

        A prompt longer than an SPT on every instance of the gang takes all, with longer SPTs.
        """
        spots = self.nearest(tokens)
        if spots is None and len(self._seats) == self._all:
            spots = _spots([seat for it in self._servers.values() for seat in it.seats])
        if spots is None:
            return None
        most = tokens if len(spots) == self._all else self._most
        group = Group(spots, [min(most, it.free) for it in spots])
        return group if sum(group.room) >= tokens else None

    def nearest(self, tokens: int) -> list[Spot] | None:
        """Instances that take so many tokens: on one server if there is one with room for all,
        else in one rack, else anywhere; None if there is not as much room.

        They are on the fewest racks, there on the fewest servers, and of these the fewest
        instances. Where several are needed those with the most room come first, as with the paper's
        servers with the most free GPUs. Of equally good choices it is the one whose least preferred
        instance is preferred to the others'.
        """
        servers = [it for it in self._servers.values() if it.room >= tokens]
        if servers:
            groups = [it.seats[: self._fewest(it.seats, tokens)] for it in servers]
            return _spots(min(groups, key=_cost))
        racks: dict[int, list[_Server]] = {}
        for server in sorted(filter(_has_seats, self._servers.values()), key=_first_seat):
            racks.setdefault(server.rack, []).append(server)
        wide = [it for it in racks.values() if sum(s.room for s in it) >= tokens]
        if wide:
            return _spots(min((self._within(it, tokens) for it in wide), key=_wide_cost))
        chosen: list[_Server] = []
        for rack in sorted(racks.values(), key=lambda it: -sum(s.room for s in it)):
            if sum(it.room for it in chosen) < tokens:
                chosen += rack
        if sum(it.room for it in chosen) < tokens:
            return None
        # Which rack a server is in has done its part: of equal ones the preferred is taken.
        return _spots(self._within(sorted(chosen, key=_first_seat), tokens))

    def _within(self, servers: list[_Server], tokens: int) -> list[Seat]:
        """The fewest instances on the fewest of these servers; of equal ones the first."""
        seats: list[Seat] = []
        missing = tokens
        for server in sorted(servers, key=lambda it: -it.room):
            if missing > 0:
                seats += server.seats
                missing -= server.room
        seats.sort(key=lambda seat: -min(self._most, -seat.minus_free))
        return seats[: self._fewest(seats, tokens)]

    def _fewest(self, seats: list[Seat], tokens: int) -> int:
        """How many of these take the tokens; the first ones have the most room."""
        count = -(-tokens // self._most)
        if (
            count <= len(seats) and -seats[count - 1].minus_free >= self._most
        ):  # and so have all before it
            return count
        for count, seat in enumerate(seats, 1):
            tokens -= min(self._most, -seat.minus_free)
            if tokens <= 0:
                return count
        raise AssertionError("not room enough")

    def _server(self, spot: Spot) -> _Server:
        place = spot.place
        server = self._servers.get((place.rack, place.server))
        if server is None:
            server = self._servers[place.rack, place.server] = _Server(place.rack)
        return server

    def _seat(self, spot: Spot) -> Seat:
        seat = Seat(-spot.free, spot.free_at_ns, spot.order, spot)
        self._seats[spot.id] = seat
        return seat


def _spots(seats: list[Seat]) -> list[Spot]:
    """In topology order."""
    return sorted((seat.spot for seat in seats), key=lambda spot: spot.order)


def _cost(seats: list[Seat]) -> tuple[int, Seat]:
    """Of groups on one server each, the least is the best: few, and the last one preferred."""
    return len(seats), seats[-1]


def _wide_cost(seats: list[Seat]) -> tuple[int, int, Seat]:
    servers = {seat.spot.place.server for seat in seats}
    return len(servers), len(seats), max(seats)


def _has_seats(server: _Server) -> bool:
    return bool(server.seats)


def _first_seat(server: _Server) -> Seat:
    return server.seats[0]
