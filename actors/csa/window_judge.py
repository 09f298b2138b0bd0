"""Importance judged by the last queries of each prompt, under exact attention.

Their members send them to all who hold keys of the prompt; each of these attends to its own keys,
dropped ones included, so that a token that was dropped once can come back; and the LSEs of these
parts together are the exact LSE. Both messages are small, (d + parts) numbers per query and head,
and are over before the layer is: nobody waits for the end of another member's layer in order to
choose what to send in the next one.

Shape suffixes: n queries of a window, t tokens of a part, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from csps.actors.csa.judge import LayerAttention, Tally
from csps.actors.csa.kept_rows import KeptRows
from csps.actors.levels.geometry import Part
from csps.actors.mesh import Tag
from csps.actors.strategies.group import SpGroup
from csps.actors.transfers import Label, Transfer, Transfers
from csps.kernels.attention import attention
from csps.kernels.importance import column_sums
from csps.kernels.positions import Positions
from csps.protocols.prefill_job import PrefillPiece


@dataclass(frozen=True)
class _Window:
    """Those of a piece's last queries that lie in one part."""

    part: Part
    first: int
    """Row of the part."""
    q_nhd: Tensor
    lses_hn: dict[int, Tensor] = field(default_factory=dict)
    """Over the keys of each part that the queries see."""

    def positions(self, part: Part) -> tuple[Positions | None, Positions | None]:
        """Of the queries and of a part's keys; none if all of them are seen."""
        if part.index != self.part.index:
            return None, None
        return range(self.first, part.length), range(part.length)


class WindowJudge:
    """See the module."""

    def __init__(self, group: SpGroup, parts: Sequence[Part], *, window: int, scale: float) -> None:
        self._group = group
        self._parts = parts
        self._scale = scale
        self._firsts = {
            part.index: first
            for part in parts
            if (first := _first_row(group.job.pieces[part.piece], part, window)) < part.length
        }
        self._windows: list[_Window] = []
        self._layer: int
        self._kv_tge: Tensor
        self._queries: Transfer
        self._lses: Transfer

    def begin(self, layer: int, rows: KeptRows, transfers: Transfers) -> None:
        """See `Judge`: windows to all who hold keys that they see."""
        self._layer, self._kv_tge = layer, rows.kv_tge
        pieces = self._group.job.pieces
        self._windows = [
            self._window(index, rows.q_thd)
            for index in self._firsts
            if self._group.wanted(pieces[self._parts[index].piece])
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
        """See `Judge`: LSEs over own keys to all others who hold keys."""
        transfers.wait(self._queries)
        with transfers.timeline.phase("importance", layer=layer):
            self._attend()
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
        """See `Judge`: all is known by then."""

    def importance(self, part: Part, transfers: Transfers) -> Tensor:
        """See `Judge`."""
        transfers.wait(self._lses)
        with transfers.timeline.phase("importance", layer=self._layer):
            k_tgd, _ = self._kv_tge[part.rows].chunk(2, dim=-1)
            tally = Tally.empty(k_tgd.shape[1], part.length, like=self._accumulator)
            for window in self._windows:
                if window.part.piece == part.piece and window.part.index >= part.index:
                    self._judge(window, part, k_tgd, tally)
            return tally.mean_gt

    def _attend(self) -> None:
        """LSEs of the windows that see keys of own parts, and room for those of others."""
        for window in self._windows:
            seen = list(self._seen_by(window))
            if self._group.member in {part.member for part in seen}:
                for part in seen:
                    window.lses_hn[part.index] = self._lse(window, part)

    def _judge(self, window: _Window, part: Part, k_tgd: Tensor, tally: Tally) -> None:
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
            behind = tally.seen_gt[:, window.first :]
            behind -= torch.arange(behind.shape[1], device=behind.device)

    def _lse(self, window: _Window, part: Part) -> Tensor:
        """(h, n) over the keys of an own part; room for it if the part is another's."""
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
        """A window of own queries, or room for those of another member."""
        part, first = self._parts[index], self._firsts[index]
        if part.member == self._group.member:
            return _Window(part, first, q_thd[part.rows][first:])
        return _Window(part, first, q_thd.new_empty(part.length - first, *q_thd.shape[1:]))

    def _seen_by(self, window: _Window) -> Iterator[Part]:
        """Parts with keys that a window's queries see."""
        for part in self._parts:
            if part.piece == window.part.piece and part.index <= window.part.index:
                yield part

    @property
    def _accumulator(self) -> Tensor:
        """An empty tensor of the dtype and device of LSEs."""
        dtype = torch.promote_types(self._kv_tge.dtype, torch.float32)
        return self._kv_tge.new_empty(0, dtype=dtype)


def _first_row(piece: PrefillPiece, part: Part, window: int) -> int:
    """The first row of a part that is among the last `window` of its piece."""
    return max(0, piece.start + piece.length - window - part.start)
