"""A sequence-parallel group: an ordered list of instances working on one prefill job.

A job's rows sharded over all ranks of its group, tensor-parallel ones included.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from csps.actors.attention.base.yield_points import YieldPoints
from csps.actors.comm.layout import GangLayout, LocalChunk, computed_by
from csps.actors.comm.mesh import Mesh
from csps.actors.comm.row_collectives import MakeTree, RowShards, flat_tree
from csps.actors.timing.timeline import StepClock
from csps.protocols.core.placement import KvSlice, Span, even_share
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep


@dataclass(frozen=True)
class SpGroup:
    """One job's group as seen by one member.

    Member i computes rows [bounds[i], bounds[i+1]) of the batch in *member order*; a member may
    have no rows and take part only because it holds history. In *batch order* the pieces are laid
    end to end, which is the same if the job's rows are contiguous. Under tensor parallelism the
    peers are the ranks of equal tp rank, each group of peers working on its own share of the heads.
    """

    mesh: Mesh
    layout: GangLayout
    step: PrefillStep
    member: int
    clock: StepClock
    points: YieldPoints = field(default_factory=YieldPoints)
    """Where the job may stand still: passed between two blocks of a long computation, outside of
    exchanges, on a CPU every few seconds at least (`query_blocks`)."""
    cancelled: set[int] = field(default_factory=set)
    """The job's requests that nobody wants any more; grows between layers, at all members before
    the same one. Their rows stay, because bounds do, but what is computed of them is of no use."""

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """Mesh ranks of the members, in the order of the sequence."""
        tp_rank = self.layout.tp_rank_of(self.mesh.rank)
        return tuple(self.layout.rank_of(instance, tp_rank) for instance in self.step.group)

    @property
    def size(self) -> int:
        """Members of the group."""
        return len(self.step.group)

    @property
    def others(self) -> Iterator[int]:
        """Indices of the other members."""
        return (index for index in range(self.size) if index != self.member)

    def rows_of(self, member: int) -> slice:
        """Rows that a member computes, in member order."""
        return slice(self.step.bounds[member], self.step.bounds[member + 1])

    @property
    def total_rows(self) -> int:
        """Tokens of the whole batch."""
        return self.step.bounds[-1]

    @cached_property
    def parts(self) -> tuple[tuple[LocalChunk, ...], ...]:
        """By member, its parts of the pieces."""
        return tuple(tuple(computed_by(self.step, member)) for member in range(self.size))

    @property
    def local(self) -> tuple[LocalChunk, ...]:
        """This member's parts of the pieces."""
        return self.parts[self.member]

    def in_batch_order(self, x_Td: Tensor) -> Tensor:
        """All rows, which are in member order."""
        return x_Td if self.step.contiguous else x_Td.index_select(0, self._orders(x_Td.device)[1])

    def in_member_order(self, x_Td: Tensor) -> Tensor:
        """All rows, which are in batch order."""
        return x_Td if self.step.contiguous else x_Td.index_select(0, self._orders(x_Td.device)[0])

    def _orders(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The batch's row at each place in member order, and the other way round; moved to the
        device once for all layers."""
        if device not in self._order_by_device:
            starts = accumulate((chunk.length for chunk in self.step.chunks), initial=0)
            first = {
                it.sequence_id: at - it.start
                for it, at in zip(self.step.chunks, starts, strict=False)
            }
            rows = [
                span_positions([part.span]) + first[part.chunk.sequence_id]
                for parts in self.parts
                for part in parts
            ]
            batch_T = torch.cat(rows)
            self._order_by_device[device] = batch_T.to(device), batch_T.argsort().to(device)
        return self._order_by_device[device]

    @cached_property
    def _order_by_device(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    @cached_property
    def positions(self) -> Tensor:
        """True positions of this member's rows, int64."""
        return span_positions([part.span for part in self.local])

    def wanted(self, chunk: PrefillChunk) -> bool:
        """Whether a piece's attention has to be right."""
        return chunk.sequence_id not in self.cancelled

    def last_row_of(self, chunk: PrefillChunk) -> tuple[int, int]:
        """Which member computes a piece's last position, and in which of its rows."""
        last = Span(chunk.start + chunk.length - 1, chunk.start + chunk.length)
        return next(
            (member, part.rows.start + part.span.rows_of(last).start)
            for member, parts in enumerate(self.parts)
            for part in parts
            if part.chunk is chunk and part.span.intersection(last).length
        )

    def holders_of(self, chunk: PrefillChunk) -> list[int]:
        """Members that hold KV of a piece: computed in this job, or as history."""
        return [
            member
            for member, parts in enumerate(self.parts)
            if self.history_of(chunk, member) or any(part.chunk is chunk for part in parts)
        ]

    def history_of(self, chunk: PrefillChunk, member: int) -> tuple[Span, ...]:
        """The spans of a piece's history that a member holds, in the order they are sent."""
        return spans_on(chunk.history, self.step.group[member])


def spans_on(slices: Sequence[KvSlice], instance: int) -> tuple[Span, ...]:
    """The spans that lie on one instance."""
    return tuple(share.span for share in slices if share.instance == instance)


def span_positions(spans: Sequence[Span]) -> Tensor:
    """The positions of several spans, one after the other, int64."""
    ranges = [torch.arange(span.start, span.stop, span.step) for span in spans]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class HeadSplit:
    """Which query heads a member owns, and which KV heads those read.

    Query heads are split evenly, give or take one; a KV head goes to every member one of whose
    query heads reads it, so KV heads are replicated when there are fewer of them than members.
    """

    heads: int
    kv_heads: int
    parts: int

    def queries(self, part: int) -> slice:
        """Query heads of a member; empty when there are fewer heads than members."""
        share = even_share(self.heads, self.parts, part)
        return slice(share.start, share.stop)

    def keys(self, part: int) -> slice:
        """KV heads that the member's query heads read."""
        share, group = self.queries(part), self.heads // self.kv_heads
        if share.start == share.stop:
            return slice(0, 0)
        return slice(share.start // group, (share.stop - 1) // group + 1)

    def query_count(self, part: int) -> int:
        """Number of a member's query heads."""
        return len(even_share(self.heads, self.parts, part))

    def key_count(self, part: int) -> int:
        """Number of KV heads that the member's query heads read."""
        keys = self.keys(part)
        return int(keys.stop - keys.start)

    def uniform_runs(self, part: int) -> list[tuple[slice, slice]]:
        """Local (query heads, KV heads) pairs in which every KV head serves equally many queries.

        An uneven split may leave a member with, say, two query heads of one KV head and one of
        the next: grouped-query attention cannot run those in one call.
        """
        own, kv = self.queries(part), self.keys(part)
        return [
            (
                slice(queries.start - own.start, queries.stop - own.start),
                slice(keys.start - kv.start, keys.stop - kv.start),
            )
            for queries, keys in uniform_heads(
                range(own.start, own.stop), self.heads // self.kv_heads
            )
        ]


def uniform_heads(heads: range, group: int) -> list[tuple[range, range]]:
    """(query heads, KV heads that they read) in which every KV head serves equally many queries;
    a KV head serves `group` query heads of the whole."""
    if not heads:
        return []
    keys = range(heads.start // group, (heads.stop - 1) // group + 1)
    aligned = heads.start % group == 0 and heads.stop % group == 0
    if aligned or len(keys) == 1:
        return [(heads, keys)]
    return [
        (
            range(max(heads.start, key * group), min(heads.stop, (key + 1) * group)),
            range(key, key + 1),
        )
        for key in keys
    ]


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
        ranks=tuple(group.layout.rank_of(group.step.group[i], t) for i, t in places),
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
        ranks=tuple(group.layout.ranks_of(group.step.group[group.member])),
        bounds=(0, *(even_share(length, tp, t).stop for t in range(tp))),
        servers=(0,) * tp,
        takers=tuple(range(tp)),
        tree=flat_tree,
        replicas=tuple(range(tp)),
    )


def _stop(group: SpGroup, index: int, tp_rank: int) -> int:
    rows = group.rows_of(index)
    return int(rows.start) + even_share(rows.stop - rows.start, group.layout.tp, tp_rank).stop
