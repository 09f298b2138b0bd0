"""The order of a gang's log: when each step and each decode batch computes on which ranks.

All steps and batches share one log, even on overlapping ranks, so that no two ranks wait for each
other: each rank executes the entries that name it in the log's order, and the oldest entry that is
not executed everywhere can always be executed. Scheduling decisions and reports of ranks come in as
events; entries come out. There is no clock, no I/O and no unordered iteration, and all numbers are
integers: the same calls give the same entries.

A rank has at most a low-priority step, above it a high-priority one, and above both an iteration of
a batch. Steps and batches alternate on a rank: each batch gets a grant between two quanta, and the
step on top a quantum between two grants of a batch. Each waits only for reports of entries that are
in the log already, so the reports will come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from csps.protocols.core.errors import ProtocolError
from csps.protocols.core.placement import Span
from csps.protocols.sequencer.decode_batches import (
    GRANTS,
    GrantGroup,
    SequencedBatch,
    SequencedBatches,
)
from csps.protocols.sequencer.log_entries import (
    Abort,
    Change,
    EndOwner,
    Free,
    Iterate,
    Iterated,
    Leaving,
    LogEntry,
    Op,
    PlaceSequence,
    Prepared,
    RanQuantum,
    Report,
    RunQuantum,
    Shutdown,
)
from csps.protocols.sequencer.steps import SequencedStep, SequencedSteps, StepSpec

MOST_QUANTA = 2
"""Quanta of a step that may be outstanding."""


class RunOrder:
    """Chooses what runs next. Reads steps and batches and changes neither."""

    def __init__(self, ranks: int, steps: SequencedSteps, batches: SequencedBatches) -> None:
        self._steps, self._batches = steps, batches
        self._ran = [0] * ranks
        """Number of the newest `RunQuantum` of each rank."""

    def ran(self, step: SequencedStep, seq: int) -> None:
        """Record that a log entry gave a step a quantum."""
        for rank in step.task.ranks:
            self._ran[rank] = seq

    def steps(self) -> list[SequencedStep]:
        """Return the steps that may have a quantum now. No two of them share a rank."""
        return [step for step in self._steps.running() if self._may_run(step)]

    def group(self) -> tuple[GrantGroup, int] | None:
        """Return the group that has waited longest among those that may have a grant, and its
        iterations."""
        found: tuple[GrantGroup, int] | None = None
        for group in self._batches.groups:
            if group.grants >= GRANTS:  # the cheapest question, and usually the answer
                continue
            waited = found is None or group.served < found[0].served
            if waited and (iterations := self._grant_length(group)):
                found = group, iterations
        return found

    def _may_run(self, step: SequencedStep) -> bool:
        """Return True if a step may have a quantum."""
        outstanding = len(step.outstanding)
        if outstanding >= MOST_QUANTA or not self._can_continue(step):
            return False
        if outstanding and outstanding >= self._most_outstanding(step):
            return False
        # Each batch on the step's ranks must have had a grant since the last quantum of any step.
        for rank in step.task.ranks:
            for group in self._batches.groups_on(rank):
                if self._ran[rank] >= group.batch.served[rank]:
                    return False
        return True

    def _can_continue(self, step: SequencedStep) -> bool:
        return not step.ending and not self._steps.interrupted(step)

    def _most_outstanding(self, step: SequencedStep) -> int:
        """Return how many quanta of a step may be outstanding."""
        # Two if nothing else can have its ranks before it finishes: the ranks then need not idle
        # while a report travels to rank 0.
        for rank in step.task.ranks:
            if self._batches.groups_on(rank):
                return 1
        return 1 if self._steps.interruptible(step) else MOST_QUANTA

    def _grant_length(self, group: GrantGroup) -> int:
        """Return the iterations of the grant that a group may have now; 0 if it may have none."""
        if self._alone(group):
            return group.long_grant()
        # A step that could not run while its report was awaited is next, as long as the group has
        # iterations to compute in the meantime.
        if group.grants:
            for rank in group.ranks:
                if self._is_due(rank, group):
                    return 0
        return 1

    def _alone(self, group: GrantGroup) -> bool:
        """Return True if no step, and no group of another batch, wants any of a group's ranks."""
        for rank in group.ranks:
            if self._steps.wanted[rank] or self._batches.groups_on(rank) != [group]:
                return False
        return True

    def _is_due(self, rank: int, group: GrantGroup) -> bool:
        """Return True if a step on a rank could continue, with no quantum since a batch's grant."""
        step = self._steps.on_top(rank)
        served = group.batch.served[rank]
        return step is not None and self._can_continue(step) and self._ran[rank] < served


