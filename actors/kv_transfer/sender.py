"""KV that leaves a prefill rank's pool: which part of a layer goes to which decode rank.

It leaves as fast as its receivers give credit, and no computing thread waits for it: each receiver
has a `SendQueue` of descriptions, with threads of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from csps.actors.comm.layout import LocalChunk
from csps.actors.comm.process_group import IDLE, PeerLost, Pending
from csps.actors.comm.rendezvous import JOIN_DEADLINE
from csps.actors.kv_cache.kv_pool import KvPool
from csps.actors.kv_transfer.connection import (
    HEARTBEAT_S,
    MESSAGE_DEADLINE,
    Credit,
    KvConnection,
)
from csps.actors.kv_transfer.message import Staging
from csps.actors.kv_transfer.reservation import TransferSlot
from csps.actors.kv_transfer.transfer_tracker import Sending, TransferTracker, WaitingSends
from csps.actors.timing.device_pace import launched_so_far
from csps.actors.timing.timeline import PhaseEvent
from csps.models.network.spec import ModelSpec, kv_head_range
from csps.protocols.core.errors import ConfigError, TransferError
from csps.protocols.core.placement import KvSlice, Span, near_ring, own
from csps.protocols.gang.step_messages import PrefillChunk

READY_POLL_S = 0.001
"""Seconds between two checks whether a GPU has written what is to be sent next."""


class _UnderWay(NamedTuple):
    """A message that the receiver has not acknowledged."""

    end: int
    """Bytes charged up to its end."""
    tracker: TransferTracker
    pending: Pending
    layer: int
    bytes: int
    begun_ns: int
    """Begin in Unix time."""

    def received(self) -> None:
        """Record that the receiver has acknowledged the message."""
        self.pending.wait()
        begin, end = self.begun_ns, time.time_ns()
        event = PhaseEvent("kv transfer", begin, end, layer=self.layer, bytes=self.bytes)
        self.tracker.timeline.add(event)
        self.tracker.received()


class SendQueue:
    """Sends KV to one receiver, with one thread that listens and one that sends.

    The sender asks for a transfer slot for each sequence of each step. While the receiver's credit
    allows, it sends what has a slot, one message of each step in turn, so that the KV of a short
    prompt does not wait for that of a long one.
    """

    def __init__(
        self,
        connection: KvConnection,
        peer: int,
        pool: KvPool,
        *,
        limit_bytes: int,
        checked: float,
        on_lost: Callable[[str], None],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        """Start the threads.

        Args:
            limit_bytes: bytes that may be under way, whatever credit the receiver gives.
            checked: fraction of messages that carry a checksum.
            on_lost: called with the reason when the receiver cannot be reached.
            on_broken: called when this end can no longer send through its own fault.
        """
        self._connection, self._peer, self._pool = connection, peer, pool
        self._limit_bytes, self._checked = limit_bytes, checked
        self._on_lost, self._on_broken = on_lost, on_broken
        self._changed = threading.Condition()
        """Condition for changes of `_waiting`, `_new_credits`, `_listen_error` and `_ended`."""
        self._waiting = WaitingSends()
        self._new_credits: deque[Credit] = deque()
        self._listen_error: Exception | None = None
        """Error that ended the listening thread."""
        self._ended: Exception | None = None
        """Error that ended the sending thread."""
        self._unconfirmed: deque[tuple[TransferSlot, Pending]] = deque()
        """Requests and returns of slots that the receiver may not have received."""
        self._under_way: deque[_UnderWay] = deque()
        self._credit_bytes = self._charged = self._received = 0
        self._check_due = 0.0
        self._heartbeat_at = self._late_at = 0.0
        """Time of the next heartbeat if nothing is under way, and time at which what is under way
        is late."""
        self._staging = Staging(pool.k.device)
        self.threads = [
            threading.Thread(target=work, name=f"kv-{name}-{self._decode_rank}", daemon=True)
            for name, work in (("credits-of", self._listen), ("to", self._run))
        ]
        for thread in self.threads:
            thread.start()

    def post(self, sending: Sending) -> None:
        """Queue a sending for when its sequence has a transfer slot."""
        sending.tracker.posted()
        with self._changed:
            taken = self._ended is None and self._waiting.post(sending)
            self._changed.notify()
        if not taken:
            sending.tracker.given_up(self._ended)

    def finish(self, tracker: TransferTracker) -> None:
        """Note that a step will post nothing more."""
        with self._changed:
            self._waiting.finish(tracker)
            self._changed.notify()

    def cancel(self, sequence_id: int) -> None:
        """Drop what is not yet sent of a cancelled sequence."""
        with self._changed:
            dropped = self._waiting.cancel(sequence_id)
        for sending in dropped:
            sending.tracker.given_up()

    def wake(self) -> None:
        """Wake the sending thread to notice that the connection was closed."""
        with self._changed:
            self._changed.notify()

    # --- the thread that listens -----------------------------------------------------------

    def _listen(self) -> None:
        try:
            self._add_credit(self._connection.next_credit(self._peer, JOIN_DEADLINE))
            while True:
                self._add_credit(self._connection.next_credit(self._peer))
        except Exception as exc:
            with self._changed:
                self._listen_error = exc
                self._changed.notify()

    def _add_credit(self, credit: Credit) -> None:
        with self._changed:
            self._new_credits.append(credit)
            self._changed.notify()

    # --- the thread that sends -------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._connection.closed:
                self._step()
            raise PeerLost("the KV connection was closed")
        except PeerLost as exc:
            self._end(exc)
            if not self._connection.closed:
                self._on_lost(f"decode rank {self._decode_rank}: {exc}")
        except Exception as exc:
            by_itself = not self._connection.closed
            # Messages under way must not arrive: their slots belong to others in a moment.
            self._connection.close()
            self._end(exc)
            if by_itself and isinstance(exc, TransferError):  # what the receiver says is no message
                self._on_lost(f"decode rank {self._decode_rank}: {exc}")
            elif by_itself:
                self._on_broken(exc)

    @property
    def _decode_rank(self) -> int:
        return self._peer - self._connection.decode_peers.start

    def _end(self, reason: Exception) -> None:
        """Drop everything: nothing arrives any more."""
        with self._changed:
            self._ended = reason
            waiting = self._waiting.clear()
        for message in self._under_way:
            message.tracker.given_up(reason)
        for sending in waiting:
            sending.tracker.given_up(reason)
        self._under_way.clear()

    def _step(self) -> None:
        """Take in what the receiver has sent, and send one message."""
        self._wait()
        self._take_in()
        with self._changed:
            asked = self._waiting.to_ask()
            ended = None if asked else self._waiting.to_end()
            sending = None if asked or ended else self._take()
        if asked is not None:
            self._unconfirmed.append((asked, self._connection.ask(self._peer, asked)))
        elif ended is not None:
            self._unconfirmed.append((ended, self._connection.end(self._peer, ended)))
        elif sending is not None:
            self._send(sending)
        elif self._credit_bytes:
            self._check_deadlines()

    def _wait(self) -> None:
        """Wait until there is something to do, or it may be time for it."""
        with self._changed:
            something_new = self._new_credits or self._listen_error or self._waiting.has_message
            if not (something_new or self._connection.closed or self._rows(self._waiting.next)):
                self._changed.wait(self._patience_s())

    def _patience_s(self) -> float:
        if not self._credit_bytes:
            return IDLE.total_seconds()  # the listening thread has a deadline
        at = self._late_at if self._under_way else self._heartbeat_at
        left_s = max(0.0, at - time.monotonic())
        # A device does not notify anyone when it is done, so it is polled.
        unready = self._waiting.may_be_sent and self._waiting.next is None
        return min(left_s, READY_POLL_S) if unready else left_s

    def _take_in(self) -> None:
        """Take in the receiver's credits and answers."""
        with self._changed:
            new_credits, self._new_credits = self._new_credits, deque()
            listen_error = self._listen_error
        for credit in new_credits:
            if credit.transfer_slot is not None:
                self._take_answer(credit.transfer_slot, credit.wanted)
        if new_credits:
            self._credit_bytes = min(new_credits[-1].credit_bytes, self._limit_bytes)
            self._received = new_credits[-1].received
            now = time.monotonic()
            self._heartbeat_at, self._late_at = (
                now + HEARTBEAT_S,
                now + MESSAGE_DEADLINE.total_seconds(),
            )
        self._complete()
        if listen_error is not None:
            raise listen_error

    def _take_answer(self, transfer_slot: TransferSlot, wanted: bool) -> None:
        with self._changed:
            dropped = self._waiting.answer(transfer_slot, wanted)
        for sending in dropped:
            sending.tracker.given_up()
        while self._unconfirmed:  # first in, first out: up to the request
            requested, pending = self._unconfirmed.popleft()
            pending.wait()
            if requested == transfer_slot:
                break

    def _complete(self) -> None:
        if self._received > self._charged:
            raise TransferError(
                f"decode rank {self._decode_rank} acknowledged {self._received} bytes of "
                f"{self._charged} sent"
            )
        while self._under_way and self._under_way[0].end <= self._received:
            self._under_way.popleft().received()

    def _take(self) -> Sending | None:
        """Take what can be sent now."""
        sending = self._waiting.next
        rows = self._rows(sending)
        return None if sending is None or not rows else self._waiting.take(sending, rows)

    def _rows(self, sending: Sending | None) -> int:
        """Return how many of its tokens can be sent now: none, or at most half of the credit, so
        that one message is stored while another one travels."""
        if sending is None or not self._credit_bytes:
            return 0
        row_bytes = sending.row_bytes(self._pool)
        if row_bytes > self._credit_bytes:
            raise ConfigError(
                f"kv_transfer.in_flight_mib is too small: {self._credit_bytes} bytes to a rank; "
                f"one token's KV in one layer takes {row_bytes}"
            )
        rows = min(sending.span.length, max(1, self._credit_bytes // 2 // row_bytes))
        return (
            rows if rows * row_bytes <= self._credit_bytes - (self._charged - self._received) else 0
        )

    def _send(self, sending: Sending) -> None:
        # Read the body before the header leaves: running out of memory must not leave a header
        # without a body.
        begun_ns = time.time_ns()
        try:
            body = sending.read(self._pool, self._staging)
            header = sending.header(self._connection.epoch, body, checked=self._is_checked())
            pending = self._connection.send(self._peer, header, body)
        except PeerLost as exc:
            sending.tracker.given_up(exc)
            raise
        except Exception as exc:
            sending.tracker.given_up(exc)
            return
        if not self._under_way:
            self._late_at = time.monotonic() + MESSAGE_DEADLINE.total_seconds()
        self._charged += header.charge(self._pool.width)
        self._under_way.append(
            _UnderWay(
                self._charged,
                sending.tracker,
                pending,
                layer=sending.layer,
                bytes=body.k.nbytes + body.v.nbytes,
                begun_ns=begun_ns,
            )
        )
        self._heartbeat_at = time.monotonic() + HEARTBEAT_S

    def _is_checked(self) -> bool:
        """Return whether the next message carries a checksum: evenly spread, and alike in every
        run."""
        self._check_due += self._checked
        if self._check_due < 1:
            return False
        self._check_due -= 1
        return True

    def _check_deadlines(self) -> None:
        """Send a heartbeat if nothing is under way, whether something waits for its slot or not."""
        now = time.monotonic()
        if self._under_way:
            if now >= self._late_at:
                raise PeerLost(f"no message was acknowledged for {MESSAGE_DEADLINE}")
        elif now >= self._heartbeat_at:
            self._connection.send_heartbeat(self._peer)
            while self._unconfirmed:
                self._unconfirmed.popleft()[1].wait()
            self._heartbeat_at = time.monotonic() + HEARTBEAT_S
            with self._changed:
                trackers = list(self._waiting.waiting_trackers())
            for tracker in trackers:
                tracker.waits()


_log = logging.getLogger(__name__)


def destinations_of(
    connection: KvConnection, spec: ModelSpec, rank: int, part: LocalChunk, layer: int
) -> Iterator[tuple[int, Span, range]]:
    """Yield (peer, span, KV heads) that this prefill rank has to send of a local chunk, in a
    layer."""
    tp_rank = connection.prefill.tp_rank_of(rank)
    decode = connection.decode
    for kv_slice in _slices_of(part.chunk, spec.window_of(layer)):
        span = kv_slice.span.intersection(part.span)
        if not span.length:
            continue
        for receiver in decode.ranks_of(kv_slice.instance):
            wanted = kv_head_range(spec, decode.tp_rank_of(receiver), decode.tp)
            heads = heads_to_deliver(spec, tp_rank, connection.prefill.tp, wanted)
            if heads:
                yield connection.decode_peers[receiver], span, heads


def _slices_of(chunk: PrefillChunk, window: int | None) -> Iterator[KvSlice]:
    """Yield where the KV of a chunk's sequence is to be sent, in a layer with this window."""
    if window is None or chunk.near_to is None:
        yield from own(chunk.destinations)
        return
    prompt = max(kv_slice.stop for kv_slice in chunk.destinations)
    # Cached KV of the gang is that of other layers only: this is sent whether it is cached or not.
    yield KvSlice.of(chunk.near_to, near_ring(window, prompt, prompt))


def heads_to_deliver(spec: ModelSpec, tp_rank: int, tp: int, wanted: range) -> range:
    """Return the wanted KV heads that one tensor-parallel rank of the sender delivers.

    If several ranks of an instance have copies of a head, the first of them delivers it.
    """
    own = kv_head_range(spec, tp_rank, tp)
    start = own.start
    if tp_rank and kv_head_range(spec, tp_rank - 1, tp).stop > start:
        start = kv_head_range(spec, tp_rank - 1, tp).stop
    return range(max(start, wanted.start), max(start, wanted.start, min(own.stop, wanted.stop)))


class KvSender:
    """Sends to all ranks of one decode gang. Each has a queue of its own: a slow one delays no
    other."""

    def __init__(
        self,
        connection: KvConnection,
        pool: KvPool,
        spec: ModelSpec,
        *,
        rank: int,
        in_flight_bytes: int,
        checked: float,
        on_lost: Callable[[str], None],
        on_broken: Callable[[BaseException], None],
    ) -> None:
        """Start the queues.

        Args:
            in_flight_bytes: bytes of KV that may be on their way from this rank, at most.
            checked: fraction of messages that carry a checksum.
            on_lost: called with the reason when a decode rank cannot be reached.
            on_broken: called when this rank can no longer send through its own fault.
        """
        self.connection = connection
        self._pool, self._spec, self._rank = pool, spec, rank
        tp_rank, tp = connection.prefill.tp_rank_of(rank), connection.prefill.tp
        self._heads = kv_head_range(spec, tp_rank, tp)
        self._queues = {
            peer: SendQueue(
                connection,
                peer,
                pool,
                limit_bytes=in_flight_bytes // len(connection.decode_peers),
                checked=checked,
                on_lost=on_lost,
                on_broken=on_broken,
            )
            for peer in connection.decode_peers
        }

    @property
    def threads(self) -> list[threading.Thread]:
        """Return the threads of all queues; they end when the connection does."""
        return [thread for queue in self._queues.values() for thread in queue.threads]

    def post(
        self, tracker: TransferTracker, layer: int, part: LocalChunk, kept_ht: Tensor | None = None
    ) -> None:
        """Send one layer's KV of a local chunk from the pool to the chunk's destinations.

        Args:
            kept_ht: (KV heads, t) bool, the tokens that decode is to see; None for all.
        """
        sequence_id = part.chunk.sequence_id
        ready = launched_so_far(self._pool.k.device)
        pinned = tracker.pin(sequence_id, part.span)
        found = destinations_of(self.connection, self._spec, self._rank, part, layer)
        for peer, span, heads in found:
            rows = part.span.rows_of(span)
            columns = slice(heads.start - self._heads.start, heads.stop - self._heads.start)
            self._queues[peer].post(
                Sending(
                    tracker=tracker,
                    sequence_id=sequence_id,
                    layer=layer,
                    span=span,
                    heads=heads,
                    columns=columns,
                    pinned=pinned,
                    kept_ht=None if kept_ht is None else kept_ht[columns, rows],
                    ready=ready,
                )
            )

    def finish(self, tracker: TransferTracker) -> None:
        """Note that a step will post nothing more: its slots are returned when what waits was
        sent."""
        for queue in self._queues.values():
            queue.finish(tracker)

    def cancel(self, sequence_id: int) -> None:
        """Drop what is not yet sent of a cancelled sequence. An unknown one is ignored."""
        _log.debug("rank %d: stop sending sequence %d", self._rank, sequence_id)
        for queue in self._queues.values():
            queue.cancel(sequence_id)

    def close(self) -> None:
        """Close the connection: what was not received fails."""
        self.connection.close()
        for queue in self._queues.values():
            queue.wake()
