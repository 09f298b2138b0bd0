"""One rank's KV cache, managed token by token (LoongServe §4.1, CSPS §4.2).

Any token of any request may lie in any slot, so a request may be spread over the ranks of a gang
in any way, and a rank may hold any subset of its positions. The allocator nevertheless looks for
contiguous slots, so that attention can read most requests through one zero-copy slice.

Shape suffixes: t = tokens, h = KV heads, d = head dim.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from csps.actors.kept_kv import KeptKv, KeptSpan
from csps.actors.slot_set import SlotSet
from csps.protocols.errors import FaultError
from csps.protocols.messages import Span

_ALL_POSITIONS = Span(start=0, stop=2**62)
_LOOKUPS_KEPT = 16
ALL_HEADS = slice(None)


class OutOfSlots(FaultError):
    """The pool holds fewer free slots than were asked for; nothing was allocated."""

    def __init__(self, *, needed: int, free: int) -> None:
        super().__init__(f"KV pool is out of slots: {needed} needed, {free} free")
        self.needed, self.free = needed, free

    def wire_data(self) -> dict[str, Any]:
        return {"needed": self.needed, "free": self.free}


class KvRun(NamedTuple):
    """Written tokens of one request in neighbouring slots: views, nothing is copied."""

    k_thd: Tensor
    v_thd: Tensor
    positions: Tensor
    """(t,) int64 on the pool's device, ascending, not necessarily without gaps."""


class KvBlock(NamedTuple):
    """Written tokens of one request for neighbouring KV heads, in neighbouring slots: views."""

    heads: slice
    k_thd: Tensor
    v_thd: Tensor


class PinnedSpan(NamedTuple):
    """A span of one request whose slots nobody else gets until it is unpinned."""

    span: Span
    slots: npt.NDArray[np.int64]
    """By position."""


class MovableKv(NamedTuple):
    """Kept tokens of one request for neighbouring KV heads, copied out of a pool."""

    span: Span
    heads: slice
    kept: KeptKv


