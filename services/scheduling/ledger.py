"""Slots of the instances' KV pools, as the scheduler counts them."""

from __future__ import annotations

from collections.abc import Iterable

from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.state import Gang, Instance


class Ledger:
    """Who holds how many slots of which instance.

    The ranks own the pools. This book is conservative: slots count as taken before a rank is asked
    for them, and as free only when the instance has said so, or died. There is one for steps and
    one for sequences, whose ids may be equal; the two share the instances and their sums.
    """

    def __init__(self) -> None:
        self._held: dict[int, dict[InstanceId, int]] = {}
        self._instances: dict[InstanceId, Instance] = {}

    def __len__(self) -> int:
        """Owners of slots."""
        return len(self._held)

    def __contains__(self, owner: int) -> bool:
        return owner in self._held

    def add(self, gang: Gang) -> None:
        """The gang's instances may be reserved from now on."""
        for instance in gang.instances:
            self._instances[instance.id] = instance

    def reserve(self, owner: int, slots: dict[InstanceId, int]) -> None:
        """Give `owner`, who has none yet, that many slots of each instance; the ledger keeps
        the dictionary, unless it is empty."""
        assert owner not in self._held, f"{owner} already holds slots"
        self.extend(owner, slots)

    def extend(self, owner: int, slots: dict[InstanceId, int]) -> None:
        """The same for one who may have some of other instances."""
        if not slots:
            return
        instances = self._instances
        for instance, count in slots.items():
            it = instances[instance]
            assert 0 <= count <= it.capacity - it.used, f"no {count} slots free on {instance}"
        if owner in self._held:
            assert self._held[owner].keys().isdisjoint(slots), f"{owner} already holds slots"
            self._held[owner].update(slots)
        else:
            self._held[owner] = slots
        for instance, count in slots.items():
            instances[instance].used += count

    def resize(self, owner: int, slots: dict[InstanceId, int]) -> None:
        """Give `owner`, who has some, that many slots of each instance and no others."""
        held, instances = self._held[owner], self._instances
        for instance, count in held.items():
            instances[instance].used -= count
        for instance, count in slots.items():
            it = instances[instance]
            assert 0 <= count <= it.capacity - it.used, f"no {count} slots free on {instance}"
            it.used += count
        self._held[owner] = slots

    def give_back(self, owner: int, instance: InstanceId) -> None:
        """Free what `owner` holds on an instance, if anything."""
        held = self._held.get(owner)
        if held is None:
            return
        self._instances[instance].used -= held.pop(instance, 0)
        if not held:
            del self._held[owner]

    def drop_owner(self, owner: int) -> None:
        """Free all that `owner` holds."""
        for instance in list(self._held.get(owner, ())):
            self.give_back(owner, instance)

    def lower(self, owner: int, instance: InstanceId, count: int) -> None:
        """Free all but so many of the slots that `owner` holds on an instance, if it has more."""
        held = self._held.get(owner, {}).get(instance, 0)
        if count <= 0:
            self.give_back(owner, instance)
        elif count < held:
            self._held[owner][instance] = count
            self._instances[instance].used -= held - count

    def held(self, owner: int) -> dict[InstanceId, int]:
        """What `owner` has, by instance."""
        return dict(self._held.get(owner, {}))

    def drop(self, gang: Gang) -> None:
        """The gang is gone with all its slots."""
        dead = {it.id: None for it in gang.instances}
        for owner in [it for it, held in self._held.items() if not dead.keys().isdisjoint(held)]:
            for instance in [it for it in self._held[owner] if it in dead]:
                self.give_back(owner, instance)
        for instance in dead:
            self._instances.pop(instance, None)

    def sums(self, instances: Iterable[Instance]) -> dict[InstanceId, int]:
        """Slots held of each instance, added up entry by entry."""
        sums = {it.id: 0 for it in instances}
        for held in self._held.values():
            assert held, "an owner of nothing"
            for instance, count in held.items():
                sums[instance] += count
        return sums
