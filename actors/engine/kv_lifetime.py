"""The lifetime of a sequence's KV on a rank: between steps, while it decodes, and after its end.

A sequence has a step for each chunk of its prompt; several may be pending at once, and between two
of them its KV is idle. The KV is freed when the last pending step is over and either all of it was
sent or the sequence was cancelled, never while a pending step may read it. KV of a retained
sequence stays after its end until the log evicts it, and so does what it shares with others: their
names for it may go before.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set

from csps.actors.attention.base.engine import Engine
from csps.actors.engine.step_reports import StepReports
from csps.actors.kv_cache.slot_allocator import NotHeld
from csps.protocols.core.placement import Span
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep

_log = logging.getLogger(__name__)


class KvLifetime:
    """Bookkeeping of which sequence's KV may be freed. Thread-safe: the RPC thread enters steps,
    and whichever thread completes a step finalizes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: Counter[int] = Counter()
        """Steps pending or running, by sequence."""
        self._idle: set[int] = set()
        """Sequences without a step whose KV lies here."""
        self._cancelled: set[int] = set()
        """Cancelled sequences that still have a step."""
        self._left: set[int] = set()
        """Sequences that have left the decode batch before their KV was freed."""
        self._retained: set[int] = set()
        """Sequences whose KV stays after their end."""
        self._whole: set[int] = set()
        """Sequences whose last chunk is over while an earlier one still sends KV."""
        self._evict_later: dict[int, tuple[Span, ...]] = {}
        """Spans to evict after a sequence's last step."""

    def enter(self, step: PrefillStep) -> None:
        """Count a pending step."""
        with self._lock:
            for chunk in step.chunks:
                self._steps[chunk.sequence_id] += 1
                self._idle.discard(chunk.sequence_id)
                if chunk.retain:
                    self._retained.add(chunk.sequence_id)

    def retain_at_end(self, sequence_id: int) -> None:
        """Retain the KV of a sequence that the decode batch will decode."""
        with self._lock:
            self._retained.add(sequence_id)

    def unretain(self, sequence_id: int) -> None:
        """Do not retain a sequence's KV after all."""
        with self._lock:
            self._retained.discard(sequence_id)

    def adopt(self, sequence_id: int) -> None:
        """Note that KV lies here of a sequence that no step has computed."""
        with self._lock:
            self._idle.add(sequence_id)

    def evict(self, sequence_id: int, spans: tuple[Span, ...]) -> bool:
        """Evict some retained KV; return whether it can be freed now. Otherwise `due_evictions`
        returns it after the last step."""
        with self._lock:
            if self._steps[sequence_id]:
                self._evict_later[sequence_id] = (*self._evict_later.get(sequence_id, ()), *spans)
                return False
            return True

    def due_evictions(self, sequence_id: int) -> tuple[Span, ...]:
        """Return, only once, the spans to evict of a sequence that had a step."""
        with self._lock:
            return () if self._steps[sequence_id] else self._evict_later.pop(sequence_id, ())

    def discard(self, sequence_id: int) -> None:
        """Forget a retained sequence of which nothing is left."""
        with self._lock:
            for known in (self._retained, self._idle, self._left):
                known.discard(sequence_id)

    def cancel(self, sequence_id: int) -> bool:
        """Cancel a sequence; return whether its KV can be freed now. Otherwise it is freed with its
        last step."""
        with self._lock:
            if self._steps[sequence_id]:
                self._cancelled.add(sequence_id)
                return False
            was_idle = sequence_id in self._idle
            self._idle.discard(sequence_id)
            return was_idle

    def leave_batch(self, sequence_id: int) -> bool:
        """Take a sequence out of the decode batch; return whether its KV can be freed now.
        Otherwise it is retained, or freed with its last step."""
        with self._lock:
            if sequence_id in self._retained and not self._steps[sequence_id]:
                self._idle.add(sequence_id)
                self._left.add(sequence_id)
                return False
            # A retained sequence that still has a step was cancelled; its last step reports it.
            self._retained.discard(sequence_id)
            self._idle.discard(sequence_id)
            if self._steps[sequence_id]:
                self._cancelled.add(sequence_id)
                self._left.add(sequence_id)
                return False
            return True

    def pop_left(self, sequence_id: int) -> bool:
        """Return, only once, whether a sequence left the decode batch before its KV was freed."""
        with self._lock:
            known = sequence_id in self._left
            self._left.discard(sequence_id)
            return known

    def cancel_all(self) -> Set[int]:
        """Cancel all sequences; return those whose KV can be freed now."""
        with self._lock:
            self._cancelled.update(
                sequence_id for sequence_id, steps in self._steps.items() if steps
            )
            self._retained.clear()
            idle, self._idle = self._idle, set()
            return idle

    def finalize(self, step: PrefillStep, *, cancelled: bool) -> list[int]:
        """Finalize a step that is over.

        Args:
            cancelled: the step was dropped, perhaps before this rank knew why.

        Returns:
            Sequences whose last pending step it was and whose KV can be freed now.
        """
        with self._lock:
            if cancelled:
                self._cancelled.update(chunk.sequence_id for chunk in step.chunks)
            return [chunk.sequence_id for chunk in step.chunks if self._finalize(chunk)]

    def _finalize(self, chunk: PrefillChunk) -> bool:
        sequence_id = chunk.sequence_id
        self._steps[sequence_id] -= 1
        # Steps end when their KV was received: the short last one may come before an earlier one.
        if chunk.last:
            self._whole.add(sequence_id)
        if self._steps[sequence_id]:
            return False
        del self._steps[sequence_id]
        whole, cancelled = sequence_id in self._whole, sequence_id in self._cancelled
        retained = sequence_id in self._retained
        self._whole.discard(sequence_id)
        self._cancelled.discard(sequence_id)
        if cancelled or (whole and chunk.destinations and not retained):
            self._retained.discard(sequence_id)
            return True
        self._idle.add(sequence_id)
        return False


