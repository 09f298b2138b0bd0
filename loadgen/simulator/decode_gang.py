"""A gang that decodes, on modelled time: the rows of its batch, and the sequences that they are."""

from __future__ import annotations

from functools import partial

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.conducted_ranks import ConductedRanks
from csps.loadgen.simulator.cores import Cores
from csps.loadgen.simulator.decode_batch import DecodeBatch, Row
from csps.loadgen.simulator.gang_listener import GangListener
from csps.loadgen.simulator.held_sequences import HeldSequences
from csps.loadgen.simulator.requests import IterationEnds, Sequence
from csps.loadgen.simulator.row_moves import RowMoves
from csps.loadgen.simulator.slots import Slots
from csps.loadgen.simulator.timeline import Timeline
from csps.services.scheduling.commands import Keep, MoveKv, Ride, SetGroup
from csps.services.scheduling.events import Progress
from csps.services.scheduling.ids import GangId, SequenceId, index_of


class DecodeGang:
    """One incarnation of a gang.

    Args:
        gang: which.
        timeline: the simulated time.
        cluster: what it is made of.
        listener: is told what happens.
    """

    def __init__(
        self, gang: GangId, timeline: Timeline, cluster: ClusterModel, listener: GangListener
    ) -> None:
        self._cluster, self._listener = cluster, listener
        self.held = HeldSequences(gang, Slots(cluster.decode.kv_slots), listener)
        self.ranks: ConductedRanks | None = None
        """Of an elastic gang, which steps share with the batch."""
        self._moves: RowMoves | None = None
        self._batch: DecodeBatch | ConductedRanks
        if cluster.in_place:
            self._batch = self.ranks = self._conducted(timeline)
            self._moves = RowMoves(self.held, self.ranks, cluster.move_ns, listener)
        else:
            self._batch = self._batched(timeline)
        self.log = self._batch.log

    def _conducted(self, timeline: Timeline) -> ConductedRanks:
        cluster = self._cluster
        return ConductedRanks(
            timeline,
            len(cluster.decode.instances),
            hybrid=cluster.hybrid_of,
            quantum_ns=cluster.quantum_ns,
            gap_ns=cluster.iteration_gap_ns,
            compute=Cores(timeline, cluster.decode).compute if cluster.shares_cores else None,
            finished=self._finished,
            started=self._rider_started,
            prefilled=self._rider_prefilled,
        )

    def _batched(self, timeline: Timeline) -> DecodeBatch:
        cluster = self._cluster
        return DecodeBatch(
            timeline,
            cluster.table.iteration(len(cluster.decode.instances), cluster.decode.tp),
            gap_ns=cluster.iteration_gap_ns,
            finished=self._finished,
            hybrid=lambda: cluster.hybrid,
            started=self._rider_started,
            prefilled=self._rider_prefilled,
        )

    @property
    def busy(self) -> bool:
        """Something is held or on its way."""
        return bool(self.held or self._moves)

    def die(self) -> None:
        """It is gone with all that it held. Answers go on with the next token."""
        drawn = []
        for sequence in self.held:
            row = sequence.row
            if not sequence.over and row is not None and not row.prefills:
                tokens = self._batch.drawn_by(row)
                self._listener.decoded(sequence.request, self._ends(row, tokens))
                drawn.append((sequence.sequence, sequence.before + 1 + tokens))
        if drawn:
            self._listener.tell(Progress(drawn=tuple(drawn)))
        self.held.clear()
        if self._moves is not None:
            self._moves.clear()

    # --- commands ------------------------------------------------------------------------------

    def join(self, command: SetGroup) -> None:
        """Decode these from the next iteration on."""
        for number in command.joined:
            sequence = self.held[number]
            if sequence.over:
                continue
            assert not sequence.missing, f"sequence {number} joins before its KV has landed"
            sequence.row = _row(sequence)
            if self._cluster.in_place:
                sequence.row.ranks = sequence.instances
            self._batch.join(sequence.row)

    def ride(self, command: Ride) -> None:
        """Compute the prompt of a sequence in the iterations to come."""
        sequence = self.held.get(command.sequence)
        if sequence is None or sequence.over:  # of which the scheduler had not heard
            return
        row = sequence.row = _row(sequence)
        row.prompt = sequence.prompt_tokens
        row.computed = row.first = sequence.cached
        self._batch.ride(row, command.budget)

    def move(self, command: MoveKv) -> None:
        """Move KV of a sequence, and go on there."""
        if self._moves is not None:
            self._moves.begin(command)

    def cancel(self, number: SequenceId) -> None:
        """Stop decoding a sequence and free what it holds."""
        self._batch.leave(number, partial(self.held.free, number))

    def keep(self, command: Keep) -> None:
        """End a sequence, and keep some of its KV."""
        self.held.give_up(command.sequence)
        self._batch.leave(command.sequence, partial(self.held.keep, command))

    # --- what happens in the batch -------------------------------------------------------------

    def _finished(self, row: Row) -> None:
        sequence = self.held.get(row.sequence)
        if sequence is None:
            return
        if not sequence.over:
            self._listener.decoded(sequence.request, self._ends(row, row.tokens))
            self._listener.finished(row.sequence, sequence.request)
        if not sequence.stays:
            self.held.free(row.sequence)

    def _rider_started(self, row: Row) -> None:
        if (sequence := self.held.get(row.sequence)) is not None:
            self._listener.started(sequence.request)

    def _rider_prefilled(self, row: Row) -> None:
        sequence = self.held.get(row.sequence)
        if sequence is None:
            return
        if not sequence.over:
            self._listener.prefilled(row.sequence, sequence.request)
        if not (row.tokens or sequence.stays):
            self.held.free(row.sequence)

    def _ends(self, row: Row, tokens: int) -> IterationEnds:
        return IterationEnds(*self._batch.ends_of(row, tokens))


def _row(sequence: Sequence) -> Row:
    return Row(
        sequence=sequence.sequence,
        context=sequence.prompt_tokens + 1,
        tokens=sequence.tokens - 1,
        master=index_of(sequence.master),
    )
