"""On which instances the chosen requests are prefilled (LoongServe §5.2).

Idle ones first. While their slots do not suffice, instances that decode are preempted, those with
the most unused slots first, and their KV moves to others where it fits. Then instances with the
least KV are added, one after the other, as long as that shortens the prefill by more than moving
their KV takes: Eqs. 3 and 4 divide both sides by the same lengths, which so cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.policies.loongserve.jobs import Elastic, Prompt
from csps.services.scheduling.policies.loongserve.prefill_model import PrefillModel


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
    prompts: Sequence[Prompt],
    idle: Sequence[Elastic],
    decoding: Sequence[Elastic],
    model: PrefillModel,
    *,
    others: Sequence[Elastic] = (),
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


def targets_of(source: Elastic, others: Sequence[Elastic]) -> Migration | None:
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
        prompts: Sequence[Prompt],
        idle: Sequence[Elastic],
        decoding: Sequence[Elastic],
        others: Sequence[Elastic],
        model: PrefillModel,
        move_ns: MoveNs,
    ) -> None:
        self._model, self._move_ns = model, move_ns
        self._lengths = [it.tokens for it in prompts]
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
        if any(source.id == target for it in self._migrations for target, _ in it.targets):
            return None
        others = [it._replace(unused=self._room[it.id]) for it in self._left if it != source]
        return targets_of(source, others)
