"""SP-NTP with communication-efficient sparse attention (CSPS §3.2.4, §3.2.5).

    q, k, v of own rows, all heads
      --first all-to-all, level by level--> kept rows of the segment, own heads of the segment
    attention level by level, progressively as rows arrive
      --second all-to-all, as micro-partitions are finished--> own rows, merged by LSE

Level 1 is own rows only and needs nobody: its micro-partitions are computed wherever a member
would otherwise wait, for the first all-to-all or for the last outputs.

With one level (N_v = 1) this is exact SP-NTP with pipelining.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from types import TracebackType

from torch import Tensor

from csps.actors.csa.all_queries_judge import AllQueriesJudge
from csps.actors.csa.geometry import LevelGeometry, Part, spanning_parts
from csps.actors.csa.judge import Judge, LayerAttention
from csps.actors.csa.kept import nested_order
from csps.actors.csa.kept_rows import KeptOrder, KeptRows
from csps.actors.csa.own_rows import OwnRows, attend_own_levels
from csps.actors.csa.owned_level import OwnedLevel
from csps.actors.csa.returns import Returns
from csps.actors.csa.routes import HeadCounts, Routes
from csps.actors.csa.schedule import DropSchedule, always_kept, kept_counts
from csps.actors.csa.window_judge import WindowJudge
from csps.actors.strategies.group import SpGroup
from csps.actors.strategies.strategy import Keep
from csps.actors.transfers import Transfers
from csps.models.network import Layer
from csps.models.rope import Rotary
from csps.protocols.csa import ALL_QUERIES


class Csa:
    """Sparse attention of one job; one object per job and rank, entered for the job's duration.

    What a layer sends may still be leaving while the next one begins; leaving the context waits.
    """

    def __init__(self, group: SpGroup, schedule: DropSchedule, *, heads: int, scale: float) -> None:
        plan = schedule.plan
        self._group = group
        self._schedule = schedule
        self._heads, self._kv_heads = heads, len(schedule.kv_heads)
        self._scale = scale
        parts = spanning_parts(group.job.pieces, group.job.bounds)
        self._geometry = LevelGeometry(parts=parts, levels=plan.segments(), nested=plan.nested)
        self._own = {part.index: part for part in parts if part.member == group.member}
        self._own_starts = {part.rows.start for part in self._own.values()}
        self._judge = self._new_judge(parts)
        self._judged_at_once = plan.importance_layer == "same"
        self._routes: dict[object, Routes] = {}
        self._timeline = group.clock.timeline
        self._transfers = Transfers(group.mesh, group.clock, overlap=plan.pipelined)

    def __enter__(self) -> Csa:
        self._transfers.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._transfers.__exit__(kind, error, trace)

    def attend_layer(
        self, index: int, layer: Layer, x_td: Tensor, rotary: Rotary, keep: Keep
    ) -> Tensor:
        """See `Strategy`. The pool gets all KV, dropped tokens' included: decode attends exactly.
        Whoever wants it to hold kept tokens only would narrow what `keep` is called with."""
        with self._timeline.phase("qkv", layer=index):
            q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
        keep(index, k_thd, v_thd)
        out_thd = self.attend(index, q_thd, k_thd, v_thd)
        with self._timeline.phase("linear", layer=index):
            return layer.attention_output(x_td, out_thd)

    def attend(self, layer: int, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor) -> Tensor:
        """Attention output (t, h, d) of own rows, in q's dtype.

        Args:
            q_thd, k_thd, v_thd: own rows, all local heads, contiguous.
        """
        rows = KeptRows(
            q_thd, k_thd, v_thd, parts=self._own, drop_queries=self._schedule.plan.drop_queries
        )
        own = self._own_rows(layer, q_thd, k_thd, v_thd)
        with self._transfers.meanwhile(partial(self._attend_own, layer, own)):
            self._attend(layer, rows, own)
        return own.running.out_thd.to(q_thd.dtype)

    def _attend(self, layer: int, rows: KeptRows, own: OwnRows) -> None:
        """One layer; wherever it waits, own rows are attended to instead."""
        if self._schedule.drops(layer):
            self._choose(layer, rows)
        judging = not self._judged_at_once and self._schedule.drops(layer + 1)
        if judging:
            self._judge.begin(layer, rows, self._transfers)
        levels = self._begin(layer, rows)
        if judging:
            self._judge.advance(layer, self._transfers)
        self._attend_levels(layer, rows, own, levels)
        if judging:
            done = LayerAttention(
                layer=layer, rows=rows, running=own.running, levels=tuple(levels.values())
            )
            self._judge.finish(done, self._transfers)

    # --- one layer -----------------------------------------------------------------------------

    def _own_rows(self, layer: int, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor) -> OwnRows:
        """What needs no other member."""
        exchanged = set() if self._geometry.local_first_level else self._own_starts
        return OwnRows(
            q_thd,
            k_thd,
            v_thd,
            pieces=[it.rows for it in self._group.local if it.rows.start not in exchanged],
            micro_partitions=self._micro_partitions(layer)[0],
            scale=self._scale,
        )

    def _attend_own(self, layer: int, own: OwnRows) -> bool:
        """One micro-partition of level 1, or false if there is none left."""
        if not own.left:
            return False
        with self._timeline.phase("attention", layer=layer, level=1, micro=own.done):
            own.attend_next()
        return True

    def _begin(self, layer: int, rows: KeptRows) -> dict[int, OwnedLevel]:
        """Every level's first all-to-all under way, near levels first."""
        routes, levels = self._layer_routes(layer), {}
        for number in routes.exchanged_levels:
            segment = routes.segment(number, self._group.member)
            level = OwnedLevel(self._group, segment, rows, layer=layer, scale=self._scale)
            level.begin(self._transfers)
            levels[number] = level
        return levels

    def _attend_levels(
        self, layer: int, rows: KeptRows, own: OwnRows, levels: Mapping[int, OwnedLevel]
    ) -> None:
        """Levels ascending: compute what arrives, and send back what is finished. What is left of
        level 1 by then hides the way of the last outputs."""
        returns = Returns(self._group, rows, self._transfers, layer=layer)
        if not self._schedule.plan.pipelined:
            self._attend_rest(layer, own)
        for level in levels.values():
            for finished in level.compute(self._transfers, levels):
                returns.send(finished)
        self._attend_rest(layer, own)
        if self._schedule.plan.nested:
            attend_own_levels(own.running, rows, self._layer_routes(layer), scale=self._scale)
        returns.merge_all(own.running)

    def _attend_rest(self, layer: int, own: OwnRows) -> None:
        while self._attend_own(layer, own):
            pass

    # --- kept sets -----------------------------------------------------------------------------

    def _choose(self, layer: int, rows: KeptRows) -> None:
        """Fix what a layer keeps."""
        if self._judged_at_once:
            self._judge.begin(layer, rows, self._transfers)
            self._judge.advance(layer, self._transfers)
        with self._timeline.phase("select", layer=layer):
            rows.keep({index: self._orders(layer, part) for index, part in self._own.items()})

    def _orders(self, layer: int, part: Part) -> tuple[KeptOrder, ...]:
        """The kept order of a part, by runs of KV heads that keep equally many."""
        importance_gt = self._judge.importance(part, self._transfers)
        always = always_kept(self._schedule.plan, self._group.job.pieces[part.piece], part)
        counts = self._layer_routes(layer).counts.kept[part.index]
        bounds = [0, *self._layer_routes(layer).counts.boundaries(), self._kv_heads]
        heads = [slice(a, b) for a, b in pairwise(bounds)]
        return tuple(
            KeptOrder(run, nested_order(importance_gt[run], counts[run.start][1:], always))
            for run in heads
            if counts[run.start][-1] < part.length
        )

    def _layer_routes(self, layer: int) -> Routes:
        """Who sends what in a layer; the same object for layers of equal numbers."""
        ratios, cuts = self._schedule.head_ratios(layer), self._micro_partitions(layer)
        if (ratios, cuts) not in self._routes:
            self._routes[ratios, cuts] = Routes(
                self._geometry,
                self._counts(ratios),
                heads=self._heads,
                kv_heads=self._kv_heads,
                micro_partitions=cuts,
            )
        return self._routes[ratios, cuts]

    def _micro_partitions(self, layer: int) -> tuple[int, ...]:
        # Without overlap one exchange per level: cutting it would only add latency.
        plan = self._schedule.plan
        return self._schedule.micro_partitions(layer) if plan.pipelined else (1,) * plan.levels

    def _counts(self, ratios: tuple[tuple[float, ...], ...]) -> HeadCounts:
        plan, pieces = self._schedule.plan, self._group.job.pieces
        return HeadCounts(
            kept=tuple(
                tuple(kept_counts(plan, pieces, part, of_head) for of_head in ratios)
                for part in self._geometry.parts
            ),
            parts=self._geometry.parts,
            drop_queries=plan.drop_queries,
        )

    def _new_judge(self, parts: tuple[Part, ...]) -> Judge:
        window = self._schedule.plan.importance_window
        if window == ALL_QUERIES:
            return AllQueriesJudge(self._group, scale=self._scale)
        return WindowJudge(self._group, parts, window=window, scale=self._scale)
