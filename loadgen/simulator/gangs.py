"""The living gangs of a simulated cluster, and the routing of commands to them."""

from __future__ import annotations

from functools import partial

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.decode_batch import IterationLog
from csps.loadgen.simulator.decode_gang import DecodeGang
from csps.loadgen.simulator.kv_slots import Slots
from csps.loadgen.simulator.prefill_gang import Order, PrefillGang
from csps.loadgen.simulator.requests import GangListener, SimulatedSequence
from csps.loadgen.simulator.step_order import StepOrder
from csps.loadgen.simulator.timeline import EventTimeline, SimulatedNetwork
from csps.protocols.gang.members import GangRole
from csps.protocols.gang.messages import EvictKv
from csps.protocols.gang.step_messages import PrefillStep
from csps.services.scheduling.events.commands import (
    Cancel,
    Reserve,
    RunStep,
    SetGroup,
    ToGang,
)
from csps.services.scheduling.events.events import (
    GangDown,
    GangId,
    GangUp,
    InstanceId,
    InstanceUp,
    LinkUp,
    RequestId,
    SequenceId,
    StepDone,
    StepId,
    gang_of,
    instance_id,
)

GENERATION = 1
"""Generation of the simulation's only router."""
RESET_NS = 1_000_000_000
"""Time from disconnecting a gang until it is attached again."""


class SimulatedGangs:
    """A prefill and a decode gang, or one elastic gang that does both in its sequencer's order.

    Args:
        timeline: the simulated time.
        cluster: the model of the gangs.
        listener: receives what happens.
    """

    def __init__(
        self, timeline: EventTimeline, cluster: ClusterModel, listener: GangListener
    ) -> None:
        self._timeline, self._cluster, self._listener = timeline, cluster, listener
        self._network = SimulatedNetwork(timeline, cluster)
        self._gangs = 0
        self._ids: dict[GangRole, GangId] = {}
        """Ids of the living gangs, by role."""
        self._prefill: PrefillGang | None = None
        self._decode: DecodeGang | None = None
        self.logs: list[IterationLog] = []
        """Iteration logs of all decode gangs so far."""

    @property
    def busy(self) -> bool:
        """Return whether any step, sequence or move is under way."""
        return bool(self.steps) or (self._decode is not None and self._decode.busy)

    @property
    def steps(self) -> tuple[StepId, ...]:
        """Return the steps of the gang that prefills, as far as they are not done."""
        return () if self._prefill is None else self._prefill.steps

    @property
    def instances(self) -> tuple[InstanceId, ...]:
        """Return the instances of all living gangs."""
        return tuple(
            instance_id(gang, index)
            for role, gang in self._ids.items()
            for index in range(len(self._cluster.gang(role).instances))
        )

    def check_idle(self) -> None:
        """Assert that every slot is free again and nothing is under way."""
        assert not self.busy, "work is still under way"
        decode = None if self._decode is None else self._decode.sequences
        pools = [gang for gang in (self._prefill, decode) if gang is not None]
        for pool in pools:
            pool.slots.check_integrity()
        if self._prefill is not None:
            self._prefill.receiving_slots.check_idle()
        cached = sum(pool.prefix_cache.tokens for pool in pools)
        used = sum(slots.used for slots in {id(pool.slots): pool.slots for pool in pools}.values())
        assert used == cached, f"{used - cached} slots were not freed"

    def up(self, role: GangRole) -> None:
        """Attach a gang."""
        assert role not in self._ids, f"a {role} gang is attached already"
        self._gangs += 1
        gang = self._ids[role] = self._gangs
        model = self._cluster.gang(role)
        if role == "prefill":
            order = StepOrder(self._timeline, len(model.instances), self._cluster.quantum_ns)
            self._prefill = self._new_prefill(gang, order, Slots(model.kv_slots))
        else:
            decode = DecodeGang(gang, self._timeline, self._cluster, self._listener)
            self._decode = decode
            self.logs.append(decode.log)
            if decode.ranks is not None:
                self._prefill = self._new_prefill(gang, decode.ranks, decode.sequences.slots)
        self._listener.post_event(
            GangUp(
                gang=gang,
                generation=GENERATION,
                may_prefill=role != "decode",
                may_decode=role != "prefill",
                tp=model.tp,
                instances=tuple(
                    InstanceUp(location=instance.location, kv_slots=instance.kv_slots)
                    for instance in model.instances
                ),
                max_positions=self._cluster.max_positions,
                kv_bytes_per_token=self._cluster.kv_bytes_per_token,
            )
        )
        if len(self._ids) == 2:
            self._listener.post_event(
                LinkUp(prefill=self._ids["prefill"], decode=self._ids["decode"])
            )

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
            listener=_PrefillNotifications(self, gang, self._listener),
        )

    def down(self, role: GangRole, reason: str = "killed") -> None:
        """Remove a gang with everything on it."""
        gang = self._ids.pop(role)
        if role != "decode":
            self._prefill = None
        if role != "prefill" and self._decode is not None:
            self._decode.die()
            self._decode = None
        self._listener.post_event(GangDown(gang=gang, reason=reason))

    def reset(self, gang: GangId, reason: str) -> None:
        """Disconnect a gang and attach it again later."""
        for role, living in list(self._ids.items()):
            if living == gang:
                self.down(role, reason)
                self._timeline.at(self._timeline.now_ns + RESET_NS, partial(self.up, role))

    def prefilling(self, gang: GangId) -> PrefillGang | None:
        """Return the living prefill gang if it has this id."""
        living = self._ids.get("elastic", self._ids.get("prefill"))
        return self._prefill if living == gang else None

    def decoding(self, gang: GangId) -> DecodeGang | None:
        """Return the living decode gang if it has this id."""
        living = self._ids.get("elastic", self._ids.get("decode"))
        return self._decode if living == gang else None

    def sequence(self, sequence_id: SequenceId) -> SimulatedSequence | None:
        """Return a sequence of the living decode gang."""
        return None if self._decode is None else self._decode.sequences.get(sequence_id)

    def reserve(self, command: Reserve, *, before: int, left: int) -> None:
        """Reserve slots where a sequence is decoded; see `DecodeSequences.reserve`."""
        if decode := self.decoding(gang_of(command.message.master)):
            decode.sequences.reserve(command, before=before, left=left)

    def not_reserved(self, command: Reserve) -> None:
        """Answer a reservation for a request that has already ended."""
        if decode := self.decoding(gang_of(command.message.master)):
            decode.sequences.not_reserved(command)

    def run_step(self, command: RunStep) -> None:
        """Queue a step."""
        step = command.step
        if prefill := self.prefilling(gang_of(step.group[0])):
            sequences = [self.sequence(chunk.sequence_id) for chunk in step.chunks]
            slices = {
                sequence.sequence: sequence.slices for sequence in sequences if sequence is not None
            }
            prefill.run(step, slices)

    def join(self, command: SetGroup) -> None:
        """Decode sequences from the next iteration on."""
        if decode := self.decoding(command.gang):
            decode.join(command)

    def receive(self, command: ToGang) -> None:
        """Hand a message to its gang."""
        message, decode = command.message, self.decoding(command.gang)
        if isinstance(message, EvictKv) and decode is None:
            if prefill := self.prefilling(command.gang):
                for event in prefill.prefix_cache.apply(command.gang, message):
                    self._listener.post_rank_event(event)
        elif decode is not None:
            decode.receive(message)

    def cancel(self, command: Cancel) -> None:
        """Stop computing for a sequence and free its slots."""
        self.end_sequence(command.sequence_id)
        for gang in command.gangs:
            if prefill := self.prefilling(gang):
                prefill.cancel(command.sequence_id)
            if decode := self.decoding(gang):
                decode.cancel(command.sequence_id)

    def end_sequence(self, sequence_id: SequenceId) -> None:
        """Mark a sequence as no longer serving its request."""
        if self._decode is not None:
            self._decode.sequences.end_sequence(sequence_id)

    def end_request(self, request: RequestId) -> None:
        """Mark all sequences of a request as over."""
        if self._decode is not None:
            self._decode.sequences.end_request(request)


