"""All that one step sends: its slots stay until the last of it has landed, and then it is told.

KV that waits for its turn to be sent: described, and not copied.

What is to go to one receiver, step by step and request by request, until its turn has come.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Tensor

from csps.actors.kv_cache.kv_pool import KvPool
from csps.actors.kv_cache.sequence_slots import KeptKv
from csps.actors.kv_cache.slot_allocator import PinnedSpan, SlotAllocator
from csps.actors.kv_transfer.message import KvBody, KvHeader, Launched, Staging, entry_bytes
from csps.actors.kv_transfer.reservation import TransferSlot
from csps.actors.timing.timeline import PhaseTimeline
from csps.protocols.core.placement import Span


class TransferTracker:
    """Counts what is on its way. Any thread may call anything."""

    def __init__(
        self,
        slots: SlotAllocator,
        on_sent: Callable[[Exception | None], None],
        on_step: Callable[[], None] = lambda: None,
        *,
        traced: bool = False,
    ) -> None:
        """Nothing is on its way yet.

        Args:
            on_sent: told once, when nothing more will be posted and all that was has landed, was
                withdrawn or failed: why something failed, if anything did.
            on_step: told of each message that has landed, and now and then while some wait for
                their turn.
            traced: the timeline is wanted.
        """
        self._slots = slots
        self.timeline = PhaseTimeline(on=traced)
        """What was under way when."""
        self._on_sent, self._on_step = on_sent, on_step
        self._lock = threading.Lock()
        self._open = 1
        """Sendings under way or waiting, and one until nothing more comes."""
        self._failure: Exception | None = None
        self._pinned: dict[tuple[int, Span], PinnedSpan] = {}

    @property
    def failed(self) -> bool:
        """Something will never arrive."""
        return self._failure is not None

    def pin(self, sequence_id: int, span: Span) -> PinnedSpan:
        """Where a span lies, which stays there until all is sent. Only while something is open."""
        with self._lock:
            if (sequence_id, span) not in self._pinned:
                self._pinned[sequence_id, span] = self._slots.pin(sequence_id, span)
            return self._pinned[sequence_id, span]

    def posted(self) -> None:
        """There is one more to send."""
        with self._lock:
            self._open += 1

    def received(self) -> None:
        """One has arrived."""
        self._on_step()
        self._close_one(None)

    def waits(self) -> None:
        """A receiver lives and will have one later."""
        self._on_step()

    def given_up(self, failure: Exception | None = None) -> None:
        """One will not be sent: nobody wants it any more, or it cannot be."""
        self._close_one(failure)

    def fail(self, failure: Exception) -> None:
        """Something could not even be posted."""
        with self._lock:
            self._failure = self._failure or failure

    def finish(self) -> None:
        """Nothing more will be posted."""
        self._close_one(None)

    def _close_one(self, failure: Exception | None) -> None:
        with self._lock:
            assert self._open > 0, "more has ended than was posted"
            self._failure = self._failure or failure
            self._open -= 1
            if self._open:
                return
        for pinned in self._pinned.values():
            self._slots.unpin(pinned)
        self._on_sent(self._failure)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sending:
    """One layer, span and run of KV heads of a request, for one receiver."""

    tracker: TransferTracker
    sequence_id: int
    layer: int
    span: Span
    heads: range
    """Numbered over the whole model."""
    columns: slice
    """The same heads, as this rank's pool numbers them."""
    pinned: PinnedSpan
    """Contains the span."""
    kept_ht: Tensor | None = None
    """(heads, t) bool, the tokens that decode is to see; None for all."""
    ready: Launched | None = None
    """When the pool has it; None if it has it already."""

    def split(self, rows: int) -> tuple[Sending, Sending | None]:
        """The first so many tokens, and the others if there are any."""
        if rows >= self.span.length:
            return self, None
        self.tracker.posted()
        return self._within(slice(0, rows)), self._within(slice(rows, None))

    def _within(self, rows: slice) -> Sending:
        kept_ht = None if self.kept_ht is None else self.kept_ht[:, rows]
        return replace(self, span=self.span.part(rows), kept_ht=kept_ht)

    def row_bytes(self, pool: KvPool) -> int:
        """That a token is charged for."""
        return len(self.heads) * entry_bytes(pool.k.dtype, pool.head_dim)

    def read(self, pool: KvPool, staging: Staging) -> KvBody:
        """Out of the pool, into host memory if it is not there."""
        with torch.inference_mode(), staging.copying():
            k, v = pool.read_pinned(self.layer, self.pinned, self.span, heads=self.columns)
            if self.kept_ht is None:
                return KvBody(k, v).moved(staging.to_host)
            kept = KeptKv.of(k, v, self.kept_ht)
            return KvBody(kept.k_nd, kept.v_nd, kept.kept_ht).moved(staging.to_host)

    def header(self, epoch: int, body: KvBody, *, checked: bool) -> KvHeader:
        """Announces what was read."""
        return KvHeader(
            epoch=epoch,
            sequence_id=self.sequence_id,
            layer=self.layer,
            span=self.span,
            heads=self.heads,
            dtype=body.k.dtype,
            kept=None if body.kept_ht is None else len(body.k),
            checksum=body.checksum() if checked else None,
        )


