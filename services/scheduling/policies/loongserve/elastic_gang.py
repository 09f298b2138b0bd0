"""An elastic gang in a round of the policy `loongserve`: who prefills, who decodes, who is idle."""

from __future__ import annotations

from collections.abc import Sequence

from csps.services.scheduling.commands import Share
from csps.services.scheduling.decisions import StartPlan
from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.policies.loongserve.allocation import Migration
from csps.services.scheduling.policies.loongserve.jobs import DecodeBatch, Decoding, Elastic
from csps.services.scheduling.policies.loongserve.moving import Moving
from csps.services.scheduling.policies.loongserve.options import LoongServeOptions
from csps.services.scheduling.policies.loongserve.planning import ALONE, RING
from csps.services.scheduling.policies.loongserve.prefill_model import Eq7, PrefillModel
from csps.services.scheduling.view import GangView, SequenceView, View


class ElasticGang:
    """Decode groups follow from where KV lies: sequences that share an instance are decoded
    together, and their instances are a group. An instance in no group that computes no step is
    idle."""

    def __init__(self, gang: GangView, view: View, options: LoongServeOptions) -> None:
        self._gang, self._view, self._options = gang, view, options
        self._rows: dict[InstanceId, list[SequenceView]] = {it.id: [] for it in gang.instances}
        joined = [it for it in gang.decoding.values() if it.joined_ns is not None]
        merged: list[tuple[set[InstanceId], list[SequenceView]]] = []
        for sequence in gang.decoding.values():
            self._rows[sequence.master_id].append(sequence)
        for sequence in joined:
            concerned, rows = instances_of(sequence), [sequence]
            apart = []
            for members, others in merged:
                if members.isdisjoint(concerned):
                    apart.append((members, others))
                else:
                    concerned, rows = concerned | members, [*others, *rows]
            merged = [*apart, (concerned, rows)]
        self._groups = merged
        self.unused = {it.id: it.free_slots for it in gang.instances}
        """Slots that nobody was promised, this round included."""
        self.model = PrefillModel(self._line, options.tipping_tokens)
        self._moving = Moving(gang, view.cost, self.drawn, self._usual_ns)

    def _line(self, dop: int) -> Eq7:
        alpha, beta, _, gamma = self._in_ns(dop)
        return Eq7(alpha, beta, gamma)

    def _in_ns(self, dop: int) -> tuple[float, float, float, float]:
        strategy = RING if dop > 1 else ALONE
        return self._view.cost.exact(dop, self._gang.tp, strategy).in_ns

    def move_ns(self, migration: Migration) -> int | None:
        """What moving KV takes (Eq. 4); None if it stays where it lies, or nobody knows."""
        return self._moving.ns(migration) if self._options.migrate else None

    def iteration_ns(self, dop: int, rows: int, context: int) -> int:
        """What an iteration of so many instances takes, of rows that attend to `context` tokens
        together."""
        return max(1, self._view.cost.iteration_ns(dop, self._gang.tp, rows, context))

    @property
    def most_rows(self) -> int:
        """Rows that a master draws before others share them."""
        return self._options.scale_up_batch or max(1, self._view.cost.rows_alone(self._gang.tp))

    def rest_ns(self, dop: int, tokens: int, history: int) -> float:
        """What so many instances take for tokens that follow upon others."""
        alpha, beta, pairs, gamma = self._in_ns(dop)
        return alpha + tokens * (beta + pairs * history + gamma * tokens)

    @property
    def mastered(self) -> dict[InstanceId, int]:
        """Rows that each instance draws, or will."""
        return {instance: len(rows) for instance, rows in self._rows.items()}

    def elastic(self, instances: Sequence[InstanceId]) -> tuple[Elastic, ...]:
        """As the four steps see them."""
        return tuple(
            Elastic(it.id, it.order, self.unused[it.id], it.capacity - self.unused[it.id])
            for it in self._gang.instances
            if it.id in instances
        )

    @property
    def all(self) -> tuple[Elastic, ...]:
        """Every instance."""
        return self.elastic([it.id for it in self._gang.instances])

    def ready_ns(self, instances: Sequence[InstanceId]) -> int | None:
        """From when on these may prefill: at once if they decode nothing; None while they do."""
        found = [it for it in self._gang.instances if it.id in instances]
        if any(it.steps for it in found):
            return None
        rows = [
            sequence
            for members, rows in self._groups
            if not members.isdisjoint(instances)
            for sequence in rows
        ]
        if not rows:
            return self._view.now_ns
        iteration_ns = self._batch_ns(len(found), rows)
        return max(it.stepped_ns for it in found) + self._options.decode_iterations * iteration_ns

    @property
    def busy(self) -> set[InstanceId]:
        """They prefill, or KV moves."""
        moving = [it for it in self.sequences if it.moves]
        return {it.id for it in self._gang.instances if it.steps}.union(
            *(instances_of(it) for it in moving)
        )

    @property
    def idle(self) -> tuple[Elastic, ...]:
        """They neither prefill nor decode."""
        taken = self.busy.union(*(members for members, _ in self._groups))
        taken |= {it for sequence in self._gang.decoding.values() for it in instances_of(sequence)}
        return self.elastic([it.id for it in self._gang.instances if it.id not in taken])

    @property
    def movable(self) -> tuple[Elastic, ...]:
        """Instances that decode, and all of whose slots belong to sequences that can move now: not
        those that read what others have computed."""
        held: dict[InstanceId, int] = {}
        busy = self.busy
        for it in self.sequences:
            if it.joined_ns is None or any(share.origin for share in it.shares):
                busy |= instances_of(it)
                continue
            for share in it.shares:
                held[share.instance] = held.get(share.instance, 0) + share.tokens
            start, stop = it.answer_span
            for share in it.answer or (Share(it.master_id, start, stop),):
                held[share.instance] = held.get(share.instance, 0) + share.tokens
        return tuple(
            it for it in self.all if it.id not in busy and it.used and it.used == held.get(it.id, 0)
        )

    @property
    def sequences(self) -> list[SequenceView]:
        """All that are decoded here, or will be."""
        return list(self._gang.decoding.values())

    def others(
        self,
        plans: Sequence[StartPlan],
        idle: Sequence[Elastic],
        batches: Sequence[DecodeBatch],
    ) -> tuple[tuple[Elastic, ...], list[DecodeBatch]]:
        """Of those that may prefill, who can beside these plans, and what slots they have left."""
        taken = {it for plan in plans for step in plan.steps for it in step.group}
        left = [it.id for it in idle if it.id not in taken]
        apart = [it for it in batches if taken.isdisjoint(one.id for one in it.instances)]
        return self.elastic(left), [
            it._replace(instances=self.elastic([one.id for one in it.instances])) for it in apart
        ]

    def batches(self) -> list[tuple[DecodeBatch, int]]:
        """Decode groups that do not prefill, and from when on they may be preempted."""
        busy = self.busy
        stepped = {it.id: it.stepped_ns for it in self._gang.instances}
        found = []
        for members, rows in self._groups:
            if not busy.isdisjoint(members):
                continue
            iteration_ns = self._batch_ns(len(members), rows)
            since_ns = max(stepped[it] for it in members)
            ready_ns = since_ns + self._options.decode_iterations * iteration_ns
            found.append((self._batch(members, rows), ready_ns))
        return found

    @property
    def groups(self) -> list[DecodeBatch]:
        """All decode groups, those included whose instances prefill."""
        return [self._batch(members, rows) for members, rows in self._groups]

    def rows_of(self, batch: DecodeBatch) -> list[SequenceView]:
        """The sequences of a decode group."""
        (first, *_) = batch.instances
        return next(rows for members, rows in self._groups if first.id in members)

    def _batch(self, members: set[InstanceId], rows: Sequence[SequenceView]) -> DecodeBatch:
        iteration_ns = self._batch_ns(len(members), rows)
        requests = tuple(self._decoding(it, iteration_ns) for it in rows)
        return DecodeBatch(self.elastic(sorted(members)), requests, _context(rows))

    def _batch_ns(self, dop: int, rows: Sequence[SequenceView]) -> int:
        return self.iteration_ns(dop, len(rows), _context(rows))

    def _decoding(self, sequence: SequenceView, iteration_ns: int) -> Decoding:
        """How many tokens were drawn is what the shell knows; time tells nearly."""
        executed_ns = self._executed_ns(sequence)
        return Decoding(max(1, executed_ns // iteration_ns), executed_ns)

    def _executed_ns(self, sequence: SequenceView) -> int:
        return 0 if sequence.joined_ns is None else self._view.now_ns - sequence.joined_ns

    def drawn(self, sequence: SequenceView) -> int:
        """The same by how long iterations of the gang have taken."""
        return self._executed_ns(sequence) // self._usual_ns

    @property
    def _usual_ns(self) -> int:
        """How long iterations of the gang have taken lately."""
        return self._gang.iteration_ns or self.iteration_ns(1, 1, 0)


def instances_of(sequence: SequenceView) -> set[InstanceId]:
    """Who takes part in decoding it."""
    return {sequence.master_id, *(it.instance for it in (*sequence.shares, *sequence.answer))}


def _context(rows: Sequence[SequenceView]) -> int:
    return sum(share.tokens for it in rows for share in it.shares)
