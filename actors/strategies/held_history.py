"""The history that a member holds of a step's pieces: the KV of their earlier chunks, in its pool.

Shape suffixes: s tokens of history, g KV heads, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from csps.actors.kv_pool import KvPool
from csps.actors.slot_set import SlotSet
from csps.actors.strategies.group import SpGroup
from csps.protocols.prefill_job import PrefillPiece


class HeldHistory:
    """One member's, looked up once for all layers."""

    def __init__(self, group: SpGroup, pool: KvPool) -> None:
        self._group, self._pool = group, pool
        self._slots: dict[int, slice | Tensor] = {}

    def keys(self, layer: int, piece: PrefillPiece) -> tuple[Tensor, Tensor]:
        """k and v of a piece's history that lies here, (s, g, d), in no particular order."""
        assert not self._pool.narrowed(layer, piece.rid), "history has kept tokens only"
        k_shd, v_shd = self._pool.layer(layer)
        slots = self._slots_of(piece)
        if isinstance(slots, slice):
            return k_shd[slots], v_shd[slots]
        return k_shd.index_select(0, slots), v_shd.index_select(0, slots)

    def _slots_of(self, piece: PrefillPiece) -> slice | Tensor:
        """Where a piece's history lies here, alike in all layers: a slice if it is one run, which
        is read where it lies."""
        if piece.rid not in self._slots:
            held = self._pool.slots
            spans = self._group.history_of(piece, self._group.member)
            # Attention does not care about the order of keys.
            runs = list(SlotSet(run for it in spans for run in held.runs(piece.rid, it)))
            slots: slice | Tensor = slice(runs[0].start, runs[0].stop)
            if len(runs) > 1:
                numbers = torch.cat([torch.arange(run.start, run.stop) for run in runs])
                slots = numbers.to(self._pool.k.device)
            self._slots[piece.rid] = slots
        return self._slots[piece.rid]
