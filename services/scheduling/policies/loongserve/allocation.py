"""On which instances the chosen requests are prefilled (LoongServe §5.2).

Idle ones first. While their slots do not suffice, instances that decode are preempted, those with
the most unused slots first, and their KV moves to others where it fits. Then instances with the
least KV are added, one after the other, as long as that shortens the prefill by more than moving
their KV takes: Eqs. 3 and 4 divide both sides by the same lengths, which so cancel.

What moving KV of a decode group takes: V(e_min) / bandwidth, the cost of Eq. 4, and what of it
the bandwidth does not say.

Rows move one after the other, and each goes on at its new place between two iterations: an
iteration of the group passes for every row, however little KV it has. Bytes are those that exist:
what answers were promised and have not drawn is not moved. Bandwidths are those of the scaling
information base, which `csps profile links` measures. Over a kind of link that nobody has measured
nothing is moved.

Which sequences move, and where to, when an instance is to be emptied (LoongServe §5.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from functools import cached_property
from typing import NamedTuple

from csps.configurator.costs.cost_table import Costs
from csps.services.scheduling.deciding.decisions import DecodePlacement, MovePlan
from csps.services.scheduling.events.commands import PlacedSlice
from csps.services.scheduling.events.events import InstanceId
from csps.services.scheduling.policies.loongserve.inputs import Elastic, PendingPrompt, PrefillModel
from csps.services.scheduling.state.state import Gang, Sequence


class Migration(NamedTuple):
    """KV of an instance that goes elsewhere, all of it."""

    source: InstanceId
    targets: tuple[tuple[InstanceId, int], ...]
    """Instances and tokens, those with the most unused slots first."""


MoveNs = Callable[[Migration], float | None]
"""How long a migration takes; None if nothing is moved so."""


class Allocation(NamedTuple):
    """E_p."""

    instances: tuple[Elastic, ...]
    migrations: tuple[Migration, ...]
    preempted: tuple[InstanceId, ...]
    """Those whose KV stays: what they decode stands still meanwhile."""


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
        prompts: R_p.
        idle: instances without KV that is decoded.
        decoding: those that may be preempted.
        model: times.
        others: those that decode as well and may only be emptied.
        move_ns: of a migration.

    Returns:
        The instances, or None if those given have not slots enough.
    """
    return _Allocating(prompts, idle, decoding, others, model, move_ns).run()


def targets_of(source: Elastic, others: Many[Elastic]) -> Migration | None:
    """Where all KV of an instance fits, those with the most unused slots first; None if nowhere."""
    left, targets = source.used, []
    for other in sorted(others, key=lambda it: (-it.unused, it.order)):
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
        self._room = {it.id: it.unused for it in self._left}
        """Slots for KV that moves; instances that were chosen take none."""
        self._migrations: list[Migration] = []
        self._preempted: list[InstanceId] = []

    def run(self) -> Allocation | None:
        if not self._get_slots():
            return None
        while self._left and self._add_emptiest():
            pass
        return Allocation(
            tuple(sorted(self._chosen, key=lambda it: it.order)),
            tuple(self._migrations),
            tuple(self._preempted),
        )

    def _get_slots(self) -> bool:
        """Take the roomiest instances that decode until all requests have slots, and only then
        empty them, as far as the others have room."""
        need = sum(self._lengths) - sum(it.unused for it in self._chosen)
        taken = []
        for it in sorted(self._decoding, key=lambda it: (-it.unused, it.order)):
            if need <= 0:
                break
            need -= it.unused
            taken.append(it)
            self._choose(it)
        for it in taken:
            targets = self._targets(it)
            if targets is None or self._move_ns(targets) is None:
                self._preempted.append(it.id)
            else:
                self._move(targets)
        return need <= 0

    def _add_emptiest(self) -> bool:
        """Whether another instance pays."""
        emptiest = min(self._left, key=lambda it: (it.used, it.order))
        targets, dop = self._targets(emptiest), len(self._chosen)
        cost_ns = None if targets is None else self._move_ns(targets)
        if targets is None or cost_ns is None or not dop:
            return False
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
        """Where the KV of an instance fits; None if nowhere. Who was given what others held keeps
        it."""
        if any(
            source.id == target for migration in self._migrations for target, _ in migration.targets
        ):
            return None
        others = [it._replace(unused=self._room[it.id]) for it in self._left if it != source]
        return targets_of(source, others)


