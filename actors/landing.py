"""KV arriving at a decode rank: reservations, and one receiver per prefill rank.

A reservation is made before anything is sent. Its KV is complete when as many (token, head,
layer) entries have arrived as were promised, each within the promised span, heads and layers and
none twice; until then the request cannot join a batch. An entry may come as "not kept", for a
request that is to have kept tokens only.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from csps.actors.announce import request_failed
from csps.actors.bridge import Bridge, KvHeader
from csps.actors.kept_kv import KeptKv
from csps.actors.kv_pool import KvPool
from csps.actors.mesh import PeerLost
from csps.actors.name_digest import name_digest
from csps.actors.span_set import SpanSet
from csps.protocols.errors import TransferError
from csps.protocols.messages import KvLanded, RequestFailed, Reserve, Span
from csps.protocols.trace_context import NO_SPAN, TraceSpan, begin

_Kv = tuple[Tensor, Tensor] | KeptKv
"""What one header announced: keys and values, each (t, heads, d), or kept ones."""


@dataclass(kw_only=True)
class Reservation:
    """What one rank has set aside for a request, and how much of its KV has arrived."""

    request: Reserve
    spans: tuple[Span, ...]
    """This rank's share of the prompt."""
    heads: range
    layers: int
    owner: str
    """The router's attachment that asked for it."""
    started: float = field(default_factory=time.monotonic)
    missing: int = field(init=False)
    """(token, head, layer) entries yet to come."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while KV is written and while the request is freed, never both at once."""
    closed: bool = False
    """Takes no more KV: it was freed, or wrong KV came."""

    def __post_init__(self) -> None:
        self.missing = self.tokens * len(self.heads) * self.layers
        self._epoch = name_digest(self.request.epoch)
        self._arrived: dict[tuple[int, int], SpanSet] = defaultdict(SpanSet)
        self._narrowed: dict[int, bool] = {}
        """Whether a layer's KV comes without what it dropped; all of it does, or nothing."""
        # Traced from the reservation to the last token of KV, then from joining to leaving.
        self._trace_span = begin("kv.landing", self.request.trace, {"csps.tokens": self.tokens})

    def landed(self) -> None:
        """All KV is here."""
        self._trace(NO_SPAN)

    def joined(self, rank: int) -> None:
        """The request decodes from now on."""
        self._trace(begin("decode.rank", self.request.trace, {"csps.rank": rank}))

    def left(self) -> None:
        """The request is gone from this rank."""
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
                f"KV of request {header.rid} is not from epoch {self.request.epoch}"
            )
        if not self._promises(header):
            raise TransferError(f"{header} is not part of this rank's share of the request")
        if not self._expects(narrowed=header.kept is not None, layer=header.layer):
            raise TransferError(f"{header} has other tokens than this request's layer is to have")
        if not all(self._arrived[header.layer, h].add(header.span) for h in header.heads):
            raise TransferError(f"{header} brings KV that has arrived before")
        self.missing -= header.span.length * len(header.heads)

    def _promises(self, header: KvHeader) -> bool:
        span, heads = header.span, header.heads
        return (
            any(own.start <= span.start < span.stop <= own.stop for own in self.spans)
            and self.heads.start <= heads.start < heads.stop <= self.heads.stop
            and 0 <= header.layer < self.layers
        )

    def _expects(self, *, narrowed: bool, layer: int) -> bool:
        if narrowed and not self.request.kept_only:
            return False
        return self._narrowed.setdefault(layer, narrowed) == narrowed


class Landing:
    """Receives KV from every rank of one prefill gang into the pool, until the bridge ends."""

    def __init__(
        self,
        bridge: Bridge,
        pool: KvPool,
        *,
        rank: int,
        find: Callable[[int], Reservation | None],
        on_landed: Callable[[KvLanded], None],
        on_failed: Callable[[RequestFailed], None],
        on_lost: Callable[[str], None],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        """Start receiving.

        Args:
            find: the reservation of a request; None if there is none any more.
            on_landed: a request's share is complete.
            on_failed: what came for a request is not what was promised.
            on_lost: a prefill rank's stream has ended or fallen silent; why.
            on_broken: this rank cannot receive any more, through its own fault or the peer's.
        """
        self._bridge, self._pool, self._rank = bridge, pool, rank
        self._find, self._on_landed, self._on_failed = find, on_landed, on_failed
        self._on_lost, self._on_broken = on_lost, on_broken
        self._closed = False
        self._threads = [
            threading.Thread(
                target=self._receive, args=(peer,), name=f"kv-from-{peer}", daemon=True
            )
            for peer in range(bridge.prefill.world_size)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop receiving; what was under way is lost with the bridge."""
        self._closed = True
        self._bridge.close()

    def _receive(self, prefill_rank: int) -> None:
        """One prefill rank's stream, in order; ends with the bridge."""
        try:
            while True:
                header = self._bridge.next_header(prefill_rank)
                self._land(header, self._body(prefill_rank, header))
        except PeerLost as exc:
            if not self._closed:
                self._on_lost(f"prefill rank {prefill_rank}: {exc}")
        except Exception as exc:
            # Not the peer's end: without this rank's receiver, nothing of the peer would ever land
            # again, while all else went on and every health check passed.
            if not self._closed:
                self._on_broken(exc)

    def _body(self, prefill_rank: int, header: KvHeader) -> _Kv:
        bridge, head_dim = self._bridge, self._pool.head_dim
        if header.kept is None:
            return bridge.receive(prefill_rank, header, head_dim)
        return bridge.receive_kept(prefill_rank, header, head_dim)

    def _land(self, header: KvHeader, kv: _Kv) -> None:
        reservation = self._find(header.rid)
        if reservation is None:
            return  # cancelled while its KV was on the way
        try:
            complete = self._store(reservation, header, kv)
        except TransferError as exc:
            self._on_failed(request_failed(header.rid, self._rank, exc))
            return
        if complete:
            reservation.landed()
            seconds = time.monotonic() - reservation.started
            tokens = reservation.tokens
            self._on_landed(
                KvLanded(rid=header.rid, rank=self._rank, tokens=tokens, seconds=seconds)
            )

    def _store(self, reservation: Reservation, header: KvHeader, kv: _Kv) -> bool:
        """Write what the header announced; whether the share is complete now, true only once."""
        with reservation.lock:
            if reservation.closed:
                return False
            try:
                self._check(reservation, header, kv)
            except TransferError:
                reservation.closed = True  # what is right of it must not land either
                raise
            self._write(reservation, header, kv)
            return not reservation.missing

    def _check(self, reservation: Reservation, header: KvHeader, kv: _Kv) -> None:
        if header.dtype != self._pool.k.dtype:
            raise TransferError(f"KV is {header.dtype}, this pool holds {self._pool.k.dtype}")
        if isinstance(kv, KeptKv) and (marked := int(kv.kept_ht.sum())) != header.kept:
            raise TransferError(f"{header} comes with a mask of {marked}")
        reservation.accept(header)

    def _write(self, reservation: Reservation, header: KvHeader, kv: _Kv) -> None:
        first = reservation.heads.start
        heads = slice(header.heads.start - first, header.heads.stop - first)
        place = header.layer, header.rid, header.span
        if isinstance(kv, KeptKv):
            self._pool.write_kept(*place, kv, heads=heads)
        else:
            self._pool.write(*place, *kv, heads=heads)
