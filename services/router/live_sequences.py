"""Which instances of an elastic gang are iterated together, as its rows come, move and go.

Rows that concern the same instances count together, and there are few such sets: whoever asks walks
these, and not the rows.

One attempt at a request as the router keeps track of it on the ranks.

Rows that are on their way to other instances, from the command until all ranks have told.

A row has two masters in the meantime, and their connections to the router have no common order:
what the next one draws may arrive before the last token of the one before.

When groups of an elastic gang grow, shrink, merge or give way, as the router sees it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from csps.protocols.gang.client import GangClient
from csps.protocols.gang.messages import RankKvReceived
from csps.services.requests.request_handle import RequestHandle
from csps.services.scheduling.events.commands import Reserve
from csps.services.scheduling.events.events import InstanceId, SequenceId, index_of
from csps.services.scheduling.events.slices import own
from csps.services.scheduling.state.ledger import HasPlacement, decode_slots

if TYPE_CHECKING:
    pass
import time
from collections.abc import Callable, Iterator, Sequence

from csps.protocols.gang.messages import PrefillDone, SampledToken
from csps.protocols.gang.step_messages import SequenceMoved
from csps.services.requests.elastic_event import ElasticEvent, ElasticEventKind
from csps.services.scheduling.events.commands import MoveKv, PlacedSlice, RunStep

Members = frozenset[InstanceId]


def decode_members(placement: HasPlacement) -> Members:
    """Who takes part in decoding a sequence."""
    named = (kv_slice.instance for kv_slice in (*placement.slices, *placement.answer))
    return frozenset((placement.master, *named))


class Regrouped(NamedTuple):
    """What a row that goes on elsewhere has changed."""

    left: Members
    """Instances of its group on which nothing is decoded any more."""
    new: Members
    """Instances on which nothing was decoded before."""
    met: bool
    """Rows of another group go on with it."""


class DecodeGroups:
    """Of all gangs."""

    def __init__(self) -> None:
        self._sequence_counts: dict[GangClient, Counter[Members]] = {}

    def add(self, gang: GangClient, members: Members) -> None:
        """A row that concerns these instances is decoded from now on."""
        self._sequence_counts.setdefault(gang, Counter())[members] += 1

    def remove(self, gang: GangClient, members: Members) -> None:
        """One is not any more."""
        counts = self._sequence_counts[gang]
        counts[members] -= 1
        if not counts[members]:
            del counts[members]
        if not counts:
            del self._sequence_counts[gang]

    def move(self, gang: GangClient, before: Members, after: Members) -> Regrouped:
        """A row concerns other instances from now on."""
        was = Members().union(*self.touching(gang, before))
        self.remove(gang, before)
        beside = self.touching(gang, after)
        self.add(gang, after)
        return Regrouped(
            left=was.difference(*self.touching(gang, was)),
            new=after.difference(was, *beside),
            met=any(it.isdisjoint(was) for it in beside),
        )

    def touching(self, gang: GangClient, instances: Collection[InstanceId]) -> list[Members]:
        """Groups that have some of these instances."""
        groups: list[Members] = []
        for members in self._sequence_counts.get(gang, ()):
            apart = [group for group in groups if group.isdisjoint(members)]
            groups = [*apart, members.union(*(group for group in groups if group not in apart))]
        return [group for group in groups if not group.isdisjoint(instances)]


class InstanceRanks:
    """Which ranks of which instances have not reported yet: events speak of instances, and all
    `tp` ranks of one hold the same tokens, each with its own heads."""

    def __init__(self, gang: GangClient, instances: Iterable[InstanceId]) -> None:
        self.gang = gang
        self._missing = {instance: set(gang.ranks_of(index_of(instance))) for instance in instances}

    def __bool__(self) -> bool:
        return bool(self._missing)

    def __contains__(self, instance: InstanceId) -> bool:
        return instance in self._missing

    def reported(self, instance: InstanceId, rank: int) -> bool:
        """A rank has reported; true if it was the last one of its instance."""
        missing = self._missing.get(instance)
        if missing is None:
            return False
        missing.discard(rank)
        if missing:
            return False
        del self._missing[instance]
        return True

    def expect(self, instances: Iterable[InstanceId]) -> None:
        """These are to report as well, all of their ranks."""
        for instance in instances:
            self._missing[instance] = set(self.gang.ranks_of(index_of(instance)))

    def discard(self, instances: Iterable[InstanceId]) -> None:
        """Whether these report does not matter any more."""
        for instance in instances:
            self._missing.pop(instance, None)

    def clear(self) -> None:
        """Nobody will report any more."""
        self._missing.clear()


@dataclass(eq=False, slots=True)
class LiveSequence:
    """A sequence from its reservation until every decode rank has freed what it holds.

    It outlives its service to the request (`over`) by as long as its slots take to come back.
    """

    command: Reserve
    placement: HasPlacement
    """Where it is decoded: as it was reserved, or where it was moved to since."""
    handle: RequestHandle
    decode: GangClient
    pending_kv: InstanceRanks
    pending_free: InstanceRanks
    first_index: int
    """Of the first token that this sequence draws; 0 unless a former one has drawn some."""
    next_index: int
    """Of the answer's token to come."""
    reserving: asyncio.Task[None] | None = None
    cancel_when_reserved: bool = False
    """Its decode ranks are to free it as soon as all of them have answered the reservation."""
    over: bool = False
    """Serves its request no more: tokens that still come for it are dropped."""
    last_token: int = -1
    joined: bool = False
    """Its gang was told to decode it."""
    decode_ended: bool = False
    """Its gang decodes it no more: a rank has told that it holds nothing of it."""
    move: LiveMove | None = None
    """To other instances, while it is on its way."""
    kv_received: list[RankKvReceived] = field(default_factory=list)
    """What ranks with all of their KV of the prompt have said."""

    @property
    def id(self) -> SequenceId:
        """The name that ranks know it by."""
        return self.command.sequence_id

    @property
    def reservation_pending(self) -> bool:
        """Some decode rank has not answered."""
        return self.reserving is not None and not self.reserving.done()


