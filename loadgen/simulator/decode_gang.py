"""A decode gang on modeled time: its sequences with their slots, its batch and its moves.

On an elastic gang, `SequenceMoves` moves the KV of decoded sequences between instances.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.decode_batch import SimulatedBatches, SimulatedMember
from csps.loadgen.simulator.exchanges import iteration_costs, longest_ns
from csps.loadgen.simulator.kv_slots import SimulatedPrefixCache, Slots
from csps.loadgen.simulator.requests import GangListener, SimulatedSequence
from csps.loadgen.simulator.sequenced_ranks import SequencedRanks
from csps.loadgen.simulator.step_order import Sends, SimulatedStep
from csps.loadgen.simulator.timeline import Cores, EventTimeline, Link, SimulatedNetwork
from csps.protocols.core.placement import KvSlice, Span, own
from csps.protocols.gang.messages import EvictKv, JoinBatch, RetainKv
from csps.protocols.gang.step_messages import MoveSequence, SequencePlacement
from csps.services.scheduling.events.commands import (
    Reserve,
    SetGroup,
)
from csps.services.scheduling.events.events import (
    Freed,
    GangId,
    InstanceId,
    KvReceived,
    Moved,
    Progress,
    RequestId,
    SequenceId,
    index_of,
    instance_id,
)
from csps.services.scheduling.state.ledger import decode_slots


def incoming(sequence_id: SequenceId) -> tuple[str, SequenceId]:
    """Return the owner of the slots that a moving sequence takes at its destination."""
    return "move", sequence_id


class DecodeSequences:
    """Sequences of one incarnation of a gang.

    Args:
        gang: id of the gang.
        slots: slots of its instances.
        listener: is notified of received KV and freed slots.
    """

    def __init__(self, gang: GangId, slots: Slots, listener: GangListener) -> None:
        self.gang, self.slots = gang, slots
        self.prefix_cache = SimulatedPrefixCache(slots)
        self._listener = listener
        self._sequences: dict[SequenceId, SimulatedSequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[SimulatedSequence]:
        return iter(self._sequences.values())

    def get(self, sequence_id: SequenceId) -> SimulatedSequence | None:
        """Return a sequence, or None."""
        return self._sequences.get(sequence_id)

    def __getitem__(self, sequence_id: SequenceId) -> SimulatedSequence:
        return self._sequences[sequence_id]

    def clear(self) -> None:
        """Drop all sequences of a dead gang."""
        self._sequences.clear()

    def reserve(self, command: Reserve, *, before: int, left: int) -> None:
        """Reserve slots for a sequence.

        Args:
            command: the scheduler's command.
            before: tokens that earlier sequences have generated.
            left: tokens that the request still generates; the scheduler does not know.
        """
        reserved = command.message
        sequence = SimulatedSequence(
            sequence=reserved.sequence_id,
            request=command.request_id,
            prompt_tokens=reserved.prompt_tokens,
            slices=reserved.slices,
            master=reserved.master,
            answer=reserved.answer,
            before=before,
            tokens=left,
            cached=command.cached,
            retain=reserved.retain,
        )
        sequence.missing = {} if command.piggybacked else sequence.slots
        # KV of a sequence that is still decoding is reused before it is retained.
        reused = [
            kv_slice for kv_slice in reserved.slices if kv_slice.source not in self._sequences
        ]
        assert self.prefix_cache.has(reused), (
            f"sequence {reserved.sequence_id} reuses KV that is not in the prefix cache"
        )
        slots = decode_slots(reserved, reserved.output_tokens)
        if slots:
            self.slots.take(
                reserved.sequence_id, {index_of(instance): n for instance, n in slots.items()}
            )
        self._sequences[reserved.sequence_id] = sequence
        self.prefix_cache.share(reserved.sequence_id, reserved.slices)

    def not_reserved(self, command: Reserve) -> None:
        """Answer a reservation for a request that has already ended."""
        reserved = command.message
        named = decode_slots(reserved, reserved.output_tokens)
        self.notify_freed(reserved.sequence_id, map(index_of, named))

    def arrived(self, sequence_id: SequenceId, instance: InstanceId, tokens: int) -> bool:
        """Count KV that has arrived; return whether the instance has all of it."""
        missing = self._sequences[sequence_id].missing
        missing[instance] -= tokens
        return not missing[instance]

    def received(self, sequence_id: SequenceId, instance: InstanceId) -> None:
        """Notify that an instance has received all its KV of a sequence."""
        sequence = self._sequences[sequence_id]
        del sequence.missing[instance]
        if not sequence.over:
            tokens = sequence.slots[instance]
            self._listener.post_rank_event(
                KvReceived(sequence_id=sequence_id, instance=instance, tokens=tokens)
            )

    def end_sequence(self, sequence_id: SequenceId) -> None:
        """Mark a sequence as no longer serving its request."""
        if (sequence := self._sequences.get(sequence_id)) is not None:
            sequence.over = True
            if not sequence.slices:  # it holds no slots here
                del self._sequences[sequence_id]

    def end_request(self, request: RequestId) -> None:
        """Mark all sequences of a request as over."""
        for sequence in self:
            if sequence.request == request:
                sequence.over = True

    def free(self, sequence_id: SequenceId) -> None:
        """Free a sequence's slots after its last iteration."""
        if self._sequences.pop(sequence_id, None) is None:
            return
        resident = self.slots.instances_of(sequence_id)
        for index in resident:
            self.slots.release(sequence_id, index)
        self.prefix_cache.unshare(sequence_id)
        still = self.slots.instances_of(incoming(sequence_id))
        self.notify_freed(sequence_id, [index for index in resident if index not in still])

    def notify_freed(self, sequence_id: SequenceId, indices: Iterable[int]) -> None:
        """Notify that these instances hold nothing of a sequence."""
        for index in indices:
            instance = instance_id(self.gang, index)
            self._listener.post_rank_event(Freed(sequence_id=sequence_id, instance=instance))

    def retain(self, message: RetainKv) -> None:
        """Free a sequence's slots after its last iteration, except for retained KV."""
        sequence = self._sequences.pop(message.sequence_id, None)
        if sequence is None:
            return
        for index in self.slots.instances_of(message.sequence_id):
            self.slots.release(message.sequence_id, index)
        prompt = sequence.prompt_tokens
        answer = sequence.answer or (KvSlice(sequence.master, prompt, prompt + sequence.tokens),)
        self.prefix_cache.add(message.sequence_id, (*own(sequence.slices), *answer))
        self._apply(message)
        for later in sequence.evictions:
            self._apply(later)

    def evict(self, message: EvictKv) -> None:
        """Evict retained KV, or note it until the sequence's last iteration has ended."""
        if (sequence := self._sequences.get(message.sequence_id)) is not None:
            sequence.evictions.append(message)
        else:
            self._apply(message)

    def _apply(self, message: RetainKv | EvictKv) -> None:
        for event in self.prefix_cache.apply(self.gang, message):
            self._listener.post_rank_event(event)


