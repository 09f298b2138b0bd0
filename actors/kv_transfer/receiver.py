"""KV that arrives at a decode rank: one thread for each prefill rank, and credits that flow back.

Each sender has a thread, because gloo can be waited for but not polled, and a wait that times out
closes all connections of its group: one thread for all senders could only serve one at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from csps.actors.comm.process_group import PeerLost, Pending
from csps.actors.kv_cache.kv_pool import KvPool
from csps.actors.kv_transfer.connection import (
    LIVENESS_TIMEOUT,
    Credit,
    KvConnection,
    TransferEnded,
    TransferRequested,
)
from csps.actors.kv_transfer.message import KvBody, KvHeader, Staging
from csps.actors.kv_transfer.reservation import Reservation, TransferSlot, TransferSlots
from csps.protocols.core.errors import TransferError
from csps.protocols.gang.messages import RankKvReceived, RequestFailed

_log = logging.getLogger(__name__)


class CreditSender:
    """Credit messages to one peer, in one order, from any thread. Only `wait_until_sent` waits for
    the peer, and only the peer's own thread calls it: a dead sender delays no other."""

    def __init__(self, connection: KvConnection, peer: int, credit_bytes: int) -> None:
        """Args:
        credit_bytes: bytes that may be under way.
        """
        self._connection, self._peer, self._credit_bytes = connection, peer, credit_bytes
        self._lock = threading.Lock()
        self._received = 0
        self._pending: deque[Pending] = deque()

    def received(self, charge: int) -> None:
        """Acknowledge bytes that are not under way any more.

        Raises:
            PeerLost: the connection is closed.
        """
        with self._lock:
            self._received += charge
            self._post(Credit(self._credit_bytes, self._received))

    def answer(self, transfer_slot: TransferSlot, wanted: bool) -> None:
        """Answer a request for a transfer slot. A sender that is gone need not know."""
        with self._lock, suppress(PeerLost):
            self._post(Credit(self._credit_bytes, self._received, transfer_slot, wanted))

    def _post(self, credit: Credit) -> None:
        self._pending.append(self._connection.send_credit(self._peer, credit))

    def wait_until_sent(self) -> None:
        """Wait until the peer has received all messages; raise PeerLost if it does not."""
        while self._pending:
            self._pending[0].wait(LIVENESS_TIMEOUT)
            self._pending.popleft()


