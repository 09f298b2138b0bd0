"""One rank's KV cache: the keys and values of single tokens, in slots of any order.

Shape suffixes: t = tokens, h = KV heads, d = head dim; s = slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from csps.actors.kept_kv import KeptKv, KeptSpan
from csps.actors.kv_holding import Slots, runs_of
from csps.actors.slot_allocator import PinnedSpan, SlotAllocator
from csps.protocols.span import Span

ALL_HEADS = slice(None)


class KvBlock(NamedTuple):
    """Written tokens of one request for neighbouring KV heads, in neighbouring slots: views."""

    heads: slice
    k_thd: Tensor
    v_thd: Tensor


class KvPool:
    """Keys and values of `slots` tokens in every layer.

    Copies and reads run outside the allocator's lock, because only one request writes into a slot,
    and before any other one has it.
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
    ) -> None:
        assert min(layers, slots, kv_heads, head_dim) > 0
        shape = (layers, slots, kv_heads, head_dim)
        # empty, not zeros: on CPU the operating system then backs only slots that are used.
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.slots = SlotAllocator(slots)
        """Who has which."""
        self._k_by_layer = self.k.unbind()
        self._v_by_layer = self.v.unbind()

    def write(
        self,
        layer: int,
        rid: int,
        span: Span,
        k_thd: Tensor,
        v_thd: Tensor,
        *,
        heads: slice = ALL_HEADS,
    ) -> None:
        """Stores a layer's keys and values of all positions of `span`, allocated before.

        Writing a position again replaces it. `heads` are the pool's KV heads that the tensors
        hold, for a cache that arrives in parts; whoever writes parts sees to it that nobody reads
        before the last one.
        """
        assert k_thd.shape == v_thd.shape == (span.length, *self.k[0, 0, heads].shape)
        assert not self.narrowed(layer, rid), f"layer {layer} of request {rid} has kept tokens only"
        with self.slots.places(rid, span) as places:
            for place in places:
                slots, rows = map(self._on_device, place)
                self._k_by_layer[layer][slots, heads] = k_thd[rows]
                self._v_by_layer[layer][slots, heads] = v_thd[rows]

    def write_kept(
        self, layer: int, rid: int, span: Span, kept: KeptKv, *, heads: slice = ALL_HEADS
    ) -> None:
        """Stores a layer's keys and values of those tokens of `span` that each head keeps.

        All of a prompt comes to a layer in this way, or nothing does. `kept_blocks` reads it.
        """
        own = slice(*heads.indices(self.kv_heads)[:2])
        assert kept.kept_ht.shape == (own.stop - own.start, span.length)
        with self.slots.writing(rid, span) as runs:
            place = KeptSpan(span=span, heads=own, kept_ht=kept.kept_ht, slots=tuple(runs))
            place.write(self._k_by_layer[layer], kept.k_nd)
            place.write(self._v_by_layer[layer], kept.v_nd)
            self.slots.narrow(layer, rid, place)

    def narrowed(self, layer: int, rid: int) -> bool:
        """Whether `write_kept` has stored any of a layer."""
        return bool(self.slots.kept(layer, rid))

    def kept_blocks(self, layer: int, rid: int) -> list[KvBlock]:
        """All that `write_kept` has stored of a request in a layer."""
        k, v = self._k_by_layer[layer], self._v_by_layer[layer]
        return [
            KvBlock(heads, k[slots.start : slots.stop, heads], v[slots.start : slots.stop, heads])
            for place in self.slots.kept(layer, rid)
            for heads, slots in place.blocks
        ]

    def read_pinned(
        self, layer: int, pinned: PinnedSpan, span: Span, *, heads: slice = ALL_HEADS
    ) -> tuple[Tensor, Tensor]:
        """A layer's keys and values of a part of a pinned span, by position.

        Views where they lie in neighbouring slots, which mostly they do, and copies otherwise.
        """
        return self._read_slots(layer, pinned.slots[pinned.span.rows_of(span)], heads)

    def read(self, layer: int, rid: int, span: Span) -> tuple[Tensor, Tensor]:
        """A layer's keys and values of a span that it has written, by position; as `read_pinned`
        does it."""
        return self._read_slots(layer, self.slots.by_position(rid, span), ALL_HEADS)

    def write_slots(self, layer: int, slots_t: Tensor, k_thd: Tensor, v_thd: Tensor) -> None:
        """Stores a layer's keys and values of single tokens: one copy for a whole batch."""
        self._k_by_layer[layer].index_copy_(0, slots_t, k_thd)
        self._v_by_layer[layer].index_copy_(0, slots_t, v_thd)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, (slots, kv heads, head dim) each, of all requests."""
        return self._k_by_layer[layer], self._v_by_layer[layer]

    def _on_device(self, numbers: slice | Slots) -> slice | Tensor:
        if isinstance(numbers, slice):
            return numbers
        return torch.from_numpy(numbers).to(self.k.device)

    def _read_slots(self, layer: int, slots: Slots, heads: slice) -> tuple[Tensor, Tensor]:
        k_shd, v_shd = (it[:, heads] for it in self.layer(layer))
        if len(runs := runs_of(slots)) == 1:
            return k_shd[runs[0].start : runs[0].stop], v_shd[runs[0].start : runs[0].stop]
        slots_t = torch.from_numpy(slots).to(self.k.device)
        return k_shd[slots_t], v_shd[slots_t]