@dataclass(eq=False, slots=True)
class _Sends:
    """Of a step and a request: asked for once, sent when its turn has come."""

    tracker: TransferTracker
    transfer_slot: TransferSlot
    waiting: deque[Sending] = field(default_factory=deque)
    asked: bool = False
    begun: bool = False
    """The receiver has said that the turn has come."""
    cancelled: bool = False
    """The receiver has said that nobody expects it."""
    last: bool = False
    """Nothing more will be posted."""

    @property
    def over(self) -> bool:
        """The turn is, or will never be."""
        return self.last and not self.waiting

    def empty(self) -> list[Sending]:
        """Nothing of what waits is sent."""
        gone = list(self.waiting)
        self.waiting.clear()
        return gone


class WaitingSends:
    """Not thread-safe. Those whose turn it is go message by message, one after the other."""

    def __init__(self) -> None:
        self._sends: OrderedDict[tuple[TransferTracker, int], _Sends] = OrderedDict()
        self._numbers = count(1)

    def post(self, sending: Sending) -> bool:
        """Take it in; false if nobody wants it."""
        key = (sending.tracker, sending.sequence_id)
        if key not in self._sends:
            self._sends[key] = _Sends(
                sending.tracker, TransferSlot(sending.sequence_id, next(self._numbers))
            )
        sends = self._sends[key]
        if not sends.cancelled:
            sends.waiting.append(sending)
        return not sends.cancelled

    def finish(self, tracker: TransferTracker) -> None:
        """Nothing more of a step will be posted."""
        for it in self._sends.values():
            if it.tracker is tracker:
                it.last = True

    def cancel(self, sequence_id: int) -> list[Sending]:
        """Nobody wants a request. Returns what of it is not sent."""
        return [
            gone
            for it in self._sends.values()
            if it.transfer_slot.sequence_id == sequence_id
            for gone in it.empty()
        ]

    def clear(self) -> list[Sending]:
        """Nothing is sent any more. Returns what is not."""
        gone = [sending for it in self._sends.values() for sending in it.empty()]
        self._sends.clear()
        return gone

    def answer(self, transfer_slot: TransferSlot, wanted: bool) -> list[Sending]:
        """The receiver has answered. Returns what is not sent."""
        for it in self._sends.values():
            if it.transfer_slot == transfer_slot:
                it.begun, it.cancelled = wanted, not wanted
                return [] if wanted else it.empty()
        return []

    def to_ask(self) -> TransferSlot | None:
        """A turn for which the receiver is to be asked now, once."""
        for it in self._sends.values():
            if it.waiting and not it.asked:
                it.asked = True
                return it.transfer_slot
        return None

    def to_end(self) -> TransferSlot | None:
        """A turn that is over, of which the receiver is to hear now, once."""
        for key, it in list(self._sends.items()):
            if it.over:
                del self._sends[key]
                if it.asked and not it.cancelled:
                    return it.transfer_slot
        return None

    @property
    def has_message(self) -> bool:
        """`to_ask` or `to_end` may have something to say."""
        return any(it.over or (it.waiting and not it.asked) for it in self._sends.values())

    @property
    def may_be_sent(self) -> bool:
        """Something has its turn, whether the pool has it yet or not."""
        return any(it.begun and it.waiting for it in self._sends.values())

    @property
    def next(self) -> Sending | None:
        """The first one that has its turn and that the pool has."""
        heads = (it.waiting[0] for it in self._sends.values() if it.begun and it.waiting)
        return next((head for head in heads if head.ready is None or head.ready.query()), None)

    def take(self, sending: Sending, rows: int) -> Sending:
        """So many tokens of `next` are sent now; what is left waits for the others."""
        key = (sending.tracker, sending.sequence_id)
        first, rest = sending.split(rows)
        waiting = self._sends[key].waiting
        waiting.popleft()
        if rest is not None:
            waiting.appendleft(rest)
        self._sends.move_to_end(key)
        return first

    def waiting_trackers(self) -> Iterator[TransferTracker]:
        """Those that have asked and have no turn yet."""
        return (it.tracker for it in self._sends.values() if it.asked and not it.begun)
