"""Decode batches of a gang: what an iteration computes, and which ranks iterate which sequences.

`chunk_lengths` is Sarathi-Serve's batching (Alg. 3) on every master: each decoding sequence
computes its one token, and prompt chunks use what is left of the token budget. Ranks, paced ranks
and the simulator all fill iterations by this function.

A sequence needs some ranks of its batch: its master, its KV holders, the holders of KV to come.
Sequences that share a rank are iterated together. So the sequences of a batch form *groups* without
a common rank, LoongServe's decode groups: groups merge when a sequence joins that needs both, and
split when it has left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple


class SequenceCursor(NamedTuple):
    """Progress of a sequence of a batch, in positions of the sequence."""

    next: int
    """First position that is not computed."""
    prompt: int
    """Length of the prompt. Computing position `prompt - 1` samples the first token."""
    stop: int
    """First position that is never computed: the last token is sampled, not embedded."""
    master: int = 0
    """Instance that computes the positions. Each master has the whole budget."""
    first: int = 0
    """First position to compute; the KV of earlier ones is reused."""


def chunk_lengths(rows: Sequence[SequenceCursor], budget: int) -> list[int]:
    """Return how many positions each sequence computes in the next iteration.

    Prompts that have begun come first, in order of joining, then the others. So a long prompt
    delays the next token of other sequences by at most the budget.

    Args:
        rows: cursors in order of joining.
        budget: tokens of an iteration on each master. Decoding sequences use it up first, and may
            exceed it; a finished one uses it until it leaves, because ranks that do not iterate it
            do not know its end.

    Returns:
        A length for each cursor: 1 if the sequence decodes, 0 if it is finished or has to wait, the
        length of its next chunk if it prefills.
    """
    lengths = [int(row.prompt <= row.next < row.stop) for row in rows]
    left = dict.fromkeys((row.master for row in rows), budget)
    for row in rows:
        left[row.master] -= row.prompt <= row.next
    begun = [index for index, row in enumerate(rows) if row.first < row.next < row.prompt]
    new = [index for index, row in enumerate(rows) if row.first == row.next < row.prompt]
    for index in (*begun, *new):
        row = rows[index]
        lengths[index] = max(0, min(row.prompt - row.next, left[row.master]))
        left[row.master] -= lengths[index]
    return lengths


GRANTS = 2
"""Grants of a rank that may be outstanding."""
GRANT_NS = 20_000_000
"""Length of a grant while no step waits for it; a joining sequence waits for up to two of them."""
GRANT_ITERATIONS = 8
REMEMBERED = 4096
"""Cancelled sequences remembered because their join may still come."""


@dataclass(slots=True, eq=False)
class BatchMember:
    """A sequence of a batch."""

    owner: int
    ranks: tuple[int, ...]
    """Ranks that take part in its iterations."""
    piggybacked: bool
    """True if its prompt is computed by the batch."""
    joined_seq: int = 0
    """Number of the log entry by which it joined; 0 before."""


@dataclass(slots=True, eq=False)
class DecodeGrant:
    """Iterations that are in the log and not finished."""

    iterations: int
    ranks: tuple[int, ...]
    masters: tuple[int, ...]
    """Ranks that report the grant."""
    unreported: int
    """Masters that have not reported yet."""
    longest_ns: int = 0


def iterations_of(iteration_ns: int) -> int:
    """Return the iterations of a long grant; an iteration's time is 0 before the first one."""
    fit = GRANT_NS // iteration_ns if iteration_ns else 1
    return fit or 1 if fit < GRANT_ITERATIONS else GRANT_ITERATIONS


def averaged(before_ns: int, latest_ns: int) -> int:
    """Return the average time of an iteration after one more grant."""
    return (3 * before_ns + latest_ns) // 4 if before_ns else latest_ns


@dataclass(slots=True, eq=False)
class GrantGroup:
    """Ranks that iterate together, for sequences that need no other rank."""

    batch: SequencedBatch
    ranks: tuple[int, ...]

    @property
    def served(self) -> int:
        """Number of the newest grant on these ranks; 0 before the first."""
        served = self.batch.served
        if len(self.ranks) == 1:
            return served[self.ranks[0]]
        return max([served[rank] for rank in self.ranks])

    @property
    def grants(self) -> int:
        """Most outstanding grants on one of these ranks."""
        outstanding = self.batch.outstanding
        if len(self.ranks) == 1:  # the usual case, and this is asked often
            return outstanding[self.ranks[0]]
        return max([outstanding[rank] for rank in self.ranks])

    def long_grant(self) -> int:
        """Return the iterations of a grant for which no step waits."""
        return iterations_of(max([self.batch.iteration_ns[rank] for rank in self.ranks]))


