"""The attention blocks of each pair of ring members, computed from the step alone.

In round j the k-th member has the shard of member k - j: its keys and values (`ring_kv`) or its
queries (`ring_q`). `step_points` derives the yield points from the same plan.

The rows of a chunk are spans on the members (contiguous, zigzag, striped or any other). The ends of
two spans tell which keys of one the queries of the other see: none, all, or a staircase. Keys that
are not seen are in no block and are not computed (CP §3.5). Adjacent blocks are joined, to make as
few calls of attention as possible.
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
    """Adjacent queries of one member that attend to adjacent keys of one member."""

    queries: slice
    """Rows of the asker."""
    keys: slice
    """Rows of the holder, or tokens of its history of the chunk."""
    q_positions: range | None = None
    k_positions: range | None = None
    """Numbers that compare like the positions; both None if every query sees every key."""
    history: bool = False

    @property
    def rows(self) -> int:
        """Number of queries."""
        return int(self.queries.stop - self.queries.start)

    @property
    def key_count(self) -> int:
        """Number of keys."""
        return int(self.keys.stop - self.keys.start)


@dataclass(frozen=True)
class RingPlan:
    """The rounds of one step.

    Args:
        sequence_ids: sequences whose history takes part in the ring.
    """

    step: PrefillStep
    sequence_ids: Set[int]

    @property
    def size(self) -> int:
        """Number of members, and of rounds."""
        return len(self.step.group)

    @cached_property
    def parts(self) -> tuple[tuple[tuple[LocalChunk, ...], ...], ...]:
        """Spans of each chunk that each member computes, by member and chunk."""
        return tuple(self._parts_of(member) for member in range(self.size))

    def _parts_of(self, member: int) -> tuple[tuple[LocalChunk, ...], ...]:
        parts: dict[int, list[LocalChunk]] = {id(chunk): [] for chunk in self.step.chunks}
        for part in computed_by(self.step, member):
            parts[id(part.chunk)].append(part)
        return tuple(tuple(parts[id(chunk)]) for chunk in self.step.chunks)

    def rows_of(self, member: int) -> int:
        """Return how many rows a member computes."""
        return self.step.bounds[member + 1] - self.step.bounds[member]

    def chunk_rows(self, member: int) -> tuple[range, ...]:
        """Return the rows of a member that belong to each chunk; these are adjacent."""
        return tuple(
            range(parts[0].rows.start, parts[-1].rows.stop) if parts else range(0)
            for parts in self.parts[member]
        )

    @cached_property
    def history(self) -> tuple[Mapping[int, int], ...]:
        """Number of resident history tokens of each chunk that takes part, by member."""
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
        """Number of rows of the member with the most."""
        return max(map(self.rows_of, range(self.size)))

    @cached_property
    def longest_shard(self) -> int:
        """Number of keys, with history, of the member with the most."""
        resident = (sum(history.values()) for history in self.history)
        return max(self.rows_of(member) + tokens for member, tokens in enumerate(resident))

    @cached_property
    def _extents(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """(rows, first position, end position) by member and chunk."""
        return tuple(tuple(map(_extent, chunks)) for chunks in self.parts)

    def sizes(self, asker: int, holder: int) -> Iterator[tuple[int, int]]:
        """Yield (queries, keys) of each chunk where the asker sees keys of the holder.

        New tokens and history count separately.
        """
        # Cheaper than `blocks`, because it runs for all pairs of members.
        pairs = zip(self._extents[asker], self._extents[holder], strict=True)
        for (rows, _, stop), (keys, first, _) in pairs:
            if rows and keys and first < stop:
                yield rows, keys
        for index, tokens in self.history[holder].items():
            if rows := self._extents[asker][index][0]:
                yield rows, tokens

    def blocks(self, asker: int, holder: int) -> dict[int, list[RingBlock]]:
        """Return the blocks of the asker's queries and the holder's keys, by chunk."""
        if (asker, holder) not in self._blocks:
            rows = self.chunk_rows(asker)
            found = {index: self._new(index, asker, holder) for index in range(len(rows))}
            for index, tokens in self.history[holder].items():
                if rows[index]:
                    queries = slice(rows[index].start, rows[index].stop)
                    found[index].append(RingBlock(queries, slice(0, tokens), history=True))
            self._blocks[asker, holder] = {
                index: blocks for index, blocks in found.items() if blocks
            }
        return self._blocks[asker, holder]

    @cached_property
    def _blocks(self) -> dict[tuple[int, int], dict[int, list[RingBlock]]]:
        return {}

    def _new(self, chunk: int, asker: int, holder: int) -> list[RingBlock]:
        queries, keys = self.parts[asker][chunk], self.parts[holder][chunk]
        return seen_blocks(queries, keys) if queries and keys else []

    def answered(self, asker: int, holder: int) -> dict[int, list[slice]]:
        """Return the asker's rows that see any key of the holder, ascending, by chunk."""
        return {
            index: _join_sorted([block.queries for block in blocks])
            for index, blocks in self.blocks(asker, holder).items()
        }


