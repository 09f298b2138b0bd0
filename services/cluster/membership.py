"""Who is there: the membership of the gangs, as the router learns it.

In production the answer comes from a registry that outlives replicas, by long poll; in tests and
in a single process from `StaticDirectory`.

Which ranks make up the gangs that serve now: a plain class, no clock, no cluster.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Protocol

from csps.protocols.gang.members import GangMembers, GangRole, RankAddress


@dataclass(frozen=True, kw_only=True)
class ClusterView:
    """The newest complete gang of each role; None while there is none."""

    prefill: GangMembers | None = None
    decode: GangMembers | None = None
    elastic: GangMembers | None = None

    def gang(self, role: GangRole) -> GangMembers | None:
        """The gang of `role`."""
        return {"prefill": self.prefill, "decode": self.decode, "elastic": self.elastic}[role]


class Directory(Protocol):
    """Answers when something has changed."""

    async def wait_change(self, version: int) -> tuple[int, ClusterView]:
        """Wait until the view is newer than `version`; returns its version and the view.

        -1 is older than every view. An implementation may return earlier with the same version,
        as a long poll does that has run into its time limit.
        """
        ...


class StaticDirectory:
    """A directory in this process's memory; `publish` replaces the view."""

    def __init__(self, view: ClusterView | None = None) -> None:
        self._version, self._view = 0, view or ClusterView()
        self._changed = asyncio.Event()

    def publish(self, view: ClusterView) -> None:
        """Make `view` the current one and wake whoever waits for a change."""
        self._version, self._view = self._version + 1, view
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self, version: int) -> tuple[int, ClusterView]:
        while self._version <= version:
            await self._changed.wait()
        return self._version, self._view


LIVENESS_TIMEOUT_S = 30.0
"""Ten repetitions: a gang whose ranks have registered longer ago is likely to be dead."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank, the gang it belongs to, and where its RPC server listens."""

    role: GangRole
    gang_id: str
    world_size: int
    address: RankAddress
    incarnation: int = 0
    """What rank 0 knows: a number larger than that of every gang which this one replaces."""


@dataclass
class _Gang:
    """What is known of a gang, complete or not."""

    role: GangRole
    world_size: int
    incarnation: int = 0
    ranks: dict[int, RankAddress] = field(default_factory=dict)
    registered_at: dict[int, float] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.ranks) == self.world_size

    def alive(self, now: float) -> bool:
        return now - min(self.registered_at.values()) <= LIVENESS_TIMEOUT_S


class Membership:
    """Collects ranks into gangs.

    Of the complete gangs of a role the newest counts, whatever order they register in: after a
    registry had to start again, the last ranks of a gang that is being torn down may come first,
    or last. A newer gang that has fallen silent stands in no older one's way.
    """

    def __init__(self) -> None:
        self.view = ClusterView()
        self._gangs: dict[str, _Gang] = {}

    def join(self, member: Member, now: float) -> bool:
        """Take a rank in; True if that changed `view`. Joining twice is the same as once."""
        gang = self._gangs.setdefault(
            member.gang_id, _Gang(role=member.role, world_size=member.world_size)
        )
        rank = member.address.rank
        gang.ranks[rank], gang.registered_at[rank] = member.address, now
        gang.incarnation = max(gang.incarnation, member.incarnation)
        return self._install(member.role, self._newest(member.role, now))

    def _newest(self, role: GangRole, now: float) -> GangMembers | None:
        complete = {it: gang for it, gang in self._gangs.items() if gang.role == role}
        complete = {it: gang for it, gang in complete.items() if gang.complete}
        living = {it: gang for it, gang in complete.items() if gang.alive(now)}
        candidates = living or complete
        if not candidates:
            return None
        newest = max(candidates, key=lambda it: candidates[it].incarnation)
        for dead in complete.keys() - living.keys() - {newest}:
            del self._gangs[dead]
        return _members(newest, candidates[newest])

    def _install(self, role: GangRole, gang: GangMembers | None) -> bool:
        if gang == self.view.gang(role):
            return False
        self.view = replace(self.view, **{role: gang})
        return True


def _members(gang_id: str, gang: _Gang) -> GangMembers:
    return GangMembers(
        gang_id=gang_id,
        ranks=tuple(gang.ranks[rank] for rank in sorted(gang.ranks)),
        incarnation=gang.incarnation,
    )
