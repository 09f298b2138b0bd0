"""KV that one step sends: what waits for a transfer slot, and when all of it was received.

KV that waits is described and not copied: it stays in the pool, and its slots are pinned until the
last of the step's KV was received.
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
from csps.actors.kv_transfer.message import KvBody, KvHeader, Staging, entry_bytes
from csps.actors.kv_transfer.reservation import TransferSlot
from csps.actors.timing.device_pace import Launched
from csps.actors.timing.timeline import PhaseTimeline
from csps.protocols.core.placement import Span


class TransferTracker:
    """Counts the sendings of one step. Any thread may call any method."""

    def __init__(
        self,
        slots: SlotAllocator,
        on_sent: Callable[[Exception | None], None],
        on_step: Callable[[], None] = lambda: None,
        *,
        traced: bool = False,
    ) -> None:
        """Start without sendings.

        Args:
            on_sent: called once, when nothing more will be posted and all that was has been
                received, cancelled or failed, with the error if anything failed.
            on_step: called for each message that was received, and now and then while some wait for
                their transfer slot.
            traced: record a timeline.
        """
        self._slots = slots
        self.timeline = PhaseTimeline(on=traced)
        """Transfers under way, with their times."""
        self._on_sent, self._on_step = on_sent, on_step
        self._lock = threading.Lock()
        self._open = 1
        """Number of sendings waiting or under way, plus one until nothing more comes."""
        self._failure: Exception | None = None
        self._pinned: dict[tuple[int, Span], PinnedSpan] = {}

    @property
    def failed(self) -> bool:
        """Return whether some KV will never arrive."""
        return self._failure is not None

    def pin(self, sequence_id: int, span: Span) -> PinnedSpan:
        """Pin a span until all KV of the step is sent. Call it only while a sending is open."""
        with self._lock:
            if (sequence_id, span) not in self._pinned:
                self._pinned[sequence_id, span] = self._slots.pin(sequence_id, span)
            return self._pinned[sequence_id, span]

    def posted(self) -> None:
        """Count one more sending."""
        with self._lock:
            self._open += 1

    def received(self) -> None:
        """End a sending that was received."""
        self._on_step()
        self._close_one(None)

    def waits(self) -> None:
        """Report that a live receiver will take a sending later."""
        self._on_step()

    def given_up(self, failure: Exception | None = None) -> None:
        """End a sending that will not be sent: it was cancelled, or cannot be."""
        self._close_one(failure)

    def fail(self, failure: Exception) -> None:
        """Record that something could not even be posted."""
        with self._lock:
            self._failure = self._failure or failure

    def finish(self) -> None:
        """Note that nothing more will be posted."""
        self._close_one(None)

    def _close_one(self, failure: Exception | None) -> None:
        with self._lock:
            assert self._open > 0, "more sendings have ended than were posted"
            self._failure = self._failure or failure
            self._open -= 1
            if self._open:
                return
        for pinned in self._pinned.values():
            self._slots.unpin(pinned)
        self._on_sent(self._failure)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sending:
    """One layer, span and run of KV heads of a sequence, for one receiver."""

    tracker: TransferTracker
    sequence_id: int
    layer: int
    span: Span
    heads: range
    """KV heads, numbered over the whole model."""
    columns: slice
    """KV heads, as this rank's pool numbers them."""
    pinned: PinnedSpan
    """Pinned span that contains the span."""
    kept_ht: Tensor | None = None
    """Mask (heads, t), bool, of the tokens that decode is to see; None for all."""
    ready: Launched | None = None
    """Device work that writes the KV into the pool; None if it is there already."""

    def split(self, rows: int) -> tuple[Sending, Sending | None]:
        """Return the first `rows` tokens, and the others if there are any."""
        if rows >= self.span.length:
            return self, None
        self.tracker.posted()
        return self._within(slice(0, rows)), self._within(slice(rows, None))

    def _within(self, rows: slice) -> Sending:
        kept_ht = None if self.kept_ht is None else self.kept_ht[:, rows]
        return replace(self, span=self.span.part(rows), kept_ht=kept_ht)

    def row_bytes(self, pool: KvPool) -> int:
        """Return the bytes that a token is charged for."""
        return len(self.heads) * entry_bytes(pool.k.dtype, pool.width)

    def read(self, pool: KvPool, staging: Staging) -> KvBody:
        """Read the KV from the pool into host memory."""
        with torch.inference_mode(), staging.copying():
            k, v = pool.read_pinned(self.layer, self.pinned, self.span, heads=self.columns)
            if self.kept_ht is None:
                return KvBody(k, v).moved(staging.to_host)
            kept = KeptKv.of(k, v, self.kept_ht)
            return KvBody(kept.k_nd, kept.v_nd, kept.kept_ht).moved(staging.to_host)

    def header(self, epoch: int, body: KvBody, *, checked: bool) -> KvHeader:
        """Return the header for what was read."""
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
    """Sendings of a step and a sequence: a slot is asked for once, and they are sent when it is
    given."""

    tracker: TransferTracker
    transfer_slot: TransferSlot
    waiting: deque[Sending] = field(default_factory=deque)
    asked: bool = False
    begun: bool = False
    """Flag that the receiver has given the slot."""
    cancelled: bool = False
    """Flag that the receiver has answered that the sequence was cancelled."""
    last: bool = False
    """Flag that nothing more will be posted."""

    @property
    def over(self) -> bool:
        """Return whether the slot is used no more, or never will be."""
        return self.last and not self.waiting

    def empty(self) -> list[Sending]:
        """Drop what waits and return it."""
        dropped = list(self.waiting)
        self.waiting.clear()
        return dropped


