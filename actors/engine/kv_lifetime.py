"""Whose KV a rank holds between the steps of a prompt, and who is not wanted any more.

A sequence has a step for each chunk of its prompt; several may be in line at once, and between two
of them its KV just lies here. It goes when the last step in line is over and either all of it has
been sent or the sequence was cancelled, never while a step in line may still read it. The KV of a
sequence that stays is kept at its end, until the log frees it.

Freeing a rank's KV, as soon as neither a step nor the stream needs it, and saying so.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Set

from csps.actors.attention.base.engine import Engine
from csps.actors.engine.step_reports import StepReports
from csps.actors.kv_cache.slot_allocator import NotResident
from csps.protocols.core.placement import Span
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep


class KvLifetime:
    """Thread-safe: steps are entered by the RPC thread and settled by whoever completes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: Counter[int] = Counter()
        """By sequence: steps in line or under way."""
        self._idle: set[int] = set()
        """Sequences without a step whose KV lies here."""
        self._cancelled: set[int] = set()
        """Sequences with a step that nobody wants any more."""
        self._left: set[int] = set()
        """Of those, which the stream has let go of."""
        self._retained: set[int] = set()
        """Sequences whose KV is kept at their end."""
        self._sent: set[int] = set()
        """Sequences whose last step is over before others, whose KV takes longer to leave."""
        self._evict_later: dict[int, tuple[Span, ...]] = {}
        """By sequence with a step, what is to go after it."""

    def enter(self, step: PrefillStep) -> None:
        """A step is in line."""
        with self._lock:
            for chunk in step.chunks:
                self._steps[chunk.sequence_id] += 1
                self._idle.discard(chunk.sequence_id)
                if chunk.retain:
                    self._retained.add(chunk.sequence_id)

    def retain_at_end(self, sequence_id: int) -> None:
        """The stream is to decode a sequence whose KV is kept at its end."""
        with self._lock:
            self._retained.add(sequence_id)

    def unretain(self, sequence_id: int) -> None:
        """A sequence's KV is not kept at its end after all."""
        with self._lock:
            self._retained.discard(sequence_id)

    def is_retained(self, sequence_id: int) -> bool:
        """Whether a sequence's KV is kept and has no step."""
        with self._lock:
            return sequence_id in self._retained and not self._steps[sequence_id]

    def evict(self, sequence_id: int, spans: tuple[Span, ...]) -> bool:
        """Some KV of a sequence is not kept any more; true if it can go now, else it is `due` after
        the last step."""
        with self._lock:
            if self._steps[sequence_id]:
                self._evict_later[sequence_id] = (*self._evict_later.get(sequence_id, ()), *spans)
                return False
            return True

    def due_evictions(self, sequence_id: int) -> tuple[Span, ...]:
        """What is to go of a sequence that had a step; says so once."""
        with self._lock:
            return () if self._steps[sequence_id] else self._evict_later.pop(sequence_id, ())

    def discard(self, sequence_id: int) -> None:
        """Nothing is left of a sequence that was kept."""
        with self._lock:
            for known in (self._retained, self._idle, self._left):
                known.discard(sequence_id)

    def cancel(self, sequence_id: int) -> bool:
        """Nobody wants the sequence; true if its KV can go now, else it goes with its last step."""
        with self._lock:
            if self._steps[sequence_id]:
                self._cancelled.add(sequence_id)
                return False
            kept = sequence_id in self._idle
            self._idle.discard(sequence_id)
            return kept

    def leave_batch(self, sequence_id: int) -> bool:
        """The stream that decoded the sequence lets go of it; true if its KV can go now, else it
        goes with its last step, or stays."""
        with self._lock:
            if sequence_id in self._retained and not self._steps[sequence_id]:
                self._idle.add(sequence_id)
                self._left.add(sequence_id)
                return False
            self._retained.discard(
                sequence_id
            )  # with a step it was given up, of which we shall hear
            self._idle.discard(sequence_id)
            if self._steps[sequence_id]:
                self._cancelled.add(sequence_id)
                self._left.add(sequence_id)
                return False
            return True

    def pop_left(self, sequence_id: int) -> bool:
        """Whether the stream has let go of a sequence before its KV went; says so once."""
        with self._lock:
            known = sequence_id in self._left
            self._left.discard(sequence_id)
            return known

    def cancel_all(self) -> Set[int]:
        """Nobody wants anything; returns the sequences whose KV can go now."""
        with self._lock:
            self._cancelled.update(
                sequence_id for sequence_id, steps in self._steps.items() if steps
            )
            self._retained.clear()
            kept, self._idle = self._idle, set()
            return kept

    def finalize(self, step: PrefillStep, *, cancelled: bool) -> list[int]:
        """A step is over; returns the sequences whose KV can go now.

        Args:
            cancelled: the step was given up, perhaps before this rank was told why.
        """
        with self._lock:
            if cancelled:
                self._cancelled.update(chunk.sequence_id for chunk in step.chunks)
            return [chunk.sequence_id for chunk in step.chunks if self._finalized(chunk)]

    def _finalized(self, chunk: PrefillChunk) -> bool:
        sequence_id = chunk.sequence_id
        self._steps[sequence_id] -= 1
        if chunk.last and chunk.destinations:
            self._sent.add(sequence_id)
        if self._steps[sequence_id]:
            return False
        del self._steps[sequence_id]
        sent = sequence_id in self._sent and sequence_id not in self._retained
        done = sent or sequence_id in self._cancelled
        self._sent.discard(sequence_id)
        self._cancelled.discard(sequence_id)
        if done:
            self._retained.discard(sequence_id)
        else:
            self._idle.add(sequence_id)
        return done