QUANTUM_NS = 50_000_000
"""Time that a step computes before another step or batch may run."""
SHORT_STEP_TOKENS = 4096
"""Tokens of a step up to which its time is proportional to them: attention is a small part."""


class Sequencer:
    """Appends entries to a gang's log. `take` returns the entries that past events lead to."""

    def __init__(self, ranks: int, quantum_ns: int = QUANTUM_NS) -> None:
        """Create the sequencer of a gang whose steps compute for about `quantum_ns` at a time."""
        self._ranks = tuple(range(ranks))
        self._quantum_ns = quantum_ns
        self._steps = SequencedSteps(ranks)
        self._batches = SequencedBatches(ranks)
        self._order = RunOrder(ranks, self._steps, self._batches)
        self._token_ns = 0
        """Average time of a token of a short step; 0 before the first one."""
        self._ended: set[int] = set()
        self._closed = False
        self._seq = 0
        self._log: list[tuple[LogEntry, tuple[int, ...]]] = []

    def take(self) -> list[tuple[LogEntry, tuple[int, ...]]]:
        """Return the new entries, in order, each with the ranks that execute it."""
        if not self._closed:
            self._steps.start()
            self._announce_departures()
            while self._quanta() or self._grant():
                pass
        log, self._log = self._log, []
        return log

    # Events

    def open_batch(self, batch: int, ranks: tuple[int, ...], masters: tuple[int, ...] = ()) -> None:
        """Open a batch without sequences, whose ranks iterate together.

        Args:
            masters: ranks that each report every grant. Empty: the first rank reports for all.
        """
        self._batches.open(batch, ranks, masters or ranks[:1])

    def submit(self, task: StepSpec) -> None:
        """Submit a step, which runs once all its ranks have prepared it; they may have done so
        before.

        A step that moves a sequence's KV is aborted if the sequence has left its batch.
        """
        if self._closed or task.owner in self._ended:
            self._steps.refuse(task)
            return
        if task.places:
            batch = self._batches.batch_of(task.sequences[0])
            if batch is None:
                self._append(Abort(task.id), task.ranks)
                self._steps.refuse(task)
                return
            if task.sequences[0] in batch.joined:  # ranks must know it before the step begins
                self._change(batch)
        self._steps.add(task)

    def join(
        self,
        batch: int,
        sequence: int,
        token: int | None,
        owner: int,
        budget: int = 0,
        ranks: tuple[int, ...] = (),
    ) -> None:
        """Add a sequence to a batch.

        Args:
            token: the token that the first iteration is given. None: the iteration computes a chunk
                of the sequence's prompt (piggybacked prefill).
            budget: tokens of an iteration of the batch from now on; 0 leaves it unchanged.
            ranks: ranks that the sequence needs; empty means all of the batch. Sequences without a
                common rank are iterated separately.
        """
        if not self._closed and owner not in self._ended:
            self._batches.join(batch, sequence, token, owner, budget, ranks)

    def report(self, report: Report) -> None:
        """Handle a report of a rank.

        Raises:
            ProtocolError: the rank reports something that it was not asked to do.
        """
        match report:
            case Prepared(rank, step):
                self.prepared(step, rank)
            case RanQuantum(rank, seq, step, yield_point, nanoseconds):
                self.ran(rank, seq, step, yield_point, nanoseconds)
            case Iterated(rank, seq, batch, nanoseconds, finished):
                self.iterated(rank, seq, batch, nanoseconds, finished)
            case Leaving():
                self.shutdown()

    @property
    def unprepared(self) -> tuple[int, ...]:
        """Submitted steps that some of their ranks have not prepared."""
        return self._steps.unprepared()

    def prepared(self, step: int, rank: int) -> None:
        """Record that a rank has received a step's tokens and reserved its slots."""
        self._steps.prepare(step, rank)

    def ran(self, rank: int, seq: int, step: int, yield_point: int, nanoseconds: int) -> None:
        """Record that a step's leader has executed a quantum; ignore it if the step was aborted
        since.

        Raises:
            ProtocolError: the quantum is not the step's oldest one, or another rank reports it.
        """
        running = self._steps.get(step)
        if running is None:
            return
        if rank != running.task.leader or not running.outstanding:
            raise ProtocolError(f"rank {rank} reports entry {seq} of step {step} unasked")
        quantum = running.outstanding[0]
        if quantum.seq != seq or yield_point > running.task.yield_points:
            raise ProtocolError(f"rank {rank} reports entry {seq} of step {step} out of order")
        running.end_quantum(nanoseconds)
        if quantum.until == running.task.yield_points:
            self._measured(running)
            self._steps.remove(running)

    def _measured(self, step: SequencedStep) -> None:
        if 0 < step.task.rows <= SHORT_STEP_TOKENS:
            latest = max(1, step.ran_ns // step.task.rows)
            self._token_ns = (3 * self._token_ns + latest) // 4 if self._token_ns else latest

    def iterated(
        self, rank: int, seq: int, batch: int, nanoseconds: int, finished: tuple[int, ...] = ()
    ) -> None:
        """Record that a master has executed a grant, which ends when all masters have reported it.

        Sequences that finished leave at once.

        Raises:
            ProtocolError: the batch has no such master, or no such grant.
        """
        iterating = self._batches.get(batch)
        grant = None if iterating is None else iterating.grants.get(seq)
        if iterating is None or grant is None or rank not in grant.masters:
            raise ProtocolError(f"rank {rank} reports entry {seq} of batch {batch} unasked")
        iterating.measured(seq, nanoseconds)
        for sequence in finished:
            if self._batches.finish(iterating, sequence, seq):
                self._end_moves(sequence)

    def settled(self, batch: int) -> bool:
        """Return True if the log has all sequences that joined or left a batch."""
        iterating = self._batches.get(batch)
        return iterating is not None and not iterating.changed

    def iterates(self, batch: int, ranks: Iterable[int]) -> bool:
        """Return True if a batch has a group on some of the ranks."""
        iterating = self._batches.get(batch)
        return iterating is not None and not iterating.group_of.keys().isdisjoint(ranks)

    def repeat_quanta(
        self, step: int, began_ns: int, end_ns: Callable[[int], int], now_ns: int
    ) -> tuple[int, tuple[RunQuantum, ...]]:
        """Record quanta that a step executed without asking for each, all but the last one.

        Nothing may have disturbed it: no batch and no other step wanted its ranks.

        Args:
            began_ns: begin of the oldest outstanding quantum.
            end_ns: returns when the step reaches a yield point.
            now_ns: the quantum that ends after this, if any, is under way.

        Returns:
            Begin of the quantum under way, and the outstanding quanta.
        """
        running = self._steps.get(step)
        assert running is not None, f"there is no step {step}"
        seqs = [quantum.seq for quantum in running.outstanding]
        while (quantum := running.outstanding[0]).until < running.task.yield_points:
            ended_ns = end_ns(quantum.until)
            if ended_ns > now_ns:
                break
            running.end_quantum(ended_ns - began_ns)
            began_ns = ended_ns
            if not running.ending:
                running.begin_quantum(0, running.next_until(self._quantum_ns))
        running.outstanding = deque(
            quantum._replace(seq=seq)
            for seq, quantum in zip(seqs, running.outstanding, strict=False)
        )
        return began_ns, tuple(RunQuantum(step, each.until) for each in running.outstanding)

    def repeat(
        self, batch: int, seqs: tuple[int, int], began_ns: int, left: int, ends: Sequence[int]
    ) -> tuple[int, int, Iterate]:
        """Record grants that a group executed without asking for each (`SequencedBatch.repeat`).

        Nothing may have disturbed it: no step wanted its ranks and no sequence joined or left.

        Returns:
            Begin of the grant under way, its iterations left, and the next grant.
        """
        iterating = self._batches.get(batch)
        assert iterating is not None, f"there is no batch {batch}"
        began_ns, left = iterating.repeat(seqs, began_ns, left, ends)
        following = iterating.grants[seqs[1]]
        return began_ns, left, self._iterate(iterating, following.ranks, following.iterations)

    def _iterate(self, batch: SequencedBatch, ranks: tuple[int, ...], iterations: int) -> Iterate:
        members = ranks if len(ranks) < len(batch.ranks) else ()
        return Iterate(batch.id, batch.version, iterations, members)

    def _end_moves(self, sequence: int) -> None:
        """Abort the steps that move the KV of a sequence which has left."""
        for step in self._steps.of_sequence(sequence):
            if step.task.places and not step.ending:
                self._abort(step)

    def cancel(self, sequence: int) -> None:
        """Cancel a sequence in its batch and in all its steps.

        A step without other sequences is aborted, unless its last quantum is in the log.
        """
        for step in self._steps.of_sequence(sequence):
            if step.ending or sequence in step.cancelled:
                continue
            step.cancelled.add(sequence)
            step.newly_cancelled.append(sequence)
            if len(step.cancelled) == len(step.task.sequences):
                self._abort(step)
        self._batches.discard(sequence)

    def retain(self, sequence: int, released: tuple[Span, ...]) -> None:
        """End a sequence, retain its KV for the prefix cache, and free these spans of it."""
        if self._closed:
            return
        self._end_moves(sequence)
        self._batches.discard(sequence)
        for batch in self._batches:
            if batch.left:
                self._change(batch)
        self.evict(sequence, released)

    def evict(self, sequence: int, spans: tuple[Span, ...]) -> None:
        """Free some retained KV of a sequence."""
        if not self._closed:
            self._append(Free(sequence, spans), self._ranks)

    def end_owner(self, owner: int) -> None:
        """Drop all that an owner has submitted, and accept no more of it.

        A step whose last quantum is in the log still reports.
        """
        if self._closed or owner in self._ended:
            return
        self._ended.add(owner)
        for step in self._steps.of_owner(owner):
            if not step.until:
                self._steps.remove(step)
            elif not step.ending:
                self._abort(step)
        for batch in self._batches:
            owned = [seq for seq, member in batch.members.items() if member.owner == owner]
            for sequence in owned:
                self._batches.leave(sequence)
            # `EndOwner` requires that the owner's sequences have left.
            if owned:
                self._change(batch)
        self._append(EndOwner(owner), self._ranks)

    @property
    def closed(self) -> bool:
        """True once the log has its last entry."""
        return self._closed

    def shutdown(self) -> None:
        """Abort running steps and append the last entry."""
        if self._closed:
            return
        for step in tuple(self._steps.running()):
            if step.until and not step.ending:
                self._abort(step)
        self._append(Shutdown(), self._ranks)
        self._closed = True

    # Entries

    def _append(self, op: Op, ranks: tuple[int, ...]) -> int:
        self._seq += 1
        self._log.append((LogEntry(self._seq, op), ranks))
        return self._seq

    def _abort(self, step: SequencedStep) -> None:
        self._append(Abort(step.task.id), step.task.ranks)
        self._steps.remove(step)

    def _quanta(self) -> bool:
        """Give a quantum to every step that may have one; return False if there was none."""
        steps = self._order.steps()
        for step in steps:
            self._run(step)
        return bool(steps)

    def _run(self, step: SequencedStep) -> None:
        until = (
            step.task.yield_points if self._is_short(step) else step.next_until(self._quantum_ns)
        )
        newly_cancelled, step.newly_cancelled = tuple(step.newly_cancelled), []
        seq = self._append(RunQuantum(step.task.id, until, newly_cancelled), step.task.ranks)
        step.begin_quantum(seq, until)
        self._order.ran(step, seq)
        if step.ending and step.task.places:
            (moved,) = step.task.sequences
            batch = self._batches.batch_of(moved)
            assert batch is not None, f"sequence {moved} moves and has no batch"
            if batch.iterated:  # by groups that may be others afterwards
                self._change(batch)
            self._batches.relocate(moved, step.task.places)
            place = PlaceSequence(moved, batch.members[moved].ranks, step.task.master)
            self._append(place, batch.ranks)

    def _is_short(self, step: SequencedStep) -> bool:
        """Return True if a whole step probably fits a quantum, judged by past short steps."""
        tokens = step.task.rows
        known = 0 < tokens <= SHORT_STEP_TOKENS and self._token_ns
        return not step.until and bool(known) and tokens * self._token_ns <= self._quantum_ns

    def _grant(self) -> bool:
        """Give a grant to the group that is next; return False if there is none."""
        found = self._order.group()
        if found is None:
            return False
        group, iterations = found
        batch = group.batch
        if batch.changed:
            self._change(batch)
        op = self._iterate(batch, group.ranks, iterations)
        batch.grant(self._append(op, group.ranks), iterations, group)
        return True

    def _change(self, batch: SequencedBatch) -> None:
        batch.version += 1
        joined, left = tuple(batch.joined.items()), tuple(batch.left)
        iterated = tuple(batch.iterated.items())
        change = Change(batch.id, batch.version, joined, left, batch.budget, iterated)
        seq = self._append(change, batch.ranks)
        for sequence, _ in joined:
            batch.members[sequence].joined_seq = seq
        batch.joined, batch.left, batch.iterated = {}, {}, {}

    def _announce_departures(self) -> None:
        """Name sequences that have left, for ranks that have no further grant."""
        for batch in self._batches:
            if batch.needs_notice:
                self._change(batch)
