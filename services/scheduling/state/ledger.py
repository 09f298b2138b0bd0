"""Ledger of KV slots, and the slots that a sequence needs where it is decoded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from csps.protocols.core.placement import KvSlice, near_ring, rest_of
from csps.services.scheduling.events.events import InstanceId
from csps.services.scheduling.state.state import Gang, Instance, Sequence


class HasPlacement(Protocol):
    """Placement of a sequence for decoding."""

    @property
    def slices(self) -> tuple[KvSlice, ...]: ...
    @property
    def master(self) -> InstanceId: ...
    @property
    def answer(self) -> tuple[KvSlice, ...]: ...


def decode_slots(placement: HasPlacement, output_tokens: int) -> dict[InstanceId, int]:
    """Return the slots that a sequence needs where it is decoded, for tokens to come included.

    Named with 0 slots are the master and the holders of reused KV, because they free the sequence
    as well. The result is empty where no KV goes.
    """
    if not placement.slices:
        return {}
    slots = {placement.master: 0 if placement.answer else output_tokens}
    for kv_slice in placement.slices:
        slots[kv_slice.instance] = slots.get(kv_slice.instance, 0) + (
            0 if kv_slice.source else kv_slice.tokens
        )
    for kv_slice in placement.answer:
        slots[kv_slice.instance] = slots.get(kv_slice.instance, 0) + kv_slice.tokens
    return slots


def window_slots(gang: Gang, placement: HasPlacement, prompt: int, output_tokens: int) -> int:
    """Return the slots that a sequence needs at its master in layers with a window.

    Args:
        prompt: tokens of the prompt.
    """
    if not gang.window or not placement.slices:
        return 0
    return near_ring(gang.window, prompt, prompt + output_tokens - 1).length


def coming_slots(sequence: Sequence, placement: HasPlacement) -> dict[InstanceId, int]:
    """Return the slots for the KV that a decoded sequence does not have where it is to go."""
    present = (*sequence.slices, *sequence.answer)
    if not sequence.answer:
        present = (*present, KvSlice(sequence.master_id, *sequence.answer_span))
    coming: dict[InstanceId, int] = {}
    for kv_slice in (*placement.slices, *placement.answer):
        resident = [other.span for other in present if other.instance == kv_slice.instance]
        tokens = sum(rest.length for rest in rest_of(kv_slice.span, resident))
        coming[kv_slice.instance] = coming.get(kv_slice.instance, 0) + tokens
    return coming


class Ledger:
    """Slots of instances by owner.

    The ranks own the pools, and this ledger is conservative: slots count as taken before a rank is
    asked for them, and as free only when the instance has freed them or died. Steps and sequences
    have one ledger each, because their ids may be equal. Both share the instances and their sums.
    """

    def __init__(self) -> None:
        self._slots: dict[int, dict[InstanceId, int]] = {}
        self._instances: dict[InstanceId, Instance] = {}

    def __len__(self) -> int:
        """Return how many owners have slots."""
        return len(self._slots)

    def __contains__(self, owner: int) -> bool:
        return owner in self._slots

    def add(self, gang: Gang) -> None:
        """Let the gang's instances be reserved from now on."""
        for instance in gang.instances:
            self._instances[instance.id] = instance

    def reserve(self, owner: int, slots: dict[InstanceId, int]) -> None:
        """Give a new owner so many slots of each instance. The ledger keeps the dictionary, unless
        it is empty."""
        assert owner not in self._slots, f"owner {owner} already has slots"
        self.extend(owner, slots)

    def extend(self, owner: int, slots: dict[InstanceId, int]) -> None:
        """Give an owner slots of instances of which it has none."""
        if not slots:
            return
        instances = self._instances
        for instance, count in slots.items():
            entry = instances[instance]
            assert 0 <= count <= entry.empty_slots, (
                f"{count} slots reserved on {instance}, {entry.empty_slots} are empty"
            )
        if owner in self._slots:
            assert self._slots[owner].keys().isdisjoint(slots), f"owner {owner} already has slots"
            self._slots[owner].update(slots)
        else:
            self._slots[owner] = slots
        for instance, count in slots.items():
            instances[instance].used += count

    def resize(self, owner: int, slots: dict[InstanceId, int]) -> None:
        """Give a present owner so many slots of each instance and no others."""
        before, instances = self._slots[owner], self._instances
        for instance, count in before.items():
            instances[instance].used -= count
        for instance, count in slots.items():
            entry = instances[instance]
            assert 0 <= count <= entry.empty_slots, (
                f"{count} slots reserved on {instance}, {entry.empty_slots} are empty"
            )
            entry.used += count
        self._slots[owner] = slots

    def free(self, owner: int, instance: InstanceId) -> None:
        """Free the owner's slots on an instance, if any."""
        slots = self._slots.get(owner)
        if slots is None:
            return
        self._instances[instance].used -= slots.pop(instance, 0)
        if not slots:
            del self._slots[owner]

    def free_all(self, owner: int) -> None:
        """Free all slots of an owner."""
        for instance in list(self._slots.get(owner, ())):
            self.free(owner, instance)

    def shrink(self, owner: int, instance: InstanceId, count: int) -> None:
        """Free all but `count` of the owner's slots on an instance, if it has more."""
        before = self._slots.get(owner, {}).get(instance, 0)
        if count <= 0:
            self.free(owner, instance)
        elif count < before:
            self._slots[owner][instance] = count
            self._instances[instance].used -= before - count

    def transfer(self, owner: int, heir: int, slots: dict[InstanceId, int]) -> None:
        """Give slots of one owner to another."""
        assert owner != heir, f"owner {owner} inherits from itself"
        before, after = self._slots[owner], self._slots.setdefault(heir, {})
        for instance, count in slots.items():
            assert 0 < count <= before.get(instance, 0), f"owner {owner} lacks slots of {instance}"
            before[instance] -= count
            if not before[instance]:
                del before[instance]
            after[instance] = after.get(instance, 0) + count
        if not before:
            del self._slots[owner]

    def slots_of(self, owner: int) -> dict[InstanceId, int]:
        """Return the owner's slots by instance."""
        return dict(self._slots.get(owner, {}))

    def drop(self, gang: Gang) -> None:
        """Drop all slots of a gang that is gone."""
        dead = {instance.id: None for instance in gang.instances}
        for owner in [
            owner for owner, slots in self._slots.items() if not dead.keys().isdisjoint(slots)
        ]:
            for instance in [slot for slot in self._slots[owner] if slot in dead]:
                self.free(owner, instance)
        for instance in dead:
            self._instances.pop(instance, None)

    def sums(self, instances: Iterable[Instance]) -> dict[InstanceId, int]:
        """Return the taken slots of each instance, added up entry by entry."""
        sums = {instance.id: 0 for instance in instances}
        for slots in self._slots.values():
            assert slots, "an owner without slots is in the ledger"
            for instance, count in slots.items():
                sums[instance] += count
        return sums
