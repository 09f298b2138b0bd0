"""Which instances a prompt will probably run on: a plan is made before the policy chooses them."""

from __future__ import annotations

from dataclasses import dataclass

from csps.configurator.csa_limits import ordered_topology
from csps.protocols.near_places import near_places
from csps.protocols.plans import PlanRequest
from csps.protocols.topology import Topology


@dataclass(frozen=True, kw_only=True)
class PartitionSizes:
    """How the policy cuts prompts, in tokens."""

    spt_tokens: int = 4096
    """Target length of a sequence partition (SPT): a longer prompt takes more instances."""
    short_tokens: int = 1024
    """Longest prompt that runs on one instance whatever `spt_tokens` says."""

    def expected(self, request: PlanRequest) -> Topology:
        """Where the prompt's instances would stand if all of them were idle and had room for an
        SPT: as many as there are SPTs, near each other as the policy chooses them. There must be a
        gang."""
        gang, tokens = ordered_topology(request).locations, request.prompt_tokens
        wanted = 1 if tokens <= self.short_tokens else -(-tokens // self.spt_tokens)
        group = near_places(dict.fromkeys(gang, 1), min(wanted, len(gang)))
        assert group is not None, "every place has room"
        return Topology(tuple(sorted(group)))


def even_spts(tokens: int, members: int) -> list[int]:
    """Tokens of each member, longer ones first, as the policy levels them."""
    return [tokens // members + (member < tokens % members) for member in range(members)]