class WaitingSends:
    """Sendings that wait for one receiver. Not thread-safe. Those with a slot go one message each
    in turn."""

    def __init__(self) -> None:
        self._sends: OrderedDict[tuple[TransferTracker, int], _Sends] = OrderedDict()
        self._numbers = count(1)

    def post(self, sending: Sending) -> bool:
        """Add a sending; return false if its sequence was cancelled."""
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
        """Note that a step will post nothing more."""
        for sends in self._sends.values():
            if sends.tracker is tracker:
                sends.last = True

    def cancel(self, sequence_id: int) -> list[Sending]:
        """Drop what is not sent of a sequence and return it."""
        return [
            dropped
            for sends in self._sends.values()
            if sends.transfer_slot.sequence_id == sequence_id
            for dropped in sends.empty()
        ]

    def clear(self) -> list[Sending]:
        """Drop everything and return it."""
        dropped = [sending for sends in self._sends.values() for sending in sends.empty()]
        self._sends.clear()
        return dropped

    def answer(self, transfer_slot: TransferSlot, wanted: bool) -> list[Sending]:
        """Take the receiver's answer about a slot; drop and return what is not to be sent."""
        for sends in self._sends.values():
            if sends.transfer_slot == transfer_slot:
                sends.begun, sends.cancelled = wanted, not wanted
                return [] if wanted else sends.empty()
        return []

    def to_ask(self) -> TransferSlot | None:
        """Return a slot to ask the receiver for now, each once."""
        for sends in self._sends.values():
            if sends.waiting and not sends.asked:
                sends.asked = True
                return sends.transfer_slot
        return None

    def to_end(self) -> TransferSlot | None:
        """Return a slot to return to the receiver now, each once."""
        for key, sends in list(self._sends.items()):
            if sends.over:
                del self._sends[key]
                if sends.asked and not sends.cancelled:
                    return sends.transfer_slot
        return None

    @property
    def has_message(self) -> bool:
        """Return whether `to_ask` or `to_end` may return a slot."""
        return any(
            sends.over or (sends.waiting and not sends.asked) for sends in self._sends.values()
        )

    @property
    def may_be_sent(self) -> bool:
        """Return whether something has its slot, whether the pool has its KV yet or not."""
        return any(sends.begun and sends.waiting for sends in self._sends.values())

    @property
    def next(self) -> Sending | None:
        """Return the first sending that has its slot and whose KV is in the pool."""
        begun = (sends for sends in self._sends.values() if sends.begun and sends.waiting)
        heads = (sends.waiting[0] for sends in begun)
        return next((head for head in heads if head.ready is None or head.ready.query()), None)

    def take(self, sending: Sending, rows: int) -> Sending:
        """Take `rows` tokens of `next`; the rest waits behind the other sendings."""
        key = (sending.tracker, sending.sequence_id)
        first, rest = sending.split(rows)
        waiting = self._sends[key].waiting
        waiting.popleft()
        if rest is not None:
            waiting.appendleft(rest)
        self._sends.move_to_end(key)
        return first

    def waiting_trackers(self) -> Iterator[TransferTracker]:
        """Return the trackers of sendings that wait for a slot."""
        return (sends.tracker for sends in self._sends.values() if sends.asked and not sends.begun)
