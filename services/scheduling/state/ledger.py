"""Slots that a sequence takes where it is decoded.

Slots of the instances' KV pools, as the scheduler counts them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from csps.protocols.core.placement import rest_of
from csps.services.scheduling.events.commands import PlacedSlice
from csps.services.scheduling.events.events import InstanceId
from csps.services.scheduling.state.state import Gang, Instance, Sequence


class HasPlacement(Protocol):
    """Where a sequence is decoded."""

    @property
    def slices(self) -> tuple[PlacedSlice, ...]: ...
    @property
    def master(self) -> InstanceId: ...
    @property
    def answer(self) -> tuple[PlacedSlice, ...]: ...


def decode_slots(placement: HasPlacement, output_tokens: int) -> dict[InstanceId, int]:
    """Slots that a sequence needs where it is decoded, for tokens to come included. The master is
    named in any case, and so is who holds what it reuses: they free the sequence as well. None
    where no KV goes."""
    if not placement.slices:
        return {}
    slots = {placement.master: 0 if placement.answer else output_tokens}
    for kv_slice in placement.slices:
        slots[kv_slice.instance] = slots.get(kv_slice.instance, 0) + (
            0 if kv_slice.source else kv_slice.tokens
        )
    for it in placement.answer:
        slots[it.instance] = slots.get(it.instance, 0) + it.tokens
    return slots


def coming_slots(sequence: Sequence, placement: HasPlacement) -> dict[InstanceId, int]:
    """Slots for what a sequence that is decoded does not have where it is to lie."""
    lies = (*sequence.slices, *sequence.answer)
    if not sequence.answer:
        lies = (*lies, PlacedSlice(sequence.master_id, *sequence.answer_span))
    coming: dict[InstanceId, int] = {}
    for share in (*placement.slices, *placement.answer):
        held = [ly.span for ly in lies if ly.instance == share.instance]
        tokens = sum(it.length for it in rest_of(share.span, held))
        coming[share.instance] = coming.get(share.instance, 0) + tokens
    return coming


class Ledger:
    """Who holds how many slots of which instance.

    The ranks own the pools. This book is conservative: slots count as taken before a rank is asked
    for them, and as free only when the instance has said so, or died. There is one for steps and
    one for sequences, whose ids may be equal; the two share the instances and their sums.
    """

    def __init__(self) -> None:
        self._slots: dict[int, dict[InstanceId, int]] = {}
        self._instances: dict[InstanceId, Instance] = {}

    def __len__(self) -> int:
        """Owners of slots."""
        return len(self._slots)

    def __contains__(self, owner: int) -> bool:
        return owner in self._slots

    def add(self, gang: Gang) -> None:
        """The gang's instances may be reserved from now on."""
        for instance in gang.instances:
            self._instances[instance.id] = instance

    def reserve(self, owner: int, slots: dict[InstanceId, int]) -> None:
        """Give `owner`, who has none yet, that many slots of each instance; the ledger keeps
        the dictionary, unless it is empty."""
        assert owner not in self._slots, f"{owner} already holds slots"
        self.extend(owner, slots)

    def extend(self, owner: int, slots: dict[InstanceId, int]) -> None:
        """The same for one who may have some of other instances."""
        if not slots:
            return
        instances = self._instances
        for instance, count in slots.items():
            it = instances[instance]
            assert 0 <= count <= it.capacity - it.used, f"no {count} slots free on {instance}"
        if owner in self._slots:
            assert self._slots[owner].keys().isdisjoint(slots), f"{owner} already holds slots"
            self._slots[owner].update(slots)
        else:
            self._slots[owner] = slots
        for instance, count in slots.items():
            instances[instance].used += count

    def resize(self, owner: int, slots: dict[InstanceId, int]) -> None:
        """Give `owner`, who has some, that many slots of each instance and no others."""
        held, instances = self._slots[owner], self._instances
        for instance, count in held.items():
            instances[instance].used -= count
        for instance, count in slots.items():
            it = instances[instance]
            assert 0 <= count <= it.capacity - it.used, f"no {count} slots free on {instance}"
            it.used += count
        self._slots[owner] = slots

    def free(self, owner: int, instance: InstanceId) -> None:
        """Free what `owner` holds on an instance, if anything."""
        held = self._slots.get(owner)
        if held is None:
            return
        self._instances[instance].used -= held.pop(instance, 0)
        if not held:
            del self._slots[owner]

    def free_all(self, owner: int) -> None:
        """Free all that `owner` holds."""
        for instance in list(self._slots.get(owner, ())):
            self.free(owner, instance)

    def shrink(self, owner: int, instance: InstanceId, count: int) -> None:
        """Free all but so many of the slots that `owner` holds on an instance, if it has more."""
        held = self._slots.get(owner, {}).get(instance, 0)
        if count <= 0:
            self.free(owner, instance)
        elif count < held:
            self._slots[owner][instance] = count
            self._instances[instance].used -= held - count

    def slots_of(self, owner: int) -> dict[InstanceId, int]:
        """What `owner` has, by instance."""
        return dict(self._slots.get(owner, {}))

    def drop(self, gang: Gang) -> None:
        """The gang is gone with all its slots."""
        dead = {it.id: None for it in gang.instances}
        for owner in [it for it, held in self._slots.items() if not dead.keys().isdisjoint(held)]:
            for instance in [slot for slot in self._slots[owner] if slot in dead]:
                self.free(owner, instance)
        for instance in dead:
            self._instances.pop(instance, None)

    def sums(self, instances: Iterable[Instance]) -> dict[InstanceId, int]:
        """Slots held of each instance, added up entry by entry."""
        sums = {it.id: 0 for it in instances}
        for held in self._slots.values():
            assert held, "an owner of nothing"
            for instance, count in held.items():
                sums[instance] += count
        return sums
