"""The first layer's rows, which no configuration changes: it never drops anything.

Shape suffixes: n rows, h query heads, g KV heads, d hidden or head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csps.kernels.attention import attention
from csps.kernels.merge import merge_into
from csps.models.network import Network


@dataclass(frozen=True)
class FirstLayer:
    """Of a text; another text can be put behind it without computing it again."""

    q_nhd: Tensor
    k_ngd: Tensor
    v_ngd: Tensor
    x_nd: Tensor
    """After the layer."""

    @classmethod
    def of(cls, network: Network, token_ids: Sequence[int]) -> FirstLayer:
        """Of a text from position 0 on."""
        spec, like = network.spec, network.embedding_vd
        nothing = like.new_empty(0, spec.kv_heads, spec.head_dim)
        no_queries = like.new_empty(0, spec.heads, spec.head_dim)
        empty = cls(no_queries, nothing, nothing, like.new_empty(0, spec.hidden))
        return empty.followed_by(network, token_ids)

    def followed_by(self, network: Network, token_ids: Sequence[int]) -> FirstLayer:
        """With more tokens behind it."""
        begin, layer = len(self.x_nd), network.layers[0]
        end = begin + len(token_ids)
        x_nd = network.embed(torch.tensor(token_ids, dtype=torch.int64))
        q_nhd, k_ngd, v_ngd = layer.qkv(x_nd, network.rotary(torch.arange(begin, end)))
        k_ngd, v_ngd = torch.cat((self.k_ngd, k_ngd)), torch.cat((self.v_ngd, v_ngd))
        out_nhd, _ = attention(
            q_nhd,
            k_ngd,
            v_ngd,
            q_positions=range(begin, end),
            k_positions=range(end),
            scale=network.spec.scale,
        )
        return FirstLayer(
            torch.cat((self.q_nhd, q_nhd)),
            k_ngd,
            v_ngd,
            torch.cat((self.x_nd, layer.finish(x_nd, out_nhd))),
        )


@dataclass(frozen=True)
class SharedText:
    """A text as its own tokens see it, wherever it begins: what stands before it is merged in.

    Questions of one length before the same text leave its queries, keys and values as they are, and
    what they add is attention to a few keys.
    """

    begin: int
    """Position of its first token."""
    x_nd: Tensor
    """Before the layer."""
    q_nhd: Tensor
    k_ngd: Tensor
    v_ngd: Tensor
    out_nhd: Tensor
    lse_hn: Tensor

    @classmethod
    def of(cls, network: Network, token_ids: Sequence[int], begin: int) -> SharedText:
        """Of a text behind `begin` tokens."""
        at = range(begin, begin + len(token_ids))
        x_nd = network.embed(torch.tensor(token_ids, dtype=torch.int64))
        rotary = network.rotary(torch.arange(at.start, at.stop))
        q_nhd, k_ngd, v_ngd = network.layers[0].qkv(x_nd, rotary)
        seen = attention(
            q_nhd, k_ngd, v_ngd, q_positions=at, k_positions=at, scale=network.spec.scale
        )
        return cls(begin, x_nd, q_nhd, k_ngd, v_ngd, *seen)

    def behind(self, network: Network, token_ids: Sequence[int]) -> FirstLayer:
        """With the tokens that stand before it."""
        assert len(token_ids) == self.begin, "rotated to where it begins"
        before = FirstLayer.of(network, token_ids)
        out_nhd, lse_hn = self.out_nhd.clone(), self.lse_hn.clone()
        far = attention(
            self.q_nhd,
            before.k_ngd,
            before.v_ngd,
            q_positions=None,
            k_positions=None,
            scale=network.spec.scale,
        )
        merge_into(out_nhd, lse_hn, *far)
        return FirstLayer(
            torch.cat((before.q_nhd, self.q_nhd)),
            torch.cat((before.k_ngd, self.k_ngd)),
            torch.cat((before.v_ngd, self.v_ngd)),
            torch.cat((before.x_nd, network.layers[0].finish(self.x_nd, out_nhd))),
        )
