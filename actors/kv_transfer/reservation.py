"""A decode rank's reservations for KV, and the transfer slots by which senders take turns.

A reservation is made before anything is sent. Its KV is complete when as many (token, head, layer)
entries were received as promised, each within the promised span, heads and layers, and none twice.
Until then the sequence cannot join the decode batch. An entry may be "not kept", for a request that
is to have kept tokens only.

A rank has a limited number of receiving backends (Tetris §4.2), and `ReceivingBackends` says which
sender gets one. A sender asks for a slot for each step of each sequence and begins when it is told
to. For a cancelled sequence its senders are told so instead. Slots limit sends and never steps; KV
that waits stays in the senders' pools.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from csps.actors.comm.layout import name_digest
from csps.actors.kv_transfer.message import KvHeader
from csps.actors.timing.device_pace import Launched
from csps.protocols.core.errors import TransferError
from csps.protocols.core.placement import Span
from csps.protocols.gang.messages import RankKvReceived, ReserveKv
from csps.protocols.gang.receiving_backends import ChunkTransfer, ReceivingBackends
from csps.protocols.rpc.trace_context import NO_SPAN, TraceSpan, begin, below

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Reservation:
    """Slots that one rank has reserved for a sequence, and how much of its KV has arrived."""

    request: ReserveKv
    spans: tuple[Span, ...]
    """Slices of the prompt on this rank."""
    heads: range
    layers: int
    owner: int
    """Attachment of the router that asked for it."""
    started: float = field(default_factory=time.monotonic)
    missing: int = field(init=False)
    """Number of (token, head, layer) entries yet to come."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Lock around writing KV and around freeing the sequence, so that the two never coincide."""
    received_bytes: int = 0
    """Bytes of keys and values received."""
    closed: bool = False
    """Flag that no more KV is accepted: the sequence was freed, or wrong KV came."""
    waited: float = 0.0
    """Longest time in seconds that one of its senders has waited for a transfer slot."""
    windowed: Set[int] = frozenset()
    """Layers with a window that have slots of their own."""
    near: Span = Span(0, 0)  # noqa: RUF009 - a span is frozen
    """Positions of the prompt whose KV in these layers comes to this rank."""
    ring: Span = Span(0, 0)  # noqa: RUF009
    """First positions that take slots here in these layers."""
    launched: Launched | None = None
    """Work of the engine from before the reservation, which may still write to these slots what
    belonged there; None on a CPU."""
    release_transfer_slots: Callable[[], None] | None = None
    """Function that releases its transfer slots (`TransferSlots`), if it has or wants any."""

    def __post_init__(self) -> None:
        near = len(self.windowed)
        tokens = self.tokens * (self.layers - near) + self.near.length * near
        self.missing = tokens * len(self.heads)
        self._first_s: float | None = None
        """Time at which the first KV arrived."""
        self._epoch = name_digest(self.request.epoch)
        self._left: dict[tuple[int, int], tuple[Span, ...]] = {}
        """KV yet to come, by layer and head; all spans where nothing has come."""
        self._narrowed: dict[int, bool] = {}
        """Flag for each layer whose KV comes as kept tokens only; all of a layer does, or
        nothing."""
        # Traced from the reservation to the last token of KV, then from joining to leaving.
        self._trace_span = begin(
            "kv.landing",
            below(self.request.trace, "prefill", self.request.sequence_id),
            {"csps.tokens": self.tokens, "csps.sequence": self.request.sequence_id},
        )

    def kv_received(self, rank: int) -> RankKvReceived:
        """Return the notification for the router that all KV is here."""
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
        """Count a message with `size` bytes of KV that was announced at `began_s`."""
        self._first_s = began_s if self._first_s is None else min(began_s, self._first_s)
        self.received_bytes += size

    def adopt(self, span: Span) -> bool:
        """Count a span that was computed here, in all layers; return whether all KV is here now."""
        with self.lock:
            self.missing -= span.length * len(self.heads) * self.layers
            return not self.missing

    def joined(self, rank: int) -> None:
        """Trace that the sequence decodes from now on."""
        trace = below(self.request.trace, "decode", self.request.sequence_id)
        attributes = {"csps.rank": rank, "csps.sequence": self.request.sequence_id}
        self._trace(begin("decode.rank", trace, attributes))

    def note(self, attributes: Mapping[str, int | float]) -> None:
        """Add attributes to the sequence's trace."""
        self._trace_span.set_attributes(attributes)

    def left(self) -> None:
        """Release the transfer slots of a sequence that is gone from this rank, and end its
        trace."""
        if self.release_transfer_slots is not None:
            self.release_transfer_slots()
        self._trace(NO_SPAN)

    def _trace(self, following: TraceSpan) -> None:
        self._trace_span.end()
        self._trace_span = following

    @property
    def tokens(self) -> int:
        """Return the number of prompt tokens whose KV this rank is to hold."""
        return sum(span.length for span in self.spans)

    def accept(self, header: KvHeader) -> None:
        """Count an announced message; raise TransferError unless it is promised and new."""
        if header.epoch != self._epoch:
            raise TransferError(
                f"KV of sequence {header.sequence_id} is not from epoch {self.request.epoch}"
            )
        if not self._promises(header):
            raise TransferError(
                f"{header} is outside of what this rank reserved: "
                f"{self._spans_of(header.layer)}, heads "
                f"{self.heads}, {self.layers} layers"
            )
        if not self._expects(narrowed=header.kept is not None, layer=header.layer):
            kind = "all tokens" if header.kept is None else "kept tokens only"
            raise TransferError(f"{header} brings {kind}, which the sequence does not expect there")
        span = header.span
        left = {(header.layer, h): self._left_of(header.layer, h) for h in header.heads}
        if any(
            sum(missing.intersection(span).length for missing in spans) < span.length
            for spans in left.values()
        ):
            raise TransferError(f"{header} repeats KV that was received before")
        for place, spans in left.items():
            self._left[place] = tuple(rest for missing in spans for rest in missing.without(span))
        self.missing -= header.entries

    def _left_of(self, layer: int, head: int) -> tuple[Span, ...]:
        return self._left.get((layer, head), self._spans_of(layer))

    def _spans_of(self, layer: int) -> tuple[Span, ...]:
        return (self.near,) if layer in self.windowed else self.spans

    def _promises(self, header: KvHeader) -> bool:
        span, heads = header.span, header.heads
        return (
            any(own.intersection(span) == span for own in self._spans_of(header.layer))
            and span.length > 0
            and self.heads.start <= heads.start < heads.stop <= self.heads.stop
            and 0 <= header.layer < self.layers
        )

    def _expects(self, *, narrowed: bool, layer: int) -> bool:
        if narrowed and not self.request.kept_only:
            return False
        return self._narrowed.setdefault(layer, narrowed) == narrowed


