"""What goes to one receiver: descriptions that wait, and the thread that reads and sends them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from csps.actors.kv_pool import KvPool
from csps.actors.kv_transfer.connection import BEAT_S, MESSAGE_DEADLINE, Grant, KvConnection
from csps.actors.kv_transfer.delivery import Delivery
from csps.actors.kv_transfer.sending import Sending
from csps.actors.kv_transfer.staging import Staging
from csps.actors.kv_transfer.turns import Turn
from csps.actors.kv_transfer.waiting_sends import WaitingSends
from csps.actors.process_group import IDLE, PeerLost, Pending
from csps.actors.rendezvous import JOIN_DEADLINE
from csps.actors.timeline import Event
from csps.protocols.errors import ConfigError, TransferError

READY_POLL_S = 0.001
"""Between two looks whether a GPU has written what is to be sent next."""


class _UnderWay(NamedTuple):
    """A message that the receiver has not said to have landed."""

    end: int
    """Bytes charged up to its end."""
    delivery: Delivery
    pending: Pending
    layer: int
    bytes: int
    begun_ns: int
    """Unix time."""

    def landed(self) -> None:
        """The receiver has said so."""
        self.pending.wait()
        begin, end = self.begun_ns, time.time_ns()
        event = Event("kv transfer", begin, end, layer=self.layer, bytes=self.bytes)
        self.delivery.timeline.add(event)
        self.delivery.landed()


class SendQueue:
    """One thread listens to the receiver, and one sends: it asks for a turn for each request of
    each step, and as long as the receiver's window has room it sends what has one, message by
    message and step by step, so that the KV of a short prompt does not wait for that of a long one.
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
            limit_bytes: that may be under way, however much the receiver grants.
            checked: share of messages that carry a checksum.
            on_lost: the receiver cannot be reached; why.
            on_broken: this end cannot send any more, through its own fault.
        """
        self._connection, self._peer, self._pool = connection, peer, pool
        self._limit_bytes, self._checked = limit_bytes, checked
        self._on_lost, self._on_broken = on_lost, on_broken
        self._changed = threading.Condition()
        """Of what the next three lines have, which several threads change."""
        self._waiting = WaitingSends()
        self._heard: deque[Grant] = deque()
        self._deaf: Exception | None = None
        """Why nothing is heard any more."""
        self._ended: Exception | None = None
        """Why nothing is sent any more."""
        self._said: deque[tuple[Turn, Pending]] = deque()
        """Words of turns, as long as they may not have been heard."""
        self._under_way: deque[_UnderWay] = deque()
        self._window = self._charged = self._landed = 0
        self._check_due = 0.0
        self._beat_at = self._late_at = 0.0
        """When to beat if nothing is under way, and when what is under way is late."""
        self._staging = Staging(pool.k.device)
        self.threads = [
            threading.Thread(target=work, name=f"kv-{name}-{self._place}", daemon=True)
            for name, work in (("words-of", self._listen), ("to", self._run))
        ]
        for thread in self.threads:
            thread.start()

    def post(self, sending: Sending) -> None:
        """Send it when its turn comes."""
        sending.delivery.posted()
        with self._changed:
            taken = self._ended is None and self._waiting.post(sending)
            self._changed.notify()
        if not taken:
            sending.delivery.given_up(self._ended)

    def finish(self, delivery: Delivery) -> None:
        """Nothing more of a step will be posted."""
        with self._changed:
            self._waiting.finish(delivery)
            self._changed.notify()

    def withdraw(self, rid: int) -> None:
        """Nobody wants a request: what of it has not left stays here."""
        with self._changed:
            gone = self._waiting.withdraw(rid)
        for sending in gone:
            sending.delivery.given_up()

    def wake(self) -> None:
        """The connection was closed: see it now."""
        with self._changed:
            self._changed.notify()

    # --- the thread that listens -----------------------------------------------------------

    def _listen(self) -> None:
        try:
            self._hear(self._connection.next_grant(self._peer, JOIN_DEADLINE))
            while True:
                self._hear(self._connection.next_grant(self._peer))
        except Exception as exc:
            with self._changed:
                self._deaf = exc
                self._changed.notify()

    def _hear(self, grant: Grant) -> None:
        with self._changed:
            self._heard.append(grant)
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

    def _end(self, reason: Exception) -> None:
        """Nothing arrives any more."""
        with self._changed:
            self._ended = reason
            waiting = self._waiting.clear()
        for message in self._under_way:
            message.delivery.given_up(reason)
        for sending in waiting:
            sending.delivery.given_up(reason)
        self._under_way.clear()

    def _step(self) -> None:
        """Take in what the receiver has said, and say or send one thing."""
        self._wait()
        self._take_in()
        with self._changed:
            asked = self._waiting.to_ask()
            ended = None if asked else self._waiting.to_end()
            sending = None if asked or ended else self._take()
        if asked is not None:
            self._said.append((asked, self._connection.ask(self._peer, asked)))
        elif ended is not None:
            self._said.append((ended, self._connection.end(self._peer, ended)))
        elif sending is not None:
            self._send(sending)
        elif self._window:
            self._look_at_the_time()

    def _wait(self) -> None:
        """Until there is something to do, or it may be time for it."""
        with self._changed:
            news = self._heard or self._deaf or self._waiting.has_word
            if not (news or self._connection.closed or self._rows(self._waiting.next)):
                self._changed.wait(self._patience_s())

    def _patience_s(self) -> float:
        if not self._window:
            return IDLE.total_seconds()  # whoever listens has a deadline
        at = self._late_at if self._under_way else self._beat_at
        left_s = max(0.0, at - time.monotonic())
        # A device tells nobody when it is done.
        unready = self._waiting.may_be_sent and self._waiting.next is None
        return min(left_s, READY_POLL_S) if unready else left_s

    def _take_in(self) -> None:
        """What the receiver has said."""
        with self._changed:
            heard, self._heard = self._heard, deque()
            deaf = self._deaf
        for grant in heard:
            if grant.turn is not None:
                self._take_answer(grant.turn, grant.wanted)
        if heard:
            self._window = min(heard[-1].window, self._limit_bytes)
            self._landed = heard[-1].landed
            now = time.monotonic()
            self._beat_at, self._late_at = now + BEAT_S, now + MESSAGE_DEADLINE.total_seconds()
        self._complete()
        if deaf is not None:
            raise deaf

    def _take_answer(self, turn: Turn, wanted: bool) -> None:
        with self._changed:
            gone = self._waiting.answer(turn, wanted)
        for sending in gone:
            sending.delivery.given_up()
        while self._said:  # first in, first out: up to the question
            about, pending = self._said.popleft()
            pending.wait()
            if about == turn:
                break

    def _complete(self) -> None:
        if self._landed > self._charged:
            raise TransferError(f"{self._landed} bytes have landed of {self._charged} sent")
        while self._under_way and self._under_way[0].end <= self._landed:
            self._under_way.popleft().landed()

    def _take(self) -> Sending | None:
        """What can be sent now."""
        sending = self._waiting.next
        rows = self._rows(sending)
        return None if sending is None or not rows else self._waiting.take(sending, rows)

    def _rows(self, sending: Sending | None) -> int:
        """So many of its tokens can be sent now: none, or half a window, so that one message is
        read and landed while another one travels."""
        if sending is None or not self._window:
            return 0
        row_bytes = sending.row_bytes(self._pool)
        if row_bytes > self._window:
            raise ConfigError(
                f"kv_transfer.in_flight_mib is too small: {self._window} bytes to a rank, "
                f"and a token's KV in one layer has {row_bytes}"
            )
        rows = min(sending.span.length, max(1, self._window // 2 // row_bytes))
        return rows if rows * row_bytes <= self._window - (self._charged - self._landed) else 0

    def _send(self, sending: Sending) -> None:
        # The body exists before the header leaves: what runs out of memory must not leave a header
        # without it.
        begun_ns = time.time_ns()
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
        if not self._under_way:
            self._late_at = time.monotonic() + MESSAGE_DEADLINE.total_seconds()
        self._charged += header.charge(self._pool.head_dim)
        self._under_way.append(
            _UnderWay(
                self._charged,
                sending.delivery,
                pending,
                layer=sending.layer,
                bytes=body.k.nbytes + body.v.nbytes,
                begun_ns=begun_ns,
            )
        )
        self._beat_at = time.monotonic() + BEAT_S

    def _is_checked(self) -> bool:
        """Spread evenly over the messages, and the same in every run."""
        self._check_due += self._checked
        if self._check_due < 1:
            return False
        self._check_due -= 1
        return True

    def _look_at_the_time(self) -> None:
        """Beat if nothing is under way, whether something waits for its turn or not."""
        now = time.monotonic()
        if self._under_way:
            if now >= self._late_at:
                raise PeerLost(f"nothing has landed for {MESSAGE_DEADLINE}")
        elif now >= self._beat_at:
            self._connection.beat(self._peer)
            while self._said:
                self._said.popleft()[1].wait()
            self._beat_at = time.monotonic() + BEAT_S
            with self._changed:
                deliveries = list(self._waiting.told_to_wait())
            for it in deliveries:
                it.waits()
