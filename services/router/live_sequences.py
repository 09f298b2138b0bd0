"""Sequences on the ranks: attempts at requests, as the router keeps track of them.

A `LiveSequence` exists from its reservation until every decode rank has freed its slots. It may
move to other instances of an elastic gang (`LiveMove`). `DecodeGroups` knows which instances of an
elastic gang iterate together; `ElasticEventRecorder` records when these groups change.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.messages import (
    PrefillDone,
    RankKvReceived,
    SampledToken,
    SamplerInputs,
)
from csps.protocols.gang.step_messages import MoveSequence, SequenceMoved
from csps.protocols.rpc.schema import encode
from csps.services.requests.elastic_event import ElasticEvent, ElasticEventKind
from csps.services.requests.request_handle import RequestHandle
from csps.services.scheduling.events.commands import Reserve, RunStep
from csps.services.scheduling.events.events import InstanceId, SequenceId, index_of
from csps.services.scheduling.events.slices import own
from csps.services.scheduling.state.ledger import HasPlacement, decode_slots

Members = frozenset[InstanceId]


@dataclass(eq=False, slots=True)
class LiveSequence:
    """A sequence from its reservation until every decode rank has freed its slots.

    It outlives its service to the request (`over`) until its slots are free.
    """

    command: Reserve
    placement: HasPlacement
    """Placement on the decode gang: as reserved, or as moved since."""
    handle: RequestHandle
    decode: GangClient
    pending_kv: InstanceRanks
    pending_free: InstanceRanks
    first_index: int
    """Index of the first token that this sequence samples: the tokens of former attempts."""
    next_index: int
    """Index of the answer's next token."""
    reserving: asyncio.Task[None] | None = None
    cancel_when_reserved: bool = False
    """The decode ranks are told to cancel once all of them answered the reservation."""
    packed_sampler: bytes = b""
    over: bool = False
    """The sequence no longer serves its request; late tokens are dropped."""
    last_token: int = -1
    joined: bool = False
    """The gang was told to decode the sequence."""
    decode_ended: bool = False
    """The gang decodes the sequence no more: a rank reported that it freed its slots."""
    move: LiveMove | None = None
    """Move to other instances, while it is in progress."""
    kv_received: list[RankKvReceived] = field(default_factory=list)
    """Reports of ranks that received all of their KV of the prompt."""

    @property
    def id(self) -> SequenceId:
        """Return the sequence_id, by which ranks know the sequence."""
        return self.command.sequence_id

    @property
    def sampler(self) -> bytes:
        """Return what ranks need to sample its tokens: packed once, before its first token."""
        if not self.packed_sampler:
            spec, generated = self.handle.spec, self.handle.generated_tokens
            penalized = spec.sampling.repetition_penalty != 1.0
            inputs = SamplerInputs(
                sampling=spec.sampling,
                prompt_tokens=token_bytes(np.unique(spec.prompt)) if penalized else b"",
                generated_tokens=token_bytes(generated),
            )
            self.packed_sampler = encode(inputs)
        return self.packed_sampler

    @property
    def reservation_pending(self) -> bool:
        """Return whether some decode rank has not answered the reservation."""
        return self.reserving is not None and not self.reserving.done()


def token_bytes(tokens: NDArray[np.int32]) -> bytes:
    """Return token ids as they travel: little-endian int32."""
    return tokens.astype("<i4", copy=False).tobytes()


def live_sequence(command: Reserve, handle: RequestHandle, decode: GangClient) -> LiveSequence:
    """Return the record of a sequence for which no rank was asked anything yet."""
    holders = decode_slots(command, command.output_tokens)
    return LiveSequence(
        command=command,
        placement=command,
        handle=handle,
        decode=decode,
        pending_kv=InstanceRanks(decode, [kv_slice.instance for kv_slice in own(command.slices)]),
        pending_free=InstanceRanks(decode, holders),
        first_index=handle.timings.tokens,
        next_index=handle.timings.tokens,
    )


