"""KV slots and the prefix cache of simulated gangs, counted apart from the scheduler's ledger."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from csps.protocols.core.placement import KvSlice, Span, joined, outside, tokens_on, within
from csps.protocols.gang.messages import EvictKv, RetainKv
from csps.services.scheduling.events.events import (
    GangId,
    Retained,
    SequenceId,
    index_of,
    instance_id,
)


class Slots:
    """Slots of a gang's instances.

    Taking more slots than are free is an error of the scheduler.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self.free = list(capacities)
        self._capacities = tuple(capacities)
        self._taken: dict[Hashable, dict[int, int]] = {}

    def take(self, owner: Hashable, slots: Mapping[int, int]) -> None:
        """Give `owner` this many slots of each instance, by index."""
        assert owner not in self._taken, f"{owner} has already taken slots"
        for index, count in slots.items():
            assert count <= self.free[index], (
                f"instance {index} has {self.free[index]} free slots, {owner} needs {count}"
            )
            self.free[index] -= count
        self._taken[owner] = dict(slots)

    def change(self, owner: Hashable, slots: Mapping[int, int]) -> None:
        """Replace the slots of `owner` by this many of each instance."""
        for index in self.instances_of(owner):
            self.release(owner, index)
        self.take(owner, slots)

    def counts(self, owner: Hashable) -> dict[int, int]:
        """Return the slots of `owner` by instance."""
        return dict(self._taken.get(owner, {}))

    def assign(self, owner: Hashable, slots: Mapping[int, int]) -> None:
        """Give `owner` exactly this many slots of each instance."""
        for index in self.instances_of(owner):
            self.release(owner, index)
        if wanted := {index: count for index, count in slots.items() if count}:
            self.take(owner, wanted)

    def release(self, owner: Hashable, index: int) -> None:
        """Free the slots of `owner` on an instance."""
        self.free[index] += self._taken[owner].pop(index)
        if not self._taken[owner]:
            del self._taken[owner]

    def instances_of(self, owner: Hashable) -> tuple[int, ...]:
        """Return the instances on which `owner` has slots, ascending."""
        return tuple(sorted(self._taken.get(owner, ())))

    @property
    def used(self) -> int:
        """Return the number of slots taken on all instances."""
        return sum(self._capacities) - sum(self.free)

    def check_integrity(self) -> None:
        """Assert that no slot was lost or given twice."""
        for index, capacity in enumerate(self._capacities):
            taken = sum(slots.get(index, 0) for slots in self._taken.values())
            assert self.free[index] + taken == capacity, (
                f"instance {index}: free + taken != capacity {capacity}"
            )


class SimulatedPrefixCache:
    """The prefix cache of one gang: retained slices by source sequence.

    Sequences share what they reuse. When its name is evicted, the first of those that share it has
    its slots from then on, as on ranks, which count the names of a slot.

    Args:
        slots: the slots of its instances.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._stored: dict[SequenceId, tuple[KvSlice, ...]] = {}
        self._shared: dict[SequenceId, tuple[KvSlice, ...]] = {}
        """Slices of others that a sequence reuses, or has retained, by its id."""

    @property
    def tokens(self) -> int:
        """Return the number of retained tokens."""
        return sum(kv_slice.tokens for slices in self._stored.values() for kv_slice in slices)

    def has(self, slices: Iterable[KvSlice]) -> bool:
        """Return whether all reused slices are retained here."""
        return all(
            reused.tokens
            == sum(
                stored.span.intersection(reused.span).length
                for stored in self._named(reused.source)
                if stored.instance == reused.instance
            )
            for reused in slices
            if reused.source
        )

    def _named(self, sequence: SequenceId) -> tuple[KvSlice, ...]:
        """Return all slices that can be reused under a sequence's name."""
        return (*self._stored.get(sequence, ()), *self._shared.get(sequence, ()))

    def share(self, sequence: SequenceId, slices: Iterable[KvSlice]) -> None:
        """Let a sequence share the slices that it reuses."""
        self._set_shared(sequence, tuple([reused for reused in slices if reused.source]))

    def unshare(self, sequence: SequenceId) -> None:
        """Free what a sequence shares, at its end."""
        self._shared.pop(sequence, None)
        self._set(sequence, ())

    def add(self, sequence: SequenceId, slices: tuple[KvSlice, ...]) -> None:
        """Retain more of a sequence, whose slots were freed before."""
        self._set(sequence, (*outside(self._stored.get(sequence, ()), slices), *slices))

    def apply(self, gang: GangId, message: RetainKv | EvictKv) -> list[Retained]:
        """Apply a message to a gang; return how many tokens each instance still retains."""
        sequence, span = message.sequence_id, Span(message.start, max(message.start, message.stop))
        stored, shared = self._stored.get(sequence, ()), self._shared.get(sequence, ())
        if isinstance(message, RetainKv):
            left, still = within(stored, span), within(shared, span)
        else:
            left, still = _without(stored, span), _without(shared, span)
        self._set(sequence, left)
        self._set_shared(sequence, still)
        self._inherit(sequence, outside(stored, left))
        instances = (instance_id(gang, index) for index in range(len(self._slots.free)))
        tokens = tokens_on(self._named(sequence))
        return [
            Retained(
                sequence_id=message.sequence_id, instance=instance, tokens=tokens.get(instance, 0)
            )
            for instance in instances
        ]

    def _inherit(self, source: SequenceId, freed: tuple[KvSlice, ...]) -> None:
        """Give slices that a sequence has freed to the first that shares them."""
        for sharer, slices in list(self._shared.items()):
            inherited = tuple(
                part
                for reused in slices
                if reused.source == source
                for part in within(freed, reused.span)
                if part.instance == reused.instance
            )
            if inherited:
                self._set_shared(sharer, outside(slices, inherited))
                own = (KvSlice.of(part.instance, part.span) for part in inherited)
                self._set(sharer, joined((*own, *self._stored.get(sharer, ()))))
                freed = outside(freed, inherited)

    def _set_shared(self, sequence: SequenceId, slices: tuple[KvSlice, ...]) -> None:
        self._shared[sequence] = slices
        if not slices:
            del self._shared[sequence]

    def _set(self, sequence: SequenceId, slices: tuple[KvSlice, ...]) -> None:
        self._slots.assign(("retained", sequence), _by_index(slices))
        self._stored[sequence] = slices
        if not slices:
            del self._stored[sequence]


def _without(slices: Iterable[KvSlice], span: Span) -> tuple[KvSlice, ...]:
    return tuple(kv_slice.cut(rest) for kv_slice in slices for rest in kv_slice.span.without(span))


def _by_index(slices: Iterable[KvSlice]) -> dict[int, int]:
    return {index_of(instance): count for instance, count in tokens_on(slices).items()}
