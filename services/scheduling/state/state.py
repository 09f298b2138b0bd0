"""State of the scheduler: requests, sequences, steps, gangs and their instances.

These objects change while events are handled. Policies read them (`deciding.SchedulerView`) and may
not change them. They have no rules of their own: the rules stand where they are changed.

Times are integer nanoseconds, sizes tokens; one token occupies one KV slot of an instance.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from csps.protocols.core.errors import to_wire
from csps.protocols.core.placement import KvSlice
from csps.protocols.core.topology import Location
from csps.protocols.gang.step_messages import MoveSequence
from csps.services.scheduling.events.commands import (
    AnyCommand,
    Cancel,
    ResetGang,
    RunStep,
    SetGroup,
    ToFiles,
    ToGang,
)
from csps.services.scheduling.events.events import (
    GangId,
    GangUp,
    InstanceId,
    Promise,
    RequestId,
    SequenceId,
    StepId,
    TenantId,
    WireError,
    gang_of,
)
from csps.services.scheduling.events.events import instance_id as numbered_instance
from csps.services.scheduling.events.limits import PreemptionDelay, Timer
from csps.services.scheduling.state.prefix_tree import Segment

Priority = Literal["high", "low"]
"""Queue of a request. A high-priority request may be computed inside a low-priority step."""


class Live(msgspec.Struct):
    """Base of all state: quicker to make than a dataclass, and a round makes hundreds."""


class Instance(Live, kw_only=True, eq=False):
    """One copy of the weights."""

    id: InstanceId
    gang: Gang
    place: Location
    order: int
    """Rank of its location among those of the gang: neighbors are near each other (CSPS §3.2)."""
    capacity: int
    """KV slots."""
    used: int = 0
    """Slots taken or promised (`ledger.py`), those of retained KV included."""
    window_slots: int = 0
    """Slots in layers with a window, if these have slots of their own."""
    window_used: int = 0
    """Those that sequences have, or were promised."""
    reclaimable: int = 0
    """Slots of retained KV that nobody reads or that is being evicted; part of `used`."""
    mastered: int = 0
    """Sequences that sample here, those still receiving KV included."""
    steps: dict[StepId, Step] = msgspec.field(default_factory=dict)
    """Outstanding steps in the order of their launch."""
    low_priority_steps: int = 0
    """Number of outstanding low-priority steps."""
    high_priority_ns: int = 0
    """Predicted time of outstanding high-priority steps."""
    preempted_ns: int = 0
    """Predicted time of high-priority steps launched here since it has low-priority ones."""
    preemption_delay_ns: int = 0
    """Time that high-priority steps have cost low-priority ones here, ever; predicted, then
    measured."""
    free_at_ns: int = 0
    """Predicted end of the outstanding steps; may be in the past."""
    stepped_ns: int = 0
    """End of its last step; before the first, when it came up."""
    last_heartbeat_ns: int = 0
    """Last sign that it decodes: tokens, or slots that it freed."""

    @property
    def empty_slots(self) -> int:
        """Slots that nobody was promised and that hold nothing."""
        return self.capacity - self.used

    @property
    def free_slots(self) -> int:
        """Slots that nobody was promised: retained KV is evicted when its slots are needed."""
        return self.capacity - self.used + self.reclaimable

    @property
    def more_masters(self) -> int:
        """Sequences of any length that it can still be the master of, by its slots in layers with a
        window."""
        window = self.gang.window
        return (self.window_slots - self.window_used) // window if window else sys.maxsize


class Gang(Live, kw_only=True, eq=False):
    """Instances that live and die together."""

    id: GangId
    may_prefill: bool
    may_decode: bool
    tp: int
    max_positions: int
    kv_bytes_per_token: int = 0
    """Bytes of a token's KV on a rank; 0: unknown."""
    window: int = 0
    """Positions that layers with slots of their own see: all KV of these layers lies at the
    sequences' masters. 0: there are no such layers."""
    instances: tuple[Instance, ...] = ()
    largest: int = 0
    """KV slots of the instance that has most."""
    capacity: int = 0
    """KV slots of all instances."""
    by_order: tuple[int, ...] = ()
    """Indices of the instances in the order of their locations."""
    servers: tuple[int, ...] = ()
    """Number of instances of each server, in this order."""
    slots_by_order: tuple[int, ...] = ()
    """KV slots of the instances in this order."""
    mastered: int = 0
    """Sequences that its instances sample."""
    iteration_ns: int = 0
    """Measured time between two tokens of a sequence; 0 before the first answer."""
    decode_ns: int = 0
    """Decode time of answers, smoothed; 0 before the first."""
    decoding: dict[SequenceId, Sequence] = msgspec.field(default_factory=dict)
    """Sequences that are, or will be, decoded here and still serve their requests, in order of
    start."""
    owing: dict[SequenceId, int] = msgspec.field(default_factory=dict)
    """Sequences for which it owes tokens or slots, and since when; in that order."""
    resetting: bool = False
    """True if `ResetGang` was sent: nothing starts here any more."""

    @property
    def role(self) -> str:
        """Role, for messages."""
        if self.may_prefill and self.may_decode:
            return "elastic"
        return "prefill" if self.may_prefill else "decode"

    def largest_group(self, size: int) -> int:
        """Return the KV slots of the largest of the groups of `size` neighbors, or of all
        instances if there are fewer. Groups do not overlap; instances left over belong to none."""
        slots = self.slots_by_order
        if size >= len(slots):
            return self.capacity
        return max(sum(slots[at : at + size]) for at in range(0, len(slots) - size + 1, size))