def live_sequence(command: Reserve, handle: RequestHandle, decode: GangClient) -> LiveSequence:
    """A sequence that nobody was asked for anything yet."""
    holders = decode_slots(command, command.output_tokens)
    return LiveSequence(
        command=command,
        placement=command,
        handle=handle,
        decode=decode,
        pending_kv=InstanceRanks(decode, [it.instance for it in own(command.slices)]),
        pending_free=InstanceRanks(decode, holders),
        first_index=handle.timings.tokens,
        next_index=handle.timings.tokens,
    )


@dataclass(eq=False, slots=True)
class LiveSequences:
    """All of them, by their ids."""

    by_id: dict[SequenceId, LiveSequence] = field(default_factory=dict)
    groups: DecodeGroups = field(default_factory=DecodeGroups)
    """Of those of elastic gangs that have joined and are not over."""

    def add(self, sequence: LiveSequence) -> None:
        """It was reserved."""
        assert sequence.id not in self.by_id, "sequence ids never come again"
        self.by_id[sequence.id] = sequence

    def serving(self, sequence_id: SequenceId) -> LiveSequence | None:
        """The sequence, unless it is over or was never here."""
        sequence = self.by_id.get(sequence_id)
        return None if sequence is None or sequence.over else sequence

    def join(self, sequence: LiveSequence) -> None:
        """Its gang is told to decode it."""
        sequence.joined = True
        if sequence.decode.role == "elastic":
            self.groups.add(sequence.decode, decode_members(sequence.placement))

    def end(self, sequence: LiveSequence) -> None:
        """It serves its request no more. Idempotent."""
        if not sequence.over:
            sequence.over = True
            if sequence.joined and sequence.decode.role == "elastic":
                self.groups.remove(sequence.decode, decode_members(sequence.placement))
        self.finalize(sequence)

    def finalize(self, sequence: LiveSequence) -> None:
        """Forget it once it is over and nothing of it is left anywhere."""
        if sequence.over and not sequence.pending_free:
            self.by_id.pop(sequence.id, None)

    def drop(self, gang: GangClient) -> None:
        """A decode gang is gone: nothing of its sequences is left anywhere, and none goes on."""
        for sequence in [it for it in self.by_id.values() if it.decode is gang]:
            sequence.pending_free.clear()
            self.end(sequence)


