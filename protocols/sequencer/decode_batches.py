"""What an iteration of a stream computes: decode rows and pieces of prompts within a budget.

Sarathi-Serve's batching (Alg. 3) on every master: each of its rows that decodes computes its one
token, whatever the budget. What is left of the budget goes to the prompts that have begun, the
oldest first, and then to those that have not. A long prompt so delays nobody's next token by more
than the budget, and no token is wasted on waiting for a prompt to end.

All ranks of a gang, paced ranks and the simulator fill an iteration by this one function.

The streams of a gang: their rows, the groups these form, their leases, and how long an iteration
takes.

A row concerns some ranks of its stream: who draws its tokens, holds its KV, keeps what is to come.
Rows that share a rank are iterated together, and ranks of which no row asks anything are left
alone. So the rows of a stream fall into *groups* that share no rank, LoongServe's decode groups:
they follow from the rows, merge when a row joins that concerns two, and part when it has left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class SequenceCursor(NamedTuple):
    """How far a row of a stream is. Positions are those of its sequence."""

    next: int
    """The first position that is not computed."""
    prompt: int
    """Positions before this one are given. Who computes the last of them draws the first token."""
    stop: int
    """No position from here on is computed: the last token is drawn and not embedded."""
    master: int = 0
    """The instance that computes them. Masters work side by side, each within the budget."""
    first: int = 0
    """The position that it begins at; of those before, there is KV already."""


def chunk_lengths(rows: Sequence[SequenceCursor], budget: int) -> list[int]:
    """How many positions each row computes in the next iteration.

    Args:
        rows: in order of joining.
        budget: tokens of an iteration on each master. Rows that decode use it up first, and may
            exceed it.

    Returns:
        Lengths in the order of the rows: 1 for a row that decodes, 0 for one that has computed all
        or has to wait, and the length of its next piece for one that prefills.
    """
    lengths = [int(it.prompt <= it.next < it.stop) for it in rows]
    left = dict.fromkeys((it.master for it in rows), budget)
    for row, length in zip(rows, lengths, strict=True):
        left[row.master] -= length
    begun = [index for index, it in enumerate(rows) if it.first < it.next < it.prompt]
    new = [index for index, it in enumerate(rows) if it.first == it.next < it.prompt]
    for index in (*begun, *new):
        row = rows[index]
        lengths[index] = max(0, min(row.prompt - row.next, left[row.master]))
        left[row.master] -= lengths[index]
    return lengths


GRANTS = 2
"""Of a rank that may be outstanding."""
GRANT_NS = 20_000_000
"""A lease's length, where no step waits for it: what a row that joins has to wait, twice."""
GRANT_ITERATIONS = 8
REMEMBERED = 4096
"""Sequences that were given up, whose joining may still come."""


@dataclass(slots=True, eq=False)
class BatchMember:
    """A sequence in a stream."""

    owner: int
    ranks: tuple[int, ...]
    """That take part in its iterations."""
    joined_seq: int = 0
    """Number of the entry by which it joined; 0 before."""


@dataclass(slots=True, eq=False)
class DecodeGrant:
    """Iterations that are in the log and not over."""

    iterations: int
    ranks: tuple[int, ...]
    masters: tuple[int, ...]
    """Those of the ranks that report it."""
    unreported: int
    """How many of them still have to."""
    longest_ns: int = 0