class KvReceiver:
    """Receives KV from every rank of one prefill gang into the pool, until the connection ends."""

    def __init__(
        self,
        connection: KvConnection,
        pool: KvPool,
        *,
        rank: int,
        in_flight_bytes: int,
        backends: int,
        find: Callable[[int], Reservation | None],
        on_received: Callable[[RankKvReceived], None],
        on_failed: Callable[[RequestFailed], None],
        on_lost: Callable[[str], None],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        """Start receiving.

        Args:
            in_flight_bytes: bytes of KV that may be on their way to this rank, at most.
            backends: number of transfer slots.
            find: returns the reservation of a sequence; None if there is none any more.
            on_received: called when a sequence's KV for this rank is complete.
            on_failed: called when KV for a sequence is not what was promised.
            on_lost: called with the reason when a prefill rank's connection ends, falls silent or
                carries what is no message.
            on_broken: called when this rank can no longer receive through its own fault.
        """
        self._connection, self._pool, self._rank = connection, pool, rank
        self._credit_bytes = in_flight_bytes // len(connection.prefill_peers)
        self._credits = {
            peer: CreditSender(connection, peer, self._credit_bytes)
            for peer in connection.prefill_peers
        }
        self.transfer_slots = TransferSlots(backends, find, self._answer)
        self._find, self._on_received, self._on_failed = find, on_received, on_failed
        self._on_lost, self._on_broken = on_lost, on_broken
        self.threads = [
            threading.Thread(
                target=self._receive, args=(peer,), name=f"kv-from-{peer}", daemon=True
            )
            for peer in connection.prefill_peers
        ]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Stop receiving; what was under way is lost with the connection."""
        self._connection.close()

    def _receive(self, peer: int) -> None:
        """Receive one prefill rank's messages in order, until the connection ends."""
        try:
            self._serve(peer, Staging(self._pool.k.device))
        except PeerLost as exc:
            self._lost(peer, exc)
        except TransferError as exc:
            self._lost(peer, exc)
            # Where the peer's next message begins is not known after one that makes no sense.
            self._connection.close()
        except Exception as exc:
            # The peer lives. Without this thread no KV of the peer would ever be received again,
            # while all else went on and every health check passed.
            if not self._connection.closed:
                self._on_broken(exc)

    def _lost(self, peer: int, reason: Exception) -> None:
        if not self._connection.closed:
            self._on_lost(f"prefill rank {peer}: {reason}")

    def _answer(self, peer: int, transfer_slot: TransferSlot, wanted: bool) -> None:
        self._credits[peer].answer(transfer_slot, wanted)

    def _serve(self, peer: int, staging: Staging) -> None:
        credits = self._credits[peer]
        credits.received(0)
        while True:
            credits.wait_until_sent()
            match self._connection.next_message(peer):
                case KvHeader() as header:
                    credits.received(self._take(peer, header, staging))
                case TransferRequested(transfer_slot):
                    self.transfer_slots.ask(peer, transfer_slot)
                case TransferEnded(transfer_slot):
                    self.transfer_slots.end(peer, transfer_slot)

    def _take(self, peer: int, header: KvHeader, staging: Staging) -> int:
        """Receive a message; return the bytes that it takes of the credit."""
        width, began_s = self._pool.width, time.monotonic()
        if (charge := header.charge(width)) > self._credit_bytes:
            raise TransferError(
                f"{header} counts for {charge} bytes; the credit is {self._credit_bytes}"
            )
        body = self._connection.receive(peer, header, width, staging)
        self._store_message(header, body, staging, began_s=began_s)
        return charge

    def _store_message(
        self, header: KvHeader, body: KvBody, staging: Staging, *, began_s: float
    ) -> None:
        reservation = self._find(header.sequence_id)
        if reservation is None:
            _log.debug("KV of sequence %d came after its end", header.sequence_id)
            return
        try:
            complete = self._store(reservation, header, body, staging, began_s=began_s)
        except TransferError as exc:
            self.transfer_slots.release(header.sequence_id)
            self._on_failed(RequestFailed.of(header.sequence_id, self._rank, exc))
            return
        if complete:
            self.transfer_slots.release(header.sequence_id)
            _log.debug("rank %d: KV of sequence %d received", self._rank, header.sequence_id)
            self._on_received(reservation.kv_received(self._rank))

    def _store(
        self,
        reservation: Reservation,
        header: KvHeader,
        body: KvBody,
        staging: Staging,
        *,
        began_s: float,
    ) -> bool:
        """Write what the header announced; return whether the sequence's KV is complete now, true
        only once."""
        # Outside the lock, because a checksum takes a while.
        intact = header.checksum is None or header.checksum == body.checksum()
        with reservation.lock:
            if reservation.closed:
                return False
            try:
                if not intact:
                    raise TransferError(f"{header} was changed on its way")
                self._check(reservation, header, body)
            except TransferError:
                reservation.closed = True  # no further KV of the sequence may be stored either
                raise
            with staging.copying(reservation.launched):
                self._write(reservation, header, body, staging)
            reservation.received(body.nbytes, began_s=began_s)
            return not reservation.missing

    def _check(self, reservation: Reservation, header: KvHeader, body: KvBody) -> None:
        if header.dtype != self._pool.k.dtype:
            raise TransferError(f"KV is {header.dtype}, this pool holds {self._pool.k.dtype}")
        if body.kept_ht is not None and (marked := int(body.kept_ht.sum())) != header.kept:
            raise TransferError(f"{header} comes with a mask of {marked} entries")
        reservation.accept(header)

    def _write(
        self, reservation: Reservation, header: KvHeader, body: KvBody, staging: Staging
    ) -> None:
        first = reservation.heads.start
        heads = slice(header.heads.start - first, header.heads.stop - first)
        place = header.layer, header.sequence_id, header.span
        there = body.moved(staging.to_device)
        if (kept := there.kept) is not None:
            self._pool.write_kept(*place, kept, heads=heads)
        else:
            self._pool.write(*place, there.k, there.v, heads=heads)