class TransferSlot(NamedTuple):
    """KV that one sender sends of one step of a sequence."""

    sequence_id: int
    number: int
    """Number of the slot among those that the sender asks this receiver for."""


class TransferSlots:
    """Transfer slots of one rank. Any thread may call any method."""

    def __init__(
        self,
        backends: int,
        find: Callable[[int], Reservation | None],
        notify: Callable[[int, TransferSlot, bool], None],
    ) -> None:
        """Args:
        backends: number of slots that may be taken at a time.
        find: returns the reservation of a sequence; None if there is none.
        notify: tells a sender (as a peer) whether it may begin, or the sequence was cancelled.
            It must not wait.
        """
        self._find, self._notify = find, notify
        self._lock = threading.Lock()
        self._backends = ReceivingBackends(backends)
        self._since: dict[ChunkTransfer, float] = {}
        """Time at which each waiting transfer asked."""

    @property
    def idle(self) -> bool:
        """Return whether all backends are free and no sender waits."""
        with self._lock:
            self._backends.check_integrity()
            return self._backends.free == self._backends.total and not self._since

    def ask(self, peer: int, transfer_slot: TransferSlot) -> None:
        """Handle a sender's request for a slot."""
        transfer = ChunkTransfer(transfer_slot.sequence_id, transfer_slot.number, peer)
        with self._lock:
            reservation = self._find(transfer_slot.sequence_id)
            if reservation is not None:
                # Set before `closed` is read: either `left` sees this, or `closed` is seen here.
                reservation.release_transfer_slots = partial(
                    self.release, transfer_slot.sequence_id
                )
            if reservation is None or reservation.closed:
                _log.debug("refuse %s of prefill peer %d: cancelled", transfer_slot, peer)
                self._notify(peer, transfer_slot, False)
                return
            self._since[transfer] = time.monotonic()
            self._begin(self._backends.handshake(transfer))

    def end(self, peer: int, transfer_slot: TransferSlot) -> None:
        """Free the slot of a sender that has sent all, or wants it no more."""
        transfer = ChunkTransfer(transfer_slot.sequence_id, transfer_slot.number, peer)
        with self._lock:
            self._since.pop(transfer, None)
            self._begin(self._backends.received(transfer))

    def release(self, sequence_id: int) -> None:
        """Free all slots of a sequence whose KV was received, or that was cancelled."""
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
