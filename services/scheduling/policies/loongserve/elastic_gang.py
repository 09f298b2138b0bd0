"""An elastic gang in a round of the policy `loongserve`: who prefills, who decodes, who is idle.

Prompts that go on from kept KV, before batches are formed: history lies where it lies.

What an iteration of §5.3 takes follows from prompts' lengths, and any instances may compute it. A
prompt of which most was kept has a short rest instead, which its holders compute around a ring in
an iteration of its own, and keep. They prefill if they are idle, or if the rest gains more than
those lose who decode there (Eqs. 1-2).

LoongServe without elasticity, which its Fig. 12 compares with: groups that never change.

The gang is cut into groups of `static_dop` neighbours; what is left over computes nothing. A group
prefills and decodes by itself: the oldest requests start together, up to the tipping point, on the
group that has most unused slots, and their KV is spread over it evenly. What it decodes stands
still meanwhile, and has `decode_iterations` before the next prefill. Strictly first come, first
served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many

from csps.protocols.core.placement import striped
from csps.services.scheduling.deciding.decisions import (
    Decision,
    DecodePlacement,
    PlannedChunk,
    PlannedStep,
    StartPlan,
    WakeAt,
)
from csps.services.scheduling.deciding.scheduler_view import SchedulerView
from csps.services.scheduling.events.commands import PlacedSlice
from csps.services.scheduling.events.events import InstanceId
from csps.services.scheduling.events.slices import bounds_of, laid_out, level_sizes, tokens_on
from csps.services.scheduling.policies.loongserve.allocation import Migration, MoveCosts
from csps.services.scheduling.policies.loongserve.batching import Dispatcher
from csps.services.scheduling.policies.loongserve.inputs import (
    DecodeGroup,
    Decoding,
    Elastic,
    Eq7,
    LoongServeOptions,
    PendingPrompt,
    PrefillModel,
    spared_ns,
)
from csps.services.scheduling.policies.loongserve.scaling import ALONE, RING, KvPlacement, start
from csps.services.scheduling.state.state import Cached, Gang, Sequence


class ElasticGang:
    """Decode groups follow from where KV lies: sequences that share an instance are decoded
    together, and their instances are a group. An instance in no group that computes no step is
    idle."""

    def __init__(self, gang: Gang, view: SchedulerView, options: LoongServeOptions) -> None:
        self._gang, self._view, self._options = gang, view, options
        self._sequences: dict[InstanceId, list[Sequence]] = {
            instance.id: [] for instance in gang.instances
        }
        joined = [it for it in gang.decoding.values() if it.joined_ns is not None]
        merged: list[tuple[set[InstanceId], list[Sequence]]] = []
        for sequence in gang.decoding.values():
            self._sequences[sequence.master_id].append(sequence)
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
        self.unused = {instance.id: instance.free_slots for instance in gang.instances}
        """Slots that nobody was promised, this round included."""
        self.model = PrefillModel(self._eq7, options.tipping_tokens)
        self._moving = MoveCosts(gang, view.cost, self.generated_tokens, self._usual_ns)

    def _eq7(self, dop: int) -> Eq7:
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
    def most_sequences(self) -> int:
        """Rows that a master draws before others share them."""
        return self._options.scale_up_batch or max(1, self._view.cost.rows_alone(self._gang.tp))

    def rest_ns(self, dop: int, tokens: int, history: int) -> float:
        """What so many instances take for tokens that follow upon others."""
        alpha, beta, pairs, gamma = self._in_ns(dop)
        return alpha + tokens * (beta + pairs * history + gamma * tokens)

    @property
    def mastered(self) -> dict[InstanceId, int]:
        """Rows that each instance draws, or will."""
        return {instance: len(rows) for instance, rows in self._sequences.items()}

    def elastic(self, instances: Many[InstanceId]) -> tuple[Elastic, ...]:
        """As the four steps see them."""
        return tuple(
            Elastic(
                instance.id,
                instance.order,
                self.unused[instance.id],
                instance.capacity - self.unused[instance.id],
            )
            for instance in self._gang.instances
            if instance.id in instances
        )

    @property
    def all(self) -> tuple[Elastic, ...]:
        """Every instance."""
        return self.elastic([instance.id for instance in self._gang.instances])

    def ready_ns(self, instances: Many[InstanceId]) -> int | None:
        """From when on these may prefill: at once if they decode nothing; None while they do."""
        found = [instance for instance in self._gang.instances if instance.id in instances]
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
        moving = [sequence for sequence in self.sequences if sequence.is_moving]
        return {instance.id for instance in self._gang.instances if instance.steps}.union(
            *(instances_of(it) for it in moving)
        )

    @property
    def idle(self) -> tuple[Elastic, ...]:
        """They neither prefill nor decode."""
        taken = self.busy.union(*(members for members, _ in self._groups))
        taken |= {it for sequence in self._gang.decoding.values() for it in instances_of(sequence)}
        return self.elastic(
            [instance.id for instance in self._gang.instances if instance.id not in taken]
        )

    @property
    def movable(self) -> tuple[Elastic, ...]:
        """Instances that decode, and all of whose slots belong to sequences that can move now: not
        those that read what others have computed."""
        held: dict[InstanceId, int] = {}
        busy = self.busy
        for sequence in self.sequences:
            if sequence.joined_ns is None or any(share.source for share in sequence.slices):
                busy |= instances_of(sequence)
                continue
            for share in sequence.slices:
                held[share.instance] = held.get(share.instance, 0) + share.tokens
            start, stop = sequence.answer_span
            for share in sequence.answer or (PlacedSlice(sequence.master_id, start, stop),):
                held[share.instance] = held.get(share.instance, 0) + share.tokens
        return tuple(
            it for it in self.all if it.id not in busy and it.used and it.used == held.get(it.id, 0)
        )

    @property
    def sequences(self) -> list[Sequence]:
        """All that are decoded here, or will be."""
        return list(self._gang.decoding.values())

    def others(
        self,
        plans: Many[StartPlan],
        idle: Many[Elastic],
        batches: Many[DecodeGroup],
    ) -> tuple[tuple[Elastic, ...], list[DecodeGroup]]:
        """Of those that may prefill, who can beside these plans, and what slots they have left."""
        taken = {it for plan in plans for step in plan.steps for it in step.group}
        left = [it.id for it in idle if it.id not in taken]
        apart = [batch for batch in batches if taken.isdisjoint(one.id for one in batch.instances)]
        return self.elastic(left), [
            it._replace(instances=self.elastic([one.id for one in it.instances])) for it in apart
        ]

    def batches(self) -> list[tuple[DecodeGroup, int]]:
        """Decode groups that do not prefill, and from when on they may be preempted."""
        busy = self.busy
        stepped = {instance.id: instance.stepped_ns for instance in self._gang.instances}
        found = []
        for members, rows in self._groups:
            if not busy.isdisjoint(members):
                continue
            iteration_ns = self._batch_ns(len(members), rows)
            since_ns = max(stepped[member] for member in members)
            ready_ns = since_ns + self._options.decode_iterations * iteration_ns
            found.append((self._batch(members, rows), ready_ns))
        return found

    @property
    def groups(self) -> list[DecodeGroup]:
        """All decode groups, those included whose instances prefill."""
        return [self._batch(members, rows) for members, rows in self._groups]

    def sequences_of(self, batch: DecodeGroup) -> list[Sequence]:
        """The sequences of a decode group."""
        (first, *_) = batch.instances
        return next(rows for members, rows in self._groups if first.id in members)

    def _batch(self, members: set[InstanceId], rows: Many[Sequence]) -> DecodeGroup:
        iteration_ns = self._batch_ns(len(members), rows)
        requests = tuple(self._decoding(row, iteration_ns) for row in rows)
        return DecodeGroup(self.elastic(sorted(members)), requests, _context(rows))

    def _batch_ns(self, dop: int, rows: Many[Sequence]) -> int:
        return self.iteration_ns(dop, len(rows), _context(rows))

    def _decoding(self, sequence: Sequence, iteration_ns: int) -> Decoding:
        """How many tokens were drawn is what the shell knows; time tells nearly."""
        executed_ns = self._executed_ns(sequence)
        return Decoding(max(1, executed_ns // iteration_ns), executed_ns)

    def _executed_ns(self, sequence: Sequence) -> int:
        return 0 if sequence.joined_ns is None else self._view.now_ns - sequence.joined_ns

    def generated_tokens(self, sequence: Sequence) -> int:
        """The same by how long iterations of the gang have taken."""
        return self._executed_ns(sequence) // self._usual_ns

    @property
    def _usual_ns(self) -> int:
        """How long iterations of the gang have taken lately."""
        return self._gang.iteration_ns or self.iteration_ns(1, 1, 0)


def instances_of(sequence: Sequence) -> set[InstanceId]:
    """Who takes part in decoding it."""
    return {
        sequence.master_id,
        *(kv_slice.instance for kv_slice in (*sequence.slices, *sequence.answer)),
    }


def _context(rows: Many[Sequence]) -> int:
    return sum(share.tokens for row in rows for share in row.slices)


class PrefixReuse:
    """What goes on in a round.

    Args:
        gang: whose slots are taken as prompts start.
        average_decode_ns: how long finished requests were decoded.
    """

    def __init__(self, gang: ElasticGang, average_decode_ns: int) -> None:
        self._gang, self._average_decode_ns = gang, average_decode_ns

    def start(
        self,
        prompt: PendingPrompt,
        cached: Cached,
        idle: Many[Elastic],
        batches: Many[DecodeGroup],
    ) -> StartPlan | None:
        """Compute the rest of a prompt where its beginning lies; None if these may not prefill, or
        have no slots, or all of the prompt would be computed sooner by all that may."""
        names = dict.fromkeys(kv_slice.instance for kv_slice in cached.slices)
        holders = sorted(self._gang.elastic(list(names)), key=lambda it: it.order)
        free = {it.id for it in idle}
        disturbed = [batch for batch in batches if not names.keys().isdisjoint(_ids(batch))]
        free.update(*map(_ids, disturbed))
        if not free.issuperset(names):
            return None
        took_ns = self._gang.rest_ns(len(holders), prompt.tokens - cached.tokens, cached.tokens)
        if took_ns > self._gang.model.ns([prompt.tokens], max(1, len(idle))):
            return None
        if any(self._cost(took_ns, it) >= self._gain(prompt, it) for it in disturbed):
            return None
        return self._plan(prompt, cached, holders, took_ns)

    def _cost(self, took_ns: float, batch: DecodeGroup) -> float:
        """Eq. 1."""
        return sum([took_ns / request.generated_tokens for request in batch.requests])

    def _gain(self, prompt: PendingPrompt, batch: DecodeGroup) -> float:
        """Eq. 2."""
        spared = spared_ns(prompt.waited_ns, batch.requests, self._average_decode_ns)
        return spared / prompt.tokens

    def _plan(
        self, prompt: PendingPrompt, cached: Cached, holders: Many[Elastic], took_ns: float
    ) -> StartPlan | None:
        members, left = [holder.id for holder in holders], prompt.tokens - cached.tokens
        laid = laid_out(members, striped(left, len(members)), cached.tokens)
        rows = tuple(it for it in laid if it.tokens)
        computed = tokens_on(rows)
        unused = dict(self._gang.unused)
        for slots in (cached.taken, computed):
            _take(unused, slots)
        if min(unused.values()) < 0 or sum(unused.values()) < prompt.answer:
            return None
        master = min(holders, key=lambda it: (self._gang.mastered[it.id], -unused[it.id], it.order))
        others = [it for it in unused if it != master.id]
        line = [master.id, *sorted(others, key=lambda it: (it not in members, -unused[it]))]
        answer = _filled(prompt.tokens, prompt.answer, line, unused)
        _take(unused, tokens_on(answer))
        self._gang.unused.update(unused)
        ring = len(members) > 1
        step = PlannedStep(
            group=tuple(members),
            bounds=bounds_of([computed.get(member, 0) for member in members]),
            chunks=(PlannedChunk(prompt.id, cached.tokens, left, rows=rows if ring else ()),),
            strategy=RING if ring else ALONE,
            predicted_ns=round(took_ns),
        )
        placement = DecodePlacement(prompt.id, (*cached.slices, *rows), master.id, answer=answer)
        return StartPlan(steps=(step,), decode=(placement,))


def _ids(batch: DecodeGroup) -> set[InstanceId]:
    return {instance.id for instance in batch.instances}


def _take(unused: dict[InstanceId, int], slots: Mapping[InstanceId, int]) -> None:
    for instance, count in slots.items():
        unused[instance] -= count


def _filled(
    start: int, tokens: int, line: Many[InstanceId], unused: Mapping[InstanceId, int]
) -> tuple[PlacedSlice, ...]:
    """Positions from `start` on, in slots of one instance after the other."""
    slices, stop = [], start + tokens
    for instance in line:
        part = min(stop - start, unused[instance])
        if part:
            slices.append(PlacedSlice(instance, start, start + part))
            start += part
    return tuple(slices)


class StaticGroups:
    """A gang in a round.

    Args:
        gang: as it is.
        dop: instances of every group; all of them if there are fewer.
        now_ns: the time of the round.
        most: requests that may start.
    """

    def __init__(self, gang: ElasticGang, dop: int, now_ns: int, most: int) -> None:
        self._gang, self._now_ns, self._most = gang, now_ns, most
        neighbours = sorted(gang.all, key=lambda it: it.order)
        size = min(dop, len(neighbours))
        self._groups = [
            neighbours[at : at + size] for at in range(0, len(neighbours) - size + 1, size)
        ]

    def decide(self, pending: Many[PendingPrompt]) -> Iterator[Decision]:
        """Start what can start."""
        queue = list(pending)
        for group in self._ready():
            prompts = self._next(queue, group)
            if not prompts:
                return
            queue = queue[len(prompts) :]
            self._most -= len(prompts)
            yield self._start(prompts, group)
        if queue:
            later = [it for it in map(self._ready_ns, self._groups) if it and it > self._now_ns]
            if later:
                yield WakeAt(at_ns=min(later))

    def _ready(self) -> list[list[Elastic]]:
        """Groups that may prefill now, the one with most unused slots first."""
        ready = []
        for group in self._groups:
            from_ns = self._ready_ns(group)
            if from_ns is not None and from_ns <= self._now_ns:
                ready.append(group)
        return sorted(ready, key=lambda it: -sum(one.unused for one in it))

    def _ready_ns(self, group: Many[Elastic]) -> int | None:
        """From when on; None while it prefills."""
        return self._gang.ready_ns([instance.id for instance in group])

    def _next(self, queue: Many[PendingPrompt], group: Many[Elastic]) -> tuple[PendingPrompt, ...]:
        slots = sum(instance.unused for instance in group)
        dispatcher = Dispatcher(
            self._gang.model,
            future_slots=slots,
            average_decode_ns=0,
            most=self._most,
            max_num_ooe=0,
        )
        return dispatcher.dispatch(queue, group, []).prompts

    def _start(self, prompts: Many[PendingPrompt], group: Many[Elastic]) -> StartPlan:
        unused = {it.id: it.unused for it in group}
        mastered = self._gang.mastered
        kept = []
        for prompt in prompts:
            sizes = level_sizes(prompt.future, list(unused.values()))
            assert sizes is not None, "slots were counted wrong"
            shares = list(zip(unused, sizes, strict=True))
            master = min(unused, key=lambda it: (mastered[it], it))
            mastered[master] += 1
            left, of_prompt, answer = prompt.tokens, [], []
            for instance, tokens in shares:
                first = min(left, tokens)
                left -= first
                unused[instance] -= tokens
                of_prompt += [(instance, first)] if first else []
                answer += [(instance, tokens - first)] if tokens > first else []
            kept.append(KvPlacement(tuple(of_prompt), tuple(answer), master))
        longest = max(it.tokens for it in prompts)
        members = [
            it for it in group if any(it.id == one for where in kept for one, _ in where.prompt)
        ]
        members += [it for it in group if it not in members][: max(0, longest - len(members))]
        lengths = [it.tokens for it in prompts]
        return start(prompts, members, kept, round(self._gang.model.ns(lengths, len(members))))
