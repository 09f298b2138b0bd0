"""Simulated time, and the links and cores that simulated work shares on it.

Events are ordered by (time, order of insertion), so that ties are deterministic. Transfers of a
link, and ranks on a server's cores, share them equally (processor sharing).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from csps.loadgen.simulator.cluster import ClusterModel, GangModel, InstanceModel
from csps.services.scheduling.events.events import InstanceId, index_of

Action = Callable[[], object]


class EventTimeline:
    """A heap of future actions."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Action]] = []
        self._inserted = 0

    def at(self, t_ns: int, action: Action) -> None:
        """Call `action` at a time.

        Nothing is ever removed: a caller whose action is obsolete ignores the call.
        """
        assert t_ns >= self.now_ns, f"action at {t_ns} ns is in the past, now is {self.now_ns} ns"
        heapq.heappush(self._heap, (t_ns, self._inserted, action))
        self._inserted += 1

    @property
    def empty(self) -> bool:
        """Return whether nothing is left to happen."""
        return not self._heap

    @property
    def next_ns(self) -> int:
        """Return the time of the next action. The timeline must not be empty."""
        return self._heap[0][0]

    def step(self) -> int:
        """Go to the next time with actions, call them all, and return that time."""
        self.now_ns = now_ns = self.next_ns
        while self._heap and self._heap[0][0] == now_ns:
            heapq.heappop(self._heap)[2]()
        return now_ns


NS_PER_S = 1_000_000_000


