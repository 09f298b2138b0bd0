"""What a decode rank has set aside for a request, and what of its KV has arrived.

A reservation is made before anything is sent. Its KV is complete when as many (token, head,
layer) entries have arrived as were promised, each within the promised span, heads and layers and
none twice; until then the request cannot join a batch. An entry may come as "not kept", for a
request that is to have kept tokens only.

Whose turn it is to send KV to this rank (Tetris §4.2).

What receives KV is limited: a rank has so many *backends*, and `ReceivingBackends` says who gets
one. A sender asks for each step of each request, and sends when it is told to begin. A request that
nobody expects here any more gets no turn: its senders are told that it is unwanted. Backends gate
sends and never steps; what waits stays in the senders' pools.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from csps.actors.comm.layout import name_digest
from csps.actors.kv_transfer.message import KvHeader
from csps.protocols.core.errors import TransferError
from csps.protocols.core.placement import Span
from csps.protocols.gang.messages import RankKvReceived, ReserveKv
from csps.protocols.gang.receiving_backends import ChunkTransfer, ReceivingBackends
from csps.protocols.rpc.trace_context import NO_SPAN, TraceSpan, begin


@dataclass(kw_only=True)
class Reservation:
    """What one rank has set aside for a request, and how much of its KV has arrived."""

    request: ReserveKv
    spans: tuple[Span, ...]
    """This rank's share of the prompt."""
    heads: range
    layers: int
    owner: int
    """The router's attachment that asked for it."""
    started: float = field(default_factory=time.monotonic)
    missing: int = field(init=False)
    """(token, head, layer) entries yet to come."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while KV is written and while the request is freed, never both at once."""
    received_bytes: int = 0
    """Of keys and values."""
    closed: bool = False
    """Takes no more KV: it was freed, or wrong KV came."""
    waited: float = 0.0
    """Seconds that one of its senders has waited for its turn, at most."""
    release_transfer_slots: Callable[[], None] | None = None
    """Gives up its turns (`TransferSlots`), if it has or wants any."""

    def __post_init__(self) -> None:
        self.missing = self.tokens * len(self.heads) * self.layers
        self._first_s: float | None = None
        """When the first KV arrived."""
        self._epoch = name_digest(self.request.epoch)
        self._left: dict[tuple[int, int], tuple[Span, ...]] = {}
        """By layer and head, what is yet to come; all of the share where nothing has."""
        self._narrowed: dict[int, bool] = {}
        """Whether a layer's KV comes without what it dropped; all of it does, or nothing."""
        # Traced from the reservation to the last token of KV, then from joining to leaving.
        self._trace_span = begin("kv.landing", self.request.trace, {"csps.tokens": self.tokens})

    def kv_received(self, rank: int) -> RankKvReceived:
        """All KV is here: what the router is told."""
        self._trace_span.set_attribute("csps.kv_transfer.wait_ms", self.waited * 1e3)
        self._trace(NO_SPAN)
        now = time.monotonic()
        return RankKvReceived(
            sequence_id=self.request.sequence_id,
            rank=rank,
            tokens=self.tokens,
            seconds=now - self.started,
            receiving_s=0.0 if self._first_s is None else now - self._first_s,
            received_bytes=self.received_bytes,
            waited=self.waited,
        )

    def received(self, size: int, *, began_s: float) -> None:
        """A message with so many bytes of KV was announced at `began_s` and has come."""
        self._first_s = began_s if self._first_s is None else min(began_s, self._first_s)
        self.received_bytes += size

    def adopt(self, span: Span) -> bool:
        """A span was computed here, in all layers; whether the share is complete now."""
        with self.lock:
            self.missing -= span.length * len(self.heads) * self.layers
            return not self.missing

    def joined(self, rank: int) -> None:
        """The request decodes from now on."""
        self._trace(begin("decode.rank", self.request.trace, {"csps.rank": rank}))

    def note(self, attributes: Mapping[str, int | float]) -> None:
        """Say so in its trace."""
        self._trace_span.set_attributes(attributes)

    def left(self) -> None:
        """The request is gone from this rank."""
        if self.release_transfer_slots is not None:
            self.release_transfer_slots()
        self._trace(NO_SPAN)

    def _trace(self, following: TraceSpan) -> None:
        self._trace_span.end()
        self._trace_span = following

    @property
    def tokens(self) -> int:
        """Prompt tokens whose KV this rank is to hold."""
        return sum(span.length for span in self.spans)

    def accept(self, header: KvHeader) -> None:
        """Count an announcement in; TransferError unless it is promised and new."""
        if header.epoch != self._epoch:
            raise TransferError(
                f"KV of request {header.sequence_id} is not from epoch {self.request.epoch}"
            )
        if not self._promises(header):
            raise TransferError(f"{header} is not part of this rank's share of the request")
        if not self._expects(narrowed=header.kept is not None, layer=header.layer):
            raise TransferError(f"{header} has other tokens than this request's layer is to have")
        span = header.span
        left = {(header.layer, h): self._left_of(header.layer, h) for h in header.heads}
        if any(
            sum(it.intersection(span).length for it in its) < span.length for its in left.values()
        ):
            raise TransferError(f"{header} brings KV that has arrived before")
        for place, spans in left.items():
            self._left[place] = tuple(rest for it in spans for rest in it.without(span))
        self.missing -= header.entries

    def _left_of(self, layer: int, head: int) -> tuple[Span, ...]:
        return self._left.get((layer, head), self.spans)

    def _promises(self, header: KvHeader) -> bool:
        span, heads = header.span, header.heads
        return (
            any(own.intersection(span) == span for own in self.spans)
            and span.length > 0
            and self.heads.start <= heads.start < heads.stop <= self.heads.stop
            and 0 <= header.layer < self.layers
        )

    def _expects(self, *, narrowed: bool, layer: int) -> bool:
        if narrowed and not self.request.kept_only:
            return False
        return self._narrowed.setdefault(layer, narrowed) == narrowed


