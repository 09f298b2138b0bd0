"""Sequences that a rank decodes, and the slots that it reserves for them.

A reservation lives from `reserve` until the sequence leaves. A sequence of the decode batch
computes one token an iteration, or, while it is piggybacked, a chunk of its prompt.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import spans_on
from csps.actors.attention.query_exchange import QueryExchangeTimes
from csps.actors.kv_cache.kv_pool import SlotsOfSequence
from csps.actors.kv_transfer.reservation import Reservation
from csps.actors.sampling.token_sampler import TokenSampler, sampler_of
from csps.actors.timing.device_pace import launched_so_far
from csps.protocols.core.errors import Cancelled, FaultError, ProtocolError
from csps.protocols.core.placement import KvSlice, Span, near_ring, rest_of
from csps.protocols.gang.messages import Notify, ReserveKv
from csps.protocols.gang.step_messages import SequencePlacement
from csps.protocols.sequencer.decode_batches import SequenceCursor


@dataclass(eq=False)
class BatchSequence:
    """One sequence in the decode batch. All ranks count its progress alike; their KV slices
    differ."""

    reservation: Reservation
    index: int
    """Index of the answer's token that is sampled next."""
    next: int
    """First position that is not computed."""
    token: int
    """Token at `next`, once the sequence decodes."""
    sampler: TokenSampler | None
    """Sampler, at the master only."""
    instances: frozenset[int]
    """Instances that the sequence concerns: its master and its KV holders, present and future."""
    slots: SlotsOfSequence | None = None
    """Slots of its KV here, once the sequence decodes."""
    exchanges: QueryExchangeTimes = field(default_factory=QueryExchangeTimes)
    """Exchange times of this rank when the sequence joined."""
    over: bool = False
    """Flag that its last token was sampled. The sequence then stays, without output, until the log
    removes it everywhere."""

    @property
    def request(self) -> ReserveKv:
        """Return the request that was reserved."""
        return self.reservation.request

    @property
    def sequence_id(self) -> int:
        """Return the id of the sequence."""
        return self.request.sequence_id

    @property
    def prompt(self) -> int:
        """Return the number of given positions, tokens of an earlier attempt included."""
        return self.request.prompt_tokens

    @property
    def state(self) -> SequenceCursor:
        """Return the progress as a cursor."""
        request = self.request
        return SequenceCursor(
            next=self.next,
            prompt=self.prompt,
            stop=last_position(request),
            master=request.master,
            first=request.reused,
        )

    @property
    def decodes(self) -> bool:
        """Return whether the prompt is computed."""
        return self.next >= self.prompt

    def tokens(self, span: Span) -> NDArray[np.int32]:
        """Return the prompt tokens of a span that a piggybacked sequence computes, at its
        master."""
        given = np.frombuffer(self.request.prompt, dtype="<i4")
        first = self.prompt - len(given)
        return given[span.start - first : span.stop - first]

    @cached_property
    def answer(self) -> tuple[KvSlice, ...]:
        """Return where the KV of the answer is stored."""
        return answer_of(self.request)

    @property
    def next_holder(self) -> int:
        """Return the instance that stores the KV of the next token, once the sequence decodes."""
        return next(
            kv_slice.instance for kv_slice in self.answer if self.next in kv_slice.span.positions
        )

    @property
    def holders(self) -> set[int]:
        """Return the instances with KV of the sequence, the holder of its next token included.
        Holders of later tokens have nothing to answer yet."""
        slices = (*self.request.slices, *self.answer)
        return {
            kv_slice.instance
            for kv_slice in slices
            if kv_slice.tokens and kv_slice.span.start <= self.next
        }

    def holders_behind(self, position: int) -> set[int]:
        """Return those of the holders that have positions behind this one."""
        near = Span(max(0, position + 1), self.next + 1)
        slices = _within((*self.request.slices, *self.answer), near)
        return {kv_slice.instance for kv_slice in slices}

    def same_holders_in(self, window: int) -> int:
        """Return for how many further tokens the same other instances have KV in the window, if
        all new KV is stored at the master."""
        hidden = self.next - window
        last: dict[int, int] = {}
        for kv_slice in self.request.slices:
            if kv_slice.tokens and kv_slice.instance != self.request.master:
                at = max(kv_slice.span.positions[-1], last.get(kv_slice.instance, 0))
                last[kv_slice.instance] = at
        return min((at - hidden - 1 for at in last.values() if at > hidden), default=sys.maxsize)

    @property
    def stores_at_master(self) -> bool:
        """Return whether no KV of the answer goes to another instance."""
        return all(kv_slice.instance == self.request.master for kv_slice in self.answer)

    def slices_of(self, span: Span) -> list[KvSlice]:
        """Return where the KV of some of the prompt's positions lies, or is to lie."""
        return _within(self.request.slices, span)


