"""The streams of a gang: their rows, the leases that they have, and how long an iteration takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

LEASES = 2
"""Of a stream that may be outstanding."""
LEASE_NS = 20_000_000
"""A lease's length, where no step waits for it: what a row that joins has to wait, twice."""
LEASE_ITERATIONS = 8
REMEMBERED = 4096
"""Sequences that were given up, whose joining may still come."""


@dataclass(slots=True, eq=False)
class Row:
    """A sequence in a stream."""

    owner: int
    since: int = 0
    """Number of the entry by which it joined; 0 before."""


@dataclass(slots=True, eq=False)
class Lease:
    """Iterations that are in the log and not over."""

    n: int
    unreported: int
    """Masters that still have to say that they are done."""
    longest_ns: int = 0


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
    left: list[int] = field(default_factory=list)
    """Sequences that are gone, which the log does not say yet; not all were rows."""
    leases: dict[int, Lease] = field(default_factory=dict)
    """Outstanding ones by their number in the log."""
    served: int = 0
    """Number of its newest lease; 0 before the first."""
    iteration_ns: int = 0
    """Measured; 0 before the first report."""

    @property
    def changed(self) -> bool:
        """Whether the log has other rows."""
        return bool(self.joined or self.left)

    def long_lease(self) -> int:
        """Iterations of a lease that no step waits for."""
        if not self.iteration_ns:
            return 1
        return max(1, min(LEASE_ITERATIONS, LEASE_NS // self.iteration_ns))

    def lease(self, seq: int, n: int) -> None:
        """A lease of `n` iterations is in the log."""
        self.served = seq
        self.leases[seq] = Lease(n, len(self.masters))

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
            self.iteration_ns = (
                (3 * self.iteration_ns + latest) // 4 if self.iteration_ns else latest
            )


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
        self._all[stream] = Stream(stream, ranks, masters)
        for rank in ranks:
            self._on[rank].append(self._all[stream])

    def get(self, stream: int) -> Stream | None:
        """A stream that was opened."""
        return self._all.get(stream)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._all.values())

    def live(self, rank: int) -> Iterator[Stream]:
        """Streams with rows on a rank."""
        return (stream for stream in self._on[rank] if stream.rows)

    def join(self, stream: int, sequence: int, token: int | None, owner: int, budget: int) -> None:
        """A sequence becomes a row, unless it was given up before."""
        if sequence in self._given_up:
            return
        assert sequence not in self._of_sequence, f"sequence {sequence} is a row"
        joined = self._all[stream]
        joined.budget = budget or joined.budget
        joined.rows[sequence] = Row(owner)
        joined.joined[sequence] = token
        self._of_sequence[sequence] = joined

    def leave(self, sequence: int) -> None:
        """A sequence is no row any more, if it was one."""
        stream = self._of_sequence.pop(sequence, None)
        if stream is not None:
            del stream.rows[sequence]
            stream.joined.pop(sequence, None)
            stream.left.append(sequence)

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
                stream.left.append(sequence)

    def finish(self, stream: Stream, sequence: int, seq: int) -> None:
        """A row was finished by a lease. It may have left, and even have joined again, since."""
        row = stream.rows.get(sequence)
        if row is not None and 0 < row.since < seq:
            self.leave(sequence)
