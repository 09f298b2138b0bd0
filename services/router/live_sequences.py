"""Sequences on the ranks: attempts at requests, as the router keeps track of them.

A `LiveSequence` exists from its reservation until every decode rank has freed its slots. It may
move to other instances of an elastic gang (`LiveMove`). `PendingRanks` waits for the reports of all
ranks of an instance: about KV, slots, moves and steps. The last functions return the elastic events
of a sequence that joins or moves, and of a step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from csps.protocols.core.placement import own
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.messages import (
    PrefillDone,
    RankKvReceived,
    SampledToken,
    SamplerInputs,
)
from csps.protocols.gang.step_messages import MoveSequence, PrefillStep, SequenceMoved
from csps.protocols.rpc.schema import encode
from csps.services.requests.request_handle import ElasticEvent, ElasticEventKind, RequestHandle
from csps.services.scheduling.events.commands import Reserve
from csps.services.scheduling.events.events import InstanceId, SequenceId, index_of
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
    pending_kv: PendingRanks
    pending_free: PendingRanks
    first_index: int
    """Index of the first token that this sequence samples: the tokens of former attempts."""
    next_index: int
    """Index of the answer's next token."""
    reserving: asyncio.Task[None] | None = None
    cancel_when_reserved: bool = False
    """The decode ranks are told to cancel once all of them answered the reservation."""
    packed_sampler: bytes = b""
    front: bool = False
    """It is the beginning of its request's prompt alone, which waits for the rest."""
    over: bool = False
    """The sequence no longer serves its request; late tokens are dropped."""
    last_token: int = -1
    withheld: SampledToken | None = None
    """First token, while log-probabilities of the prompt are missing."""
    members: Members = frozenset()
    """Instances that decode the sequence; none before the gang was told to decode it."""
    decode_ended: bool = False
    """The gang decodes the sequence no more: a rank reported that it freed its slots."""
    move: LiveMove | None = None
    """Move to other instances, while it is in progress."""
    kv_received: list[RankKvReceived] = field(default_factory=list)
    """Reports of ranks that received all of their KV of the prompt."""

    @property
    def id(self) -> SequenceId:
        """Return the sequence_id, by which ranks know the sequence."""
        return self.command.message.sequence_id

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

    def end_move(self, move: LiveMove) -> None:
        """Continue where the sequence was moved to."""
        before, after = decode_slots(self.placement, 0), decode_slots(move.message.after, 0)
        self.move, self.placement = None, move.message.after
        self.members = decode_members(self.placement)
        # Ranks there may already have reported that the sequence ended: no `expect` here.
        self.pending_free.discard(instance for instance in before if instance not in after)

    @property
    def reservation_pending(self) -> bool:
        """Return whether some decode rank has not answered the reservation."""
        return self.reserving is not None and not self.reserving.done()


def token_bytes(tokens: NDArray[np.int32]) -> bytes:
    """Return token ids as they travel: little-endian int32."""
    return tokens.astype("<i4", copy=False).tobytes()


def live_sequence(command: Reserve, handle: RequestHandle, decode: GangClient) -> LiveSequence:
    """Return the record of a sequence for which no rank was asked anything yet."""
    reserved = command.message
    receiving = {kv_slice.instance for kv_slice in own(reserved.slices)}
    if decode.window > 1 and reserved.slices:
        receiving.add(reserved.master)
    return LiveSequence(
        command=command,
        placement=reserved,
        handle=handle,
        decode=decode,
        pending_kv=PendingRanks(decode, receiving),
        pending_free=PendingRanks(decode, decode_slots(reserved, reserved.output_tokens)),
        front=reserved.prompt_tokens < handle.spec.prompt.size,
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
    pending_acks: PendingRanks
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


class PendingRanks:
    """Ranks that have not reported yet, by instance: each reports once.

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

    def awaits(self, instance: InstanceId, rank: int) -> bool:
        """Return whether this rank has not reported yet."""
        return rank in self._missing.get(instance, ())

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


# --- elastic events ----------------------------------------------------------------------------


def decode_groups(placements: Iterable[Members]) -> list[Members]:
    """Return the instances that iterate together, from the members of all sequences of a gang."""
    groups: list[Members] = []
    for members in set(placements):
        apart = [group for group in groups if group.isdisjoint(members)]
        groups = [*apart, members.union(*(group for group in groups if group not in apart))]
    return groups


def join_events(sequence: LiveSequence, others: Iterable[Members]) -> Iterator[ElasticEvent]:
    """Yield the events of a sequence that begins to decode on an elastic gang.

    Args:
        others: the members of the gang's other sequences.
    """
    now = time.monotonic()
    holders = {kv_slice.instance for kv_slice in sequence.placement.slices}
    if not sequence.members <= holders:
        yield ElasticEvent(kind="scale_up", began=now, ended=now)
    touched = [group for group in decode_groups(others) if not group.isdisjoint(sequence.members)]
    if len(touched) > 1:
        yield ElasticEvent(kind="merge", began=now, ended=now)


def step_events(
    step: PrefillStep,
    sequences: Sequence[LiveSequence],
    ranks: Sequence[PrefillDone],
    *,
    took_s: float,
    preempting: bool,
) -> Iterator[ElasticEvent]:
    """Yield the events of a finished step of an elastic gang.

    Args:
        sequences: sequences of its chunks.
        took_s: time on the slowest instance.
        preempting: some of its instances decoded when it was launched.
    """
    ended = time.monotonic()
    began = ended - took_s
    slices = (kv_slice for sequence in sequences for kv_slice in sequence.placement.slices)
    if {kv_slice.instance for kv_slice in slices} < set(step.group):
        yield ElasticEvent(
            kind="scale_down",
            began=began,
            ended=ended,
            seconds=max((rank.placing_s for rank in ranks), default=0.0),
            sent_bytes=sum(rank.placed_bytes for rank in ranks),
            tokens=sum(chunk.length for chunk in step.chunks),
        )
    if preempting:
        yield ElasticEvent(kind="preempt", began=began, ended=ended, seconds=took_s)


def move_events(move: LiveMove, others: Iterable[Members]) -> Iterator[ElasticEvent]:
    """Yield the events of a finished move; each carries the whole cost of the move.

    Args:
        others: the members of the gang's other sequences.
    """
    ended = time.monotonic()
    for kind in _kinds(move, others):
        yield ElasticEvent(
            kind=kind,
            began=move.began,
            ended=ended,
            seconds=move.seconds,
            sent_bytes=move.sent_bytes,
            tokens=move.tokens,
        )


def _kinds(move: LiveMove, others: Iterable[Members]) -> Iterator[ElasticEventKind]:
    message = move.message
    if move.tokens:
        yield "migrate"
    elif message.before.master != message.after.master:
        yield "remaster"
    yield from regroupings(decode_members(message.before), decode_members(message.after), others)


def regroupings(
    before: Members, after: Members, others: Iterable[Members]
) -> Iterator[ElasticEventKind]:
    """Yield how decode groups change when a sequence moves from instances to others.

    Args:
        others: the members of the gang's other sequences.
    """
    groups = decode_groups(others)
    busy = frozenset[InstanceId]().union(*groups)
    if any(group.isdisjoint(before) and not group.isdisjoint(after) for group in groups):
        yield "merge"
    if before - after - busy:
        yield "scale_down"
    if after - before - busy:
        yield "scale_up"
