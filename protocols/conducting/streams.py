"""The streams of a gang: their rows, the groups these form, their leases, and how long an iteration
takes.

A row concerns some ranks of its stream: who draws its tokens, holds its KV, keeps what is to come.
Rows that share a rank are iterated together, and ranks of which no row asks anything are left
alone. So the rows of a stream fall into *groups* that share no rank, LoongServe's decode groups:
they follow from the rows, merge when a row joins that concerns two, and part when it has left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

LEASES = 2
"""Of a rank that may be outstanding."""
LEASE_NS = 20_000_000
"""A lease's length, where no step waits for it: what a row that joins has to wait, twice."""
LEASE_ITERATIONS = 8
REMEMBERED = 4096
"""Sequences that were given up, whose joining may still come."""


@dataclass(slots=True, eq=False)
class Row:
    """A sequence in a stream."""

    owner: int
    ranks: tuple[int, ...]
    """That take part in its iterations."""
    since: int = 0
    """Number of the entry by which it joined; 0 before."""


@dataclass(slots=True, eq=False)
class Lease:
    """Iterations that are in the log and not over."""

    n: int
    ranks: tuple[int, ...]
    masters: tuple[int, ...]
    """Those of the ranks that report it."""
    unreported: int
    """How many of them still have to."""
    longest_ns: int = 0


