"""A tensor-parallel instance's attention weights, gathered layer by layer (CSPS App. A).

Every rank gets the shards of its instance's other ranks; inside a server that is where the fast
links are. The next layer's shards travel while the present one computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from csps.actors.engine.engine import Engine
from csps.actors.mesh import Tag
from csps.actors.transfers import Label, Transfer, Transfers
from csps.models.network import Layer
from csps.models.spec import ModelSpec, share_of


@dataclass(frozen=True)
class _UnderWay:
    """One layer's weights, complete when the transfer is."""

    transfer: Transfer
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
        self._shares = [
            share_of(engine.spec, tp_rank, engine.layout.tp) for tp_rank in range(engine.layout.tp)
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
        whole = replace(layer.share, query_heads=range(spec.heads), kv_heads=range(spec.kv_heads))
        weights = replace(
            layer.weights,
            qkv=coming.qkv,
            qkv_bias=coming.bias,
            output=torch.cat(coming.outputs, dim=1),
        )
        return replace(layer, share=whole, weights=weights, all_reduce=None)

    def _start(self, index: int) -> _UnderWay:
        weights = self._engine.network.layers[index].weights
        qkv, bias = self._room(weights.qkv), None
        fused = [(weights.qkv, qkv)]
        if weights.qkv_bias is not None:
            bias = self._room(weights.qkv_bias)
            fused.append((weights.qkv_bias, bias))
        ranks, own = range(len(self._shares)), self._engine.tp_rank
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
        spec, share = self._engine.spec, self._shares[tp_rank]
        yield _run(spec, 0, share.query_heads, 0)
        if any(share.kv_heads[0] in other.kv_heads for other in self._shares[:tp_rank]):
            return
        local = len(share.query_heads)
        yield _run(spec, local, share.kv_heads, spec.heads)
        yield _run(spec, local + len(share.kv_heads), share.kv_heads, spec.heads + spec.kv_heads)


def _run(spec: ModelSpec, begin: int, heads: range, base: int) -> tuple[slice, slice]:
    """Neighbouring heads that begin at head `begin` of the shard and after `base` in the whole."""
    dim, count = spec.head_dim, len(heads)
    there = base + heads.start
    return slice(begin * dim, (begin + count) * dim), slice(there * dim, (there + count) * dim)