class KvReclaim:
    """Frees the KV of a rank's sequences as soon as neither a step nor the decode batch needs it,
    and reports it. Any thread may call any method.

    Args:
        reserved: returns whether the decode batch has a sequence.
        slots_freed: called when slots may have become free.
    """

    def __init__(
        self,
        engine: Engine,
        reports: StepReports,
        *,
        reserved: Callable[[int], bool],
        slots_freed: Callable[[], None],
    ) -> None:
        self._here, self._slots, self._reports = engine.instance, engine.pool.slots, reports
        self._window_slots = engine.pool.window_slots
        self._is_reserved, self._slots_freed = reserved, slots_freed
        self._lifetime = KvLifetime()

    def enter(self, step: PrefillStep) -> None:
        """Enter a pending step: history that other sequences have computed here is shared with its
        sequences now, so that it survives them.

        Raises:
            NotHeld: some of the history is not here; the step is over.
        """
        self._lifetime.enter(step)
        try:
            for chunk in step.chunks:
                for kv_slice in chunk.history:
                    if kv_slice.source and kv_slice.instance == self._here:
                        self._slots.share_slots(chunk.sequence_id, kv_slice.source, kv_slice.span)
        except NotHeld as error:
            _log.debug("step %d ends before it begins: %s", step.step_id, error)
            self._free(self._lifetime.finalize(step, cancelled=True))
            raise

    def cancel_step_of(self, sequence_id: int) -> None:
        """Cancel a sequence that has a step."""
        self._lifetime.cancel(sequence_id)

    def retain_at_end(self, sequence_id: int) -> None:
        """Retain the KV of a sequence that the decode batch will decode."""
        self._lifetime.retain_at_end(sequence_id)

    def unretain(self, sequence_id: int) -> None:
        """Do not retain a sequence's KV after all."""
        self._lifetime.unretain(sequence_id)

    def adopt(self, sequence_id: int, spans: Sequence[Span]) -> None:
        """Allocate slots for KV that no step computes; it stays until it is evicted, or all
        sequences are cancelled.

        Raises:
            OutOfSlots: fewer slots are free.
        """
        self._slots.allocate(sequence_id, spans)
        self._lifetime.adopt(sequence_id)

    def cancel(self, sequence_id: int) -> None:
        """Cancel a sequence and free its idle KV."""
        self._lifetime.unretain(sequence_id)
        if not self._is_reserved(sequence_id) and self._lifetime.cancel(sequence_id):
            self._free([sequence_id])

    def cancel_all(self) -> None:
        """Cancel all sequences and free their idle KV."""
        self._free(
            sequence_id
            for sequence_id in self._lifetime.cancel_all()
            if not self._is_reserved(sequence_id)
        )

    def finalize(self, step: PrefillStep, *, cancelled: bool) -> None:
        """Finalize a step that is over here.

        Args:
            cancelled: the step was dropped.
        """
        self._free(self._lifetime.finalize(step, cancelled=cancelled))
        for chunk in step.chunks:
            if due := self._lifetime.due_evictions(chunk.sequence_id):
                self.evict(chunk.sequence_id, due)

    def evict(self, sequence_id: int, spans: tuple[Span, ...]) -> None:
        """Evict some KV of a sequence that is over, or will be with its last step."""
        if not self._lifetime.evict(sequence_id, spans):
            return
        if not self._is_reserved(sequence_id):
            for span in spans:
                self._slots.free_span(sequence_id, span)
        if not (left := self._slots.tokens(sequence_id)):
            self._lifetime.discard(sequence_id)
        self._slots_freed()
        self._reports.retained(sequence_id, left)

    def free_sequence(self, sequence_id: int) -> None:
        """Free a sequence that has left the decode batch, unless it is retained or a step still
        uses it. Slots in layers with a window are not retained: no prefix hit reads them."""
        if self._window_slots is not None:
            self._window_slots.free_sequence(sequence_id)
        if self._lifetime.leave_batch(sequence_id):
            self._slots.free_sequence(sequence_id)
            self._slots_freed()
            self._reports.freed(sequence_id)

    def _free(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._slots.free_sequence(sequence_id)
            if self._lifetime.pop_left(sequence_id):
                self._reports.freed(sequence_id)
        self._slots_freed()
