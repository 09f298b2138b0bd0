"""LoongServe allocates instances to the chosen requests, and migrates KV for them (§5.2).

`allocate` takes idle instances first. If their slots do not suffice, it preempts decoding ones,
those with most free slots first, and migrates their KV where it fits. Then it adds the instances
with least KV, as long as each shortens the prefill by more than its migration takes (Eqs. 3-4).

`MoveCosts` predicts a migration (V(e_min) / bandwidth, Eq. 4), and `moves` lists its sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from functools import cached_property
from typing import NamedTuple

from csps.configurator.costs.cost_table import Costs
from csps.protocols.core.placement import KvSlice
from csps.services.scheduling.deciding.decisions import DecodePlacement, MovePlan
from csps.services.scheduling.events.events import InstanceId
from csps.services.scheduling.policies.loongserve.inputs import Elastic, PendingPrompt, PrefillModel
from csps.services.scheduling.state.state import Gang, Sequence


class Migration(NamedTuple):
    """The move of all KV of an instance to others."""

    source: InstanceId
    targets: tuple[tuple[InstanceId, int], ...]
    """Instances and tokens, the instances with most free slots first."""


MoveNs = Callable[[Migration], float | None]
"""Predicted time of a migration; None if it is not allowed."""


class Allocation(NamedTuple):
    """The instances of a prefill (E_p)."""

    instances: tuple[Elastic, ...]
    migrations: tuple[Migration, ...]
    preempted: tuple[InstanceId, ...]
    """Instances whose KV stays in place; their sequences pause."""


def allocate(
    prompts: Many[PendingPrompt],
    idle: Many[Elastic],
    decoding: Many[Elastic],
    model: PrefillModel,
    *,
    others: Many[Elastic] = (),
    move_ns: MoveNs,
) -> Allocation | None:
    """Choose instances for all of the requests.

    Args:
        prompts: the chosen requests (R_p).
        idle: instances without KV of decoding sequences.
        decoding: instances that may be preempted.
        model: predicted times.
        others: decoding instances that may only be emptied.
        move_ns: predicts a migration.

    Returns:
        The instances, or None if the given ones have too few slots.
    """
    return _Allocating(prompts, idle, decoding, others, model, move_ns).run()


def targets_of(source: Elastic, others: Many[Elastic]) -> Migration | None:
    """Migrate all KV of an instance to those with most free slots; None if it does not fit."""
    left, targets = source.used, []
    for other in sorted(others, key=lambda other: (-other.unused, other.order)):
        tokens = min(left, other.unused)
        if tokens:
            targets.append((other.id, tokens))
            left -= tokens
    return None if left else Migration(source.id, tuple(targets))


class _Allocating:
    def __init__(
        self,
        prompts: Many[PendingPrompt],
        idle: Many[Elastic],
        decoding: Many[Elastic],
        others: Many[Elastic],
        model: PrefillModel,
        move_ns: MoveNs,
    ) -> None:
        self._model, self._move_ns = model, move_ns
        self._lengths = [prompt.tokens for prompt in prompts]
        self._chosen = list(idle)
        self._decoding = decoding
        self._left = [*decoding, *others]
        self._room = {instance.id: instance.unused for instance in self._left}
        """Free slots for migrated KV; chosen instances take none."""
        self._migrations: list[Migration] = []
        self._preempted: list[InstanceId] = []

    def run(self) -> Allocation | None:
        if not self._get_slots():
            return None
        while self._left and self._add_emptiest():
            pass
        return Allocation(
            tuple(sorted(self._chosen, key=lambda instance: instance.order)),
            tuple(self._migrations),
            tuple(self._preempted),
        )

    def _get_slots(self) -> bool:
        """Take decoding instances until all requests have slots, and empty them if possible.

        The instances with most free slots come first. Returns False if all are not enough.
        """
        need = sum(self._lengths) - sum(instance.unused for instance in self._chosen)
        taken = []
        for instance in sorted(
            self._decoding, key=lambda instance: (-instance.unused, instance.order)
        ):
            if need <= 0:
                break
            need -= instance.unused
            taken.append(instance)
            self._choose(instance)
        # Only now, so that no KV moves to an instance that is taken next.
        for instance in taken:
            targets = self._targets(instance)
            if targets is None or self._move_ns(targets) is None:
                self._preempted.append(instance.id)
            else:
                self._move(targets)
        return need <= 0

    def _add_emptiest(self) -> bool:
        """Add the instance with least KV if it pays off; return True if it was added."""
        emptiest = min(self._left, key=lambda instance: (instance.used, instance.order))
        targets, dop = self._targets(emptiest), len(self._chosen)
        cost_ns = None if targets is None else self._move_ns(targets)
        if targets is None or cost_ns is None or not dop:
            return False
        # Eqs. 3 and 4 divide both sides by the same lengths, which cancel.
        gain_ns = self._model.ns(self._lengths, dop) - self._model.ns(self._lengths, dop + 1)
        if gain_ns < cost_ns:
            return False
        self._choose(emptiest)
        self._move(targets)
        return True

    def _choose(self, instance: Elastic) -> None:
        self._left.remove(instance)
        del self._room[instance.id]
        self._chosen.append(instance)

    def _move(self, migration: Migration) -> None:
        for target, tokens in migration.targets:
            self._room[target] -= tokens
        if migration.targets:
            self._migrations.append(migration)

    def _targets(self, source: Elastic) -> Migration | None:
        """Migrate the KV of an instance; None if it fits nowhere, or if it receives KV itself."""
        if any(
            source.id == target for migration in self._migrations for target, _ in migration.targets
        ):
            return None
        others = [
            other._replace(unused=self._room[other.id]) for other in self._left if other != source
        ]
        return targets_of(source, others)


INSIDE, BETWEEN, RACKS = "inside", "between", "racks"
"""Kinds of links: inside a server, between two of one rack, and between two racks."""


class MoveCosts:
    """Costs of migrations in one gang and round.

    Args:
        gang: the gang whose KV would move.
        cost: times of links.
        generated_tokens: estimates the tokens that a sequence has sampled.
        iteration_ns: estimated iteration of the gang's decode groups.
    """

    def __init__(
        self,
        gang: Gang,
        cost: Costs,
        generated_tokens: Callable[[Sequence], int],
        iteration_ns: int,
    ) -> None:
        self._gang, self._cost, self._generated_tokens = gang, cost, generated_tokens
        self._iteration_ns = iteration_ns
        self._places = {instance.id: instance.place for instance in gang.instances}

    def ns(self, migration: Migration) -> int | None:
        """Predict a migration; None if one of its links was not measured."""
        slots = sum(tokens for _, tokens in migration.targets)
        # Slots reserved for tokens not sampled yet are not transferred.
        stored = min(slots, self.stored.get(migration.source, 0))
        # Each sequence switches to its new place between two iterations, however little KV it has.
        total_ns = self._iteration_ns * self._sequences.get(migration.source, 0)
        # The transfers leave one instance, so they run one after the other.
        for target, tokens in migration.targets:
            size = -(-tokens * stored // slots) * self._gang.kv_bytes_per_token
            transfer_ns = self._transfer_ns(migration.source, target, size)
            if transfer_ns is None or not self._gang.kv_bytes_per_token:
                return None
            total_ns += transfer_ns
        return total_ns

    def _transfer_ns(self, source: InstanceId, target: InstanceId, size: int) -> int | None:
        one, other = self._places[source], self._places[target]
        if one.server_id == other.server_id:
            return self._cost.transfer_ns(INSIDE, size)
        found = None
        if one.rack != other.rack:
            found = self._cost.transfer_ns(RACKS, size)
        # Where nobody has measured links between racks, those between servers count.
        return self._cost.transfer_ns(BETWEEN, size) if found is None else found

    @cached_property
    def stored(self) -> dict[InstanceId, int]:
        """Tokens with resident KV on each instance."""
        stored: dict[InstanceId, int] = {}
        for sequence in self._gang.decoding.values():
            for instance, tokens in self._residency(sequence):
                stored[instance] = stored.get(instance, 0) + tokens
        return stored

    @cached_property
    def _sequences(self) -> dict[InstanceId, int]:
        """Number of sequences that have slots on each instance, or are sampled there."""
        counts: dict[InstanceId, int] = {}
        for sequence in self._gang.decoding.values():
            holders = {instance for instance, _ in self._residency(sequence)}
            for instance in holders | {sequence.master_id}:
                counts[instance] = counts.get(instance, 0) + 1
        return counts

    def _residency(self, sequence: Sequence) -> Iterator[tuple[InstanceId, int]]:
        """Yield the instances and numbers of tokens of a sequence's KV."""
        for kv_slice in sequence.slices:
            yield kv_slice.instance, kv_slice.tokens
        start, stop = sequence.answer_span
        seen = min(stop, start + self._generated_tokens(sequence))
        for kv_slice in sequence.answer:
            yield kv_slice.instance, max(0, min(kv_slice.stop, seen) - kv_slice.start)
        if not sequence.answer:
            yield sequence.master_id, seen - start


