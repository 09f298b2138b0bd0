"""What one rank computes with: its share of the network, its KV pool and its peers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from csps.actors.kv_pool import KvBlock, KvPool
from csps.actors.layout import GangLayout
from csps.actors.mesh import Mesh
from csps.kernels.attention import attention
from csps.kernels.merge import merge, merge_into, nothing_seen
from csps.models.network import Network
from csps.models.spec import ModelSpec, kv_head_range, query_head_range


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Shared by the prefill and the decode loop of a rank."""

    network: Network
    pool: KvPool
    mesh: Mesh
    layout: GangLayout
    device: torch.device

    @property
    def spec(self) -> ModelSpec:
        """The model's architecture."""
        return self.network.spec

    @property
    def rank(self) -> int:
        """This rank in its gang."""
        return self.mesh.rank

    @property
    def instance(self) -> int:
        """This rank's instance."""
        return self.layout.instance_of(self.rank)

    @property
    def tp_rank(self) -> int:
        """This rank's place in its instance."""
        return self.layout.tp_rank_of(self.rank)

    @property
    def heads(self) -> int:
        """Query heads of this rank."""
        return len(query_head_range(self.spec, self.tp_rank, self.layout.tp))

    @property
    def kv_heads(self) -> range:
        """KV heads of this rank, numbered over the whole model."""
        return kv_head_range(self.spec, self.tp_rank, self.layout.tp)

    def attend_pool(self, layer: int, rid: int, q_thd: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of one row over all KV of its request that this rank holds.

        Args:
            q_thd: (1, h, d), the request's last row: it sees every key, so that no positions
                need to be compared.

        Returns:
            fp32 out (1, h, d) and lse (h, 1); -inf where the rank holds nothing.
        """
        if self.pool.narrowed(layer, rid):
            return self._attend_blocks(q_thd, self.pool.blocks(layer, rid))
        parts = [
            attention(
                q_thd,
                run.k_thd,
                run.v_thd,
                q_positions=None,
                k_positions=None,
                scale=self.spec.scale,
            )
            for run in self.pool.view(layer, rid)
        ]
        if len(parts) == 1:
            return parts[0]
        if not parts:
            out = torch.zeros(q_thd.shape, dtype=torch.float32, device=self.device)
            return out, out.new_full((q_thd.shape[1], 1), -torch.inf)
        return merge([out for out, _ in parts], [lse for _, lse in parts])

    def _attend_blocks(self, q_thd: Tensor, blocks: Iterable[KvBlock]) -> tuple[Tensor, Tensor]:
        """Where KV heads hold different tokens: block by block, each for the heads that it has."""
        out_thd, lse_ht = nothing_seen(q_thd)
        group = q_thd.shape[1] // self.pool.kv_heads
        for block in blocks:
            heads = slice(block.heads.start * group, block.heads.stop * group)
            part = attention(
                q_thd[:, heads],
                block.k_thd,
                block.v_thd,
                q_positions=None,
                k_positions=None,
                scale=self.spec.scale,
            )
            merge_into(out_thd[:, heads], lse_ht[heads], *part)
        return out_thd, lse_ht
