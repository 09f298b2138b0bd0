"""Cores that the ranks of a server share equally (processor sharing)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from csps.loadgen.simulator.cluster import GangModel
from csps.loadgen.simulator.timeline import Timeline


@dataclass(eq=False, slots=True)
class _Job:
    """Work of a group."""

    ranks: Counter[str]
    """By server."""
    left_ns: Fraction
    """What it would still take if nobody else computed."""
    done: Callable[[], None]


class Cores:
    """The cores under a gang's ranks.

    A group's work is given as what it takes alone, which is how it was profiled: a group of more
    ranks than cores has had its share of them then. Each of B ranks that compute has min(1, cores
    / B) of a core, so that a group of n goes on at max(cores, n) / max(cores, B) of that speed;
    over several servers, as fast as on the slowest of them.

    Args:
        timeline: the simulated time.
        gang: its instances, each rank of which computes in one thread.
    """

    def __init__(self, timeline: Timeline, gang: GangModel) -> None:
        self._timeline, self._gang = timeline, gang
        self._cores = {it.server: it.cores for it in gang.instances if it.cores is not None}
        self._jobs: list[_Job] = []
        self._computing: Counter[str] = Counter()
        """Ranks, by server."""
        self._served_at_ns = 0
        self._planned = 0
        """Version of the next end: earlier ones on the timeline are out of date."""

    def compute(self, instances: Sequence[int], work_ns: int, done: Callable[[], None]) -> None:
        """Begin work now that takes the group so long alone; `done` is called at its end."""
        self._serve()
        ranks: Counter[str] = Counter()
        for instance in instances:
            ranks[self._gang.instances[instance].server] += self._gang.tp
        self._computing += ranks
        self._jobs.append(_Job(ranks, Fraction(work_ns), done))
        self._plan()

    def _speed(self, job: _Job) -> Fraction:
        """Compared with being alone."""
        shared = [(self._cores.get(it), n, self._computing[it]) for it, n in job.ranks.items()]
        speeds = [Fraction(max(cores, n), max(cores, of)) for cores, n, of in shared if cores]
        return min(speeds, default=Fraction(1))

    def _serve(self) -> None:
        """Bring what is left up to the present."""
        passed_ns = self._timeline.now_ns - self._served_at_ns
        self._served_at_ns = self._timeline.now_ns
        for job in self._jobs:
            job.left_ns -= passed_ns * self._speed(job)

    def _plan(self) -> None:
        """Put the end that comes next on the timeline."""
        self._planned += 1
        if not self._jobs:
            return
        version = self._planned
        wait_ns = max(0, min(-(-job.left_ns // self._speed(job)) for job in self._jobs))
        self._timeline.at(self._timeline.now_ns + wait_ns, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._planned:
            return
        self._serve()
        over = [job for job in self._jobs if job.left_ns <= 0]
        self._jobs = [job for job in self._jobs if job.left_ns > 0]
        for job in over:
            self._computing -= job.ranks
        self._plan()
        for job in over:
            job.done()
