"""SP-NTP with communication-efficient sparse attention (CSPS §3.2.4, §3.2.5).

    q, k, v of own rows, all heads
      --first all-to-all, near levels first--> kept rows of the segment, own heads of the segment
    attention level by level, progressively as rows arrive
      --second all-to-all, as micro-partitions are finished--> own rows, merged by LSE

Level 1 is own rows only and needs no other member. A member computes its micro-partitions whenever
it would wait for the first all-to-all or for the last outputs. Yield points lie between
micro-partitions of all levels. With one level (N_v = 1) this is exact SP-NTP with pipelining.

If a prompt comes in chunks, levels, kept sets and dropped queries concern the tokens of one chunk,
and every row sees all history exactly. The first chunk has the sinks, the last the tail. The last
queries of each chunk score importance, because the queries at the end of the prompt are not known
earlier. History gets its probability mass in each row, but is never dropped.

With drop ratios all members know how many tokens each part keeps. With coverages only the member of
a part does, when its keys are scored; it tells the others before the first all-to-all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from csps.actors.attention.base.dropped_mass import mass_without
from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.base.history import (
    History,
    HistoryMember,
    members_of,
    overlapping,
    rows_by_chunk,
)
from csps.actors.attention.base.levels import (
    DropSchedule,
    LevelGeometry,
    LevelPart,
    always_kept,
    always_kept_mask,
    kept_counts,
    spanning_parts,
)
from csps.actors.attention.base.strategy import (
    OverlappingStrategy,
    Sinks,
    StoreKv,
    no_sinks,
)
from csps.actors.attention.base.yield_points import query_blocks
from csps.actors.attention.csa.importance_scorer import (
    AllQueriesScorer,
    ImportanceScorer,
    LayerAttention,
    WindowScorer,
)
from csps.actors.attention.csa.kept_rows import KeptOrder, KeptRows, LevelBuffers, nested_order
from csps.actors.attention.csa.level_attention import FirstAllToAll, OwnedLevel
from csps.actors.attention.csa.routes import HeadCounts, Routes
from csps.actors.attention.csa.running_attention import OutputAllToAll, OwnRows, attend_own_levels
from csps.actors.comm.mesh import Tag
from csps.actors.comm.transfers import Label
from csps.actors.kv_cache.kv_pool import KvPool
from csps.kernels.importance import covering_counts
from csps.kernels.merge import merge_sink
from csps.models.network.network import Layer
from csps.models.network.rope import Rotary
from csps.protocols.attention.csa import ALL_QUERIES

_log = logging.getLogger(__name__)


class Csa(OverlappingStrategy):
    """Sparse attention of one step on one rank; entered for the duration of the step.

    Sends of a layer may continue while the next layer runs; leaving the context waits for them.
    """

    def __init__(
        self,
        group: SpGroup,
        schedule: DropSchedule,
        pool: KvPool,
        *,
        heads: int,
        scale: float,
        sinks: Sinks = no_sinks,
    ) -> None:
        plan = schedule.plan
        super().__init__(group, overlap=plan.pipelined)
        self._group = group
        self._schedule = schedule
        self._heads, self._kv_heads = heads, len(schedule.kv_heads)
        self._scale, self._sinks = scale, sinks
        parts = spanning_parts(group.step.chunks, group.step.bounds)
        self._geometry = LevelGeometry(parts=parts, levels=plan.segments(), nested=plan.nested)
        self._own = {part.index: part for part in parts if part.member == group.member}
        """Own parts by index, without those of cancelled chunks."""
        self._followed = [part.index for part in self._own.values() if not self._is_last(part)]
        """Own parts that are not the last of their chunk."""
        self._own_starts = {part.rows.start for part in self._own.values()}
        self._scorer = self._new_scorer(parts)
        self._may_pause = False
        """True while every exchange that begins also ends a phase."""
        self._scored_at_once = plan.importance_layer == "same"
        self._routes: dict[object, Routes] = {}
        self._covering_routes: Routes
        """Routes of the layer at work, if its coverages decide how many tokens are kept."""
        self._history = History(
            group,
            pool,
            self._members(),
            group_heads=heads // len(schedule.kv_heads),
            scale=scale,
            begin=overlapping(self._transfers),
        )
        self._timeline = group.clock.timeline

    def offered(self, layer: int, member: int) -> Collection[int]:
        """See `Strategy`. A member receives kept tokens only, and only some of the heads."""
        return ()

    def attend_layer(
        self, index: int, layer: Layer, x_td: Tensor, rotary: Rotary, store: StoreKv
    ) -> Tensor:
        """See `Strategy`."""
        with self._timeline.phase("qkv", layer=index):
            q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
        # KV is sent before the layer selects tokens, unless decode sees the selected ones only.
        if self._schedule.narrows(index):
            store_chosen = partial(store, index, k_thd, v_thd)
            out_thd = self.attend(index, q_thd, k_thd, v_thd, store_chosen)
        else:
            store(index, k_thd, v_thd)
            out_thd = self.attend(index, q_thd, k_thd, v_thd)
        with self._timeline.phase("linear", layer=index):
            return layer.attention_output(x_td, out_thd)

    def attend(
        self,
        layer: int,
        q_thd: Tensor,
        k_thd: Tensor,
        v_thd: Tensor,
        store_chosen: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Return the attention output (t, h, d) of own rows, in q's dtype.

        Args:
            q_thd, k_thd, v_thd: own rows, all local heads, contiguous.
            store_chosen: called with the tokens that decode sees, (KV heads, t) bool, when they
                are selected; None if decode sees all.
        """
        self._drop_cancelled()
        rows = KeptRows(
            q_thd, k_thd, v_thd, parts=self._own, drop_queries=self._schedule.plan.drop_queries
        )
        own = self._own_rows(layer, q_thd, k_thd, v_thd)
        with self._transfers.meanwhile(partial(self._attend_own, layer, own)):
            if self._schedule.drops(layer):
                self._choose(layer, rows)
            if store_chosen is not None:
                store_chosen(rows.kept_gt(self._followed))
            self._attend(layer, rows, own)
        running = own.running
        if (sinks_h := self._sinks(layer)) is not None:
            merge_sink(running.out_thd, running.lse_ht, sinks_h)
        return running.out_thd.to(q_thd.dtype)

    def _attend(self, layer: int, rows: KeptRows, own: OwnRows) -> None:
        """Compute the exchanged levels of one layer; own rows are computed while it waits."""
        scoring = not self._scored_at_once and self._schedule.drops(self._schedule.after(layer))
        if scoring:
            self._scorer.begin(layer, rows, self._transfers)
        levels = self._levels(layer, rows)
        arrivals = FirstAllToAll(
            self._group,
            rows,
            levels,
            self._transfers,
            layer=layer,
            consolidated=not self._schedule.plan.pipelined,
        )
        asked = self._history.ask(layer, rows.q_thd)
        if scoring:
            self._scorer.advance(layer, self._transfers)
        asked.answer()
        self._attend_levels(layer, rows, own, levels, arrivals)
        if scoring:
            done = LayerAttention(
                layer=layer, rows=rows, running=own.running, levels=tuple(levels.values())
            )
            self._scorer.finish(done, self._transfers)
        asked.merge_into(own.running.out_thd, own.running.lse_ht)

    def _drop_cancelled(self) -> None:
        """Exclude cancelled chunks from exchanges, computing and scores from this layer on."""
        chunks = self._group.step.chunks
        cancelled = frozenset(i for i, c in enumerate(chunks) if not self._group.is_active(c))
        if cancelled != self._geometry.cancelled:
            _log.debug(
                "step %d: dropping chunks of cancelled sequences %s",
                self._group.step.step_id,
                sorted(chunks[index].sequence_id for index in cancelled),
            )
            self._geometry = replace(self._geometry, cancelled=cancelled)
            self._routes.clear()
            self._own = {i: part for i, part in self._own.items() if part.chunk not in cancelled}

    def _is_last(self, part: LevelPart) -> bool:
        chunk = self._group.step.chunks[part.chunk]
        return part.start + part.length == chunk.start + chunk.length

    def _members(self) -> list[HistoryMember]:
        group = self._group

        def rows(member: int) -> tuple[range, ...]:
            own = group.rows_of(member)
            return rows_by_chunk(group.step.chunks, range(own.start, own.stop))

        return members_of(
            group,
            rows=rows,
            heads=lambda member: range(self._heads),
            resident=range(self._kv_heads),
        )

    # --- one layer -----------------------------------------------------------------------------

    def _own_rows(self, layer: int, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor) -> OwnRows:
        """Return the attention that needs no other member."""
        exchanged = set() if self._geometry.local_first_level else self._own_starts
        chunks = [
            local.rows
            for local in self._group.local
            if local.rows.start not in exchanged and self._group.is_active(local.chunk)
        ]
        longest = max((rows.stop - rows.start for rows in chunks), default=0)
        blocks = sum(1 for _ in query_blocks(q_thd[:longest], longest))
        return OwnRows(
            q_thd,
            k_thd,
            v_thd,
            chunks=chunks,
            # Nothing of it is sent, so there may be as many partitions as yield points need.
            micro_partitions=max(self._micro_partitions(layer)[0], blocks),
            scale=self._scale,
        )

    def _attend_own(self, layer: int, own: OwnRows) -> bool:
        """Compute one micro-partition of level 1; return False if none is left."""
        # Never called while waiting time is counted, so the time of a step is counted once. There
        # is no yield point in waits before the levels, where exchanges follow each other closely.
        if not own.left:
            return False
        with self._timeline.phase("attention", layer=layer, level=1, micro=own.done):
            own.attend_next()
        if self._may_pause:
            self._group.points.point()
        return True

    def _levels(self, layer: int, rows: KeptRows) -> dict[int, LevelBuffers]:
        """Return the buffers of the exchanged levels by number, ascending."""
        routes, member = self._layer_routes(layer), self._group.member
        return {
            number: LevelBuffers(routes.segment(number, member), member, rows)
            for number in routes.exchanged_levels
        }

    def _attend_levels(
        self,
        layer: int,
        rows: KeptRows,
        own: OwnRows,
        levels: Mapping[int, LevelBuffers],
        arrivals: FirstAllToAll,
    ) -> None:
        """Compute levels as their rows arrive, in ascending order, and send outputs back."""
        outputs = OutputAllToAll(self._group, rows, self._transfers, layer=layer)
        self._may_pause = True
        if not self._schedule.plan.pipelined:
            self._attend_rest(layer, own)
        for number, buffers in levels.items():
            level = OwnedLevel(self._group, buffers, layer=layer, scale=self._scale)
            finished = level.compute(arrivals, levels)
            for _ in range(self._micro_partitions(layer)[number - 1]):
                done = next(finished, None)  # None in a segment where no part sees another
                self._group.points.close()
                if done is not None:
                    outputs.send(done)
        if self._schedule.plan.pipelined:  # the rest of level 1 hides the last outputs' way
            self._attend_rest(layer, own)
        self._may_pause = False
        if self._schedule.plan.nested:
            attend_own_levels(own.running, rows, self._layer_routes(layer), scale=self._scale)
        outputs.merge_all(own.running)

    def _attend_rest(self, layer: int, own: OwnRows) -> None:
        while self._attend_own(layer, own):
            pass
        self._group.points.close()

    # --- kept sets -----------------------------------------------------------------------------

    def _choose(self, layer: int, rows: KeptRows) -> None:
        """Select the tokens that a layer keeps."""
        if self._scored_at_once:
            self._scorer.begin(layer, rows, self._transfers)
            self._scorer.advance(layer, self._transfers)
        importance = {
            index: self._scorer.importance(part, self._transfers)
            for index, part in self._own.items()
        }
        if self._schedule.head_coverages(layer) is not None:
            self._covering_routes = self._routes_of(layer, self._covering(layer, importance))
        with self._timeline.phase("select", layer=layer):
            rows.restrict(
                {
                    index: self._orders(layer, part, importance[index])
                    for index, part in self._own.items()
                }
            )

    def _covering(self, layer: int, importance: Mapping[int, Tensor]) -> HeadCounts:
        """Return the numbers of tokens that cover the layer's coverages.

        The owner of a part counts, and sends its numbers to all members: one message to each, of
        one number per KV head and farther level of each of its parts.
        """
        coverages = self._schedule.head_coverages(layer)
        levels, group = self._schedule.plan.levels, self._group
        shape = len(self._schedule.kv_heads), levels - 1
        shares_gv = torch.tensor(coverages, dtype=torch.float64)[:, 1:]
        with self._timeline.phase("select", layer=layer):
            own = [
                covering_counts(
                    importance[index],
                    shares_gv,
                    always_t=always_kept_mask(
                        self._schedule.plan, group.step.chunks[part.chunk], part
                    ),
                )
                for index, part in self._own.items()
            ]
        counts: dict[int, Tensor] = {
            member: torch.empty(len(parts), *shape, dtype=torch.int32, device=group.mesh.device)
            for member, parts in self._active_parts.items()
        }
        if own:
            counts[group.member] = torch.stack(own).int()
        mine = counts[group.member]
        transfer = self._transfers.start(
            [(group.peers[member], mine) for member in group.others],
            [(group.peers[member], counts[member]) for member in group.others],
            Tag.IMPORTANCE,
            Label(phase="importance exchange", layer=layer),
        )
        self._transfers.wait(transfer)
        kept = [((part.length,) * levels,) * shape[0] for part in self._geometry.parts]
        for member, parts in self._active_parts.items():
            for part, of_heads in zip(parts, counts[member].tolist(), strict=True):
                kept[part.index] = tuple((part.length, *of_levels) for of_levels in of_heads)
        return self._head_counts(kept)

    @property
    def _active_parts(self) -> Mapping[int, Sequence[LevelPart]]:
        """Parts of each member, without those of cancelled chunks."""
        active = [
            part for part in self._geometry.parts if part.chunk not in self._geometry.cancelled
        ]
        return {
            member: [part for part in active if part.member == member]
            for member in range(self._group.size)
        }

    def _orders(self, layer: int, part: LevelPart, importance_gt: Tensor) -> tuple[KeptOrder, ...]:
        """Return the kept order of a part, by runs of KV heads that keep equally many."""
        always = always_kept(self._schedule.plan, self._group.step.chunks[part.chunk], part)
        counts = self._layer_routes(layer).counts.kept[part.index]
        bounds = [0, *self._layer_routes(layer).counts.boundaries(), self._kv_heads]
        orders = []
        for run in (slice(a, b) for a, b in pairwise(bounds)):
            order_gk = None
            if counts[run.start][-1] < part.length:
                order_gk = nested_order(importance_gt[run], counts[run.start][1:], always)
                orders.append(KeptOrder(run, order_gk))
            self._tally(layer, part, run, importance_gt[run], order_gk)
        return tuple(orders)

    def _tally(
        self,
        layer: int,
        part: LevelPart,
        run: slice,
        importance_gt: Tensor,
        order_gk: Tensor | None,
    ) -> None:
        """Count the mass of a part that its chunk's last queries do not see in a layer."""
        level = self._geometry.level_of_last_queries(part)
        total_g = importance_gt.sum(dim=1)
        dropped_g = torch.zeros_like(total_g)
        if level > 1 and order_gk is not None:
            kept = self._layer_routes(layer).counts.kept[part.index][run.start][level - 1]
            dropped_g = mass_without(importance_gt, order_gk[:, :kept])
        self._group.dropped_mass.add(
            self._group.step.chunks[part.chunk].sequence_id,
            layer,
            run,
            kv_heads=self._kv_heads,
            dropped_g=dropped_g,
            total_g=total_g,
        )

    def _layer_routes(self, layer: int) -> Routes:
        """Return the routes of a layer; layers with equal ratios have one object."""
        if self._schedule.head_coverages(layer) is not None:
            return self._covering_routes
        ratios, cuts = self._schedule.head_ratios(layer), self._micro_partitions(layer)
        if (ratios, cuts) not in self._routes:
            self._routes[ratios, cuts] = self._routes_of(layer, self._counts(ratios))
        return self._routes[ratios, cuts]

    def _routes_of(self, layer: int, counts: HeadCounts) -> Routes:
        return Routes(
            self._geometry,
            counts,
            heads=self._heads,
            kv_heads=self._kv_heads,
            micro_partitions=self._micro_partitions(layer),
        )

    def _micro_partitions(self, layer: int) -> tuple[int, ...]:
        # Without overlap there is one exchange; splitting it would hide nothing.
        plan = self._schedule.plan
        return self._schedule.micro_partitions(layer) if plan.pipelined else (1,) * plan.levels

    def _counts(self, ratios: tuple[tuple[float, ...], ...]) -> HeadCounts:
        plan, chunks = self._schedule.plan, self._group.step.chunks
        return self._head_counts(
            [
                tuple(kept_counts(plan, chunks, part, head_ratios) for head_ratios in ratios)
                for part in self._geometry.parts
            ]
        )

    def _head_counts(self, kept: Sequence[tuple[tuple[int, ...], ...]]) -> HeadCounts:
        return HeadCounts(
            kept=tuple(kept),
            parts=self._geometry.parts,
            drop_queries=self._schedule.plan.drop_queries,
        )

    def _new_scorer(self, parts: tuple[LevelPart, ...]) -> ImportanceScorer:
        window = self._schedule.plan.importance_window
        if window == ALL_QUERIES:
            return AllQueriesScorer(self._group, scale=self._scale)
        return WindowScorer(self._group, parts, window=window, scale=self._scale)