@dataclass(eq=False, slots=True)
class LiveMove:
    """A sequence's move to other instances, until all ranks have acknowledged it.

    Meanwhile the sequence has two masters, whose connections to the router have no common order: a
    token of the new master may arrive before the last token of the old one.
    """

    message: MoveSequence
    pending_acks: InstanceRanks
    began: float = field(default_factory=time.monotonic)
    acks: list[SequenceMoved] = field(default_factory=list)
    early: dict[int, SampledToken] = field(default_factory=dict)
    """Tokens that arrived before an earlier one, by index."""

    @property
    def tokens(self) -> int:
        """Return the tokens whose KV moved."""
        tp = max(1, self.pending_acks.gang.tp)
        return sum(ack.tokens for ack in self.acks) // tp

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that all ranks sent."""
        return sum(ack.sent_bytes for ack in self.acks)

    @property
    def seconds(self) -> float:
        """Return the time of the slowest rank."""
        return max((ack.seconds for ack in self.acks), default=0.0)


def end_move(sequence: LiveSequence, move: LiveMove) -> None:
    """Let the sequence continue where it was moved to."""
    before, after = decode_slots(sequence.placement, 0), decode_slots(move.message.after, 0)
    sequence.move = None
    sequence.placement = move.message.after
    # Ranks there may already have reported that the sequence ended: no `expect` here.
    sequence.pending_free.discard(instance for instance in before if instance not in after)


class InstanceRanks:
    """Ranks that have not reported yet, by instance.

    The scheduler's events name instances; all `tp` ranks of an instance store the same tokens, each
    with its own heads.
    """

    def __init__(self, gang: GangClient, instances: Iterable[InstanceId]) -> None:
        self.gang = gang
        self._missing = {instance: set(gang.ranks_of(index_of(instance))) for instance in instances}

    def __bool__(self) -> bool:
        return bool(self._missing)

    def __contains__(self, instance: InstanceId) -> bool:
        return instance in self._missing

    def reported(self, instance: InstanceId, rank: int) -> bool:
        """Record a rank's report; return whether it was the last one of its instance."""
        missing = self._missing.get(instance)
        if missing is None:
            return False
        missing.discard(rank)
        if missing:
            return False
        del self._missing[instance]
        return True

    def expect(self, instances: Iterable[InstanceId]) -> None:
        """Wait for all ranks of these instances as well."""
        for instance in instances:
            self._missing[instance] = set(self.gang.ranks_of(index_of(instance)))

    def discard(self, instances: Iterable[InstanceId]) -> None:
        """Wait for these instances no more."""
        for instance in instances:
            self._missing.pop(instance, None)

    def clear(self) -> None:
        """Wait for no instance any more."""
        self._missing.clear()


def decode_members(placement: HasPlacement) -> Members:
    """Return the instances that take part in decoding a sequence."""
    named = (kv_slice.instance for kv_slice in (*placement.slices, *placement.answer))
    return frozenset((placement.master, *named))


class Regrouped(NamedTuple):
    """Changes of decode groups after a sequence moved."""

    left: Members
    """Instances of the former group on which nothing decodes any more."""
    new: Members
    """Instances on which nothing decoded before."""
    merged: bool
    """Sequences of another group iterate with the moved one."""


class DecodeGroups:
    """Decode groups of all elastic gangs: instances whose sequences iterate together.

    Sequences on the same instances are counted together. There are few such sets of instances, so a
    query walks the sets and not the sequences.
    """

    def __init__(self) -> None:
        self._sequence_counts: dict[GangClient, Counter[Members]] = {}

    def add(self, gang: GangClient, members: Members) -> None:
        """Count a sequence that decodes on these instances from now on."""
        self._sequence_counts.setdefault(gang, Counter())[members] += 1

    def remove(self, gang: GangClient, members: Members) -> None:
        """Discount a sequence that no longer decodes on these instances."""
        counts = self._sequence_counts[gang]
        counts[members] -= 1
        if not counts[members]:
            del counts[members]
        if not counts:
            del self._sequence_counts[gang]

    def move(self, gang: GangClient, before: Members, after: Members) -> Regrouped:
        """Count a sequence on other instances, and return how the groups changed."""
        was = Members().union(*self.touching(gang, before))
        self.remove(gang, before)
        beside = self.touching(gang, after)
        self.add(gang, after)
        return Regrouped(
            left=was.difference(*self.touching(gang, was)),
            new=after.difference(was, *beside),
            merged=any(group.isdisjoint(was) for group in beside),
        )

    def touching(self, gang: GangClient, instances: Collection[InstanceId]) -> list[Members]:
        """Return the groups that contain some of these instances."""
        groups: list[Members] = []
        for members in self._sequence_counts.get(gang, ()):
            apart = [group for group in groups if group.isdisjoint(members)]
            groups = [*apart, members.union(*(group for group in groups if group not in apart))]
        return [group for group in groups if not group.isdisjoint(instances)]


