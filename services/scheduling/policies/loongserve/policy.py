"""LoongServe: groups of instances that change from iteration to iteration (§5).

On an elastic gang every round starts prompts that go on from kept KV where that lies (`going_on`),
and decides in four steps about others: which of the waiting requests are prefilled next
(`dispatch`), on which instances (`allocation`), in which batches (`batching`), and where their KV
stays (`scaling`). A prefill so runs on as many instances as pay, and leaves its KV, without a
message more, on the fewest that hold it. Short and long prompts do not wait for one another, and
what decodes is disturbed only where that gains more than it costs.

**Nothing is evicted.** A request starts when the gang has slots for its prompt and for the longest
answer that it may draw; all of them are promised then. An answer grows over as many instances as it
takes, without moving a token: its decode group scales up when it comes to slots of another one.

**Nobody starves.** A request that finds no slots is passed by younger ones in `max_num_ooe` rounds
at most.
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
    StartPlan,
    WakeAt,
)
from csps.services.scheduling.deciding.scheduler_view import SchedulerView
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
from csps.services.scheduling.state.state import GangPair, Priority, Request, Sequence


class LoongServe:
    """The policy of this module's description."""

    name = "loongserve"
    whole_prompts = False

    def __init__(
        self, options: LoongServeOptions | None = None, decode: DecodeOptions | None = None
    ) -> None:
        self.options = options or LoongServeOptions()
        self.decode_options = decode or DecodeOptions()

    @property
    def regroups(self) -> bool:
        """Decode groups do."""
        return self.options.migrate and not self.options.static_dop

    def priority(self, prompt_tokens: int, pairs: Many[GangPair]) -> Priority:
        """Nobody is urgent."""
        return "low"

    def decide(self, view: SchedulerView) -> Many[Decision]:
        """One round on every elastic gang."""
        started: dict[RequestId, None] = {}
        decisions: list[Decision] = []
        rounds = [
            _Round(pair, view, self.options, self.decode_options, started) for pair in view.pairs
        ]
        for it in rounds:
            decisions += it.decide()
        oldest = next(iter(view.waiting("low")), None)
        if oldest is not None and oldest.id not in started:
            future = oldest.prompt_tokens + oldest.output_tokens
            if all(it.unused < future for it in rounds):
                decisions.append(Blocked(request_id=oldest.id))
        return decisions

    def fits(self, pair: GangPair, prompt_tokens: int, output_tokens: int) -> bool:
        """Return whether a group has slots enough: any token may lie on any of its instances."""
        gang = pair.decode
        size = self.options.static_dop or len(gang.instances)
        return prompt_tokens + output_tokens <= gang.largest_group(size)