class TransferSlot(NamedTuple):
    """What one sender sends of one step of a request."""

    sequence_id: int
    number: int
    """Of the sender's turns at this receiver."""


class TransferSlots:
    """Of one rank. Any thread may call anything."""

    def __init__(
        self,
        backends: int,
        find: Callable[[int], Reservation | None],
        notify: Callable[[int, TransferSlot, bool], None],
    ) -> None:
        """
        Args:
            backends: how many turns there are at a time.
            find: what is expected of a request; None if there is none.
            tell: a sender (as a peer) whether it may begin its turn, or nobody wants it. It must
                not wait.
        """
        self._find, self._notify = find, notify
        self._lock = threading.Lock()
        self._backends = ReceivingBackends(backends)
        self._since: dict[ChunkTransfer, float] = {}
        """When the transfers that wait have asked."""

    @property
    def idle(self) -> bool:
        """All backends are free and nobody waits."""
        with self._lock:
            self._backends.check_integrity()
            return self._backends.free == self._backends.total and not self._since

    def ask(self, peer: int, transfer_slot: TransferSlot) -> None:
        """A sender shakes hands."""
        transfer = ChunkTransfer(transfer_slot.sequence_id, transfer_slot.number, peer)
        with self._lock:
            reservation = self._find(transfer_slot.sequence_id)
            if reservation is not None:
                # Before it is looked whether it has left: either this is seen there, or that here.
                reservation.release_transfer_slots = partial(
                    self.release, transfer_slot.sequence_id
                )
            if reservation is None or reservation.closed:
                self._notify(peer, transfer_slot, False)
                return
            self._since[transfer] = time.monotonic()
            self._begin(self._backends.handshake(transfer))

    def end(self, peer: int, transfer_slot: TransferSlot) -> None:
        """A turn is over, or its sender wants it no more."""
        transfer = ChunkTransfer(transfer_slot.sequence_id, transfer_slot.number, peer)
        with self._lock:
            self._since.pop(transfer, None)
            self._begin(self._backends.received(transfer))

    def release(self, sequence_id: int) -> None:
        """All KV of a request has landed, or nobody wants it any more."""
        with self._lock:
            for transfer in self._backends.waiting_of(sequence_id):
                del self._since[transfer]
                self._notify(transfer.sender, TransferSlot(sequence_id, transfer.chunk), False)
            self._begin(self._backends.release(sequence_id))

    def _begin(self, granted: list[ChunkTransfer]) -> None:
        now = time.monotonic()
        for transfer in granted:
            waited = now - self._since.pop(transfer)
            if (reservation := self._find(transfer.request)) is not None:
                reservation.waited = max(reservation.waited, waited)
            self._notify(transfer.sender, TransferSlot(transfer.request, transfer.chunk), True)
