"""The policy `loongserve` changes its groups of instances from iteration to iteration (§5).

On an elastic gang, every round starts prompts after a cached prefix on its holders
(`elastic_gang.py`), and decides about the others in four steps: which requests to prefill next and
in which batches (`batching.py`), on which instances (`allocation.py`), and where to place their KV
(`scaling.py`). Decoding requests are disturbed only if that gains more than it costs.

Nothing is evicted: a request starts when the gang has slots for its prompt and its longest possible
answer, and all of them are reserved then. No request starves: younger requests pass one without
slots in at most `max_num_ooe` rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from functools import partial
from itertools import islice

from csps.services.scheduling.deciding.decisions import (
    Blocked,
    Bypassed,
    Decision,
    MovePlan,
    SchedulerView,
    StartPlan,
    WakeAt,
)
from csps.services.scheduling.events.events import InstanceId, RequestId, SequenceId
from csps.services.scheduling.policies.loongserve.allocation import Migration, allocate, moves
from csps.services.scheduling.policies.loongserve.batching import (
    MOST_INSTANCES,
    MOST_REQUESTS,
    Dispatched,
    Dispatcher,
    Objective,
    most_requests,
    plain,
    pruned,
)
from csps.services.scheduling.policies.loongserve.elastic_gang import (
    ElasticGang,
    PrefixReuse,
    StaticGroups,
)
from csps.services.scheduling.policies.loongserve.inputs import (
    DecodeGroup,
    Elastic,
    LoongServeOptions,
    PendingPrompt,
    wait_ns,
    worth_waiting,
)
from csps.services.scheduling.policies.loongserve.scaling import (
    KvPlacement,
    Regrouping,
    hand_over,
    levelled,
    place_kv,
    start,
)
from csps.services.scheduling.policies.rounds.decode_overlay import DecodeOptions
from csps.services.scheduling.state.state import GangPair, Priority, Request, Sequence, order_key


class LoongServe:
    """The policy `loongserve`."""

    name = "loongserve"
    whole_prompts = False

    def __init__(
        self, options: LoongServeOptions | None = None, decode: DecodeOptions | None = None
    ) -> None:
        self.options = options or LoongServeOptions()
        self.decode_options = decode or DecodeOptions()

    @property
    def regroups(self) -> bool:
        """True if decode groups may migrate."""
        return self.options.migrate and not self.options.static_dop

    def priority(self, prompt_tokens: int, pairs: Many[GangPair]) -> Priority:
        """Return low priority for all requests."""
        return "low"

    def decide(self, view: SchedulerView) -> Many[Decision]:
        """Decide one round on every elastic gang."""
        started: dict[RequestId, None] = {}
        decisions: list[Decision] = []
        rounds = [
            _Round(pair, view, self.options, self.decode_options, started) for pair in view.pairs
        ]
        for round_ in rounds:
            decisions += round_.decide()
        oldest = next(iter(view.waiting("low")), None)
        if oldest is not None and oldest.id not in started:
            future = oldest.prompt_tokens + oldest.output_tokens
            if all(round_.unused < future for round_ in rounds):
                decisions.append(Blocked(request_id=oldest.id))
        return decisions

    def fits(self, pair: GangPair, prompt_tokens: int, output_tokens: int) -> bool:
        """Return True if a group has enough slots: any token may be on any of its instances."""
        gang = pair.decode
        size = self.options.static_dop or len(gang.instances)
        return prompt_tokens + output_tokens <= gang.largest_group(size)


class _Round:
    """A round on one gang."""

    def __init__(
        self,
        pair: GangPair,
        view: SchedulerView,
        options: LoongServeOptions,
        decode: DecodeOptions,
        started: dict[RequestId, None],
    ) -> None:
        self._pair, self._view = pair, view
        self._options, self._max_batch = options, decode.max_batch
        self._started = started
        self._gang = ElasticGang(pair.decode, view, options)
        self._model = self._gang.model
        self._wakes: list[int] = []
        self._moved: dict[SequenceId, None] = {}
        self._taken: dict[InstanceId, None] = {}
        """Instances that begin to prefill in this round, or will decode these requests."""
        self._regrouping = Regrouping(
            self._gang.iteration_ns,
            self._gang.move_ns,
            average_decode_ns=pair.decode.decode_ns,
            most_sequences=self._gang.most_sequences,
        )

    @property
    def unused(self) -> int:
        """Slots of the gang that are not reserved, those of this round included."""
        return sum(self._gang.unused.values())

    def decide(self) -> Iterator[Decision]:
        """Yield the plans, the bypassed requests, and the time of the next round."""
        if dop := self._options.static_dop:
            yield from self._static(dop)
            return
        started = len(self._started)
        waits = next(self._pending(), None) is not None
        batches = self._batches(small=waits)
        if waits:
            yield from self._starts(self._gang.idle, batches)
        if len(self._started) > started:
            yield from self._bypassed()
        if self._options.migrate:
            yield from self._regrouped(batches)
        yield from self._wake()

    def _starts(
        self, idle: Many[Elastic], batches: Many[DecodeGroup]
    ) -> Iterator[StartPlan | MovePlan]:
        """Start prompts after cached prefixes, then batches on the other instances."""
        migration = None
        reusing = list(self._reuse_prefixes(idle, batches))
        if reusing:
            yield from reusing
            idle, batches = self._gang.others(reusing, idle, batches)
        elif not idle:
            idle, migration = self._emptied()
            # Some of the groups receive the migrated KV, so none may be preempted.
            batches = [] if migration else batches
        if not idle and not batches:
            return
        dispatched = self._dispatch(idle, batches, _slots(migration))
        if dispatched.again_in_ns is not None:
            self._wakes.append(self._view.now_ns + dispatched.again_in_ns)
        if dispatched.prompts and not self._waits(dispatched, idle, batches):
            yield from self._moves([migration] if migration else [])
            yield from self._plans(dispatched, idle)

    def _bypassed(self) -> Iterator[Bypassed]:
        """Yield the requests that younger ones have passed in this round."""
        waiting = islice(self._view.waiting("low"), MOST_REQUESTS)
        order = {request.id: order_key(request) for request in waiting}
        last = max(order[request_id] for request_id in self._started)
        for prompt in self._pending():
            if order[prompt.id] > last:
                break
            yield Bypassed(request_id=prompt.id)

    def _reuse_prefixes(
        self, idle: Many[Elastic], batches: Many[DecodeGroup]
    ) -> Iterator[StartPlan]:
        """Start prompts on the holders of their cached prefixes, within `max_num_ooe` (App. A)."""
        reuse = PrefixReuse(self._gang, self._pair.decode.decode_ns)
        requests = {
            request.id: request for request in islice(self._view.waiting("low"), MOST_REQUESTS)
        }
        busy: set[InstanceId] = set()
        for prompt in list(self._pending()):
            if not self._room():
                break
            cached = self._view.cached(requests[prompt.id], self._pair.decode.id)
            holders = {kv_slice.instance for kv_slice in cached.slices} if cached else set()
            plan = None
            if cached is not None and busy.isdisjoint(holders):
                plan = reuse.start(prompt, cached, idle, batches)
            if plan is not None:
                self._started[prompt.id] = None
                busy |= holders
                yield self._noted(plan)
            elif prompt.bypassed_rounds >= self._options.max_num_ooe:
                break

    def _static(self, dop: int) -> Iterator[Decision]:
        groups = StaticGroups(self._gang, dop, self._view.now_ns, self._room())
        for decision in groups.decide(list(self._pending())):
            if isinstance(decision, StartPlan):
                self._started.update((placement.request_id, None) for placement in decision.decode)
            yield decision

    def _wake(self) -> Iterator[Decision]:
        future = [wake for wake in self._wakes if wake > self._view.now_ns]
        if future:
            yield WakeAt(at_ns=min(future))

    # --- §5.1 ---

    def _batches(self, *, small: bool) -> list[DecodeGroup]:
        """Return the decode groups that may be preempted now."""
        ready, later_ns = self._gang.batches(small=small)
        self._wakes += later_ns
        return ready

    def _pending(self) -> Iterator[PendingPrompt]:
        """Yield the pending requests of the oldest one's class."""
        # Requests of several classes cannot share a step.
        cls = None
        for request in islice(self._view.waiting("low"), MOST_REQUESTS):
            fits = request.prompt_tokens + request.output_tokens <= self._pair.max_positions
            if fits and request.id not in self._started and cls in (None, request.cls):
                cls = request.cls
                yield _prompt(request, self._view.now_ns)

    def _dispatch(self, idle: Many[Elastic], batches: Many[DecodeGroup], moving: int) -> Dispatched:
        """Choose the requests to prefill.

        Args:
            moving: slots that migrated KV occupies twice until it is received.
        """
        available = len(idle) + sum(len(batch.instances) for batch in batches)
        room = self._max_batch - self._pair.decode.mastered
        dispatcher = Dispatcher(
            self._model,
            future_slots=self.unused - moving,
            average_decode_ns=self._pair.decode.decode_ns,
            most=max(0, min(most_requests(available), room, self._options.max_prompts or room)),
            max_num_ooe=self._options.max_num_ooe,
        )
        return dispatcher.dispatch(self._pending(), idle, batches)

    def _emptied(self) -> tuple[tuple[Elastic, ...], Migration | None]:
        """Empty an instance while all of them decode, if that pays off."""
        if not self._options.migrate:
            return (), None
        freed = self._regrouping.free(
            self._gang.movable,
            self._gang.groups,
            startable=lambda instance: self._dispatch([instance], [], instance.used).prompts,
            alone_ns=lambda prompt: self._model.ns([prompt.tokens], 1),
        )
        return ((freed.instance,), freed.migration) if freed else ((), None)

    # --- §4, §5.4: decode groups ---

    def _regrouped(self, batches: Many[DecodeGroup]) -> Iterator[MovePlan]:
        """Shrink groups that are faster on fewer instances, and give others more masters."""
        large = [
            batch
            for batch in batches
            if self._gang.may_regroup(len(batch.instances), len(batch.requests))
        ]
        movable = {instance.id for instance in self._gang.movable} if large else set()
        for batch in large:
            sequences = self._gang.sequences_of(batch)
            if any(instance.id in self._taken for instance in batch.instances):
                continue
            if any(sequence.id in self._moved for sequence in sequences):
                continue
            now = self._gang.elastic([instance.id for instance in batch.instances])
            migration = self._regrouping.shrink(batch._replace(instances=now), movable)
            if migration is not None:
                yield from self._moves([migration])
            elif len(sequences) > self._gang.most_sequences:
                yield from self._masters(batch, sequences)

    def _masters(self, batch: DecodeGroup, sequences: Many[Sequence]) -> Iterator[MovePlan]:
        """Distribute the sequences of a group over more masters."""
        gang, of_master = self._gang, dict[InstanceId, list[Sequence]]()
        for sequence in sequences:
            of_master.setdefault(sequence.master_id, []).append(sequence)
        own = [instance.id for instance in batch.instances]
        idle = [instance.id for instance in gang.idle if instance.id not in self._taken]
        mastered = {master: len(sampled) for master, sampled in of_master.items()}
        wanted = levelled(mastered, [*own, *idle], gang.most_sequences)
        takers = [
            master for master in wanted for _ in range(wanted[master] - mastered.get(master, 0))
        ]
        self._taken.update((master, None) for master in wanted if master not in own)
        for master, sampled in of_master.items():
            movable = [
                sequence
                for sequence in reversed(sampled)
                if not any(kv_slice.source for kv_slice in sequence.slices)
            ]
            for sequence in movable[: max(0, len(sampled) - wanted.get(master, 0))]:
                self._moved[sequence.id] = None
                seen = sequence.answer_span[0] + gang.generated_tokens(sequence)
                yield hand_over(sequence, takers.pop(), seen, gang.unused)

    # --- App. A ---

    def _waits(
        self, dispatched: Dispatched, idle: Many[Elastic], batches: Many[DecodeGroup]
    ) -> bool:
        """Return True if all instances soon are better than some now.

        The time already waited counts, so that no request waits longer than it can gain.
        """
        most_ns = round(self._options.max_delay_s * 1e9)
        if dispatched.preempted or not batches or not most_ns:
            return False
        decoding = [request for batch in batches for request in batch.requests]
        wait = wait_ns(decoding, self._pair.decode.decode_ns)
        oldest = dispatched.prompts[0].id
        since_ns = next(
            request.waiting_since_ns
            for request in self._view.waiting("low")
            if request.id == oldest
        )
        waited_ns = self._view.now_ns - since_ns
        every = len(self._pair.decode.instances)
        delay_ns = wait + waited_ns
        if not 0 < wait <= delay_ns <= most_ns:
            return False
        if not worth_waiting(dispatched.prompts, len(idle), every, delay_ns, self._model):
            return False
        self._wakes.append(self._view.now_ns + wait)
        return True

    # --- §5.2, §5.3, §5.4 ---

    def _plans(self, dispatched: Dispatched, idle: Many[Elastic]) -> Iterator[StartPlan | MovePlan]:
        """Allocate instances to the chosen requests, form batches and start them."""
        prompts = list(dispatched.prompts)
        decoding = [instance for batch in dispatched.preempted for instance in batch.instances]
        # An instance that is emptied for these requests counts as idle already.
        known = {instance.id for instance in (*idle, *decoding)}
        others = [instance for instance in self._gang.movable if instance.id not in known]
        room = self.unused - sum(prompt.future for prompt in prompts)
        given = partial(allocate, prompts, idle, decoding, self._model, others=others)
        allocation = given(move_ns=self._gang.move_ns)
        if allocation is not None and sum(map(_slots, allocation.migrations)) > room:
            allocation = given(move_ns=lambda _: None)
        if allocation is None:
            return
        yield from self._moves(allocation.migrations)
        whole = _whole_groups(allocation.instances, dispatched.preempted)
        chosen = self._gang.elastic([instance.id for instance in whole])
        # The paper sorts by location, then by ascending unused slots (§5.3). A group needs slots
        # before it needs near neighbors: descending slots find batches that ascending ones miss,
        # and location only decides between equal ones.
        instances = sorted(chosen, key=lambda instance: (-instance.unused, instance.order))
        instances = instances[:MOST_INSTANCES]
        prompts.sort(key=lambda prompt: (-prompt.tokens, prompt.id))
        search = plain if self._options.batching == "plain" else pruned
        objective: Objective = "sum" if self._options.objective == "sum" else "normalised"
        lengths, slots = (
            [prompt.tokens for prompt in prompts],
            [instance.unused for instance in instances],
        )
        batching = search(lengths, slots, self._model, objective)
        if batching is None:
            return
        batches = [
            (
                prompts[batch.first : batch.stop],
                _filled(prompts[batch.first], instances[batch.begin : batch.end]),
            )
            for batch in batching.batches
        ]
        yield from self._start(batches)
        slowest_ns = max(
            self._model.ns([request.tokens for request in requests], len(group))
            for requests, group in batches
        )
        yield from self._greedy(instances[batching.batches[-1].end :], slowest_ns)

    def _moves(self, migrations: Many[Migration]) -> Iterator[MovePlan]:
        """Yield the moves of migrations whose sequences can all move now."""
        movable = {instance.id for instance in self._gang.movable}
        for migration in migrations:
            if migration.source not in movable:
                continue  # Its sequences pause instead.
            plans = list(moves(migration, self._gang.sequences))
            if any(plan.sequence_id in self._moved for plan in plans):
                continue  # A sequence on two sources moves only once; the others pause.
            self._moved.update((plan.sequence_id, None) for plan in plans)
            for target, tokens in migration.targets:
                self._gang.unused[target] -= tokens
            yield from plans

    def _greedy(self, left: Many[Elastic], slowest_ns: float) -> Iterator[StartPlan]:
        """Fill instances without a batch with the oldest requests that end in time (App. A)."""
        for instance in left:
            room, slots = self._room(), self._gang.unused[instance.id]
            fitting: list[PendingPrompt] = []
            for prompt in self._pending():
                more = [*fitting, prompt]
                if (
                    len(more) <= room
                    and sum(pending.future for pending in more) <= slots
                    and self._model.ns([pending.tokens for pending in more], 1) <= slowest_ns
                ):
                    fitting = more
                elif prompt.bypassed_rounds >= self._options.max_num_ooe:
                    break
            if fitting:
                yield from self._start([(fitting, [instance])])

    def _room(self) -> int:
        return self._max_batch - self._pair.decode.mastered - len(self._started)

    def _start(
        self, batches: Many[tuple[Many[PendingPrompt], Many[Elastic]]]
    ) -> Iterator[StartPlan]:
        """Place the KV of batches, take its slots and start them."""
        gang = self._gang
        placements = place_kv(
            [
                (requests, gang.elastic([instance.id for instance in group]))
                for requests, group in batches
            ],
            gang.all,
            gang.mastered,
            most_sequences=gang.most_sequences,
        )
        for (requests, group), of_batch in zip(batches, placements, strict=True):
            for placement in of_batch:
                self._take(placement)
            lengths = [request.tokens for request in requests]
            predicted_ns = round(self._model.ns(lengths, len(group)))
            self._started.update((request.id, None) for request in requests)
            yield self._noted(start(requests, group, of_batch, predicted_ns))

    def _noted(self, plan: StartPlan) -> StartPlan:
        """Record the instances of a plan as taken."""
        for step in plan.steps:
            self._taken.update((instance, None) for instance in step.group)
        for placement in plan.decode:
            self._taken[placement.master] = None
            slices = (*placement.slices, *placement.answer)
            self._taken.update((kv_slice.instance, None) for kv_slice in slices)
        return plan

    def _take(self, placement: KvPlacement) -> None:
        for instance, tokens in (*placement.prompt, *placement.answer):
            self._gang.unused[instance] -= tokens


def _prompt(request: Request, now_ns: int) -> PendingPrompt:
    return PendingPrompt(
        id=request.id,
        tokens=request.prompt_tokens,
        answer=request.output_tokens,
        bypassed_rounds=request.bypassed_rounds,
        waited_ns=now_ns - request.waiting_since_ns,
    )


def _slots(migration: Migration | None) -> int:
    return sum(tokens for _, tokens in migration.targets) if migration else 0


def _filled(longest: PendingPrompt, group: Many[Elastic]) -> Many[Elastic]:
    """Return the members that compute at least a token of the longest prompt."""
    return group[: longest.tokens]


def _whole_groups(chosen: Many[Elastic], preempted: Many[DecodeGroup]) -> list[Elastic]:
    """Add the other instances of preempted groups, which pause and may as well prefill."""
    whole: dict[InstanceId, Elastic] = {instance.id: instance for instance in chosen}
    for batch in preempted:
        if any(instance.id in whole for instance in batch.instances):
            whole.update((instance.id, instance) for instance in batch.instances)
    return list(whole.values())