class KvPool:
    """Keys and values of `slots` tokens in every layer, with who owns which slot.

    Bookkeeping is guarded by one lock; copies and reads of the tensors run outside it, because
    different requests never share a slot. What the lock cannot prevent is a request being freed
    while another thread still reads or writes it: whoever frees a request makes sure of that.

    Reads see only what has been written in the layer at hand, never uninitialised memory.
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
        self._positions = torch.empty(slots, dtype=torch.int64, device=device)
        # Lookups run on the host; on CPU this is the same memory.
        self._host_positions: npt.NDArray[np.int64] = self._positions.cpu().numpy()
        self._lock = threading.Lock()
        self._free = SlotSet([range(slots)])
        # By slot and not by position: tokens that a request writes in turn with other ranks have
        # gaps in their positions, but none in their slots, and stay one interval.
        self._written = [SlotSet() for _ in range(layers)]
        self._holdings: dict[int, _Holding] = {}
        self._pins = np.zeros(slots, dtype=np.int32)
        """By slot: how many have pinned it."""
        self._leaving = SlotSet()
        """Freed, but still pinned."""

    @property
    def free(self) -> int:
        """Slots that nobody owns."""
        return self._free.size

    @property
    def used(self) -> int:
        """Slots that are allocated or pinned, written or not."""
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
        # Stable, because that takes no time for what is in order already.
        positions = np.sort(np.concatenate([_positions_of(it) for it in spans]), kind="stable")
        count = len(positions)
        with self._lock:
            if count > self.free:
                raise OutOfSlots(needed=count, free=self.free)
            holding = self._holdings.get(rid, _Holding())
            assert (np.diff(positions) > 0).all(), f"request {rid} asks for a position twice"
            self._assert_new(rid, holding, spans)
            runs = self._free.fewest_runs(count, after=holding.end)
            self._enter_positions(runs, positions)
            for run in runs:
                self._free.remove(run)
            holding.replace_runs(self._merged(holding.runs + runs))
            self._holdings[rid] = holding

    def free_request(self, rid: int) -> int:
        """Takes all of a request's slots back; returns how many, 0 for an unknown request."""
        return self.free_span(rid, _ALL_POSITIONS)

    def free_span(self, rid: int, span: Span) -> int:
        """Takes back the slots of those positions of `span` that the request has here."""
        staying = self._staying(rid, span)
        with self._lock:
            holding = self._holdings.get(rid)
            if holding is None:
                return 0
            released = self._locate(rid, span)
            self._release(released)
            rest = [piece for run in holding.runs for piece in self._outside(run, span)]
            holding.replace_runs(self._merged(rest))
            holding.forget_kept(span)
            if not rest:
                del self._holdings[rid]
        for layer, it in staying:
            self.write_kept(layer, rid, it.span, it.kept, heads=it.heads)
        return sum(map(len, released))

    def pin(self, rid: int, span: Span) -> PinnedSpan:
        """Lets somebody read the span later, whatever becomes of the request until then.

        Slots that are freed meanwhile are nobody's until `unpin`.
        """
        with self._lock:
            slots = self._slots_of(rid, span)
            self._pins[slots] += 1
            return PinnedSpan(span, slots)

    def unpin(self, pinned: PinnedSpan) -> None:
        """Nothing more will be read of the span."""
        with self._lock:
            slots = np.sort(pinned.slots)
            self._pins[slots] -= 1
            assert (self._pins[slots] >= 0).all(), f"{pinned.span} was unpinned twice"
            for run in _runs_of(slots[self._pins[slots] == 0]):
                for part in self._leaving.within(run):
                    self._leaving.remove(part)
                    self._free.add(part)

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
        runs = self._allocated(rid, span)
        for run in runs:
            rows = self._rows_of(run, span)
            self._k_by_layer[layer][run.start : run.stop, heads].copy_(k_thd[rows])
            self._v_by_layer[layer][run.start : run.stop, heads].copy_(v_thd[rows])
        with self._lock:
            assert self._locate(rid, span) == runs, f"request {rid} was freed while being written"
            for run in runs:
                self._written[layer].add(run)

    def write_kept(
        self, layer: int, rid: int, span: Span, kept: KeptKv, *, heads: slice = ALL_HEADS
    ) -> None:
        """Stores a layer's keys and values of those tokens of `span` that each head keeps.

        All of a prompt comes to a layer in this way, or nothing does. `kept_blocks` and `kept`
        read it.
        """
        own = slice(*heads.indices(self.kv_heads)[:2])
        assert kept.kept_ht.shape == (own.stop - own.start, span.length)
        runs = self._allocated(rid, span)
        place = KeptSpan(span=span, heads=own, kept_ht=kept.kept_ht, slots=tuple(runs))
        place.write(self._k_by_layer[layer], kept.k_nd)
        place.write(self._v_by_layer[layer], kept.v_nd)
        with self._lock:
            assert self._locate(rid, span) == runs, f"request {rid} was freed while being written"
            self._holdings[rid].kept.setdefault(layer, []).append(place)

    def narrowed(self, layer: int, rid: int) -> bool:
        """Whether `write_kept` has stored any of a layer."""
        holding = self._holdings.get(rid)
        return holding is not None and layer in holding.kept

    def kept_blocks(self, layer: int, rid: int) -> list[KvBlock]:
        """All that `write_kept` has stored of a request in a layer."""
        k, v = self._k_by_layer[layer], self._v_by_layer[layer]
        return [
            KvBlock(heads, k[slots.start : slots.stop, heads], v[slots.start : slots.stop, heads])
            for place in self._kept_places(layer, rid)
            for heads, slots in place.blocks
        ]

    def kept(self, layer: int, rid: int, span: Span) -> list[MovableKv]:
        """Copies of what `write_kept` stored in `span`, cut as it was written."""
        places = [(it, span.intersection(it.span)) for it in self._kept_places(layer, rid)]
        return [self._read_kept(layer, it, common) for it, common in places if common.length]

    def view(self, layer: int, rid: int, span: Span | None = None) -> list[KvRun]:
        """A layer's written keys and values of a request, or of its positions in `span`.

        Runs are ordered by their first position. They are valid until the request is freed.
        """
        assert not self.narrowed(layer, rid), f"layer {layer} of request {rid} has kept tokens only"
        return self._runs(layer, rid, span)

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
            slots = self._slots_of(rid, span)
        return self._read_slots(layer, slots, ALL_HEADS)

    def write_slots(self, layer: int, slots_t: Tensor, k_thd: Tensor, v_thd: Tensor) -> None:
        """Stores a layer's keys and values of single tokens: one copy for a whole batch.

        What is written so does not show in `view`. Who appends a token to each of many requests at
        every step knows what is there (`held_rows`); entering it would cost more than the copy.
        """
        self._k_by_layer[layer].index_copy_(0, slots_t, k_thd)
        self._v_by_layer[layer].index_copy_(0, slots_t, v_thd)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, (slots, kv heads, head dim) each, of all requests."""
        return self._k_by_layer[layer], self._v_by_layer[layer]

    def written_runs(self, layer: int, rid: int, span: Span | None = None) -> list[range]:
        """Slots of a request (inside `span`) that a layer has written, in the order of `view`."""
        with self._lock:
            written = self._written[layer]
            return [part for run in self._locate(rid, span) for part in written.within(run)]

    # --- questions -------------------------------------------------------------------------

    def runs(self, rid: int, span: Span | None = None) -> list[range]:
        """Slots allocated to a request (inside `span`), in the order of `view`."""
        with self._lock:
            return list(self._locate(rid, span))

    def slots(self, rid: int, span: Span) -> list[int]:
        """Slots of the positions of a span, by position."""
        with self._lock:
            found: list[int] = self._slots_of(rid, span).tolist()
        return found

    def tokens(self, rid: int) -> int:
        """Slots allocated to a request."""
        return sum(map(len, self.runs(rid)))

    def positions(self, rid: int) -> Tensor:
        """Positions allocated to a request: (t,) int64 on the CPU, ascending."""
        with self._lock:
            held = self._held_positions(rid)
        return torch.from_numpy(np.sort(held))

    def check_integrity(self) -> None:
        """Raises AssertionError that says what is wrong, if anything is."""
        with self._lock:
            owners = np.zeros(self.capacity, dtype=np.int64)
            for run in self._free:
                owners[run.start : run.stop] += 1
            for rid, holding in self._holdings.items():
                for run in holding.runs:
                    owners[run.start : run.stop] += 1
                held = self._held_positions(rid)
                assert len(held) > 0, f"request {rid} is kept without a slot"
                assert len(np.unique(held)) == len(held), f"request {rid} holds a position twice"
            for run in self._leaving:
                owners[run.start : run.stop] += 1
                assert self._pins[run.start : run.stop].all(), f"slots {run} wait for nobody"
            lost, shared = np.flatnonzero(owners == 0), np.flatnonzero(owners > 1)
            assert not lost.size, f"slots {lost[:8].tolist()} are neither free nor owned"
            assert not shared.size, f"slots {shared[:8].tolist()} have two owners"
            self._check_sets()

    # --- inside ----------------------------------------------------------------------------

    def _allocated(self, rid: int, span: Span) -> list[range]:
        with self._lock:
            runs = self._locate(rid, span)
        assert sum(map(len, runs)) == span.length, f"{span} is not allocated to request {rid}"
        return runs

    def _runs(self, layer: int, rid: int, span: Span | None) -> list[KvRun]:
        k, v = self.layer(layer)
        return [
            KvRun(
                k.narrow(0, run.start, len(run)),
                v.narrow(0, run.start, len(run)),
                self._positions.narrow(0, run.start, len(run)),
            )
            for run in self.written_runs(layer, rid, span)
        ]

    def _kept_places(self, layer: int, rid: int) -> tuple[KeptSpan, ...]:
        with self._lock:
            holding = self._holdings.get(rid)
            return () if holding is None else tuple(holding.kept.get(layer, ()))

    def _read_kept(self, layer: int, place: KeptSpan, span: Span) -> MovableKv:
        k, v = place.read(self._k_by_layer[layer]), place.read(self._v_by_layer[layer])
        kept = KeptKv(place.kept_ht, k, v).within(place.span.rows_of(span))
        return MovableKv(span, place.heads, kept)

    def _read_slots(
        self, layer: int, slots: npt.NDArray[np.int64], heads: slice
    ) -> tuple[Tensor, Tensor]:
        k_shd, v_shd = (it[:, heads] for it in self.layer(layer))
        if len(runs := _runs_of(slots)) == 1:
            return k_shd[runs[0].start : runs[0].stop], v_shd[runs[0].start : runs[0].stop]
        slots_t = torch.from_numpy(slots).to(self.k.device)
        return k_shd[slots_t], v_shd[slots_t]

    def _staying(self, rid: int, span: Span) -> list[tuple[int, MovableKv]]:
        """Copies of kept tokens that must move up, because others before them are to be freed."""
        holding = self._holdings.get(rid)
        return [
            (layer, self._read_kept(layer, place, side))
            for layer, places in (holding.kept.items() if holding is not None else ())
            for place in places
            if place.span.intersection(span).length
            for side in place.span.without(span)
        ]

    # --- inside, under the lock ------------------------------------------------------------

    def _locate(self, rid: int, span: Span | None) -> list[range]:
        """Slot runs of the request's positions in `span`."""
        holding = self._holdings.get(rid)
        if holding is None:
            return []
        if span is None:
            return holding.runs
        # Every layer asks for the same few spans.
        runs = holding.lookups.get(span)
        if runs is None:
            runs = [part for run in holding.runs for part in self._inside(run, span)]
            holding.remember(span, runs)
        return runs

    def _slots_of(self, rid: int, span: Span) -> npt.NDArray[np.int64]:
        """By position, of a span that is allocated."""
        slots, found = np.empty(span.length, dtype=np.int64), 0
        for run in self._locate(rid, span):
            rows = (self._host_positions[run.start : run.stop] - span.start) // span.step
            slots[rows] = np.arange(run.start, run.stop)
            found += len(run)
        assert found == span.length, f"{span} is not allocated to request {rid}"
        return slots

    def _inside(self, run: range, span: Span) -> list[range]:
        """The slots of a run whose positions lie in `span`: neighbours if it has all positions
        between its first and its last one, as positions ascend."""
        held = self._host_positions[run.start : run.stop]
        first, last = map(int, held.searchsorted((span.start, span.stop)))
        if span.step == 1:
            return [run[first:last]] if first < last else []
        hits = np.flatnonzero((held[first:last] - span.start) % span.step == 0)
        return _runs_of(hits + run.start + first)

    def _outside(self, run: range, span: Span) -> list[range]:
        inside = self._inside(run, span)
        starts = (run.start, *(part.stop for part in inside))
        stops = (*(part.start for part in inside), run.stop)
        return [range(a, b) for a, b in zip(starts, stops, strict=True) if a < b]

    def _rows_of(self, run: range, span: Span) -> slice | Tensor:
        """Which rows of a tensor over all of `span` belong into the slots of `run`."""
        first, last = (int(self._host_positions[slot]) for slot in (run.start, run.stop - 1))
        if last - first == (len(run) - 1) * span.step:
            return span.rows_of(Span(first, last + 1, span.step))
        return (self._positions[run.start : run.stop] - span.start) // span.step

    def _held_positions(self, rid: int) -> npt.NDArray[np.int64]:
        runs = self._locate(rid, None)
        parts = [self._host_positions[run.start : run.stop] for run in runs]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _assert_new(self, rid: int, holding: _Holding, spans: Sequence[Span]) -> None:
        had = [span for run in holding.runs for span in spans if self._inside(run, span)]
        assert not had, f"request {rid} allocates positions that it has: {had}"

    def _enter_positions(self, runs: Sequence[range], positions: npt.NDArray[np.int64]) -> None:
        """Numbers the slots of `runs`, which ascend, with positions that do."""
        taken = 0
        for run in runs:
            part = positions[taken : taken + len(run)]
            self._host_positions[run.start : run.stop] = part
            if self.k.device.type != "cpu":
                self._positions[run.start : run.stop] = torch.from_numpy(part)
            taken += len(run)

    def _merged(self, runs: list[range]) -> list[range]:
        """Orders runs by first position, and joins those whose slots and positions both go on."""
        position = self._host_positions
        merged: list[range] = []
        for run in sorted(runs, key=lambda run: int(position[run.start])):
            if (
                merged
                and merged[-1].stop == run.start
                and position[run.start - 1] < position[run.start]
            ):
                merged[-1] = range(merged[-1].start, run.stop)
            else:
                merged.append(run)
        return merged

    def _release(self, runs: Iterable[range]) -> None:
        for run in runs:
            for written in self._written:
                written.remove(run)
            pinned = self._pins[run.start : run.stop] > 0
            if not pinned.any():
                self._free.add(run)
                continue
            slots = np.arange(run.start, run.stop)
            for part in _runs_of(slots[~pinned]):
                self._free.add(part)
            for part in _runs_of(slots[pinned]):
                self._leaving.add(part)

    def _check_sets(self) -> None:
        for name, slots in [("free", self._free), *enumerate(self._written)]:
            assert slots.size == sum(map(len, slots)), f"{name} set's size is wrong"
        for layer, written in enumerate(self._written):
            stray = [run for run in self._free if written.within(run)]
            assert not stray, f"free slots {stray[:8]} count as written in layer {layer}"
        for rid, holding in self._holdings.items():
            for layer, places in holding.kept.items():
                self._check_kept(rid, layer, places)

    def _check_kept(self, rid: int, layer: int, places: Iterable[KeptSpan]) -> None:
        what = f"of request {rid} in layer {layer}"
        taken: set[tuple[int, int]] = set()
        for place in places:
            assert list(place.slots) == self._locate(rid, place.span), f"{place.span} {what} moved"
            written = [run for run in place.slots if self._written[layer].within(run)]
            assert not written, f"slots {written[:8]} {what} are written in both ways"
            own = {
                (slot, head)
                for heads, run in place.blocks
                for slot in run
                for head in range(heads.start, heads.stop)
            }
            assert not own & taken, f"{place.span} {what} is written twice"
            taken |= own


