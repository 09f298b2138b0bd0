"""In what order one member of an SP-TP group waits, computes and hands on (CSPS §3.2.5, Fig. 9b).

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from csps.actors.collectives.row_shards import RowPart


@dataclass(frozen=True)
class Wait:
    """Until a part's rows are here."""

    part: RowPart


@dataclass(frozen=True)
class Project:
    """Queries, keys and values of rows [start, stop)."""

    start: int
    stop: int


@dataclass(frozen=True)
class Attend:
    """Of rows `queries` to those rows of `keys` that they may see; both [start, stop)."""

    queries: tuple[int, int]
    keys: tuple[int, int]


@dataclass(frozen=True)
class HandOn:
    """A part's attention is complete: project its output and let the sum begin."""

    part: RowPart


Step = Wait | Project | Attend | HandOn


def one_after_another(parts: Sequence[RowPart]) -> Iterator[Step]:
    """No overlap, for comparison: all-gather, compute, reduce-scatter."""
    if not parts:
        return
    yield from (Wait(part) for part in parts)
    everything = parts[0].start, parts[-1].stop
    yield Project(*everything)
    yield Attend(everything, everything)
    yield from (HandOn(part) for part in parts)


def near_to_far(parts: Sequence[RowPart], distances: Sequence[int]) -> Iterator[Step]:
    """The pipeline.

    Args:
        parts: of all owners, ascending, together all rows.
        distances: of each owner from the member that computes; 0 is what it holds already.
    """
    unseen = {part: {key for key in parts if key.start <= part.start} for part in parts}
    waiting_to_go = deque(parts)

    def attend(part: RowPart, keys: Iterable[RowPart]) -> Iterator[Step]:
        new = sorted(unseen[part].intersection(keys), key=_start)
        unseen[part].difference_update(new)
        for start, stop in _joined(new):
            yield Attend((part.start, part.stop), (start, stop))
        while waiting_to_go and not unseen[waiting_to_go[0]]:
            yield HandOn(waiting_to_go.popleft())

    arrived: list[RowPart] = []
    by_distance = sorted(parts, key=lambda part: (distances[part.owner], part.start))
    for _, stage in groupby(by_distance, key=lambda part: distances[part.owner]):
        nearer, coming = sorted(arrived, key=_start), list(stage)
        for part in coming:
            yield Wait(part)
            yield Project(part.start, part.stop)
            arrived.append(part)
            yield from attend(part, arrived)
        for part in nearer:
            yield from attend(part, coming)


def _start(part: RowPart) -> int:
    return part.start


def _joined(parts: Iterable[RowPart]) -> list[tuple[int, int]]:
    """Rows of ascending parts, neighbours as one."""
    runs: list[tuple[int, int]] = []
    for part in parts:
        if runs and runs[-1][1] == part.start:
            runs[-1] = runs[-1][0], part.stop
        else:
            runs.append((part.start, part.stop))
    return runs
