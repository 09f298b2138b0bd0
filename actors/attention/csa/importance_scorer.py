"""Importance scorers: the attention that each key received in the layer before (CSPS §3.2.4).

After Scissorhands: the unimportant tokens of a head are almost the same in adjacent layers. The
score of a key is a column sum of probabilities over the query heads of its KV head, divided by the
number of queries that saw the key.

`WindowScorer` takes the last queries of each chunk under exact attention. `AllQueriesScorer` takes
all queries, as the paper's text says; it costs half as much as attention once more.

Shape suffixes: n queries of a window or tokens of a buffer, t own rows or tokens of a part, k kept
tokens, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.base.levels import LevelPart
from csps.actors.attention.csa.kept_rows import KeptRows, LevelBuffers
from csps.actors.attention.csa.routes import SegmentRoutes, SendSlice
from csps.actors.attention.csa.running_attention import RunningAttention
from csps.actors.comm.mesh import Tag
from csps.actors.comm.transfers import Label, PendingTransfer, Transfers
from csps.kernels.arguments import Positions
from csps.kernels.attention import attention
from csps.kernels.importance import column_sums
from csps.protocols.gang.step_messages import PrefillChunk


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """Data of one member when the attention of a layer is complete."""

    layer: int
    rows: KeptRows
    running: RunningAttention
    levels: tuple[LevelBuffers, ...]


class ImportanceScorer(Protocol):
    """Scores the tokens of each layer that precedes a layer which drops tokens.

    All members call all methods in the same order, so that messages match. Computing counts as
    phase `importance` of the scored layer.
    """

    def begin(self, layer: int, rows: KeptRows, transfers: Transfers) -> None:
        """Start when queries and keys of the layer exist, before its first exchange."""
        ...

    def advance(self, layer: int, transfers: Transfers) -> None:
        """Continue while the first all-to-all travels."""
        ...

    def finish(self, done: LayerAttention, transfers: Transfers) -> None:
        """Complete the scores when the layer's attention is complete."""
        ...

    def importance(self, part: LevelPart, transfers: Transfers) -> Tensor:
        """Return the importance of a part's tokens in the layer scored last.

        Returns:
            (KV heads, tokens of the part), at least 0; fp32, or fp64 for fp64 inputs.
        """
        ...


@dataclass
class ImportanceTally:
    """Column sums of one part, and the number of queries in each sum."""

    sums_gt: Tensor
    seen_gt: Tensor

    @classmethod
    def empty(cls, kv_heads: int, tokens: int, like: Tensor) -> ImportanceTally:
        """Return a tally of zeros with the dtype and device of `like`."""
        sums_gt = like.new_zeros(kv_heads, tokens)
        return cls(sums_gt, torch.zeros_like(sums_gt))

    @property
    def mean_gt(self) -> Tensor:
        """Importance of each key; 0 for a key that no query saw."""
        return self.sums_gt / self.seen_gt.clamp_min(1)


class AllQueriesScorer:
    """Scores by all queries under the attention that was computed.

    Column sums need the final LSE of each query, which only its own member knows, after the last
    merge. So members send the LSEs of kept queries to the owners of the heads. The owners compute
    the column sums over their rectangles and send them to the members of the keys: 4 bytes per
    kept query and head one way, 4 bytes per kept key and KV head the other. A key that a level
    drops is scored by the queries that saw it at nearer levels.
    """

    def __init__(self, group: SpGroup, *, scale: float) -> None:
        self._group = group
        self._scale = scale
        self._tallies: dict[int, ImportanceTally] = {}

    def begin(self, layer: int, rows: KeptRows, transfers: Transfers) -> None:
        """Do nothing; this scorer needs final LSEs."""

    def advance(self, layer: int, transfers: Transfers) -> None:
        """Do nothing; this scorer needs final LSEs."""

    def finish(self, done: LayerAttention, transfers: Transfers) -> None:
        """See `ImportanceScorer`."""
        with transfers.timeline.phase("importance", layer=done.layer, level=1):
            self._tallies = {
                part.index: self._near(done, part) for part in done.rows.parts.values()
            }
        for level in done.levels:
            self._observe_level(done, level, transfers)

    def importance(self, part: LevelPart, transfers: Transfers) -> Tensor:
        """See `ImportanceScorer`."""
        return self._tallies[part.index].mean_gt

    def _near(self, done: LayerAttention, part: LevelPart) -> ImportanceTally:
        """Sum the columns of a part over its own queries."""
        rows = done.rows
        k_tgd = rows.kv_tge[part.rows].chunk(2, dim=-1)[0]
        tally = ImportanceTally.empty(k_tgd.shape[1], part.length, like=done.running.lse_ht)
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
        """Add the column sums over queries of other parts at one level."""
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
        """Send LSEs to the owners; return those of own heads (n, h), by micro-partition, block."""
        routes, group = level.routes, self._group
        lses = [
            [
                buffer.new_empty(buffer.shape[:2], dtype=done.running.lse_ht.dtype)
                for buffer in micro
            ]
            for micro in level.queries
        ]
        sends, recvs = [], []
        for owner, send_slice, micro in _query_slices(routes):
            home = routes.routes.counts.parts[send_slice.part].member
            if group.member not in (owner, home):
                continue
            place = (
                lses[micro][send_slice.block][send_slice.rows] if owner == group.member else None
            )
            if place is None:
                sends.append((group.peers[owner], _kept_lses(done, send_slice)))
            elif home == group.member:
                place.copy_(_kept_lses(done, send_slice))
            else:
                recvs.append((group.peers[home], place))
        label = Label(phase="importance exchange", layer=done.layer, level=routes.level)
        transfers.wait(transfers.start(sends, recvs, Tag.IMPORTANCE, label))
        return lses

    # --- column sums, by the owners of the heads -----------------------------------------------

    def _column_sums(
        self, done: LayerAttention, level: LevelBuffers, lses: list[list[Tensor]]
    ) -> list[Tensor]:
        """Return the column sums (n, g) of each key buffer of the level."""
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
        for owner, part, heads, buffer, place in _key_slices(level.routes):
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

    def _count_queries(self, routes: SegmentRoutes, rows: KeptRows, part: LevelPart) -> None:
        """Count the queries that saw the kept keys of a part."""
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


