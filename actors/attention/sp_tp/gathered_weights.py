"""SP-NTP on a tensor-parallel deployment, with gathered attention weights (CSPS §3.2.2, App. A).

    attention weights of the layer, all heads  <--all-gather-- ranks of the instance, a layer ahead
    q, k, v of own rows, all heads  --first exchange-->  all rows, own heads
    attention over the whole batch
    outputs of all rows, own heads  --second exchange--> own rows, all heads
    output projection of own rows   --all-gather-->      rows of the instance

Rows are sharded over all ranks of the step's instances. The MLP's weights remain sharded: they are
several times as many as attention's. So each rank needs all rows of its instance for the MLP, which
the last all-gather provides. Scattering the MLP's sum and gathering before the MLP would move the
same bytes.

KV is not sent. Each rank computes its KV heads of the instance's rows from rows and weights that it
has, which repeats the KV projection once.

Shape suffixes: t rows of the instance, s own shard of them, T rows of the batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import HeadSplit, SpGroup, instance_shards, rank_shards
from csps.actors.attention.base.history import History, HistoryMember, overlapping, rows_by_chunk
from csps.actors.attention.base.strategy import OverlappingStrategy, StoreKv
from csps.actors.attention.sp_tp.head_attention import HeadBlock, RowAttention
from csps.actors.comm.mesh import Tag
from csps.actors.comm.row_collectives import all_gather, flat_tree
from csps.actors.comm.transfers import Label, PendingTransfer, Transfers
from csps.kernels.merge import merge_sink
from csps.models.network.network import Layer
from csps.models.network.rope import Rotary
from csps.models.network.spec import ModelSpec, kv_head_range, tp_shard_of


@dataclass(frozen=True)
class _IncomingWeights:
    """Attention weights of one layer, valid when the transfer is complete."""

    transfer: PendingTransfer
    qkv: Tensor
    bias: Tensor | None
    outputs: tuple[Tensor, ...]
    """Columns of the output projection from each tp rank."""


class GatheredLayers:
    """Layers whose attention has all heads; their MLP is this rank's shard.

    All ranks of an instance must ask for the same layers in the same order.
    """

    def __init__(self, engine: Engine, transfers: Transfers) -> None:
        self._engine = engine
        self._transfers = transfers
        self._tp_shards = [
            tp_shard_of(engine.spec, tp_rank, engine.layout.tp)
            for tp_rank in range(engine.layout.tp)
        ]
        self._incoming: dict[int, _IncomingWeights] = {}

    def prefetch(self, index: int) -> None:
        """Begin to gather a layer's weights, unless that has begun."""
        if index not in self._incoming:
            self._incoming[index] = self._start(index)

    def layer(self, index: int) -> Layer:
        """Return the layer with all heads and without a sum over the instance.

        The weights are freed with the returned layer.
        """
        self.prefetch(index)
        incoming = self._incoming.pop(index)
        self._transfers.wait(incoming.transfer)
        spec, layer = self._engine.spec, self._engine.network.layers[index]
        whole = replace(layer.shard, query_heads=range(spec.heads), kv_heads=range(spec.kv_heads))
        weights = replace(
            layer.weights,
            qkv=incoming.qkv,
            qkv_bias=incoming.bias,
            output=torch.cat(incoming.outputs, dim=1),
        )
        return replace(layer, shard=whole, weights=weights, all_reduce=None)

    def _start(self, index: int) -> _IncomingWeights:
        weights = self._engine.network.layers[index].weights
        qkv, bias = self._fused_buffer(weights.qkv), None
        fused = [(weights.qkv, qkv)]
        if weights.qkv_bias is not None:
            bias = self._fused_buffer(weights.qkv_bias)
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
        return _IncomingWeights(transfer, qkv, bias, tuple(outputs))

    def _fused_buffer(self, shard: Tensor) -> Tensor:
        """Allocate the fused rows of all heads."""
        spec = self._engine.spec
        return shard.new_empty((spec.heads + 2 * spec.kv_heads) * spec.head_dim, *shard.shape[1:])

    def _runs(self, tp_rank: int) -> Iterator[tuple[slice, slice]]:
        """Yield (rows of a rank's fused shard, rows of all heads) of each run of heads."""
        # The first of several ranks with a KV head provides it.
        spec, shard = self._engine.spec, self._tp_shards[tp_rank]
        yield _run(spec, 0, shard.query_heads, 0)
        if any(shard.kv_heads[0] in other.kv_heads for other in self._tp_shards[:tp_rank]):
            return
        local = len(shard.query_heads)
        yield _run(spec, local, shard.kv_heads, spec.heads)
        yield _run(spec, local + len(shard.kv_heads), shard.kv_heads, spec.heads + spec.kv_heads)


