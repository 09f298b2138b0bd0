"""Choosing instances near each other for a prompt (CSPS §3.2), many times a round.

Instances are kept sorted by server, so that a choice costs a few look-ups instead of a walk over
all of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from csps.services.scheduling.events.events import InstanceId
from csps.services.scheduling.policies.rounds.prefill_overlay import Candidate


class Preference(NamedTuple):
    """A spot as it is sorted: in order of preference, and no two are equal."""

    minus_free: int
    free_at_ns: int
    order: int
    candidate: Candidate


class CandidateGroup(NamedTuple):
    """Instances for a prompt, in topology order."""

    candidates: list[Candidate]
    room: list[int]
    """Tokens that each may be given."""


class _Server:
    """The instances of a server that may be chosen, the most preferred first."""

    __slots__ = ("preferences", "rack", "room")

    def __init__(self, rack: int) -> None:
        self.rack = rack
        self.preferences: list[Preference] = []
        self.room = 0
        """Tokens that they can take together."""


class LocalityAllocator:
    """The instances whose line is not full.

    Args:
        spots: all of the gang.
        most: tokens that an instance is given, if it has slots for so many.
        steps: long steps that an instance may have at a time.
    """

    def __init__(self, candidates: Sequence[Candidate], most: int, steps: int) -> None:
        self._all, self._most, self._steps = len(candidates), most, steps
        self._servers: dict[tuple[int, int], _Server] = {}
        self._preferences: dict[InstanceId, Preference] = {}
        for candidate in candidates:
            if candidate.low_priority_steps < steps:
                self._server(candidate).preferences.append(self._preference(candidate))
        for server in self._servers.values():
            server.preferences.sort()
            server.room = sum(min(most, -seat.minus_free) for seat in server.preferences)

    def update(self, candidate: Candidate) -> None:
        """The instance was given something to do."""
        seat = self._preferences.pop(candidate.id, None)
        if seat is None:
            return
        server = self._server(candidate)
        del server.preferences[bisect_left(server.preferences, seat)]
        server.room -= min(self._most, -seat.minus_free)
        if candidate.low_priority_steps < self._steps:
            insort(server.preferences, self._preference(candidate))
            server.room += min(self._most, candidate.free)

    def group(self, tokens: int) -> CandidateGroup | None:
        """The smallest group whose SPTs hold a prompt: most tokens of each, in topology order.

        A prompt longer than an SPT on every instance of the gang takes all, with longer SPTs.
        """
        candidates = self.nearest(tokens)
        if candidates is None and len(self._preferences) == self._all:
            candidates = _candidates(
                [seat for server in self._servers.values() for seat in server.preferences]
            )
        if candidates is None:
            return None
        most = tokens if len(candidates) == self._all else self._most
        group = CandidateGroup(candidates, [min(most, candidate.free) for candidate in candidates])
        return group if sum(group.room) >= tokens else None

    def nearest(self, tokens: int) -> list[Candidate] | None:
        """Instances that take so many tokens: on one server if there is one with room for all,
        else in one rack, else anywhere; None if there is not as much room.

        They are on the fewest racks, there on the fewest servers, and of these the fewest
        instances. Where several are needed those with the most room come first, as with the paper's
        servers with the most free GPUs. Of equally good choices it is the one whose least preferred
        instance is preferred to the others'.
        """
        servers = [it for it in self._servers.values() if it.room >= tokens]
        if servers:
            groups = [it.preferences[: self._fewest(it.preferences, tokens)] for it in servers]
            return _candidates(min(groups, key=_cost))
        racks: dict[int, list[_Server]] = {}
        for server in sorted(
            filter(_has_preferences, self._servers.values()), key=_first_preference
        ):
            racks.setdefault(server.rack, []).append(server)
        wide = [it for it in racks.values() if sum(s.room for s in it) >= tokens]
        if wide:
            return _candidates(min((self._within(it, tokens) for it in wide), key=_wide_cost))
        chosen: list[_Server] = []
        for rack in sorted(racks.values(), key=lambda it: -sum(s.room for s in it)):
            if sum(it.room for it in chosen) < tokens:
                chosen += rack
        if sum(it.room for it in chosen) < tokens:
            return None
        # Which rack a server is in has done its part: of equal ones the preferred is taken.
        return _candidates(self._within(sorted(chosen, key=_first_preference), tokens))

    def _within(self, servers: list[_Server], tokens: int) -> list[Preference]:
        """The fewest instances on the fewest of these servers; of equal ones the first."""
        preferences: list[Preference] = []
        missing = tokens
        for server in sorted(servers, key=lambda it: -it.room):
            if missing > 0:
                preferences += server.preferences
                missing -= server.room
        preferences.sort(key=lambda seat: -min(self._most, -seat.minus_free))
        return preferences[: self._fewest(preferences, tokens)]

    def _fewest(self, preferences: list[Preference], tokens: int) -> int:
        """How many of these take the tokens; the first ones have the most room."""
        count = -(-tokens // self._most)
        if (
            count <= len(preferences) and -preferences[count - 1].minus_free >= self._most
        ):  # and so have all before it
            return count
        for count, seat in enumerate(preferences, 1):
            tokens -= min(self._most, -seat.minus_free)
            if tokens <= 0:
                return count
        raise AssertionError("not room enough")

    def _server(self, candidate: Candidate) -> _Server:
        place = candidate.place
        server = self._servers.get((place.rack, place.server))
        if server is None:
            server = self._servers[place.rack, place.server] = _Server(place.rack)
        return server

    def _preference(self, candidate: Candidate) -> Preference:
        seat = Preference(-candidate.free, candidate.free_at_ns, candidate.order, candidate)
        self._preferences[candidate.id] = seat
        return seat


def _candidates(preferences: list[Preference]) -> list[Candidate]:
    """In topology order."""
    return sorted((seat.candidate for seat in preferences), key=lambda candidate: candidate.order)


def _cost(preferences: list[Preference]) -> tuple[int, Preference]:
    """Of groups on one server each, the least is the best: few, and the last one preferred."""
    return len(preferences), preferences[-1]


def _wide_cost(preferences: list[Preference]) -> tuple[int, int, Preference]:
    servers = {seat.candidate.place.server for seat in preferences}
    return len(servers), len(preferences), max(preferences)


def _has_preferences(server: _Server) -> bool:
    return bool(server.preferences)


def _first_preference(server: _Server) -> Preference:
    return server.preferences[0]
