"""What the scheduler keeps: requests, sequences, steps, gangs and their instances.

These objects change while events are handled. Policies get them as the read-only protocols of
`view.py`. They have no rules of their own: who may change what is said where it is changed.

Times are integer nanoseconds, sizes tokens; one token occupies one KV slot of an instance.

What the parts of the scheduler share while a batch of events is handled.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from csps.protocols.core.errors import to_wire
from csps.protocols.core.topology import Location
from csps.services.scheduling.events.commands import (
    AnyCommand,
    Cancel,
    Evict,
    MoveKv,
    PlacedSlice,
    ResetGang,
    Retain,
    RunStep,
    SetGroup,
)
from csps.services.scheduling.events.events import (
    GangId,
    GangUp,
    InstanceId,
    InstanceUp,
    RequestId,
    SequenceId,
    StepId,
    WireError,
)
from csps.services.scheduling.events.events import instance_id as numbered_instance
from csps.services.scheduling.events.limits import PreemptionDelay, Timer
from csps.services.scheduling.state.prefix_tree import Segment

Priority = Literal["high", "low"]
"""Where a request waits. An urgent one may be computed inside a step that is not."""


class Live(msgspec.Struct):
    """Base of all of them: quicker to make than a dataclass, and hundreds are made in a round."""


class Instance(Live, kw_only=True, eq=False):
    """One copy of the weights."""

    id: InstanceId
    gang: Gang
    place: Location
    order: int
    """Rank of its place among those of the gang: neighbours are near each other (CSPS §3.2)."""
    capacity: int
    """KV slots."""
    used: int = 0
    """Slots taken or promised (`ledger.py`), those of kept KV included."""
    reclaimable: int = 0
    """Those of them whose KV was kept and is in nobody's use, or is on its way out."""
    mastered: int = 0
    """Sequences that draw here, landing ones included."""
    steps: dict[StepId, Step] = msgspec.field(default_factory=dict)
    """Outstanding ones, in the order of their launch."""
    low_priority_steps: int = 0
    """Those of them that are not urgent."""
    high_priority_ns: int = 0
    """Predicted time of those of them that are urgent."""
    preempted_ns: int = 0
    """Predicted time of urgent steps that were given to it since it has long ones."""
    preemption_delay_ns: int = 0
    """What urgent steps have cost long ones here, ever; predicted, then measured."""
    free_at_ns: int = 0
    """When the outstanding steps will have been computed, as predicted; may be in the past."""
    stepped_ns: int = 0
    """When its last step was done; when it came up, before the first."""
    last_heartbeat_ns: int = 0
    """Last sign of life."""

    @property
    def empty_slots(self) -> int:
        """Slots that nobody was promised, and that hold nothing."""
        return self.capacity - self.used

    @property
    def free_slots(self) -> int:
        """Slots that nobody was promised: kept KV goes when somebody needs its place."""
        return self.capacity - self.used + self.reclaimable


class Gang(Live, kw_only=True, eq=False):
    """What lives and dies together."""

    id: GangId
    may_prefill: bool
    may_decode: bool
    tp: int
    max_positions: int
    kv_bytes_per_token: int = 0
    """That a rank has; 0: nobody knows."""
    instances: tuple[Instance, ...] = ()
    largest: int = 0
    """KV slots of the instance that has most."""
    mastered: int = 0
    """Sequences that its instances draw."""
    iteration_ns: int = 0
    """Measured time from one token of a sequence to the next; 0 before the first answer."""
    decode_ns: int = 0
    """How long answers were decoded, smoothed; 0 before the first."""
    decoding: dict[SequenceId, Sequence] = msgspec.field(default_factory=dict)
    """Sequences that work for their requests and are, or will be, decoded here."""
    owing: dict[SequenceId, int] = msgspec.field(default_factory=dict)
    """Sequences that it owes tokens or slots, and since when; in that order."""
    resetting: bool = False
    """A `ResetGang` was sent: nothing is started here any more."""

    @property
    def role(self) -> str:
        """For messages."""
        if self.may_prefill and self.may_decode:
            return "elastic"
        return "prefill" if self.may_prefill else "decode"


