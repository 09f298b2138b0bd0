"""The prefill jobs of a rank, in the router's total order.

Every rank of the gang receives every job and runs those that it is a member of in order; with one
total order, groups that overlap cannot deadlock. Urgent jobs may be taken out of order inside a
running one. One that needs nobody but this rank may run wherever the rank is not in the middle of
an exchange, and while it waits for others to come to the running job. One that others take part in
may only run between two layers, at the word of the running job's leader, and only when all its
members are members of that job: then all of them stand at the same layer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from csps.protocols.errors import DeadlineExceeded
from csps.protocols.messages import PrefillJob

JOB_ARRIVAL_S = 30.0
"""For a job that another member has received already to arrive here as well."""


class JobQueue:
    """Thread-safe: the RPC thread puts jobs in, the engine thread takes them out."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[int, PrefillJob] = OrderedDict()
        self._changed = threading.Condition()
        self._closed = False
        self._taken_early: set[int] = set()
        """Urgent jobs that ran before their turn, remembered until no leader can name them."""

    def put(self, job: PrefillJob) -> None:
        """Add the next job of the total order."""
        with self._changed:
            self._jobs[job.job_id] = job
            self._changed.notify_all()

    def close(self) -> None:
        """Make `next` return None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._jobs)

    def next(self) -> PrefillJob | None:
        """Wait for the next job in order; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if self._closed:
                return None
            job_id, job = self._jobs.popitem(last=False)
            self._taken_early = {early for early in self._taken_early if early > job_id}
            return job

    def urgent_within(
        self, running: PrefillJob, may_run: Callable[[PrefillJob], bool], limit: int
    ) -> list[int]:
        """Ids of up to `limit` waiting urgent jobs that may run inside the running one.

        None of their requests has an earlier job that is not over, whose KV they would miss.

        Args:
            may_run: whether a job's members all stand still now.
        """
        earlier = {piece.rid for piece in running.pieces}
        found: list[int] = []
        with self._changed:
            for job in self._jobs.values():
                rids = {piece.rid for piece in job.pieces}
                if job.urgent and may_run(job) and earlier.isdisjoint(rids):
                    found.append(job.job_id)
                else:
                    earlier |= rids
                if len(found) == limit:
                    break
        return found

    def urgent_until(
        self,
        over: Callable[[], bool],
        running: PrefillJob,
        may_run: Callable[[PrefillJob], bool],
    ) -> list[int]:
        """Wait for an urgent job that may run inside the running one, see `urgent_within`; none
        once it is `over`. Whoever changes what they say calls `look_again`."""
        with self._changed:
            self._changed.wait_for(lambda: over() or self.urgent_within(running, may_run, 1))
            return [] if over() else self.urgent_within(running, may_run, 1)

    def look_again(self) -> None:
        """Something else has changed that those who wait here look at."""
        with self._changed:
            self._changed.notify_all()

    def take(self, job_id: int) -> PrefillJob | None:
        """Take an urgent job out of order; None if it has run already."""
        with self._changed:
            if job_id in self._taken_early:
                return None
            arrived = self._changed.wait_for(
                lambda: job_id in self._jobs or self._closed, JOB_ARRIVAL_S
            )
            if not arrived:
                raise DeadlineExceeded(f"arrival of urgent job {job_id}", JOB_ARRIVAL_S)
            self._taken_early.add(job_id)
            return self._jobs.pop(job_id, None)
