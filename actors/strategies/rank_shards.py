"""A job's rows sharded over all ranks of its group, tensor-parallel ones included."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from csps.actors.collectives.row_shards import RowShards
from csps.actors.collectives.row_tree import MakeTree, flat_tree
from csps.actors.strategies.group import SpGroup
from csps.protocols.even_share import even_share


def rank_shards(
    group: SpGroup, *, servers: Sequence[Hashable], computing: Sequence[bool], tree: MakeTree
) -> RowShards:
    """Every instance's rows, cut once more over its ranks, which hold all of them.

    Args:
        servers: of each instance of the group; its ranks share one.
        computing: whether an instance's ranks take rows of others.
    """
    tp = group.layout.tp
    places = [(index, tp_rank) for index in range(group.size) for tp_rank in range(tp)]
    return RowShards(
        mesh=group.mesh,
        ranks=tuple(group.layout.rank_of(group.job.group[i], t) for i, t in places),
        bounds=(0, *(_stop(group, i, t) for i, t in places)),
        servers=tuple(servers[index] for index, _ in places),
        takers=tuple(member for member, (i, _) in enumerate(places) if computing[i]),
        tree=tree,
        replicas=tuple(index for index, _ in places),
    )


def instance_shards(group: SpGroup) -> RowShards:
    """The rows of this rank's own instance over its ranks, numbered from its first row."""
    tp, rows = group.layout.tp, group.rows_of(group.member)
    length = rows.stop - rows.start
    return RowShards(
        mesh=group.mesh,
        ranks=tuple(group.layout.ranks_of(group.job.group[group.member])),
        bounds=(0, *(even_share(length, tp, t).stop for t in range(tp))),
        servers=(0,) * tp,
        takers=tuple(range(tp)),
        tree=flat_tree,
        replicas=tuple(range(tp)),
    )


def _stop(group: SpGroup, index: int, tp_rank: int) -> int:
    rows = group.rows_of(index)
    return int(rows.start) + even_share(rows.stop - rows.start, group.layout.tp, tp_rank).stop