class SequenceMoves:
    """Moves of decoded sequences on one incarnation of an elastic gang.

    Args:
        sequences: the sequences that it decodes.
        ranks: its ranks.
        network: its links.
        kv_bytes_per_token: size in all layers.
        listener: is notified of the end.
    """

    def __init__(
        self,
        sequences: DecodeSequences,
        ranks: SequencedRanks,
        network: SimulatedNetwork,
        kv_bytes_per_token: int,
        listener: GangListener,
    ) -> None:
        self._sequences, self._ranks, self._network = sequences, ranks, network
        self._kv_bytes_per_token, self._listener = kv_bytes_per_token, listener
        self._under_way: dict[SequenceId, None] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def clear(self) -> None:
        """Drop all moves of a dead gang."""
        self._under_way.clear()

    def begin(self, move: MoveSequence) -> None:
        """Move the KV of a sequence inside of running steps; then decode it at its new place."""
        sequence = self._sequences.get(move.sequence_id)
        # The scheduler may order a move before it learns of the sequence's end.
        if sequence is None or sequence.member is None:
            self._not_moved(move)
            return
        self._under_way[move.sequence_id] = None
        self._take_slots(move)
        places = tuple(sorted(map(index_of, move.after.instances)))
        sends = self._sends(sequence, move)
        task = SimulatedStep(
            members=tuple(sorted({*sequence.instances, *places})),
            # Iterations run between its blocks as if it had the links for itself.
            work_ns=max(1, longest_ns(sends)),
            beside=sends,
            high_priority=True,
            started=lambda: None,
            ended=lambda: self._ended(sequence, move, task),
            sequences=(move.sequence_id,),
            places=places,
        )
        self._ranks.submit(task)

    def _take_slots(self, move: MoveSequence) -> None:
        resident = self._sequences.slots.counts(move.sequence_id)
        there = _slots_there(move.after)
        more = {
            index: n - resident.get(index, 0)
            for index, n in there.items()
            if n > resident.get(index, 0)
        }
        self._sequences.slots.assign(incoming(move.sequence_id), more)

    def _sends(self, sequence: SimulatedSequence, move: MoveSequence) -> Sends:
        """Return the transfers of the KV that has been generated."""
        assert sequence.member is not None, "the sequence is not decoding"
        generated = Span(0, sequence.prompt_tokens + self._ranks.generated_by(sequence.member))
        sizes: dict[Link, int] = {}
        for transfer in move.transfers():
            tokens = transfer.within(generated).span.length
            link = self._network.route(transfer.sender, transfer.receiver)
            if link is not None and tokens:
                sizes[link] = sizes.get(link, 0) + tokens * self._kv_bytes_per_token
        return tuple(sizes.items())

    def _ended(self, sequence: SimulatedSequence, move: MoveSequence, task: SimulatedStep) -> None:
        sequence_id, slots = move.sequence_id, self._sequences.slots
        if sequence_id not in self._under_way:  # the gang has died
            return
        del self._under_way[sequence_id]
        for index in slots.instances_of(incoming(sequence_id)):
            slots.release(incoming(sequence_id), index)
        if task.done_ns < task.work_ns or self._sequences.get(sequence_id) is not sequence:
            self._not_moved(move)
            return
        there = _slots_there(move.after)
        left = [index for index in slots.instances_of(sequence_id) if index not in there]
        slots.change(sequence_id, there)
        sequence.slices, sequence.answer = move.after.slices, move.after.answer
        sequence.master = move.after.master
        assert sequence.member is not None, f"sequence {sequence_id} moved without a batch member"
        sequence.member.master = index_of(move.after.master)
        if sequence.over:
            self._sequences.notify_freed(sequence_id, left)
        else:
            self._listener.post_rank_event(Moved(sequence_id=sequence_id))

    def _not_moved(self, move: MoveSequence) -> None:
        """Notify that instances without KV of the sequence have nothing to free."""
        resident = self._sequences.slots.instances_of(move.sequence_id)
        named = map(index_of, decode_slots(move.after, 0))
        self._sequences.notify_freed(
            move.sequence_id, [index for index in named if index not in resident]
        )