class _PrefillNotifications:
    """Forwards what a prefill gang reports, as long as that gang lives."""

    def __init__(self, gangs: SimulatedGangs, gang: GangId, listener: GangListener) -> None:
        self._gangs, self._gang, self._listener = gangs, gang, listener

    @property
    def _prefill(self) -> PrefillGang | None:
        return self._gangs.prefilling(self._gang)

    def started(self, step: PrefillStep) -> None:
        if self._prefill is not None:
            for chunk in step.chunks:
                if (sequence := self._gangs.sequence(chunk.sequence_id)) is not None:
                    self._listener.started(sequence.request)

    def computed(self, step: PrefillStep) -> None:
        if self._prefill is None:
            return
        for chunk in step.chunks:
            sequence = self._gangs.sequence(chunk.sequence_id)
            if sequence is None or sequence.over:
                continue
            if chunk.start + chunk.length == sequence.prompt_tokens:
                self._listener.prefilled(sequence.sequence, sequence.request)

    def arrived(self, sequence: SequenceId, instance: InstanceId, tokens: int) -> None:
        prefill, decode = self._prefill, self._gangs.decoding(gang_of(instance))
        if prefill is None:
            return
        sequences = None if decode is None else decode.sequences
        if sequences is None or sequences.get(sequence) is None:
            prefill.receiving_slots.release(sequence, instance)
        elif sequences.arrived(sequence, instance, tokens):
            prefill.receiving_slots.release(sequence, instance)
            sequences.received(sequence, instance)

    def step_done(self, step: StepId, instance: InstanceId, took_ns: int) -> None:
        if self._prefill is not None:
            self._listener.post_rank_event(
                StepDone(step_id=step, instance=instance, took_ns=took_ns)
            )
