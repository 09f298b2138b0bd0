"""SP-NTP or SP-TP: which moves less per layer (CSPS §3.2.2, App. A).

Three formulas, each of which says what it counts:

- `paper_prefers_ntp` is App. A to the letter: attention only, as many KV heads as query heads. Its
  text has SP-NTP always win at N = 2, its inequality never.
- `attention_prefers_ntp` is App. A for grouped-query attention. Keys and values, and their weights,
  are kappa = KV heads / query heads as large as queries.
- `ntp_traffic` and `sp_tp_traffic` count what this engine sends, which `choose_strategy` goes by.
  Besides attention they count the rows of an instance that each of its tensor-parallel ranks
  needs for the MLP. SP-NTP has to gather them; App. A leaves them out, while in SP-TP they
  come with the all-gather that is counted anyway.

None counts the MLP's weights (3 x hidden x intermediate): they stay sharded. Its sum over the
tensor-parallel ranks is alike in both and left out too, as is the transfer of KV to the pool, which
neither needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Architecture = Literal["sp_ntp", "sp_tp"]


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The sizes of a model's attention."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if min(self.hidden, self.heads, self.kv_heads, self.head_dim) < 1:
            raise ValueError(f"sizes of attention start at 1: {self}")

    @property
    def width(self) -> int:
        """Of the queries of one token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Of the keys of one token, or of the values."""
        return self.kv_heads * self.head_dim

    @property
    def weights(self) -> int:
        """Of a layer's four projections."""
        return 2 * self.hidden * (self.width + self.kv_width)


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """A group of instances of `tp` ranks; an instance's ranks share a server."""

    servers: tuple[int, ...]
    """Of each instance, by any numbers."""
    tp: int

    def __post_init__(self) -> None:
        if not self.servers or self.tp < 1:
            raise ValueError(f"a group has at least one instance and rank: {self}")

    @property
    def ranks(self) -> int:
        """All ranks: the paper's N."""
        return len(self.servers) * self.tp

    @property
    def server_sizes(self) -> list[int]:
        """Ranks of the group on each server."""
        return [self.servers.count(server) * self.tp for server in sorted(set(self.servers))]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Elements that all ranks together send in one layer."""

    inside: float = 0.0
    """To ranks of the same server."""
    between: float = 0.0
    """To ranks of other servers."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(inside=self.inside + other.inside, between=self.between + other.between)

    def cost(self, between_weight: float) -> float:
        """Elements, those between servers counted so many times."""
        return self.inside + between_weight * self.between


def paper_prefers_ntp(*, hidden: int, tokens: int, ranks: int) -> bool:
    """(4d² + 4Ld/N)(N-1) < 2Ld(N-1), that is d/L < (1 - 2/N)/2."""
    # Both sides times L N / d: whole numbers, so that the threshold itself is exact.
    return 2 * hidden * ranks < tokens * (ranks - 2)


def attention_prefers_ntp(
    *, hidden: int, tokens: int, ranks: int, heads: int, kv_heads: int
) -> bool:
    """(1 + kappa)(d + L/N) < L: weights and both all-to-alls against gather and scatter."""
    return (heads + kv_heads) * (hidden * ranks + tokens) < tokens * ranks * heads


def ntp_traffic(shape: AttentionShape, group: GroupShape, tokens: int) -> Traffic:
    """SP-NTP over all ranks: weights inside instances, two all-to-alls, the instances' rows.

    Even shards, and heads that the ranks divide. KV heads that several ranks read are sent to
    each of them.
    """
    weights = shape.weights * (group.tp - 1) * len(group.servers)
    kv_copies = max(shape.kv_heads, group.ranks) / shape.kv_heads
    row = 2 * shape.width + 2 * shape.kv_width * kv_copies
    return (
        Traffic(inside=weights)
        + _all_to_all(group, tokens * row)
        + _instance_rows(shape, group, tokens)
    )


def sp_tp_traffic(
    shape: AttentionShape, group: GroupShape, tokens: int, *, hierarchical: bool = True
) -> Traffic:
    """SP-TP over all ranks: all-gather, reduce-scatter, the instances' rows."""
    elements = tokens * shape.hidden
    gather = _spread(group, elements, hierarchical=hierarchical, past_instance=True)
    reduce = _spread(group, elements, hierarchical=hierarchical, past_instance=False)
    return gather + reduce + _instance_rows(shape, group, tokens)


def choose_strategy(
    shape: AttentionShape,
    group: GroupShape,
    tokens: int,
    *,
    hierarchical: bool = True,
    between_weight: float = 1.0,
) -> Architecture:
    """What moves less for one request, SP-NTP where they are equal.

    Args:
        tokens: of the request's prompt.
        between_weight: how much longer an element takes between servers than inside one; 1
            counts as App. A does.

    Raises:
        ValueError: a weight or a number of tokens below 1.
    """
    if tokens < 1 or between_weight < 1:
        raise ValueError(f"{tokens} tokens, weight {between_weight}: allowed are 1 and more")
    ntp = ntp_traffic(shape, group, tokens)
    sp_tp = sp_tp_traffic(shape, group, tokens, hierarchical=hierarchical)
    return "sp_ntp" if ntp.cost(between_weight) <= sp_tp.cost(between_weight) else "sp_tp"


def _all_to_all(group: GroupShape, elements: float) -> Traffic:
    """Everyone sends everyone an equal part of its own."""
    pair = elements / group.ranks**2
    near = sum(size * (size - 1) for size in group.server_sizes)
    far = sum(size * (group.ranks - size) for size in group.server_sizes)
    return Traffic(inside=pair * near, between=pair * far)


def _spread(
    group: GroupShape, elements: float, *, hierarchical: bool, past_instance: bool
) -> Traffic:
    """Everyone's own part to all others, and not again to its instance if that has it; or, the
    other way round, everyone's contribution to all others' parts."""
    own, servers = elements / group.ranks, group.server_sizes
    spared = group.tp - 1 if past_instance else 0
    near = sum(size * (size - 1 - spared) for size in servers)
    if not hierarchical:
        far = sum(size * (group.ranks - size) for size in servers)
        return Traffic(inside=own * near, between=own * far)
    # Once into each other server, and from there on inside.
    far = group.ranks * (len(servers) - 1)
    near += sum(size * (group.ranks - size - (len(servers) - 1)) for size in servers)
    return Traffic(inside=own * near, between=own * far)


def _instance_rows(shape: AttentionShape, group: GroupShape, tokens: int) -> Traffic:
    """Every rank's rows to the other ranks of its instance, for the MLP."""
    return Traffic(inside=tokens * shape.hidden * (group.tp - 1))