@dataclass(eq=False, slots=True)
class LiveSequences:
    """All live sequences by sequence_id."""

    by_id: dict[SequenceId, LiveSequence] = field(default_factory=dict)
    groups: DecodeGroups = field(default_factory=DecodeGroups)
    """Decode groups of the sequences on elastic gangs that joined and are not over."""

    def add(self, sequence: LiveSequence) -> None:
        """Add a sequence whose slots are being reserved."""
        assert sequence.id not in self.by_id, f"sequence_id {sequence.id} was used before"
        self.by_id[sequence.id] = sequence

    def serving(self, sequence_id: SequenceId) -> LiveSequence | None:
        """Return the sequence, or None if it is over or unknown."""
        sequence = self.by_id.get(sequence_id)
        return None if sequence is None or sequence.over else sequence

    def join(self, sequence: LiveSequence) -> None:
        """Record that the gang was told to decode the sequence."""
        sequence.joined = True
        if sequence.decode.role == "elastic":
            self.groups.add(sequence.decode, decode_members(sequence.placement))

    def end(self, sequence: LiveSequence) -> None:
        """End the sequence's service to its request. Idempotent."""
        if not sequence.over:
            sequence.over = True
            if sequence.joined and sequence.decode.role == "elastic":
                self.groups.remove(sequence.decode, decode_members(sequence.placement))
        self.finalize(sequence)

    def finalize(self, sequence: LiveSequence) -> None:
        """Forget the sequence if it is over and no rank holds slots for it."""
        if sequence.over and not sequence.pending_free:
            self.by_id.pop(sequence.id, None)

    def drop(self, gang: GangClient) -> None:
        """End all sequences of a lost decode gang; nothing of them is left on its ranks."""
        for sequence in [known for known in self.by_id.values() if known.decode is gang]:
            sequence.pending_free.clear()
            self.end(sequence)


class ElasticEventRecorder:
    """Records the elastic events of requests, for traces and metrics.

    Args:
        groups: decode groups; a finished move updates them here.
        note: takes an event of a sequence.
    """

    def __init__(
        self, groups: DecodeGroups, note: Callable[[LiveSequence, ElasticEvent], None]
    ) -> None:
        self._groups, self._note = groups, note

    def joins(self, sequence: LiveSequence) -> None:
        """Record the events of a sequence that is about to decode on an elastic gang."""
        now, members = time.monotonic(), decode_members(sequence.placement)
        holders = {kv_slice.instance for kv_slice in sequence.placement.slices}
        if not members <= holders:
            self._note(sequence, ElasticEvent(kind="scale_up", began=now, ended=now))
        if len(self._groups.touching(sequence.decode, members)) > 1:
            self._note(sequence, ElasticEvent(kind="merge", began=now, ended=now))

    def decoded_on(self, gang: GangClient, group: Collection[InstanceId]) -> bool:
        """Return whether some of these instances decode."""
        return bool(self._groups.touching(gang, group))

    def step_done(
        self,
        command: RunStep,
        sequences: Sequence[LiveSequence],
        ranks: Sequence[PrefillDone],
        *,
        took_s: float,
        preempting: bool,
    ) -> None:
        """Record the events of a finished step of an elastic gang.

        Args:
            sequences: sequences of its chunks; the first one gets the events.
            took_s: time on the slowest instance.
            preempting: some of its instances decoded when it was launched.
        """
        ended = time.monotonic()
        began = ended - took_s
        step = command.step
        if {kv_slice.instance for kv_slice in _kv_slices(sequences)} < set(step.group):
            event = ElasticEvent(
                kind="scale_down",
                began=began,
                ended=ended,
                seconds=max((rank.placing_s for rank in ranks), default=0.0),
                sent_bytes=sum(rank.placed_bytes for rank in ranks),
                tokens=sum(chunk.length for chunk in step.chunks),
            )
            self._note(sequences[0], event)
        if preempting:
            event = ElasticEvent(kind="preempt", began=began, ended=ended, seconds=took_s)
            self._note(sequences[0], event)

    def moved(self, sequence: LiveSequence, move: LiveMove) -> None:
        """Record the events of a finished move; each carries the whole cost of the move."""
        ended = time.monotonic()
        for kind in self._kinds(sequence.decode, move):
            event = ElasticEvent(
                kind=kind,
                began=move.began,
                ended=ended,
                seconds=move.seconds,
                sent_bytes=move.sent_bytes,
                tokens=move.tokens,
            )
            self._note(sequence, event)

    def _kinds(self, gang: GangClient, move: LiveMove) -> Iterator[ElasticEventKind]:
        before, after = decode_members(move.message.before), decode_members(move.message.after)
        regrouped = self._groups.move(gang, before, after)
        if move.tokens:
            yield "migrate"
        elif move.message.before.master != move.message.after.master:
            yield "remaster"
        if regrouped.merged:
            yield "merge"
        if regrouped.left:
            yield "scale_down"
        if regrouped.new:
            yield "scale_up"


def _kv_slices(sequences: Iterable[LiveSequence]) -> Iterator[KvSlice]:
    return (kv_slice for sequence in sequences for kv_slice in sequence.placement.slices)
