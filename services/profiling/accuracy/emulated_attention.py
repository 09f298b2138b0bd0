"""Emulate a group's sparse attention in one process, without exchanges, to measure its accuracy.

Messages between ranks of SP-NTP and SP-TP change no result. The parts of a prompt are therefore
sliced, scored, selected and merged by the functions that ranks use, one part after another.
`FirstLayer` and `SharedText` compute part no configuration changes, `EmulatedGroup` is a group, and
`EmulatedPrompt` runs a prompt through the model by any number of configurations.

A *unit* selects tokens of its own: a KV head, or, in SP-TP with members that share one, the query
heads of one member.

Shape suffixes: n rows (the prompt's, then an answer's), s scored rows, t tokens of the prompt, h
query heads, g KV heads, u units, k selected tokens, d hidden or head dim, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from csps.actors.attention.base.group import HeadSplit
from csps.actors.attention.base.levels import (
    DropSchedule,
    LevelGeometry,
    LevelPart,
    always_kept,
    kept_counts,
)
from csps.kernels.attention import attention
from csps.kernels.importance import gather_kept, importance, select
from csps.kernels.merge import merge_into, merge_sink, nothing_seen
from csps.models.network.network import Layer, Network
from csps.models.network.spec import ModelSpec
from csps.protocols.attention.csa import CsaPlan
from csps.protocols.core.placement import even_share
from csps.protocols.gang.step_messages import PrefillChunk


@dataclass(frozen=True)
class FirstLayer:
    """First layer of a text, which drops nothing; other text can follow without computing it
    again."""

    q_nhd: Tensor
    k_ngd: Tensor
    v_ngd: Tensor
    x_nd: Tensor
    """Residual stream after the layer."""

    @classmethod
    def of(cls, network: Network, token_ids: Sequence[int]) -> FirstLayer:
        """Compute the layer of a text from position 0."""
        spec, like = network.spec, network.embedding_vd
        nothing = like.new_empty(0, spec.kv_heads, spec.head_dim)
        no_queries = like.new_empty(0, spec.heads, spec.head_dim)
        empty = cls(no_queries, nothing, nothing, like.new_empty(0, spec.hidden))
        return empty.followed_by(network, token_ids)

    def followed_by(self, network: Network, token_ids: Sequence[int]) -> FirstLayer:
        """Return the layer with more tokens behind it."""
        begin, layer = len(self.x_nd), network.layers[0]
        end = begin + len(token_ids)
        x_nd = network.embed(torch.tensor(token_ids, dtype=torch.int64))
        q_nhd, k_ngd, v_ngd = layer.qkv(x_nd, network.rotary(torch.arange(begin, end)))
        k_ngd, v_ngd = torch.cat((self.k_ngd, k_ngd)), torch.cat((self.v_ngd, v_ngd))
        seen = attention(
            q_nhd,
            k_ngd,
            v_ngd,
            q_positions=range(begin, end),
            k_positions=range(end),
            scale=network.spec.scale,
            window=network.spec.window_of(0),
        )
        return FirstLayer(
            torch.cat((self.q_nhd, q_nhd)),
            k_ngd,
            v_ngd,
            torch.cat((self.x_nd, _finished(layer, x_nd, seen))),
        )


def _finished(layer: Layer, x_nd: Tensor, seen: tuple[Tensor, Tensor]) -> Tensor:
    """Return the residual stream after a layer, from complete attention and its LSE.

    Args:
        x_nd: residual stream before the layer.
    """
    out_nhd, lse_hn = seen
    if (sinks_h := layer.weights.sinks) is not None:
        # Copies, because configurations have a part of their attention in common.
        out_nhd, lse_hn = out_nhd.clone(), lse_hn.clone()
        merge_sink(out_nhd, lse_hn, sinks_h)
    return layer.finish(x_nd, out_nhd)


@dataclass(frozen=True)
class SharedText:
    """First layer of a text as its own tokens see it; the text before it is merged in later.

    Questions of one length before the same text do not change its queries, keys and values. They
    only add attention to a few keys.
    """

    begin: int
    """Position of its first token."""
    x_nd: Tensor
    """Residual stream before the layer."""
    q_nhd: Tensor
    k_ngd: Tensor
    v_ngd: Tensor
    out_nhd: Tensor
    lse_hn: Tensor

    @classmethod
    def of(cls, network: Network, token_ids: Sequence[int], begin: int) -> SharedText:
        """Compute a text behind `begin` tokens."""
        at = range(begin, begin + len(token_ids))
        x_nd = network.embed(torch.tensor(token_ids, dtype=torch.int64))
        rotary = network.rotary(torch.arange(at.start, at.stop))
        q_nhd, k_ngd, v_ngd = network.layers[0].qkv(x_nd, rotary)
        seen = attention(
            q_nhd,
            k_ngd,
            v_ngd,
            q_positions=at,
            k_positions=at,
            scale=network.spec.scale,
            window=network.spec.window_of(0),
        )
        return cls(begin, x_nd, q_nhd, k_ngd, v_ngd, *seen)

    def behind(self, network: Network, token_ids: Sequence[int]) -> FirstLayer:
        """Return the layer of the text and the tokens before it."""
        assert len(token_ids) == self.begin, (
            f"{len(token_ids)} tokens before a text rotated to position {self.begin}"
        )
        before, window = FirstLayer.of(network, token_ids), network.spec.window_of(0)
        out_nhd, lse_hn = self.out_nhd.clone(), self.lse_hn.clone()
        rows = range(self.begin, self.begin + len(self.x_nd))
        far = attention(
            self.q_nhd,
            before.k_ngd,
            before.v_ngd,
            q_positions=None if window is None else rows,
            k_positions=None if window is None else range(self.begin),
            scale=network.spec.scale,
            window=window,
        )
        merge_into(out_nhd, lse_hn, *far)
        return FirstLayer(
            torch.cat((before.q_nhd, self.q_nhd)),
            torch.cat((before.k_ngd, self.k_ngd)),
            torch.cat((before.v_ngd, self.v_ngd)),
            torch.cat((before.x_nd, _finished(network.layers[0], self.x_nd, (out_nhd, lse_hn)))),
        )


@dataclass(frozen=True, kw_only=True)
class EmulatedGroup:
    """The instances of a group, each with an equal part of a prompt."""

    spec: ModelSpec
    plan: CsaPlan
    """Plan with disjoint levels and a window of queries that scores."""
    tokens: int
    """Tokens of the prompt."""
    tensor_parallel: bool = False
    """True for SP-TP, False for SP-NTP."""

    @property
    def members(self) -> int:
        """Number of instances."""
        return len(self.plan.locations)

    @cached_property
    def parts(self) -> tuple[LevelPart, ...]:
        """Part of the prompt of each member."""
        spans = (even_share(self.tokens, self.members, member) for member in range(self.members))
        return tuple(
            LevelPart(
                index=member,
                member=member,
                chunk=0,
                rows=slice(span.start, span.stop),
                start=span.start,
            )
            for member, span in enumerate(spans)
        )

    @cached_property
    def unit_heads(self) -> tuple[int, ...]:
        """KV head of each unit, ascending."""
        kv_heads = range(self.spec.kv_heads)
        if not self.tensor_parallel:
            return tuple(kv_heads)
        split = HeadSplit(heads=self.spec.heads, kv_heads=self.spec.kv_heads, parts=self.members)
        heads = [key for member in range(self.members) for key in kv_heads[split.keys(member)]]
        assert self.spec.heads % len(heads) == 0, (
            f"{self.spec.heads} query heads in {len(heads)} units of unequal size"
        )
        return tuple(heads)

    @property
    def nearest(self) -> object:
        """Key of level 1: groups with equal keys compute the same there."""
        return self.members if self.plan.levels > 1 else 1

    def drops(self, layer: int) -> bool:
        """Return True if a layer drops anything."""
        return self._schedule.drops(layer)

    def of_units(self, x_ngd: Tensor) -> Tensor:
        """Return keys or values of each unit, (n, u, d)."""
        if self.unit_heads == tuple(range(self.spec.kv_heads)):
            return x_ngd
        return x_ngd[:, list(self.unit_heads)]

    def prompt_importance(self, q_nhd: Tensor, k_nud: Tensor) -> Tensor:
        """Return the attention that the prompt's keys get from its last queries, (u, t)."""
        window = self.plan.importance_window
        queries = range(max(0, self.tokens - window), self.tokens)
        q_whd, k_tud = q_nhd[queries.start : queries.stop], k_nud[: self.tokens]
        keys, scale = range(self.tokens), self.spec.scale
        _, lse_hw = attention(
            q_whd, k_tud, k_tud, q_positions=queries, k_positions=keys, scale=scale
        )
        return importance(q_whd, k_tud, lse_hw, q_positions=queries, k_positions=keys, scale=scale)

    def score_spreads(self, q_nhd: Tensor, k_ngd: Tensor) -> Tensor:
        """Return the standard deviation of the scores of the prompt's tokens, (g,).

        A score is the mean probability that the last queries give to the key.
        """
        importance_gt = self.prompt_importance(q_nhd, k_ngd)
        sharing = self.spec.heads // self.spec.kv_heads
        return (importance_gt / sharing).std(dim=1, correction=0)

    def attend_near(self, q_nhd: Tensor, k_ngd: Tensor, v_ngd: Tensor) -> tuple[Tensor, Tensor]:
        """Compute level 1 of the prompt's rows; rows behind the prompt see everything before
        them."""
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
            (n,) bool, True for changed rows.
        """
        changed_n = torch.zeros(len(q_nhd), dtype=torch.bool)
        query_heads = q_nhd.shape[1] // len(self.unit_heads)
        for level, seeing, seen in self._rectangles:
            for units in self._alike(layer):
                heads = slice(units.start * query_heads, units.stop * query_heads)
                keys_uk = self._selected_of(layer, level, seen, importance_ut, units)
                queries_uk = (
                    self._selected_of(layer, level, seeing, importance_ut, units)
                    if self.plan.drop_queries
                    else torch.cat([self._all_rows(part, units) for part in seeing], 1)
                )
                seen_far = attention(
                    gather_kept(q_nhd[:, heads], queries_uk),
                    gather_kept(k_nud[:, units], keys_uk),
                    gather_kept(v_nud[:, units], keys_uk),
                    q_positions=None,
                    k_positions=None,
                    scale=self.spec.scale,
                )
                merge_into(out_nhd[:, heads], lse_hn[heads], *seen_far, queries_uk)
                changed_n[queries_uk.flatten()] = True
        return changed_n

    def _alike(self, layer: int) -> Iterator[slice]:
        """Yield runs of units that drop alike, and so keep as many tokens."""
        ratios = self._schedule.head_ratios(layer)
        for _, run in groupby(
            range(len(self.unit_heads)), key=lambda unit: ratios[self.unit_heads[unit]]
        ):
            units = list(run)
            yield slice(units[0], units[-1] + 1)

    @cached_property
    def _schedule(self) -> DropSchedule:
        kv_heads = self.spec.kv_heads
        return DropSchedule(
            plan=self.plan,
            layers=self.spec.layers,
            kv_heads=range(kv_heads),
            total_kv_heads=kv_heads,
            windowed=self.spec.near_layers,
        )

    @cached_property
    def _chunk(self) -> PrefillChunk:
        return PrefillChunk(sequence_id=0, start=0, length=self.tokens)

    @cached_property
    def _rectangles(self) -> list[tuple[int, list[LevelPart], list[LevelPart]]]:
        """Level, parts that see, and the parts that all of these see whole."""
        return list(self._sights())

    def _sights(self) -> Iterator[tuple[int, list[LevelPart], list[LevelPart]]]:
        geometry = LevelGeometry(parts=self.parts, levels=self.plan.segments())
        for level in range(2, self.plan.levels + 1):
            for segment in self.plan.segments()[level - 1]:
                sights = geometry.segment(level, segment.start).sights
                for keys, alike in groupby(sights, key=lambda sight: sight.keys):
                    seeing = [self.parts[sight.part] for sight in alike]
                    yield level, seeing, [self.parts[index] for index in keys]

    def _selected_of(
        self,
        layer: int,
        level: int,
        parts: Sequence[LevelPart],
        importance_ut: Tensor,
        units: slice,
    ) -> Tensor:
        """Return the rows of the prompt that some parts select at a level, (u, k)."""
        return torch.cat(
            [self._selected(layer, level, part, importance_ut, units) for part in parts], 1
        )

    def _selected(
        self, layer: int, level: int, part: LevelPart, importance_ut: Tensor, units: slice
    ) -> Tensor:
        """Return the rows of the prompt that a part selects at a level, (u, k).

        Args:
            units: units that drop alike.
        """
        ratios = self._schedule.head_ratios(layer)[self.unit_heads[units.start]]
        count = kept_counts(self.plan, [self._chunk], part, ratios)[level - 1]
        if count == part.length:
            return self._all_rows(part, units)
        always_t = torch.zeros(part.length, dtype=torch.bool)
        for run in always_kept(self.plan, self._chunk, part):
            always_t[run.start : run.stop] = True
        scores_ut = importance_ut[units, part.rows]
        return part.start + select(scores_ut, count, always_t=always_t)

    def _all_rows(self, part: LevelPart, units: slice) -> Tensor:
        rows_t = torch.arange(part.rows.start, part.rows.stop)
        return rows_t.expand(units.stop - units.start, -1)

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


class EmulatedPrompt:
    """A prompt and its answer, run by any number of configurations; decode sees all KV."""

    def __init__(self, network: Network, first: FirstLayer, scored: range) -> None:
        """Prepare part all configurations have in common.

        Args:
            first: first layer of the prompt and the answer.
            scored: rows whose logits are returned.
        """
        self._network = network
        self._first = first
        self._scored = scored
        self._rotary = network.rotary(torch.arange(len(first.x_nd)))
        self._known: dict[Hashable, Any] = {}

    def logits(self, group: EmulatedGroup) -> Tensor:
        """Compute logits as the group does, (s, v)."""
        layers = self._network.layers
        x_nd, scored_by = self._first.x_nd, (self._first.q_nhd, self._first.k_ngd)
        for index, layer in enumerate(layers[1:-1], start=1):
            x_nd, scored_by = self._layer(index, layer, x_nd, scored_by, group)
        return self._network.logits(self._last_layer(layers[-1], x_nd))

    def spreads(self, group: EmulatedGroup) -> Tensor:
        """Return the standard deviation of attention scores by layer and KV head, (l, g).

        Args:
            group: group that attends exactly; its window scores.
        """
        layers = self._network.layers
        x_nd, scored_by = self._first.x_nd, (self._first.q_nhd, self._first.k_ngd)
        found = [group.score_spreads(*scored_by)]
        for index, layer in enumerate(layers[1:-1], start=1):
            x_nd, scored_by = self._layer(index, layer, x_nd, scored_by, group)
            found.append(group.score_spreads(*scored_by))
        q_nhd, k_ngd, _ = layers[-1].qkv(x_nd, self._rotary)
        return torch.stack([*found, group.score_spreads(q_nhd, k_ngd)])

    def _layer(
        self,
        index: int,
        layer: Layer,
        x_nd: Tensor,
        previous: tuple[Tensor, Tensor],
        group: EmulatedGroup,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the residual stream after the layer, and the layer's queries and keys, which may
        score for the next one."""
        q_nhd, k_ngd, v_ngd = self._once(index, "qkv", lambda: layer.qkv(x_nd, self._rotary))
        if index in group.spec.near_layers:
            # It drops nothing and scores nothing, whatever the configuration.
            after_nd = self._once(
                index, "window", lambda: self._in_window(index, layer, x_nd, q_nhd, k_ngd, v_ngd)
            )
            return after_nd, previous
        near = self._once(
            index, ("near", group.nearest), lambda: group.attend_near(q_nhd, k_ngd, v_ngd)
        )
        if group.plan.levels == 1:
            return _finished(layer, x_nd, near), (q_nhd, k_ngd)
        same = group.plan.importance_layer == "same"
        q_scorer, k_scorer = (q_nhd, k_ngd) if same else previous
        importance_ut = self._once(
            index,
            ("importance", same, group.plan.importance_window, group.unit_heads),
            lambda: group.prompt_importance(q_scorer, group.of_units(k_scorer)),
        )
        out_nhd, lse_hn = near[0].clone(), near[1].clone()
        changed_n = group.attend_far(
            index,
            q_nhd,
            group.of_units(k_ngd),
            group.of_units(v_ngd),
            importance_ut,
            out_nhd,
            lse_hn,
        )
        if index > 1:
            return _finished(layer, x_nd, (out_nhd, lse_hn)), (q_nhd, k_ngd)
        unchanged_nd = self._once(
            index, ("finished", group.nearest), lambda: _finished(layer, x_nd, near)
        )
        after_nd = unchanged_nd.clone()
        changed = out_nhd[changed_n], lse_hn[:, changed_n]
        after_nd[changed_n] = _finished(layer, x_nd[changed_n], changed)
        return after_nd, (q_nhd, k_ngd)

    def _in_window(
        self,
        index: int,
        layer: Layer,
        x_nd: Tensor,
        q_nhd: Tensor,
        k_ngd: Tensor,
        v_ngd: Tensor,
    ) -> Tensor:
        """Return the residual stream after a layer with a window."""
        rows = range(len(x_nd))
        seen = attention(
            q_nhd,
            k_ngd,
            v_ngd,
            q_positions=rows,
            k_positions=rows,
            scale=layer.spec.scale,
            window=layer.spec.window_of(index),
        )
        return _finished(layer, x_nd, seen)

    def _last_layer(self, layer: Layer, x_nd: Tensor) -> Tensor:
        rows = slice(self._scored.start, self._scored.stop)
        q_shd, _, _ = layer.qkv(x_nd[rows], self._rotary[rows])
        k_ngd, v_ngd = layer.keys_and_values(x_nd, self._rotary)
        seen = attention(
            q_shd,
            k_ngd,
            v_ngd,
            q_positions=self._scored,
            k_positions=range(len(x_nd)),
            scale=layer.spec.scale,
            window=layer.spec.window_of(layer.spec.layers - 1),
        )
        return _finished(layer, x_nd[rows], seen)

    def _once(self, index: int, part: Hashable, compute: Callable[[], Any]) -> Any:
        """Compute a part of the second layer once, because all configurations share its input; any
        other layer anew."""
        if index != 1:
            return compute()
        if part not in self._known:
            self._known[part] = compute()
        return self._known[part]
