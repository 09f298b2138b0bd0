"""Whose KV a prefill rank holds, between which jobs, and who is not wanted any more.

A request has a job for each chunk of its prompt; several may be in line at once, and between two
of them its KV just lies here. It goes when the last job in line is over and either all of it
has been sent or the request was cancelled, never while a job in line may still read it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Set

from csps.protocols.messages import PrefillJob, PrefillPiece


class RequestBook:
    """Thread-safe: jobs are entered by the RPC thread and settled by whoever completes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._jobs: Counter[int] = Counter()
        """By request: jobs in line or under way."""
        self._kept: set[int] = set()
        """Requests without a job whose KV lies here."""
        self._cancelled: set[int] = set()
        """Requests with a job that nobody wants any more."""

    def enter(self, job: PrefillJob) -> None:
        """A job is in line."""
        with self._lock:
            self._open.add(job.job_id)
            for piece in job.pieces:
                self._jobs[piece.rid] += 1
                self._kept.discard(piece.rid)

    def cancel(self, rid: int) -> bool:
        """Nobody wants the request; true if its KV can go now, else it goes with its last job."""
        with self._lock:
            if self._jobs[rid]:
                self._cancelled.add(rid)
                return False
            kept = rid in self._kept
            self._kept.discard(rid)
            return kept

    def cancel_all(self) -> Set[int]:
        """Nobody wants anything; returns the requests whose KV can go now."""
        with self._lock:
            self._cancelled.update(rid for rid, jobs in self._jobs.items() if jobs)
            kept, self._kept = self._kept, set()
            return kept

    def withdrawn(self, job: PrefillJob) -> frozenset[int]:
        """Those of a job's requests that are cancelled."""
        with self._lock:
            return frozenset(piece.rid for piece in job.pieces if piece.rid in self._cancelled)

    def settle(self, job: PrefillJob, *, cancelled: bool) -> list[int]:
        """A job is over; returns the requests whose KV can go now.

        Args:
            cancelled: the job's group has given it up, perhaps before this rank was told why.
        """
        with self._lock:
            self._open.discard(job.job_id)
            if cancelled:
                self._cancelled.update(piece.rid for piece in job.pieces)
            return [piece.rid for piece in job.pieces if self._settled(piece)]

    def _settled(self, piece: PrefillPiece) -> bool:
        rid = piece.rid
        self._jobs[rid] -= 1
        if self._jobs[rid]:
            return False
        del self._jobs[rid]
        done = rid in self._cancelled or (piece.last and bool(piece.destinations))
        self._cancelled.discard(rid)
        if not done:
            self._kept.add(rid)
        return done

    @property
    def open_jobs(self) -> frozenset[int]:
        """Jobs that have been entered and not settled."""
        with self._lock:
            return frozenset(self._open)