def moves(migration: Migration, sequences: Many[Sequence]) -> Iterator[MovePlan]:
    """Yield a plan for each sequence with slots on the source of a migration.

    Args:
        migration: the migration of all slots of an instance.
        sequences: the sequences of the gang.
    """
    room = dict(migration.targets)
    for sequence in sequences:
        start, stop = sequence.answer_span
        answer = sequence.answer or (KvSlice(sequence.master_id, start, stop),)
        holders = [kv_slice.instance for kv_slice in (*sequence.slices, *answer)]
        if migration.source not in (*holders, sequence.master_id):
            continue
        slices = tuple(_migrated(sequence.slices, migration.source, room))
        migrated_answer = tuple(_migrated(answer, migration.source, room))
        master = sequence.master_id
        if master == migration.source:
            master = (migrated_answer or slices)[0].instance
        placement = DecodePlacement(sequence.request_id, slices, master, migrated_answer)
        yield MovePlan(sequence_id=sequence.id, placement=placement)


def _migrated(
    slices: Many[KvSlice], source: InstanceId, room: dict[InstanceId, int]
) -> Iterator[KvSlice]:
    """Yield the slices, with those of the source on the targets with room."""
    for kv_slice in slices:
        if kv_slice.instance != source:
            yield kv_slice
            continue
        span = kv_slice.span
        first = 0
        for target in list(room):
            tokens = min(span.length - first, room[target])
            if tokens:
                yield KvSlice.of(target, span.part(slice(first, first + tokens)))
                room[target] -= tokens
                first += tokens
        assert first == span.length, f"{span.length - first} tokens exceed the migration's targets"