def instances_of(request: ReserveKv) -> frozenset[int]:
    """Return the instances that a sequence concerns, as it was reserved."""
    named = (kv_slice.instance for kv_slice in (*request.slices, *answer_of(request)))
    return frozenset((request.master, *named))


def last_position(request: ReserveKv) -> int:
    """Return the end of the positions to compute: the answer's last token is never embedded."""
    return request.prompt_tokens + max(0, request.output_tokens - 1)


def answer_of(request: ReserveKv) -> tuple[KvSlice, ...]:
    """Return where the KV of the answer's positions is to lie."""
    answer = Span(request.prompt_tokens, last_position(request))
    if not request.answer:
        return (KvSlice.of(request.master, answer),)
    return tuple(_within(request.answer, answer))


def _within(slices: Sequence[KvSlice], span: Span) -> list[KvSlice]:
    cuts = [kv_slice.cut(span.intersection(kv_slice.span)) for kv_slice in slices]
    return [cut for cut in cuts if cut.span.length]


REMEMBERED_LEAVES = 4096
"""Number of sequences to remember after they have left, to refuse reservations that arrive late."""


class Reservations:
    """Reservations of one rank. Thread-safe; only the engine thread lets sequences join and
    leave."""

    def __init__(self, engine: Engine, notify: Notify) -> None:
        self._engine, self._notify = engine, notify
        self._reservations: dict[int, Reservation] = {}
        self._samplers: dict[int, TokenSampler] = {}
        self._left: OrderedDict[int, None] = OrderedDict()
        self._ended: set[int] = set()
        """Owners that are gone. Each is the attachment of a router, so they are few."""
        self._changing = threading.Lock()

    def __len__(self) -> int:
        """Return the number of sequences with a reservation."""
        return len(self._reservations)

    def reserve(self, request: ReserveKv, owner: int) -> None:
        """Reserve slots for this rank's slices of the prompt and of the answer.

        Args:
            owner: the router's attachment; when it ends, the sequence leaves.

        Raises:
            OutOfSlots: the pool is too full; nothing was reserved.
            NotHeld: KV to reuse is not here; nothing was reserved.
            Cancelled: the sequence was cancelled already, or its owner is gone.
            InvalidRequest: the sampling parameters do not fit the model.
            ProtocolError: no instance stores some of the answer, or the sequence is reserved
                already.
        """
        engine = self._engine
        answer = Span(request.prompt_tokens, last_position(request))
        if request.answer and rest_of(answer, (kv_slice.span for kv_slice in request.answer)):
            raise ProtocolError(
                f"sequence {request.sequence_id}: no instance stores some positions of the answer"
            )
        spans = spans_on(
            [kv_slice for kv_slice in request.slices if not kv_slice.source], engine.instance
        )
        answers = spans_on(answer_of(request), engine.instance)
        # Made here and not when the sequence joins: bad parameters are refused now, and long lists
        # of tokens do not delay an iteration.
        masters = request.master == engine.instance
        sampler = (
            sampler_of(request.sampler, engine.spec.vocab, engine.grammars) if masters else None
        )
        ring = self._ring(request)
        with self._changing:
            self._refuse_cancelled(request.sequence_id, owner)
            self._take(request, [*spans, *answers], ring)
            if sampler is not None:
                self._samplers[request.sequence_id] = sampler
            reservation = self._reservations[request.sequence_id] = Reservation(
                request=request,
                spans=spans,
                heads=engine.kv_heads,
                layers=engine.spec.layers,
                windowed=engine.pool.windowed,
                near=ring.intersection(Span(0, request.prompt_tokens)),
                ring=ring,
                owner=owner,
                # Slots come back on the host. On a rank that samples nothing of their former
                # sequence, the device may have iterations of it yet to do.
                launched=launched_so_far(engine.device),
            )
        if reservation.tokens and not reservation.missing:
            # Every layer has a window, and this is not the master: nothing is sent here.
            self._notify("received", reservation.kv_received(engine.rank))

    def _ring(self, request: ReserveKv) -> Span:
        """Return the first positions of a sequence that take slots here in layers with a window."""
        engine, window = self._engine, self._engine.spec.window
        if window is None or not engine.pool.windowed or request.master != engine.instance:
            return Span(0, 0)
        return near_ring(window, request.prompt_tokens, last_position(request))

    def _take(self, request: ReserveKv, spans: Sequence[Span], ring: Span) -> None:
        """Take slots for spans and share slots that others have computed: all, or none.

        Args:
            ring: positions that take slots in layers with a window.
        """
        slots, sequence_id = self._engine.pool.slots, request.sequence_id
        try:
            for kv_slice in request.slices:
                if kv_slice.source and kv_slice.instance == self._engine.instance:
                    slots.share_slots(sequence_id, kv_slice.source, kv_slice.span)
            slots.allocate(sequence_id, spans)
            if (near := self._engine.pool.window_slots) is not None:
                near.allocate(sequence_id, [ring])
        except FaultError:
            slots.free_sequence(sequence_id)
            raise

    def _refuse_cancelled(self, sequence_id: int, owner: int) -> None:
        if sequence_id in self._left or owner in self._ended:
            raise Cancelled(f"sequence {sequence_id} was cancelled before it was reserved")
        if sequence_id in self._reservations:
            raise ProtocolError(f"sequence {sequence_id} is reserved already")

    def find(self, sequence_id: int) -> Reservation | None:
        """Return the reservation to which arriving KV belongs."""
        return self._reservations.get(sequence_id)

    def adopt(self, sequence_id: int, span: Span) -> None:
        """Count KV of a prompt that was computed on the instance that decodes it."""
        reservation = self.find(sequence_id)
        if reservation is not None and span.length and reservation.adopt(span):
            self._notify("received", reservation.kv_received(self._engine.rank))

    def joining(self, sequence_id: int) -> Reservation | None:
        """Return the reservation of a sequence that joins the decode batch; None if it has left.

        Raises:
            FaultError: there never was one.
        """
        reservation = self.find(sequence_id)
        # Every rank sees changes in one order: a sequence that has left has left everywhere.
        if reservation is None and sequence_id not in self._left:
            raise FaultError(f"sequence {sequence_id} joins without a reservation")
        return reservation

    def sampler(self, sequence_id: int) -> TokenSampler | None:
        """Return the sequence's sampler, at its master."""
        return self._samplers.get(sequence_id)

    def place(
        self, sequence_id: int, placement: SequencePlacement, sampler: TokenSampler | None
    ) -> None:
        """Change a sequence's placement after a move.

        Args:
            sampler: new sampler if this instance has become its master; None otherwise.
        """
        with self._changing:
            reservation = self._reservations[sequence_id]
            reservation.request = reservation.request.moved(
                slices=placement.slices,
                master=placement.master,
                answer=placement.answer,
            )
            if placement.master != self._engine.instance:
                self._samplers.pop(sequence_id, None)
            elif sampler is not None:
                self._samplers[sequence_id] = sampler

    def pass_on(self, sequence_id: int, master: int) -> None:
        """Change the master of a sequence that is neither stored nor sampled here."""
        with self._changing:
            reservation = self._reservations[sequence_id]
            reservation.request = reservation.request.moved(master=master)

    def end_owner(self, owner: int) -> list[int]:
        """Refuse an owner's late reservations; return the sequences that are to leave."""
        with self._changing:
            self._ended.add(owner)
            return [
                sequence_id
                for sequence_id, reservation in self._reservations.items()
                if reservation.owner == owner
            ]

    def leave(self, sequence_id: int) -> None:
        """Close a sequence's reservation; its slots are not freed yet."""
        with self._changing:
            self._left[sequence_id] = None
            if len(self._left) > REMEMBERED_LEAVES:
                self._left.popitem(last=False)
            reservation = self._reservations.pop(sequence_id, None)
            self._samplers.pop(sequence_id, None)
        if reservation is not None:
            with reservation.lock:
                reservation.closed = True
            reservation.left()
