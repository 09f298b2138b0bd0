"""The attention that one member computes at one level, for the heads that it owns there.

Shape suffixes: n tokens, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from csps.actors.csa.first_exchange import FirstAllToAll
from csps.actors.csa.level_buffers import LevelBuffers
from csps.actors.csa.routes import Rectangle, SegmentRoutes, Step
from csps.actors.strategies.group import SpGroup
from csps.actors.strategies.query_blocks import query_blocks
from csps.kernels.attention import attention
from csps.kernels.merge import merge_into, nothing_seen


@dataclass(frozen=True)
class Finished:
    """One micro-partition of queries, whose attention at this level is complete."""

    routes: SegmentRoutes
    micro: int
    outs_nhd: tuple[Tensor, ...]
    """Per block of the owner, in the order of its query buffers."""
    lses_hn: tuple[Tensor, ...]


class OwnedLevel:
    """One level of one layer on one member."""

    def __init__(self, group: SpGroup, buffers: LevelBuffers, *, layer: int, scale: float) -> None:
        self.buffers = buffers
        self.routes = buffers.routes
        self._group = group
        self._layer = layer
        self._scale = scale
        self._partial: dict[int, tuple[Tensor, Tensor]] = {}
        """By query block, what its queries have seen so far."""

    def compute(
        self, arrivals: FirstAllToAll, nearer: Mapping[int, LevelBuffers]
    ) -> Iterator[Finished]:
        """Attend as micro-partitions arrive, with points between them; yields those of the queries
        as they are finished.

        Args:
            nearer: lower levels by number, whose data has all arrived.
        """
        for step in self.routes.steps:
            arrivals.wait(self.routes.level, step)
            self.buffers.take_reused(step, nearer)
            if not self._computes(step):
                continue
            for rectangle in self.buffers.mine.rectangles(step):
                self._attend_in_blocks(rectangle, step)
            if self._finishes(step):
                yield self._finished(step.query_micro)

    def _attend_in_blocks(self, rectangle: Rectangle, step: Step) -> None:
        timeline = self._group.clock.timeline
        q_nhd = self.buffers.queries[step.query_micro][rectangle.block][rectangle.queries]
        for rows in query_blocks(q_nhd, rectangle.keys.stop - rectangle.keys.start):
            with timeline.phase(
                "attention", layer=self._layer, level=self.routes.level, micro=step.micro
            ):
                self._attend(rectangle, rows, step)
            self._group.points.point()

    def _attend(self, rectangle: Rectangle, part: slice, step: Step) -> None:
        """Some of a rectangle's queries."""
        queries = self.buffers.queries[step.query_micro][rectangle.block][rectangle.queries]
        k_ngd, v_ngd = self.buffers.keys_of(rectangle)
        q_nhd, sees = queries[part], len(k_ngd)
        positions = range(sees - len(queries), sees)[part]
        out_nhd, lse_hn = attention(
            q_nhd,
            k_ngd,
            v_ngd,
            q_positions=positions if rectangle.causal else None,
            k_positions=range(sees) if rectangle.causal else None,
            scale=self._scale,
        )
        first, block = rectangle.queries.start, rectangle.block
        rows = slice(first + part.start, first + part.stop)
        buffer = self.buffers.queries[step.query_micro][block]
        if len(q_nhd) == len(buffer) and block not in self._partial:
            self._partial[block] = out_nhd, lse_hn  # one call for all is common: no copy
            return
        if block not in self._partial:
            self._partial[block] = nothing_seen(buffer)
        out, lse = self._partial[block]
        merge_into(out[rows], lse[:, rows], out_nhd, lse_hn)

    def _computes(self, step: Step) -> bool:
        return step != Step("queries", 0)  # which waits for the first keys

    def _finishes(self, step: Step) -> bool:
        if step.kind == "queries":
            return step.micro > 0
        return step.micro == self.routes.micro_partitions - 1

    def _finished(self, micro: int) -> Finished:
        done = [
            self._partial[block] if block in self._partial else nothing_seen(buffer)
            for block, buffer in enumerate(self.buffers.queries[micro])
        ]
        self._partial.clear()
        outs, lses = tuple(out for out, _ in done), tuple(lse for _, lse in done)
        return Finished(self.routes, micro, outs, lses)
