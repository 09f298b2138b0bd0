"""Bytes that the rings of context parallelism send in one layer, over all ranks (CP Tables 2-3).

=========  ====================================================================================
`ring_kv`  N - 1 times keys and values of an instance's tokens, to the next in the ring; history
           with them, or else queries that ask for it, and outputs and LSEs in return, whichever
           is less
`ring_q`   N - 1 times queries of an instance's new tokens, to the next in the ring; outputs and
           LSEs of others' queries that see anything, back to them
=========  ====================================================================================

Both add an instance's sum of the output projection, as for `ulysses`. The paper's Table 3 counts
one rank's bytes in one round, over all heads. Here they are the heads of each tensor-parallel rank,
whose KV heads repeat if there are fewer of them than ranks. New tokens are cut in zigzag (2N
chunks), history evenly; LSEs are fp32, one for each query head (the paper counts one a token).
"""

from __future__ import annotations

from collections.abc import Iterator

from csps.configurator.model.attention_shape import AttentionShape, head_shares
from csps.configurator.model.traffic import Traffic, instance_sums
from csps.protocols.core.topology import GroupShape


def ring_kv_traffic(
    shape: AttentionShape, group: GroupShape, tokens: int, history: int = 0
) -> Traffic:
    """Return pass-KV of `tokens` new tokens after `history`."""
    traffic = instance_sums(shape, group, tokens)
    for heads, kv_heads in _rank_heads(shape, group):
        width = 2 * kv_heads * shape.head_dim
        traffic += _around(group, tokens / group.sp * width)
        around = _around(group, history / group.sp * width)
        # Numbers, whatever their type: what the ranks compare, too.
        asked = tokens * (group.sp - 1) * heads * (2 * shape.head_dim + 1)
        if around.cost(1.0) < asked:
            traffic += around
        elif history:
            row = shape.head_dim + (shape.head_dim + 1) * shape.lse
            traffic += _among(group, tokens / group.sp * heads * row)
    return traffic


def ring_q_traffic(
    shape: AttentionShape, group: GroupShape, tokens: int, history: int = 0
) -> Traffic:
    """Return pass-Q of `tokens` new tokens after `history`."""
    traffic = instance_sums(shape, group, tokens)
    for heads, _ in _rank_heads(shape, group):
        traffic += _around(group, tokens / group.sp * heads * shape.head_dim)
        row = heads * (shape.head_dim + shape.lse)
        for asker, holder in _pairs(group):
            # Of an earlier member's keys both chunks see some, of a later one's the second alone.
            seen = 1.0 if history or holder < asker else 0.5
            traffic += _sent(group, holder, asker, tokens / group.sp * seen * row)
    return traffic


def _rank_heads(shape: AttentionShape, group: GroupShape) -> Iterator[tuple[int, int]]:
    """Yield query heads and KV heads of each of an instance's ranks."""
    for queries, keys in head_shares(shape.heads, shape.kv_heads, group.tp):
        yield len(queries), len(keys)


def _around(group: GroupShape, share: float) -> Traffic:
    """Return the traffic of N - 1 rounds in which everyone sends so much to the next."""
    traffic, size = Traffic(), group.sp
    for member in range(size if size > 1 else 0):
        traffic += _sent(group, member, (member + 1) % size, share * (size - 1))
    return traffic


def _among(group: GroupShape, share: float) -> Traffic:
    """Return the traffic of so much from everyone to everyone else."""
    traffic = Traffic()
    for sender, receiver in _pairs(group):
        traffic += _sent(group, sender, receiver, share)
    return traffic


def _pairs(group: GroupShape) -> Iterator[tuple[int, int]]:
    members = range(group.sp)
    return ((one, other) for one in members for other in members if one != other)


def _sent(group: GroupShape, sender: int, receiver: int, elements: float) -> Traffic:
    servers = group.instance_servers
    near = servers[sender] == servers[receiver]
    return Traffic(inside=elements) if near else Traffic(between=elements)
