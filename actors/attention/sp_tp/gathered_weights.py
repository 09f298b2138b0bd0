"""A tensor-parallel instance's attention weights, gathered layer by layer (CSPS App. A).

Every rank gets the shards of its instance's other ranks; inside a server that is where the fast
links are. The next layer's shards travel while the present one computes.

SP-NTP on a tensor-parallel deployment (CSPS §3.2.2, App. A).

    attention weights of the layer, all heads  <--all-gather-- shards of the instance's ranks,
                                                 one layer ahead of the computing
    q, k, v of own rows, all heads  --first exchange-->  all rows, own heads
    attention over the whole batch
    outputs of all rows, own heads  --second exchange--> own rows, all heads
    output projection of own rows   --all-gather-->      rows of the instance

The rows are sharded over all ranks of the job's instances. The MLP's weights stay sharded: they
are several times as many as attention's, and would have to be gathered for each layer as well. So
the MLP wants what it always does on a tensor-parallel instance, all of the instance's rows on each
of its ranks, which the last all-gather provides; the sum over the instance after the MLP then
leaves them there for the next layer. To scatter that sum and gather before the MLP would move the
same bytes; to scatter it and not gather at all is only possible without a sharded MLP.

KV stays where its rows lie, each rank holding its KV heads of the instance's rows. They are
computed from rows and weights that the rank has, which repeats the KV projection once.

Shapes: t rows of the instance, s own shard of them, T rows of the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import HeadSplit, SpGroup, instance_shards, rank_shards
from csps.actors.attention.base.history import History, HistoryMember, rows_by_chunk, through
from csps.actors.attention.base.strategy import StoreKv, WithTransfers
from csps.actors.attention.sp_tp.head_attention import HeadBlock, RowAttention
from csps.actors.comm.mesh import Tag
from csps.actors.comm.row_collectives import all_gather, flat_tree
from csps.actors.comm.transfers import Label, PendingTransfer, Transfers
from csps.models.network.network import Layer
from csps.models.network.rope import Rotary
from csps.models.network.spec import ModelSpec, kv_head_range, tp_shard_of


@dataclass(frozen=True)
class _UnderWay:
    """One layer's weights, complete when the transfer is."""

    transfer: PendingTransfer
    qkv: Tensor
    bias: Tensor | None
    outputs: tuple[Tensor, ...]
    """Columns of each tensor-parallel rank."""


class GatheredLayers:
    """Layers whose attention has all heads; their MLP stays what it is on this rank.

    All ranks of an instance must ask for the same layers in the same order.
    """

    def __init__(self, engine: Engine, transfers: Transfers) -> None:
        self._engine = engine
        self._transfers = transfers
        self._tp_shards = [
            tp_shard_of(engine.spec, tp_rank, engine.layout.tp)
            for tp_rank in range(engine.layout.tp)
        ]
        self._under_way: dict[int, _UnderWay] = {}

    def prefetch(self, index: int) -> None:
        """Let a layer's weights travel; harmless if they do already."""
        if index not in self._under_way:
            self._under_way[index] = self._start(index)

    def layer(self, index: int) -> Layer:
        """The layer with all heads and without a sum over the instance; frees the prefetch."""
        self.prefetch(index)
        coming = self._under_way.pop(index)
        self._transfers.wait(coming.transfer)
        spec, layer = self._engine.spec, self._engine.network.layers[index]
        whole = replace(layer.shard, query_heads=range(spec.heads), kv_heads=range(spec.kv_heads))
        weights = replace(
            layer.weights,
            qkv=coming.qkv,
            qkv_bias=coming.bias,
            output=torch.cat(coming.outputs, dim=1),
        )
        return replace(layer, shard=whole, weights=weights, all_reduce=None)

    def _start(self, index: int) -> _UnderWay:
        weights = self._engine.network.layers[index].weights
        qkv, bias = self._room(weights.qkv), None
        fused = [(weights.qkv, qkv)]
        if weights.qkv_bias is not None:
            bias = self._room(weights.qkv_bias)
            fused.append((weights.qkv_bias, bias))
        ranks, own = range(len(self._tp_shards)), self._engine.tp_rank
        outputs = [weights.output if t == own else weights.output.new_empty(0) for t in ranks]
        sends, recvs = [], []
        for tp_rank in (t for t in ranks if t != own):
            peer = self._engine.layout.rank_of(self._engine.instance, tp_rank)
            outputs[tp_rank] = torch.empty_like(weights.output)
            for shard, whole in fused:
                sends += [(peer, shard[here]) for here, _ in self._runs(own)]
                recvs += [(peer, whole[there]) for _, there in self._runs(tp_rank)]
            sends.append((peer, weights.output))
            recvs.append((peer, outputs[tp_rank]))
        label = Label(phase="all-gather", layer=index)
        transfer = self._transfers.start(sends, recvs, Tag.WEIGHTS, label)
        for shard, whole in fused:
            for here, there in self._runs(own):
                whole[there] = shard[here]
        return _UnderWay(transfer, qkv, bias, tuple(outputs))

    def _room(self, shard: Tensor) -> Tensor:
        """For the fused rows of all heads."""
        spec = self._engine.spec
        return shard.new_empty((spec.heads + 2 * spec.kv_heads) * spec.head_dim, *shard.shape[1:])

    def _runs(self, tp_rank: int) -> Iterator[tuple[slice, slice]]:
        """Rows of a rank's fused shard, and where they belong among those of all heads. A KV head
        that several ranks have comes from the first of them."""
        spec, shard = self._engine.spec, self._tp_shards[tp_rank]
        yield _run(spec, 0, shard.query_heads, 0)
        if any(shard.kv_heads[0] in other.kv_heads for other in self._tp_shards[:tp_rank]):
            return
        local = len(shard.query_heads)
        yield _run(spec, local, shard.kv_heads, spec.heads)
        yield _run(spec, local + len(shard.kv_heads), shard.kv_heads, spec.heads + spec.kv_heads)


