"""The rows of a stream: sequences, and how far each of them is.

A row that decodes computes one token an iteration, one that rides a piece of its prompt (`fill`).

Slots that a rank has set aside for sequences that it is to decode, from `reserve` to leaving.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import spans_on
from csps.actors.attention.query_exchange import QueryExchangeTimes
from csps.actors.kv_cache.kv_pool import SlotsOfSequence
from csps.actors.kv_transfer.reservation import Reservation
from csps.actors.sampling.notifications import Notify
from csps.actors.sampling.token_sampler import TokenSampler, generated_before, sampler_of
from csps.protocols.core.errors import Cancelled, FaultError, ProtocolError
from csps.protocols.core.placement import KvSlice, Span, rest_of
from csps.protocols.gang.messages import ReserveKv
from csps.protocols.gang.step_messages import SequencePlacement
from csps.protocols.sequencer.decode_batches import SequenceCursor


@dataclass(eq=False)
class BatchSequence:
    """One sequence in the stream. All ranks count alike where it is; what it holds differs."""

    reservation: Reservation
    index: int
    """Number of the answer's token that is drawn next."""
    next: int
    """First position that is not computed."""
    token: int
    """At `next`, once the row decodes."""
    sampler: TokenSampler | None
    """At its master."""
    instances: frozenset[int]
    """Whom it concerns: who draws its tokens, and who holds or is to keep its KV."""
    slots: SlotsOfSequence | None = None
    """Of its KV as far as it lies here, once the row decodes."""
    exchanges: QueryExchangeTimes = field(default_factory=QueryExchangeTimes)
    """Of this rank, as they were when it joined."""
    over: bool = False
    """Its last token was drawn. It stays, unheard, until the log lets it leave everywhere."""

    @property
    def request(self) -> ReserveKv:
        """What was reserved for it."""
        return self.reservation.request

    @property
    def sequence_id(self) -> int:
        """The sequence."""
        return self.request.sequence_id

    @property
    def prompt(self) -> int:
        """Positions that are given, those that an earlier attempt has drawn included."""
        return self.request.prompt_length

    @property
    def state(self) -> SequenceCursor:
        """How far it is."""
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
        """Its prompt is computed."""
        return self.next >= self.prompt

    def tokens(self, span: Span) -> NDArray[np.int32]:
        """Of positions that a row that rides computes, at its master."""
        given = np.frombuffer(self.request.prompt, dtype="<i4")
        first = self.prompt - len(given)
        return given[span.start - first : span.stop - first]

    @cached_property
    def answer(self) -> tuple[KvSlice, ...]:
        """Who keeps the KV of the answer."""
        return answer_of(self.request)

    @property
    def next_holder(self) -> int:
        """The instance that keeps the KV of the row's next token, once it decodes."""
        return next(it.instance for it in self.answer if self.next in it.span.positions)

    @property
    def holders(self) -> set[int]:
        """Instances that hold KV of it, or keep that of its next token, once it decodes. Who keeps
        later ones has nothing to answer yet."""
        slices = (*self.request.slices, *self.answer)
        return {
            kv_slice.instance
            for kv_slice in slices
            if kv_slice.span.length and kv_slice.span.start <= self.next
        }

    @property
    def stores_at_master(self) -> bool:
        """No KV of the answer goes to another instance."""
        return all(it.instance == self.request.master for it in self.answer)

    def slices_before(self, position: int) -> list[KvSlice]:
        """Where the KV of the prompt's positions before this one lies."""
        return _within(self.request.slices, Span(start=0, stop=position))

    def slices_of(self, span: Span) -> list[KvSlice]:
        """Where the KV of a piece of the prompt is to lie."""
        return _within(self.request.slices, span)


def instances_of(request: ReserveKv) -> frozenset[int]:
    """Whom a row concerns, as it was reserved."""
    named = (kv_slice.instance for kv_slice in (*request.slices, *answer_of(request)))
    return frozenset((request.master, *named))


def last_position(request: ReserveKv) -> int:
    """Behind the last position that is computed: the answer's last token is never embedded."""
    to_come = request.sampling.max_tokens - generated_before(request.generated_tokens)
    return request.prompt_length + max(0, to_come - 1)


def answer_of(request: ReserveKv) -> tuple[KvSlice, ...]:
    """Where the KV of the answer's positions is to lie."""
    answer = Span(request.prompt_length, last_position(request))
    if not request.answer:
        return (KvSlice(instance=request.master, span=answer),)
    return tuple(_within(request.answer, answer))


def _within(slices: Sequence[KvSlice], span: Span) -> list[KvSlice]:
    cuts = [replace(kv_slice, span=span.intersection(kv_slice.span)) for kv_slice in slices]
    return [cut for cut in cuts if cut.span.length]


REMEMBERED_LEAVES = 4096
"""A reservation that arrives after its cancellation is refused; this many are remembered."""


