"""The gangs of a simulated cluster: which live, and which of them a command is for."""

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
from csps.services.scheduling.events.commands import (
    Cancel,
    Evict,
    MoveKv,
    Piggyback,
    Reserve,
    Retain,
    RunStep,
    SetGroup,
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
"""Of the one router that a simulation has."""
RESET_NS = 1_000_000_000
"""From hanging up on a gang until it is attached again."""


class SimulatedGangs:
    """A prefill and a decode gang, or an elastic one whose ranks do both in the order of its
    conductor, dead or alive.

    Args:
        timeline: the simulated time.
        cluster: what they are made of.
        listener: is told what happens.
    """

    def __init__(
        self, timeline: EventTimeline, cluster: ClusterModel, listener: GangListener
    ) -> None:
        self._timeline, self._cluster, self._listener = timeline, cluster, listener
        self._network = SimulatedNetwork(timeline, cluster)
        self._gangs = 0
        self._ids: dict[GangRole, GangId] = {}
        """Of the living gangs, by role."""
        self._prefill: PrefillGang | None = None
        self._decode: DecodeGang | None = None
        self.logs: list[IterationLog] = []
        """Of all decode gangs that there were."""

    @property
    def busy(self) -> bool:
        """Something is under way or held."""
        computing = self._prefill is not None and self._prefill.steps > 0
        return computing or (self._decode is not None and self._decode.busy)

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
        decode = None if self._decode is None else self._decode.sequences
        pools = [it for it in (self._prefill, decode) if it is not None]
        for pool in pools:
            pool.slots.check_integrity()
        if self._prefill is not None:
            self._prefill.receiving_slots.check_idle()
        cached = sum(pool.prefix_cache.tokens for pool in pools)
        used = sum(it.used for it in {id(pool.slots): pool.slots for pool in pools}.values())
        assert used == cached, f"{used - cached} slots have not come back"

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
        """A gang is gone with all that it held."""
        gang = self._ids.pop(role)
        if role != "decode":
            self._prefill = None
        if role != "prefill" and self._decode is not None:
            self._decode.die()
            self._decode = None
        self._listener.post_event(GangDown(gang=gang, reason=reason))

    def reset(self, gang: GangId, reason: str) -> None:
        """Hang up on a gang and attach to it again."""
        for role, living in list(self._ids.items()):
            if living == gang:
                self.down(role, reason)
                self._timeline.at(self._timeline.now_ns + RESET_NS, partial(self.up, role))

    def prefilling(self, gang: GangId) -> PrefillGang | None:
        """The living gang that prefills, if it is this one."""
        living = self._ids.get("elastic", self._ids.get("prefill"))
        return self._prefill if living == gang else None

    def decoding(self, gang: GangId) -> DecodeGang | None:
        """The living gang that decodes, if it is this one."""
        living = self._ids.get("elastic", self._ids.get("decode"))
        return self._decode if living == gang else None

    def sequence(self, sequence_id: SequenceId) -> SimulatedSequence | None:
        """One that the living gang decodes, or is to decode."""
        return None if self._decode is None else self._decode.sequences.get(sequence_id)

    # --- commands ------------------------------------------------------------------------------

    def reserve(self, command: Reserve, *, before: int, left: int) -> None:
        """Set slots aside where a sequence is decoded; see `DecodeSequences.reserve`."""
        if decode := self.decoding(gang_of(command.master)):
            decode.sequences.reserve(command, before=before, left=left)

    def not_reserved(self, command: Reserve) -> None:
        """Nobody waits for the request any more, of which the scheduler had not heard."""
        if decode := self.decoding(gang_of(command.master)):
            decode.sequences.not_reserved(command)

    def run_step(self, command: RunStep) -> None:
        """Put a step in line."""
        if prefill := self.prefilling(gang_of(command.group[0])):
            wanted = [self.sequence(chunk.sequence_id) for chunk in command.chunks]
            slices = {it.sequence: it.slices for it in wanted if it is not None}
            prefill.run(command, slices)

    def join(self, command: SetGroup) -> None:
        """Decode these from the next iteration on."""
        if decode := self.decoding(command.gang):
            decode.join(command)

    def piggyback(self, command: Piggyback) -> None:
        """Compute the prompt of a sequence in the iterations to come."""
        if decode := self.decoding(command.gang):
            decode.piggyback(command)

    def move(self, command: MoveKv) -> None:
        """Move KV of a sequence, and go on there."""
        if decode := self.decoding(command.gang):
            decode.move(command)

    def cancel(self, command: Cancel) -> None:
        """Stop working for a sequence and free what it holds."""
        self.end_sequence(command.sequence_id)
        for gang in command.gangs:
            if prefill := self.prefilling(gang):
                prefill.cancel(command.sequence_id)
            if decode := self.decoding(gang):
                decode.cancel(command.sequence_id)

    def keep(self, command: Retain) -> None:
        """End a sequence where it is decoded, and keep some of its KV."""
        if decode := self.decoding(command.gang):
            decode.keep(command)

    def release(self, command: Evict) -> None:
        """Free some of what was kept."""
        if decode := self.decoding(command.gang):
            decode.sequences.release(command)
        elif prefill := self.prefilling(command.gang):
            for event in prefill.prefix_cache.apply(command):
                self._listener.post_rank_event(event)

    def end_sequence(self, sequence_id: SequenceId) -> None:
        """A sequence serves its request no more."""
        if self._decode is not None:
            self._decode.sequences.end_sequence(sequence_id)

    def end_request(self, request: RequestId) -> None:
        """The client is gone: nothing is drawn for it any more."""
        if self._decode is not None:
            self._decode.sequences.end_request(request)


class _PrefillNotifications:
    """What one incarnation of the gang that prefills tells, as long as it lives."""

    def __init__(self, gangs: SimulatedGangs, gang: GangId, listener: GangListener) -> None:
        self._gangs, self._gang, self._listener = gangs, gang, listener

    @property
    def _prefill(self) -> PrefillGang | None:
        return self._gangs.prefilling(self._gang)

    def started(self, step: RunStep) -> None:
        if self._prefill is not None:
            for chunk in step.chunks:
                if (sequence := self._gangs.sequence(chunk.sequence_id)) is not None:
                    self._listener.started(sequence.request)

    def computed(self, step: RunStep) -> None:
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
