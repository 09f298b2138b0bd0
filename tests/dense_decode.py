"""What a model answers when decode sees kept tokens only, by brute force: whole matrices in fp64.

Written from `CsaPlan.decode_kept_only`'s definition, and sharing nothing with the product but the
network's own products and the kept sets' oracle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from dense_csa import DenseCsa
from torch import Tensor

from csps.models.network import Network
from csps.protocols.csa import CsaPlan


@dataclass
class DenseDecode:
    """One prompt and what was answered; `owners` is the prefill member of each prompt token."""

    network: Network
    plan: CsaPlan
    owners: Sequence[int]
    k_thd: list[Tensor] = field(default_factory=list)
    v_thd: list[Tensor] = field(default_factory=list)
    seen: list[list[set[int]]] = field(default_factory=list)
    """[layer][KV head] -> prompt tokens that decode sees."""

    def prefill(self, prompt: Tensor) -> Tensor:
        """(vocab,) log-probabilities of the first token of the answer."""
        rotary, x_td = self.network.rotary(torch.arange(len(prompt))), self.network.embed(prompt)
        importance: Tensor | None = None
        for index, layer in enumerate(self.network.layers):
            q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
            oracle, scale = self._oracle(index), q_thd.shape[2] ** -0.5
            judged = oracle.judged_by_window(q_thd, k_thd, self.plan.importance_window, scale)
            if self.plan.importance_layer == "same":
                importance = judged
            weights = oracle.counts(importance)
            out_thd, _ = oracle.attend(q_thd, k_thd, v_thd, weights, scale)
            self.seen.append([self._seen(oracle, h, importance) for h in range(k_thd.shape[1])])
            importance = judged
            x_td = layer.finish(x_td, out_thd.float())
            self.k_thd.append(k_thd)
            self.v_thd.append(v_thd)
        return self.network.logits(x_td[-1:])[0].log_softmax(-1)

    def step(self, token: int) -> Tensor:
        """The same of the token after this one."""
        position = len(self.k_thd[0])
        rotary = self.network.rotary(torch.tensor([position]))
        x_td = self.network.embed(torch.tensor([token]))
        for index, layer in enumerate(self.network.layers):
            q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
            self.k_thd[index] = torch.cat((self.k_thd[index], k_thd))
            self.v_thd[index] = torch.cat((self.v_thd[index], v_thd))
            x_td = layer.finish(x_td, self._attend(index, q_thd).float())
        return self.network.logits(x_td)[0].log_softmax(-1)

    def _attend(self, index: int, q_thd: Tensor) -> Tensor:
        heads, dim = q_thd.shape[1:]
        k_thd, v_thd = self.k_thd[index].double(), self.v_thd[index].double()
        group = heads // k_thd.shape[1]
        outs = []
        for head in range(heads):
            generated = set(range(len(self.owners), len(k_thd)))
            keys = sorted(self.seen[index][head // group] | generated)
            score_k = k_thd[keys, head // group] @ q_thd[0, head].double() / math.sqrt(dim)
            outs.append(torch.softmax(score_k, dim=0) @ v_thd[keys, head // group])
        return torch.stack(outs)[None]

    def _seen(self, oracle: DenseCsa, head: int, importance_gt: Tensor | None) -> set[int]:
        if not self.plan.decode_kept_only or len(oracle.segments) == 1:
            return set(range(oracle.tokens))
        importance_t = None if importance_gt is None else importance_gt[head]
        last_spt = {t for t, owner in enumerate(self.owners) if owner == self.owners[-1]}
        return last_spt | oracle.kept(head, 2, importance_t)

    def _oracle(self, index: int) -> DenseCsa:
        last, kv_heads = len(self.network.layers) - 1, self.network.spec.kv_heads
        everyone = [range(len(self.plan.locations))]
        # A prompt inside one member is exact, and so is the last layer, of which one row is needed.
        alone = index == last or len(set(self.owners)) == 1
        segments = [everyone] if alone else self.plan.segments()
        group, levels = self.plan.layer_group(index), range(1, len(segments) + 1)
        return DenseCsa(
            owners=self.owners,
            segments=segments,
            ratios=[
                [group.drop_ratio(level, head) if index else 0.0 for level in levels]
                for head in range(kv_heads)
            ],
            sinks=self.plan.sinks,
            tail=self.plan.tail,
            nested=self.plan.nested,
            drop_queries=self.plan.drop_queries,
        )