@dataclass(slots=True, eq=False)
class GrantGroup:
    """Ranks that iterate together, and rows that concern no others."""

    batch: SequencedBatch
    ranks: tuple[int, ...]

    @property
    def served(self) -> int:
        """Number of the newest lease on its ranks; 0 before the first."""
        return max(self.batch.served[rank] for rank in self.ranks)

    @property
    def grants(self) -> int:
        """Outstanding ones, on the one of its ranks that has most."""
        return max(self.batch.outstanding[rank] for rank in self.ranks)

    def long_grant(self) -> int:
        """Iterations of a lease that no step waits for."""
        iteration_ns = max(self.batch.iteration_ns[rank] for rank in self.ranks)
        if not iteration_ns:
            return 1
        return max(1, min(GRANT_ITERATIONS, GRANT_NS // iteration_ns))


@dataclass(slots=True, eq=False)
class SequencedBatch:
    """One stream. Rows are those that the next lease will have."""

    id: int
    ranks: tuple[int, ...]
    masters: tuple[int, ...]
    """Those of the ranks that report leases."""
    version: int = 0
    members: dict[int, BatchMember] = field(default_factory=dict)
    budget: int = 0
    """Tokens that an iteration may compute, with rows that prefill."""
    joined: dict[int, int | None] = field(default_factory=dict)
    """The first token of each row that is not in the log yet; None for one that rides."""
    left: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Sequences that are gone, which the log does not say yet, and the ranks that they concerned;
    not all were rows."""
    grants: dict[int, DecodeGrant] = field(default_factory=dict)
    """Outstanding ones by their number in the log."""
    served: dict[int, int] = field(default_factory=dict)
    """By rank: number of its newest lease; 0 before the first."""
    outstanding: dict[int, int] = field(default_factory=dict)
    """By rank: leases that are not over."""
    iteration_ns: dict[int, int] = field(default_factory=dict)
    """By rank: measured; 0 before the first report."""
    groups: tuple[GrantGroup, ...] = ()
    group_of: dict[int, GrantGroup] = field(default_factory=dict)
    """By rank, of those that rows concern."""
    members_by_ranks: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Rows by the ranks that they concern."""

    @property
    def changed(self) -> bool:
        """Whether the log has other rows."""
        return bool(self.joined or self.left)

    @property
    def needs_notice(self) -> bool:
        """Whether some ranks have to be told of sequences that are gone, and no lease of theirs
        will come."""
        return any(not self.group_of.keys() >= set(ranks) for ranks in self.left.values())

    def grant(self, seq: int, iterations: int, group: GrantGroup) -> None:
        """A lease of `iterations` iterations is in the log."""
        masters = (
            tuple(master for master in self.masters if master in group.ranks) or group.ranks[:1]
        )
        self.grants[seq] = DecodeGrant(iterations, group.ranks, masters, len(masters))
        for rank in group.ranks:
            self.served[rank] = seq
            self.outstanding[rank] += 1

    def measured(self, seq: int, nanoseconds: int) -> None:
        """A master has executed a lease, which is over when all have: masters that need nothing of
        each other would run ahead by as much as they are quicker, and whatever makes them wait for
        each other then, a row of both or a step, would wait for all of that."""
        grant = self.grants[seq]
        grant.longest_ns = max(grant.longest_ns, nanoseconds)
        grant.unreported -= 1
        if not grant.unreported:
            del self.grants[seq]
            latest = max(1, grant.longest_ns // grant.iterations)
            for rank in grant.ranks:
                self.outstanding[rank] -= 1
                before = self.iteration_ns[rank]
                self.iteration_ns[rank] = (3 * before + latest) // 4 if before else latest

    def count(self, ranks: tuple[int, ...], change: int) -> None:
        """A row has come, or gone, that concerns these ranks."""
        before = self.members_by_ranks.get(ranks, 0)
        if before + change:
            self.members_by_ranks[ranks] = before + change
        else:
            del self.members_by_ranks[ranks]
        if not before or not before + change:
            self._regroup()

    def _regroup(self) -> None:
        merged: list[set[int]] = []
        for ranks in self.members_by_ranks:
            apart = [it for it in merged if it.isdisjoint(ranks)]
            joined = set(ranks).union(*(it for it in merged if not it.isdisjoint(ranks)))
            merged = [*apart, joined]
        self.groups = tuple(GrantGroup(self, tuple(sorted(it))) for it in merged)
        self.group_of = {rank: group for group in self.groups for rank in group.ranks}


class SequencedBatches:
    """All streams, and where each sequence is a row."""

    def __init__(self, ranks: int) -> None:
        self._all: dict[int, SequencedBatch] = {}
        self._on: list[list[SequencedBatch]] = [[] for _ in range(ranks)]
        self._of_sequence: dict[int, SequencedBatch] = {}
        self._discarded: dict[int, None] = {}

    def open(self, batch: int, ranks: tuple[int, ...], masters: tuple[int, ...]) -> None:
        """A stream without rows."""
        assert batch not in self._all, f"stream {batch} is open"
        assert ranks
        assert len(set(ranks)) == len(ranks)
        assert masters
        assert set(masters) <= set(ranks)
        opened = self._all[batch] = SequencedBatch(batch, ranks, masters)
        opened.served, opened.outstanding = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
        opened.iteration_ns = dict.fromkeys(ranks, 0)
        for rank in ranks:
            self._on[rank].append(opened)

    def get(self, batch: int) -> SequencedBatch | None:
        """A stream that was opened."""
        return self._all.get(batch)

    def __iter__(self) -> Iterator[SequencedBatch]:
        return iter(self._all.values())

    @property
    def groups(self) -> Iterator[GrantGroup]:
        """Of all streams."""
        return (group for batch in self._all.values() for group in batch.groups)

    def groups_on(self, rank: int) -> Iterator[GrantGroup]:
        """Groups with a rank, one of each stream at most."""
        return (batch.group_of[rank] for batch in self._on[rank] if rank in batch.group_of)

    def join(
        self,
        batch: int,
        sequence: int,
        token: int | None,
        owner: int,
        budget: int,
        ranks: Iterable[int],
    ) -> None:
        """A sequence becomes a row, unless it was given up before."""
        if sequence in self._discarded:
            return
        assert sequence not in self._of_sequence, f"sequence {sequence} is a row"
        joined = self._all[batch]
        concerned = tuple(sorted(ranks)) or tuple(sorted(joined.ranks))
        assert set(concerned) <= set(joined.ranks), "a row of ranks that are not of its stream"
        joined.budget = budget or joined.budget
        joined.members[sequence] = BatchMember(owner, concerned)
        joined.joined[sequence] = token
        joined.count(concerned, 1)
        self._of_sequence[sequence] = joined

    def batch_of(self, sequence: int) -> SequencedBatch | None:
        """The stream in which a sequence is a row, if it is one."""
        return self._of_sequence.get(sequence)

    def relocate(self, sequence: int, ranks: Iterable[int]) -> SequencedBatch:
        """A row concerns other ranks from now on: its KV has moved. Returns its stream."""
        batch = self._of_sequence[sequence]
        member = batch.members[sequence]
        before, member.ranks = member.ranks, tuple(sorted(ranks))
        assert set(member.ranks) <= set(batch.ranks), "a row of ranks that are not of its stream"
        batch.count(member.ranks, 1)
        batch.count(before, -1)
        return batch

    def leave(self, sequence: int) -> None:
        """A sequence is no row any more, if it was one."""
        batch = self._of_sequence.pop(sequence, None)
        if batch is not None:
            member = batch.members.pop(sequence)
            batch.joined.pop(sequence, None)
            batch.count(member.ranks, -1)
            batch.left[sequence] = member.ranks

    def discard(self, sequence: int) -> None:
        """A sequence is given up, be it a row or only prepared to become one: ranks hold slots for
        it in either case, and give them back when the log says so."""
        self._discarded[sequence] = None
        if len(self._discarded) > REMEMBERED:
            del self._discarded[next(iter(self._discarded))]
        if sequence in self._of_sequence:
            self.leave(sequence)
        else:
            for batch in self:
                batch.left.setdefault(sequence, batch.ranks)

    def finish(self, batch: SequencedBatch, sequence: int, seq: int) -> bool:
        """A row was finished by a lease; whether it leaves. It may have left, and even have joined
        again, since."""
        member = batch.members.get(sequence)
        if member is None or not 0 < member.joined_seq < seq:
            return False
        self.leave(sequence)
        return True
