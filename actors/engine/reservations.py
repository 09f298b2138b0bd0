"""Slots that a rank has set aside for sequences that it is to decode, from `reserve` to leaving."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from csps.actors.announce import Notify
from csps.actors.engine.engine import Engine
from csps.actors.engine.rows import answer_of, last_position
from csps.actors.kv_transfer.reservation import Reservation
from csps.actors.sampler_request import sampler_of
from csps.actors.strategies.group import shares_of
from csps.actors.token_sampler import TokenSampler
from csps.protocols.errors import Cancelled, FaultError, ProtocolError
from csps.protocols.messages import Reserve
from csps.protocols.placement import rest_of
from csps.protocols.row_move import RowPlacement
from csps.protocols.span import Span

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

    def reserve(self, request: Reserve, owner: int) -> None:
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
                f"request {request.rid} has positions of its answer without a keeper"
            )
        spans = shares_of([it for it in request.shares if it.origin is None], engine.instance)
        answers = shares_of(answer_of(request), engine.instance)
        # Made here and not when the row joins: bad parameters are refused now, and what long lists
        # cost does not delay the stream.
        masters = request.master == engine.instance
        sampler = sampler_of(request, engine.spec.vocab) if masters else None
        with self._changing:
            self._refuse_unwanted(request.rid, owner)
            self._take(request, [*spans, *answers])
            if sampler is not None:
                self._samplers[request.rid] = sampler
            self._reservations[request.rid] = Reservation(
                request=request,
                spans=spans,
                heads=engine.kv_heads,
                layers=engine.spec.layers,
                owner=owner,
            )

    def _take(self, request: Reserve, spans: Sequence[Span]) -> None:
        """Slots for spans, and those of what others have computed: all or none."""
        slots, rid = self._engine.pool.slots, request.rid
        try:
            for share in request.shares:
                if share.origin is not None and share.instance == self._engine.instance:
                    slots.share(rid, share.origin, share.span)
            slots.allocate(rid, spans)
        except FaultError:
            slots.free_request(rid)
            raise

    def _refuse_unwanted(self, rid: int, owner: int) -> None:
        if rid in self._left or owner in self._ended:
            raise Cancelled(f"request {rid} was cancelled before it was reserved")
        if rid in self._reservations:
            raise ProtocolError(f"request {rid} is reserved already")

    def find(self, rid: int) -> Reservation | None:
        """The reservation that arriving KV belongs to."""
        return self._reservations.get(rid)

    def adopt(self, rid: int, span: Span) -> None:
        """A part of a prompt was computed where it is decoded."""
        reservation = self.find(rid)
        if reservation is not None and span.length and reservation.adopt(span):
            self._notify("landed", reservation.landed(self._engine.rank))

    def joining(self, rid: int) -> Reservation | None:
        """The reservation of a sequence that becomes a row; None if it has left.

        Raises:
            FaultError: there never was one.
        """
        reservation = self.find(rid)
        # Every rank sees changes in one order, so who has left has left everywhere.
        if reservation is None and rid not in self._left:
            raise FaultError(f"request {rid} joins without a reservation")
        return reservation

    def sampler(self, rid: int) -> TokenSampler | None:
        """At its master."""
        return self._samplers.get(rid)

    def place(self, rid: int, placement: RowPlacement, sampler: TokenSampler | None) -> None:
        """A row goes on elsewhere.

        Args:
            sampler: where it is drawn here from now on, and was not before.
        """
        with self._changing:
            reservation = self._reservations[rid]
            reservation.request = replace(
                reservation.request,
                shares=placement.shares,
                master=placement.master,
                answer=placement.answer,
            )
            if placement.master != self._engine.instance:
                self._samplers.pop(rid, None)
            elif sampler is not None:
                self._samplers[rid] = sampler

    def end_owner(self, owner: int) -> list[int]:
        """Refuse an owner's late reservations; returns the sequences that are to leave."""
        with self._changing:
            self._ended.add(owner)
            return [rid for rid, it in self._reservations.items() if it.owner == owner]

    def leave(self, rid: int) -> None:
        """A sequence is over here; its slots are not freed yet."""
        with self._changing:
            self._left[rid] = None
            if len(self._left) > REMEMBERED_LEAVES:
                self._left.popitem(last=False)
            reservation = self._reservations.pop(rid, None)
            self._samplers.pop(rid, None)
        if reservation is not None:
            with reservation.lock:
                reservation.closed = True
            reservation.left()