@dataclass(eq=False, slots=True)
class LiveMove:
    """One row's."""

    command: MoveKv
    before: HasPlacement
    pending_acks: InstanceRanks
    began: float = field(default_factory=time.monotonic)
    acks: list[SequenceMoved] = field(default_factory=list)
    early: dict[int, SampledToken] = field(default_factory=dict)
    """By their indices, tokens that came before others."""

    @property
    def tokens(self) -> int:
        """Whose KV has moved; every rank of an instance has its own heads of them."""
        tp = max(1, self.pending_acks.gang.tp)
        return sum(ack.tokens for ack in self.acks) // tp

    @property
    def sent_bytes(self) -> int:
        """Over all ranks."""
        return sum(ack.sent_bytes for ack in self.acks)

    @property
    def seconds(self) -> float:
        """Of the rank that was longest at it."""
        return max((ack.seconds for ack in self.acks), default=0.0)


def end_move(sequence: LiveSequence, move: LiveMove) -> None:
    """A row goes on where it was moved to. Ranks there may have told already that it has ended."""
    before, after = decode_slots(sequence.placement, 0), decode_slots(move.command, 0)
    sequence.move = None
    sequence.placement = move.command
    sequence.pending_free.discard(it for it in before if it not in after)


class ElasticEventRecorder:
    """Notes them where requests are traced and counted.

    Args:
        groups: instances that are iterated together; they follow what has moved from here.
        note: takes what has happened to a request.
    """

    def __init__(
        self, groups: DecodeGroups, note: Callable[[LiveSequence, ElasticEvent], None]
    ) -> None:
        self._groups, self._note = groups, note

    def joins(self, sequence: LiveSequence) -> None:
        """A sequence is about to be decoded, on an elastic gang."""
        now, members = time.monotonic(), decode_members(sequence.placement)
        holders = {kv_slice.instance for kv_slice in sequence.placement.slices}
        if not members <= holders:
            self._note(sequence, ElasticEvent(kind="scale_up", began=now, ended=now))
        if len(self._groups.touching(sequence.decode, members)) > 1:
            self._note(sequence, ElasticEvent(kind="merge", began=now, ended=now))

    def decoded_on(self, gang: GangClient, group: Collection[InstanceId]) -> bool:
        """Whether some of these instances decode."""
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
        """A step of an elastic gang is over.

        Args:
            sequences: of its pieces; the first one's trace is told.
            took_s: on the instance that was longest at it.
            preempting: some of its instances decoded when it was launched.
        """
        ended = time.monotonic()
        began = ended - took_s
        if {kv_holder.instance for kv_holder in _kv_holders(sequences)} < set(command.group):
            event = ElasticEvent(
                kind="scale_down",
                began=began,
                ended=ended,
                seconds=max((rank.placing_s for rank in ranks), default=0.0),
                sent_bytes=sum(rank.placed_bytes for rank in ranks),
                tokens=sum(chunk.length for chunk in command.chunks),
            )
            self._note(sequences[0], event)
        if preempting:
            event = ElasticEvent(kind="preempt", began=began, ended=ended, seconds=took_s)
            self._note(sequences[0], event)

    def moved(self, sequence: LiveSequence, move: LiveMove) -> None:
        """A row goes on where it was moved to. A move may be several events, each of which has all
        that it cost."""
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
        found = self._groups.move(gang, decode_members(move.before), decode_members(move.command))
        if move.tokens:
            yield "migrate"
        elif move.before.master != move.command.master:
            yield "remaster"
        if found.met:
            yield "merge"
        if found.left:
            yield "scale_down"
        if found.new:
            yield "scale_up"


def _kv_holders(sequences: Iterable[LiveSequence]) -> Iterator[PlacedSlice]:
    return (kv_slice for sequence in sequences for kv_slice in sequence.placement.slices)