def _query_slices(routes: SegmentRoutes) -> Iterator[tuple[int, SendSlice, int]]:
    """Yield (owner, send slice, micro-partition) of all queries, in the same order everywhere."""
    for step in routes.steps:
        if step.kind == "queries":
            for owner in routes.members:
                for send_slice in routes.owner(owner).send_slices(step):
                    yield owner, send_slice, step.micro


def _key_slices(routes: SegmentRoutes) -> Iterator[tuple[int, int, slice, int, slice]]:
    """Yield (owner, part, KV heads, buffer, its rows) of all keys, in the same order everywhere."""
    for owner in routes.members:
        theirs = routes.owner(owner)
        for buffer, (heads, rows) in enumerate(
            zip(theirs.key_blocks, theirs.key_rows, strict=True)
        ):
            for part, place in rows.items():
                yield owner, part, heads, buffer, place


def _kept_lses(done: LayerAttention, send_slice: SendSlice) -> Tensor:
    """Return the LSEs (n, h) of the queries of a send slice."""
    lse_ht = done.running.lse_ht[send_slice.heads, done.rows.parts[send_slice.part].rows]
    order = done.rows.order("queries", send_slice.part, send_slice.heads)
    if order is None:
        return lse_ht[:, send_slice.tokens].T.contiguous()
    kept_gn = order.of(done.rows.kv_heads("queries", send_slice.heads), send_slice.tokens)
    kept_hn = kept_gn.repeat_interleave(len(lse_ht) // len(kept_gn), dim=0)
    return lse_ht.gather(1, kept_hn).T.contiguous()


@dataclass(frozen=True)
class _Window:
    """Queries in one part that are among the last of their chunk."""

    part: LevelPart
    first: int
    """First row of the part that is in the window."""
    q_nhd: Tensor
    lses_hn: dict[int, Tensor] = field(default_factory=dict)
    """LSEs over the keys of each part that the queries see."""

    def positions(self, part: LevelPart) -> tuple[Positions | None, Positions | None]:
        """Return positions of the queries and of a part's keys; None if all keys are seen."""
        if part.index != self.part.index:
            return None, None
        return range(self.first, part.length), range(part.length)


class WindowScorer:
    """Scores by the last queries of each chunk, under exact attention.

    Members send these queries to all members with keys of the chunk. Each of these attends the
    queries to its own keys, also to dropped ones, so that a dropped token can be selected again.
    The LSEs of all parts give the exact LSE. Both messages are small, (d + parts) numbers per
    query and head, and are over before the layer is: no member waits for the end of another
    member's layer.
    """

    def __init__(
        self, group: SpGroup, parts: Sequence[LevelPart], *, window: int, scale: float
    ) -> None:
        self._group = group
        self._parts = parts
        self._scale = scale
        self._firsts = {
            part.index: first
            for part in parts
            if (first := _first_row(group.step.chunks[part.chunk], part, window)) < part.length
        }
        self._windows: list[_Window] = []
        self._layer: int
        self._kv_tge: Tensor
        self._queries: PendingTransfer
        self._lses: PendingTransfer

    def begin(self, layer: int, rows: KeptRows, transfers: Transfers) -> None:
        """Begin to send the windows to all members with keys that they see."""
        self._layer, self._kv_tge = layer, rows.kv_tge
        chunks = self._group.step.chunks
        self._windows = [
            self._window(index, rows.q_thd)
            for index in self._firsts
            if self._group.is_active(chunks[self._parts[index].chunk])
        ]
        sends, recvs = [], []
        for window in self._windows:
            home = window.part.member
            audience = {part.member for part in self._seen_by(window)} - {home}
            if home == self._group.member:
                sends += [(self._group.peers[m], window.q_nhd) for m in sorted(audience)]
            elif self._group.member in audience:
                recvs.append((self._group.peers[home], window.q_nhd))
        label = Label(phase="importance exchange", layer=layer)
        self._queries = transfers.start(sends, recvs, Tag.IMPORTANCE, label)

    def advance(self, layer: int, transfers: Transfers) -> None:
        """Begin to send the LSEs over own keys to all other members with keys."""
        transfers.wait(self._queries)
        with transfers.timeline.phase("importance", layer=layer):
            self._compute_lses()
        sends, recvs = [], []
        for window in self._windows:
            holders = {self._parts[index].member for index in window.lses_hn}
            for index, lse in window.lses_hn.items():
                part = self._parts[index]
                home = self._group.peers[part.member]
                if part.member == self._group.member:
                    others = sorted(holders - {self._group.member})
                    sends += [(self._group.peers[member], lse) for member in others]
                else:
                    recvs.append((home, lse))
        label = Label(phase="importance exchange", layer=layer)
        self._lses = transfers.start(sends, recvs, Tag.IMPORTANCE, label)

    def finish(self, done: LayerAttention, transfers: Transfers) -> None:
        """Do nothing; the scores are complete earlier."""

    def importance(self, part: LevelPart, transfers: Transfers) -> Tensor:
        """See `ImportanceScorer`."""
        transfers.wait(self._lses)
        with transfers.timeline.phase("importance", layer=self._layer):
            k_tgd, _ = self._kv_tge[part.rows].chunk(2, dim=-1)
            tally = ImportanceTally.empty(k_tgd.shape[1], part.length, like=self._accumulator)
            for window in self._windows:
                if window.part.chunk == part.chunk and window.part.index >= part.index:
                    self._score(window, part, k_tgd, tally)
            return tally.mean_gt

    def _compute_lses(self) -> None:
        """Compute LSEs over keys of own parts, and allocate those of other members' parts."""
        for window in self._windows:
            seen = list(self._seen_by(window))
            if self._group.member in {part.member for part in seen}:
                for part in seen:
                    window.lses_hn[part.index] = self._lse(window, part)

    def _score(
        self, window: _Window, part: LevelPart, k_tgd: Tensor, tally: ImportanceTally
    ) -> None:
        q_positions, k_positions = window.positions(part)
        tally.sums_gt += column_sums(
            window.q_nhd,
            k_tgd,
            torch.stack(tuple(window.lses_hn.values())).logsumexp(dim=0),
            q_positions=q_positions,
            k_positions=k_positions,
            scale=self._scale,
        )
        tally.seen_gt += len(window.q_nhd)
        if part.index == window.part.index:
            within_gt = tally.seen_gt[:, window.first :]
            within_gt -= torch.arange(within_gt.shape[1], device=within_gt.device)

    def _lse(self, window: _Window, part: LevelPart) -> Tensor:
        """Return LSEs (h, n) over the keys of an own part; for another's part, a buffer."""
        if part.member != self._group.member:
            heads, queries = window.q_nhd.shape[1], len(window.q_nhd)
            return self._accumulator.new_empty(heads, queries)
        q_positions, k_positions = window.positions(part)
        k_tgd, v_tgd = self._kv_tge[part.rows].chunk(2, dim=-1)
        _, lse_hn = attention(
            window.q_nhd,
            k_tgd,
            v_tgd,
            q_positions=q_positions,
            k_positions=k_positions,
            scale=self._scale,
        )
        return lse_hn.contiguous()

    def _window(self, index: int, q_thd: Tensor) -> _Window:
        """Return a window of own queries, or a buffer for the queries of another member."""
        part, first = self._parts[index], self._firsts[index]
        if part.member == self._group.member:
            return _Window(part, first, q_thd[part.rows][first:])
        return _Window(part, first, q_thd.new_empty(part.length - first, *q_thd.shape[1:]))

    def _seen_by(self, window: _Window) -> Iterator[LevelPart]:
        """Yield the parts with keys that a window's queries see."""
        for part in self._parts:
            if part.chunk == window.part.chunk and part.index <= window.part.index:
                yield part

    @property
    def _accumulator(self) -> Tensor:
        """An empty tensor of the dtype and device of LSEs."""
        dtype = torch.promote_types(self._kv_tge.dtype, torch.float32)
        return self._kv_tge.new_empty(0, dtype=dtype)


def _first_row(chunk: PrefillChunk, part: LevelPart, window: int) -> int:
    """Return the first row of a part that is among the last `window` of its chunk."""
    return max(0, chunk.start + chunk.length - window - part.start)
