"""Gangs that serve now, and the ranks that make them up.

`Membership` is a plain class without clock or cluster. The router reads it through a `Directory`: a
registry that outlives replicas, by long poll, or in tests a `StaticDirectory`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from csps.protocols.gang.members import GangMembers, GangRole, RankAddress


@dataclass(frozen=True, kw_only=True)
class ClusterView:
    """The newest complete gang of each role; None while there is none."""

    prefill: GangMembers | None = None
    decode: GangMembers | None = None
    elastic: GangMembers | None = None

    def gang(self, role: GangRole) -> GangMembers | None:
        """Return the gang of this role."""
        return {"prefill": self.prefill, "decode": self.decode, "elastic": self.elastic}[role]


class Directory(Protocol):
    """Answers when the view has changed."""

    async def wait_change(self, version: int) -> tuple[int, ClusterView]:
        """Wait until the view is newer than `version`; return its version and the view.

        Version -1 is older than every view. An implementation may return early with the same
        version, as a long poll does at its time limit.
        """
        ...

    async def replace(self, gang_id: str) -> bool:
        """Ask for another gang in place of one that cannot be reached; return whether somebody
        does it."""
        ...


class StaticDirectory:
    """A directory in this process's memory."""

    def __init__(self, view: ClusterView | None = None) -> None:
        self._version, self._view = 0, view or ClusterView()
        self._changed = asyncio.Event()

    def publish(self, view: ClusterView) -> None:
        """Replace the view and wake whoever waits for a change."""
        self._version, self._view = self._version + 1, view
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self, version: int) -> tuple[int, ClusterView]:
        while self._version <= version:
            await self._changed.wait()
        return self._version, self._view

    async def replace(self, gang_id: str) -> bool:
        """Return False: whoever publishes gangs starts them."""
        return False


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank, its gang, and the address of its RPC server."""

    role: GangRole
    gang_id: str
    world_size: int
    address: RankAddress
    incarnation: int = 0
    """Rank 0's number, larger than that of every gang which this one replaces; 0 for others."""
    replica: Any = None
    """Handle of its Ray actor, by which its process can be ended; None without Ray."""


LIVENESS_TIMEOUT_S = 30.0
"""Ten repetitions: a gang whose ranks registered longer ago is probably dead."""


class Membership:
    """Collects ranks into gangs.

    The newest complete gang of a role counts, in whatever order gangs register: after a registry
    restart, the last ranks of a gang that is being torn down may come first, or last. A newer gang
    whose registrations stopped does not displace an older one.
    """

    def __init__(self) -> None:
        self.view = ClusterView()
        self._gangs: dict[str, _Gang] = {}

    def join(self, member: Member, now: float) -> bool:
        """Register a rank; return whether that changed `view`. Idempotent."""
        gang = self._gangs.setdefault(
            member.gang_id, _Gang(role=member.role, world_size=member.world_size)
        )
        rank = member.address.rank
        gang.ranks[rank], gang.registered_at[rank] = member.address, now
        gang.replicas[rank] = member.replica
        gang.incarnation = max(gang.incarnation, member.incarnation)
        return self._install(member.role, self._newest(member.role, now))

    def replicas(self, gang_id: str) -> tuple[Any, ...]:
        """Return handles of the Ray actors of a gang's ranks; none if the gang is unknown."""
        gang = self._gangs.get(gang_id)
        return () if gang is None else tuple(gang.replicas.values())

    def _newest(self, role: GangRole, now: float) -> GangMembers | None:
        complete = {
            gang_id: gang
            for gang_id, gang in self._gangs.items()
            if gang.role == role and gang.complete
        }
        living = {gang_id: gang for gang_id, gang in complete.items() if gang.alive(now)}
        # Without a living gang the newest one counts: its registrations may only be late.
        candidates = living or complete
        if not candidates:
            return None
        newest = max(candidates, key=lambda gang_id: candidates[gang_id].incarnation)
        for dead in complete.keys() - living.keys() - {newest}:
            del self._gangs[dead]
        return _members(newest, candidates[newest])

    def _install(self, role: GangRole, gang: GangMembers | None) -> bool:
        if gang == self.view.gang(role):
            return False
        self.view = replace(self.view, **{role: gang})
        return True


@dataclass
class _Gang:
    """One gang, complete or not."""

    role: GangRole
    world_size: int
    incarnation: int = 0
    ranks: dict[int, RankAddress] = field(default_factory=dict)
    registered_at: dict[int, float] = field(default_factory=dict)
    replicas: dict[int, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.ranks) == self.world_size

    def alive(self, now: float) -> bool:
        return now - min(self.registered_at.values()) <= LIVENESS_TIMEOUT_S


def _members(gang_id: str, gang: _Gang) -> GangMembers:
    return GangMembers(
        gang_id=gang_id,
        ranks=tuple(gang.ranks[rank] for rank in sorted(gang.ranks)),
        incarnation=gang.incarnation,
    )
