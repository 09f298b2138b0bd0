"""One attempt at a request as the router keeps track of it on the ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from csps.protocols.gang_client import GangClient
from csps.protocols.messages import KvLanded
from csps.services.router.decode_groups import DecodeGroups, concerned
from csps.services.router.running import Running
from csps.services.scheduling.commands import Reserve
from csps.services.scheduling.decode_slots import Placed, decode_slots
from csps.services.scheduling.ids import InstanceId, SequenceId, index_of
from csps.services.scheduling.shares import own

if TYPE_CHECKING:
    from csps.services.router.moves import LiveMove


class InstanceRanks:
    """Which ranks of which instances have not reported yet: events speak of instances, and all
    `tp` ranks of one hold the same tokens, each with its own heads."""

    def __init__(self, gang: GangClient, instances: Iterable[InstanceId]) -> None:
        self.gang = gang
        self._missing = {it: set(gang.ranks_of(index_of(it))) for it in instances}

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
        for it in instances:
            self._missing[it] = set(self.gang.ranks_of(index_of(it)))

    def forget(self, instances: Iterable[InstanceId]) -> None:
        """Whether these report does not matter any more."""
        for it in instances:
            self._missing.pop(it, None)

    def clear(self) -> None:
        """Nobody will report any more."""
        self._missing.clear()


@dataclass(eq=False, slots=True)
class LiveSequence:
    """A sequence from its reservation until every decode rank has freed what it holds.

    It outlives its service to the request (`over`) by as long as its slots take to come back.
    """

    command: Reserve
    placed: Placed
    """Where it is decoded: as it was reserved, or where it was moved to since."""
    running: Running
    decode: GangClient
    unlanded: InstanceRanks
    unfreed: InstanceRanks
    first_index: int
    """Of the first token that this sequence draws; 0 unless a former one has drawn some."""
    next_index: int
    """Of the answer's token to come."""
    reserving: asyncio.Task[None] | None = None
    withdrawn: bool = False
    """Its decode ranks are to free it as soon as all of them have answered the reservation."""
    over: bool = False
    """Serves its request no more: tokens that still come for it are dropped."""
    last_token: int = -1
    joined: bool = False
    """Its gang was told to decode it."""
    leaving: bool = False
    """Its gang decodes it no more: a rank has told that it holds nothing of it."""
    move: LiveMove | None = None
    """To other instances, while it is on its way."""
    landed: list[KvLanded] = field(default_factory=list)
    """What ranks with all of their KV of the prompt have said."""

    @property
    def id(self) -> SequenceId:
        """The name that ranks know it by."""
        return self.command.sequence

    @property
    def reserved_not_yet(self) -> bool:
        """Some decode rank has not answered."""
        return self.reserving is not None and not self.reserving.done()


def live_sequence(command: Reserve, running: Running, decode: GangClient) -> LiveSequence:
    """A sequence that nobody was asked for anything yet."""
    holders = decode_slots(command, command.output_tokens)
    return LiveSequence(
        command=command,
        placed=command,
        running=running,
        decode=decode,
        unlanded=InstanceRanks(decode, [it.instance for it in own(command.shares)]),
        unfreed=InstanceRanks(decode, holders),
        first_index=running.timings.tokens,
        next_index=running.timings.tokens,
    )


@dataclass(eq=False, slots=True)
class Sequences:
    """All of them, by their ids."""

    by_id: dict[SequenceId, LiveSequence] = field(default_factory=dict)
    groups: DecodeGroups = field(default_factory=DecodeGroups)
    """Of those of elastic gangs that have joined and are not over."""

    def add(self, sequence: LiveSequence) -> None:
        """It was reserved."""
        assert sequence.id not in self.by_id, "sequence ids never come again"
        self.by_id[sequence.id] = sequence

    def serving(self, number: SequenceId) -> LiveSequence | None:
        """The sequence, unless it is over or was never here."""
        sequence = self.by_id.get(number)
        return None if sequence is None or sequence.over else sequence

    def join(self, sequence: LiveSequence) -> None:
        """Its gang is told to decode it."""
        sequence.joined = True
        if sequence.decode.role == "elastic":
            self.groups.add(sequence.decode, concerned(sequence.placed))

    def end(self, sequence: LiveSequence) -> None:
        """It serves its request no more. Idempotent."""
        if not sequence.over:
            sequence.over = True
            if sequence.joined and sequence.decode.role == "elastic":
                self.groups.remove(sequence.decode, concerned(sequence.placed))
        self.settle(sequence)

    def settle(self, sequence: LiveSequence) -> None:
        """Forget it once it is over and nothing of it is left anywhere."""
        if sequence.over and not sequence.unfreed:
            self.by_id.pop(sequence.id, None)

    def drop(self, gang: GangClient) -> None:
        """A decode gang is gone: nothing of its sequences is left anywhere, and none goes on."""
        for sequence in [it for it in self.by_id.values() if it.decode is gang]:
            sequence.unfreed.clear()
            self.end(sequence)
