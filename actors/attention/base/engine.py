"""The resources of one rank: its shard of the network, its KV pool and its peers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from csps.actors.comm.layout import GangLayout
from csps.actors.comm.mesh import Mesh
from csps.actors.kv_cache.kv_pool import KvBlock, KvPool, ResidentRows
from csps.kernels.attention import attention, decode_attention
from csps.kernels.merge import merge_into
from csps.models.network.network import Network
from csps.models.network.spec import ModelSpec, kv_head_range, query_head_range
from csps.models.tokenizers.grammar import Grammars


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Resources that the prefill steps and the decode batch of a rank have in common."""

    network: Network
    pool: KvPool
    mesh: Mesh
    layout: GangLayout
    device: torch.device
    grammars: Grammars | None = None
    """Makes the states of grammars; None on ranks that sample nothing."""

    @property
    def spec(self) -> ModelSpec:
        """Architecture of the model."""
        return self.network.spec

    @property
    def rank(self) -> int:
        """Number of this rank in its gang."""
        return self.mesh.rank

    @property
    def instance(self) -> int:
        """Instance of this rank."""
        return self.layout.instance_of(self.rank)

    @property
    def tp_rank(self) -> int:
        """Number of this rank in its instance."""
        return self.layout.tp_rank_of(self.rank)

    @property
    def heads(self) -> int:
        """Number of query heads on this rank."""
        return len(query_head_range(self.spec, self.tp_rank, self.layout.tp))

    @property
    def kv_heads(self) -> range:
        """KV heads of this rank, numbered over the whole model."""
        return kv_head_range(self.spec, self.tp_rank, self.layout.tp)

    def sinks(self, layer: int) -> Tensor | None:
        """Return the logits of the attention sinks of this rank's query heads, if they have any."""
        sinks_h = self.network.layers[layer].weights.sinks
        if sinks_h is None:
            return None
        heads = query_head_range(self.spec, self.tp_rank, self.layout.tp)
        return sinks_h[heads.start : heads.stop]

    def attend_rows(
        self, layer: int, q_rhd: Tensor, resident: ResidentRows
    ) -> tuple[Tensor, Tensor]:
        """Attend rows to all KV of their sequences on this rank, in one call.

        Args:
            q_rhd: the last row of each sequence, which sees every key.

        Returns:
            fp32 out (r, h, d) and lse (r, h); -inf where the rank has no KV of the sequence.
        """
        k_shd, v_shd = self.pool.layer(layer)
        runs = resident.runs(layer)
        out_rhd, lse_rh = decode_attention(q_rhd, k_shd, v_shd, runs, scale=self.spec.scale)
        for row, block in resident.blocks(layer):
            self._merge_block(q_rhd[row : row + 1], block, out_rhd[row : row + 1], lse_rh[row])
        return out_rhd, lse_rh

    def _merge_block(self, q_rhd: Tensor, block: KvBlock, out_rhd: Tensor, lse_h: Tensor) -> None:
        """Merge attention to a block that has some KV heads only (tokens differ by KV head)."""
        group = q_rhd.shape[1] // self.pool.kv_heads
        heads = slice(block.heads.start * group, block.heads.stop * group)
        part = attention(
            q_rhd[:, heads],
            self.pool.numbers(block.k_thd),
            self.pool.numbers(block.v_thd),
            q_positions=None,
            k_positions=None,
            scale=self.spec.scale,
        )
        merge_into(out_rhd[:, heads], lse_h[heads, None], *part)
