"""What goes to one receiver: a queue of descriptions, and the thread that reads and sends them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from csps.actors.kv_pool import KvPool
from csps.actors.kv_transfer.connection import BEAT_S, KvConnection
from csps.actors.kv_transfer.delivery import Delivery
from csps.actors.kv_transfer.sending import Sending
from csps.actors.kv_transfer.staging import Staging
from csps.actors.mesh import JOIN_DEADLINE, PeerLost, Pending
from csps.protocols.errors import ConfigError, TransferError

READY_POLL_S = 0.001
"""Between two looks whether a GPU has written what is to be sent next."""


class _UnderWay(NamedTuple):
    """A message that the receiver has not said to have landed."""

    end: int
    """Bytes charged up to its end."""
    delivery: Delivery
    pending: Pending


class SendQueue:
    """One thread does everything: it sends as long as the receiver's window has room, and else
    waits for its next word. While that is awaited, nothing else is: the receiver owes it, and beats
    are for those that owe nothing. Steps take turns, message by message, so that the KV of a short
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
        """Start the thread.

        Args:
            limit_bytes: that may be under way, however much the receiver grants.
            checked: share of messages that carry a checksum.
            on_lost: the receiver cannot be reached; why.
            on_broken: this end cannot send any more, through its own fault.
        """
        self._connection, self._peer, self._pool = connection, peer, pool
        self._limit_bytes, self._checked = limit_bytes, checked
        self._on_lost, self._on_broken = on_lost, on_broken
        self._waiting: OrderedDict[Delivery, deque[Sending]] = OrderedDict()
        """By step; the first one's turn is next."""
        self._changed = threading.Condition()
        self._ended: Exception | None = None
        """Why nothing is sent any more."""
        self._under_way: deque[_UnderWay] = deque()
        self._window = self._charged = self._landed = 0
        self._check_due = 0.0
        self._beat_at = 0.0
        self._staging = Staging(pool.k.device)
        name = f"kv-to-{peer - connection.decode_peers.start}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def post(self, sending: Sending) -> None:
        """Send it when its turn comes."""
        sending.delivery.posted()
        with self._changed:
            if self._ended is None:
                self._waiting.setdefault(sending.delivery, deque()).append(sending)
                self._changed.notify()
                return
        sending.delivery.given_up(self._ended)

    def withdraw(self, rid: int) -> None:
        """Nobody wants a request: what of it has not left stays here."""
        with self._changed:
            gone = [it for queue in self._waiting.values() for it in queue if it.rid == rid]
            for sending in gone:
                self._waiting[sending.delivery].remove(sending)
                self._forget_if_empty(sending.delivery)
        for sending in gone:
            sending.delivery.given_up()

    def _forget_if_empty(self, delivery: Delivery) -> None:
        if not self._waiting[delivery]:
            del self._waiting[delivery]

    def wake(self) -> None:
        """The connection was closed: see it now."""
        with self._changed:
            self._changed.notify()

    # --- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._begin()
            while not self._connection.closed:
                self._step()
            raise PeerLost("the KV connection was closed")
        except PeerLost as exc:
            self._end(exc)
            if not self._connection.closed:
                self._on_lost(f"decode rank {self._place}: {exc}")
        except Exception as exc:
            by_itself = not self._connection.closed
            # What is under way must not arrive: its slots are somebody else's in a moment.
            self._connection.close()
            self._end(exc)
            if by_itself:
                self._on_broken(exc)

    @property
    def _place(self) -> int:
        return self._peer - self._connection.decode_peers.start

    def _begin(self) -> None:
        granted = self._connection.next_grant(self._peer, JOIN_DEADLINE).window
        self._window = min(granted, self._limit_bytes)
        self._beat_at = time.monotonic() + BEAT_S

    def _end(self, reason: Exception) -> None:
        """Nothing arrives any more."""
        with self._changed:
            self._ended = reason
            waiting, self._waiting = self._waiting, OrderedDict()
        for message in self._under_way:
            message.delivery.given_up(reason)
        for delivery, queue in waiting.items():
            for _ in queue:
                delivery.given_up(reason)
        self._under_way.clear()

    def _step(self) -> None:
        if (sending := self._next()) is not None:
            self._send(sending)
        elif self._under_way:
            self._hear()
        elif time.monotonic() >= self._beat_at:
            self._connection.beat(self._peer)
            self._beat_at = time.monotonic() + BEAT_S

    def _next(self) -> Sending | None:
        """What can be sent now; waits a while for something if nothing is under way."""
        with self._changed:
            if not self._under_way and self._ready() is None:
                # A device tells nobody when it is done, therefore the short wait.
                poll_s = READY_POLL_S if self._waiting else BEAT_S
                self._changed.wait(min(poll_s, max(0.0, self._beat_at - time.monotonic())))
            if (sending := self._ready()) is None:
                return None
            row_bytes = sending.row_bytes(self._pool)
            rows = min(sending.span.length, self._most_rows(row_bytes))
            if rows * row_bytes > self._window - (self._charged - self._landed):
                return None
            first, rest = sending.split(rows)
            queue = self._waiting[sending.delivery]
            queue.popleft()
            if rest is not None:
                queue.appendleft(rest)
            self._waiting.move_to_end(sending.delivery)
            self._forget_if_empty(sending.delivery)
            return first

    def _ready(self) -> Sending | None:
        """The next one that the pool has."""
        if self._connection.closed:
            return None
        heads = (queue[0] for queue in self._waiting.values())
        return next((it for it in heads if it.ready is None or it.ready.query()), None)

    def _most_rows(self, row_bytes: int) -> int:
        """Half a window: one message is read and landed while another one travels."""
        if row_bytes > self._window:
            raise ConfigError(
                f"kv_transfer.in_flight_mib is too small: {self._window} bytes to a rank, "
                f"and a token's KV in one layer has {row_bytes}"
            )
        return max(1, self._window // 2 // row_bytes)

    def _send(self, sending: Sending) -> None:
        # The body exists before the header leaves: what runs out of memory must not leave a header
        # without it.
        try:
            body = sending.read(self._pool, self._staging)
            header = sending.header(self._connection.epoch, body, checked=self._is_checked())
            pending = self._connection.send(self._peer, header, body)
        except PeerLost as exc:
            sending.delivery.given_up(exc)
            raise
        except Exception as exc:
            sending.delivery.given_up(exc)
            return
        self._charged += header.charge(self._pool.head_dim)
        self._under_way.append(_UnderWay(self._charged, sending.delivery, pending))
        self._beat_at = time.monotonic() + BEAT_S

    def _is_checked(self) -> bool:
        """Spread evenly over the messages, and the same in every run."""
        self._check_due += self._checked
        if self._check_due < 1:
            return False
        self._check_due -= 1
        return True

    def _hear(self) -> None:
        """Wait until the receiver says how much has landed."""
        self._landed = self._connection.next_grant(self._peer).landed
        if self._landed > self._charged:
            raise TransferError(f"{self._landed} bytes have landed of {self._charged} sent")
        while self._under_way and self._under_way[0].end <= self._landed:
            message = self._under_way.popleft()
            message.pending.wait()
            message.delivery.landed()
        self._beat_at = time.monotonic() + BEAT_S