class Link:
    """A link on which each of n transfers gets 1/n of the bandwidth.

    All transfers under way have received the same service since they began. One counter of service
    is therefore enough: a transfer ends when the counter has grown by its size. The counter is an
    integer, in billionths of a byte.

    Args:
        timeline: the simulated time.
        bytes_per_s: bandwidth of the whole link.
        latency_ns: time from the last byte's departure to its arrival; it takes no bandwidth.
        private: whether only two instances of one server use it.
    """

    def __init__(
        self,
        timeline: EventTimeline,
        *,
        bytes_per_s: int,
        latency_ns: int = 0,
        private: bool = False,
    ) -> None:
        assert bytes_per_s > 0, f"link bandwidth must be positive, got {bytes_per_s}"
        self._timeline = timeline
        self.bytes_per_s, self.latency_ns, self.private = bytes_per_s, latency_ns, private
        self._served = 0
        self._served_at_ns = 0
        self._ending: list[tuple[int, int, Callable[[], None]]] = []
        self._begun = 0
        self._version = 0
        """Version of the next end. Earlier ends on the timeline are obsolete."""

    @property
    def transfers(self) -> int:
        """Return the number of transfers under way."""
        return len(self._ending)

    def send(self, size: int, arrived: Callable[[], None]) -> None:
        """Begin to send `size` bytes; `arrived` is called when the last one has arrived."""
        self._serve()
        end = self._served + size * NS_PER_S
        heapq.heappush(self._ending, (end, self._begun, arrived))
        self._begun += 1
        self._schedule_end()

    def _serve(self) -> None:
        """Advance the service counter to the present."""
        now_ns = self._timeline.now_ns
        if self._ending:
            self._served += self.bytes_per_s * (now_ns - self._served_at_ns) // self.transfers
        self._served_at_ns = now_ns

    def _schedule_end(self) -> None:
        """Put the next end on the timeline."""
        self._version += 1
        if not self._ending:
            return
        version, left = self._version, max(0, self._ending[0][0] - self._served)
        wait_ns = -(-left * self.transfers // self.bytes_per_s)
        self._timeline.at(self._timeline.now_ns + wait_ns, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._serve()
        over: list[Callable[[], None]] = []
        while self._ending and self._ending[0][0] <= self._served:
            over.append(heapq.heappop(self._ending)[2])
        self._schedule_end()
        for arrived in over:
            self._deliver(arrived)

    def _deliver(self, arrived: Callable[[], None]) -> None:
        if not self.latency_ns:
            return arrived()
        return self._timeline.at(self._timeline.now_ns + self.latency_ns, lambda: arrived())


class SimulatedNetwork:
    """Finds the link from one instance to another; links are made when first used."""

    def __init__(self, timeline: EventTimeline, cluster: ClusterModel) -> None:
        self._timeline, self._cluster = timeline, cluster
        self._links: dict[tuple[str, str, str], Link] = {}
        self._routes: dict[tuple[InstanceId, InstanceId], Link | None] = {}

    def route(self, source: InstanceId, destination: InstanceId) -> Link | None:
        """Return the link from a prefill to a decode instance. None: no transfer time."""
        key = (source, destination)
        if key not in self._routes:
            sender = self._cluster.prefill.instances[index_of(source)]
            receiver = self._cluster.decode.instances[index_of(destination)]
            self._routes[key] = self.between(sender, receiver)
        return self._routes[key]

    def between(self, sender: InstanceModel, receiver: InstanceModel) -> Link | None:
        """Return the link from one instance to another. None: no transfer time."""
        if sender is receiver:  # an elastic gang decodes where it prefills
            return None
        kind, model = self._cluster.link(sender, receiver)
        if model is None:
            return None
        ends = (sender.server, receiver.server)
        if kind == "inside":
            ends = (sender.server, "") if model.shared else (sender.location, receiver.location)
        elif model.shared:
            ends = ("", "")
        key = (kind, *ends)
        if key not in self._links:
            self._links[key] = Link(
                self._timeline,
                bytes_per_s=model.bytes_per_s,
                latency_ns=model.latency_ns,
                private=kind == "inside" and not model.shared,
            )
        return self._links[key]

    @property
    def transfers(self) -> int:
        """Return the transfers under way on all links."""
        return sum(link.transfers for link in self._links.values())


@dataclass(eq=False, slots=True)
class _Job:
    """Work of a group of instances."""

    ranks: Counter[str]
    """Number of ranks, by server."""
    left_ns: Fraction
    """Time that the work would still take alone."""
    done: Callable[[], None]


class Cores:
    """The cores that a gang's ranks share.

    A group's work is given as its time alone, as it was profiled. A group with more ranks than
    cores shared them during profiling already. Each of B computing ranks has min(1, cores / B) of a
    core, so a group of n runs at max(cores, n) / max(cores, B) of its profiled speed. Over several
    servers the slowest one counts.

    Args:
        timeline: the simulated time.
        gang: the gang; each rank of its instances computes in one thread.
    """

    def __init__(self, timeline: EventTimeline, gang: GangModel) -> None:
        self._timeline, self._gang = timeline, gang
        self._cores = {
            instance.server: instance.cores
            for instance in gang.instances
            if instance.cores is not None
        }
        self._jobs: list[_Job] = []
        self._computing: Counter[str] = Counter()
        """Computing ranks, by server."""
        self._served_at_ns = 0
        self._version = 0
        """Version of the next end. Earlier ends on the timeline are obsolete."""

    def compute(self, instances: Sequence[int], work_ns: int, done: Callable[[], None]) -> None:
        """Begin work that takes the group `work_ns` alone; `done` is called at its end."""
        self._serve()
        ranks: Counter[str] = Counter()
        for instance in instances:
            ranks[self._gang.instances[instance].server] += self._gang.tp
        self._computing += ranks
        self._jobs.append(_Job(ranks, Fraction(work_ns), done))
        self._schedule_end()

    def _speed(self, job: _Job) -> Fraction:
        """Return the speed relative to running alone."""
        shared = [
            (self._cores.get(server), n, self._computing[server]) for server, n in job.ranks.items()
        ]
        speeds = [Fraction(max(cores, n), max(cores, of)) for cores, n, of in shared if cores]
        return min(speeds, default=Fraction(1))

    def _serve(self) -> None:
        """Advance the remaining work to the present."""
        passed_ns = self._timeline.now_ns - self._served_at_ns
        self._served_at_ns = self._timeline.now_ns
        for job in self._jobs:
            job.left_ns -= passed_ns * self._speed(job)

    def _schedule_end(self) -> None:
        """Put the next end on the timeline."""
        self._version += 1
        if not self._jobs:
            return
        version = self._version
        wait_ns = max(0, min(-(-job.left_ns // self._speed(job)) for job in self._jobs))
        self._timeline.at(self._timeline.now_ns + wait_ns, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._serve()
        over = [job for job in self._jobs if job.left_ns <= 0]
        self._jobs = [job for job in self._jobs if job.left_ns > 0]
        for job in over:
            self._computing -= job.ranks
        self._schedule_end()
        for job in over:
            job.done()
