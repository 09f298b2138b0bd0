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
    """The newest complete gang of each role in one rollout; None while there is none."""

    prefill: GangMembers | None = None
    decode: GangMembers | None = None
    elastic: GangMembers | None = None

    def gang(self, role: GangRole) -> GangMembers | None:
        """Return the gang of this role."""
        return {"prefill": self.prefill, "decode": self.decode, "elastic": self.elastic}[role]


@dataclass(frozen=True, kw_only=True)
class Census:
    """Gangs of all rollouts, as one rollout asks for them."""

    begun: frozenset[GangRole]
    """Roles of which this rollout has a gang, complete or in the middle of its start."""
    outdated: tuple[str, ...]
    """Ids of living gangs of former rollouts."""
    settled: bool
    """False if the directory has just been started, and does not know all living gangs yet."""


class Directory(Protocol):
    """Answers when the view of one rollout has changed."""

    async def wait_change(self, version: int) -> tuple[int, ClusterView]:
        """Wait until the view is newer than `version`; return its version and the view.

        Version -1 is older than every view. An implementation may return early with the same
        version, as a long poll does at its time limit.
        """
        ...

    async def replace(self, gang_id: str) -> bool:
        """Have a gang ended, which cannot be reached or is outdated; return whether somebody
        does it."""
        ...

    async def census(self) -> Census:
        """Return what is known of gangs besides those that serve."""
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

    async def census(self) -> Census:
        """Return a census without former rollouts."""
        return Census(begun=frozenset(), outdated=(), settled=True)


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank, its gang, and the address of its RPC server."""

    role: GangRole
    gang_id: str
    world_size: int
    address: RankAddress
    rollout: int = 0
    """Number of the gang's rollout, larger than that of every former one. Only the router of the
    same rollout attaches to the gang."""
    incarnation: int = 0
    """Rank 0's number, larger than that of every gang which this one replaces; 0 for others."""
    replica: Any = None
    """Handle of its Ray actor, by which its process can be ended; None without Ray."""


LIVENESS_TIMEOUT_S = 30.0
"""Ten repetitions: a gang whose ranks registered longer ago is probably dead."""


class Membership:
    """Collects ranks into gangs.

    The newest complete gang of a role and a rollout counts, in whatever order gangs register: after
    a registry restart, the last ranks of a gang that is being torn down may come first, or last. A
    newer gang whose registrations stopped does not displace an older one.
    """

    def __init__(self) -> None:
        self._views: dict[int, ClusterView] = {}
        self._gangs: dict[str, _Gang] = {}

    def view(self, rollout: int | None = None) -> ClusterView:
        """Return the gangs that serve in a rollout; None is the newest that has any."""
        wanted = max(self._views, default=0) if rollout is None else rollout
        return self._views.get(wanted, ClusterView())

    def outdated(self, rollout: int, now: float) -> tuple[str, ...]:
        """Return the living gangs of former rollouts."""
        return tuple(
            gang_id
            for gang_id, gang in self._gangs.items()
            if gang.rollout < rollout and gang.alive(now)
        )

    def join(self, member: Member, now: float) -> bool:
        """Register a rank; return whether that changed the view of its rollout. Idempotent."""
        self._forget_rollouts(member.rollout, now)
        gang = self._gangs.setdefault(
            member.gang_id,
            _Gang(role=member.role, world_size=member.world_size, rollout=member.rollout),
        )
        rank = member.address.rank
        gang.ranks[rank], gang.registered_at[rank] = member.address, now
        gang.replicas[rank] = member.replica
        gang.incarnation = max(gang.incarnation, member.incarnation)
        return self._install(member, self._newest(member, now))

    def replicas(self, gang_id: str) -> tuple[Any, ...]:
        """Return handles of the Ray actors of a gang's ranks; none if the gang is unknown."""
        gang = self._gangs.get(gang_id)
        return () if gang is None else tuple(gang.replicas.values())

    def _forget_rollouts(self, besides: int, now: float) -> None:
        """Forget other rollouts of which no gang is alive."""
        living = {gang.rollout for gang in self._gangs.values() if gang.alive(now)} | {besides}
        for gang_id in [name for name, gang in self._gangs.items() if gang.rollout not in living]:
            del self._gangs[gang_id]
        for rollout in self._views.keys() - living:
            del self._views[rollout]

    def _newest(self, member: Member, now: float) -> GangMembers | None:
        complete = {
            gang_id: gang
            for gang_id, gang in self._gangs.items()
            if (gang.rollout, gang.role) == (member.rollout, member.role) and gang.complete
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

    def _install(self, member: Member, gang: GangMembers | None) -> bool:
        view = self.view(member.rollout)
        if gang == view.gang(member.role):
            return False
        self._views[member.rollout] = replace(view, **{member.role: gang})
        return True


@dataclass
class _Gang:
    """One gang, complete or not."""

    role: GangRole
    world_size: int
    rollout: int
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
