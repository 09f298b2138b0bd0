"""Importance judged by all queries: what the paper's letter asks for.

Column sums need each query's final LSE, which only its own member knows, and after the last merge
only. So the LSEs of kept queries go back to the owners of the heads, these form the column sums
over their rectangles once more, and send the sums to the keys' members: 4 bytes per kept query
and head one way, 4 per kept key and KV head the other. What costs is the second multiplication of
queries with keys, half as much again as attention; `csps.actors.csa.window_judge` avoids it.

A key that a level drops is judged by the queries that saw it at nearer levels.

Shape suffixes: n tokens of a buffer, t own rows, k kept tokens, h query heads, g KV heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from csps.actors.csa.judge import LayerAttention, Tally
from csps.actors.csa.kept_rows import KeptRows
from csps.actors.csa.level_buffers import LevelBuffers
from csps.actors.csa.routes import Parcel, SegmentRoutes
from csps.actors.levels.geometry import Part
from csps.actors.mesh import Tag
from csps.actors.strategies.group import SpGroup
from csps.actors.transfers import Label, Transfers
from csps.kernels.importance import column_sums


class AllQueriesJudge:
    """See the module."""

    def __init__(self, group: SpGroup, *, scale: float) -> None:
        self._group = group
        self._scale = scale
        self._tallies: dict[int, Tally] = {}

    def begin(self, layer: int, rows: KeptRows, transfers: Transfers) -> None:
        """See `Judge`: nothing is known yet."""

    def advance(self, layer: int, transfers: Transfers) -> None:
        """See `Judge`: nothing is known yet."""

    def finish(self, done: LayerAttention, transfers: Transfers) -> None:
        """See `Judge`."""
        with transfers.timeline.phase("importance", layer=done.layer, level=1):
            self._tallies = {it.index: self._near(done, it) for it in done.rows.parts.values()}
        for level in done.levels:
            self._observe_level(done, level, transfers)

    def importance(self, part: Part, transfers: Transfers) -> Tensor:
        """See `Judge`."""
        return self._tallies[part.index].mean_gt

    def _near(self, done: LayerAttention, part: Part) -> Tally:
        """What the part's own queries say."""
        rows = done.rows
        k_tgd = rows.kv_tge[part.rows].chunk(2, dim=-1)[0]
        tally = Tally.empty(k_tgd.shape[1], part.length, like=done.running.lse_ht)
        tally.sums_gt += column_sums(
            rows.q_thd[part.rows],
            k_tgd,
            done.running.lse_ht[:, part.rows].contiguous(),
            q_positions=range(part.length),
            k_positions=range(part.length),
            scale=self._scale,
        )
        tally.seen_gt += torch.arange(part.length, 0, -1, device=tally.seen_gt.device)
        return tally

    def _observe_level(
        self, done: LayerAttention, level: LevelBuffers, transfers: Transfers
    ) -> None:
        """What queries of other parts say at one level."""
        lses = self._exchange_lses(done, level, transfers)
        number = level.routes.level
        with transfers.timeline.phase("importance", layer=done.layer, level=number):
            sums = self._column_sums(done, level, lses)
        self._exchange_sums(done, level, sums, transfers)
        for part in done.rows.parts.values():
            if part.index in level.routes.parts_of("keys"):
                self._count_queries(level.routes, done.rows, part)

    # --- LSEs of kept queries, to the owners of their heads ------------------------------------

    def _exchange_lses(
        self, done: LayerAttention, level: LevelBuffers, transfers: Transfers
    ) -> list[list[Tensor]]:
        """(n, h) like the level's query buffers, by micro-partition and block."""
        routes, group = level.routes, self._group
        lses = [
            [
                buffer.new_empty(buffer.shape[:2], dtype=done.running.lse_ht.dtype)
                for buffer in micro
            ]
            for micro in level.queries
        ]
        sends, recvs = [], []
        for owner, parcel, micro in _query_parcels(routes):
            home = routes.routes.counts.parts[parcel.part].member
            if group.member not in (owner, home):
                continue
            place = lses[micro][parcel.block][parcel.rows] if owner == group.member else None
            if place is None:
                sends.append((group.peers[owner], _kept_lses(done, parcel)))
            elif home == group.member:
                place.copy_(_kept_lses(done, parcel))
            else:
                recvs.append((group.peers[home], place))
        label = Label(phase="importance exchange", layer=done.layer, level=routes.level)
        transfers.wait(transfers.start(sends, recvs, Tag.IMPORTANCE, label))
        return lses

    # --- column sums, by the owners of the heads -----------------------------------------------

    def _column_sums(
        self, done: LayerAttention, level: LevelBuffers, lses: list[list[Tensor]]
    ) -> list[Tensor]:
        """(n, g) like the level's key buffers."""
        mine = level.routes.owner(self._group.member)
        sums = [done.running.lse_ht.new_zeros(keys.shape[:2]) for keys in level.keys]
        for micro, queries in enumerate(level.queries):
            for rectangle in mine.whole_rectangles(micro):
                block = mine.query_blocks[rectangle.block]
                begin = mine.key_blocks[block.key_buffer].start
                heads = slice(block.keys.start - begin, block.keys.stop - begin)
                sums[block.key_buffer][rectangle.keys, heads] += column_sums(
                    queries[rectangle.block][rectangle.queries],
                    level.keys_of(rectangle)[0],
                    lses[micro][rectangle.block][rectangle.queries].T.contiguous(),
                    q_positions=None,
                    k_positions=None,
                    scale=self._scale,
                ).T
        return sums

    # --- and back to the members whose keys they are -------------------------------------------

    def _exchange_sums(
        self, done: LayerAttention, level: LevelBuffers, sums: list[Tensor], transfers: Transfers
    ) -> None:
        arriving: list[tuple[int, slice, Tensor]] = []
        sends, recvs = [], []
        for owner, part, heads, buffer, place in _key_parcels(level.routes):
            home = level.routes.routes.counts.parts[part].member
            mine = sums[buffer][place] if owner == self._group.member else None
            if home != self._group.member:
                if mine is not None:
                    sends.append((self._group.peers[home], mine))
                continue
            if mine is None:
                shape = place.stop - place.start, heads.stop - heads.start
                mine = done.running.lse_ht.new_empty(shape)
                recvs.append((self._group.peers[owner], mine))
            arriving.append((part, heads, mine))
        label = Label(phase="importance exchange", layer=done.layer, level=level.routes.level)
        transfers.wait(transfers.start(sends, recvs, Tag.IMPORTANCE, label))
        for part, heads, sums_kg in arriving:
            self._add(done.rows, part, heads, sums_kg.T)

    def _add(self, rows: KeptRows, part: int, heads: slice, sums_gk: Tensor) -> None:
        sums_gt = self._tallies[part].sums_gt[heads]
        order = rows.order("keys", part, heads)
        if order is None:
            sums_gt[:, : sums_gk.shape[1]] += sums_gk
        else:
            kept_gk = order.of(heads, slice(0, sums_gk.shape[1]))
            sums_gt.scatter_add_(1, kept_gk, sums_gk)

    def _count_queries(self, routes: SegmentRoutes, rows: KeptRows, part: Part) -> None:
        """How many queries saw the part's kept keys."""
        seen_gt, group = self._tallies[part.index].seen_gt, routes.routes.group
        for head in range(len(seen_gt)):
            heads = slice(head, head + 1)
            queries = sum(
                routes.count("queries", sight.part, slice(head * group, (head + 1) * group))
                for sight in routes.segment.sights
                if part.index in sight.keys
            )
            kept = slice(0, routes.count("keys", part.index, heads))
            order = rows.order("keys", part.index, heads)
            seen_gt[head, kept if order is None else order.of(heads, kept)[0]] += queries