class GangPair(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Prefill gang and decode gang with a KV link between them; an elastic gang is both."""

    prefill: Gang
    decode: Gang

    @property
    def in_place(self) -> bool:
        """True if KV is decoded where it is computed, in the slots reserved for it."""
        return self.prefill is self.decode

    @property
    def max_positions(self) -> int:
        """Most tokens of prompt and answer together."""
        return min(self.prefill.max_positions, self.decode.max_positions)


class Cached(NamedTuple):
    """Beginning of a prompt of which a gang has retained KV."""

    tokens: int
    """Whole blocks, and fewer than the prompt has: its last token samples the first of the answer.
    """
    slices: tuple[KvSlice, ...]
    """Placement of the KV."""
    taken: Mapping[InstanceId, int] = MappingProxyType({})
    """Slots that are no longer free once the KV is used."""


Place = tuple[int, int]
"""Client priority, and the time at which a waiting request is due (`core.promises`)."""
NO_PLACE: Place = (0, 0)


class Request(Live, kw_only=True, eq=False):
    """Admitted request that has not ended."""

    id: RequestId
    tenant: TenantId = 0
    kv_permille: int = 1000
    """Share of the slots for its tenant's cached KV (`Submitted`)."""
    served_before: int = 0
    """Weighted tokens that its tenant was served, and will be by its older waiting requests: what
    orders the waiting requests of several tenants; 0 while only one waits."""
    modest: bool = False
    """True if its tenant used less than half its share when it began to wait (`RecentTokens`)."""
    cls: str
    prompt_tokens: int
    """Tokens to prefill: the client's prompt, and tokens generated before a fault."""
    output_tokens: int
    """Most tokens that may still be generated."""
    deadline_ns: int | None
    submitted_ns: int
    waiting_since_ns: int
    """Time of admission, or of the return after a fault."""
    client_priority: int = 0
    """Priority that its client gave it; lower ones come first."""
    promise: Promise | None = None
    predicted_ns: int = 0
    """Predicted time of its prompt (`core.promises`); 0: unknown."""
    work_ns: int = 0
    """Predicted time of its prompt on one instance."""
    latest_start_ns: int | None = None
    """Time by which it has to start so that its first token keeps its objective."""
    place: Place = NO_PLACE
    """Place in the order, before what is fair to tenants; `NO_PLACE` for all while no waiting
    request has an objective or a priority."""
    priority: Priority = "low"
    delays_before: dict[InstanceId, int] = msgspec.field(default_factory=dict)
    """Counters of preemption delay when it began to wait (`limits.delay_counters`)."""
    blocked_ns: int | None = None
    """Time since when requests that pass it count against `overtaking_s`."""
    hashes: tuple[bytes, ...] = ()
    """Hashes of the client's prompt, block by block; empty: neither retain nor reuse its KV."""
    cached_by_gang: dict[GangId, tuple[int, Cached | None]] = msgspec.field(default_factory=dict)
    """Prefixes that gangs had at a version of their trees (`prefix_cache.py`)."""
    restored: bool = False
    """True if files were read for it, or are not worth it: once is enough."""
    front_tokens: int = 0
    """Tokens of its prompt that its tenant was charged for when a front started."""
    lost_restores: int = 0
    """Gangs that died while they read files for it."""
    front: bool = False
    """True if it stands for the beginning of another request's prompt, which has its id. It is
    computed and retained, and nothing is sampled (`core.restores`)."""
    bypassed_rounds: int = 0
    """Rounds in which younger requests started first."""
    generated_tokens: int = 0
    """Delivered tokens of the answer."""
    attempts: int = 0
    lone_losses: int = 0
    """Gangs that died while nobody but this request was in them."""
    waiting: bool = True
    """True if it is in the queue, or pauses before another attempt."""
    sequence: Sequence | None = None
    """Running attempt; None while the request waits."""

    def note_generated(self, generated_tokens: int) -> None:
        """Count delivered tokens. For the next attempt they are prompt."""
        more = generated_tokens - self.generated_tokens
        if more > 0:
            self.generated_tokens = generated_tokens
            self.prompt_tokens += more
            self.output_tokens -= more


OrderKey = tuple[bool, Place, int, int]


def order_key(request: Request) -> OrderKey:
    """Return the key by which waiting requests are ordered, whatever the policy: modest tenants,
    then client priority and least slack, then tokens served to the tenant, then order of admission.
    The least comes first."""
    return not request.modest, request.place, request.served_before, request.id


class PrefixRef(msgspec.Struct, frozen=True, eq=False):
    """Reference to retained KV that somebody reads."""

    gang: Gang
    segment: Segment
    """Last segment."""


class StepPlan(Live, kw_only=True, eq=False):
    """Steps of a sequence, of which later ones may be planned again."""

    version: int
    """Number of times that it was planned again."""
    made_ns: int
    ends_ns: int
    """Predicted end of its last step, when it was planned."""
    ahead_ns: int
    """Time before their begin at which its steps are sent."""
    steps: tuple[Step, ...]
    """Steps in order, finished ones included."""

    @property
    def unsent(self) -> tuple[Step, ...]:
        """Steps that the ranks do not know yet: the last ones."""
        return tuple([step for step in self.steps if step.unsent])


class Sequence(Live, kw_only=True, eq=False):
    """One attempt at a request. It outlives the attempt until every instance has freed its KV."""

    id: SequenceId
    request: Request
    prefill: Gang
    decode: Gang
    slices: tuple[KvSlice, ...]
    """Placement of its prompt's KV for decoding; empty if nothing is decoded."""
    master: Instance
    answer: tuple[KvSlice, ...] = ()
    """Placement of the answer's KV; empty: the master."""
    generated_before: int
    """Tokens of the answer that earlier attempts delivered."""
    piggybacked: bool = False
    """True if decode iterations compute its prompt; `prefill` is `decode` then."""
    computing: int = 0
    """Steps that are not done on all their instances."""
    unreceived: dict[InstanceId, int]
    """Decode instances that have not received their slice, and its tokens. A piggybacked sequence
    has none."""
    unfreed: dict[InstanceId, None]
    """Decode instances that hold slots, or may."""
    first_token_ns: int | None = None
    transfer_timer: Timer | None = None
    """Timer that ends the sequence if its KV transfer takes too long."""
    joined_ns: int | None = None
    moving: MoveSequence | None = None
    """Message that moves its KV, until it is there."""
    slots_stop: int = 0
    """First position without a slot."""
    over: bool = False
    """True if it no longer serves its request."""
    cached: int = 0
    """First tokens of the prompt whose retained KV is reused where it is computed."""
    prefill_ref: PrefixRef | None = None
    """Reference to that KV, while something may still read it."""
    decode_ref: PrefixRef | None = None
    """Reference to retained KV where it is decoded, while it has slots there. If it is computed
    there as well, `prefill_ref` covers both."""
    retain: bool = False
    """True if its KV is to be retained where it is decoded."""
    retained_slices: tuple[KvSlice, ...] = ()
    """Placement of what its steps compute, if it is retained there and decoded elsewhere."""
    plan: StepPlan | None = None
    """Plan of its steps, if they are sent one by one."""
    prefill_cancelled: bool = False
    """True if the prefill gang was sent `Cancel`."""

    @property
    def in_place(self) -> bool:
        """True if it is decoded where it is computed."""
        return self.prefill is self.decode

    @property
    def master_id(self) -> InstanceId:
        """Instance that samples its tokens."""
        return self.master.id

    @property
    def request_id(self) -> RequestId:
        """Request that it serves."""
        return self.request.id

    @property
    def answer_span(self) -> tuple[int, int]:
        """Start and stop of the answer's positions that have slots."""
        return max((kv_slice.stop for kv_slice in self.slices), default=0), self.slots_stop

    @property
    def is_moving(self) -> bool:
        """True if its KV is in transfer to other instances of the gang."""
        return self.moving is not None

    @property
    def piggyback_tokens(self) -> int:
        """Most tokens of its prompt that iterations have still to compute."""
        if not self.piggybacked or self.first_token_ns is not None:
            return 0
        return self.request.prompt_tokens - self.cached

    @property
    def received(self) -> bool:
        """True if its first token was sampled and all its KV is where it is decoded."""
        return self.first_token_ns is not None and not self.unreceived


class Step(Live, kw_only=True, eq=False):
    """Step from its launch until every instance of its group is done."""

    id: StepId
    gang: Gang
    sequences: tuple[Sequence, ...]
    """Sequences whose chunks it computes."""
    high_priority: bool
    predicted_ns: int
    launched_ns: int
    undone: dict[InstanceId, None]
    """Instances that have not reported."""
    plan_steps: tuple[Step, ...] = ()
    """All steps of its plan, if a later chunk reads its KV or some of its KV is retained. Their
    slots are freed when all are done."""
    behind: int = 0
    """Instances on which another low-priority step is first; at 0 the step begins."""
    first_ns: int = 0
    """Time when it became first on the last of the others."""
    begin_ns: int = 0
    """Begin, as far as is known; of low-priority steps only, as `end_ns`."""
    end_ns: int = 0
    """Predicted end."""
    delayed_ns: int = 0
    """Time that high-priority steps on its instances cost it: predicted, then measured."""
    advanced_ns: int = 0
    """Time when an instance last advanced in it, or was done with a step before it; 0: never."""
    delayed_before_ns: int = 0
    """`delayed_ns` at that time."""
    preemption_delay: PreemptionDelay = PreemptionDelay()
    command: RunStep | None = None
    """Command for the ranks, until it is sent."""
    charged: dict[InstanceId, tuple[Step, ...]] = msgspec.field(default_factory=dict)
    """Steps that this high-priority step delays, by instance."""

    @property
    def unsent(self) -> bool:
        """True if the ranks do not know it yet."""
        return self.command is not None


def new_gang(event: GangUp, now_ns: int) -> Gang:
    """Make a gang that holds nothing yet."""
    gang = Gang(
        id=event.gang,
        may_prefill=event.may_prefill,
        may_decode=event.may_decode,
        tp=event.tp,
        max_positions=event.max_positions,
        kv_bytes_per_token=event.kv_bytes_per_token,
        window=event.window,
    )
    places = [Location.parse(instance.location) for instance in event.instances]
    order = sorted(range(len(places)), key=lambda index: (places[index], index))
    gang.instances = tuple(
        Instance(
            id=numbered_instance(gang.id, index),
            gang=gang,
            place=places[index],
            order=order.index(index),
            capacity=instance.kv_slots,
            window_slots=instance.window_slots,
            free_at_ns=now_ns,
            stepped_ns=now_ns,
            last_heartbeat_ns=now_ns,
        )
        for index, instance in enumerate(event.instances)
    )
    gang.by_order = tuple(order)
    by_server = groupby(order, key=lambda index: places[index].server_id)
    gang.servers = tuple([len(list(indices)) for _, indices in by_server])
    gang.slots_by_order = tuple(event.instances[index].kv_slots for index in order)
    gang.capacity = sum(gang.slots_by_order)
    gang.largest = max(gang.slots_by_order, default=0)
    return gang


@dataclass(slots=True)
class Round:
    """Time and commands of one round, shared by all parts of the scheduler."""

    now_ns: int = 0
    commands: list[AnyCommand] = field(default_factory=list)
    stale: bool = False
    """True if state that decisions depend on has changed since the policy was asked."""
    wake_ns: int | None = None
    """Time at which the policy asked to decide again even if nothing changes."""
    reset_gangs: tuple[GangId, ...] = ()
    """Gangs that were reset in this round."""

    def begin(self, now_ns: int) -> None:
        """Begin the next round; time does not run backwards."""
        self.now_ns = max(self.now_ns, now_ns)
        self.commands = []
        self.reset_gangs = ()

    def emit(self, command: AnyCommand) -> None:
        """Add a command for the executor, unless it is for a gang that was reset before it."""
        left: AnyCommand | None = command
        for gang in self.reset_gangs:
            left = None if left is None else _without(left, gang)
        if left is not None:
            self.commands.append(left)

    def reset(self, gang: GangId, reason: str) -> None:
        """Tell the executor to reset a gang. To it the gang is gone from here on."""
        self.emit(ResetGang(gang=gang, reason=reason))
        self.reset_gangs = (*self.reset_gangs, gang)

    def discard(self, gang: GangId) -> None:
        """Drop the commands for a gang that went down later in the round."""
        left = (_without(command, gang) for command in self.commands)
        self.commands = [command for command in left if command is not None]


def _without(command: AnyCommand, gang: GangId) -> AnyCommand | None:
    """Return what is left of a command without a gang; None if nothing is."""
    match command:
        case Cancel(gangs=gangs) if gang in gangs:
            others = tuple(other for other in gangs if other != gang)
            return Cancel(sequence_id=command.sequence_id, gangs=others) if others else None
        case (
            ResetGang(gang=addressed)
            | SetGroup(gang=addressed)
            | ToFiles(gang=addressed)
            | ToGang(gang=addressed)
        ):
            return None if addressed == gang else command
        case RunStep(step=step) if gang_of(step.group[0]) == gang:
            return None
        case _:
            return command


def wire_error(error: Exception) -> WireError:
    """Convert an exception to the data that crosses to the executor."""
    wire = to_wire(error)
    return WireError(wire["code"], wire["message"], wire.get("data"))
