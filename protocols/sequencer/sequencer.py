"""Whose turn it is on the ranks of a gang: steps and streams that share them take turns.

Between two quanta of steps on a rank each stream there has a lease, if it has rows, and between two
leases of a stream the step on top has a quantum, if it may go on. Whatever a turn waits for is the
report of an entry that is in the log already (`protocols.sequencer`).

Who computes when on a gang's ranks: the order of its log.

Steps and streams on overlapping groups of ranks share one order, so that no two ranks wait for each
other: each executes what names it, in the log's order, and the oldest entry that is not executed
everywhere can always be executed. What a scheduler decided comes in as events, with what ranks
report; entries come out. There is no clock and no input or output here, nothing is iterated but in
a fixed order, and all numbers are whole: the same calls give the same entries.

A rank has at most a long step, above it an urgent one, and above both an iteration of a stream.
Whatever this waits for is the report of an entry that is in the log already, so it will come: a
stream never waits for a step's report, a step waits for its own and for the leases of streams on
its ranks.
"""

from __future__ import annotations

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
    Entry,
    Free,
    Iterate,
    Iterated,
    Leaving,
    Op,
    PlaceSequence,
    Prepared,
    RanQuantum,
    Report,
    RunQuantum,
    Shutdown,
)
from csps.protocols.sequencer.steps import Quantum, SequencedStep, SequencedSteps, StepSpec


class RunOrder:
    """Looks at steps and streams, and changes nothing of them."""

    def __init__(self, ranks: int, steps: SequencedSteps, batches: SequencedBatches) -> None:
        self._steps, self._batches = steps, batches
        self._ran = [0] * ranks
        """Number of the newest `Run` that each rank has in the log."""

    def ran(self, step: SequencedStep, seq: int) -> None:
        """A step has been given a quantum, by this entry."""
        for rank in step.task.ranks:
            self._ran[rank] = seq

    def steps(self) -> list[SequencedStep]:
        """Those that may have a quantum now. No two of them share a rank."""
        return [step for step in self._steps.running() if self._may_run(step)]

    def group(self) -> tuple[GrantGroup, int] | None:
        """Of those that may have a lease now the group that has waited longest, and how many
        iterations it may have."""
        found: tuple[GrantGroup, int] | None = None
        for group in self._batches.groups:
            waited = found is None or group.served < found[0].served
            if waited and (iterations := self._grant_length(group)):
                found = group, iterations
        return found

    def _may_run(self, step: SequencedStep) -> bool:
        """Whether a step may have a quantum: each stream on its ranks had a lease since the last
        quantum there, of whichever step."""
        if not self._can_continue(step) or len(step.outstanding) >= self._most_outstanding(step):
            return False
        return all(
            self._ran[rank] < group.batch.served[rank]
            for rank in step.task.ranks
            for group in self._batches.groups_on(rank)
        )

    def _can_continue(self, step: SequencedStep) -> bool:
        return not step.ending and not self._steps.interrupted(step)

    def _most_outstanding(self, step: SequencedStep) -> int:
        """Quanta of a step that may be outstanding: two where nothing else can have its ranks
        before it is finished, so that they need not wait for its report to come and go."""
        beside = any(True for rank in step.task.ranks for _ in self._batches.groups_on(rank))
        return 1 if beside or self._steps.interruptible(step) else 2

    def _grant_length(self, group: GrantGroup) -> int:
        """Iterations of a lease that a group may have now; 0 for none.

        A step whose report is awaited gets the turn that it could not take yet, as long as the
        group has something to do in the meantime.
        """
        grants = group.grants
        if grants >= GRANTS:
            return 0
        if self._alone(group):
            return group.long_grant()
        if grants and any(self._is_due(rank, group) for rank in group.ranks):
            return 0
        return 1

    def _alone(self, group: GrantGroup) -> bool:
        """Whether no step, and no group of another stream, wants any of a group's ranks."""
        return not any(
            self._steps.wanted[rank]
            or any(other is not group for other in self._batches.groups_on(rank))
            for rank in group.ranks
        )

    def _is_due(self, rank: int, group: GrantGroup) -> bool:
        """Whether a step on a rank would go on, and has had no quantum since a stream's lease."""
        step = self._steps.on_top(rank)
        served = group.batch.served[rank]
        return step is not None and self._can_continue(step) and self._ran[rank] < served


