"""The sequences of a simulated gang that decodes: whose KV has slots there, and until when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from csps.loadgen.simulator.gang_listener import GangListener
from csps.loadgen.simulator.kept_kv import KeptKv
from csps.loadgen.simulator.requests import Sequence
from csps.loadgen.simulator.slots import Slots
from csps.services.scheduling.commands import Keep, Release, Reserve, Share
from csps.services.scheduling.decode_slots import decode_slots
from csps.services.scheduling.events import Freed, Landed
from csps.services.scheduling.ids import (
    GangId,
    InstanceId,
    RequestId,
    SequenceId,
    index_of,
    instance_id,
)
from csps.services.scheduling.shares import own


def coming(number: SequenceId) -> tuple[str, SequenceId]:
    """Who owns the slots of KV of a sequence that is on its way to other instances."""
    return "move", number


class HeldSequences:
    """Those of one incarnation of a gang.

    Args:
        gang: which.
        slots: of its instances.
        listener: is told what has landed and what is free.
    """

    def __init__(self, gang: GangId, slots: Slots, listener: GangListener) -> None:
        self.gang, self.slots = gang, slots
        self.kept = KeptKv(slots)
        self._listener = listener
        self._sequences: dict[SequenceId, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def get(self, number: SequenceId) -> Sequence | None:
        """One of them, if it is here."""
        return self._sequences.get(number)

    def __getitem__(self, number: SequenceId) -> Sequence:
        return self._sequences[number]

    def clear(self) -> None:
        """The gang is gone."""
        self._sequences.clear()

    # --- coming --------------------------------------------------------------------------------

    def reserve(self, command: Reserve, *, before: int, left: int) -> None:
        """Set slots aside.

        Args:
            command: the scheduler's.
            before: tokens that earlier sequences have drawn.
            left: tokens that the request still draws; the scheduler does not know.
        """
        sequence = Sequence(
            sequence=command.sequence,
            request=command.request,
            prompt_tokens=command.prompt_tokens,
            shares=command.shares,
            master=command.master,
            answer=command.answer,
            before=before,
            tokens=left,
            cached=command.cached,
            stays=command.stays,
        )
        sequence.missing = {} if command.rides else sequence.slots
        # What is to be kept when an iteration has ended lies here already.
        kept = [it for it in command.shares if it.origin not in self._sequences]
        assert self.kept.has(kept), "reuses what is not kept"
        slots = decode_slots(command, command.output_tokens)
        if slots:
            self.slots.take(command.sequence, {index_of(it): n for it, n in slots.items()})
        self._sequences[command.sequence] = sequence

    def not_reserved(self, command: Reserve) -> None:
        """Nobody waits for the request any more, of which the scheduler had not heard."""
        named = decode_slots(command, command.output_tokens)
        self.tell_freed(command.sequence, map(index_of, named))

    def arrived(self, number: SequenceId, instance: InstanceId, tokens: int) -> bool:
        """KV has come that was expected; whether that was all of it."""
        missing = self._sequences[number].missing
        missing[instance] -= tokens
        return not missing[instance]

    def landed(self, number: SequenceId, instance: InstanceId) -> None:
        """All that an instance expects of a sequence has come."""
        sequence = self._sequences[number]
        del sequence.missing[instance]
        if not sequence.over:
            tokens = sequence.slots[instance]
            self._listener.tell_later(Landed(sequence=number, instance=instance, tokens=tokens))

    # --- going ---------------------------------------------------------------------------------

    def give_up(self, number: SequenceId) -> None:
        """A sequence serves its request no more."""
        if (sequence := self._sequences.get(number)) is not None:
            sequence.over = True
            if not sequence.shares:  # nothing of it lies here
                del self._sequences[number]

    def end_request(self, request: RequestId) -> None:
        """The client is gone: nothing is drawn for it any more."""
        for sequence in self:
            if sequence.request == request:
                sequence.over = True

    def free(self, number: SequenceId) -> None:
        """No iteration needs a sequence's KV any more."""
        if self._sequences.pop(number, None) is None:
            return
        held = self.slots.held_by(number)
        for index in held:
            self.slots.give_back(number, index)
        still = self.slots.held_by(coming(number))
        self.tell_freed(number, [it for it in held if it not in still])

    def tell_freed(self, number: SequenceId, indices: Iterable[int]) -> None:
        """Instances hold nothing of a sequence."""
        for index in indices:
            instance = instance_id(self.gang, index)
            self._listener.tell_later(Freed(sequence=number, instance=instance))

    def keep(self, command: Keep) -> None:
        """No iteration needs a sequence's KV any more, some of which stays."""
        sequence = self._sequences.pop(command.sequence, None)
        if sequence is None:
            return
        for index in self.slots.held_by(command.sequence):
            self.slots.give_back(command.sequence, index)
        prompt = sequence.prompt_tokens
        answer = sequence.answer or (Share(sequence.master, prompt, prompt + sequence.tokens),)
        self.kept.add(command.sequence, (*own(sequence.shares), *answer))
        self._obey(command)
        for later in sequence.releases:
            self._obey(later)

    def release(self, command: Release) -> None:
        """Free some of what was kept, or is going to be when its last iteration has ended."""
        if (sequence := self._sequences.get(command.sequence)) is not None:
            sequence.releases.append(command)
        else:
            self._obey(command)

    def _obey(self, command: Keep | Release) -> None:
        for event in self.kept.obey(command):
            self._listener.tell_later(event)
