"""KV slots as the ranks count them, apart from the scheduler's ledger."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence


class Slots:
    """Slots of a gang's instances. More than there are is a mistake of the scheduler's."""

    def __init__(self, capacities: Sequence[int]) -> None:
        self.free = list(capacities)
        self._capacities = tuple(capacities)
        self._held: dict[Hashable, dict[int, int]] = {}

    def take(self, owner: Hashable, slots: Mapping[int, int]) -> None:
        """Give `owner` so many slots of each instance, by index."""
        assert owner not in self._held, f"{owner} has slots already"
        for index, count in slots.items():
            assert count <= self.free[index], (
                f"instance {index} has {self.free[index]} free slots, {owner} was given {count}"
            )
            self.free[index] -= count
        self._held[owner] = dict(slots)

    def change(self, owner: Hashable, slots: Mapping[int, int]) -> None:
        """Give `owner`, who has some, so many of each instance instead."""
        for index in self.held_by(owner):
            self.give_back(owner, index)
        self.take(owner, slots)

    def counts(self, owner: Hashable) -> dict[int, int]:
        """Slots of `owner`, by instance."""
        return dict(self._held.get(owner, {}))

    def hold(self, owner: Hashable, slots: Mapping[int, int]) -> None:
        """Have `owner` hold so many slots of each instance, and no others."""
        for index in self.held_by(owner):
            self.give_back(owner, index)
        if wanted := {index: count for index, count in slots.items() if count}:
            self.take(owner, wanted)

    def give_back(self, owner: Hashable, index: int) -> None:
        """Free what `owner` holds on an instance."""
        self.free[index] += self._held[owner].pop(index)
        if not self._held[owner]:
            del self._held[owner]

    def held_by(self, owner: Hashable) -> tuple[int, ...]:
        """Instances on which `owner` holds slots, ascending."""
        return tuple(sorted(self._held.get(owner, ())))

    @property
    def used(self) -> int:
        """Slots taken, on all instances."""
        return sum(self._capacities) - sum(self.free)

    def check_integrity(self) -> None:
        """Assert that no slot was lost or given twice."""
        for index, capacity in enumerate(self._capacities):
            held = sum(slots.get(index, 0) for slots in self._held.values())
            assert self.free[index] + held == capacity, f"instance {index} has lost slots"
