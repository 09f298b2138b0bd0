"""Which ranks make up the gangs that serve now: a plain class, no clock, no cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace

from csps.protocols.gang_members import GangMembers, GangRole, RankAddress
from csps.services.directory import ClusterView


@dataclass(frozen=True, kw_only=True)
class Member:
    """One rank, the gang it belongs to, and where its RPC server listens."""

    role: GangRole
    gang_id: str
    world_size: int
    address: RankAddress


class Membership:
    """Collects ranks into gangs.

    A gang counts once it is complete, and replaces the one before it. A replaced gang never comes
    back: what its last ranks still say, while the cluster tears them down, is ignored.
    """

    def __init__(self) -> None:
        self.view = ClusterView()
        self._ranks: dict[str, dict[int, RankAddress]] = {}
        self._replaced: set[str] = set()

    def join(self, member: Member) -> bool:
        """Take a rank in; True if that changed `view`. Joining twice is the same as once."""
        if member.gang_id in self._replaced:
            return False
        ranks = self._ranks.setdefault(member.gang_id, {})
        ranks[member.address.rank] = member.address
        if len(ranks) < member.world_size:
            return False
        return self._install(member.role, _gang(member.gang_id, ranks))

    def _install(self, role: GangRole, gang: GangMembers) -> bool:
        current = self.view.gang(role)
        if current == gang:
            return False
        if current is not None and current.gang_id != gang.gang_id:
            self._replaced.add(current.gang_id)
            del self._ranks[current.gang_id]
        self.view = (
            replace(self.view, prefill=gang)
            if role == "prefill"
            else replace(self.view, decode=gang)
        )
        return True


def _gang(gang_id: str, ranks: dict[int, RankAddress]) -> GangMembers:
    return GangMembers(gang_id=gang_id, ranks=tuple(ranks[rank] for rank in sorted(ranks)))
