"""Slots of a gang's KV pools, as the router counts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class KvLedger:
    """Who has how many slots of which instance.

    The ranks own the pools. This is the router's conservative copy: slots count as taken before a
    rank is asked for them, and as free only after the rank has said so. A gang's ledger goes with
    the gang.

    Parameters
    ----------
    capacities
        Slots of each instance, in tokens.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self._capacities = tuple(capacities)
        self._used = [0] * len(capacities)
        self._held: dict[int, dict[int, int]] = {}

    @property
    def capacities(self) -> tuple[int, ...]:
        """Slots of each instance."""
        return self._capacities

    @property
    def used(self) -> tuple[int, ...]:
        """Slots taken of each instance."""
        return tuple(self._used)

    @property
    def owners(self) -> frozenset[int]:
        """Whoever holds slots."""
        return frozenset(self._held)

    def free(self, instance: int) -> int:
        """Slots left on an instance."""
        return self._capacities[instance] - self._used[instance]

    def reserve(self, owner: int, slots: Mapping[int, int]) -> None:
        """Give `owner`, who has none yet, that many slots of each instance; all or nothing."""
        assert owner not in self._held, f"{owner} already holds slots"
        for instance, count in slots.items():
            assert 0 <= count <= self.free(instance), (
                f"{count} slots of instance {instance} wanted, {self.free(instance)} free"
            )
        self._held[owner] = dict(slots)
        for instance, count in slots.items():
            self._used[instance] += count

    def give_back(self, owner: int, instance: int) -> bool:
        """Free what `owner` holds on `instance`, if anything; true when nothing is left to it."""
        held = self._held.get(owner)
        if held is None:
            return True
        self._used[instance] -= held.pop(instance, 0)
        if not held:
            del self._held[owner]
        return not held

    def give_back_all(self, owner: int) -> None:
        """Free all that `owner` holds."""
        for instance in list(self._held.get(owner, ())):
            self.give_back(owner, instance)

    def check_integrity(self) -> None:
        """Assert that the sums agree with the entries and with the capacities."""
        sums = [0] * len(self._capacities)
        for held in self._held.values():
            assert held, "an owner of nothing"
            for instance, count in held.items():
                sums[instance] += count
        assert sums == self._used, f"entries sum to {sums}, counted {self._used}"
        for instance, capacity in enumerate(self._capacities):
            assert 0 <= self._used[instance] <= capacity, f"instance {instance} is over capacity"
