"""A sequence-parallel group: the ordered instances that compute one prefill step.

Also the split of heads over its members, and the split of its rows over all of its ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from csps.actors.attention.base.dropped_mass import DroppedMassTally
from csps.actors.attention.base.yield_points import YieldPoints
from csps.actors.comm.layout import GangLayout, LocalChunk, computed_by
from csps.actors.comm.mesh import Mesh
from csps.actors.comm.row_collectives import MakeTree, RowShards, flat_tree
from csps.actors.timing.timeline import StepClock
from csps.protocols.core.placement import KvSlice, Span, even_share
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep


@dataclass(frozen=True)
class SpGroup:
    """The group of one step as seen by one member.

    Member i computes rows [bounds[i], bounds[i+1]) of the batch in *member order*. A member may
    have no rows and take part only because it stores history. In *batch order* the chunks follow
    each other; both orders are equal if the rows of the step are contiguous. Under tensor
    parallelism, the peers are the ranks of equal tp rank, and each set of peers has its own heads.
    """

    mesh: Mesh
    layout: GangLayout
    step: PrefillStep
    member: int
    clock: StepClock
    points: YieldPoints = field(default_factory=YieldPoints)
    """Yield points of the step: between two blocks of a long computation, outside of exchanges,
    and at least every few seconds on a CPU (`query_blocks`)."""
    cancelled: set[int] = field(default_factory=set)
    """Cancelled sequences of the step. The set grows between layers, at all members before the
    same layer. Their rows remain, because the bounds do, but their results are not used."""
    dropped_mass: DroppedMassTally = field(default_factory=DroppedMassTally)
    """Attention mass that the step's layers dropped, for the report of its end."""

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """Mesh ranks of the members, in the order of the group."""
        tp_rank = self.layout.tp_rank_of(self.mesh.rank)
        return tuple(self.layout.rank_of(instance, tp_rank) for instance in self.step.group)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.step.group)

    @property
    def others(self) -> Iterator[int]:
        """Indices of the other members."""
        return (index for index in range(self.size) if index != self.member)

    def rows_of(self, member: int) -> slice:
        """Return the rows that a member computes, in member order."""
        return slice(self.step.bounds[member], self.step.bounds[member + 1])

    @property
    def total_rows(self) -> int:
        """Tokens of the whole batch."""
        return self.step.bounds[-1]

    @cached_property
    def parts(self) -> tuple[tuple[LocalChunk, ...], ...]:
        """Parts of the chunks that each member computes."""
        return tuple(tuple(computed_by(self.step, member)) for member in range(self.size))

    @property
    def local(self) -> tuple[LocalChunk, ...]:
        """Parts of the chunks that this member computes."""
        return self.parts[self.member]

    def in_batch_order(self, x_Td: Tensor) -> Tensor:
        """Reorder all rows from member order to batch order."""
        return x_Td if self.step.contiguous else x_Td.index_select(0, self._orders(x_Td.device)[1])

    def in_member_order(self, x_Td: Tensor) -> Tensor:
        """Reorder all rows from batch order to member order."""
        return x_Td if self.step.contiguous else x_Td.index_select(0, self._orders(x_Td.device)[0])

    def _orders(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the batch row of each row in member order, and the inverse, on the device."""
        # Copied to the device once for all layers.
        if device not in self._order_by_device:
            starts = accumulate((chunk.length for chunk in self.step.chunks), initial=0)
            first = {
                chunk.sequence_id: start - chunk.start
                for chunk, start in zip(self.step.chunks, starts, strict=False)
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
        """Positions of this member's rows in their sequences, int64."""
        return span_positions([part.span for part in self.local])

    def is_active(self, chunk: PrefillChunk) -> bool:
        """Return True if the sequence of the chunk is not cancelled."""
        return chunk.sequence_id not in self.cancelled

    def last_row_of(self, chunk: PrefillChunk) -> tuple[int, int]:
        """Return the member that computes a chunk's last position, and its row there."""
        last = Span(chunk.start + chunk.length - 1, chunk.start + chunk.length)
        return next(
            (member, part.rows.start + part.span.rows_of(last).start)
            for member, parts in enumerate(self.parts)
            for part in parts
            if part.chunk is chunk and part.span.intersection(last).length
        )

    def holders_of(self, chunk: PrefillChunk, seen: Span) -> list[int]:
        """Return the members that hold KV of some positions: computed in this step, or history."""
        return [
            member
            for member, parts in enumerate(self.parts)
            if any(
                span.intersection(seen).length
                for span in (
                    *self.history_of(chunk, member),
                    *(part.span for part in parts if part.chunk is chunk),
                )
            )
        ]

    def history_of(self, chunk: PrefillChunk, member: int) -> tuple[Span, ...]:
        """Return the spans of a chunk's history that a member holds, in the order of sending."""
        return spans_on(chunk.history, self.step.group[member])


def spans_on(slices: Sequence[KvSlice], instance: int) -> tuple[Span, ...]:
    """Return the spans of the slices on one instance."""
    return tuple(kv_slice.span for kv_slice in slices if kv_slice.instance == instance)


def span_positions(spans: Sequence[Span]) -> Tensor:
    """Return the positions of several spans, one after the other, int64."""
    ranges = [torch.arange(span.start, span.stop, span.step) for span in spans]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class HeadSplit:
    """Split of query heads over members, and the KV heads that these read.

    Numbers of query heads differ by at most one. Every member gets the KV heads that its query
    heads read, so KV heads are replicated if there are fewer of them than members.
    """

    heads: int
    kv_heads: int
    parts: int

    def queries(self, part: int) -> slice:
        """Return the query heads of a member; none if there are fewer heads than members."""
        heads = even_share(self.heads, self.parts, part)
        return slice(heads.start, heads.stop)

    def keys(self, part: int) -> slice:
        """Return the KV heads that a member's query heads read."""
        queries, group = self.queries(part), self.heads // self.kv_heads
        if queries.start == queries.stop:
            return slice(0, 0)
        return slice(queries.start // group, (queries.stop - 1) // group + 1)

    def query_count(self, part: int) -> int:
        """Return the number of a member's query heads."""
        return len(even_share(self.heads, self.parts, part))

    def key_count(self, part: int) -> int:
        """Return the number of KV heads that a member's query heads read."""
        keys = self.keys(part)
        return int(keys.stop - keys.start)

    def uniform_runs(self, part: int) -> list[tuple[slice, slice]]:
        """Split a member's heads into (query heads, KV heads), equally many queries per KV head.

        Heads are numbered from the member's first.
        """
        # An uneven split may give a member, say, two query heads of one KV head and one of the
        # next. Grouped-query attention cannot compute these in one call.
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


def query_groups(heads: int, kv_heads: int, most: int) -> set[int]:
    """Return how many query heads of a KV head a call may have, if up to `most` members split the
    heads."""
    splits = (HeadSplit(heads=heads, kv_heads=kv_heads, parts=parts + 1) for parts in range(most))
    return {
        (queries.stop - queries.start) // (keys.stop - keys.start)
        for split in splits
        for part in range(split.parts)
        for queries, keys in split.uniform_runs(part)
    }


def uniform_heads(heads: range, group: int) -> list[tuple[range, range]]:
    """Split query heads into (query heads, KV heads) with equally many queries per KV head.

    Args:
        group: query heads of a KV head in the whole model.
    """
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
    """Split the rows of every instance over its ranks, which have all of them.

    Args:
        servers: server of each instance of the group; all ranks of an instance are on one.
        computing: by instance, True if its ranks compute rows of others.
    """
    tp = group.layout.tp
    members = [(index, tp_rank) for index in range(group.size) for tp_rank in range(tp)]
    return RowShards(
        mesh=group.mesh,
        ranks=tuple(group.layout.rank_of(group.step.group[i], t) for i, t in members),
        bounds=(0, *(_stop(group, i, t) for i, t in members)),
        servers=tuple(servers[index] for index, _ in members),
        takers=tuple(member for member, (i, _) in enumerate(members) if computing[i]),
        tree=tree,
        replicas=tuple(index for index, _ in members),
    )


def instance_shards(group: SpGroup) -> RowShards:
    """Split the rows of this rank's instance over its ranks, numbered from its first row."""
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
