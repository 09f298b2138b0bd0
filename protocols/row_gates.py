"""By which way a member's rows reach other servers in SP-TP: ranks send so, and the configurator
counts and simulates so (CSPS §3.2.4, hierarchical all-gather and reduce-scatter)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def gates(owner: int, servers: Sequence[Hashable], takers: Sequence[int]) -> dict[int, int]:
    """From whom each taker gets an owner's rows, and to whom its sums go. Inside the owner's server
    that is the owner; every other server has one gate, from which the others there get them.

    The paper first collects a server's rows in one GPU, which then sends for all. Here each owner
    sends to a gate of its own: as many bytes between servers, but no GPU waits for the collection
    and all network cards of a server share the work.

    Args:
        servers: of all members; `takers` are those that want the rows.
    """
    parents: dict[int, int] = {}
    place = servers[: owner + 1].count(servers[owner]) - 1
    for member in takers:
        inside = [peer for peer in takers if servers[peer] == servers[member]]
        gate = owner if servers[member] == servers[owner] else inside[place % len(inside)]
        parents[member] = gate if member != gate else owner
    parents.pop(owner, None)
    return parents
