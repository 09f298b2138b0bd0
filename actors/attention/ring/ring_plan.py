"""Which queries of one member see which keys of another, as few calls of attention as it takes.

A piece's rows lie on members in spans (contiguous, zigzag, striped or any other), so what a pair of
spans sees of each other is known from their ends: nothing, everything, or a staircase. What is not
seen is in no block, and is not computed (CP §3.5).

What each member of a ring computes with each other's share, worked out from the step alone.

The k-th member has in round j the share of member k - j: its keys and values (`ring_kv`) or its
queries (`ring_q`). Numbers of parts are derived from the same plan (`parts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from csps.actors.comm.layout import LocalChunk, computed_by
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep


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


def seen_blocks(asker: Sequence[LocalChunk], holder: Sequence[LocalChunk]) -> list[RingBlock]:
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


def _seen(queries: LocalChunk, keys: LocalChunk) -> RingBlock | None:
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
        yield from (RingBlock(rows, key) for key in keys)


def _joined(slices: Iterable[slice]) -> Iterator[slice]:
    """Neighbours as one."""
    open_slice: slice | None = None
    for kv_slice in slices:
        if open_slice is not None and open_slice.stop == kv_slice.start:
            open_slice = slice(open_slice.start, kv_slice.stop)
            continue
        if open_slice is not None:
            yield open_slice
        open_slice = kv_slice
    if open_slice is not None:
        yield open_slice


def _ascending(parts: Sequence[LocalChunk]) -> bool:
    """Whether rows are in the order of their positions: then each sees those before it."""
    return all(before.span.stop <= after.span.start for before, after in pairwise(parts))


@dataclass(frozen=True)
class RingPlan:
    """One step's rounds.

    Args:
        rids: sequences whose history takes part in the ring.
    """

    step: PrefillStep
    sequence_ids: Set[int]

    @property
    def size(self) -> int:
        """Members, and rounds."""
        return len(self.step.group)

    @cached_property
    def parts(self) -> tuple[tuple[tuple[LocalChunk, ...], ...], ...]:
        """By member and piece, what it computes of the piece."""
        return tuple(self._parts_of(member) for member in range(self.size))

    def _parts_of(self, member: int) -> tuple[tuple[LocalChunk, ...], ...]:
        parts: dict[int, list[LocalChunk]] = {id(chunk): [] for chunk in self.step.chunks}
        for part in computed_by(self.step, member):
            parts[id(part.chunk)].append(part)
        return tuple(tuple(parts[id(chunk)]) for chunk in self.step.chunks)

    def rows_of(self, member: int) -> int:
        """That it computes."""
        return self.step.bounds[member + 1] - self.step.bounds[member]

    def chunk_rows(self, member: int) -> tuple[range, ...]:
        """By piece, which of a member's rows are the piece's; they are neighbours."""
        return tuple(
            range(parts[0].rows.start, parts[-1].rows.stop) if parts else range(0)
            for parts in self.parts[member]
        )

    @cached_property
    def history(self) -> tuple[Mapping[int, int], ...]:
        """By member, the tokens that it holds of each piece's history that takes part."""
        return tuple(
            {
                index: resident
                for index, chunk in enumerate(self.step.chunks)
                if chunk.sequence_id in self.sequence_ids
                and (resident := resident_tokens(chunk, instance))
            }
            for instance in self.step.group
        )

    @cached_property
    def longest_rows(self) -> int:
        """Of any member."""
        return max(map(self.rows_of, range(self.size)))

    @cached_property
    def longest_share(self) -> int:
        """Tokens whose keys a member has, history among them, of the one with the most."""
        resident = (sum(history.values()) for history in self.history)
        return max(self.rows_of(member) + tokens for member, tokens in enumerate(resident))

    @cached_property
    def _extents(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """By member and piece: rows, the first position and the one behind the last."""
        return tuple(tuple(map(_extent, chunks)) for chunks in self.parts)

    def sizes(self, asker: int, holder: int) -> Iterator[tuple[int, int]]:
        """Of each piece of which a member's queries see any keys of a member's: how many queries,
        and keys, of new tokens and of history. Cheaper than blocks, for all pairs of members."""
        pairs = zip(self._extents[asker], self._extents[holder], strict=True)
        for (rows, _, stop), (keys, first, _) in pairs:
            if rows and keys and first < stop:
                yield rows, keys
        for index, tokens in self.history[holder].items():
            if rows := self._extents[asker][index][0]:
                yield rows, tokens

    def blocks(self, asker: int, holder: int) -> dict[int, list[RingBlock]]:
        """By piece, what a member's queries see of a member's keys."""
        if (asker, holder) not in self._blocks:
            rows = self.chunk_rows(asker)
            found = {index: self._new(index, asker, holder) for index in range(len(rows))}
            for index, tokens in self.history[holder].items():
                if rows[index]:
                    queries = slice(rows[index].start, rows[index].stop)
                    found[index].append(RingBlock(queries, slice(0, tokens), history=True))
            self._blocks[asker, holder] = {index: it for index, it in found.items() if it}
        return self._blocks[asker, holder]

    @cached_property
    def _blocks(self) -> dict[tuple[int, int], dict[int, list[RingBlock]]]:
        return {}

    def _new(self, chunk: int, asker: int, holder: int) -> list[RingBlock]:
        queries, keys = self.parts[asker][chunk], self.parts[holder][chunk]
        return seen_blocks(queries, keys) if queries and keys else []

    def answered(self, asker: int, holder: int) -> dict[int, list[slice]]:
        """By piece, the rows of the asker that see any key of the holder, ascending."""
        return {
            index: _union([block.queries for block in blocks])
            for index, blocks in self.blocks(asker, holder).items()
        }


def _extent(parts: tuple[LocalChunk, ...]) -> tuple[int, int, int]:
    if not parts:
        return 0, 0, 0
    rows = parts[-1].rows.stop - parts[0].rows.start
    return rows, min(part.span.start for part in parts), max(part.span.stop for part in parts)


def resident_tokens(chunk: PrefillChunk, instance: int) -> int:
    """Tokens of a piece's history on an instance."""
    return sum(kv_slice.span.length for kv_slice in chunk.history if kv_slice.instance == instance)


def with_history(step: PrefillStep) -> set[int]:
    """Sequences that have some."""
    return {chunk.sequence_id for chunk in step.chunks if chunk.history}


def going_round(step: PrefillStep, *, heads: int, kv_heads: int, dim: int) -> Set[int]:
    """Sequences whose history is fewer numbers as keys and values on their way round, padded to the
    longest share, than as queries that ask for it, and outputs and LSEs in return.

    Args:
        heads, kv_heads: of a rank.
    """
    found = with_history(step)
    parts = RingPlan(step, found)
    rows = [parts.chunk_rows(member) for member in range(parts.size)]
    for index, chunk in enumerate(step.chunks):
        resident = [history.get(index, 0) for history in parts.history]
        around = parts.size * (parts.size - 1) * max(resident) * 2 * kv_heads * dim
        asking = _asked_rows([len(row[index]) for row in rows], resident) * heads * (2 * dim + 1)
        if around >= asking:
            found.discard(chunk.sequence_id)
    return found


def _asked_rows(rows: Sequence[int], resident: Sequence[int]) -> int:
    """Rows that travel to others if everyone asks everyone who holds anything."""
    return sum(
        count * sum(bool(tokens) for holder, tokens in enumerate(resident) if holder != asker)
        for asker, count in enumerate(rows)
    )


def _union(slices: list[slice]) -> list[slice]:
    """Ascending and disjoint, neighbours as one."""
    joined: list[slice] = []
    for it in sorted(slices, key=lambda it: int(it.start)):
        if joined and it.start <= joined[-1].stop:
            joined[-1] = slice(joined[-1].start, max(joined[-1].stop, it.stop))
        else:
            joined.append(it)
    return joined