@dataclass(slots=True, eq=False)
class Group:
    """Ranks that iterate together, and rows that concern no others."""

    stream: Stream
    ranks: tuple[int, ...]

    @property
    def served(self) -> int:
        """Number of the newest lease on its ranks; 0 before the first."""
        return max(self.stream.served[rank] for rank in self.ranks)

    @property
    def leases(self) -> int:
        """Outstanding ones, on the one of its ranks that has most."""
        return max(self.stream.outstanding[rank] for rank in self.ranks)

    def long_lease(self) -> int:
        """Iterations of a lease that no step waits for."""
        iteration_ns = max(self.stream.iteration_ns[rank] for rank in self.ranks)
        if not iteration_ns:
            return 1
        return max(1, min(LEASE_ITERATIONS, LEASE_NS // iteration_ns))


@dataclass(slots=True, eq=False)
class Stream:
    """One stream. Rows are those that the next lease will have."""

    id: int
    ranks: tuple[int, ...]
    masters: tuple[int, ...]
    """Those of the ranks that report leases."""
    version: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    budget: int = 0
    """Tokens that an iteration may compute, with rows that prefill."""
    joined: dict[int, int | None] = field(default_factory=dict)
    """The first token of each row that is not in the log yet; None for one that rides."""
    left: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Sequences that are gone, which the log does not say yet, and the ranks that they concerned;
    not all were rows."""
    leases: dict[int, Lease] = field(default_factory=dict)
    """Outstanding ones by their number in the log."""
    served: dict[int, int] = field(default_factory=dict)
    """By rank: number of its newest lease; 0 before the first."""
    outstanding: dict[int, int] = field(default_factory=dict)
    """By rank: leases that are not over."""
    iteration_ns: dict[int, int] = field(default_factory=dict)
    """By rank: measured; 0 before the first report."""
    groups: tuple[Group, ...] = ()
    group_of: dict[int, Group] = field(default_factory=dict)
    """By rank, of those that rows concern."""
    alike: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Rows by the ranks that they concern."""

    @property
    def changed(self) -> bool:
        """Whether the log has other rows."""
        return bool(self.joined or self.left)

    @property
    def stranded(self) -> bool:
        """Whether some ranks have to be told of sequences that are gone, and no lease of theirs
        will come."""
        return any(not self.group_of.keys() >= set(ranks) for ranks in self.left.values())

    def lease(self, seq: int, n: int, group: Group) -> None:
        """A lease of `n` iterations is in the log."""
        masters = tuple(it for it in self.masters if it in group.ranks) or group.ranks[:1]
        self.leases[seq] = Lease(n, group.ranks, masters, len(masters))
        for rank in group.ranks:
            self.served[rank] = seq
            self.outstanding[rank] += 1

    def measured(self, seq: int, nanoseconds: int) -> None:
        """A master has executed a lease, which is over when all have: masters that need nothing of
        each other would run ahead by as much as they are quicker, and whatever makes them wait for
        each other then, a row of both or a step, would wait for all of that."""
        lease = self.leases[seq]
        lease.longest_ns = max(lease.longest_ns, nanoseconds)
        lease.unreported -= 1
        if not lease.unreported:
            del self.leases[seq]
            latest = max(1, lease.longest_ns // lease.n)
            for rank in lease.ranks:
                self.outstanding[rank] -= 1
                before = self.iteration_ns[rank]
                self.iteration_ns[rank] = (3 * before + latest) // 4 if before else latest

    def count(self, ranks: tuple[int, ...], change: int) -> None:
        """A row has come, or gone, that concerns these ranks."""
        before = self.alike.get(ranks, 0)
        if before + change:
            self.alike[ranks] = before + change
        else:
            del self.alike[ranks]
        if not before or not before + change:
            self._regroup()

    def _regroup(self) -> None:
        merged: list[set[int]] = []
        for ranks in self.alike:
            apart = [it for it in merged if it.isdisjoint(ranks)]
            joined = set(ranks).union(*(it for it in merged if not it.isdisjoint(ranks)))
            merged = [*apart, joined]
        self.groups = tuple(Group(self, tuple(sorted(it))) for it in merged)
        self.group_of = {rank: group for group in self.groups for rank in group.ranks}


class Streams:
    """All streams, and where each sequence is a row."""

    def __init__(self, ranks: int) -> None:
        self._all: dict[int, Stream] = {}
        self._on: list[list[Stream]] = [[] for _ in range(ranks)]
        self._of_sequence: dict[int, Stream] = {}
        self._given_up: dict[int, None] = {}

    def open(self, stream: int, ranks: tuple[int, ...], masters: tuple[int, ...]) -> None:
        """A stream without rows."""
        assert stream not in self._all, f"stream {stream} is open"
        assert ranks
        assert len(set(ranks)) == len(ranks)
        assert masters
        assert set(masters) <= set(ranks)
        opened = self._all[stream] = Stream(stream, ranks, masters)
        opened.served, opened.outstanding = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
        opened.iteration_ns = dict.fromkeys(ranks, 0)
        for rank in ranks:
            self._on[rank].append(opened)

    def get(self, stream: int) -> Stream | None:
        """A stream that was opened."""
        return self._all.get(stream)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._all.values())

    @property
    def groups(self) -> Iterator[Group]:
        """Of all streams."""
        return (group for stream in self._all.values() for group in stream.groups)

    def live(self, rank: int) -> Iterator[Group]:
        """Groups with a rank, one of each stream at most."""
        return (stream.group_of[rank] for stream in self._on[rank] if rank in stream.group_of)

    def join(
        self,
        stream: int,
        sequence: int,
        token: int | None,
        owner: int,
        budget: int,
        ranks: Iterable[int],
    ) -> None:
        """A sequence becomes a row, unless it was given up before."""
        if sequence in self._given_up:
            return
        assert sequence not in self._of_sequence, f"sequence {sequence} is a row"
        joined = self._all[stream]
        concerned = tuple(sorted(ranks)) or tuple(sorted(joined.ranks))
        assert set(concerned) <= set(joined.ranks), "a row of ranks that are not of its stream"
        joined.budget = budget or joined.budget
        joined.rows[sequence] = Row(owner, concerned)
        joined.joined[sequence] = token
        joined.count(concerned, 1)
        self._of_sequence[sequence] = joined

    def of_row(self, sequence: int) -> Stream | None:
        """The stream in which a sequence is a row, if it is one."""
        return self._of_sequence.get(sequence)

    def place(self, sequence: int, ranks: Iterable[int]) -> Stream:
        """A row concerns other ranks from now on: its KV has moved. Returns its stream."""
        stream = self._of_sequence[sequence]
        row = stream.rows[sequence]
        before, row.ranks = row.ranks, tuple(sorted(ranks))
        assert set(row.ranks) <= set(stream.ranks), "a row of ranks that are not of its stream"
        stream.count(row.ranks, 1)
        stream.count(before, -1)
        return stream

    def leave(self, sequence: int) -> None:
        """A sequence is no row any more, if it was one."""
        stream = self._of_sequence.pop(sequence, None)
        if stream is not None:
            row = stream.rows.pop(sequence)
            stream.joined.pop(sequence, None)
            stream.count(row.ranks, -1)
            stream.left[sequence] = row.ranks

    def forget(self, sequence: int) -> None:
        """A sequence is given up, be it a row or only prepared to become one: ranks hold slots for
        it in either case, and give them back when the log says so."""
        self._given_up[sequence] = None
        if len(self._given_up) > REMEMBERED:
            del self._given_up[next(iter(self._given_up))]
        if sequence in self._of_sequence:
            self.leave(sequence)
        else:
            for stream in self:
                stream.left.setdefault(sequence, stream.ranks)

    def finish(self, stream: Stream, sequence: int, seq: int) -> bool:
        """A row was finished by a lease; whether it leaves. It may have left, and even have joined
        again, since."""
        row = stream.rows.get(sequence)
        if row is None or not 0 < row.since < seq:
            return False
        self.leave(sequence)
        return True
