"""What exact attention sends in one layer, counted over all ranks, by strategy (CSPS §3.2.1-2).

Each formula counts what this engine puts on the wire for one whole prompt, cut evenly over the
group's instances (tests hold them to the bytes that its ranks count):

=====================  ==========================================================================
`ulysses`              q, k, v to the owners of the heads and outputs back, among ranks of equal
                       place in their instances; the instances' sum of the output projection
`gathered_weights`     the instances' attention weights; q, k, v to the owners of the heads and
                       outputs back, among all ranks; the instances' rows, which their MLP needs
`sp_tp`                all-gather of rows past those who have them; reduce-scatter of outputs; the
                       instances' rows
=====================  ==========================================================================

Not counted, as all send it alike: the MLP's sum over an instance (its weights stay sharded), KV on
its way to the decode gang, and the last layer, which is computed for single rows. Nor are the few
words with which a group's leader begins each layer. Where there are more ranks than heads, those
without heads are given no rows to compute with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from csps.configurator.shapes import AttentionShape, head_shares
from csps.protocols.group_shape import GroupShape


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Elements of the model's dtype that all ranks together send in one layer."""

    inside: float = 0.0
    """To ranks of the same server."""
    between: float = 0.0
    """To ranks of other servers."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(inside=self.inside + other.inside, between=self.between + other.between)

    def __mul__(self, times: float) -> Traffic:
        return Traffic(inside=self.inside * times, between=self.between * times)

    def cost(self, between_weight: float) -> float:
        """Elements, those between servers counted so many times."""
        return self.inside + between_weight * self.between


def ulysses_traffic(shape: AttentionShape, group: GroupShape, tokens: int) -> Traffic:
    """SP-NTP over instances, each of whose ranks has the instance's rows and its own heads."""
    traffic = instance_sums(shape, group, tokens)
    for queries, keys in head_shares(shape.heads, shape.kv_heads, group.tp):
        traffic += _head_exchange(shape, len(queries), len(keys), group.instance_servers, tokens)
    return traffic


def gathered_weights_traffic(shape: AttentionShape, group: GroupShape, tokens: int) -> Traffic:
    """SP-NTP over all ranks, each of which gathers the weights of all heads."""
    weights = shape.weights * (group.tp - 1) * group.sp
    return (
        Traffic(inside=weights)
        + _head_exchange(shape, shape.heads, shape.kv_heads, group.rank_servers, tokens)
        + _instance_rows(shape, group, tokens)
    )


def sp_tp_traffic(
    shape: AttentionShape, group: GroupShape, tokens: int, *, hierarchical: bool = True
) -> Traffic:
    """SP-TP over all ranks, sparse or not: what it drops it does not compute, but sends."""
    gather = _spread(shape, group, tokens, hierarchical=hierarchical, past_instance=True)
    reduce = _spread(shape, group, tokens, hierarchical=hierarchical, past_instance=False)
    return gather + reduce + _instance_rows(shape, group, tokens)


def instance_sums(shape: AttentionShape, group: GroupShape, tokens: int) -> Traffic:
    """The output projection's sum over each instance: 2 (tp-1) / tp a rank, as a ring sends."""
    return Traffic(inside=2 * tokens * shape.hidden * (group.tp - 1))


def _head_exchange(
    shape: AttentionShape, heads: int, kv_heads: int, servers: Sequence[int], tokens: int
) -> Traffic:
    """Everyone's queries, keys and values to the owners of the heads, and outputs back.

    Args:
        servers: of those who share the heads.
    """
    inside = between = 0.0
    shares = head_shares(heads, kv_heads, len(servers))
    for server, (queries, keys) in zip(servers, shares, strict=True):
        row = 2 * (len(queries) + len(keys)) * shape.head_dim * tokens / len(servers)
        near = servers.count(server) - 1
        inside += row * near
        between += row * (len(servers) - 1 - near)
    return Traffic(inside=inside, between=between)


def _spread(
    shape: AttentionShape,
    group: GroupShape,
    tokens: int,
    *,
    hierarchical: bool,
    past_instance: bool,
) -> Traffic:
    """Everyone's own part to all who compute, and not again to its instance if that has it; or, the
    other way round, their contributions to everyone's part."""
    takes = [bool(heads) for heads, _ in head_shares(shape.heads // group.tp, 1, group.sp)]
    takers = Counter[int]()
    for server, computes in zip(group.instance_servers, takes, strict=True):
        takers[server] += group.tp * computes
    inside = between = 0
    for server, computes in zip(group.instance_servers, takes, strict=True):
        spared = group.tp if past_instance else 1
        inside += takers[server] - spared * computes
        for number in (takers[other] for other in takers if other != server and takers[other]):
            between += 1 if hierarchical else number  # once into each other server
            inside += number - 1 if hierarchical else 0  # and from there on inside
    # Each instance is `tp` owners of an equal part of its rows.
    instance = tokens * shape.hidden / group.sp
    return Traffic(inside=instance * inside, between=instance * between)


def _instance_rows(shape: AttentionShape, group: GroupShape, tokens: int) -> Traffic:
    """Every rank's rows to the other ranks of its instance, for the MLP."""
    return Traffic(inside=tokens * shape.hidden * (group.tp - 1))
