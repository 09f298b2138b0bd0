"""An elastic gang in a round of the policy `loongserve`.

`ElasticGang` derives the decode groups and the idle instances from the scheduler's state.

`PrefixReuse` starts prompts after a cached prefix, before batches are formed. The holders compute
the rest around a ring in an iteration of its own. They must be idle, or the rest must gain more
than the requests that decode there lose (Eqs. 1-2).

`StaticGroups` is LoongServe without elasticity, for comparison (Fig. 12). The gang is divided into
groups of `static_dop` neighbors. The oldest requests start together, up to the tipping point, on
the group with most free slots. Its decoding sequences pause meanwhile, and have at least
`decode_iterations` before the next prefill. Requests start strictly first come, first served.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from functools import cached_property

from csps.protocols.core.placement import KvSlice, bounds_of, level_sizes, place, striped, tokens_on
from csps.services.scheduling.deciding.decisions import (
    Decision,
    DecodePlacement,
    PlannedChunk,
    PlannedStep,
    SchedulerView,
    StartPlan,
    WakeAt,
)
from csps.services.scheduling.events.events import InstanceId, SequenceId
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
    saved_ns,
)
from csps.services.scheduling.policies.loongserve.scaling import ALONE, RING, KvPlacement, start
from csps.services.scheduling.state.state import Cached, Gang, Sequence


class ElasticGang:
    """A gang's instances in a round, and its decode groups.

    Sequences that share an instance decode together; their instances are a group. An instance in no
    group and without a step is idle.
    """

    def __init__(self, gang: Gang, view: SchedulerView, options: LoongServeOptions) -> None:
        self._gang, self._view, self._options = gang, view, options
        self._orders = {instance.id: n for n, instance in enumerate(gang.instances)}
        self._instances_of = {
            sequence.id: instances_of(sequence) for sequence in gang.decoding.values()
        }
        self._groups = self._grouped()
        self.unused = {instance.id: instance.free_slots for instance in gang.instances}
        """Slots that are not reserved, those of this round included."""
        self.model = PrefillModel(self._eq7, options.tipping_tokens)
        self._moving = MoveCosts(gang, view.cost, self.generated_tokens, self._usual_ns)

    def _grouped(self) -> list[tuple[set[InstanceId], list[Sequence]]]:
        """Return the instances and sequences of each decode group."""
        # The group that got a sequence last is last.
        groups: dict[SequenceId, tuple[set[InstanceId], list[Sequence]]] = {}
        group_of: dict[InstanceId, SequenceId] = {}
        for sequence in self._gang.decoding.values():
            if sequence.joined_ns is None:
                continue
            needed = self._instances_of[sequence.id]
            shared = {group_of[instance] for instance in needed if instance in group_of}
            members, sequences, first = set(needed), [sequence], sequence.id
            for key in shared if len(shared) < 2 else [key for key in groups if key in shared]:
                others_members, others = groups.pop(key)
                members |= others_members
                sequences = [*others, *sequences]
                first = key
            groups[first] = members, sequences
            group_of.update(dict.fromkeys(members, first))
        return list(groups.values())

    def _eq7(self, dop: int) -> Eq7:
        alpha, beta, _, gamma = self._in_ns(dop)
        return Eq7(alpha, beta, gamma)

    def _in_ns(self, dop: int) -> tuple[float, float, float, float]:
        strategy = RING if dop > 1 else ALONE
        return self._view.cost.exact(dop, self._gang.tp, strategy).in_ns

    def move_ns(self, migration: Migration) -> int | None:
        """Predict a migration (Eq. 4); None if KV may not move, or a link was not measured."""
        return self._moving.ns(migration) if self._options.migrate else None

    def iteration_ns(self, dop: int, batch: int, context: int) -> int:
        """Predict a decode iteration of `dop` instances.

        Args:
            batch: number of sequences.
            context: tokens that they attend to, summed.
        """
        return max(1, self._view.cost.iteration_ns(dop, self._gang.tp, batch, context))

    @property
    def most_sequences(self) -> int:
        """Most sequences that a master samples before others join."""
        return self._options.scale_up_batch or max(1, self._view.cost.rows_alone(self._gang.tp))

    def rest_ns(self, dop: int, tokens: int, history: int) -> float:
        """Predict a prefill of tokens after their history on `dop` instances."""
        alpha, beta, pairs, gamma = self._in_ns(dop)
        return alpha + tokens * (beta + pairs * history + gamma * tokens)

    @property
    def mastered(self) -> dict[InstanceId, int]:
        """Number of sequences that each instance samples, or will sample."""
        mastered = dict.fromkeys(self._orders, 0)
        for sequence in self._gang.decoding.values():
            mastered[sequence.master_id] += 1
        return mastered

    def elastic(self, instances: Iterable[InstanceId]) -> tuple[Elastic, ...]:
        """Return instances as the four steps see them."""
        orders, found = self._orders, []
        for order in sorted({orders[each] for each in instances if each in orders}):
            instance = self._gang.instances[order]
            unused = self.unused[instance.id]
            found.append(Elastic(instance.id, instance.order, unused, instance.capacity - unused))
        return tuple(found)

    @property
    def all(self) -> tuple[Elastic, ...]:
        """All instances of the gang."""
        return self.elastic([instance.id for instance in self._gang.instances])

    def ready_ns(self, instances: Many[InstanceId]) -> int | None:
        """Return the time from which on instances may prefill; None while they prefill already."""
        chosen = [instance for instance in self._gang.instances if instance.id in instances]
        if any(instance.steps for instance in chosen):
            return None
        sequences = [
            sequence
            for members, sequences in self._groups
            if not members.isdisjoint(instances)
            for sequence in sequences
        ]
        if not sequences:
            return self._view.now_ns
        stepped_ns = max(instance.stepped_ns for instance in chosen)
        _, iteration_ns = self._pace(len(chosen), sequences)
        return stepped_ns + self._options.decode_iterations * iteration_ns

    @cached_property
    def busy(self) -> frozenset[InstanceId]:
        """Instances that prefill, or whose KV moves."""
        moving = [sequence for sequence in self.sequences if sequence.is_moving]
        return frozenset(instance.id for instance in self._gang.instances if instance.steps).union(
            *(self._instances_of[sequence.id] for sequence in moving)
        )

    @property
    def idle(self) -> tuple[Elastic, ...]:
        """Instances that neither prefill nor decode."""
        taken = self.busy.union(*(members for members, _ in self._groups))
        taken = taken.union(*self._instances_of.values())
        return self.elastic(
            [instance.id for instance in self._gang.instances if instance.id not in taken]
        )

    @property
    def movable(self) -> tuple[Elastic, ...]:
        """Decoding instances all of whose slots belong to sequences that can move now.

        A sequence that reads cached KV of others cannot move.
        """
        slots = self._movable_slots
        return tuple(
            instance
            for instance in self.elastic(slots)
            if instance.used and instance.used == slots[instance.id]
        )

    @cached_property
    def _movable_slots(self) -> dict[InstanceId, int]:
        """Slots of sequences that can move, by instance; of none, where another one cannot."""
        slots: dict[InstanceId, int] = {}
        busy = set(self.busy)
        for sequence in self.sequences:
            if sequence.joined_ns is None or any(kv_slice.source for kv_slice in sequence.slices):
                busy |= self._instances_of[sequence.id]
                continue
            start, stop = sequence.answer_span
            answer = sequence.answer or (KvSlice(sequence.master_id, start, stop),)
            for kv_slice in (*sequence.slices, *answer):
                slots[kv_slice.instance] = slots.get(kv_slice.instance, 0) + kv_slice.tokens
        return {instance: n for instance, n in slots.items() if instance not in busy}

    @property
    def sequences(self) -> list[Sequence]:
        """Sequences that decode here, or will."""
        return list(self._gang.decoding.values())

    def others(
        self,
        plans: Many[StartPlan],
        idle: Many[Elastic],
        batches: Many[DecodeGroup],
    ) -> tuple[tuple[Elastic, ...], list[DecodeGroup]]:
        """Return the idle instances and decode groups that plans leave, with current slots."""
        taken = {instance for plan in plans for step in plan.steps for instance in step.group}
        left = [instance.id for instance in idle if instance.id not in taken]
        disjoint = [batch for batch in batches if taken.isdisjoint(_ids(batch))]
        return self.elastic(left), [
            batch._replace(instances=self.elastic([instance.id for instance in batch.instances]))
            for batch in disjoint
        ]

    def batches(self, *, small: bool) -> tuple[list[DecodeGroup], list[int]]:
        """Return the decode groups that may be preempted now, and when others may that do not
        prefill.

        Args:
            small: whether groups count that are too small to regroup, which is most of them.
        """
        busy = self.busy
        stepped = {instance.id: instance.stepped_ns for instance in self._gang.instances}
        ready, later_ns = [], []
        for members, sequences in self._groups:
            if not busy.isdisjoint(members):
                continue
            context, iteration_ns = self._pace(len(members), sequences)
            since_ns = max([stepped[member] for member in members])
            ready_ns = since_ns + self._options.decode_iterations * iteration_ns
            if ready_ns > self._view.now_ns:
                later_ns.append(ready_ns)
            elif small or self.may_regroup(len(members), len(sequences)):
                ready.append(self._batch(members, sequences, context, iteration_ns))
        return ready, later_ns

    @property
    def groups(self) -> list[DecodeGroup]:
        """All decode groups, including those whose instances prefill."""
        return [
            self._batch(members, sequences, *self._pace(len(members), sequences))
            for members, sequences in self._groups
        ]

    def may_regroup(self, instances: int, sequences: int) -> bool:
        """Return whether a group of this size may shrink or get more masters. What one instance
        decodes, as its only master, is the usual case."""
        return instances > 1 or sequences > self.most_sequences

    def sequences_of(self, batch: DecodeGroup) -> list[Sequence]:
        """Return the sequences of a decode group."""
        (first, *_) = batch.instances
        return next(sequences for members, sequences in self._groups if first.id in members)

    def _pace(self, instances: int, sequences: Many[Sequence]) -> tuple[int, int]:
        """Return the tokens of a group's sequences, and the time of an iteration in ns."""
        context = sum([kv_slice.tokens for sequence in sequences for kv_slice in sequence.slices])
        return context, self.iteration_ns(instances, len(sequences), context)

    def _batch(
        self,
        members: set[InstanceId],
        sequences: Many[Sequence],
        context: int,
        iteration_ns: int,
    ) -> DecodeGroup:
        requests = tuple([self._decoding(sequence, iteration_ns) for sequence in sequences])
        return DecodeGroup(self.elastic(members), requests, context)

    def _decoding(self, sequence: Sequence, iteration_ns: int) -> Decoding:
        # Only the router knows the exact number of tokens; the time since the start estimates it.
        executed_ns = self._executed_ns(sequence)
        return Decoding(max(1, executed_ns // iteration_ns), executed_ns)

    def _executed_ns(self, sequence: Sequence) -> int:
        return 0 if sequence.joined_ns is None else self._view.now_ns - sequence.joined_ns

    def generated_tokens(self, sequence: Sequence) -> int:
        """Estimate the tokens that a sequence has sampled by recent iterations of the gang."""
        return self._executed_ns(sequence) // self._usual_ns

    @property
    def _usual_ns(self) -> int:
        """Recent iteration time of the gang."""
        return self._gang.iteration_ns or self.iteration_ns(1, 1, 0)


def instances_of(sequence: Sequence) -> set[InstanceId]:
    """Return the instances that take part in decoding a sequence."""
    return {
        sequence.master_id,
        *(kv_slice.instance for kv_slice in (*sequence.slices, *sequence.answer)),
    }


class PrefixReuse:
    """The prompts of a round that start after a cached prefix.

    Args:
        gang: the gang whose slots are taken as prompts start.
        average_decode_ns: average decode time of finished requests.
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
        """Compute the rest of a prompt on the holders of its cached prefix.

        Returns:
            None if the holders may not prefill or have too few slots, or if all idle instances
            compute the whole prompt sooner.
        """
        ids = {kv_slice.instance for kv_slice in cached.slices}
        holders = sorted(self._gang.elastic(list(ids)), key=lambda holder: holder.order)
        free = {instance.id for instance in idle}
        disturbed = [batch for batch in batches if not ids.isdisjoint(_ids(batch))]
        free.update(*map(_ids, disturbed))
        if not free.issuperset(ids):
            return None
        took_ns = self._gang.rest_ns(len(holders), prompt.tokens - cached.tokens, cached.tokens)
        if took_ns > self._gang.model.ns([prompt.tokens], max(1, len(idle))):
            return None
        if any(self._cost(took_ns, batch) >= self._gain(prompt, batch) for batch in disturbed):
            return None
        return self._plan(prompt, cached, holders, took_ns)

    def _cost(self, took_ns: float, batch: DecodeGroup) -> float:
        """Return the loss of a decode group per token (Eq. 1)."""
        return sum([took_ns / request.generated_tokens for request in batch.requests])

    def _gain(self, prompt: PendingPrompt, batch: DecodeGroup) -> float:
        """Return the gain of a prompt per token (Eq. 2)."""
        saved = saved_ns(prompt.waited_ns, batch.requests, self._average_decode_ns)
        return saved / prompt.tokens

    def _plan(
        self, prompt: PendingPrompt, cached: Cached, holders: Many[Elastic], took_ns: float
    ) -> StartPlan | None:
        members, left = [holder.id for holder in holders], prompt.tokens - cached.tokens
        slices = place(members, striped(left, len(members)), start=cached.tokens)
        rows = tuple(kv_slice for kv_slice in slices if kv_slice.tokens)
        computed = tokens_on(rows)
        unused = dict(self._gang.unused)
        for slots in (cached.taken, computed):
            _take(unused, slots)
        if min(unused.values()) < 0 or sum(unused.values()) < prompt.answer:
            return None
        mastered = self._gang.mastered
        master = min(
            holders, key=lambda holder: (mastered[holder.id], -unused[holder.id], holder.order)
        )
        others = [instance for instance in unused if instance != master.id]
        others.sort(key=lambda instance: (instance not in members, -unused[instance]))
        answer = _filled(prompt.tokens, prompt.answer, [master.id, *others], unused)
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
    start: int, tokens: int, instances: Many[InstanceId], unused: Mapping[InstanceId, int]
) -> tuple[KvSlice, ...]:
    """Place positions from `start` on in the slots of one instance after the other."""
    slices, stop = [], start + tokens
    for instance in instances:
        count = min(stop - start, unused[instance])
        if count:
            slices.append(KvSlice(instance, start, start + count))
            start += count
    return tuple(slices)


class StaticGroups:
    """The fixed groups of a gang in a round.

    Args:
        gang: the gang before the round.
        dop: instances of each group; all of them if there are fewer.
        now_ns: time of the round.
        most: most requests that may start.
    """

    def __init__(self, gang: ElasticGang, dop: int, now_ns: int, most: int) -> None:
        self._gang, self._now_ns, self._most = gang, now_ns, most
        neighbors = sorted(gang.all, key=lambda instance: instance.order)
        size = min(dop, len(neighbors))
        self._groups = [
            neighbors[start : start + size] for start in range(0, len(neighbors) - size + 1, size)
        ]

    def decide(self, pending: Many[PendingPrompt]) -> Iterator[Decision]:
        """Start requests on the groups that may prefill."""
        queue = list(pending)
        for group in self._ready():
            prompts = self._next(queue, group)
            if not prompts:
                return
            queue = queue[len(prompts) :]
            self._most -= len(prompts)
            yield self._start(prompts, group)
        if queue:
            times_ns = map(self._ready_ns, self._groups)
            later = [ready_ns for ready_ns in times_ns if ready_ns and ready_ns > self._now_ns]
            if later:
                yield WakeAt(at_ns=min(later))

    def _ready(self) -> list[list[Elastic]]:
        """Return the groups that may prefill now, the one with most free slots first."""
        ready = []
        for group in self._groups:
            from_ns = self._ready_ns(group)
            if from_ns is not None and from_ns <= self._now_ns:
                ready.append(group)
        return sorted(ready, key=lambda group: -sum(instance.unused for instance in group))

    def _ready_ns(self, group: Many[Elastic]) -> int | None:
        """Return the time from which on a group may prefill; None while it prefills."""
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
        unused = {instance.id: instance.unused for instance in group}
        mastered = self._gang.mastered
        placements = []
        for prompt in prompts:
            sizes = level_sizes(prompt.future, list(unused.values()))
            assert sizes is not None, (
                f"request {prompt.id} needs {prompt.future} slots, free are {unused}"
            )
            slots = list(zip(unused, sizes, strict=True))
            master = min(unused, key=lambda instance: (mastered[instance], instance))
            mastered[master] += 1
            left, of_prompt, answer = prompt.tokens, [], []
            for instance, tokens in slots:
                first = min(left, tokens)
                left -= first
                unused[instance] -= tokens
                of_prompt += [(instance, first)] if first else []
                answer += [(instance, tokens - first)] if tokens > first else []
            placements.append(KvPlacement(tuple(of_prompt), tuple(answer), master))
        longest = max(prompt.tokens for prompt in prompts)
        holders = {holder for placement in placements for holder, _ in placement.prompt}
        members = [instance for instance in group if instance.id in holders]
        # Other members compute as well, if there is a token for each.
        others = [instance for instance in group if instance.id not in holders]
        members += others[: max(0, longest - len(members))]
        predicted_ns = round(
            self._gang.model.ns([prompt.tokens for prompt in prompts], len(members))
        )
        return start(prompts, members, placements, predicted_ns)
