"""Which ranks make up the gangs that serve now: a plain class, no clock, no cluster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from csps.protocols.gang_members import GangMembers, GangRole, RankAddress
from csps.services.cluster.directory import ClusterView

SILENT_S = 30.0
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
    heard: dict[int, float] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.ranks) == self.world_size

    def lives(self, now: float) -> bool:
        return now - min(self.heard.values()) <= SILENT_S


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
        gang.ranks[rank], gang.heard[rank] = member.address, now
        gang.incarnation = max(gang.incarnation, member.incarnation)
        return self._install(member.role, self._newest(member.role, now))

    def _newest(self, role: GangRole, now: float) -> GangMembers | None:
        complete = {it: gang for it, gang in self._gangs.items() if gang.role == role}
        complete = {it: gang for it, gang in complete.items() if gang.complete}
        living = {it: gang for it, gang in complete.items() if gang.lives(now)}
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