class _Round:
    """One gang."""

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
        """Instances that begin to prefill in this round, or are to decode what does."""
        self._regrouping = Regrouping(
            self._gang.iteration_ns,
            self._gang.move_ns,
            average_decode_ns=pair.decode.decode_ns,
            most_rows=self._gang.most_sequences,
        )

    @property
    def unused(self) -> int:
        """Slots of the gang that nobody was promised, by what was decided as well."""
        return sum(self._gang.unused.values())

    def decide(self) -> Iterator[Decision]:
        """What starts, who was passed, and when to ask again."""
        if dop := self._options.static_dop:
            yield from self._static(dop)
            return
        started = len(self._started)
        batches = self._batches()
        if next(self._pending(), None) is not None:
            yield from self._any(self._gang.idle, batches)
        if len(self._started) > started:
            yield from self._bypassed()
        if self._options.migrate:
            yield from self._regrouped(batches)
        yield from self._asking_again()

    def _any(
        self, idle: Many[Elastic], batches: Many[DecodeGroup]
    ) -> Iterator[StartPlan | MovePlan]:
        """First what goes on from kept KV, then batches on the other instances."""
        migration = None
        going_on = list(self._reuse_prefixes(idle, batches))
        if going_on:
            yield from going_on
            idle, batches = self._gang.others(going_on, idle, batches)
        elif not idle:
            idle, migration = self._emptied()
            batches = [] if migration else batches  # some take what moves
        if not idle and not batches:
            return
        dispatched = self._dispatch(idle, batches, _slots(migration))
        if dispatched.again_in_ns is not None:
            self._wakes.append(self._view.now_ns + dispatched.again_in_ns)
        if dispatched.prompts and not self._waits(dispatched, idle, batches):
            yield from self._moves([migration] if migration else [])
            yield from self._plans(dispatched, idle)

    def _bypassed(self) -> Iterator[Bypassed]:
        """Those before whom younger ones have started in this round."""
        youngest = max(self._started, default=-1)
        for it in self._pending():
            if it.id > youngest:
                break
            yield Bypassed(request_id=it.id)

    def _reuse_prefixes(
        self, idle: Many[Elastic], batches: Many[DecodeGroup]
    ) -> Iterator[StartPlan]:
        """Prompts most of which was kept, each where that lies. They pass others as often as any
        may (App. A)."""
        starting = PrefixReuse(self._gang, self._pair.decode.decode_ns)
        views = {it.id: it for it in islice(self._view.waiting("low"), MOST_REQUESTS)}
        busy: set[InstanceId] = set()
        for prompt in list(self._pending()):
            if not self._room():
                break
            cached = self._view.cached(views[prompt.id], self._pair.decode.id)
            holders = {kv_slice.instance for kv_slice in cached.slices} if cached else set()
            plan = None
            if cached is not None and busy.isdisjoint(holders):
                plan = starting.start(prompt, cached, idle, batches)
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
                self._started.update((it.request_id, None) for it in decision.decode)
            yield decision

    def _asking_again(self) -> Iterator[Decision]:
        future = [wake for wake in self._wakes if wake > self._view.now_ns]
        if future:
            yield WakeAt(at_ns=min(future))

    # --- §5.1 ---

    def _batches(self) -> list[DecodeGroup]:
        """Those that may be preempted now."""
        ready = []
        for batch, from_ns in self._gang.batches():
            if from_ns <= self._view.now_ns:
                ready.append(batch)
            else:
                self._wakes.append(from_ns)
        return ready

    def _pending(self) -> Iterator[PendingPrompt]:
        """Of the oldest one's class: requests of several cannot share a step."""
        cls = None
        for it in islice(self._view.waiting("low"), MOST_REQUESTS):
            fits = it.prompt_tokens + it.output_tokens <= self._pair.max_positions
            if fits and it.id not in self._started and cls in (None, it.cls):
                cls = it.cls
                yield _prompt(it, self._view.now_ns)

    def _dispatch(self, idle: Many[Elastic], batches: Many[DecodeGroup], moving: int) -> Dispatched:
        """What moves has so many slots twice until it is there."""
        available = len(idle) + sum(len(batch.instances) for batch in batches)
        room = self._max_batch - self._pair.decode.mastered
        dispatcher = Dispatcher(
            self._model,
            future_slots=self.unused - moving,
            average_decode_ns=self._pair.decode.decode_ns,
            most=max(0, min(most_requests(available), room)),
            max_num_ooe=self._options.max_num_ooe,
        )
        return dispatcher.dispatch(self._pending(), idle, batches)

    def _emptied(self) -> tuple[tuple[Elastic, ...], Migration | None]:
        """Where all instances decode: one whose KV goes to the others, if that pays."""
        if not self._options.migrate:
            return (), None
        freed = self._regrouping.free(
            self._gang.movable,
            self._gang.groups,
            startable=lambda it: self._dispatch([it], [], it.used).prompts,
            alone_ns=lambda it: self._model.ns([it.tokens], 1),
        )
        return ((freed.instance,), freed.migration) if freed else ((), None)

    # --- §4, §5.4: what decodes already ---

    def _regrouped(self, batches: Many[DecodeGroup]) -> Iterator[MovePlan]:
        """Groups that do better on fewer instances, and those that have too few masters."""
        movable = {it.id for it in self._gang.movable}
        for batch in batches:
            rows = self._gang.sequences_of(batch)
            if any(instance.id in self._taken for instance in batch.instances):
                continue
            if any(row.id in self._moved for row in rows):
                continue
            now = self._gang.elastic([instance.id for instance in batch.instances])
            migration = self._regrouping.shrink(batch._replace(instances=now), movable)
            if migration is not None:
                yield from self._moves([migration])
            elif len(rows) > self._gang.most_sequences:
                yield from self._masters(batch, rows)

    def _masters(self, batch: DecodeGroup, rows: Many[Sequence]) -> Iterator[MovePlan]:
        """More of them, or others."""
        gang, of_master = self._gang, dict[InstanceId, list[Sequence]]()
        for row in rows:
            of_master.setdefault(row.master_id, []).append(row)
        own = [instance.id for instance in batch.instances]
        idle = [it.id for it in gang.idle if it.id not in self._taken]
        mastered = {it: len(found) for it, found in of_master.items()}
        wanted = levelled(mastered, [*own, *idle], gang.most_sequences)
        takers = [it for it in wanted for _ in range(wanted[it] - mastered.get(it, 0))]
        self._taken.update((it, None) for it in wanted if it not in own)
        for master, found in of_master.items():
            movable = [it for it in reversed(found) if not any(one.source for one in it.slices)]
            for row in movable[: max(0, len(found) - wanted.get(master, 0))]:
                self._moved[row.id] = None
                seen = row.answer_span[0] + gang.generated_tokens(row)
                yield hand_over(row, takers.pop(), seen, gang.unused)

    # --- App. A ---

    def _waits(
        self, dispatched: Dispatched, idle: Many[Elastic], batches: Many[DecodeGroup]
    ) -> bool:
        """Whether all instances soon are better than some now. What was waited already counts, so
        that nobody waits for longer than that can gain."""
        most_ns = round(self._options.max_delay_s * 1e9)
        if dispatched.preempted or not batches or not most_ns:
            return False
        decoding = [request for batch in batches for request in batch.requests]
        wait = wait_ns(decoding, self._pair.decode.decode_ns)
        oldest = dispatched.prompts[0].id
        since_ns = next(it.waiting_since_ns for it in self._view.waiting("low") if it.id == oldest)
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
        prompts = list(dispatched.prompts)
        decoding = [it for batch in dispatched.preempted for it in batch.instances]
        known = {it.id for it in (*idle, *decoding)}  # one that is emptied counts as idle
        others = [it for it in self._gang.movable if it.id not in known]
        room = self.unused - sum(prompt.future for prompt in prompts)
        given = partial(allocate, prompts, idle, decoding, self._model, others=others)
        allocation = given(move_ns=self._gang.move_ns)
        if allocation is not None and sum(map(_slots, allocation.migrations)) > room:
            allocation = given(move_ns=lambda _: None)
        if allocation is None:
            return
        yield from self._moves(allocation.migrations)
        whole = _whole_groups(allocation.instances, dispatched.preempted)
        chosen = self._gang.elastic([it.id for it in whole])
        instances = sorted(chosen, key=lambda it: (-it.unused, it.order))[:MOST_INSTANCES]
        prompts.sort(key=lambda it: (-it.tokens, it.id))
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
            (prompts[it.first : it.stop], _filled(prompts[it.first], instances[it.begin : it.end]))
            for it in batching.batches
        ]
        yield from self._start(batches)
        slowest_ns = max(
            self._model.ns([request.tokens for request in requests], len(group))
            for requests, group in batches
        )
        yield from self._greedy(instances[batching.batches[-1].end :], slowest_ns)

    def _moves(self, migrations: Many[Migration]) -> Iterator[MovePlan]:
        movable = {it.id for it in self._gang.movable}
        for migration in migrations:
            if migration.source not in movable:
                continue  # what is here stays, and stands still
            found = list(moves(migration, self._gang.sequences))
            if any(it.sequence_id in self._moved for it in found):
                continue  # the same, because it lies on two of them
            self._moved.update((it.sequence_id, None) for it in found)
            for target, tokens in migration.targets:
                self._gang.unused[target] -= tokens
            yield from found

    def _greedy(self, left: Many[Elastic], slowest_ns: float) -> Iterator[StartPlan]:
        """Fill instances that no batch wants (App. A): with the oldest that end in time."""
        for instance in left:
            room, slots = self._room(), self._gang.unused[instance.id]
            fitting: list[PendingPrompt] = []
            for prompt in self._pending():
                more = [*fitting, prompt]
                if (
                    len(more) <= room
                    and sum(it.future for it in more) <= slots
                    and self._model.ns([it.tokens for it in more], 1) <= slowest_ns
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
        gang = self._gang
        kept = place_kv(
            [
                (requests, gang.elastic([instance.id for instance in group]))
                for requests, group in batches
            ],
            gang.all,
            gang.mastered,
            most_rows=gang.most_sequences,
        )
        for (requests, group), places in zip(batches, kept, strict=True):
            for where in places:
                self._take(where)
            lengths = [request.tokens for request in requests]
            predicted_ns = round(self._model.ns(lengths, len(group)))
            self._started.update((request.id, None) for request in requests)
            yield self._noted(start(requests, group, places, predicted_ns))

    def _noted(self, plan: StartPlan) -> StartPlan:
        for step in plan.steps:
            self._taken.update((instance, None) for instance in step.group)
        for it in plan.decode:
            self._taken[it.master] = None
            self._taken.update((share.instance, None) for share in (*it.slices, *it.answer))
        return plan

    def _take(self, kept: KvPlacement) -> None:
        for instance, tokens in (*kept.prompt, *kept.answer):
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
    """Every member computes a token of the longest prompt at least."""
    return group[: longest.tokens]


def _whole_groups(chosen: Many[Elastic], preempted: Many[DecodeGroup]) -> list[Elastic]:
    """With one instance of a group preempted, all of it stands still, and may as well prefill."""
    found: dict[InstanceId, Elastic] = {it.id: it for it in chosen}
    for batch in preempted:
        if any(instance.id in found for instance in batch.instances):
            found.update((instance.id, instance) for instance in batch.instances)
    return list(found.values())
