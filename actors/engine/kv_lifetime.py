"""Whose KV a rank holds between the steps of a prompt, and who is not wanted any more.

A sequence has a step for each chunk of its prompt; several may be in line at once, and between two
of them its KV just lies here. It goes when the last step in line is over and either all of it has
been sent or the sequence was cancelled, never while a step in line may still read it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Set

from csps.protocols.messages import PrefillJob, PrefillPiece


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

    def enter(self, job: PrefillJob) -> None:
        """A step is in line."""
        with self._lock:
            for piece in job.pieces:
                self._steps[piece.rid] += 1
                self._kept.discard(piece.rid)

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
        goes with its last step."""
        with self._lock:
            self._kept.discard(rid)
            if self._steps[rid]:
                self._cancelled.add(rid)
                self._left.add(rid)
                return False
            return True

    def left(self, rid: int) -> bool:
        """Whether the stream has let go of a sequence before its last step was over; says so
        once."""
        with self._lock:
            known = rid in self._left
            self._left.discard(rid)
            return known

    def cancel_all(self) -> Set[int]:
        """Nobody wants anything; returns the sequences whose KV can go now."""
        with self._lock:
            self._cancelled.update(rid for rid, steps in self._steps.items() if steps)
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
        if self._steps[rid]:
            return False
        del self._steps[rid]
        done = rid in self._cancelled or (piece.last and bool(piece.destinations))
        self._cancelled.discard(rid)
        if not done:
            self._kept.add(rid)
        return done