@dataclass(slots=True, eq=False)
class SequencedBatch:
    """One decode batch. Its members are those of the next grant."""

    id: int
    ranks: tuple[int, ...]
    masters: tuple[int, ...]
    """Ranks that report grants."""
    version: int = 0
    members: dict[int, BatchMember] = field(default_factory=dict)
    budget: int = 0
    """Tokens that an iteration with prompt chunks may compute."""
    joined: dict[int, int | None] = field(default_factory=dict)
    """First token of each member that is not in the log yet; None for a piggybacked prefill."""
    left: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Sequences that are gone, which the log does not say yet, with the ranks that they needed.
    Some were never members."""
    grants: dict[int, DecodeGrant] = field(default_factory=dict)
    """Outstanding grants by their number in the log."""
    served: dict[int, int] = field(default_factory=dict)
    """Number of the newest grant by rank; 0 before the first."""
    outstanding: dict[int, int] = field(default_factory=dict)
    """Outstanding grants by rank."""
    iteration_ns: dict[int, int] = field(default_factory=dict)
    """Measured time of an iteration by rank; 0 before the first report."""
    groups: tuple[GrantGroup, ...] = ()
    group_of: dict[int, GrantGroup] = field(default_factory=dict)
    """Group by rank, for ranks that members need."""
    members_by_ranks: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Number of members by the ranks that they need."""
    iterated: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Iterations of groups with piggybacked members since the last change, by the group's ranks;
    other ranks do not know of them yet."""

    @property
    def changed(self) -> bool:
        """True if the log does not have the present members."""
        return bool(self.joined or self.left)

    @property
    def needs_notice(self) -> bool:
        """True if some ranks need to learn of departures and will have no further grant."""
        return any(not self.group_of.keys() >= set(ranks) for ranks in self.left.values())

    def grant(self, seq: int, iterations: int, group: GrantGroup) -> None:
        """Record a grant that was appended to the log."""
        masters = (
            tuple(master for master in self.masters if master in group.ranks) or group.ranks[:1]
        )
        self.grants[seq] = DecodeGrant(iterations, group.ranks, masters, len(masters))
        self._count_piggybacked(group, iterations)
        for rank in group.ranks:
            self.served[rank] = seq
            self.outstanding[rank] += 1

    def _count_piggybacked(self, group: GrantGroup, iterations: int) -> None:
        """Count iterations that the other ranks have to be told of."""
        if iterations and len(group.ranks) < len(self.ranks) and self._piggybacks(group):
            self.iterated[group.ranks] = self.iterated.get(group.ranks, 0) + iterations

    def _piggybacks(self, group: GrantGroup) -> bool:
        ranks = set(group.ranks)
        return any(
            member.piggybacked and ranks.issuperset(member.ranks)
            for member in self.members.values()
        )

    def measured(self, seq: int, nanoseconds: int) -> None:
        """Record that a master has executed a grant."""
        grant = self.grants[seq]
        grant.longest_ns = max(grant.longest_ns, nanoseconds)
        grant.unreported -= 1
        # A grant ends when all masters have reported. Otherwise masters that do not depend on each
        # other would drift apart, and the next step or sequence that needs both would wait for the
        # whole lag of the slower one.
        if not grant.unreported:
            del self.grants[seq]
            latest = max(1, grant.longest_ns // grant.iterations)
            for rank in grant.ranks:
                self.outstanding[rank] -= 1
                self.iteration_ns[rank] = averaged(self.iteration_ns[rank], latest)

    def repeat(
        self, seqs: tuple[int, int], began_ns: int, left: int, ends: Sequence[int]
    ) -> tuple[int, int]:
        """Record that a group has executed its outstanding grants and those that follow.

        The two that are outstanding then keep the numbers of these.

        Args:
            seqs: numbers of the grant under way and of the next one.
            began_ns: begin of the grant under way.
            left: iterations of it that were left before the first of `ends`.
            ends: end of each iteration.

        Returns:
            Begin of the grant that is under way after the last iteration, and its iterations left.
        """
        current, following = (self.grants[seq] for seq in seqs)
        slowest_ns = max(self.iteration_ns[rank] for rank in current.ranks)
        iterations, more = current.iterations, following.iterations
        done = granted = 0
        measured: list[int] = []
        while done + left <= len(ends):
            done += left
            ended_ns = ends[done - 1]
            latest = (ended_ns - began_ns) // iterations or 1
            measured.append(latest)
            slowest_ns = averaged(slowest_ns, latest)  # stays the largest average
            began_ns, iterations, left = ended_ns, more, more
            more = iterations_of(slowest_ns)
            granted += more
        current.iterations, following.iterations = iterations, more
        if len(current.ranks) == 1:
            self.iteration_ns[current.ranks[0]] = slowest_ns
        else:
            for rank in current.ranks:
                self.iteration_ns[rank] = reduce(averaged, measured, self.iteration_ns[rank])
        self._count_piggybacked(self.group_of[current.ranks[0]], granted)
        return began_ns, left - (len(ends) - done)

    def count(self, ranks: tuple[int, ...], change: int) -> None:
        """Record that a member which needs these ranks has joined (+1) or left (-1)."""
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
            apart = [group for group in merged if group.isdisjoint(ranks)]
            joined = set(ranks).union(*(group for group in merged if not group.isdisjoint(ranks)))
            merged = [*apart, joined]
        self.groups = tuple(GrantGroup(self, tuple(sorted(group))) for group in merged)
        self.group_of = {rank: group for group in self.groups for rank in group.ranks}


class SequencedBatches:
    """All decode batches, and the batch of each sequence."""

    def __init__(self, ranks: int) -> None:
        self._all: dict[int, SequencedBatch] = {}
        self._on: list[list[SequencedBatch]] = [[] for _ in range(ranks)]
        self._of_sequence: dict[int, SequencedBatch] = {}
        self._discarded: dict[int, None] = {}

    def open(self, batch: int, ranks: tuple[int, ...], masters: tuple[int, ...]) -> None:
        """Open a batch without sequences."""
        assert batch not in self._all, f"batch {batch} is already open"
        assert ranks, f"batch {batch} has no ranks"
        assert len(set(ranks)) == len(ranks), f"batch {batch} names a rank twice: {ranks}"
        assert masters, f"batch {batch} has no masters"
        assert set(masters) <= set(ranks), f"batch {batch}: masters {masters} not among {ranks}"
        opened = self._all[batch] = SequencedBatch(batch, ranks, masters)
        opened.served, opened.outstanding = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
        opened.iteration_ns = dict.fromkeys(ranks, 0)
        for rank in ranks:
            self._on[rank].append(opened)

    def get(self, batch: int) -> SequencedBatch | None:
        """Return an open batch, or None."""
        return self._all.get(batch)

    def __iter__(self) -> Iterator[SequencedBatch]:
        return iter(self._all.values())

    @property
    def groups(self) -> Iterator[GrantGroup]:
        """All groups of all batches."""
        return (group for batch in self._all.values() for group in batch.groups)

    def groups_on(self, rank: int) -> list[GrantGroup]:
        """Return the groups that have a rank, at most one of each batch."""
        return [batch.group_of[rank] for batch in self._on[rank] if rank in batch.group_of]

    def join(
        self,
        batch: int,
        sequence: int,
        token: int | None,
        owner: int,
        budget: int,
        ranks: Iterable[int],
    ) -> None:
        """Add a sequence to a batch, unless the sequence was cancelled before."""
        if sequence in self._discarded:
            return
        assert sequence not in self._of_sequence, f"sequence {sequence} is in a batch already"
        joined = self._all[batch]
        needed = tuple(sorted(ranks)) or tuple(sorted(joined.ranks))
        assert set(needed) <= set(joined.ranks), (
            f"sequence {sequence} needs ranks {needed}, batch {batch} has {joined.ranks}"
        )
        joined.budget = budget or joined.budget
        joined.members[sequence] = BatchMember(owner, needed, token is None)
        joined.joined[sequence] = token
        joined.count(needed, 1)
        self._of_sequence[sequence] = joined

    def batch_of(self, sequence: int) -> SequencedBatch | None:
        """Return the batch of a sequence, or None."""
        return self._of_sequence.get(sequence)

    def relocate(self, sequence: int, ranks: Iterable[int]) -> None:
        """Change the ranks that a sequence needs, since its KV was moved."""
        batch = self._of_sequence[sequence]
        member = batch.members[sequence]
        before, member.ranks = member.ranks, tuple(sorted(ranks))
        assert set(member.ranks) <= set(batch.ranks), (
            f"sequence {sequence} needs ranks {member.ranks}, batch {batch.id} has {batch.ranks}"
        )
        batch.count(member.ranks, 1)
        batch.count(before, -1)

    def leave(self, sequence: int) -> None:
        """Remove a sequence from its batch, if it has one."""
        batch = self._of_sequence.pop(sequence, None)
        if batch is not None:
            member = batch.members.pop(sequence)
            batch.joined.pop(sequence, None)
            batch.count(member.ranks, -1)
            batch.left[sequence] = member.ranks

    def discard(self, sequence: int) -> None:
        """Drop a cancelled sequence, whether it is in a batch or only prepared to join one."""
        self._discarded[sequence] = None
        if len(self._discarded) > REMEMBERED:
            del self._discarded[next(iter(self._discarded))]
        if sequence in self._of_sequence:
            self.leave(sequence)
        else:
            # Ranks hold slots for a prepared sequence, too, and free them when the log says so.
            for batch in self:
                batch.left.setdefault(sequence, batch.ranks)

    def finish(self, batch: SequencedBatch, sequence: int, seq: int) -> bool:
        """Remove a sequence that a grant finished; return False if it has left, or joined again,
        since."""
        member = batch.members.get(sequence)
        if member is None or not 0 < member.joined_seq < seq:
            return False
        self.leave(sequence)
        return True
