"""The gangs, the sequences that they work on and the links between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Protocol

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.conducted_ranks import ConductedRanks
from csps.loadgen.simulator.decode_batch import DecodeBatch, IterationLog, Row
from csps.loadgen.simulator.kept_kv import KeptKv
from csps.loadgen.simulator.network import Network
from csps.loadgen.simulator.prefill_gang import Order, PrefillGang
from csps.loadgen.simulator.requests import IterationEnds, Sequence
from csps.loadgen.simulator.slots import Slots
from csps.loadgen.simulator.step_order import StepOrder, Task
from csps.loadgen.simulator.timeline import Timeline
from csps.protocols.gang_members import GangRole
from csps.protocols.span import Span
from csps.services.scheduling.commands import (
    Cancel,
    Keep,
    MoveKv,
    Release,
    Reserve,
    Ride,
    RunStep,
    SetGroup,
    Share,
)
from csps.services.scheduling.events import (
    AnyEvent,
    Freed,
    GangDown,
    GangUp,
    InstanceUp,
    Kept,
    Landed,
    LinkUp,
    Moved,
    Progress,
    StepDone,
)
from csps.services.scheduling.ids import (
    GangId,
    InstanceId,
    RequestId,
    SequenceId,
    StepId,
    gang_of,
    index_of,
    instance_id,
)
from csps.services.scheduling.sequences import decode_slots
from csps.services.scheduling.shares import own, tokens_on, within

GENERATION = 1
"""Of the one router that a simulation has."""
RESET_NS = 1_000_000_000
"""From hanging up on a gang until it is attached again."""


class GangListener(Protocol):
    """The kernel, as the gangs see it."""

    def tell(self, event: AnyEvent) -> None:
        """An event for the scheduler, now."""

    def tell_later(self, event: AnyEvent) -> None:
        """An event on a rank, of which the scheduler hears when a message has arrived."""

    def started(self, request: RequestId) -> None:
        """A step of the request has begun."""

    def prefilled(self, sequence: SequenceId, request: RequestId) -> None:
        """The first token of a sequence was drawn."""

    def decoded(self, request: RequestId, ends: IterationEnds) -> None:
        """The request has drawn a token at the end of each of these iterations."""

    def finished(self, sequence: SequenceId, request: RequestId) -> None:
        """The last token was drawn."""


class SimulatedGangs:
    """A prefill and a decode gang, or an elastic one whose ranks do both in the order of its
    conductor, dead or alive.

    Args:
        timeline: the simulated time.
        cluster: what they are made of.
        listener: is told what happens.
    """

    def __init__(self, timeline: Timeline, cluster: ClusterModel, listener: GangListener) -> None:
        self._timeline, self._cluster, self._listener = timeline, cluster, listener
        self._network = Network(timeline, cluster)
        self._gangs = 0
        self._ids: dict[GangRole, GangId] = {}
        """Of the living gangs, by role."""
        self._prefill: PrefillGang | None = None
        self._batch: DecodeBatch | ConductedRanks | None = None
        self._decode_slots = Slots(())
        self._decode_kept = KeptKv(self._decode_slots)
        self._sequences: dict[SequenceId, Sequence] = {}
        self._moving: dict[SequenceId, None] = {}
        """Those whose KV is on its way to other instances."""
        self.logs: list[IterationLog] = []
        """Of all decode gangs that there were."""

    @property
    def busy(self) -> bool:
        """Something is under way or held."""
        computing = self._prefill is not None and self._prefill.steps > 0
        return computing or bool(self._sequences) or bool(self._moving)

    @property
    def instances(self) -> tuple[InstanceId, ...]:
        """Of all living gangs."""
        return tuple(
            instance_id(gang, index)
            for role, gang in self._ids.items()
            for index in range(len(self._cluster.gang(role).instances))
        )

    def check_idle(self) -> None:
        """Assert that every slot has come back and nothing is on the way."""
        assert not self.busy, "something is still under way"
        for slots in self._slots().values():
            slots.check_integrity()
        if self._prefill is not None:
            self._prefill.receiving.check_idle()
        kept = sum(it.tokens for it in self._kept())
        used = sum(it.used for it in {id(it): it for it in self._slots().values()}.values())
        assert used == kept, f"{used - kept} slots have not come back"

    def _kept(self) -> Iterator[KeptKv]:
        if self._prefill is not None:
            yield self._prefill.kept
        yield self._decode_kept

    def _slots(self) -> Mapping[str, Slots]:
        decode = {"decode": self._decode_slots}
        return decode if self._prefill is None else {"prefill": self._prefill.slots, **decode}

    @property
    def _prefilling(self) -> GangId | None:
        """The living gang that prefills."""
        return self._ids.get("elastic", self._ids.get("prefill"))

    @property
    def _decoding(self) -> GangId | None:
        """The living gang that decodes."""
        return self._ids.get("elastic", self._ids.get("decode"))

    # --- coming and going ----------------------------------------------------------------------

    def up(self, role: GangRole) -> None:
        """A gang was attached."""
        assert role not in self._ids, f"there is a {role} gang already"
        self._gangs += 1
        gang = self._ids[role] = self._gangs
        model = self._cluster.gang(role)
        if role == "prefill":
            order = StepOrder(self._timeline, len(model.instances), self._cluster.quantum_ns)
            self._prefill = self._new_prefill(gang, order, Slots(model.kv_slots))
        else:
            self._decode_slots = Slots(model.kv_slots)
            self._decode_kept = KeptKv(self._decode_slots)
            self._batch = self._new_batch(gang)
            self.logs.append(self._batch.log)
        if isinstance(self._batch, ConductedRanks):
            self._prefill = self._new_prefill(gang, self._batch, self._decode_slots)
        self._listener.tell(
            GangUp(
                gang=gang,
                generation=GENERATION,
                may_prefill=role != "decode",
                may_decode=role != "prefill",
                tp=model.tp,
                instances=tuple(
                    InstanceUp(location=it.location, kv_slots=it.kv_slots) for it in model.instances
                ),
                max_positions=self._cluster.max_positions,
            )
        )
        if len(self._ids) == 2:
            self._listener.tell(LinkUp(prefill=self._ids["prefill"], decode=self._ids["decode"]))

    def down(self, role: GangRole, reason: str = "killed") -> None:
        """A gang is gone with all that it held."""
        gang = self._ids.pop(role)
        if role != "decode":
            self._prefill = None
        if role != "prefill":
            self._report_progress()
            self._batch = None
            self._sequences.clear()
            self._moving.clear()
        self._listener.tell(GangDown(gang=gang, reason=reason))

    def reset(self, gang: GangId, reason: str) -> None:
        """Hang up on a gang and attach to it again."""
        for role, living in list(self._ids.items()):
            if living == gang:
                self.down(role, reason)
                self._timeline.at(self._timeline.now_ns + RESET_NS, partial(self.up, role))

    def _report_progress(self) -> None:
        """Answers go on with the next token when their gang has died."""
        drawn = []
        for sequence in self._sequences.values():
            if not sequence.over and sequence.row is not None and self._batch is not None:
                if sequence.row.prefills:
                    continue
                tokens = self._batch.drawn_by(sequence.row)
                self._listener.decoded(sequence.request, self._ends(sequence.row, tokens))
                drawn.append((sequence.sequence, sequence.before + 1 + tokens))
        if drawn:
            self._listener.tell(Progress(drawn=tuple(drawn)))

    def _ends(self, row: Row, tokens: int) -> IterationEnds:
        assert self._batch is not None
        return IterationEnds(*self._batch.ends_of(row, tokens))

    def _new_prefill(self, gang: GangId, order: Order, slots: Slots) -> PrefillGang:
        cluster = self._cluster
        return PrefillGang(
            order=order,
            slots=slots,
            work_ns=cluster.step_ns,
            route=self._network.route,
            kv_bytes_per_token=cluster.kv_bytes_per_token,
            layers=cluster.layers,
            in_place=cluster.in_place,
            receiving_backends=cluster.receiving_backends,
            listener=_OfGang(self, gang),
        )

    def _new_batch(self, gang: GangId) -> DecodeBatch | ConductedRanks:
        cluster = self._cluster
        if cluster.roles == ("elastic",):
            return ConductedRanks(
                self._timeline,
                len(cluster.decode.instances),
                hybrid=cluster.hybrid_of,
                quantum_ns=cluster.quantum_ns,
                gap_ns=cluster.iteration_gap_ns,
                finished=partial(self._finished, gang),
                started=self._rider_started,
                prefilled=partial(self._rider_prefilled, gang),
            )
        return DecodeBatch(
            self._timeline,
            cluster.table.iteration(len(cluster.decode.instances), cluster.decode.tp),
            gap_ns=cluster.iteration_gap_ns,
            finished=partial(self._finished, gang),
            hybrid=lambda: cluster.hybrid,
            started=self._rider_started,
            prefilled=partial(self._rider_prefilled, gang),
        )

    def alive(self, gang: GangId) -> bool:
        """The gang has not died."""
        return gang in self._ids.values()

    # --- commands ------------------------------------------------------------------------------

    def reserve(self, command: Reserve, *, before: int, left: int) -> None:
        """Set slots aside on the decode gang.

        Args:
            command: the scheduler's.
            before: tokens that earlier sequences have drawn.
            left: tokens that the request still draws; the scheduler does not know.
        """
        if not self.alive(gang_of(command.master)):
            return
        sequence = Sequence(
            sequence=command.sequence,
            request=command.request,
            prompt_tokens=command.prompt_tokens,
            shares=command.shares,
            master=command.master,
            answer=command.answer,
            before=before,
            tokens=left,
            cached=command.cached,
            stays=command.stays,
        )
        sequence.missing = {} if command.rides else sequence.slots
        assert self._decode_kept.has(command.shares), "reuses what is not kept"
        slots = decode_slots(command, command.output_tokens)
        if slots:
            self._decode_slots.take(command.sequence, {index_of(it): n for it, n in slots.items()})
        self._sequences[command.sequence] = sequence

    def not_reserved(self, command: Reserve) -> None:
        """Nobody waits for the request any more, of which the scheduler had not heard."""
        if self.alive(gang := gang_of(command.master)):
            named = map(index_of, decode_slots(command, command.output_tokens))
            self._tell_freed(gang, command.sequence, named)

    def run_step(self, command: RunStep) -> None:
        """Put a step in line."""
        if self._prefill is None or not self.alive(gang_of(command.group[0])):
            return
        wanted = [self._sequences.get(piece.sequence) for piece in command.pieces]
        shares = {it.sequence: it.shares for it in wanted if it is not None}
        self._prefill.run(command, shares)

    def join(self, command: SetGroup) -> None:
        """Decode these from the next iteration on."""
        if self._batch is None or not self.alive(command.gang):
            return
        for number in command.joined:
            sequence = self._sequences[number]
            if sequence.over:
                continue
            assert not sequence.missing, f"sequence {number} joins before its KV has landed"
            row = Row(
                sequence=number,
                context=sequence.prompt_tokens + 1,
                tokens=sequence.tokens - 1,
                master=index_of(sequence.master),
                ranks=sequence.instances if self._cluster.in_place else (),
            )
            sequence.row = row
            self._batch.join(row)

    def ride(self, command: Ride) -> None:
        """Compute the prompt of a sequence in the iterations to come."""
        if self._batch is None or not self.alive(command.gang):
            return
        sequence = self._sequences[command.sequence]
        if sequence.over:
            return
        sequence.row = Row(
            sequence=command.sequence,
            context=sequence.prompt_tokens + 1,
            tokens=sequence.tokens - 1,
            prompt=sequence.prompt_tokens,
            computed=sequence.cached,
            first=sequence.cached,
            master=index_of(sequence.master),
        )
        self._batch.ride(sequence.row, command.budget)

    def move(self, command: MoveKv) -> None:
        """Move KV of a sequence, inside of whatever its instances compute; then go on there."""
        sequence = self._sequences.get(command.sequence)
        batch = self._batch
        if not isinstance(batch, ConductedRanks) or not self.alive(command.gang):
            return
        if sequence is None or sequence.row is None:  # over, of which the scheduler had not heard
            self._not_moved(command)
            return
        held = self._decode_slots.counts(command.sequence)
        there = {index_of(it): n for it, n in decode_slots(command, 0).items()}
        coming = {it: n - held.get(it, 0) for it, n in there.items() if n > held.get(it, 0)}
        key = ("move", command.sequence)
        self._moving[command.sequence] = None
        self._decode_slots.hold(key, coming)
        drawn = Span(0, sequence.prompt_tokens + batch.drawn_by(sequence.row))
        now = tokens_on(within((*sequence.shares, *sequence.answer), drawn))
        then = tokens_on(within((*command.shares, *command.answer), drawn))
        tokens = sum(max(0, n - now.get(it, 0)) for it, n in then.items())
        named = {command.master, *(it.instance for it in (*command.shares, *command.answer))}
        places = tuple(sorted(map(index_of, named)))
        gang = command.gang
        task = Task(
            members=tuple(sorted({*sequence.instances, *places})),
            work_ns=max(1, self._cluster.move_ns(tokens)),
            urgent=True,
            started=lambda: None,
            ended=lambda: self._moved(gang, sequence, command, task),
            sequences=(command.sequence,),
            places=places,
        )
        batch.submit(task)

    def _moved(self, gang: GangId, sequence: Sequence, command: MoveKv, task: Task) -> None:
        if not self.alive(gang):
            return
        key = ("move", command.sequence)
        del self._moving[command.sequence]
        for index in self._decode_slots.held_by(key):
            self._decode_slots.give_back(key, index)
        if task.done_ns < task.work_ns or self._sequences.get(command.sequence) is not sequence:
            self._not_moved(command)
            return
        there = {index_of(it): n for it, n in decode_slots(command, 0).items()}
        left = [it for it in self._decode_slots.held_by(command.sequence) if it not in there]
        self._decode_slots.change(command.sequence, there)
        sequence.shares, sequence.answer = command.shares, command.answer
        sequence.master = command.master
        assert sequence.row is not None, "moved, and no row"
        sequence.row.master = index_of(command.master)
        if sequence.over:
            self._tell_freed(gang, command.sequence, left)
        else:
            self._listener.tell_later(Moved(sequence=command.sequence))

    def _not_moved(self, command: MoveKv) -> None:
        """Those that hold nothing of the sequence have nothing to free."""
        held = self._decode_slots.held_by(command.sequence)
        named = map(index_of, decode_slots(command, 0))
        self._tell_freed(command.gang, command.sequence, [it for it in named if it not in held])

    def _tell_freed(self, gang: GangId, number: SequenceId, indices: Iterable[int]) -> None:
        for index in indices:
            self._listener.tell_later(Freed(sequence=number, instance=instance_id(gang, index)))

    def cancel(self, command: Cancel) -> None:
        """Stop working for a sequence and free what it holds."""
        self.give_up(command.sequence)
        for gang in command.gangs:
            if self._prefill is not None and gang == self._prefilling:
                self._prefill.cancel(command.sequence)
            if self._batch is not None and gang == self._decoding:
                self._batch.leave(command.sequence, partial(self._free, gang, command.sequence))

    def keep(self, command: Keep) -> None:
        """End a sequence where it is decoded, and keep some of its KV."""
        self.give_up(command.sequence)
        if self._batch is not None and self.alive(command.gang):
            self._batch.leave(command.sequence, partial(self._keep, command))

    def _keep(self, command: Keep) -> None:
        sequence = self._sequences.pop(command.sequence, None)
        if sequence is None or not self.alive(command.gang):
            return
        for index in self._decode_slots.held_by(command.sequence):
            self._decode_slots.give_back(command.sequence, index)
        prompt = sequence.prompt_tokens
        answer = sequence.answer or (Share(sequence.master, prompt, prompt + sequence.tokens),)
        self._decode_kept.add(command.sequence, (*own(sequence.shares), *answer))
        self._left(command, self._decode_kept)
        for later in sequence.releases:
            self._left(later, self._decode_kept)

    def release(self, command: Release) -> None:
        """Free some of what was kept, or is going to be when its last iteration has ended."""
        if not self.alive(command.gang):
            return
        if command.gang != self._decoding:
            assert self._prefill is not None, "of a gang that is gone"
            self._left(command, self._prefill.kept)
        elif (sequence := self._sequences.get(command.sequence)) is not None:
            sequence.releases.append(command)
        else:
            self._left(command, self._decode_kept)

    def _left(self, command: Keep | Release, kept: KeptKv) -> None:
        left = kept.obey(command)
        role = next(role for role, gang in self._ids.items() if gang == command.gang)
        for index in range(len(self._cluster.gang(role).instances)):
            it = instance_id(command.gang, index)
            tokens = left.get(it, 0)
            self._listener.tell_later(Kept(sequence=command.sequence, instance=it, tokens=tokens))

    def give_up(self, number: SequenceId) -> None:
        """A sequence serves its request no more."""
        if (sequence := self._sequences.get(number)) is not None:
            sequence.over = True
            if not sequence.shares:  # nothing of it lies here
                del self._sequences[number]

    def end_request(self, request: RequestId) -> None:
        """The client is gone: nothing is drawn for it any more."""
        for sequence in self._sequences.values():
            if sequence.request == request:
                sequence.over = True

    # --- what happens on the ranks -------------------------------------------------------------

    def _free(self, gang: GangId, number: SequenceId) -> None:
        if self._sequences.pop(number, None) is None or not self.alive(gang):
            return
        held = self._decode_slots.held_by(number)
        for index in held:
            self._decode_slots.give_back(number, index)
        coming = self._decode_slots.held_by(("move", number))
        self._tell_freed(gang, number, [it for it in held if it not in coming])

    def _finished(self, gang: GangId, row: Row) -> None:
        sequence = self._sequences.get(row.sequence)
        if sequence is None or not self.alive(gang):
            return
        if not sequence.over:
            self._listener.decoded(sequence.request, self._ends(row, row.tokens))
            self._listener.finished(row.sequence, sequence.request)
        if not sequence.stays:
            self._free(gang, row.sequence)

    def _rider_started(self, row: Row) -> None:
        if (sequence := self._sequences.get(row.sequence)) is not None:
            self._listener.started(sequence.request)

    def _rider_prefilled(self, gang: GangId, row: Row) -> None:
        sequence = self._sequences.get(row.sequence)
        if sequence is None or not self.alive(gang):
            return
        if not sequence.over:
            self._listener.prefilled(row.sequence, sequence.request)
        if not (row.tokens or sequence.stays):
            self._free(gang, row.sequence)

    def step_started(self, step: RunStep) -> None:
        """A step has begun to compute."""
        for piece in step.pieces:
            if (sequence := self._sequences.get(piece.sequence)) is not None:
                self._listener.started(sequence.request)

    def step_computed(self, step: RunStep) -> None:
        """All of a step is computed."""
        for piece in step.pieces:
            sequence = self._sequences.get(piece.sequence)
            if sequence is None or sequence.over:
                continue
            if piece.start + piece.length == sequence.prompt_tokens:
                self._listener.prefilled(sequence.sequence, sequence.request)

    def arrived(self, number: SequenceId, instance: InstanceId, tokens: int) -> None:
        """KV has arrived at a decode instance."""
        sequence = self._sequences.get(number)
        if sequence is None or gang_of(instance) != self._decoding:
            self._release(number, instance)
            return
        sequence.missing[instance] -= tokens
        if not sequence.missing[instance]:
            self._release(number, instance)
            del sequence.missing[instance]
            if not sequence.over:
                landed = sequence.slots[instance]
                self._listener.tell_later(Landed(sequence=number, instance=instance, tokens=landed))

    def _release(self, sequence: SequenceId, instance: InstanceId) -> None:
        """No more KV of a sequence is expected at an instance."""
        if self._prefill is not None:
            self._prefill.receiving.release(sequence, instance)

    def step_done(self, step: StepId, instance: InstanceId, took_ns: int) -> None:
        """An instance is through with a step."""
        self._listener.tell_later(StepDone(step=step, instance=instance, took_ns=took_ns))


class _OfGang:
    """What one incarnation of the prefill gang tells, as long as it lives."""

    def __init__(self, gangs: SimulatedGangs, gang: GangId) -> None:
        self._gangs, self._gang = gangs, gang

    def started(self, step: RunStep) -> None:
        if self._gangs.alive(self._gang):
            self._gangs.step_started(step)

    def computed(self, step: RunStep) -> None:
        if self._gangs.alive(self._gang):
            self._gangs.step_computed(step)

    def arrived(self, sequence: SequenceId, instance: InstanceId, tokens: int) -> None:
        if self._gangs.alive(self._gang):
            self._gangs.arrived(sequence, instance, tokens)

    def step_done(self, step: StepId, instance: InstanceId, took_ns: int) -> None:
        if self._gangs.alive(self._gang):
            self._gangs.step_done(step, instance, took_ns)
