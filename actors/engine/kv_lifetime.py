"""Whose KV a rank holds between the steps of a prompt, and who is not wanted any more.

A sequence has a step for each chunk of its prompt; several may be in line at once, and between two
of them its KV just lies here. It goes when the last step in line is over and either all of it has
been sent or the sequence was cancelled, never while a step in line may still read it. The KV of a
sequence that stays is kept at its end, until the log frees it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Set

from csps.protocols.prefill_job import PrefillJob, PrefillPiece
from csps.protocols.span import Span


class KvLifetime:
    """Thread-safe: steps are entered by the RPC thread and settled by whoever completes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: Counter[int] = Counter()
        """By sequence: steps in line or under way."""
        self._kept: set[int] = set()
        """Sequences without a step whose KV lies here."""
        self._cancelled: set[int] = set()
        """Sequences with a step that nobody wants any more."""
        self._left: set[int] = set()
        """Of those, which the stream has let go of."""
        self._staying: set[int] = set()
        """Sequences whose KV is kept at their end."""
        self._sent: set[int] = set()
        """Sequences whose last step is over before others, whose KV takes longer to leave."""
        self._released: dict[int, tuple[Span, ...]] = {}
        """By sequence with a step, what is to go after it."""

    def enter(self, job: PrefillJob) -> None:
        """A step is in line."""
        with self._lock:
            for piece in job.pieces:
                self._steps[piece.rid] += 1
                self._kept.discard(piece.rid)
                if piece.stays:
                    self._staying.add(piece.rid)

    def stay(self, rid: int) -> None:
        """The stream is to decode a sequence whose KV is kept at its end."""
        with self._lock:
            self._staying.add(rid)

    def unkeep(self, rid: int) -> None:
        """A sequence's KV is not kept at its end after all."""
        with self._lock:
            self._staying.discard(rid)

    def stays(self, rid: int) -> bool:
        """Whether a sequence's KV is kept and has no step."""
        with self._lock:
            return rid in self._staying and not self._steps[rid]

    def release(self, rid: int, spans: tuple[Span, ...]) -> bool:
        """Some KV of a sequence is not kept any more; true if it can go now, else it is `due` after
        the last step."""
        with self._lock:
            if self._steps[rid]:
                self._released[rid] = (*self._released.get(rid, ()), *spans)
                return False
            return True

    def due(self, rid: int) -> tuple[Span, ...]:
        """What is to go of a sequence that had a step; says so once."""
        with self._lock:
            return () if self._steps[rid] else self._released.pop(rid, ())

    def gone(self, rid: int) -> None:
        """Nothing is left of a sequence that was kept."""
        with self._lock:
            for known in (self._staying, self._kept, self._left):
                known.discard(rid)

    def cancel(self, rid: int) -> bool:
        """Nobody wants the sequence; true if its KV can go now, else it goes with its last step."""
        with self._lock:
            if self._steps[rid]:
                self._cancelled.add(rid)
                return False
            kept = rid in self._kept
            self._kept.discard(rid)
            return kept

    def leave(self, rid: int) -> bool:
        """The stream that decoded the sequence lets go of it; true if its KV can go now, else it
        goes with its last step, or stays."""
        with self._lock:
            if rid in self._staying and not self._steps[rid]:
                self._kept.add(rid)
                self._left.add(rid)
                return False
            self._staying.discard(rid)  # with a step it was given up, of which we shall hear
            self._kept.discard(rid)
            if self._steps[rid]:
                self._cancelled.add(rid)
                self._left.add(rid)
                return False
            return True

    def left(self, rid: int) -> bool:
        """Whether the stream has let go of a sequence before its KV went; says so once."""
        with self._lock:
            known = rid in self._left
            self._left.discard(rid)
            return known

    def cancel_all(self) -> Set[int]:
        """Nobody wants anything; returns the sequences whose KV can go now."""
        with self._lock:
            self._cancelled.update(rid for rid, steps in self._steps.items() if steps)
            self._staying.clear()
            kept, self._kept = self._kept, set()
            return kept

    def settle(self, job: PrefillJob, *, cancelled: bool) -> list[int]:
        """A step is over; returns the sequences whose KV can go now.

        Args:
            cancelled: the step was given up, perhaps before this rank was told why.
        """
        with self._lock:
            if cancelled:
                self._cancelled.update(piece.rid for piece in job.pieces)
            return [piece.rid for piece in job.pieces if self._settled(piece)]

    def _settled(self, piece: PrefillPiece) -> bool:
        rid = piece.rid
        self._steps[rid] -= 1
        if piece.last and piece.destinations:
            self._sent.add(rid)
        if self._steps[rid]:
            return False
        del self._steps[rid]
        sent = rid in self._sent and rid not in self._staying
        done = sent or rid in self._cancelled
        self._sent.discard(rid)
        self._cancelled.discard(rid)
        if done:
            self._staying.discard(rid)
        else:
            self._kept.add(rid)
        return done
