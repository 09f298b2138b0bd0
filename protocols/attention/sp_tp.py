"""SP-TP: who relays rows to other servers, and in what order a member computes (CSPS §3.2.4-3.2.5).

Ranks execute these functions; the configurator counts and simulates by them. `relay_parents` is the
hierarchical all-gather and reduce-scatter. The schedules order one member's waiting, computing and
reducing (Fig. 9b).

Rows come in micro-partitions, those of near members first. A schedule reads only what it has waited
for. Before far rows arrive, it computes what keeps both collectives busy: arriving rows attend to
the keys before them, while queries that are present leave a farther stage's keys alone until all of
those have come. So about half of the attention is left when the all-gather ends; it then finishes
micro-partition by micro-partition, and the reduce-scatter follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby


@dataclass(frozen=True)
class MicroPartition:
    """Neighboring rows of one owner, sent as one message."""

    owner: int
    start: int
    """First row in the whole batch."""
    stop: int
    index: int
    """Number of the micro-partition among its owner's."""

    @property
    def rows(self) -> slice:
        """Rows in the whole batch."""
        return slice(self.start, self.stop)

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.stop - self.start


def relay_parents(owner: int, servers: Sequence[Hashable], takers: Sequence[int]) -> dict[int, int]:
    """Return the rank from which each taker receives an owner's rows, and to which it sends its
    sums.

    In the owner's server that is the owner. Every other server has one relay, which serves the
    others there.

    Args:
        servers: servers of all members.
        takers: members that want the rows.
    """
    # The paper first collects a server's rows in one GPU, which then sends for all. Here each owner
    # sends to a relay of its own: as many bytes between servers, but no GPU waits for the
    # collection, and all network cards of a server share the work.
    parents: dict[int, int] = {}
    place = servers[: owner + 1].count(servers[owner]) - 1
    for member in takers:
        inside = [peer for peer in takers if servers[peer] == servers[member]]
        relay = owner if servers[member] == servers[owner] else inside[place % len(inside)]
        parents[member] = relay if member != relay else owner
    parents.pop(owner, None)
    return parents


@dataclass(frozen=True, kw_only=True)
class ScheduleLabel:
    """Labels of a step in a timeline; empty where all rows are computed at once."""

    level: int | None = None
    """Level of the farthest rows of the step: 1 own, 2 same server, 3 same rack, 4 beyond."""
    micro: int | None = None
    """Micro-partition of its owner's rows."""


@dataclass(frozen=True)
class Wait:
    """Wait until the rows of a micro-partition have arrived."""

    part: MicroPartition


@dataclass(frozen=True)
class Project:
    """Compute queries, keys and values of rows [start, stop)."""

    start: int
    stop: int
    place: ScheduleLabel = field(default=ScheduleLabel(), compare=False)


