"""Which share of a prompt's pairs of tokens meets at which level: what sparse attention may drop.

Pairs that a level may drop are half of all with 2 instances and 94 % with 16, so that the loss of
accuracy depends on the shape of the group as much as on the ratios; the paper's F_Ad leaves it out.
"""

from __future__ import annotations

from collections.abc import Sequence

from csps.protocols.topology import Topology


def pairs_by_level(locations: Sequence[str], levels: int) -> tuple[float, ...]:
    """Share of the causal pairs of a long prompt, cut evenly, that meets at levels 1, 2, …

    Raises:
        ConfigError: more levels than the locations tell apart.
    """
    members = len(locations)
    shares, nearer = [], 0.0
    for segments in Topology.of(locations).levels(levels):
        within = sum(len(segment) ** 2 for segment in segments) / members**2
        shares.append(within - nearer)
        nearer = within
    return tuple(shares)


def eligible_pairs(locations: Sequence[str], levels: int) -> float:
    """Share that is not of level 1."""
    return 1.0 - pairs_by_level(locations, levels)[0]
