"""One rank's KV cache: the keys and values of single tokens, in slots of any order.

`SlotsOfSequence` and `ResidentRows` say which slots the sequences of a decode batch attend to. They
are looked up when the batch changes and not at each layer: afterwards only the rank itself appends
to them, a slot a step.

Shape suffixes: t = tokens, h = KV heads, d = head dim, or in 8 bits the bytes of a head
(`csps.kernels.quantized_kv`); s = slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from csps.actors.kv_cache.sequence_slots import (
    KeptKv,
    KeptSpan,
    SlotIndices,
    SlotSet,
    first_slots,
    runs_of,
)
from csps.actors.kv_cache.slot_allocator import PinnedSpan, SlotAllocator
from csps.kernels.arguments import SlotRun, SlotRuns
from csps.kernels.quantized_kv import INT8, dequantized, quantized, row_width
from csps.protocols.core.placement import Span

ALL_HEADS = slice(None)


class KvBlock(NamedTuple):
    """Views of written tokens of one sequence, for neighboring KV heads in neighboring slots."""

    heads: slice
    k_thd: Tensor
    v_thd: Tensor


class KvPool:
    """Keys and values of `slots` tokens in every layer.

    Copies and reads run outside the allocator's lock, because only one sequence writes into a slot,
    and before any other one has it.

    In 8 bits, KV is read as it lies here, for those who pass it on; `numbers` dequantizes it for
    those who compute with it. What is written may have been computed or passed on.

    Args:
        dtype: that of the model.
        windowed: layers with slots of their own, in which only the last positions of a sequence
            have KV (`NearRing`).
        window_slots: number of slots of these layers.
        eight_bits: keep KV in 8 bits instead.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        windowed: Set[int] = frozenset(),
        window_slots: int = 0,
        eight_bits: bool = False,
    ) -> None:
        assert min(layers, slots, kv_heads, head_dim) > 0
        assert bool(windowed) == (window_slots > 0), "layers with a window have slots of their own"
        stored = INT8 if eight_bits else dtype
        self.width = row_width(head_dim, stored)
        """Numbers of a head of a token in memory."""

        def tensors(layers: int, slots: int) -> tuple[Tensor, Tensor]:
            # Empty instead of zeros: on a CPU the system then backs only slots that are used.
            shape = (layers, slots, kv_heads, self.width)
            k, v = (torch.empty(shape, dtype=stored, device=device) for _ in range(2))
            return k, v

        self.k, self.v = tensors(layers - len(windowed), slots)
        near_k, near_v = tensors(len(windowed), window_slots)
        self.kv_heads, self.head_dim, self.dtype = kv_heads, head_dim, dtype
        self.layer_bytes = 2 * kv_heads * self.width * stored.itemsize
        """Bytes of a token's keys and values in a layer."""
        self.slots = SlotAllocator(slots)
        """Allocator of the slots."""
        self.windowed = windowed
        self.window_slots = SlotAllocator(window_slots) if windowed else None
        """Allocator of the slots in layers with a window; None if these are like the others."""
        whole = zip(self.k, self.v, strict=True)
        near = zip(near_k, near_v, strict=True)
        self._by_layer = [next(near if layer in windowed else whole) for layer in range(layers)]

    def write(
        self,
        layer: int,
        sequence_id: int,
        span: Span,
        k_thd: Tensor,
        v_thd: Tensor,
        *,
        heads: slice = ALL_HEADS,
    ) -> None:
        """Store a layer's keys and values of all positions of `span`, allocated before.

        Writing a position again replaces it. `heads` are the pool's KV heads in the tensors, for a
        cache that arrives in parts; a caller that writes parts ensures that nobody reads before the
        last one.
        """
        k_thd, v_thd = self.stored(k_thd), self.stored(v_thd)
        k_shd, v_shd = (pool_shd[:, heads] for pool_shd in self.layer(layer))
        assert k_thd.shape == v_thd.shape == (span.length, *k_shd.shape[1:])
        assert not self.narrowed(layer, sequence_id), (
            f"layer {layer} of sequence {sequence_id} has kept tokens only"
        )
        with self._slots_of(layer).places(sequence_id, span) as places:
            for place in places:
                slots, rows = map(self._on_device, place)
                k_shd[slots] = k_thd[rows]
                v_shd[slots] = v_thd[rows]

    def write_kept(
        self, layer: int, sequence_id: int, span: Span, kept: KeptKv, *, heads: slice = ALL_HEADS
    ) -> None:
        """Store a layer's keys and values of the tokens of `span` that each head keeps.

        All of a prompt comes to a layer in this way, or nothing does. `kept_blocks` reads it.
        """
        assert layer not in self.windowed, "nothing is dropped in layers with a window"
        own = slice(*heads.indices(self.kv_heads)[:2])
        k_shd, v_shd = self.layer(layer)
        assert kept.kept_ht.shape == (own.stop - own.start, span.length)
        with self.slots.writing(sequence_id, span) as runs:
            place = KeptSpan(span=span, heads=own, kept_ht=kept.kept_ht, slots=tuple(runs))
            place.write(k_shd, self.stored(kept.k_nd))
            place.write(v_shd, self.stored(kept.v_nd))
            self.slots.narrow(layer, sequence_id, place)

    def narrowed(self, layer: int, sequence_id: int) -> bool:
        """Return whether `write_kept` has stored any of a layer."""
        return bool(self.slots.kept(layer, sequence_id))

    def kept_blocks(self, layer: int, sequence_id: int) -> list[KvBlock]:
        """Return all that `write_kept` has stored of a sequence in a layer."""
        k, v = self.layer(layer)
        return [
            KvBlock(heads, k[slots.start : slots.stop, heads], v[slots.start : slots.stop, heads])
            for place in self.slots.kept(layer, sequence_id)
            for heads, slots in place.blocks
        ]

    def read_pinned(
        self, layer: int, pinned: PinnedSpan, span: Span, *, heads: slice = ALL_HEADS
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values of a part of a pinned span, by position.

        They are views if the slots are neighbors, as mostly they are, and copies otherwise.
        """
        return self._read_slots(layer, pinned.slots[pinned.span.rows_of(span)], heads)

    def read(self, layer: int, sequence_id: int, span: Span) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values of a written span, by position, as `read_pinned`
        does."""
        slots = self._slots_of(layer).by_position(sequence_id, span)
        return self._read_slots(layer, slots, ALL_HEADS)

    def write_slots(self, layer: int, slots_t: Tensor, k_thd: Tensor, v_thd: Tensor) -> None:
        """Store a layer's keys and values of single tokens: one copy for a whole batch."""
        k_shd, v_shd = self.layer(layer)
        k_shd.index_copy_(0, slots_t, self.stored(k_thd))
        v_shd.index_copy_(0, slots_t, self.stored(v_thd))

    def stored(self, x_thd: Tensor) -> Tensor:
        """Return keys or values as the pool keeps them; those that are in this form already as they
        are."""
        return quantized(x_thd) if self.k.dtype == INT8 != x_thd.dtype else x_thd

    def numbers(self, x_thd: Tensor) -> Tensor:
        """Return keys or values of the pool to compute with."""
        return dequantized(x_thd, self.dtype) if x_thd.dtype == INT8 else x_thd

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values of all sequences, (s, h, d) each."""
        return self._by_layer[layer]

    def ring(self, sequence_id: int, span: Span, window: int) -> NearRing:
        """Return the ring of a sequence that has these positions in layers with a window."""
        assert self.window_slots is not None, "layers with a window are like the others"
        return NearRing(window, span.start, self.window_slots.by_position(sequence_id, span))

    def _slots_of(self, layer: int) -> SlotAllocator:
        near = self.window_slots
        return near if near is not None and layer in self.windowed else self.slots

    def _on_device(self, numbers: slice | SlotIndices) -> slice | Tensor:
        if isinstance(numbers, slice):
            return numbers
        return torch.from_numpy(numbers).to(self.k.device)

    def _read_slots(self, layer: int, slots: SlotIndices, heads: slice) -> tuple[Tensor, Tensor]:
        k_shd, v_shd = (pool_shd[:, heads] for pool_shd in self.layer(layer))
        if len(runs := runs_of(slots)) == 1:
            return k_shd[runs[0].start : runs[0].stop], v_shd[runs[0].start : runs[0].stop]
        slots_t = torch.from_numpy(slots).to(self.k.device)
        return k_shd[slots_t], v_shd[slots_t]


class NearRing:
    """The slots of a sequence in layers with a window, at its master: positions take them in turns,
    so that each replaces the one that has left the window.

    Args:
        first: first position.
        slots: as many as the window has positions, or one for each position if they are fewer.
    """

    def __init__(self, window: int, first: int, slots: SlotIndices) -> None:
        self._window, self._first = window, first
        self._slots = slots.tolist()
        self._runs = runs_of(slots)

    def slot(self, position: int) -> int:
        """Return the slot of a position."""
        slot: int = self._slots[(position - self._first) % len(self._slots)]
        return slot

    def runs_behind(self, hidden: int) -> list[range]:
        """Return the runs of slots with the window of the row for which `hidden` is the last
        position before it; the row's own position is written."""
        # No slot is left out once positions take slots again: all of them are in the window.
        return list(first_slots(self._runs, hidden + self._window + 1 - self._first))


class SlotsOfSequence:
    """The slots of one sequence's KV in a pool, as its answer grows.

    Args:
        layers: layers that are going to be read.
        seen: spans of positions; those that lie here have been written in all layers.
        answer: spans of positions whose slots `append` takes one after the other.
        ring: slots in layers with a window; None if these are like the others, or not here.
    """

    def __init__(
        self,
        pool: KvPool,
        sequence_id: int,
        layers: Iterable[int],
        seen: Sequence[Span],
        answer: Sequence[Span] = (),
        ring: NearRing | None = None,
    ) -> None:
        self._kept = {
            layer: pool.kept_blocks(layer, sequence_id)
            for layer in layers
            if pool.narrowed(layer, sequence_id)
        }
        self.ring = ring
        slots = self._slots = pool.slots
        self._seen = [run for span in seen if span.length for run in slots.runs(sequence_id, span)]
        """Runs of slots whose positions ascend."""
        self._prompt = list(SlotSet(self._seen))
        own = (
            zip(span.positions, slots.by_position(sequence_id, span).tolist(), strict=True)
            for span in answer
        )
        self._free: list[int] = [slot for _, slot in sorted(chain.from_iterable(own), reverse=True)]
        self._answer: list[range] = []

    def append(self) -> int:
        """Return the slot of the next token, which is read as well from now on."""
        slot = self._free.pop()
        if self._answer and self._answer[-1].stop == slot:
            self._answer[-1] = range(self._answer[-1].start, slot + 1)
        else:
            self._answer.append(range(slot, slot + 1))
        return slot

    def runs(self, layer: int) -> Iterable[range]:
        """Return the runs of slots to which every KV head of a layer attends."""
        if layer in self._kept:
            return self._answer
        if self._prompt and self._answer and self._prompt[-1].stop == self._answer[0].start:
            joined = range(self._prompt[-1].start, self._answer[0].stop)
            return [*self._prompt[:-1], joined, *self._answer[1:]]
        return [*self._prompt, *self._answer]

    def runs_behind(self, position: int) -> list[range]:
        """Return the runs of slots with positions behind this one, in a layer without kept
        tokens."""
        if self.ring is not None:
            return self.ring.runs_behind(position)
        return self._slots.behind([*self._seen, *self._answer], position)

    def blocks(self, layer: int) -> Sequence[KvBlock]:
        """Return the blocks to which only some KV heads attend, in a layer with kept tokens
        only."""
        return self._kept.get(layer, ())

    @property
    def narrowed(self) -> bool:
        """Return whether layers differ in their tokens."""
        return bool(self._kept)


class ResidentRows:
    """Slots of the sequences of some query rows, in the rows' order.

    Args:
        hidden: last position that each row does not see, in layers with a window; None without.
    """

    def __init__(
        self, sequences: Sequence[SlotsOfSequence], hidden: Sequence[int] | None = None
    ) -> None:
        self.sequences = sequences
        self._hidden = hidden
        self._narrowed = any(sequence.narrowed for sequence in sequences)
        self._runs: dict[int, SlotRuns] = {}

    def grown(self) -> None:
        """Discard looked-up runs after slots were appended."""
        self._runs.clear()

    def advance(self) -> None:
        """Move the window of each row on by a token."""
        assert self._hidden is not None, "rows without a window"
        self._hidden = [hidden + 1 for hidden in self._hidden]
        self._runs.clear()

    def runs(self, layer: int) -> SlotRuns:
        """Return where a layer's keys of each row lie, for all KV heads."""
        key = layer if self._narrowed else 0
        if key not in self._runs:
            found: list[SlotRun] = [
                (row, run.start, run.stop)
                for row in range(len(self.sequences))
                for run in self._runs_of(row, layer)
            ]
            self._runs[key] = SlotRuns(len(self.sequences), found)
        return self._runs[key]

    def _runs_of(self, row: int, layer: int) -> Iterable[range]:
        if self._hidden is None:
            return self.sequences[row].runs(layer)
        return self.sequences[row].runs_behind(self._hidden[row])

    def blocks(self, layer: int) -> list[tuple[int, KvBlock]]:
        """Return (row, block) for blocks to which only some KV heads attend."""
        if not self._narrowed or self._hidden is not None:
            return []
        return [
            (row, block)
            for row, sequence in enumerate(self.sequences)
            for block in sequence.blocks(layer)
        ]