def _query_parcels(routes: SegmentRoutes) -> Iterator[tuple[int, Parcel, int]]:
    """(owner, parcel, micro-partition) of all queries of a segment, in one order for all."""
    for step in routes.steps:
        if step.kind == "queries":
            for owner in routes.members:
                for parcel in routes.owner(owner).parcels(step):
                    yield owner, parcel, step.micro


def _key_parcels(routes: SegmentRoutes) -> Iterator[tuple[int, int, slice, int, slice]]:
    """(owner, part, KV heads, owner's buffer, its rows) of all keys, in one order for all."""
    for owner in routes.members:
        theirs = routes.owner(owner)
        for buffer, (heads, rows) in enumerate(
            zip(theirs.key_blocks, theirs.key_rows, strict=True)
        ):
            for part, place in rows.items():
                yield owner, part, heads, buffer, place


def _kept_lses(done: LayerAttention, parcel: Parcel) -> Tensor:
    """(n, h) LSEs of a parcel's queries."""
    lse_ht = done.running.lse_ht[parcel.heads, done.rows.parts[parcel.part].rows]
    order = done.rows.order("queries", parcel.part, parcel.heads)
    if order is None:
        return lse_ht[:, parcel.tokens].T.contiguous()
    kept_gn = order.of(done.rows.kv_heads("queries", parcel.heads), parcel.tokens)
    kept_hn = kept_gn.repeat_interleave(len(lse_ht) // len(kept_gn), dim=0)
    return lse_ht.gather(1, kept_hn).T.contiguous()
