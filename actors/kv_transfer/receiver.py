"""KV arriving at a decode rank: one receiver per prefill rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch import Tensor

from csps.actors.announce import request_failed
from csps.actors.kept_kv import KeptKv
from csps.actors.kv_pool import KvPool
from csps.actors.kv_transfer.connection import KvConnection
from csps.actors.kv_transfer.header import KvHeader
from csps.actors.kv_transfer.reservation import Reservation
from csps.actors.mesh import PeerLost
from csps.protocols.errors import TransferError
from csps.protocols.messages import KvLanded, RequestFailed

_Kv = tuple[Tensor, Tensor] | KeptKv
"""What one header announced: keys and values, each (t, heads, d), or kept ones."""


class KvReceiver:
    """Receives KV from every rank of one prefill gang into the pool, until the connection ends."""

    def __init__(
        self,
        connection: KvConnection,
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
        self._connection, self._pool, self._rank = connection, pool, rank
        self._find, self._on_landed, self._on_failed = find, on_landed, on_failed
        self._on_lost, self._on_broken = on_lost, on_broken
        self._closed = False
        self._threads = [
            threading.Thread(
                target=self._receive, args=(peer,), name=f"kv-from-{peer}", daemon=True
            )
            for peer in range(connection.prefill.world_size)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop receiving; what was under way is lost with the connection."""
        self._closed = True
        self._connection.close()

    def _receive(self, prefill_rank: int) -> None:
        """One prefill rank's stream, in order; ends with the connection."""
        try:
            while True:
                header = self._connection.next_header(prefill_rank)
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
        connection, head_dim = self._connection, self._pool.head_dim
        if header.kept is None:
            return connection.receive(prefill_rank, header, head_dim)
        return connection.receive_kept(prefill_rank, header, head_dim)

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
