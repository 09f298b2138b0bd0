"""Which request has which slots of one rank's KV pool, token by token (LoongServe §4.1, CSPS §4.2).

Any token of any request may lie in any slot, so a request may be spread over the ranks of a gang
in any way, and a rank may hold any subset of its positions. The allocator nevertheless looks for
contiguous slots, so that attention can read most requests through one zero-copy slice.

What several requests begin with lies there once: a slot is free when the last of them lets go.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

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
    """The pool holds fewer free slots than were asked for; nothing was allocated."""

    def __init__(self, *, needed: int, free: int) -> None:
        super().__init__(f"KV pool is out of slots: {needed} needed, {free} free")
        self.needed, self.free = needed, free

    def wire_data(self) -> dict[str, Any]:
        return {"needed": self.needed, "free": self.free}


class NotResident(FaultError):
    """The pool does not hold what a request was to share with another one."""


class PinnedSpan(NamedTuple):
    """A span of one request whose slots nobody else gets until it is unpinned."""

    span: Span
    slots: SlotIndices
    """By position."""


class SlotAllocator:
    """The slots of one pool and who has them.

    One lock guards it. What that cannot prevent is a request being freed while another thread
    still reads or writes its tensors: whoever frees a request makes sure of that.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._positions = np.zeros(capacity, dtype=np.int64)
        """By slot, in the requests that have it: they agree."""
        self._lock = threading.Lock()
        self._free = SlotSet([range(capacity)])
        self._slot_maps: dict[int, SlotMap] = {}
        self._ref_counts = np.zeros(capacity, dtype=np.int32)
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

    # --- giving and taking -----------------------------------------------------------------

    def allocate(self, sequence_id: int, spans: Sequence[Span]) -> None:
        """Gives request `sequence_id` a slot for each position of `spans`: all of them, or none.

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
            slot_map = self._slot_map(sequence_id)
            assert (np.diff(positions) > 0).all(), (
                f"request {sequence_id} asks for a position twice"
            )
            had = [span for span in spans if slot_map.locate(span)]
            assert not had, f"request {sequence_id} allocates positions that it has: {had}"
            runs = self._free.fewest_runs(count, after=slot_map.end)
            self._positions[slots_in(runs)] = positions
            for run in runs:
                self._free.remove(run)
            self._hold(sequence_id, slot_map, runs)

    def share_slots(self, sequence_id: int, source: int, span: Span) -> None:
        """Gives a request the slots of a span that another one has: both have them from now on.
        Nothing if it shares all of them already, whatever has become of the other one.

        Raises:
            NotHeld: the other request does not have all of them, or this one has other slots for
                some of the positions.
        """
        with self._lock:
            slot_map = self._slot_map(sequence_id)
            known = slots_in(slot_map.locate(span))
            if np.isin(known, slots_in(slot_map.shared)).sum() == span.length:
                return
            theirs = self._slot_maps.get(source)
            slots = None if theirs is None or theirs.kept else theirs.slots(span)
            if slots is None:
                raise NotResident(
                    f"request {sequence_id} shares {span} of {source}, which does not have it"
                )
            new = slots[np.isin(slots, known, invert=True)]
            if np.isin(self._positions[new], self._positions[known]).any():
                raise NotResident(
                    f"request {sequence_id} shares {span} of {source}, and has slots for it"
                )
            for run in runs_of(new):
                slot_map.shared.add(run)
            self._hold(sequence_id, slot_map, runs_of(new))

    def drop_shared(self, sequence_id: int) -> None:
        """A request lets go of all that it shares with those that have computed it."""
        with self._lock:
            if (slot_map := self._slot_maps.get(sequence_id)) is not None:
                self._take(sequence_id, slot_map, SlotSet(slot_map.shared))

    def free_request(self, sequence_id: int) -> int:
        """A request lets go of all its slots; returns how many, 0 for an unknown one."""
        return self.free_span(sequence_id, _ALL_POSITIONS)

    def free_span(self, sequence_id: int, span: Span) -> int:
        """A request lets go of the slots of those positions of `span` that it has here, or of all
        where it has kept tokens only; returns how many."""
        with self._lock:
            if (slot_map := self._slot_maps.get(sequence_id)) is None:
                return 0
            released = SlotSet(slot_map.runs if slot_map.kept else slot_map.locate(span))
            self._take(sequence_id, slot_map, released)
            return released.size

    def pin(self, sequence_id: int, span: Span) -> PinnedSpan:
        """Lets somebody read the span later, whatever becomes of the request until then.

        Slots that are freed meanwhile are nobody's until `unpin`.
        """
        with self._lock:
            slots = self._by_position(sequence_id, span)
            self._ref_counts[slots] += 1
            self._pinned += len(slots)
            return PinnedSpan(span, slots)

    def unpin(self, pinned: PinnedSpan) -> None:
        """Nothing more will be read of the span."""
        with self._lock:
            self._pinned -= len(pinned.slots)
            self._unref(np.sort(pinned.slots))

    # --- what is written -------------------------------------------------------------------

    @contextmanager
    def writing(self, sequence_id: int, span: Span) -> Iterator[list[range]]:
        """The slots of a span, as `runs` gives them, which stay where they are meanwhile."""
        with self._lock:
            slot_map = self._slot_map(sequence_id)
            runs = slot_map.locate(span)
        assert sum(map(len, runs)) == span.length, (
            f"{span} is not allocated to request {sequence_id}"
        )
        yield runs
        with self._lock:
            assert slot_map.locate(span) == runs, (
                f"request {sequence_id} was freed while being written"
            )

    @contextmanager
    def places(self, sequence_id: int, span: Span) -> Iterator[list[SlotRows]]:
        """Where the rows of a span belong, as `SlotMap.places` says, and stay meanwhile. Of every
        N-th position that is a place or two, where it would be a run for each."""
        with self._lock:
            slot_map = self._slot_map(sequence_id)
            places = slot_map.places(span)
        assert _tokens(places) == span.length, f"{span} is not allocated to request {sequence_id}"
        yield places
        with self._lock:
            held = _tokens(slot_map.places(span))
            assert held == span.length, f"request {sequence_id} was freed while being written"

    def narrow(self, layer: int, sequence_id: int, kept: KeptSpan) -> None:
        """A layer of a request has kept tokens only of a span."""
        with self._lock:
            self._slot_map(sequence_id).kept.setdefault(layer, []).append(kept)

    def kept(self, layer: int, sequence_id: int) -> Sequence[KeptSpan]:
        """All spans of which a layer of a request has kept tokens only."""
        return self._slot_map(sequence_id).kept.get(layer, ())

    # --- questions -------------------------------------------------------------------------

    def runs(self, sequence_id: int, span: Span | None = None) -> list[range]:
        """Slots of a request (inside `span`), ordered by the first position of each run."""
        with self._lock:
            slot_map = self._slot_map(sequence_id)
            return list(slot_map.runs if span is None else slot_map.locate(span))

    def by_position(self, sequence_id: int, span: Span) -> SlotIndices:
        """Slots of the positions of a span, which are allocated."""
        with self._lock:
            return self._by_position(sequence_id, span)

    def tokens(self, sequence_id: int) -> int:
        """Slots of a request."""
        return sum(map(len, self.runs(sequence_id)))

    def check_integrity(self) -> None:
        """Raises AssertionError that says what is wrong, if anything is."""
        with self._lock:
            holders = np.zeros(self.capacity, dtype=np.int64)
            for sequence_id, slot_map in self._slot_maps.items():
                for run in slot_map.runs:
                    holders[run.start : run.stop] += 1
                held = self._positions[slots_in(slot_map.runs)]
                assert len(held) > 0, f"request {sequence_id} is kept without a slot"
                assert len(np.unique(held)) == len(held), (
                    f"request {sequence_id} holds a position twice"
                )
                for layer, places in slot_map.kept.items():
                    _check_kept(slot_map, places, f"of request {sequence_id} in layer {layer}")
            free = np.zeros(self.capacity, dtype=bool)
            for run in self._free:
                free[run.start : run.stop] = True
            assert self._free.size == free.sum(), "the number of free slots is wrong"
            pins = self._ref_counts - holders
            wrong = np.flatnonzero((pins < 0) | (free == (self._ref_counts > 0)))
            assert not wrong.size, f"slots {wrong[:8].tolist()} have other owners than are counted"
            assert pins.sum() == self._pinned, "the number of pinned slots is wrong"

    # --- inside, under the lock ------------------------------------------------------------

    def _slot_map(self, sequence_id: int) -> SlotMap:
        """An empty one, which is not entered, of an unknown request."""
        return self._slot_maps.get(sequence_id) or SlotMap(self._positions)

    def _by_position(self, sequence_id: int, span: Span) -> SlotIndices:
        slots = self._slot_map(sequence_id).slots(span)
        assert slots is not None, f"{span} is not allocated to request {sequence_id}"
        return slots

    def _hold(self, sequence_id: int, slot_map: SlotMap, runs: Sequence[range]) -> None:
        """A request has these slots as well."""
        self._ref_counts[slots_in(runs)] += 1
        slot_map.add(runs)
        self._slot_maps[sequence_id] = slot_map

    def _take(self, sequence_id: int, slot_map: SlotMap, slots: SlotSet) -> None:
        """A request has these of its slots no more."""
        self._unref(slots_in(slots))
        slot_map.remove(slots)
        if not slot_map.runs:
            del self._slot_maps[sequence_id]

    def _unref(self, slots: SlotIndices) -> None:
        """One less has each of these slots, which ascend."""
        self._ref_counts[slots] -= 1
        assert (self._ref_counts[slots] >= 0).all(), "slots were let go of twice"
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