class KvReclaim:
    """Of all sequences of a rank. Any thread may call anything.

    Args:
        reserved: whether the stream has a sequence.
        slots_came_back: told when there may be room for others.
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
        self._reserved, self._slots_freed = reserved, slots_freed
        self._lifetime = KvLifetime()

    def enter(self, step: PrefillStep) -> None:
        """A step is in line: what others have computed here of its pieces' history is held,
        whatever becomes of them.

        Raises:
            NotHeld: some of it is not here; the step is over.
        """
        self._lifetime.enter(step)
        try:
            for chunk in step.chunks:
                for kv_slice in chunk.history:
                    if kv_slice.source is not None and kv_slice.instance == self._here:
                        self._slots.share_slots(chunk.sequence_id, kv_slice.source, kv_slice.span)
        except NotResident:
            self._free(self._lifetime.finalize(step, cancelled=True))
            raise

    def given_up(self, sequence_id: int) -> None:
        """Nobody wants a sequence that has a step."""
        self._lifetime.cancel(sequence_id)

    def retain_at_end(self, sequence_id: int) -> None:
        """The stream is to decode a sequence whose KV is kept at its end."""
        self._lifetime.retain_at_end(sequence_id)

    def cancel(self, sequence_id: int) -> None:
        """Nobody wants a sequence: what lies here between two of its steps goes."""
        self._lifetime.unretain(sequence_id)
        if not self._reserved(sequence_id) and self._lifetime.cancel(sequence_id):
            self._free([sequence_id])

    def cancel_all(self) -> None:
        """Nobody wants anything."""
        self._free(
            sequence_id
            for sequence_id in self._lifetime.cancel_all()
            if not self._reserved(sequence_id)
        )

    def finalize(self, step: PrefillStep, *, cancelled: bool) -> None:
        """A step is over here.

        Args:
            cancelled: it was given up.
        """
        self._free(self._lifetime.finalize(step, cancelled=cancelled))
        for chunk in step.chunks:
            if chunk.retain and chunk.last and self._lifetime.is_retained(chunk.sequence_id):
                self._slots.drop_shared(chunk.sequence_id)
            if due := self._lifetime.due_evictions(chunk.sequence_id):
                self.evict(chunk.sequence_id, due)

    def evict(self, sequence_id: int, spans: tuple[Span, ...]) -> None:
        """Free some of what is kept of a sequence that is over, or will be with its last step."""
        if not self._lifetime.evict(sequence_id, spans):
            return
        if not self._reserved(sequence_id):
            for span in spans:
                self._slots.free_span(sequence_id, span)
        if not (left := self._slots.tokens(sequence_id)):
            self._lifetime.discard(sequence_id)
        self._slots_freed()
        self._reports.retained(sequence_id, left)

    def free_sequence(self, sequence_id: int) -> None:
        """The stream is done with a sequence, but a step that is under way may have it as well."""
        if self._lifetime.leave_batch(sequence_id):
            self._slots.free_request(sequence_id)
            self._slots_freed()
            self._reports.freed(sequence_id)
        elif self._lifetime.is_retained(sequence_id):
            self._slots.drop_shared(sequence_id)

    def _free(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._slots.free_request(sequence_id)
            if self._lifetime.pop_left(sequence_id):
                self._reports.freed(sequence_id)
        self._slots_freed()