@dataclass(slots=True)
class _Holding:
    """Where the tokens of one request lie."""

    runs: list[range] = field(default_factory=list)
    """Slot runs by first position; inside a run positions ascend."""
    lookups: dict[Span, list[range]] = field(default_factory=dict)
    """Slot runs of the spans that were asked for lately."""
    kept: dict[int, list[KeptSpan]] = field(default_factory=dict)
    """By layer, spans of which it has kept tokens only."""

    @property
    def end(self) -> int | None:
        """The slot behind the last run, where the request would best grow."""
        return self.runs[-1].stop if self.runs else None

    def replace_runs(self, runs: list[range]) -> None:
        self.runs = runs
        self.lookups.clear()

    def forget_kept(self, span: Span) -> None:
        for layer, places in list(self.kept.items()):
            places[:] = [place for place in places if not place.span.intersection(span).length]
            if not places:
                del self.kept[layer]

    def remember(self, span: Span, runs: list[range]) -> None:
        if len(self.lookups) >= _LOOKUPS_KEPT:
            self.lookups.clear()
        self.lookups[span] = runs


def _runs_of(slots: npt.NDArray[np.int64]) -> list[range]:
    """Slots as runs of neighbours, in their order."""
    if not len(slots):
        return []
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    starts, stops = slots[[0, *cuts]], slots[[*(cuts - 1), -1]]
    return [range(a, b + 1) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]


def _positions_of(span: Span) -> npt.NDArray[np.int64]:
    return np.arange(span.start, span.stop, span.step)