def _run(spec: ModelSpec, begin: int, heads: range, base: int) -> tuple[slice, slice]:
    """Neighbouring heads that begin at head `begin` of the shard and after `base` in the whole."""
    dim, count = spec.head_dim, len(heads)
    there = base + heads.start
    return slice(begin * dim, (begin + count) * dim), slice(there * dim, (there + count) * dim)


class GatheredWeights(WithTransfers):
    """Exact attention of one job; one object per job and rank, entered for the job's duration."""

    def __init__(self, group: SpGroup, engine: Engine) -> None:
        super().__init__(group)
        self._group = group
        self._engine = engine
        everyone = [True] * group.size
        self._shards = rank_shards(
            group, servers=[0] * group.size, computing=everyone, tree=flat_tree
        )
        spec = engine.spec
        self._split = HeadSplit(
            heads=spec.heads, kv_heads=spec.kv_heads, parts=len(self._shards.ranks)
        )
        self._history = History(
            group,
            engine.pool,
            self._members(),
            group_heads=spec.heads // spec.kv_heads,
            scale=spec.scale,
            begin=through(self._transfers),
        )
        self._layers = GatheredLayers(engine, self._transfers)

    def offered(self, layer: int, member: int) -> Collection[int]:
        """See `Strategy`: a rank sees all rows, but mostly of a share of the KV heads, and under
        tensor parallelism rarely of those that its pool has."""
        keys = self._split.keys(member * self._engine.layout.tp + self._engine.tp_rank)
        resident = self._engine.kv_heads
        if not keys.start <= resident.start < resident.stop <= keys.stop:
            return ()
        return [other for other in range(self._group.size) if other != member]

    def attend_layer(
        self, index: int, layer: Layer, x_td: Tensor, rotary: Rotary, store: StoreKv
    ) -> Tensor:
        """See `Strategy`."""
        whole = self._layers.layer(index)
        # The last layer is computed by rows and wants no strategy: nothing to fetch for it.
        if index + 2 < self._engine.spec.layers:
            self._layers.prefetch(index + 1)
        timeline, own = self._group.clock.timeline, self._own_rows()
        with timeline.phase("qkv", layer=index):
            own_kv = layer.keys_and_values(x_td, rotary)
        store(index, *own_kv)
        with timeline.phase("qkv", layer=index):
            q_shd, k_sgd, v_sgd = whole.qkv(x_td[own], rotary[own])
        out_shd = self._attend(index, q_shd, k_sgd, v_sgd, store)
        with timeline.phase("linear", layer=index):
            x_sd = whole.attention_output(x_td[own], out_shd)
        return all_gather(instance_shards(self._group), x_sd, self._transfers)

    def _own_rows(self) -> slice:
        """Of this rank, among the instance's."""
        first = self._shards.bounds[self._shards.member - self._engine.tp_rank]
        rows = self._shards.rows_of(self._shards.member)
        return slice(rows.start - first, rows.stop - first)

    # --- attention -----------------------------------------------------------------------------

    def _attend(
        self, index: int, q_shd: Tensor, k_sgd: Tensor, v_sgd: Tensor, store: StoreKv
    ) -> Tensor:
        """Attention output of own rows, all heads, in q's dtype."""
        member = self._shards.member
        heads, kv_heads = self._split.query_count(member), self._split.key_count(member)
        rows = self._first_exchange(index, q_shd, k_sgd, v_sgd)
        for other in self.offered(index, self._group.member):
            self._store_others(index, other, rows[self._group.rows_of(other), heads:], store)
        rows = self._group.in_batch_order(rows)
        attention = RowAttention(
            self._group.step.chunks,
            [HeadBlock(*run) for run in self._split.uniform_runs(member)],
            *rows.split_with_sizes((heads, kv_heads, kv_heads), dim=1),
            scale=self._engine.spec.scale,
            cancelled=self._group.cancelled,
        )
        asked = self._history.ask(index, attention.q_Thd)
        asked.answer()
        total, timeline = self._shards.total_rows, self._group.clock.timeline
        for block in attention.blocks((0, total), total) if heads else ():
            with timeline.phase("attention", layer=index):
                attention.attend(block, (0, total))
            self._group.points.point()
        asked.merge_into(attention.out_Thd, attention.lse_hT)
        self._group.points.close()
        out_Thd = self._group.in_member_order(attention.out_Thd.to(q_shd.dtype))
        return self._second_exchange(index, out_Thd)

    def _store_others(self, index: int, member: int, kv_nhd: Tensor, store: StoreKv) -> None:
        """Of another instance's rows, the heads that the pool has."""
        keys, resident = self._split.keys(self._shards.member), self._engine.kv_heads
        heads = slice(resident.start - keys.start, resident.stop - keys.start)
        k_nhd, v_nhd = kv_nhd.chunk(2, dim=1)
        store(index, k_nhd[:, heads], v_nhd[:, heads], member=member)

    def _first_exchange(self, index: int, q_shd: Tensor, k_sgd: Tensor, v_sgd: Tensor) -> Tensor:
        """All rows of own heads, (T, own q + 2 own kv, d), q before k before v."""
        shards, split = self._shards, self._split

        def pack(member: int) -> Tensor:
            keys = split.keys(member)
            return torch.cat((q_shd[:, split.queries(member)], k_sgd[:, keys], v_sgd[:, keys]), 1)

        own = shards.member
        width = split.query_count(own) + 2 * split.key_count(own)
        gathered = q_shd.new_empty(shards.total_rows, width, q_shd.shape[2])
        others = [m for m in range(len(shards.ranks)) if m != own]
        transfer = self._transfers.start(
            [(shards.ranks[m], pack(m)) for m in others],
            [(shards.ranks[m], gathered[shards.rows_of(m)]) for m in others],
            Tag.FIRST_EXCHANGE,
            Label(phase="first all-to-all", layer=index),
        )
        gathered[shards.rows_of(own)] = pack(own)
        self._transfers.wait(transfer)
        return gathered

    def _second_exchange(self, index: int, out_Thd: Tensor) -> Tensor:
        """Own rows of all heads, from all rows of own heads."""
        shards, own = self._shards, self._shards.member
        rows, dim = shards.rows_of(own), out_Thd.shape[2]
        parts = [
            out_Thd[rows]
            if m == own
            else out_Thd.new_empty(rows.stop - rows.start, self._split.query_count(m), dim)
            for m in range(len(shards.ranks))
        ]
        others = [m for m in range(len(parts)) if m != own]
        transfer = self._transfers.start(
            [(shards.ranks[m], out_Thd[shards.rows_of(m)]) for m in others],
            [(shards.ranks[m], parts[m]) for m in others],
            Tag.SECOND_EXCHANGE,
            Label(phase="second all-to-all", layer=index),
        )
        self._transfers.wait(transfer)
        return torch.cat(parts, dim=1)

    def _members(self) -> list[HistoryMember]:
        layout, spec = self._group.layout, self._engine.spec
        rows = rows_by_chunk(self._group.step.chunks, range(self._shards.total_rows))
        return [
            HistoryMember(
                rank=rank,
                instance=layout.instance_of(rank),
                rows=rows,
                heads=range(spec.heads)[self._split.queries(member)],
                resident=kv_head_range(spec, layout.tp_rank_of(rank), layout.tp),
            )
            for member, rank in enumerate(self._shards.ranks)
        ]
