"""One layer of SP-TP on one member: the steps of its schedule, carried out.

Shape suffixes: T rows of the batch, h own query heads, g the KV heads that they read, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from csps.actors.collectives.row_gather import RowGather
from csps.actors.collectives.row_reduce import RowReduce
from csps.actors.strategies.group import SpGroup
from csps.actors.strategies.history import Asked, History
from csps.actors.strategies.sp_tp_attention import HeadBlock, RowAttention
from csps.actors.strategies.sp_tp_far_keys import FarKeys
from csps.actors.timeline import Phase
from csps.actors.transfers import Transfers
from csps.kernels.merge import merge_into, nothing_seen
from csps.models.network import Layer
from csps.models.rope import Rotary
from csps.protocols.sp_tp_schedule import (
    AskHistory,
    Attend,
    HandOn,
    Place,
    Project,
    Step,
    Wait,
)


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
        history: History,
        far_keys: FarKeys | None,
        index: int,
    ) -> None:
        """
        Args:
            layer: with the own heads only.
            rows_td: (T, hidden), valid where a `Wait` has returned.
            rotary: of all T rows.
        """
        self._group = group
        self._layer = layer
        self._rows_td = rows_td
        self._rotary = rotary
        self._history = history
        self._asked: Asked | None = None
        self._of_history: tuple[Tensor, Tensor] | None = None
        self._timeline = group.clock.timeline
        self._index = index
        self.attention = RowAttention(
            group.job.pieces,
            blocks,
            *self._buffers(),
            scale=layer.spec.scale,
            far_keys=far_keys,
            withdrawn=group.withdrawn,
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
                case AskHistory():
                    self._group.points.close()
                    self._asked = self._history.ask(self._index, self.attention.q_Thd)
                    self._asked.answer()
                case Attend(queries, keys, place):
                    for block in self.attention.blocks(queries, keys[1] - keys[0]):
                        with self._phase("attention", place):
                            self.attention.attend(block, keys)
                        self._pause(transfers)
                case HandOn(part):
                    self._group.points.close()
                    with self._timeline.phase("linear", layer=self._index, micro=part.index):
                        out_thd = self._with_history(part.rows)
                        reduce.add(part, self._layer.output_part(out_thd))
                    # No point: what is kept back is only begun by `RowReduce.result`.
                    transfers.progress()

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

    def _with_history(self, rows: slice) -> Tensor:
        """The output of complete rows. History stays out of the running result, whose LSEs judge
        the chunk's keys."""
        attention = self.attention
        if self._asked is not None:
            self._of_history = nothing_seen(attention.q_Thd)
            self._asked.merge_into(*self._of_history)
            self._asked = None
        if self._of_history is None:
            return attention.out_Thd[rows]
        out_Thd, lse_hT = self._of_history
        merge_into(
            out_Thd[rows], lse_hT[:, rows], attention.out_Thd[rows], attention.lse_hT[:, rows]
        )
        return out_Thd[rows]

    def _pause(self, transfers: Transfers) -> None:
        """Between two parts of the computing."""
        transfers.progress()
        self._group.points.point()

    def _phase(self, name: Phase, place: Place) -> AbstractContextManager[None]:
        return self._timeline.phase(name, layer=self._index, level=place.level, micro=place.micro)
