"""The locality allocator chooses instances near each other for a prompt (CSPS §3.2).

It keeps the instances sorted by server, because a round chooses many times: a choice costs a few
look-ups instead of a walk over all instances.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from csps.services.scheduling.events.events import InstanceId
from csps.services.scheduling.policies.rounds.prefill_overlay import Candidate


class Preference(NamedTuple):
    """Sort key of a candidate, the most preferred first; no two are equal."""

    minus_free: int
    free_at_ns: int
    order: int
    candidate: Candidate


class CandidateGroup(NamedTuple):
    """Instances for a prompt, in topology order."""

    candidates: list[Candidate]
    room: list[int]
    """Most tokens of each instance."""


class _Server:
    """The instances of a server that may be chosen, the most preferred first."""

    __slots__ = ("preferences", "rack", "room")

    def __init__(self, rack: int) -> None:
        self.rack = rack
        self.preferences: list[Preference] = []
        self.room = 0
        """Most tokens of all its instances together."""


class LocalityAllocator:
    """The instances that may be given another step.

    Args:
        candidates: all instances of the gang.
        most: most tokens given to an instance.
        steps: most steps of an instance at a time, of the priority of the step.
        high_priority: priority of the step.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        most: int,
        steps: int,
        *,
        high_priority: bool = False,
    ) -> None:
        self._all, self._most, self._steps = len(candidates), most, steps
        self._high_priority = high_priority
        self._servers: dict[tuple[int, int], _Server] = {}
        self._preferences: dict[InstanceId, Preference] = {}
        for candidate in candidates:
            if self._has_step_left(candidate):
                self._server(candidate).preferences.append(self._preference(candidate))
        for server in self._servers.values():
            server.preferences.sort()
            server.room = sum(
                min(most, -preference.minus_free) for preference in server.preferences
            )

    def update(self, candidate: Candidate) -> None:
        """Update an instance that was given a step."""
        preference = self._preferences.pop(candidate.id, None)
        if preference is None:
            return
        server = self._server(candidate)
        del server.preferences[bisect_left(server.preferences, preference)]
        server.room -= min(self._most, -preference.minus_free)
        if self._has_step_left(candidate):
            insort(server.preferences, self._preference(candidate))
            server.room += min(self._most, candidate.free)

    def _has_step_left(self, candidate: Candidate) -> bool:
        high, low = candidate.high_priority_steps, candidate.low_priority_steps
        return (high if self._high_priority else low) < self._steps

    def group(self, tokens: int) -> CandidateGroup | None:
        """Return the smallest group whose SPTs hold a prompt, or None.

        A prompt longer than an SPT on every instance of the gang takes all, with longer SPTs.
        """
        candidates = self.nearest(tokens)
        if candidates is None and len(self._preferences) == self._all:
            candidates = _candidates(
                [
                    preference
                    for server in self._servers.values()
                    for preference in server.preferences
                ]
            )
        if candidates is None:
            return None
        most = tokens if len(candidates) == self._all else self._most
        group = CandidateGroup(candidates, [min(most, candidate.free) for candidate in candidates])
        return group if sum(group.room) >= tokens else None

    def nearest(self, tokens: int) -> list[Candidate] | None:
        """Return instances for this many tokens: on one server, else in one rack, else anywhere.

        The choice has the fewest racks, then the fewest servers, then the fewest instances. Racks,
        servers and instances with the most room come first, like the paper's servers with the most
        free GPUs. Among equal choices, the one with the best least-preferred instance wins.

        Returns:
            None without enough room.
        """
        servers = [server for server in self._servers.values() if server.room >= tokens]
        if servers:
            groups = [
                server.preferences[: self._fewest(server.preferences, tokens)] for server in servers
            ]
            return _candidates(min(groups, key=_cost))
        racks: dict[int, list[_Server]] = {}
        for server in sorted(
            filter(_has_preferences, self._servers.values()), key=_first_preference
        ):
            racks.setdefault(server.rack, []).append(server)
        wide = [rack for rack in racks.values() if _room(rack) >= tokens]
        if wide:
            return _candidates(min((self._within(rack, tokens) for rack in wide), key=_wide_cost))
        chosen: list[_Server] = []
        for rack in sorted(racks.values(), key=_room, reverse=True):
            if _room(chosen) < tokens:
                chosen += rack
        if _room(chosen) < tokens:
            return None
        # The racks are chosen: sort by preference again, so that it decides among equal servers.
        return _candidates(self._within(sorted(chosen, key=_first_preference), tokens))

    def _within(self, servers: list[_Server], tokens: int) -> list[Preference]:
        """Return the fewest instances on the fewest of these servers; of equal ones the first."""
        preferences: list[Preference] = []
        missing = tokens
        for server in sorted(servers, key=lambda server: -server.room):
            if missing > 0:
                preferences += server.preferences
                missing -= server.room
        preferences.sort(key=lambda preference: -min(self._most, -preference.minus_free))
        return preferences[: self._fewest(preferences, tokens)]

    def _fewest(self, preferences: list[Preference], tokens: int) -> int:
        """Return how many instances hold the tokens; the first ones have the most room."""
        count = -(-tokens // self._most)
        # If the last of `count` instances has room for a whole SPT, those before it have, too.
        if count <= len(preferences) and -preferences[count - 1].minus_free >= self._most:
            return count
        for count, preference in enumerate(preferences, 1):
            tokens -= min(self._most, -preference.minus_free)
            if tokens <= 0:
                return count
        raise AssertionError(f"{len(preferences)} chosen instances lack room for {tokens} tokens")

    def _server(self, candidate: Candidate) -> _Server:
        place = candidate.place
        server = self._servers.get((place.rack, place.server))
        if server is None:
            server = self._servers[place.rack, place.server] = _Server(place.rack)
        return server

    def _preference(self, candidate: Candidate) -> Preference:
        preference = Preference(-candidate.free, candidate.free_at_ns, candidate.order, candidate)
        self._preferences[candidate.id] = preference
        return preference


def _candidates(preferences: list[Preference]) -> list[Candidate]:
    """Return the candidates in topology order."""
    return sorted(
        (preference.candidate for preference in preferences),
        key=lambda candidate: candidate.order,
    )


def _room(servers: list[_Server]) -> int:
    return sum(server.room for server in servers)


def _cost(preferences: list[Preference]) -> tuple[int, Preference]:
    """Order groups of one server each: the fewest instances, then the best last one."""
    return len(preferences), preferences[-1]


def _wide_cost(preferences: list[Preference]) -> tuple[int, int, Preference]:
    """Order groups of several servers: the fewest servers, the fewest instances, the best last."""
    servers = {preference.candidate.place.server for preference in preferences}
    return len(servers), len(preferences), max(preferences)


def _has_preferences(server: _Server) -> bool:
    return bool(server.preferences)


def _first_preference(server: _Server) -> Preference:
    return server.preferences[0]