INSIDE, BETWEEN = "inside", "between"
"""Kinds of links: of a server, and between two of them."""


class MoveCosts:
    """Of one gang in a round.

    Args:
        gang: whose KV would move.
        cost: times of links.
        drawn: how many tokens a sequence has drawn, nearly.
        iteration_ns: of the gang's decode groups, nearly.
    """

    def __init__(
        self,
        gang: Gang,
        cost: Costs,
        drawn: Callable[[Sequence], int],
        iteration_ns: int,
    ) -> None:
        self._gang, self._cost, self._generated_tokens = gang, cost, drawn
        self._iteration_ns = iteration_ns
        self._servers = {instance.id: instance.place.server_id for instance in gang.instances}

    def ns(self, migration: Migration) -> int | None:
        """One part after the other, since all of them leave one instance; None if nobody knows."""
        slots = sum(tokens for _, tokens in migration.targets)
        stored = min(slots, self.stored.get(migration.source, 0))
        taken_ns = self._iteration_ns * self._sequences.get(migration.source, 0)
        for target, tokens in migration.targets:
            size = -(-tokens * stored // slots) * self._gang.kv_bytes_per_token
            part_ns = self._cost.transfer_ns(self._kind(migration.source, target), size)
            if part_ns is None or not self._gang.kv_bytes_per_token:
                return None
            taken_ns += part_ns
        return taken_ns

    def _kind(self, source: InstanceId, target: InstanceId) -> str:
        return INSIDE if self._servers[source] == self._servers[target] else BETWEEN

    @cached_property
    def stored(self) -> dict[InstanceId, int]:
        """Tokens whose KV lies on each instance, as of now."""
        found: dict[InstanceId, int] = {}
        for sequence in self._gang.decoding.values():
            for instance, tokens in self._residency(sequence):
                found[instance] = found.get(instance, 0) + tokens
        return found

    @cached_property
    def _sequences(self) -> dict[InstanceId, int]:
        """Sequences that have slots on each instance, or are drawn there."""
        found: dict[InstanceId, int] = {}
        for it in self._gang.decoding.values():
            for instance in {it.master_id, *(where for where, _ in self._residency(it))}:
                found[instance] = found.get(instance, 0) + 1
        return found

    def _residency(self, sequence: Sequence) -> Iterator[tuple[InstanceId, int]]:
        for share in sequence.slices:
            yield share.instance, share.tokens
        start, stop = sequence.answer_span
        seen = min(stop, start + self._generated_tokens(sequence))
        for share in sequence.answer:
            yield share.instance, max(0, min(share.stop, seen) - share.start)
        if not sequence.answer:
            yield sequence.master_id, seen - start


def moves(migration: Migration, sequences: Many[Sequence]) -> Iterator[MovePlan]:
    """One for each sequence that has slots on the instance: all that it has there goes to the
    targets, as many tokens to each as the migration says.

    Args:
        migration: of all slots of an instance.
        sequences: that are decoded in the gang.
    """
    room = dict(migration.targets)
    for sequence in sequences:
        start, stop = sequence.answer_span
        answer = sequence.answer or (PlacedSlice(sequence.master_id, start, stop),)
        lying = [share.instance for share in (*sequence.slices, *answer)]
        if migration.source not in (*lying, sequence.master_id):
            continue
        slices = tuple(_elsewhere(sequence.slices, migration.source, room))
        kept = tuple(_elsewhere(answer, migration.source, room))
        master = sequence.master_id
        if master == migration.source:
            master = (kept or slices)[0].instance
        placement = DecodePlacement(sequence.request_id, slices, master, kept)
        yield MovePlan(sequence_id=sequence.id, placement=placement)


def _elsewhere(
    slices: Many[PlacedSlice], source: InstanceId, room: dict[InstanceId, int]
) -> Iterator[PlacedSlice]:
    """The same positions, those of an instance on others."""
    for share in slices:
        if share.instance != source:
            yield share
            continue
        span = share.span
        first = 0
        for target in list(room):
            tokens = min(span.length - first, room[target])
            if tokens:
                yield PlacedSlice.of(target, span.part(slice(first, first + tokens)))
                room[target] -= tokens
                first += tokens
        assert first == span.length, "more moves than was planned"