def _run(spec: ModelSpec, begin: int, heads: range, base: int) -> tuple[slice, slice]:
    """Return the rows of adjacent heads: from head `begin` of the shard, and in all heads."""
    dim, count = spec.head_dim, len(heads)
    there = base + heads.start
    return slice(begin * dim, (begin + count) * dim), slice(there * dim, (there + count) * dim)


class GatheredWeights(OverlappingStrategy):
    """Exact attention of one step on one rank; entered for the duration of the step."""

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
            begin=overlapping(self._transfers),
            window=spec.window,
            windowed=spec.near_layers,
        )
        self._layers = GatheredLayers(engine, self._transfers)

    def offered(self, layer: int, member: int) -> Collection[int]:
        """See `Strategy`. Members are offered only if a rank gets all KV heads of its pool."""
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
        # The last layer is computed by rows, without a strategy, so its weights are not gathered.
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
        """Return this rank's rows, numbered from the first row of the instance."""
        first = self._shards.bounds[self._shards.member - self._engine.tp_rank]
        rows = self._shards.rows_of(self._shards.member)
        return slice(rows.start - first, rows.stop - first)

    # --- attention -----------------------------------------------------------------------------

    def _attend(
        self, index: int, q_shd: Tensor, k_sgd: Tensor, v_sgd: Tensor, store: StoreKv
    ) -> Tensor:
        """Return the attention output of own rows, all heads, in q's dtype."""
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
            window=self._engine.spec.window_of(index),
        )
        asked = self._history.ask(index, attention.q_Thd)
        asked.answer()
        total, timeline = self._shards.total_rows, self._group.clock.timeline
        for block in attention.blocks((0, total), total) if heads else ():
            with timeline.phase("attention", layer=index):
                attention.attend(block, (0, total))
            self._group.points.point()
        asked.merge_into(attention.out_Thd, attention.lse_hT)
        sinks_h = self._engine.network.layers[index].weights.sinks
        if sinks_h is not None:  # of all heads, as on every rank
            merge_sink(attention.out_Thd, attention.lse_hT, sinks_h[self._split.queries(member)])
        self._group.points.close()
        out_Thd = self._group.in_member_order(attention.out_Thd.to(q_shd.dtype))
        return self._second_exchange(index, out_Thd)

    def _store_others(self, index: int, member: int, kv_nhd: Tensor, store: StoreKv) -> None:
        """Store the KV of another instance's rows, for the heads of the pool."""
        keys, resident = self._split.keys(self._shards.member), self._engine.kv_heads
        heads = slice(resident.start - keys.start, resident.stop - keys.start)
        k_nhd, v_nhd = kv_nhd.chunk(2, dim=1)
        store(index, k_nhd[:, heads], v_nhd[:, heads], member=member)

    def _first_exchange(self, index: int, q_shd: Tensor, k_sgd: Tensor, v_sgd: Tensor) -> Tensor:
        """Gather all rows of own heads, (T, q heads + 2 KV heads, d), q before k before v."""
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
        """Exchange all rows of own heads for own rows of all heads."""
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