@dataclass(frozen=True)
class Attend:
    """Attend from rows `queries` to those rows of `keys` that they may see; both are [start,
    stop)."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    place: ScheduleLabel = field(default=ScheduleLabel(), compare=False)


@dataclass(frozen=True)
class StartReduce:
    """Project the output of a micro-partition whose attention is complete, and start its
    reduction."""

    part: MicroPartition


@dataclass(frozen=True)
class QueryHistory:
    """Send all queries, which have arrived, to the holders of history."""


ScheduleStep = Wait | Project | QueryHistory | Attend | StartReduce


def one_after_another(parts: Sequence[MicroPartition]) -> Iterator[ScheduleStep]:
    """Yield a schedule without overlap, for comparison: all-gather, compute, reduce-scatter."""
    if not parts:
        return
    yield from (Wait(part) for part in parts)
    everything = parts[0].start, parts[-1].stop
    yield Project(*everything)
    yield Attend(everything, everything)
    yield from (StartReduce(part) for part in parts)


def near_to_far(
    parts: Sequence[MicroPartition], distances: Sequence[int]
) -> Iterator[ScheduleStep]:
    """Yield the pipelined schedule.

    Args:
        parts: micro-partitions of all owners, ascending, together all rows.
        distances: distance of each owner from the member that computes; 0 is the member itself.
    """
    unseen = {part: {key for key in parts if key.start <= part.start} for part in parts}
    # All members reduce in this one order. A micro-partition of queries is complete only after the
    # last keys that it needs; as rows arrive, that happens in ascending order on every member.
    unreduced = deque(parts)

    def attend(
        part: MicroPartition, keys: Iterable[MicroPartition], level: int
    ) -> Iterator[ScheduleStep]:
        new = sorted(unseen[part].intersection(keys), key=_start)
        unseen[part].difference_update(new)
        for start, stop in _joined(new):
            place = ScheduleLabel(level=level, micro=part.index)
            yield Attend((part.start, part.stop), (start, stop), place)
        while unreduced and not unseen[unreduced[0]]:
            yield StartReduce(unreduced.popleft())

    arrived: list[MicroPartition] = []
    by_distance = sorted(parts, key=lambda part: (distances[part.owner], part.start))
    for distance, stage in groupby(by_distance, key=lambda part: distances[part.owner]):
        nearer, coming = sorted(arrived, key=_start), list(stage)
        for part in coming:
            yield Wait(part)
            place = ScheduleLabel(level=distance + 1, micro=part.index)
            yield Project(part.start, part.stop, place)
            arrived.append(part)
            yield from attend(part, arrived, distance + 1)
        for part in nearer:
            yield from attend(part, coming, distance + 1)


def own_before_far(
    parts: Sequence[MicroPartition], distances: Sequence[int]
) -> Iterator[ScheduleStep]:
    """Yield the pipelined schedule of a layer that scores the importance of its own keys.

    Queries of the last rows score all keys, so an owner's rows attend to another's only when all
    rows have come. Arguments as in `near_to_far`.
    """
    preceding = {part: [key for key in parts if key.start <= part.start] for part in parts}
    complete: set[MicroPartition] = set()
    unreduced = deque(parts)

    def attend(part: MicroPartition, *, own: bool) -> Iterator[ScheduleStep]:
        keys = [key for key in preceding[part] if (key.owner == part.owner) is own]
        place = ScheduleLabel(level=distances[part.owner] + 1, micro=part.index)
        for start, stop in _joined(keys):
            yield Attend((part.start, part.stop), (start, stop), place)
        if not own or len(keys) == len(preceding[part]):
            complete.add(part)
        while unreduced and unreduced[0] in complete:
            yield StartReduce(unreduced.popleft())

    for part in sorted(parts, key=lambda part: (distances[part.owner], part.start)):
        yield Wait(part)
        place = ScheduleLabel(level=distances[part.owner] + 1, micro=part.index)
        yield Project(part.start, part.stop, place)
        yield from attend(part, own=True)
    for part in parts:
        yield from attend(part, own=False)


def with_history(steps: Sequence[ScheduleStep]) -> Iterator[ScheduleStep]:
    """Yield the schedule with a query of history after the last rows have arrived.

    Reductions that would have started earlier start after the query.
    """
    # All members must query at the same point of their schedules.
    last = max((i for i, step in enumerate(steps) if isinstance(step, Project)), default=-1)
    early = [step for step in steps[: last + 1] if isinstance(step, StartReduce)]
    yield from (step for step in steps[: last + 1] if not isinstance(step, StartReduce))
    yield QueryHistory()
    yield from early
    yield from steps[last + 1 :]


def _start(part: MicroPartition) -> int:
    return part.start


def _joined(parts: Iterable[MicroPartition]) -> list[tuple[int, int]]:
    """Return the rows of ascending micro-partitions, with adjacent ones merged."""
    runs: list[tuple[int, int]] = []
    for part in parts:
        if runs and runs[-1][1] == part.start:
            runs[-1] = runs[-1][0], part.stop
        else:
            runs.append((part.start, part.stop))
    return runs
