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

from csps.actors.kept_kv import KeptSpan
from csps.actors.kv_holding import Holding, Place, Slots, positions_of, runs_of, slots_in
from csps.actors.slot_set import SlotSet
from csps.protocols.errors import FaultError
from csps.protocols.span import Span

_ALL_POSITIONS = Span(start=0, stop=2**62)


class OutOfSlots(FaultError):
    """The pool holds fewer free slots than were asked for; nothing was allocated."""

    def __init__(self, *, needed: int, free: int) -> None:
        super().__init__(f"KV pool is out of slots: {needed} needed, {free} free")
        self.needed, self.free = needed, free

    def wire_data(self) -> dict[str, Any]:
        return {"needed": self.needed, "free": self.free}


class NotHeld(FaultError):
    """The pool does not hold what a request was to share with another one."""


class PinnedSpan(NamedTuple):
    """A span of one request whose slots nobody else gets until it is unpinned."""

    span: Span
    slots: Slots
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
        self._holdings: dict[int, Holding] = {}
        self._holders = np.zeros(capacity, dtype=np.int32)
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
            slots = self._by_position(rid, span)
            self._holders[slots] += 1
            self._pinned += len(slots)
            return PinnedSpan(span, slots)

    def unpin(self, pinned: PinnedSpan) -> None:
        """Nothing more will be read of the span."""
        with self._lock:
            self._pinned -= len(pinned.slots)
            self._let_go(np.sort(pinned.slots))

    # --- what is written -------------------------------------------------------------------

    @contextmanager
    def writing(self, rid: int, span: Span) -> Iterator[list[range]]:
        """The slots of a span, as `runs` gives them, which stay where they are meanwhile."""
        with self._lock:
            holding = self._holding(rid)
            runs = holding.locate(span)
        assert sum(map(len, runs)) == span.length, f"{span} is not allocated to request {rid}"
        yield runs
        with self._lock:
            assert holding.locate(span) == runs, f"request {rid} was freed while being written"

    @contextmanager
    def places(self, rid: int, span: Span) -> Iterator[list[Place]]:
        """Where the rows of a span belong, as `Holding.places` says, and stay meanwhile. Of every
        N-th position that is a place or two, where it would be a run for each."""
        with self._lock:
            holding = self._holding(rid)
            places = holding.places(span)
        assert _tokens(places) == span.length, f"{span} is not allocated to request {rid}"
        yield places
        with self._lock:
            held = _tokens(holding.places(span))
            assert held == span.length, f"request {rid} was freed while being written"

    def narrow(self, layer: int, rid: int, kept: KeptSpan) -> None:
        """A layer of a request has kept tokens only of a span."""
        with self._lock:
            self._holding(rid).kept.setdefault(layer, []).append(kept)

    def kept(self, layer: int, rid: int) -> Sequence[KeptSpan]:
        """All spans of which a layer of a request has kept tokens only."""
        return self._holding(rid).kept.get(layer, ())

    # --- questions -------------------------------------------------------------------------

    def runs(self, rid: int, span: Span | None = None) -> list[range]:
        """Slots of a request (inside `span`), ordered by the first position of each run."""
        with self._lock:
            holding = self._holding(rid)
            return list(holding.runs if span is None else holding.locate(span))

    def by_position(self, rid: int, span: Span) -> Slots:
        """Slots of the positions of a span, which are allocated."""
        with self._lock:
            return self._by_position(rid, span)

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

    # --- inside, under the lock ------------------------------------------------------------

    def _holding(self, rid: int) -> Holding:
        """An empty one, which is not entered, of an unknown request."""
        return self._holdings.get(rid) or Holding(self._positions)

    def _by_position(self, rid: int, span: Span) -> Slots:
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


def _tokens(places: Sequence[Place]) -> int:
    return sum(place.tokens for place in places)


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
