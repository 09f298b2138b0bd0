"""A brute-force reference of sparse attention that looks at every pair of tokens.

It is written from CSPS §3.2.4 with the corrections of this project, and shares nothing with the
product: matrices of how often a query counts a key, softmax over them, in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DenseCsa:
    """One prompt, or a chunk of one, on the members that compute it."""

    owners: Sequence[int]
    """Member of each token."""
    segments: Sequence[Sequence[range]]
    """Segments of members, level 1 first."""
    ratios: Sequence[Sequence[float]]
    """[KV head][level - 1]."""
    coverages: Sequence[Sequence[float]] | None = None
    """Likewise; None: the ratios hold."""
    sinks: int
    tail: int
    nested: bool = False
    drop_queries: bool = True
    start: int = 0
    """Tokens of the prompt before the chunk, all of which every query sees."""
    last: bool = True
    """The prompt ends with the chunk."""

    @property
    def tokens(self) -> int:
        return len(self.owners)

    @property
    def kv_heads(self) -> int:
        return len(self.ratios)

    def level_of(self, one: int, other: int) -> int:
        """Return the nearest level that has both members in one segment."""
        return next(
            level
            for level, segments in enumerate(self.segments, start=1)
            if any(one in members and other in members for members in segments)
        )

    def parts(self) -> list[list[int]]:
        """Return tokens of each member that has any."""
        return [
            [t for t in range(self.tokens) if self.owners[t] == member]
            for member in sorted(set(self.owners))
        ]

    def kept(self, head: int, level: int, importance_t: Tensor | None) -> set[int]:
        """Return the tokens that a KV head keeps at a level."""
        ratio = self.ratios[head][level - 1]
        share = None if self.coverages is None else self.coverages[head][level - 1]
        if importance_t is None or share == 1.0 or (share is None and ratio == 0.0):
            return set(range(self.tokens))
        tail = self.tail if self.last else 0
        always = {
            t for t in range(self.tokens) if self.start + t < self.sinks or t >= self.tokens - tail
        }
        kept: set[int] = set()
        for part in self.parts():
            forced = [t for t in part if t in always]
            ranked = sorted(part, key=lambda t: (t not in always, -float(importance_t[t]), t))
            if share is None:
                count = max(len(forced), math.ceil((1 - ratio) * len(part) - 1e-9))
            else:
                count = len(forced) + self._fewest(share, ranked[len(forced) :], importance_t)
            kept |= set(ranked[:count])
        return kept

    @staticmethod
    def _fewest(share: float, ranked: list[int], importance_t: Tensor) -> int:
        """Return how many of the best tokens have the share of what all have."""
        masses = [float(importance_t[t]) for t in ranked]
        return next(n for n in range(len(masses) + 1) if sum(masses[:n]) >= share * sum(masses))

    def dropped(self, importance_gt: Tensor) -> Tensor:
        """Return the share (KV heads,) of the importance on keys that the last token does not see,
        if its own part sees them at the level where both meet.
        """
        end = self.owners[-1]
        shares = []
        for head, importance_t in enumerate(importance_gt):
            unseen = [
                float(importance_t[t])
                for t in range(self.tokens)
                if (level := self.level_of(self.owners[t], end)) > 1
                and t not in self.kept(head, level, importance_t)
            ]
            shares.append(sum(unseen) / float(importance_t.sum()))
        return torch.tensor(shares, dtype=torch.float64)

    def counts(self, importance_gt: Tensor | None) -> Tensor:
        """Return (KV heads, queries, keys): how often a query counts a key; 0 or 1 unless
        nested.
        """
        members = set(self.owners)
        nearest = {(one, other): self.level_of(one, other) for one in members for other in members}
        weights: list[list[list[int]]] = []
        for head in range(self.kv_heads):
            importance_t = None if importance_gt is None else importance_gt[head]
            kept = [self.kept(head, v, importance_t) for v in range(1, len(self.segments) + 1)]
            weights.append([[0] * self.tokens for _ in range(self.tokens)])
            for i in range(self.tokens):
                for j in range(i + 1):
                    first = nearest[self.owners[i], self.owners[j]]
                    last = len(self.segments) if self.nested else first
                    for level in range(first, last + 1):
                        sees = j in kept[level - 1]
                        asks = i in kept[level - 1] or not self.drop_queries
                        weights[head][i][j] += level == 1 or (sees and asks)
        return torch.tensor(weights, dtype=torch.float64).view(-1, self.tokens, self.tokens)

    def attend(
        self, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, weights: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return fp64 out (t, h, d) and lse (h, t)."""
        score_hqk = self._scores(q_thd, k_thd, scale) + self._by_query_head(q_thd, weights).log()
        prob_hqk = torch.softmax(score_hqk, dim=-1)
        v_hkd = v_thd.double().transpose(0, 1)
        v_hkd = v_hkd.repeat_interleave(q_thd.shape[1] // self.kv_heads, dim=0)
        return (prob_hqk @ v_hkd).transpose(0, 1), torch.logsumexp(score_hqk, dim=-1)

    def attend_with_history(
        self,
        q_thd: Tensor,
        k_thd: Tensor,
        v_thd: Tensor,
        weights: Tensor,
        scale: float,
        history: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return fp64 out (t, h, d), over the keys and values of all tokens before the chunk as
        well.
        """
        before = weights.new_ones(*weights.shape[:2], self.start)
        k_all, v_all = (torch.cat(pair) for pair in zip(history, (k_thd, v_thd), strict=True))
        return self.attend(q_thd, k_all, v_all, torch.cat((before, weights), dim=2), scale)[0]

    def judged_by_window(self, q_thd: Tensor, k_thd: Tensor, window: int, scale: float) -> Tensor:
        """Return (KV heads, tokens): mean probability that the last queries give each key they see,
        under exact attention.
        """
        causal = torch.ones(self.tokens, self.tokens, dtype=torch.float64).tril()
        prob_hqk = torch.softmax(self._scores(q_thd, k_thd, scale) + causal.log(), dim=-1)
        judging = causal.clone()
        judging[: max(0, self.tokens - window)] = 0
        return self._mean(prob_hqk * judging, judging.sum(dim=0).expand(self.kv_heads, -1))

    def judged_by_all(
        self, q_thd: Tensor, k_thd: Tensor, lse_ht: Tensor, weights: Tensor, scale: float
    ) -> Tensor:
        """Return (KV heads, tokens): mean probability that the queries which saw a key gave it."""
        score_hqk = self._scores(q_thd, k_thd, scale)
        prob_hqk = (score_hqk - lse_ht[:, :, None]).exp() * self._by_query_head(q_thd, weights)
        return self._mean(prob_hqk, weights.sum(dim=1))

    def _mean(self, prob_hqk: Tensor, seen_gt: Tensor) -> Tensor:
        heads = prob_hqk.shape[0]
        sums_gt = prob_hqk.sum(dim=1).view(self.kv_heads, heads // self.kv_heads, -1).sum(dim=1)
        return sums_gt / seen_gt.clamp_min(1)

    def _scores(self, q_thd: Tensor, k_thd: Tensor, scale: float) -> Tensor:
        k_hkd = k_thd.double().transpose(0, 1)
        k_hkd = k_hkd.repeat_interleave(q_thd.shape[1] // self.kv_heads, dim=0)
        return scale * (q_thd.double().transpose(0, 1) @ k_hkd.transpose(1, 2))

    def _by_query_head(self, q_thd: Tensor, weights: Tensor) -> Tensor:
        return weights.repeat_interleave(q_thd.shape[1] // self.kv_heads, dim=0)
