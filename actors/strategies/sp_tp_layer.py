"""One layer of SP-TP on one member: the steps of its schedule, carried out.

Shape suffixes: T rows of the batch, h own query heads, g the KV heads that they read, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from csps.actors.collectives.row_gather import RowGather
from csps.actors.collectives.row_reduce import RowReduce
from csps.actors.strategies.group import SpGroup
from csps.actors.strategies.head_history import HistoryUnderWay
from csps.actors.strategies.sp_tp_attention import HeadBlock, RowAttention
from csps.actors.strategies.sp_tp_far_keys import FarKeys
from csps.actors.strategies.sp_tp_schedule import Attend, HandOn, Place, Project, Step, Wait
from csps.actors.timeline import Phase
from csps.actors.transfers import Transfers
from csps.models.network import Layer
from csps.models.rope import Rotary


class SpTpLayer:
    """Own heads of one layer over all rows of the batch."""

    def __init__(
        self,
        group: SpGroup,
        layer: Layer,
        rows_td: Tensor,
        rotary: Rotary,
        *,
        blocks: Sequence[HeadBlock],
        history: Mapping[int, HistoryUnderWay],
        far_keys: FarKeys | None,
        index: int,
    ) -> None:
        """
        Args:
            layer: with the own heads only.
            rows_td: (T, hidden), valid where a `Wait` has returned.
            rotary: of all T rows.
            history: by piece.
        """
        self._group = group
        self._layer = layer
        self._rows_td = rows_td
        self._rotary = rotary
        self._history = history
        self._arrived: dict[int, tuple[Tensor, Tensor]] = {}
        self._timeline = group.clock.timeline
        self._index = index
        self.attention = RowAttention(
            group.job.pieces,
            blocks,
            *self._buffers(),
            scale=layer.spec.scale,
            far_keys=far_keys,
            # What judges keys takes every query's attention to be known.
            withdrawn=group.withdrawn if far_keys is None else frozenset(),
        )

    def run(
        self, steps: Iterable[Step], gather: RowGather, reduce: RowReduce, transfers: Transfers
    ) -> None:
        """All steps, in order."""
        for step in steps:
            match step:
                case Wait(part):
                    gather.wait(part)
                case Project(start, stop, place):
                    with self._phase("qkv", place):
                        self._project(start, stop)
                    self._pause(transfers)
                    self._attend_history((start, stop), transfers, place)
                case Attend(queries, keys, place):
                    for block in self.attention.blocks(queries, keys[1] - keys[0]):
                        with self._phase("attention", place):
                            self.attention.attend(block, keys)
                        self._pause(transfers)
                case HandOn(part):
                    with self._timeline.phase("linear", layer=self._index, micro=part.index):
                        out_thd = self.attention.out_Thd[part.rows]
                        reduce.add(part, self._layer.output_part(out_thd))
                    self._pause(transfers)

    def _buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        rows, share, dim = len(self._rows_td), self._layer.share, self._layer.spec.head_dim
        heads = len(share.query_heads), len(share.kv_heads), len(share.kv_heads)
        q_Thd, k_Tgd, v_Tgd = (self._rows_td.new_empty(rows, count, dim) for count in heads)
        return q_Thd, k_Tgd, v_Tgd

    def _project(self, start: int, stop: int) -> None:
        rows = slice(start, stop)
        buffers = self.attention.q_Thd, self.attention.k_Tgd, self.attention.v_Tgd
        computed = self._layer.qkv(self._rows_td[rows], self._rotary[rows])
        for buffer, part in zip(buffers, computed, strict=True):
            buffer[rows] = part

    def _attend_history(self, rows: tuple[int, int], transfers: Transfers, place: Place) -> None:
        for piece, under_way in self._history.items():
            if piece not in self._arrived:
                self._arrived[piece] = under_way.arrived(transfers)
            k_ngd, v_ngd = self._arrived[piece]
            for block in self.attention.blocks(rows, len(k_ngd)):
                with self._phase("attention", place):
                    self.attention.attend_history(piece, block, k_ngd, v_ngd)
                self._pause(transfers)

    def _pause(self, transfers: Transfers) -> None:
        """Between two parts of the computing."""
        transfers.progress()
        self._group.give_way()

    def _phase(self, name: Phase, place: Place) -> AbstractContextManager[None]:
        return self._timeline.phase(name, layer=self._index, level=place.level, micro=place.micro)
