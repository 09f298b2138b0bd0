"""Events: what the scheduler learns about requests, gangs and steps, and its integer ids.

An executor (the router, the simulator, a test) collects the events of one round in the order in
which they happened and passes them to `Scheduler.handle`. Events name instances and never ranks:
the executor waits until all `tp` ranks of an instance have reported. Tokens and text never appear
here. Of an answer the scheduler learns only how many tokens it has (`generated_tokens`).

Times are integer nanoseconds, sizes are tokens. Every event is a msgspec structure of a few bytes,
so that a run can be logged and replayed (`core.decision_log`).
"""

from __future__ import annotations

import msgspec

from csps.protocols.gang.messages import SavedRun

RequestId = int
"""Client's request, in order of admission; known to the router and the scheduler only."""
SequenceId = int
"""One attempt at a request: generation and counter. A retry is a new sequence."""
StepId = int
"""One step: generation and counter. Steps and sequences have counters of their own."""
GangId = int
"""One incarnation of a gang, counted by the executor and never used again."""
InstanceId = int
"""One instance of one incarnation of a gang."""
TenantId = int
"""Clients whose API keys have one name, counted by the executor; 0: no keys. The scheduler never
sees names or keys."""

COUNTER_BITS = 40
"""Bits of a counter: a trillion sequences and eight million generations fit into an int64 of
MessagePack."""
INDEX_BITS = 16


def make_id(generation: int, counter: int) -> int:
    """Return the id of a sequence or a step. It is greater than every id of an older generation."""
    assert 0 <= counter < 1 << COUNTER_BITS, "the counter has run over"
    return generation << COUNTER_BITS | counter


def instance_id(gang: GangId, index: int) -> InstanceId:
    """Return the id of instance `index` of a gang."""
    assert 0 <= index < 1 << INDEX_BITS, "too many instances for one gang"
    return gang << INDEX_BITS | index


def gang_of(instance: InstanceId) -> GangId:
    """Return the gang of an instance."""
    return instance >> INDEX_BITS


def index_of(instance: InstanceId) -> int:
    """Return an instance's index in its gang."""
    return instance & ((1 << INDEX_BITS) - 1)


