"""KV arriving at a decode rank: reservations, and one receiver per prefill rank.

A reservation is made before anything is sent. Its KV is complete when as many (token, head,
layer) entries have arrived as were promised, each within the promised span, heads and layers and
none twice; until then the request cannot join a batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from csps.actors.bridge import Bridge, KvHeader
from csps.actors.kv_pool import KvPool
from csps.protocols.errors import TransferError
from csps.protocols.messages import KvLanded, RequestFailed, Reserve, Span

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Reservation:
    """What one rank has set aside for a request, and how much of its KV has arrived."""

    request: Reserve
    spans: tuple[Span, ...]
    """This rank's share of the prompt."""
    heads: range
    layers: int
    started: float = field(default_factory=time.monotonic)
    missing: int = field(init=False)
    """(token, head, layer) entries yet to come."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while KV is written and while the request is freed, never both at once."""
    freed: bool = False
    _arrived: set[tuple[int, int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.missing = self.tokens * len(self.heads) * self.layers

    @property
    def tokens(self) -> int:
        """Prompt tokens whose KV this rank is to hold."""
        return sum(span.length for span in self.spans)

    def accept(self, header: KvHeader) -> None:
        """Count an announcement in; TransferError unless it is promised and new."""
        inside = any(
            s.start <= header.span.start and header.span.stop <= s.stop for s in self.spans
        )
        known_heads = header.heads.start in self.heads and header.heads[-1] in self.heads
        if not inside or not known_heads or not 0 <= header.layer < self.layers:
            raise TransferError(
                f"KV of positions [{header.span.start}, {header.span.stop}), heads {header.heads}, "
                f"layer {header.layer} does not belong to this rank's share of request {header.rid}"
            )
        key = (header.layer, header.span.start, header.heads.start)
        if key in self._arrived:
            raise TransferError(f"KV {key} of request {header.rid} arrived twice")
        self._arrived.add(key)
        self.missing -= header.span.length * len(header.heads)


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
    ) -> None:
        self._bridge, self._pool, self._rank = bridge, pool, rank
        self._find, self._on_landed, self._on_failed = find, on_landed, on_failed
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
        """One prefill rank's stream, in order; ends with the bridge or at the first bad header."""
        try:
            while not self._closed:
                header = self._bridge.next_header(prefill_rank)
                k_thd, v_thd = self._bridge.receive(prefill_rank, header, self._pool.head_dim)
                self._land(header, k_thd, v_thd)
        except (RuntimeError, TransferError) as exc:
            if not self._closed:
                _log.info("KV stream of prefill rank %d ended: %s", prefill_rank, exc)

    def _land(self, header: KvHeader, k_thd: Tensor, v_thd: Tensor) -> None:
        reservation = self._find(header.rid)
        if reservation is None:
            return  # cancelled while its KV was on the way
        with reservation.lock:
            if reservation.freed:
                return
            try:
                self._write(reservation, header, k_thd, v_thd)
            except TransferError as exc:
                self._on_failed(
                    RequestFailed(
                        rid=header.rid, rank=self._rank, code="TransferError", message=str(exc)
                    )
                )
                return
        if not reservation.missing:
            seconds = time.monotonic() - reservation.started
            self._on_landed(
                KvLanded(
                    rid=header.rid, rank=self._rank, tokens=reservation.tokens, seconds=seconds
                )
            )

    def _write(
        self, reservation: Reservation, header: KvHeader, k_thd: Tensor, v_thd: Tensor
    ) -> None:
        if reservation.request.epoch != header.epoch:
            raise TransferError(f"KV of request {header.rid} came over bridge {header.epoch}")
        if header.dtype != self._pool.k.dtype:
            raise TransferError(f"KV is {header.dtype}, this pool holds {self._pool.k.dtype}")
        reservation.accept(header)
        first = reservation.heads.start
        heads = slice(header.heads.start - first, header.heads.stop - first)
        self._pool.write(header.layer, header.rid, header.span, k_thd, v_thd, heads=heads)
