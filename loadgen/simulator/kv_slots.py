"""KV slots as the ranks count them, apart from the scheduler's ledger.

KV that simulated gangs keep beyond its sequence, by the name of who has computed it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from csps.protocols.core.placement import Span
from csps.services.scheduling.events.commands import Evict, PlacedSlice, Retain
from csps.services.scheduling.events.events import Retained, SequenceId, index_of, instance_id
from csps.services.scheduling.events.slices import outside, tokens_on, within


class Slots:
    """Slots of a gang's instances. More than there are is a mistake of the scheduler's."""

    def __init__(self, capacities: Sequence[int]) -> None:
        self.free = list(capacities)
        self._capacities = tuple(capacities)
        self._taken: dict[Hashable, dict[int, int]] = {}

    def take(self, owner: Hashable, slots: Mapping[int, int]) -> None:
        """Give `owner` so many slots of each instance, by index."""
        assert owner not in self._taken, f"{owner} has slots already"
        for index, count in slots.items():
            assert count <= self.free[index], (
                f"instance {index} has {self.free[index]} free slots, {owner} was given {count}"
            )
            self.free[index] -= count
        self._taken[owner] = dict(slots)

    def change(self, owner: Hashable, slots: Mapping[int, int]) -> None:
        """Give `owner`, who has some, so many of each instance instead."""
        for index in self.instances_of(owner):
            self.release(owner, index)
        self.take(owner, slots)

    def counts(self, owner: Hashable) -> dict[int, int]:
        """Slots of `owner`, by instance."""
        return dict(self._taken.get(owner, {}))

    def assign(self, owner: Hashable, slots: Mapping[int, int]) -> None:
        """Have `owner` hold so many slots of each instance, and no others."""
        for index in self.instances_of(owner):
            self.release(owner, index)
        if wanted := {index: count for index, count in slots.items() if count}:
            self.take(owner, wanted)

    def release(self, owner: Hashable, index: int) -> None:
        """Free what `owner` holds on an instance."""
        self.free[index] += self._taken[owner].pop(index)
        if not self._taken[owner]:
            del self._taken[owner]

    def instances_of(self, owner: Hashable) -> tuple[int, ...]:
        """Instances on which `owner` holds slots, ascending."""
        return tuple(sorted(self._taken.get(owner, ())))

    @property
    def used(self) -> int:
        """Slots taken, on all instances."""
        return sum(self._capacities) - sum(self.free)

    def check_integrity(self) -> None:
        """Assert that no slot was lost or given twice."""
        for index, capacity in enumerate(self._capacities):
            taken = sum(slots.get(index, 0) for slots in self._taken.values())
            assert self.free[index] + taken == capacity, f"instance {index} has lost slots"


class SimulatedPrefixCache:
    """What one gang has kept.

    Args:
        slots: of its instances.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._stored: dict[SequenceId, tuple[PlacedSlice, ...]] = {}

    @property
    def tokens(self) -> int:
        """Of everything."""
        return sum(it.tokens for slices in self._stored.values() for it in slices)

    def has(self, slices: Iterable[PlacedSlice]) -> bool:
        """Whether what is reused is here."""
        return all(
            share.tokens
            == sum(
                it.span.intersection(share.span).length
                for it in self._stored.get(share.source, ())
                if it.instance == share.instance
            )
            for share in slices
            if share.source
        )

    def add(self, sequence: SequenceId, slices: tuple[PlacedSlice, ...]) -> None:
        """More of a sequence stays, and nothing else has slots for it."""
        self._set(sequence, (*outside(self._stored.get(sequence, ()), slices), *slices))

    def apply(self, command: Retain | Evict) -> list[Retained]:
        """Keep what a command says; returns what each instance of the gang has left."""
        stored = self._stored.get(command.sequence_id, ())
        span = Span(command.start, max(command.start, command.stop))
        if isinstance(command, Retain):
            left = within(stored, span)
        else:
            left = tuple(it.cut(rest) for it in stored for rest in it.span.without(span))
        self._set(command.sequence_id, left)
        instances = (instance_id(command.gang, it) for it in range(len(self._slots.free)))
        tokens = tokens_on(left)
        return [
            Retained(
                sequence_id=command.sequence_id, instance=instance, tokens=tokens.get(instance, 0)
            )
            for instance in instances
        ]

    def _set(self, sequence: SequenceId, slices: tuple[PlacedSlice, ...]) -> None:
        self._slots.assign(("kept", sequence), _by_index(slices))
        self._stored[sequence] = slices
        if not slices:
            del self._stored[sequence]


def _by_index(slices: Iterable[PlacedSlice]) -> dict[int, int]:
    return {index_of(it): count for it, count in tokens_on(slices).items()}
