"""One rank's KV cache, managed token by token (LoongServe §4.1, CSPS §4.2).

Any token of any request may lie in any slot, so a request may be spread over the ranks of a gang
in any way, and a rank may hold any subset of its positions. The allocator nevertheless looks for
contiguous slots, so that attention can read most requests through one zero-copy slice.

What several requests begin with lies there once: a slot is free when the last of them lets go.

Shape suffixes: t = tokens, h = KV heads, d = head dim.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from csps.actors.kept_kv import KeptKv, KeptSpan
from csps.actors.kv_holding import Holding, Slots, positions_of, runs_of, slots_in
from csps.actors.slot_set import SlotSet
from csps.protocols.errors import FaultError
from csps.protocols.span import Span

_ALL_POSITIONS = Span(start=0, stop=2**62)
ALL_HEADS = slice(None)


class OutOfSlots(FaultError):
    """The pool holds fewer free slots than were asked for; nothing was allocated."""

    def __init__(self, *, needed: int, free: int) -> None:
        super().__init__(f"KV pool is out of slots: {needed} needed, {free} free")
        self.needed, self.free = needed, free

    def wire_data(self) -> dict[str, Any]:
        return {"needed": self.needed, "free": self.free}


class NotHeld(FaultError):
    """The pool does not hold what a request was to share with another one."""


class KvBlock(NamedTuple):
    """Written tokens of one request for neighbouring KV heads, in neighbouring slots: views."""

    heads: slice
    k_thd: Tensor
    v_thd: Tensor


class PinnedSpan(NamedTuple):
    """A span of one request whose slots nobody else gets until it is unpinned."""

    span: Span
    slots: Slots
    """By position."""


class KvPool:
    """Keys and values of `slots` tokens in every layer, with who owns which slot.

    Bookkeeping is guarded by one lock; copies and reads of the tensors run outside it, because
    only one request writes into a slot, and before any other one has it. What the lock cannot
    prevent is a request being freed while another thread still reads or writes it: whoever frees a
    request makes sure of that.
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
        self.capacity = slots
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self._k_by_layer = self.k.unbind()
        self._v_by_layer = self.v.unbind()
        self._positions = np.zeros(slots, dtype=np.int64)
        """By slot, in the requests that have it: they agree."""
        self._lock = threading.Lock()
        self._free = SlotSet([range(slots)])
        self._holdings: dict[int, Holding] = {}
        self._holders = np.zeros(slots, dtype=np.int32)
        """By slot: requests that have it, and pins."""
        self._pinned = 0
        """Slots of all pins together."""

    @property
    def free(self) -> int:
        """Slots that nobody owns."""
        return self._free.size

    @property
    def used(self) -> int:
        """Slots that are allocated or pinned."""
        return self.capacity - self._free.size

    # --- ownership -------------------------------------------------------------------------

    def allocate(self, rid: int, spans: Sequence[Span]) -> None:
        """Gives request `rid` a slot for each position of `spans`: all of them, or none.

        A request may allocate several times, but no position twice. What is allocated in one
        call is laid out contiguously if the free slots allow it, so a caller that knows how much
        a request will grow asks for prompt and answer together.

        Raises:
            OutOfSlots: fewer slots are free than the spans have positions.
        """
        spans = [span for span in spans if span.length]
        if not spans:
            return
        positions = positions_of(spans)
        count = len(positions)
        with self._lock:
            if count > self.free:
                raise OutOfSlots(needed=count, free=self.free)
            holding = self._holding(rid)
            assert (np.diff(positions) > 0).all(), f"request {rid} asks for a position twice"
            had = [span for span in spans if holding.locate(span)]
            assert not had, f"request {rid} allocates positions that it has: {had}"
            runs = self._free.fewest_runs(count, after=holding.end)
            self._positions[slots_in(runs)] = positions
            for run in runs:
                self._free.remove(run)
            self._hold(rid, holding, runs)

    def share(self, rid: int, origin: int, span: Span) -> None:
        """Gives a request the slots of a span that another one has: both have them from now on.
        Nothing if it shares all of them already, whatever has become of the other one.

        Raises:
            NotHeld: the other request does not have all of them, or this one has other slots for
                some of the positions.
        """
        with self._lock:
            holding = self._holding(rid)
            known = slots_in(holding.locate(span))
            if np.isin(known, slots_in(holding.shared)).sum() == span.length:
                return
            theirs = self._holdings.get(origin)
            slots = None if theirs is None or theirs.kept else theirs.slots(span)
            if slots is None:
                raise NotHeld(f"request {rid} shares {span} of {origin}, which does not have it")
            new = slots[np.isin(slots, known, invert=True)]
            if np.isin(self._positions[new], self._positions[known]).any():
                raise NotHeld(f"request {rid} shares {span} of {origin}, and has slots for it")
            for run in runs_of(new):
                holding.shared.add(run)
            self._hold(rid, holding, runs_of(new))

    def drop_shared(self, rid: int) -> None:
        """A request lets go of all that it shares with those that have computed it."""
        with self._lock:
            if (holding := self._holdings.get(rid)) is not None:
                self._take(rid, holding, SlotSet(holding.shared))

    def free_request(self, rid: int) -> int:
        """A request lets go of all its slots; returns how many, 0 for an unknown one."""
        return self.free_span(rid, _ALL_POSITIONS)

    def free_span(self, rid: int, span: Span) -> int:
        """A request lets go of the slots of those positions of `span` that it has here, or of all
        where it has kept tokens only; returns how many."""
        with self._lock:
            if (holding := self._holdings.get(rid)) is None:
                return 0
            released = SlotSet(holding.runs if holding.kept else holding.locate(span))
            self._take(rid, holding, released)
            return released.size

    def pin(self, rid: int, span: Span) -> PinnedSpan:
        """Lets somebody read the span later, whatever becomes of the request until then.

        Slots that are freed meanwhile are nobody's until `unpin`.
        """
        with self._lock:
            slots = self._slots(rid, span)
            self._holders[slots] += 1
            self._pinned += len(slots)
            return PinnedSpan(span, slots)

    def unpin(self, pinned: PinnedSpan) -> None:
        """Nothing more will be read of the span."""
        with self._lock:
            self._pinned -= len(pinned.slots)
            self._let_go(np.sort(pinned.slots))

    # --- tensors ---------------------------------------------------------------------------

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
        with self._writing(rid, span) as (holding, _):
            with self._lock:
                places = holding.places(span)
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
        with self._writing(rid, span) as (holding, runs):
            place = KeptSpan(span=span, heads=own, kept_ht=kept.kept_ht, slots=tuple(runs))
            place.write(self._k_by_layer[layer], kept.k_nd)
            place.write(self._v_by_layer[layer], kept.v_nd)
            holding.kept.setdefault(layer, []).append(place)

    def narrowed(self, layer: int, rid: int) -> bool:
        """Whether `write_kept` has stored any of a layer."""
        return layer in self._holding(rid).kept

    def kept_blocks(self, layer: int, rid: int) -> list[KvBlock]:
        """All that `write_kept` has stored of a request in a layer."""
        k, v = self._k_by_layer[layer], self._v_by_layer[layer]
        return [
            KvBlock(heads, k[slots.start : slots.stop, heads], v[slots.start : slots.stop, heads])
            for place in self._holding(rid).kept.get(layer, ())
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
        with self._lock:
            slots = self._slots(rid, span)
        return self._read_slots(layer, slots, ALL_HEADS)

    def write_slots(self, layer: int, slots_t: Tensor, k_thd: Tensor, v_thd: Tensor) -> None:
        """Stores a layer's keys and values of single tokens: one copy for a whole batch."""
        self._k_by_layer[layer].index_copy_(0, slots_t, k_thd)
        self._v_by_layer[layer].index_copy_(0, slots_t, v_thd)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, (slots, kv heads, head dim) each, of all requests."""
        return self._k_by_layer[layer], self._v_by_layer[layer]

    # --- questions -------------------------------------------------------------------------

    def runs(self, rid: int, span: Span | None = None) -> list[range]:
        """Slots of a request (inside `span`), ordered by the first position of each run."""
        with self._lock:
            holding = self._holding(rid)
            return list(holding.runs if span is None else holding.locate(span))

    def slots(self, rid: int, span: Span) -> list[int]:
        """Slots of the positions of a span, by position."""
        with self._lock:
            found: list[int] = self._slots(rid, span).tolist()
        return found

    def tokens(self, rid: int) -> int:
        """Slots of a request."""
        return sum(map(len, self.runs(rid)))

    def check_integrity(self) -> None:
        """Raises AssertionError that says what is wrong, if anything is."""
        with self._lock:
            holders = np.zeros(self.capacity, dtype=np.int64)
            for rid, holding in self._holdings.items():
                for run in holding.runs:
                    holders[run.start : run.stop] += 1
                held = self._positions[slots_in(holding.runs)]
                assert len(held) > 0, f"request {rid} is kept without a slot"
                assert len(np.unique(held)) == len(held), f"request {rid} holds a position twice"
                for layer, places in holding.kept.items():
                    _check_kept(holding, places, f"of request {rid} in layer {layer}")
            free = np.zeros(self.capacity, dtype=bool)
            for run in self._free:
                free[run.start : run.stop] = True
            assert self._free.size == free.sum(), "the number of free slots is wrong"
            pins = self._holders - holders
            wrong = np.flatnonzero((pins < 0) | (free == (self._holders > 0)))
            assert not wrong.size, f"slots {wrong[:8].tolist()} have other owners than are counted"
            assert pins.sum() == self._pinned, "the number of pinned slots is wrong"

    # --- inside ----------------------------------------------------------------------------

    @contextmanager
    def _writing(self, rid: int, span: Span) -> Iterator[tuple[Holding, list[range]]]:
        """Where a span lies, which stays there meanwhile."""
        with self._lock:
            holding = self._holding(rid)
            runs = holding.locate(span)
        assert sum(map(len, runs)) == span.length, f"{span} is not allocated to request {rid}"
        yield holding, runs
        with self._lock:
            assert holding.locate(span) == runs, f"request {rid} was freed while being written"

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

    # --- inside, under the lock ------------------------------------------------------------

    def _holding(self, rid: int) -> Holding:
        """An empty one, which is not entered, of an unknown request."""
        return self._holdings.get(rid) or Holding(self._positions)

    def _slots(self, rid: int, span: Span) -> Slots:
        """By position, of a span that is allocated."""
        slots = self._holding(rid).slots(span)
        assert slots is not None, f"{span} is not allocated to request {rid}"
        return slots

    def _hold(self, rid: int, holding: Holding, runs: Sequence[range]) -> None:
        """A request has these slots as well."""
        self._holders[slots_in(runs)] += 1
        holding.add(runs)
        self._holdings[rid] = holding

    def _take(self, rid: int, holding: Holding, slots: SlotSet) -> None:
        """A request has these of its slots no more."""
        self._let_go(slots_in(slots))
        holding.remove(slots)
        if not holding.runs:
            del self._holdings[rid]

    def _let_go(self, slots: Slots) -> None:
        """One less has each of these slots, which ascend."""
        self._holders[slots] -= 1
        assert (self._holders[slots] >= 0).all(), "slots were let go of twice"
        for run in runs_of(slots[self._holders[slots] == 0]):
            self._free.add(run)


def _check_kept(holding: Holding, places: Sequence[KeptSpan], what: str) -> None:
    taken: set[tuple[int, int]] = set()
    for place in places:
        assert list(place.slots) == holding.locate(place.span), f"{place.span} {what} moved"
        own = {
            (slot, head)
            for heads, run in place.blocks
            for slot in run
            for head in range(heads.start, heads.stop)
        }
        assert not own & taken, f"{place.span} {what} is written twice"
        taken |= own