def _slots_there(placement: SequencePlacement) -> dict[int, int]:
    """Return the slots by index of the instance after the move."""
    return {index_of(instance): n for instance, n in decode_slots(placement, 0).items()}


class DecodeGang:
    """One incarnation of a decode gang.

    Args:
        gang: id of the gang.
        timeline: the simulated time.
        cluster: the model of the cluster.
        network: its links.
        listener: is notified of what happens.
    """

    def __init__(
        self,
        gang: GangId,
        timeline: EventTimeline,
        cluster: ClusterModel,
        network: SimulatedNetwork,
        listener: GangListener,
    ) -> None:
        self._cluster, self._listener = cluster, listener
        self.sequences = DecodeSequences(gang, Slots(cluster.decode.kv_slots), listener)
        self.ranks: SequencedRanks | None = None
        """The ranks of an elastic gang, which steps and the batch share."""
        self._moves: SequenceMoves | None = None
        self.batch: SimulatedBatches | SequencedRanks
        if cluster.in_place:
            self.batch = self.ranks = self._sequenced(timeline)
            self._moves = SequenceMoves(
                self.sequences, self.ranks, network, cluster.kv_bytes_per_token, listener
            )
        else:
            self.batch = self._batched(timeline)

    def _sequenced(self, timeline: EventTimeline) -> SequencedRanks:
        cluster = self._cluster
        return SequencedRanks(
            timeline,
            len(cluster.decode.instances),
            cost=iteration_costs(cluster),
            quantum_ns=cluster.quantum_ns,
            gap_ns=cluster.iteration_gap_ns,
            compute=Cores(timeline, cluster.decode).compute if cluster.shares_cores else None,
            finished=self._finished,
            started=self._piggyback_started,
            prefilled=self._piggyback_prefilled,
        )

    def _batched(self, timeline: EventTimeline) -> SimulatedBatches:
        cluster = self._cluster
        return SimulatedBatches(
            timeline,
            cost=iteration_costs(cluster),
            gap_ns=cluster.iteration_gap_ns,
            finished=self._finished,
            started=self._piggyback_started,
            prefilled=self._piggyback_prefilled,
        )

    @property
    def busy(self) -> bool:
        """Return whether a sequence or a move is left."""
        return bool(self.sequences or self._moves)

    def die(self) -> None:
        """Drop everything; requests continue elsewhere at their next token."""
        generated_tokens = []
        for sequence in self.sequences:
            member = sequence.member
            if not sequence.over and member is not None and not member.prefills:
                tokens = self.batch.generated_by(member)
                self._decoded(sequence, tokens)
                generated_tokens.append((sequence.sequence, sequence.before + 1 + tokens))
        if generated_tokens:
            self._listener.post_event(Progress(generated_tokens=tuple(generated_tokens)))
        self.sequences.clear()
        if self._moves is not None:
            self._moves.clear()

    # --- commands ------------------------------------------------------------------------------

    def join(self, command: SetGroup) -> None:
        """Decode sequences from the next iteration on."""
        for sequence_id in command.joined:
            sequence = self.sequences[sequence_id]
            if sequence.over:
                continue
            assert not sequence.missing, (
                f"sequence {sequence_id} joins before all its KV was received"
            )
            sequence.member = _member(sequence)
            self.batch.join(sequence.member)

    def receive(self, message: JoinBatch | RetainKv | EvictKv | MoveSequence) -> None:
        """Do what the scheduler's message says."""
        if isinstance(message, JoinBatch):
            self._piggyback(message)
        elif isinstance(message, RetainKv):
            self._retain(message)
        elif isinstance(message, EvictKv):
            self.sequences.evict(message)
        elif self._moves is not None:
            self._moves.begin(message)

    def _piggyback(self, message: JoinBatch) -> None:
        """Compute the prompt of a sequence in decode iterations."""
        sequence = self.sequences.get(message.sequence_id)
        if sequence is None or sequence.over:  # the scheduler does not know yet
            return
        member = sequence.member = _member(sequence)
        member.prompt = sequence.prompt_tokens
        member.computed = member.first = sequence.cached
        self.batch.piggyback(member, message.budget)

    def cancel(self, sequence_id: SequenceId) -> None:
        """Stop decoding a sequence and free its slots."""
        self.batch.leave(sequence_id, partial(self.sequences.free, sequence_id))

    def _retain(self, message: RetainKv) -> None:
        """End a sequence and retain some of its KV."""
        self.sequences.end_sequence(message.sequence_id)
        self.batch.leave(message.sequence_id, partial(self.sequences.retain, message))

    # --- what happens in the batch -------------------------------------------------------------

    def _finished(self, member: SimulatedMember) -> None:
        sequence = self.sequences.get(member.sequence)
        if sequence is None:
            return
        if not sequence.over:
            self._decoded(sequence, member.tokens)
            self._listener.finished(member.sequence, sequence.request)
        if not sequence.retain:
            self.sequences.free(member.sequence)

    def _piggyback_started(self, member: SimulatedMember) -> None:
        if (sequence := self.sequences.get(member.sequence)) is not None:
            self._listener.started(sequence.request)

    def _piggyback_prefilled(self, member: SimulatedMember) -> None:
        sequence = self.sequences.get(member.sequence)
        if sequence is None:
            return
        if not sequence.over:
            self._listener.prefilled(member.sequence, sequence.request)
        if not (member.tokens or sequence.retain):
            self.sequences.free(member.sequence)

    def _decoded(self, sequence: SimulatedSequence, tokens: int) -> None:
        assert sequence.member is not None, f"sequence {sequence.sequence} does not decode"
        for ends in self.batch.ends_of(sequence.member, tokens):
            self._listener.decoded(sequence.request, ends)


def _member(sequence: SimulatedSequence) -> SimulatedMember:
    return SimulatedMember(
        sequence=sequence.sequence,
        context=sequence.prompt_tokens + 1,
        tokens=sequence.tokens - 1,
        master=index_of(sequence.master),
        ranks=sequence.instances,
    )
