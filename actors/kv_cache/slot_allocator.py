"""Which sequence has which slots of one rank's KV pool, token by token (LoongServe §4.1, CSPS
§4.2).

Any token of any sequence may lie in any slot. So a sequence may be spread over the ranks of a gang
in any way, and a rank may hold any subset of its positions. The allocator nevertheless looks for
contiguous slots, so that attention can read most sequences through one zero-copy slice.

A prefix that several sequences share lies there once: a slot is free when the last of them frees
it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from csps.actors.kv_cache.sequence_slots import (
    KeptSpan,
    SlotIndices,
    SlotMap,
    SlotRows,
    SlotSet,
    positions_of,
    runs_of,
    slots_in,
)
from csps.protocols.core.errors import FaultError
from csps.protocols.core.placement import Span

_ALL_POSITIONS = Span(start=0, stop=2**62)


class OutOfSlots(FaultError):
    """The pool has fewer free slots than were asked for; nothing was allocated."""

    def __init__(self, *, needed: int, free: int) -> None:
        super().__init__(f"KV pool is out of slots: {needed} needed, {free} free")
        self.needed, self.free = needed, free

    def wire_data(self) -> dict[str, Any]:
        return {"needed": self.needed, "free": self.free}


class NotHeld(FaultError):
    """The pool does not hold KV that a sequence was to share with another one."""


class PinnedSpan(NamedTuple):
    """A span of one sequence whose slots stay allocated until it is unpinned."""

    span: Span
    slots: SlotIndices
    """Slots by position."""


class SlotAllocator:
    """The slots of one pool and the sequences that have them.

    One lock guards it. It cannot prevent that a sequence is freed while another thread reads or
    writes its tensors: whoever frees a sequence ensures that.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._positions = np.zeros(capacity, dtype=np.int64)
        """Position of each slot; the sequences that have the slot agree on it."""
        self._lock = threading.Lock()
        self._free = SlotSet([range(capacity)])
        self._slot_maps: dict[int, SlotMap] = {}
        self._ref_counts = np.zeros(capacity, dtype=np.int32)
        """Number of sequences and pins that have each slot."""
        self._pinned = 0
        """Number of slots of all pins together."""

    @property
    def free(self) -> int:
        """Return the number of slots that are neither allocated nor pinned."""
        return self._free.size

    @property
    def used(self) -> int:
        """Return the number of slots that are allocated or pinned."""
        return self.capacity - self._free.size

    # --- allocate and free -----------------------------------------------------------------

    def allocate(self, sequence_id: int, spans: Sequence[Span]) -> None:
        """Allocate a slot for each position of `spans` to a sequence: all of them, or none.

        A sequence may allocate several times, but no position twice. Slots of one call are
        contiguous if the free slots allow it, so a caller that knows how much a sequence will grow
        allocates prompt and answer together.

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
            slot_map = self._slot_map(sequence_id)
            assert (np.diff(positions) > 0).all(), (
                f"sequence {sequence_id} asks for a position twice"
            )
            had = [span for span in spans if slot_map.locate(span)]
            assert not had, f"sequence {sequence_id} allocates positions that it has: {had}"
            runs = self._free.fewest_runs(count, after=slot_map.end)
            self._positions[slots_in(runs)] = positions
            for run in runs:
                self._free.remove(run)
            self._hold(sequence_id, slot_map, runs)

    def share_slots(self, sequence_id: int, source: int, span: Span) -> None:
        """Let a sequence share the slots of a span of another sequence. If it shares all of them
        already, do nothing, whatever has become of the other one.

        Raises:
            NotHeld: the other sequence does not have all of them, or this one has other slots
                for some of the positions.
        """
        with self._lock:
            slot_map = self._slot_map(sequence_id)
            known = slots_in(slot_map.locate(span))
            if np.isin(known, slots_in(slot_map.shared)).sum() == span.length:
                return
            source_map = self._slot_maps.get(source)
            slots = None if source_map is None or source_map.kept else source_map.slots(span)
            if slots is None:
                raise NotHeld(
                    f"sequence {sequence_id} is to share {span} of sequence {source}, "
                    "which does not have it"
                )
            new = slots[np.isin(slots, known, invert=True)]
            if np.isin(self._positions[new], self._positions[known]).any():
                raise NotHeld(
                    f"sequence {sequence_id} is to share {span} of sequence {source}, "
                    "but has other slots for it"
                )
            for run in runs_of(new):
                slot_map.shared.add(run)
            self._hold(sequence_id, slot_map, runs_of(new))

    def free_sequence(self, sequence_id: int) -> int:
        """Free all slots of a sequence; return how many, 0 for an unknown one."""
        return self.free_span(sequence_id, _ALL_POSITIONS)

    def free_span(self, sequence_id: int, span: Span) -> int:
        """Free a sequence's slots of the positions in `span`, or all if it has kept tokens only;
        return how many."""
        with self._lock:
            if (slot_map := self._slot_maps.get(sequence_id)) is None:
                return 0
            released = SlotSet(slot_map.runs if slot_map.kept else slot_map.locate(span))
            self._take(sequence_id, slot_map, released)
            return released.size

    def pin(self, sequence_id: int, span: Span) -> PinnedSpan:
        """Pin a span, so that it can be read later even if the sequence is freed.

        Slots freed meanwhile stay unavailable until `unpin`.
        """
        with self._lock:
            slots = self._by_position(sequence_id, span)
            self._ref_counts[slots] += 1
            self._pinned += len(slots)
            return PinnedSpan(span, slots)

    def pin_held(self, sequence_id: int, spans: Sequence[Span]) -> tuple[PinnedSpan, ...] | None:
        """Pin spans of a sequence that may be gone: all of them, or none (None)."""
        with self._lock:
            slot_map = self._slot_map(sequence_id)
            found = [None if slot_map.kept else slot_map.slots(span) for span in spans]
            pinned = tuple(
                PinnedSpan(span, slots)
                for span, slots in zip(spans, found, strict=True)
                if slots is not None
            )
            if len(pinned) < len(spans):
                return None
            for _, slots in pinned:
                self._ref_counts[slots] += 1
                self._pinned += len(slots)
            return pinned

    def unpin(self, pinned: PinnedSpan) -> None:
        """Unpin a span that will not be read any more."""
        with self._lock:
            self._pinned -= len(pinned.slots)
            self._unref(np.sort(pinned.slots))

    # --- write -----------------------------------------------------------------------------

    @contextmanager
    def writing(self, sequence_id: int, span: Span) -> Iterator[list[range]]:
        """Yield the slots of a span, as `runs` returns them; they stay where they are meanwhile."""
        with self._lock:
            slot_map = self._slot_map(sequence_id)
            runs = slot_map.locate(span)
        assert sum(map(len, runs)) == span.length, (
            f"{span} is not allocated to sequence {sequence_id}"
        )
        yield runs
        with self._lock:
            assert slot_map.locate(span) == runs, (
                f"sequence {sequence_id} was freed while being written"
            )

    @contextmanager
    def places(self, sequence_id: int, span: Span) -> Iterator[list[SlotRows]]:
        """Yield where the rows of a span belong, as `SlotMap.places` returns it; it stays so
        meanwhile. Every N-th position makes a place or two, but would make many runs."""
        with self._lock:
            slot_map = self._slot_map(sequence_id)
            places = slot_map.places(span)
        assert _tokens(places) == span.length, f"{span} is not allocated to sequence {sequence_id}"
        yield places
        with self._lock:
            still = _tokens(slot_map.places(span))
            assert still == span.length, f"sequence {sequence_id} was freed while being written"

    def narrow(self, layer: int, sequence_id: int, kept: KeptSpan) -> None:
        """Note that a layer of a sequence has kept tokens only of a span."""
        with self._lock:
            self._slot_map(sequence_id).kept.setdefault(layer, []).append(kept)

    def kept(self, layer: int, sequence_id: int) -> Sequence[KeptSpan]:
        """Return all spans of which a layer of a sequence has kept tokens only."""
        return self._slot_map(sequence_id).kept.get(layer, ())

    # --- look up ---------------------------------------------------------------------------

    def runs(self, sequence_id: int, span: Span | None = None) -> list[range]:
        """Return a sequence's slots (inside `span`), ordered by the first position of each run."""
        with self._lock:
            slot_map = self._slot_map(sequence_id)
            return list(slot_map.runs if span is None else slot_map.locate(span))

    def by_position(self, sequence_id: int, span: Span) -> SlotIndices:
        """Return the slots of the positions of an allocated span."""
        with self._lock:
            return self._by_position(sequence_id, span)

    def behind(self, runs: Iterable[range], position: int) -> list[range]:
        """Return the parts of a sequence's runs, in which positions ascend, that lie behind a
        position."""
        found = []
        for run in runs:
            positions = self._positions[run.start : run.stop]
            # Most runs lie on one side as a whole.
            if positions[-1] > position:
                whole = positions[0] > position
                found.append(run if whole else run[positions.searchsorted(position, "right") :])
        return found

    def positions(self, run: range) -> Tensor:
        """Return the positions of a run of slots, int64."""
        return torch.from_numpy(self._positions[run.start : run.stop].copy())

    def tokens(self, sequence_id: int) -> int:
        """Return the number of a sequence's slots."""
        return sum(map(len, self.runs(sequence_id)))

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        with self._lock:
            holders = np.zeros(self.capacity, dtype=np.int64)
            for sequence_id, slot_map in self._slot_maps.items():
                for run in slot_map.runs:
                    holders[run.start : run.stop] += 1
                positions = self._positions[slots_in(slot_map.runs)]
                assert len(positions) > 0, f"sequence {sequence_id} is entered without a slot"
                assert len(np.unique(positions)) == len(positions), (
                    f"sequence {sequence_id} has a position twice"
                )
                for layer, places in slot_map.kept.items():
                    _check_kept(slot_map, places, f"of sequence {sequence_id} in layer {layer}")
            free = np.zeros(self.capacity, dtype=bool)
            for run in self._free:
                free[run.start : run.stop] = True
            assert self._free.size == free.sum(), (
                f"{self._free.size} free slots are counted, {free.sum()} exist"
            )
            pins = self._ref_counts - holders
            wrong = np.flatnonzero((pins < 0) | (free == (self._ref_counts > 0)))
            assert not wrong.size, f"slots {wrong[:8].tolist()} have other owners than are counted"
            assert pins.sum() == self._pinned, (
                f"{self._pinned} pins are counted, {pins.sum()} exist"
            )

    # --- under the lock ----------------------------------------------------------------------

    def _slot_map(self, sequence_id: int) -> SlotMap:
        """Return a sequence's map, or an empty one, which is not entered."""
        return self._slot_maps.get(sequence_id) or SlotMap(self._positions)

    def _by_position(self, sequence_id: int, span: Span) -> SlotIndices:
        slots = self._slot_map(sequence_id).slots(span)
        assert slots is not None, f"{span} is not allocated to sequence {sequence_id}"
        return slots

    def _hold(self, sequence_id: int, slot_map: SlotMap, runs: Sequence[range]) -> None:
        """Add slots to a sequence."""
        self._ref_counts[slots_in(runs)] += 1
        slot_map.add(runs)
        self._slot_maps[sequence_id] = slot_map

    def _take(self, sequence_id: int, slot_map: SlotMap, slots: SlotSet) -> None:
        """Take slots from a sequence."""
        self._unref(slots_in(slots))
        slot_map.remove(slots)
        if not slot_map.runs:
            del self._slot_maps[sequence_id]

    def _unref(self, slots: SlotIndices) -> None:
        """Drop one reference to each of these slots, which ascend."""
        self._ref_counts[slots] -= 1
        assert (self._ref_counts[slots] >= 0).all(), f"slots {slots.tolist()[:8]} were freed twice"
        for run in runs_of(slots[self._ref_counts[slots] == 0]):
            self._free.add(run)


def _tokens(places: Sequence[SlotRows]) -> int:
    return sum(place.tokens for place in places)


def _check_kept(slot_map: SlotMap, places: Sequence[KeptSpan], what: str) -> None:
    taken: set[tuple[int, int]] = set()
    for place in places:
        assert list(place.slots) == slot_map.locate(place.span), f"{place.span} {what} moved"
        own = {
            (slot, head)
            for heads, run in place.blocks
            for slot in run
            for head in range(heads.start, heads.stop)
        }
        assert not own & taken, f"{place.span} {what} is written twice"
        taken |= own