def resident_tokens(chunk: PrefillChunk, instance: int) -> int:
    """Return how many tokens of a chunk's history are on an instance."""
    return sum(kv_slice.span.length for kv_slice in chunk.history if kv_slice.instance == instance)


def with_history(step: PrefillStep) -> set[int]:
    """Return the sequences of a step that have history."""
    return {chunk.sequence_id for chunk in step.chunks if chunk.history}


def rotating_history(step: PrefillStep, *, heads: int, kv_heads: int, dim: int) -> Set[int]:
    """Return the sequences for which rotating the history moves less than asking its holders.

    Rotating sends keys and values, padded to the longest shard. Asking sends queries, and outputs
    and LSEs in return.

    Args:
        heads, kv_heads: heads of a rank.
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
    """Return how many rows are sent if every member asks every other holder."""
    return sum(
        count * sum(bool(tokens) for holder, tokens in enumerate(resident) if holder != asker)
        for asker, count in enumerate(rows)
    )


def _extent(parts: tuple[LocalChunk, ...]) -> tuple[int, int, int]:
    if not parts:
        return 0, 0, 0
    rows = parts[-1].rows.stop - parts[0].rows.start
    return rows, min(part.span.start for part in parts), max(part.span.stop for part in parts)


def seen_blocks(asker: Sequence[LocalChunk], holder: Sequence[LocalChunk]) -> list[RingBlock]:
    """Return blocks of one chunk that contain each pair of a query and a key that it sees once.

    Args:
        asker, holder: spans of the chunk on each member, at least one each; the same object if
            both are the same member.
    """
    if asker is holder and _ascending(asker):
        rows = slice(asker[0].rows.start, asker[-1].rows.stop)
        order = range(rows.stop - rows.start)
        return [RingBlock(rows, rows, order, order)]
    whole: dict[tuple[int, int], list[slice]] = {}
    stairs: list[RingBlock] = []
    for queries in asker:
        for keys in holder:
            block = _seen_block(queries, keys)
            if block is not None and block.q_positions is None:
                whole.setdefault((block.queries.start, block.queries.stop), []).append(block.keys)
            elif block is not None:
                stairs.append(block)
    return [*_unmasked_blocks(whole), *stairs]


def _seen_block(queries: LocalChunk, keys: LocalChunk) -> RingBlock | None:
    q, k = queries.span, keys.span
    # Queries from the first key on, and keys up to the last query.
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
    if q.step == k.step:  # consecutive numbers compare like the positions
        ahead = (q.start - k.start) // q.step
        return RingBlock(rows, columns, range(ahead + first, ahead + q.length), range(count))
    return RingBlock(rows, columns, positions, others)


def _unmasked_blocks(keys_of: dict[tuple[int, int], list[slice]]) -> Iterator[RingBlock]:
    """Yield blocks without a mask, with adjacent keys joined and adjacent queries joined."""
    merged = [(slice(*rows), list(_join(keys))) for rows, keys in keys_of.items()]
    index = 0
    while index < len(merged):
        rows, keys = merged[index]
        index += 1
        while (
            index < len(merged) and merged[index][0].start == rows.stop and merged[index][1] == keys
        ):
            rows = slice(rows.start, merged[index][0].stop)
            index += 1
        yield from (RingBlock(rows, key) for key in keys)


def _join(slices: Iterable[slice]) -> Iterator[slice]:
    """Join adjacent slices."""
    open_slice: slice | None = None
    for rows in slices:
        if open_slice is not None and open_slice.stop == rows.start:
            open_slice = slice(open_slice.start, rows.stop)
            continue
        if open_slice is not None:
            yield open_slice
        open_slice = rows
    if open_slice is not None:
        yield open_slice


def _ascending(parts: Sequence[LocalChunk]) -> bool:
    """Return True if rows are in the order of their positions, so each sees those before it."""
    return all(before.span.stop <= after.span.start for before, after in pairwise(parts))


def _join_sorted(slices: list[slice]) -> list[slice]:
    """Return ascending, disjoint slices, with adjacent ones joined."""
    joined: list[slice] = []
    for rows in sorted(slices, key=lambda rows: int(rows.start)):
        if joined and rows.start <= joined[-1].stop:
            joined[-1] = slice(joined[-1].start, max(joined[-1].stop, rows.stop))
        else:
            joined.append(rows)
    return joined
