"""Sparse attention as a group's ranks compute it, in one process and without an exchange.

What ranks of SP-NTP and SP-TP send each other changes no result, so that accuracy can be measured
without ranks: the parts of a prompt are cut, judged, selected and merged by the functions that
ranks use, one part after another.

A *unit* is what keeps tokens of its own: a KV head; in SP-TP, where members share a KV head, those
of its query heads that one member has. It is a KV head of its own here.

Shape suffixes: t tokens of the prompt, n rows (the prompt's, and those of an answer behind it), h
query heads, g KV heads, u units, k kept tokens, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from csps.actors.levels.geometry import LevelGeometry, Part
from csps.actors.levels.schedule import DropSchedule, always_kept, kept_counts
from csps.actors.strategies.group import HeadSplit
from csps.kernels.attention import attention
from csps.kernels.importance import importance
from csps.kernels.merge import merge_into, nothing_seen
from csps.kernels.selection import gather_kept, select
from csps.models.spec import ModelSpec
from csps.protocols.csa import CsaPlan
from csps.protocols.even_share import even_share
from csps.protocols.prefill_job import PrefillPiece


@dataclass(frozen=True, kw_only=True)
class EmulatedGroup:
    """The instances of a group, each with an equal part of a prompt."""

    spec: ModelSpec
    plan: CsaPlan
    """Disjoint levels, one ratio for all KV heads, judged by a window of queries."""
    tokens: int
    """Of the prompt."""
    tensor_parallel: bool = False
    """SP-TP in place of SP-NTP."""

    @property
    def members(self) -> int:
        """Instances."""
        return len(self.plan.locations)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """One for each member."""
        shares = (even_share(self.tokens, self.members, member) for member in range(self.members))
        return tuple(
            Part(index=m, member=m, piece=0, rows=slice(it.start, it.stop), start=it.start)
            for m, it in enumerate(shares)
        )

    @cached_property
    def unit_heads(self) -> tuple[int, ...]:
        """KV head of each unit, ascending."""
        kv_heads = range(self.spec.kv_heads)
        if not self.tensor_parallel:
            return tuple(kv_heads)
        split = HeadSplit(heads=self.spec.heads, kv_heads=self.spec.kv_heads, parts=self.members)
        heads = [key for member in range(self.members) for key in kv_heads[split.keys(member)]]
        assert self.spec.heads % len(heads) == 0, "units of equally many query heads"
        return tuple(heads)

    @property
    def nearest(self) -> object:
        """Groups for which it is equal compute the same at level 1."""
        return self.members if self.plan.levels > 1 else 1

    def drops(self, layer: int) -> bool:
        """Whether anything is dropped in a layer."""
        return self._schedule.drops(layer)

    def of_units(self, x_ngd: Tensor) -> Tensor:
        """(n, u, d): keys or values of each unit."""
        if self.unit_heads == tuple(range(self.spec.kv_heads)):
            return x_ngd
        return x_ngd[:, list(self.unit_heads)]

    def judged(self, q_nhd: Tensor, k_nud: Tensor) -> Tensor:
        """(u, t) what the prompt's keys receive from its last queries."""
        window = self.plan.importance_window
        queries = range(max(0, self.tokens - window), self.tokens)
        q_whd, k_tud = q_nhd[queries.start : queries.stop], k_nud[: self.tokens]
        positions = {"q_positions": queries, "k_positions": range(self.tokens)}
        _, lse_hw = attention(q_whd, k_tud, k_tud, scale=self.spec.scale, **positions)
        return importance(q_whd, k_tud, lse_hw, scale=self.spec.scale, **positions)

    def attend_near(self, q_nhd: Tensor, k_ngd: Tensor, v_ngd: Tensor) -> tuple[Tensor, Tensor]:
        """Level 1 of the prompt's rows; those behind it see everything before them."""
        out_nhd, lse_hn = nothing_seen(q_nhd)
        segments = self.plan.segments()[0]
        for run in segments:
            own = range(self.parts[run.start].rows.start, self.parts[run.stop - 1].rows.stop)
            self._attend_causally(out_nhd, lse_hn, q_nhd, k_ngd, v_ngd, own, own)
        behind = range(self.tokens, len(q_nhd))
        if behind:
            seen = range(len(q_nhd))
            self._attend_causally(out_nhd, lse_hn, q_nhd, k_ngd, v_ngd, behind, seen)
        return out_nhd, lse_hn

    def attend_far(
        self,
        layer: int,
        q_nhd: Tensor,
        k_nud: Tensor,
        v_nud: Tensor,
        importance_ut: Tensor,
        out_nhd: Tensor,
        lse_hn: Tensor,
    ) -> Tensor:
        """Merge all farther levels of a layer into the result of level 1.

        Returns:
            (n,) bool, the rows that have changed.
        """
        changed_n = torch.zeros(len(q_nhd), dtype=torch.bool)
        for level, seeing, seen in self._rectangles:
            keys_uk = torch.cat([self._kept(layer, level, it, importance_ut) for it in seen], 1)
            queries_uk = torch.cat(
                [
                    self._kept(layer, level, it, importance_ut)
                    if self.plan.drop_queries
                    else self._all_rows(it)
                    for it in seeing
                ],
                1,
            )
            part = attention(
                gather_kept(q_nhd, queries_uk),
                gather_kept(k_nud, keys_uk),
                gather_kept(v_nud, keys_uk),
                q_positions=None,
                k_positions=None,
                scale=self.spec.scale,
            )
            merge_into(out_nhd, lse_hn, *part, queries_uk)
            changed_n[queries_uk.flatten()] = True
        return changed_n

    # --- levels --------------------------------------------------------------------------------

    @cached_property
    def _schedule(self) -> DropSchedule:
        kv_heads = self.spec.kv_heads
        return DropSchedule(
            plan=self.plan,
            layers=self.spec.layers,
            kv_heads=range(kv_heads),
            total_kv_heads=kv_heads,
        )

    @cached_property
    def _piece(self) -> PrefillPiece:
        return PrefillPiece(rid=0, start=0, length=self.tokens)

    @cached_property
    def _rectangles(self) -> list[tuple[int, list[Part], list[Part]]]:
        """Level, parts that see, and the parts that all of these see whole."""
        return list(self._sights())

    def _sights(self) -> Iterator[tuple[int, list[Part], list[Part]]]:
        geometry = LevelGeometry(parts=self.parts, levels=self.plan.segments())
        for level in range(2, self.plan.levels + 1):
            for segment in self.plan.segments()[level - 1]:
                sights = geometry.segment(level, segment.start).sights
                for keys, alike in groupby(sights, key=lambda it: it.keys):
                    seeing = [self.parts[it.part] for it in alike]
                    yield level, seeing, [self.parts[index] for index in keys]

    def _kept(self, layer: int, level: int, part: Part, importance_ut: Tensor) -> Tensor:
        """(u, k) rows of the prompt that a part keeps at a level."""
        ratios = self._schedule.head_ratios(layer)[0]
        count = kept_counts(self.plan, [self._piece], part, ratios)[level - 1]
        if count == part.length:
            return self._all_rows(part)
        always_t = torch.zeros(part.length, dtype=torch.bool)
        for run in always_kept(self.plan, self._piece, part):
            always_t[run.start : run.stop] = True
        return part.start + select(importance_ut[:, part.rows], count, always_t=always_t)

    def _all_rows(self, part: Part) -> Tensor:
        return torch.arange(part.rows.start, part.rows.stop).expand(len(self.unit_heads), -1)

    def _attend_causally(
        self,
        out_nhd: Tensor,
        lse_hn: Tensor,
        q_nhd: Tensor,
        k_ngd: Tensor,
        v_ngd: Tensor,
        queries: range,
        keys: range,
    ) -> None:
        rows, seen = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        out_nhd[rows], lse_hn[:, rows] = attention(
            q_nhd[rows],
            k_ngd[seen],
            v_ngd[seen],
            q_positions=queries,
            k_positions=keys,
            scale=self.spec.scale,
        )