class WireError(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Exception of `protocols.core.errors` as data; `from_wire` makes it an exception again."""

    code: str
    """Name of the class."""
    message: str
    data: dict[str, int | float | str | None] | None = None
    """Keyword arguments of classes that have their own."""


class Event(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag_field="event", gc=False
):
    """Base of all events: immutable, one array in the log."""


# --- requests ---


class Promise(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Objectives of a request that the order of waiting requests regards."""

    ttft_ns: int | None = None
    """Time from submission to the first token."""
    tpot_ns: int | None = None
    """Mean time per token after the first; orders nothing, because waiting does not change it."""
    e2e_ns: int | None = None
    """Time from submission to the last token."""
    refuse: bool = False
    """True if the client wants to be refused once an objective is predicted to be missed."""


class Submitted(Event, frozen=True, tag="submitted"):
    """A client submitted a request, validated and tokenized."""

    request_id: RequestId
    prompt_tokens: int
    output_tokens: int
    """Most tokens that may be generated."""
    cls: str = "exact"
    """Request class, a key of the cost table (`CostTable`). Requests of one class can share a step.
    """
    deadline_ns: int | None = None
    """Absolute time at which the request fails unless it has finished."""
    hashes: tuple[bytes, ...] = ()
    """Chain hashes of the prompt's whole blocks. A hash names all tokens up to the block's end, who
    may use their KV and how it was computed. Empty: neither retain nor reuse KV."""
    tenant: TenantId = 0
    kv_permille: int = 1000
    """Share of the KV slots that the tenant's requests may need together, and its cached KV as well
    (`KeyLimits.kv_share`)."""
    priority: int = 0
    """Client's priority; lower ones come first."""
    promise: Promise | None = None


class RequestCancelled(Event, frozen=True, tag="request_cancelled"):
    """The client disconnected, or its stop string appeared."""

    request_id: RequestId
    generated_tokens: int = 0
    """Delivered tokens of the answer, over all sequences of the request."""
    hashes: tuple[bytes, ...] = ()
    """Hashes of the blocks that follow those of `Submitted` and have KV now."""


# --- sequences ---


class FirstToken(Event, frozen=True, tag="first_token"):
    """The prefill of a sequence has sampled its token. Its KV may still be in transfer."""

    sequence_id: SequenceId


class KvReceived(Event, frozen=True, tag="kv_received"):
    """A decode instance has received its whole slice of a sequence's KV."""

    sequence_id: SequenceId
    instance: InstanceId
    tokens: int


class Moved(Event, frozen=True, tag="moved"):
    """A sequence's KV lies where `MoveSequence` named, and nowhere else."""

    sequence_id: SequenceId


class Freed(Event, frozen=True, tag="freed"):
    """An instance has freed all slots of a sequence."""

    sequence_id: SequenceId
    instance: InstanceId


class Retained(Event, frozen=True, tag="retained"):
    """An instance has so many tokens left of a sequence, after `RetainKv` or `EvictKv`."""

    sequence_id: SequenceId
    instance: InstanceId
    tokens: int


class Saved(Event, frozen=True, tag="saved"):
    """An instance has its part of these runs, which name instances by index, in files."""

    instance: InstanceId
    runs: tuple[SavedRun, ...]
    bytes_per_s: int
    """Speed at which one of its ranks reads files; 0: unknown."""
    listed: bool = False
    """True if it has reported all that it had when its gang came up."""


class Restored(Event, frozen=True, tag="restored"):
    """An instance has done what `RestoreKv` said."""

    sequence_id: SequenceId
    instance: InstanceId
    tokens: int
    """Tokens that it has read; -1 if it could not read all that it was to."""


class Finished(Event, frozen=True, tag="finished"):
    """A sequence has sampled its last token."""

    sequence_id: SequenceId
    generated_tokens: int
    """Tokens of the answer, over all sequences of the request."""
    hashes: tuple[bytes, ...] = ()
    """Hashes of the blocks that follow those of `Submitted` and have KV now."""


class Failed(Event, frozen=True, tag="failed"):
    """A sequence cannot go on: a rank refused it, or its KV arrived corrupted."""

    sequence_id: SequenceId
    generated_tokens: int
    """Delivered tokens of the answer, over all sequences of the request; none follows."""
    error: WireError
    retryable: bool
    """True if the cluster is at fault and not the request."""


class Progress(Event, frozen=True, tag="progress"):
    """Answers have so many tokens. Executors report it before events that end sequences without
    naming them (`GangDown`), and before a round whose policy asks for it."""

    generated_tokens: tuple[tuple[SequenceId, int], ...]
    """Delivered tokens of each answer, over all sequences of the request."""


# --- steps ---


class StepDone(Event, frozen=True, tag="step_done"):
    """An instance has computed its part of a step and has freed the step's slots."""

    step_id: StepId
    instance: InstanceId
    took_ns: int
    """Time from the step's start to its end on this instance, without steps that preempted it."""


# --- gangs ---


class InstanceUp(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One copy of the weights in a gang that came up."""

    location: str
    """Rack-Server-GPU id of its first rank."""
    kv_slots: int
    """Tokens that each of its ranks can store."""
    window_slots: int = 0
    """Tokens that each can store in layers with a window; 0: as many as in other layers."""


class GangUp(Event, frozen=True, tag="gang_up"):
    """A gang was attached."""

    gang: GangId
    generation: int
    """Generation of the router that attached it; sequence and step ids contain it."""
    may_prefill: bool
    may_decode: bool
    tp: int
    instances: tuple[InstanceUp, ...]
    """Instances in order: instance `i` is `instance_id(gang, i)`."""
    max_positions: int
    """Most tokens of prompt and answer together."""
    kv_bytes_per_token: int = 0
    """Bytes of a token's KV on a rank, which go over a link when it moves; 0: unknown."""
    window: int = 0
    """Positions that layers with slots of their own see; 0: there are none."""


class GangDown(Event, frozen=True, tag="gang_down"):
    """A gang is gone with all its KV."""

    gang: GangId
    reason: str


class LinkUp(Event, frozen=True, tag="link_up"):
    """KV can go from one gang to the other. An elastic gang is linked to itself from the start."""

    prefill: GangId
    decode: GangId


class LinkDown(Event, frozen=True, tag="link_down"):
    """KV can no longer go from one gang to the other; both gangs live on."""

    prefill: GangId
    decode: GangId
    reason: str


class Heartbeat(Event, frozen=True, tag="heartbeat"):
    """Instances decode, and steps advance. Executors report about once a second, not every
    time."""

    instances: tuple[InstanceId, ...] = ()
    """Instances that sampled tokens, or computed piggybacked prompts."""
    steps: tuple[StepId, ...] = ()
    """Steps of which an instance has computed or sent something."""


# --- the scheduler's own ---


class CostTableUpdated(Event, frozen=True, tag="cost_table_updated"):
    """A new cost table is in force. Tables are stored by digest beside the log."""

    digest: str


class Wake(Event, frozen=True, tag="wake"):
    """The time has come for which `handle` asked."""


class Standby(Event, frozen=True, tag="standby"):
    """The router waits for another one to finish its requests, or does so no longer."""

    waits: bool


class Drain(Event, frozen=True, tag="drain"):
    """The scheduler refuses new requests from now on; admitted ones go on."""


AnyEvent = (
    Submitted
    | RequestCancelled
    | FirstToken
    | KvReceived
    | Moved
    | Freed
    | Retained
    | Saved
    | Restored
    | Finished
    | Failed
    | Progress
    | StepDone
    | GangUp
    | GangDown
    | LinkUp
    | LinkDown
    | Heartbeat
    | CostTableUpdated
    | Wake
    | Standby
    | Drain
)
