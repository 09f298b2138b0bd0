"""Micro-partitions of rows that ranks send each other.

By which way a member's rows reach other servers in SP-TP: ranks send so, and the configurator
counts and simulates so (CSPS §3.2.4, hierarchical all-gather and reduce-scatter).

In what order one member of an SP-TP group waits, computes and hands on (CSPS §3.2.5, Fig. 9b).

Rows come in micro-partitions, those of near members first. A step is only planned once everything
that it reads has been waited for, and what is computed before the far rows are there is chosen so
that both collectives have company: rows that arrive are attended to the keys before them, while
queries that are there already leave a farther stage's keys alone until all of them have come. So
about half of the attention is left when the all-gather ends, and it finishes micro-partition by
micro-partition, which the reduce-scatter follows.

A causal micro-partition of queries is finished only after the last one of keys that it needs. As
arrivals go, that happens in ascending order of rows on every member, whatever came first: the one
order in which all hand on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby


@dataclass(frozen=True)
class MicroPartition:
    """A micro-partition: neighbouring rows of one owner."""

    owner: int
    start: int
    """First row in the whole batch."""
    stop: int
    index: int
    """Among the owner's parts."""

    @property
    def rows(self) -> slice:
        """Rows in the whole batch."""
        return slice(self.start, self.stop)

    @property
    def length(self) -> int:
        """Rows in the part."""
        return self.stop - self.start


def relay_parents(owner: int, servers: Sequence[Hashable], takers: Sequence[int]) -> dict[int, int]:
    """From whom each taker gets an owner's rows, and to whom its sums go. Inside the owner's server
    that is the owner; every other server has one gate, from which the others there get them.

    The paper first collects a server's rows in one GPU, which then sends for all. Here each owner
    sends to a gate of its own: as many bytes between servers, but no GPU waits for the collection
    and all network cards of a server share the work.

    Args:
        servers: of all members; `takers` are those that want the rows.
    """
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
    """What a timeline says of a step; nothing where all rows are worked off at once."""

    level: int | None = None
    """Of the rows that the step is about the farthest: 1 own ones, 2 of the same server, 3 of the
    same rack, 4 beyond."""
    micro: int | None = None
    """Micro-partition of its owner's rows."""


@dataclass(frozen=True)
class Wait:
    """Until a part's rows are here."""

    part: MicroPartition


@dataclass(frozen=True)
class Project:
    """Queries, keys and values of rows [start, stop)."""

    start: int
    stop: int
    place: ScheduleLabel = field(default=ScheduleLabel(), compare=False)


@dataclass(frozen=True)
class Attend:
    """Of rows `queries` to those rows of `keys` that they may see; both [start, stop)."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    place: ScheduleLabel = field(default=ScheduleLabel(), compare=False)


@dataclass(frozen=True)
class StartReduce:
    """A part's attention is complete: project its output and let the sum begin."""

    part: MicroPartition


@dataclass(frozen=True)
class QueryHistory:
    """All queries are here: let the holders of history have them."""


ScheduleStep = Wait | Project | QueryHistory | Attend | StartReduce


def one_after_another(parts: Sequence[MicroPartition]) -> Iterator[ScheduleStep]:
    """No overlap, for comparison: all-gather, compute, reduce-scatter."""
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
    """The pipeline.

    Args:
        parts: of all owners, ascending, together all rows.
        distances: of each owner from the member that computes; 0 is what it holds already.
    """
    unseen = {part: {key for key in parts if key.start <= part.start} for part in parts}
    waiting_to_go = deque(parts)

    def attend(
        part: MicroPartition, keys: Iterable[MicroPartition], level: int
    ) -> Iterator[ScheduleStep]:
        new = sorted(unseen[part].intersection(keys), key=_start)
        unseen[part].difference_update(new)
        for start, stop in _joined(new):
            place = ScheduleLabel(level=level, micro=part.index)
            yield Attend((part.start, part.stop), (start, stop), place)
        while waiting_to_go and not unseen[waiting_to_go[0]]:
            yield StartReduce(waiting_to_go.popleft())

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
    """The pipeline of a layer that judges its own keys: by queries of the last rows, over all keys,
    so that an owner's rows meet another's only when all have come. Arguments as for `near_to_far`.
    """
    preceding = {part: [key for key in parts if key.start <= part.start] for part in parts}
    complete: set[MicroPartition] = set()
    waiting_to_go = deque(parts)

    def attend(part: MicroPartition, *, own: bool) -> Iterator[ScheduleStep]:
        keys = [key for key in preceding[part] if (key.owner == part.owner) is own]
        place = ScheduleLabel(level=distances[part.owner] + 1, micro=part.index)
        for start, stop in _joined(keys):
            yield Attend((part.start, part.stop), (start, stop), place)
        if not own or len(keys) == len(preceding[part]):
            complete.add(part)
        while waiting_to_go and waiting_to_go[0] in complete:
            yield StartReduce(waiting_to_go.popleft())

    for part in sorted(parts, key=lambda part: (distances[part.owner], part.start)):
        yield Wait(part)
        place = ScheduleLabel(level=distances[part.owner] + 1, micro=part.index)
        yield Project(part.start, part.stop, place)
        yield from attend(part, own=True)
    for part in parts:
        yield from attend(part, own=False)


def with_history(steps: Sequence[ScheduleStep]) -> Iterator[ScheduleStep]:
    """All members ask at once, when the last rows have come; what would have been handed on before
    that is handed on then."""
    last = max((i for i, step in enumerate(steps) if isinstance(step, Project)), default=-1)
    early = [step for step in steps[: last + 1] if isinstance(step, StartReduce)]
    yield from (step for step in steps[: last + 1] if not isinstance(step, StartReduce))
    yield QueryHistory()
    yield from early
    yield from steps[last + 1 :]


def _start(part: MicroPartition) -> int:
    return part.start


def _joined(parts: Iterable[MicroPartition]) -> list[tuple[int, int]]:
    """Rows of ascending parts, neighbours as one."""
    runs: list[tuple[int, int]] = []
    for part in parts:
        if runs and runs[-1][1] == part.start:
            runs[-1] = runs[-1][0], part.stop
        else:
            runs.append((part.start, part.stop))
    return runs
