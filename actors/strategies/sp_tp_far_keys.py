"""Communication-efficient sparse attention's share in SP-TP: fewer far keys (CSPS §3.2.4).

In SP-TP every member has all rows of its heads, so nothing is saved on the wire and every query is
computed; a query leaves out those keys of other parts that their level drops. As every member has
all keys of its heads, it also chooses among them by itself.

Shape suffixes: T rows of the batch, k kept tokens, g own KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from csps.actors.levels.geometry import LevelGeometry, Part
from csps.actors.levels.schedule import DropSchedule, always_kept, kept_counts
from csps.kernels.selection import gather_kept, select
from csps.protocols.prefill_job import PrefillPiece


class Keys(Protocol):
    """All keys and values of a layer, own heads."""

    k_Tgd: Tensor
    v_Tgd: Tensor

    def importance(self, index: int, window: int) -> Tensor:
        """What a piece's keys receive, (g, rows of the piece)."""
        ...


class FarParts:
    """Which rows are parts of a piece that spans members, and the level at which they meet."""

    def __init__(self, geometry: LevelGeometry, bounds: Sequence[int]) -> None:
        self._levels = geometry.levels
        self.parts: Mapping[range, Part] = {
            range(bounds[p.member] + p.rows.start, bounds[p.member] + p.rows.stop): p
            for p in geometry.parts
        }
        """By rows of the batch."""

    def of_piece(self, piece: int) -> list[range]:
        """Rows of the parts of a piece, ascending; none if one member has all of it."""
        return [rows for rows, part in self.parts.items() if part.piece == piece]

    def level(self, queries: range, keys: range) -> int:
        """The lowest level that has both parts in one segment."""
        members = {self.parts[queries].member, self.parts[keys].member}
        together = (
            number
            for number, segments in enumerate(self._levels, start=1)
            if any(members.issubset(segment) for segment in segments)
        )
        return next(together)


class FarKeys:
    """The kept keys of one layer, gathered when they are first attended to."""

    def __init__(
        self,
        parts: FarParts,
        schedule: DropSchedule,
        pieces: Sequence[PrefillPiece],
        *,
        layer: int,
        kv_heads: slice,
        importance: Mapping[int, Tensor],
    ) -> None:
        """
        Args:
            kv_heads: the own ones among those that the schedule is for.
            importance: by piece that spans members, (g, rows of the piece), of the layer before;
                of no piece where the plan has the layer judge by itself.
        """
        self._parts = parts
        self._plan = schedule.plan
        self._pieces = pieces
        self._ratios = schedule.head_ratios(layer)[kv_heads]
        self._importance = dict(importance)
        self._kept: dict[tuple[range, int, int], list[tuple[slice, Tensor, Tensor]]] = {}

    def rectangles(
        self, piece: int, queries: range, keys: range
    ) -> Iterator[tuple[range, range, int | None]]:
        """(queries, keys, level) of a piece's rows, keys being a whole part, or, with level None,
        (queries, keys) of which all that precede are seen."""
        parts = self._parts.of_piece(piece)
        if not parts:
            yield queries, keys, None
        for own in parts:
            rows = _overlap(own, queries)
            for other in parts:
                seen = _overlap(other, range(keys.start, min(keys.stop, rows.stop)))
                if not (rows and seen):
                    continue
                level = self._parts.level(own, other)
                if own == other or level == 1:
                    yield rows, seen, None
                else:
                    assert seen == other, "a part's kept keys are attended to at once"
                    yield rows, other, level

    def kept(
        self, keys: Keys, part: range, level: int, heads: slice
    ) -> Sequence[tuple[slice, Tensor, Tensor]]:
        """Of a part at a level: runs of KV heads that keep equally many, k and v (k, g, d)."""
        at = part, level, heads.start
        if at not in self._kept:
            self._kept[at] = [
                (run, *self._gather(keys, part, count, run))
                for count, run in self._equal_counts(part, level, heads)
            ]
        return self._kept[at]

    def _equal_counts(self, part: range, level: int, heads: slice) -> Iterator[tuple[int, slice]]:
        numbers = range(heads.start, heads.stop)
        for count, run in groupby(numbers, key=lambda head: self._count(part, level, head)):
            members = list(run)
            yield count, slice(members[0], members[-1] + 1)

    def _count(self, part: range, level: int, head: int) -> int:
        counts = kept_counts(self._plan, self._pieces, self._parts.parts[part], self._ratios[head])
        return counts[level - 1]

    def _gather(self, keys: Keys, part: range, count: int, heads: slice) -> tuple[Tensor, Tensor]:
        rows = slice(part.start, part.stop)
        k_tgd, v_tgd = keys.k_Tgd[rows, heads], keys.v_Tgd[rows, heads]
        if count == len(part):
            return k_tgd, v_tgd
        place = self._parts.parts[part]
        first = self._parts.of_piece(place.piece)[0].start
        columns = slice(part.start - first, part.stop - first)
        importance_gt = self._judged(keys, place.piece)[heads, columns]
        always_t = torch.zeros(len(part), dtype=torch.bool)
        for run in always_kept(self._plan, self._pieces[place.piece], place):
            always_t[run.start : run.stop] = True
        kept_gk = select(importance_gt, count, always_t=always_t)
        return gather_kept(k_tgd, kept_gk), gather_kept(v_tgd, kept_gk)

    def _judged(self, keys: Keys, piece: int) -> Tensor:
        """By the layer before, or by this one, of which all rows have come then."""
        if piece not in self._importance:
            assert self._plan.importance_layer == "same", "judged by the layer before"
            self._importance[piece] = keys.importance(piece, self._plan.importance_window)
        return self._importance[piece]


def _overlap(part: range, rows: range) -> range:
    return range(max(part.start, rows.start), min(part.stop, rows.stop))
