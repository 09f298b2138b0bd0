"""What each member of a ring computes with each other's share, worked out from the step alone.

The k-th member has in round j the share of member k - j: its keys and values (`ring_kv`) or its
queries (`ring_q`). Numbers of parts are derived from the same plan (`parts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from csps.actors.layout import LocalPiece, computed_by
from csps.actors.strategies.ring_blocks import RingBlock, seen_blocks
from csps.protocols.prefill_job import PrefillJob, PrefillPiece


@dataclass(frozen=True)
class RingPlan:
    """One step's rounds.

    Args:
        rids: sequences whose history takes part in the ring.
    """

    job: PrefillJob
    rids: Set[int]

    @property
    def size(self) -> int:
        """Members, and rounds."""
        return len(self.job.group)

    @cached_property
    def parts(self) -> tuple[tuple[tuple[LocalPiece, ...], ...], ...]:
        """By member and piece, what it computes of the piece."""
        return tuple(self._parts_of(member) for member in range(self.size))

    def _parts_of(self, member: int) -> tuple[tuple[LocalPiece, ...], ...]:
        parts: dict[int, list[LocalPiece]] = {id(piece): [] for piece in self.job.pieces}
        for part in computed_by(self.job, member):
            parts[id(part.piece)].append(part)
        return tuple(tuple(parts[id(piece)]) for piece in self.job.pieces)

    def rows_of(self, member: int) -> int:
        """That it computes."""
        return self.job.bounds[member + 1] - self.job.bounds[member]

    def piece_rows(self, member: int) -> tuple[range, ...]:
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
                index: held
                for index, piece in enumerate(self.job.pieces)
                if piece.rid in self.rids and (held := held_of(piece, instance))
            }
            for instance in self.job.group
        )

    @cached_property
    def longest_rows(self) -> int:
        """Of any member."""
        return max(map(self.rows_of, range(self.size)))

    @cached_property
    def longest_share(self) -> int:
        """Tokens whose keys a member has, history among them, of the one with the most."""
        held = (sum(history.values()) for history in self.history)
        return max(self.rows_of(member) + tokens for member, tokens in enumerate(held))

    @cached_property
    def _extents(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """By member and piece: rows, the first position and the one behind the last."""
        return tuple(tuple(map(_extent, pieces)) for pieces in self.parts)

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
            rows = self.piece_rows(asker)
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

    def _new(self, piece: int, asker: int, holder: int) -> list[RingBlock]:
        queries, keys = self.parts[asker][piece], self.parts[holder][piece]
        return seen_blocks(queries, keys) if queries and keys else []

    def answered(self, asker: int, holder: int) -> dict[int, list[slice]]:
        """By piece, the rows of the asker that see any key of the holder, ascending."""
        return {
            index: _union([block.queries for block in blocks])
            for index, blocks in self.blocks(asker, holder).items()
        }


def _extent(parts: tuple[LocalPiece, ...]) -> tuple[int, int, int]:
    if not parts:
        return 0, 0, 0
    rows = parts[-1].rows.stop - parts[0].rows.start
    return rows, min(it.span.start for it in parts), max(it.span.stop for it in parts)


def held_of(piece: PrefillPiece, instance: int) -> int:
    """Tokens of a piece's history on an instance."""
    return sum(it.span.length for it in piece.history if it.instance == instance)


def with_history(job: PrefillJob) -> set[int]:
    """Sequences that have some."""
    return {piece.rid for piece in job.pieces if piece.history}


def going_round(job: PrefillJob, *, heads: int, kv_heads: int, dim: int) -> Set[int]:
    """Sequences whose history is fewer numbers as keys and values on their way round, padded to the
    longest share, than as queries that ask for it, and outputs and LSEs in return.

    Args:
        heads, kv_heads: of a rank.
    """
    found = with_history(job)
    parts = RingPlan(job, found)
    rows = [parts.piece_rows(member) for member in range(parts.size)]
    for index, piece in enumerate(job.pieces):
        held = [history.get(index, 0) for history in parts.history]
        around = parts.size * (parts.size - 1) * max(held) * 2 * kv_heads * dim
        asking = _asked_rows([len(it[index]) for it in rows], held) * heads * (2 * dim + 1)
        if around >= asking:
            found.discard(piece.rid)
    return found


def _asked_rows(rows: Sequence[int], held: Sequence[int]) -> int:
    """Rows that travel to others if everyone asks everyone who holds anything."""
    return sum(
        count * sum(bool(tokens) for holder, tokens in enumerate(held) if holder != asker)
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
