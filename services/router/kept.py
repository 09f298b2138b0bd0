"""What ranks say that they have left of sequences whose KV is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from csps.protocols.gang_client import GangClient
from csps.services.scheduling.events import Kept
from csps.services.scheduling.ids import GangId, SequenceId, instance_id


@dataclass(eq=False, slots=True)
class _Told:
    times: int = 0
    """How often the gang was told what to keep, or to release."""
    answers: dict[int, int] = field(default_factory=dict)
    """By rank."""
    passed_on: dict[int, int] = field(default_factory=dict)
    """By instance."""


class KeptReports:
    """Every rank of a gang answers every `keep` and `release`, in order; the scheduler hears of an
    instance when all of its ranks have.

    Args:
        tell: takes events for the scheduler.
    """

    def __init__(self, tell: Callable[[Kept], None]) -> None:
        self._tell = tell
        self._told: dict[tuple[GangId, SequenceId], _Told] = {}

    def told(self, number: GangId, sequence: SequenceId) -> None:
        """A gang was told about a sequence once more."""
        self._told.setdefault((number, sequence), _Told()).times += 1

    def answered(
        self, number: GangId, gang: GangClient, rank: int, sequence: SequenceId, tokens: int
    ) -> bool:
        """A rank has so much left of a sequence; false if nobody has asked."""
        told = self._told.get((number, sequence))
        if told is None:
            return False
        told.answers[rank] = told.answers.get(rank, 0) + 1
        index = gang.instance_of(rank)
        complete = min(told.answers.get(it, 0) for it in gang.ranks_of(index))
        if complete > told.passed_on.get(index, 0):
            told.passed_on[index] = complete
            instance = instance_id(number, index)
            self._tell(Kept(sequence=sequence, instance=instance, tokens=tokens))
        answers = [told.answers.get(it, 0) for it in range(gang.world_size)]
        if min(answers) >= told.times:
            del self._told[number, sequence]
        return True

    def forget(self, number: GangId) -> None:
        """The gang is gone."""
        self._told = {key: it for key, it in self._told.items() if key[0] != number}