class Reservations:
    """Those of one rank. Thread-safe; joining and leaving are the engine thread's."""

    def __init__(self, engine: Engine, notify: Notify) -> None:
        self._engine, self._notify = engine, notify
        self._reservations: dict[int, Reservation] = {}
        self._samplers: dict[int, TokenSampler] = {}
        self._left: OrderedDict[int, None] = OrderedDict()
        self._ended: set[int] = set()
        """Owners that are gone: attachments of routers, so they are few."""
        self._changing = threading.Lock()

    def __len__(self) -> int:
        """Sequences that hold slots here or are expected to."""
        return len(self._reservations)

    def reserve(self, request: ReserveKv, owner: int) -> None:
        """Set slots aside: this rank's shares of the prompt and of the answer.

        Args:
            owner: the router's attachment, at whose end the sequence leaves.

        Raises:
            OutOfSlots: the pool is too full; nothing was reserved.
            NotHeld: what it is to reuse is not here; nothing was reserved.
            Cancelled: the sequence has been cancelled already, or its owner is gone.
            InvalidRequest: the sampling parameters do not fit the model.
            ProtocolError: nobody is to keep some of the answer, or it is reserved already.
        """
        engine = self._engine
        answer = Span(request.prompt_length, last_position(request))
        if request.answer and rest_of(answer, (it.span for it in request.answer)):
            raise ProtocolError(
                f"request {request.sequence_id} has positions of its answer without a keeper"
            )
        spans = spans_on(
            [kv_slice for kv_slice in request.slices if kv_slice.source is None], engine.instance
        )
        answers = spans_on(answer_of(request), engine.instance)
        # Made here and not when the row joins: bad parameters are refused now, and what long lists
        # cost does not delay the stream.
        masters = request.master == engine.instance
        sampler = sampler_of(request, engine.spec.vocab) if masters else None
        with self._changing:
            self._refuse_cancelled(request.sequence_id, owner)
            self._take(request, [*spans, *answers])
            if sampler is not None:
                self._samplers[request.sequence_id] = sampler
            self._reservations[request.sequence_id] = Reservation(
                request=request,
                spans=spans,
                heads=engine.kv_heads,
                layers=engine.spec.layers,
                owner=owner,
            )

    def _take(self, request: ReserveKv, spans: Sequence[Span]) -> None:
        """Slots for spans, and those of what others have computed: all or none."""
        slots, sequence_id = self._engine.pool.slots, request.sequence_id
        try:
            for kv_slice in request.slices:
                if kv_slice.source is not None and kv_slice.instance == self._engine.instance:
                    slots.share_slots(sequence_id, kv_slice.source, kv_slice.span)
            slots.allocate(sequence_id, spans)
        except FaultError:
            slots.free_request(sequence_id)
            raise

    def _refuse_cancelled(self, sequence_id: int, owner: int) -> None:
        if sequence_id in self._left or owner in self._ended:
            raise Cancelled(f"request {sequence_id} was cancelled before it was reserved")
        if sequence_id in self._reservations:
            raise ProtocolError(f"request {sequence_id} is reserved already")

    def find(self, sequence_id: int) -> Reservation | None:
        """The reservation that arriving KV belongs to."""
        return self._reservations.get(sequence_id)

    def adopt(self, sequence_id: int, span: Span) -> None:
        """A part of a prompt was computed where it is decoded."""
        reservation = self.find(sequence_id)
        if reservation is not None and span.length and reservation.adopt(span):
            self._notify("received", reservation.kv_received(self._engine.rank))

    def joining(self, sequence_id: int) -> Reservation | None:
        """The reservation of a sequence that becomes a row; None if it has left.

        Raises:
            FaultError: there never was one.
        """
        reservation = self.find(sequence_id)
        # Every rank sees changes in one order, so who has left has left everywhere.
        if reservation is None and sequence_id not in self._left:
            raise FaultError(f"request {sequence_id} joins without a reservation")
        return reservation

    def sampler(self, sequence_id: int) -> TokenSampler | None:
        """At its master."""
        return self._samplers.get(sequence_id)

    def place(
        self, sequence_id: int, placement: SequencePlacement, sampler: TokenSampler | None
    ) -> None:
        """A row goes on elsewhere.

        Args:
            sampler: where it is drawn here from now on, and was not before.
        """
        with self._changing:
            reservation = self._reservations[sequence_id]
            reservation.request = replace(
                reservation.request,
                slices=placement.slices,
                master=placement.master,
                answer=placement.answer,
            )
            if placement.master != self._engine.instance:
                self._samplers.pop(sequence_id, None)
            elif sampler is not None:
                self._samplers[sequence_id] = sampler

    def end_owner(self, owner: int) -> list[int]:
        """Refuse an owner's late reservations; returns the sequences that are to leave."""
        with self._changing:
            self._ended.add(owner)
            return [
                sequence_id for sequence_id, it in self._reservations.items() if it.owner == owner
            ]

    def leave(self, sequence_id: int) -> None:
        """A sequence is over here; its slots are not freed yet."""
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