QUANTUM_NS = 50_000_000
SHORT_STEP_TOKENS = 4096
"""Steps of up to so many tokens take about as long for each of them: attention is a small part."""


class Sequencer:
    """Appends to a gang's log. After any number of events, `take` has what they lead to."""

    def __init__(self, ranks: int, quantum_ns: int = QUANTUM_NS) -> None:
        """For a gang of `ranks` ranks; a step computes for about `quantum_ns` at a time."""
        self._ranks = tuple(range(ranks))
        self._quantum_ns = quantum_ns
        self._steps = SequencedSteps(ranks)
        self._batches = SequencedBatches(ranks)
        self._order = RunOrder(ranks, self._steps, self._batches)
        self._token_ns = 0
        """What a token of a short step has taken; 0 before the first one."""
        self._ended: set[int] = set()
        self._closed = False
        self._seq = 0
        self._log: list[tuple[Entry, tuple[int, ...]]] = []

    def take(self) -> list[tuple[Entry, tuple[int, ...]]]:
        """Entries to append now, in order, each with the ranks that execute it."""
        if not self._closed:
            self._steps.start()
            self._announce_departures()
            while self._quanta() or self._grant():
                pass
        log, self._log = self._log, []
        return log

    # Events

    def open_batch(self, batch: int, ranks: tuple[int, ...], masters: tuple[int, ...] = ()) -> None:
        """A stream without rows, whose iterations its ranks do together.

        Args:
            masters: ranks that each report every lease; the first one if none is named, where that
                one speaks for all.
        """
        self._batches.open(batch, ranks, masters or ranks[:1])

    def submit(self, task: StepSpec) -> None:
        """A step is to be run once its ranks have prepared it, of which they may tell before. One
        that moves a row's KV goes with the row: nothing is moved of what has left."""
        if self._closed or task.owner in self._ended:
            self._steps.refuse(task)
            return
        if task.places:
            batch = self._batches.batch_of(task.sequences[0])
            if batch is None:
                self._append(Abort(task.id), task.ranks)
                self._steps.refuse(task)
                return
            if task.sequences[0] in batch.joined:  # ranks look for the row when the step begins
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
        """A sequence becomes a row of a stream; its first iteration is given `token`, or a piece
        of its prompt.

        Args:
            budget: the stream's from now on, unless it is 0.
            ranks: whom the row concerns; all of the stream's if none is named. Rows that have no
                rank in common are iterated apart.
        """
        if not self._closed and owner not in self._ended:
            self._batches.join(batch, sequence, token, owner, budget, ranks)

    def report(self, report: Report) -> None:
        """What a rank reports.

        Raises:
            ProtocolError: it reports what it was not told to do.
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
        """A rank has a step's tokens, and has taken its slots."""
        self._steps.prepare(step, rank)

    def ran(self, rank: int, seq: int, step: int, yield_point: int, nanoseconds: int) -> None:
        """A step's leader has executed a quantum; nothing if the step was aborted since.

        Raises:
            ProtocolError: it is not the step's oldest quantum, or another rank reports it.
        """
        running = self._steps.get(step)
        if running is None:
            return
        if rank != running.task.leader or not running.outstanding:
            raise ProtocolError(f"rank {rank} reports entry {seq} of step {step} unasked")
        quantum = running.outstanding[0]
        if quantum.seq != seq or yield_point > running.task.yield_points:
            raise ProtocolError(f"rank {rank} reports entry {seq} of step {step} out of order")
        running.outstanding.popleft()
        running.ran_yield_points += quantum.yield_points
        running.ran_ns += nanoseconds
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
        """A master has executed a lease. It is over when all of the stream's masters say so; rows
        that finished leave whenever theirs does.

        Raises:
            ProtocolError: the stream has no such master, or no such lease.
        """
        iterating = self._batches.get(batch)
        grant = None if iterating is None else iterating.grants.get(seq)
        if iterating is None or grant is None or rank not in grant.masters:
            raise ProtocolError(f"rank {rank} reports entry {seq} of stream {batch} unasked")
        iterating.measured(seq, nanoseconds)
        for sequence in finished:
            if self._batches.finish(iterating, sequence, seq):
                self._end_moves(sequence)

    def _end_moves(self, sequence: int) -> None:
        """A row has left: its KV is not moved any further."""
        for step in self._steps.of_sequence(sequence):
            if step.task.places and not step.ending:
                self._abort(step)

    def cancel(self, sequence: int) -> None:
        """A sequence is given up: as a row or what is to become one, and in all steps that are
        known. A step that has no other one is aborted, unless its last quantum is on its way."""
        for step in self._steps.of_sequence(sequence):
            if step.ending or sequence in step.cancelled:
                continue
            step.cancelled.add(sequence)
            step.newly_cancelled.append(sequence)
            if len(step.cancelled) == len(step.task.sequences):
                self._abort(step)
        self._batches.discard(sequence)

    def retain(self, sequence: int, released: tuple[Span, ...]) -> None:
        """A sequence is over, as a row or as what was to become one, and of its KV these spans are
        not kept."""
        if self._closed:
            return
        self._end_moves(sequence)
        self._batches.discard(sequence)
        for batch in self._batches:
            if batch.left:
                self._change(batch)
        self.evict(sequence, released)

    def evict(self, sequence: int, spans: tuple[Span, ...]) -> None:
        """Some KV of a sequence that is over is not kept any more."""
        if not self._closed:
            self._append(Free(sequence, spans), self._ranks)

    def end_owner(self, owner: int) -> None:
        """All that an owner has submitted is given up, and no more of it is taken. A step whose
        last quantum is on its way still reports."""
        if self._closed or owner in self._ended:
            return
        self._ended.add(owner)
        for step in self._steps.of_owner(owner):
            if not step.until:
                self._steps.remove(step)
            elif not step.ending:
                self._abort(step)
        for batch in self._batches:
            rows = [sequence for sequence, row in batch.members.items() if row.owner == owner]
            for sequence in rows:
                self._batches.leave(sequence)
            # What the ranks have for the owner's rows goes with the next entry.
            if rows:
                self._change(batch)
        self._append(EndOwner(owner), self._ranks)

    @property
    def closed(self) -> bool:
        """The log has its last entry."""
        return self._closed

    def shutdown(self) -> None:
        """Abort what runs, and append no more."""
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
        self._log.append((Entry(self._seq, op), ranks))
        return self._seq

    def _abort(self, step: SequencedStep) -> None:
        self._append(Abort(step.task.id), step.task.ranks)
        self._steps.remove(step)

    def _quanta(self) -> bool:
        """Give every step a quantum that may have one; whether one had."""
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
        step.size = until - step.until
        step.outstanding.append(Quantum(seq, until, step.size))
        step.until = until
        self._order.ran(step, seq)
        if step.ending and step.task.places:
            (row,) = step.task.sequences
            batch = self._batches.relocate(row, step.task.places)
            self._append(PlaceSequence(row, batch.members[row].ranks), batch.ranks)

    def _is_short(self, step: SequencedStep) -> bool:
        """Whether all of a step probably is a quantum, as other short ones have shown."""
        rows = step.task.rows
        known = 0 < rows <= SHORT_STEP_TOKENS and self._token_ns
        return not step.until and bool(known) and rows * self._token_ns <= self._quantum_ns

    def _grant(self) -> bool:
        """Give the group a lease whose turn it is; whether there is one."""
        found = self._order.group()
        if found is None:
            return False
        group, iterations = found
        batch = group.batch
        if batch.changed:
            self._change(batch)
        members = group.ranks if len(group.ranks) < len(batch.ranks) else ()
        op = Iterate(batch.id, batch.version, iterations, members)
        batch.grant(self._append(op, group.ranks), iterations, group)
        return True

    def _change(self, batch: SequencedBatch) -> None:
        batch.version += 1
        joined, left = tuple(batch.joined.items()), tuple(batch.left)
        change = Change(batch.id, batch.version, joined, left, batch.budget)
        seq = self._append(change, batch.ranks)
        for sequence, _ in joined:
            batch.members[sequence].joined_seq = seq
        batch.joined, batch.left = {}, {}

    def _announce_departures(self) -> None:
        """Tell ranks of rows that have left even where no lease follows."""
        for batch in self._batches:
            if batch.needs_notice:
                self._change(batch)