class GangPair(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A gang that prefills and one that decodes, with a connection for KV between them."""

    prefill: Gang
    decode: Gang

    @property
    def in_place(self) -> bool:
        """KV is decoded where it is computed, and lies in the slots that were reserved for it."""
        return self.prefill is self.decode

    @property
    def max_positions(self) -> int:
        """Longest prompt and answer together."""
        return min(self.prefill.max_positions, self.decode.max_positions)


class Cached(NamedTuple):
    """The beginning of a prompt that a gang has kept KV of."""

    tokens: int
    """Fewer than the prompt has: its last token draws the first one of the answer."""
    slices: tuple[PlacedSlice, ...]
    """Where they lie."""
    taken: dict[InstanceId, int]
    """Slots that are free no longer once they are used."""


class Request(Live, kw_only=True, eq=False):
    """An admitted request that has not ended."""

    id: RequestId
    cls: str
    prompt_tokens: int
    """To be prefilled: the client's prompt, and what was drawn before a fault."""
    output_tokens: int
    """Most tokens that may still be drawn."""
    deadline_ns: int | None
    submitted_ns: int
    waiting_since_ns: int
    """When it was admitted, or came back after a fault."""
    priority: Priority = "low"
    delays_before: dict[InstanceId, int] = msgspec.field(default_factory=dict)
    """`preemption_delay_ns` of the instances when it began to wait (`holdups.py`)."""
    blocked_ns: int | None = None
    """Since when those that pass it are held against `overtaking_s`."""
    hashes: tuple[bytes, ...] = ()
    """Of the client's prompt, block by block; none if its KV is not to be kept or reused."""
    cached_by_gang: dict[GangId, tuple[int, Cached | None]] = msgspec.field(default_factory=dict)
    """What gangs had of it at a version of their trees (`prefix/index.py`)."""
    bypassed_rounds: int = 0
    """Rounds in which younger ones went first."""
    generated_tokens: int = 0
    """Tokens of the answer that were delivered."""
    attempts: int = 0
    lone_losses: int = 0
    """Gangs that died while nobody but this request was in them."""
    waiting: bool = True
    """In the line, or in the pause before another attempt."""
    sequence: Sequence | None = None
    """The attempt that runs; None while the request waits."""

    def note_generated(self, generated_tokens: int) -> None:
        """So many tokens were delivered by now. What was, is prompt to the next attempt."""
        more = generated_tokens - self.generated_tokens
        if more > 0:
            self.generated_tokens = generated_tokens
            self.prompt_tokens += more
            self.output_tokens -= more


class PrefixRef(msgspec.Struct, frozen=True, eq=False):
    """KV that was kept, and that somebody reads."""

    gang: Gang
    segment: Segment
    """The last one."""


class StepPlan(Live, kw_only=True, eq=False):
    """The steps of a sequence, where those that are far off may be planned again."""

    version: int
    """Counts how often it was made."""
    made_ns: int
    ends_ns: int
    """When its last step was to end, as predicted when it was made."""
    ahead_ns: int
    """How long before they begin its steps are sent."""
    steps: tuple[Step, ...]
    """In order, those included that are over."""

    @property
    def unsent(self) -> tuple[Step, ...]:
        """Steps that the ranks have not heard of: the last ones."""
        return tuple([step for step in self.steps if step.unsent])


class Sequence(Live, kw_only=True, eq=False):
    """One attempt at a request. It outlives the attempt until every instance has freed its KV."""

    id: SequenceId
    request: Request
    prefill: Gang
    decode: Gang
    slices: tuple[PlacedSlice, ...]
    """Where its prompt's KV is decoded; empty if nothing is decoded behind it."""
    master: Instance
    answer: tuple[PlacedSlice, ...] = ()
    """Who keeps the answer's KV; empty: the master."""
    generated_before: int
    """Tokens of the answer that earlier attempts have delivered."""
    piggybacked: bool = False
    """Its prompt is computed in the stream in which it is decoded; `prefill` is `decode`."""
    computing: int = 0
    """Steps that are not done on all their instances."""
    unreceived: dict[InstanceId, int]
    """Decode instances whose share has not landed: tokens of the share. Nothing of a rider is
    sent."""
    unfreed: dict[InstanceId, None]
    """Decode instances that hold slots, or may."""
    first_token_ns: int | None = None
    transfer_timer: Timer | None = None
    """Ends the sequence if its KV takes too long."""
    joined_ns: int | None = None
    moving: MoveKv | None = None
    """Where its KV is on its way to."""
    slots_stop: int = 0
    """No position from here on has a slot."""
    over: bool = False
    """Works for its request no more."""
    cached: int = 0
    """Tokens of the prompt whose KV was kept from others where it is computed."""
    prefill_ref: PrefixRef | None = None
    """Of that KV, while something may still read it."""
    decode_ref: PrefixRef | None = None
    """Of KV that was kept where it is decoded, while it has slots there; if it is computed there as
    well, `prefill_ref` is of both."""
    retain: bool = False
    """Its KV is to be kept where it is decoded."""
    retained_slices: tuple[PlacedSlice, ...] = ()
    """Where its steps leave what they compute, if that is to be kept there and is decoded
    elsewhere."""
    plan: StepPlan | None = None
    """Its steps, if they are sent one by one."""
    prefill_cancelled: bool = False
    """The gang that prefills was told to drop it."""

    @property
    def in_place(self) -> bool:
        """It is decoded where it is computed."""
        return self.prefill is self.decode

    @property
    def master_id(self) -> InstanceId:
        """Who draws it."""
        return self.master.id

    @property
    def request_id(self) -> RequestId:
        """Whose attempt it is."""
        return self.request.id

    @property
    def answer_span(self) -> tuple[int, int]:
        """Positions of the answer that have slots."""
        return max((kv_slice.stop for kv_slice in self.slices), default=0), self.slots_stop

    @property
    def is_moving(self) -> bool:
        """Its KV is on its way to other instances."""
        return self.moving is not None

    @property
    def piggyback_tokens(self) -> int:
        """Tokens of its prompt that iterations have still to compute, at most."""
        if not self.piggybacked or self.first_token_ns is not None:
            return 0
        return self.request.prompt_tokens - self.cached

    @property
    def received(self) -> bool:
        """Its first token was drawn and all its KV is where it is decoded."""
        return self.first_token_ns is not None and not self.unreceived


class Step(Live, kw_only=True, eq=False):
    """A step from its launch until every instance of its group is done."""

    id: StepId
    gang: Gang
    sequences: tuple[Sequence, ...]
    """Whose tokens it computes."""
    high_priority: bool
    predicted_ns: int
    launched_ns: int
    undone: dict[InstanceId, None]
    """Instances that have not reported."""
    plan_steps: tuple[Step, ...] = ()
    """All steps of its plan, if there are others, because a later chunk reads the KV of this one;
    or if some of it stays. Nothing is given back before all are done."""
    behind: int = 0
    """Instances on which it is not the first long step; it begins when there is none."""
    first_ns: int = 0
    """When it became the first one on the last of the others."""
    begin_ns: int = 0
    """When it begins, or began, as far as is known. Of long steps only, as `end_ns`."""
    end_ns: int = 0
    """When it will have been computed, as predicted."""
    delayed_ns: int = 0
    """What urgent steps on its instances have cost it, or will: predicted, then measured."""
    preemption_delay: PreemptionDelay = PreemptionDelay()
    command: RunStep | None = None
    """For the ranks, as long as it has not been sent."""
    charged: dict[InstanceId, tuple[Step, ...]] = msgspec.field(default_factory=dict)
    """The steps that this one delays, if it is urgent."""

    @property
    def unsent(self) -> bool:
        """The ranks have not heard of it."""
        return self.command is not None


def new_gang(event: GangUp, now_ns: int) -> Gang:
    """A gang that holds nothing yet."""
    gang = Gang(
        id=event.gang,
        may_prefill=event.may_prefill,
        may_decode=event.may_decode,
        tp=event.tp,
        max_positions=event.max_positions,
        kv_bytes_per_token=event.kv_bytes_per_token,
    )
    _populate(gang, event.instances, now_ns)
    return gang


def idle_copy(gang: Gang) -> Gang:
    """The same gang without anything to do."""
    copy = Gang(
        id=gang.id,
        may_prefill=gang.may_prefill,
        may_decode=gang.may_decode,
        tp=gang.tp,
        max_positions=gang.max_positions,
        kv_bytes_per_token=gang.kv_bytes_per_token,
    )
    instances = [
        InstanceUp(location=str(instance.place), kv_slots=instance.capacity)
        for instance in gang.instances
    ]
    _populate(copy, instances, 0)
    return copy


def _populate(gang: Gang, instances: Many[InstanceUp], now_ns: int) -> None:
    places = [Location.parse(instance.location) for instance in instances]
    order = sorted(range(len(places)), key=lambda index: (places[index], index))
    gang.instances = tuple(
        Instance(
            id=numbered_instance(gang.id, index),
            gang=gang,
            place=places[index],
            order=order.index(index),
            capacity=it.kv_slots,
            free_at_ns=now_ns,
            stepped_ns=now_ns,
            last_heartbeat_ns=now_ns,
        )
        for index, it in enumerate(instances)
    )
    gang.largest = max((instance.capacity for instance in gang.instances), default=0)


@dataclass(slots=True)
class Round:
    """The time, the commands so far, and whether the policy has to be asked."""

    now_ns: int = 0
    commands: list[AnyCommand] = field(default_factory=list)
    stale: bool = False
    """Something that decisions depend on has changed since the policy was asked."""
    wake_ns: int | None = None
    """When the policy wants to be asked although nothing changes."""

    def emit(self, command: AnyCommand) -> None:
        """Have the executor carry this out."""
        self.commands.append(command)

    def discard(self, gang: GangId) -> None:
        """The gang went down later in the turn: no command is for it."""
        kept: list[AnyCommand] = []
        for command in self.commands:
            if isinstance(command, Cancel) and gang in command.gangs:
                left = tuple(other for other in command.gangs if other != gang)
                kept += [Cancel(sequence_id=command.sequence_id, gangs=left)] if left else []
            elif not (
                isinstance(command, ResetGang | SetGroup | Retain | Evict) and command.gang == gang
            ):
                kept.append(command)
        self.commands = kept


def wire_error(error: Exception) -> WireError:
    """An exception in the form that crosses the seam."""
    wire = to_wire(error)
    return WireError(wire["code"], wire["message"], wire.get("data"))
