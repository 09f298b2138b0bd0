"""Which queries of one member see which keys of another, as few calls of attention as it takes.

A piece's rows lie on members in spans (contiguous, zigzag, striped or any other), so what a pair of
spans sees of each other is known from their ends: nothing, everything, or a staircase. What is not
seen is in no block, and is not computed (CP §3.5).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from csps.actors.layout import LocalPiece


@dataclass(frozen=True)
class RingBlock:
    """Neighbouring queries of a member that attend to neighbouring keys of one."""

    queries: slice
    """Of the rows of who asks."""
    keys: slice
    """Of the rows of who holds them; or of its history of the piece."""
    q_positions: range | None = None
    k_positions: range | None = None
    """None, both: every query sees every key. Else numbers that compare as the positions do."""
    history: bool = False

    @property
    def rows(self) -> int:
        """Queries."""
        return int(self.queries.stop - self.queries.start)

    @property
    def key_count(self) -> int:
        """Keys."""
        return int(self.keys.stop - self.keys.start)


def seen_blocks(asker: Sequence[LocalPiece], holder: Sequence[LocalPiece]) -> list[RingBlock]:
    """Blocks of one piece, by the spans of it that two members have, both with at least one; or one
    member, then twice the same object. Each pair of a query and a key that it sees is in one."""
    if asker is holder and _ascending(asker):
        rows = slice(asker[0].rows.start, asker[-1].rows.stop)
        order = range(rows.stop - rows.start)
        return [RingBlock(rows, rows, order, order)]
    whole: dict[tuple[int, int], list[slice]] = {}
    stairs: list[RingBlock] = []
    for queries in asker:
        for keys in holder:
            block = _seen(queries, keys)
            if block is not None and block.q_positions is None:
                whole.setdefault((block.queries.start, block.queries.stop), []).append(block.keys)
            elif block is not None:
                stairs.append(block)
    return [*_wholes(whole), *stairs]


def _seen(queries: LocalPiece, keys: LocalPiece) -> RingBlock | None:
    q, k = queries.span, keys.span
    # Of the queries those from the first key on, of the keys those up to the last query.
    first = max(0, -(-(k.start - q.start) // q.step))
    count = min(k.length, (q.stop - 1 - k.start) // k.step + 1)
    if first >= q.length or count <= 0:
        return None
    begin = queries.rows.start
    rows = slice(begin + first, begin + q.length)
    columns = slice(keys.rows.start, keys.rows.start + count)
    positions, others = q.positions[first:], k.positions[:count]
    if positions[0] >= others[-1]:
        return RingBlock(rows, columns)
    if q.step == k.step:  # then a key is as many steps before a query as their numbers tell
        ahead = (q.start - k.start) // q.step
        return RingBlock(rows, columns, range(ahead + first, ahead + q.length), range(count))
    return RingBlock(rows, columns, positions, others)


def _wholes(keys_of: dict[tuple[int, int], list[slice]]) -> Iterator[RingBlock]:
    """Neighbouring keys that queries see all of as one block, and neighbouring queries too."""
    merged = [(slice(*rows), list(_joined(keys))) for rows, keys in keys_of.items()]
    at = 0
    while at < len(merged):
        rows, keys = merged[at]
        at += 1
        while at < len(merged) and merged[at][0].start == rows.stop and merged[at][1] == keys:
            rows = slice(rows.start, merged[at][0].stop)
            at += 1
        yield from (RingBlock(rows, it) for it in keys)


def _joined(slices: Iterable[slice]) -> Iterator[slice]:
    """Neighbours as one."""
    open_slice: slice | None = None
    for it in slices:
        if open_slice is not None and open_slice.stop == it.start:
            open_slice = slice(open_slice.start, it.stop)
            continue
        if open_slice is not None:
            yield open_slice
        open_slice = it
    if open_slice is not None:
        yield open_slice


def _ascending(parts: Sequence[LocalPiece]) -> bool:
    """Whether rows are in the order of their positions: then each sees those before it."""
    return all(before.span.stop <= after.span.start for before, after in pairwise(parts))
