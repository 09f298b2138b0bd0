"""Names of what the scheduler speaks about. All are integers: they are keys of every table here.

What the scheduler is told: facts about requests, gangs and steps, in the order they happened.

An executor (the live router, the simulator, a table in a test) collects the events of one turn of
its loop and hands them to `Scheduler.handle` together. Events name instances, never ranks: an
adapter waits until all `tp` ranks of an instance have reported. Tokens, text and log-probabilities
never appear here; `generated_tokens` counts are all that the scheduler learns about an answer.

Times are integer nanoseconds, sizes are tokens. Every event is a msgspec structure, so that the log
of a live run is a few bytes an event and can be replayed (`services.scheduling.log`).
"""

from __future__ import annotations

import msgspec

RequestId = int
"""A client's request, in order of admission. It stays inside the router."""
SequenceId = int
"""One attempt at a request: generation and counter. A retry is a new sequence."""
StepId = int
"""One step: generation and counter, from another counter than sequences."""
GangId = int
"""One incarnation of a gang, counted by the executor; never comes again."""
InstanceId = int
"""One instance of one incarnation of a gang."""

COUNTER_BITS = 40
"""A trillion sequences and eight million generations fit into what MessagePack calls an int64."""
INDEX_BITS = 16


def make_id(generation: int, counter: int) -> int:
    """A sequence's or a step's id, greater than every one of an older generation."""
    assert 0 <= counter < 1 << COUNTER_BITS, "the counter has run over"
    return generation << COUNTER_BITS | counter


def instance_id(gang: GangId, index: int) -> InstanceId:
    """Instance `index` of a gang."""
    assert 0 <= index < 1 << INDEX_BITS, "too many instances for one gang"
    return gang << INDEX_BITS | index


def gang_of(instance: InstanceId) -> GangId:
    """The gang that an instance belongs to."""
    return instance >> INDEX_BITS


def index_of(instance: InstanceId) -> int:
    """An instance's place in its gang."""
    return instance & ((1 << INDEX_BITS) - 1)


class WireError(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An exception of `protocols.errors` as it crosses the seam; `from_wire` makes it one again."""

    code: str
    """Name of the class."""
    message: str
    data: dict[str, int | float | str | None] | None = None
    """Keyword arguments of classes that have their own."""


class Event(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag_field="event", gc=False
):
    """Base of all events: immutable, and one array in the log."""


# --- requests ------------------------------------------------------------------------------


class Submitted(Event, frozen=True, tag="submitted"):
    """A client's request, validated and tokenized."""

    request_id: RequestId
    prompt_tokens: int
    output_tokens: int
    """Most tokens that may be drawn."""
    cls: str = "exact"
    """How it may attend; a key of the cost table (`cost.CostTable`). Requests of one class can
    share a step."""
    deadline_ns: int | None = None
    """Absolute; the request fails then unless it has finished."""
    hashes: tuple[bytes, ...] = ()
    """Chain hashes of the prompt's whole blocks, which name all tokens up to their ends, who may
    use their KV and how it was computed; none if it is not to be kept or reused."""


class RequestCancelled(Event, frozen=True, tag="request_cancelled"):
    """The client went away, or found its stop string."""

    request_id: RequestId


# --- sequences -----------------------------------------------------------------------------


class FirstToken(Event, frozen=True, tag="first_token"):
    """The prefill of a sequence has drawn its token; its KV may still be on the way."""

    sequence_id: SequenceId


class KvReceived(Event, frozen=True, tag="kv_received"):
    """A decode instance holds its whole share of a sequence's KV."""

    sequence_id: SequenceId
    instance: InstanceId
    tokens: int


class Moved(Event, frozen=True, tag="moved"):
    """A sequence's KV lies where `commands.MoveKv` has said, and nowhere else."""

    sequence_id: SequenceId


class Freed(Event, frozen=True, tag="freed"):
    """An instance holds nothing of a sequence any more."""

    sequence_id: SequenceId
    instance: InstanceId


class Retained(Event, frozen=True, tag="retained"):
    """What an instance has left of a sequence, after `Keep` or `Release`."""

    sequence_id: SequenceId
    instance: InstanceId
    tokens: int


class Finished(Event, frozen=True, tag="finished"):
    """The last token of a sequence was drawn."""

    sequence_id: SequenceId
    generated_tokens: int
    """Tokens of the answer, over all sequences of the request."""
    hashes: tuple[bytes, ...] = ()
    """Of the blocks that follow upon those of `Submitted` and have KV now."""


class Failed(Event, frozen=True, tag="failed"):
    """A sequence cannot go on: a rank has refused it, or its KV arrived wrong."""

    sequence_id: SequenceId
    generated_tokens: int
    """Tokens of the answer that were delivered, over all sequences of the request; none follows."""
    error: WireError
    retryable: bool
    """The cluster's fault and not the request's."""


class Progress(Event, frozen=True, tag="progress"):
    """How far answers are. An executor reports it before whatever ends sequences without a word of
    their own (`GangDown`), and before a round whose policy asks for it."""

    generated_tokens: tuple[tuple[SequenceId, int], ...]
    """Tokens of the answer that were delivered, over all sequences of the request."""


# --- steps ---------------------------------------------------------------------------------


class StepDone(Event, frozen=True, tag="step_done"):
    """An instance has computed its part of a step and holds no slots for it any more."""

    step_id: StepId
    instance: InstanceId
    took_ns: int
    """From the step's start to its end on this instance, without what overtook it."""


# --- gangs ---------------------------------------------------------------------------------


class InstanceUp(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One copy of the weights in a gang that came up."""

    location: str
    """Rack-Server-GPU id of its first rank."""
    kv_slots: int
    """Tokens that each of its ranks can hold."""


class GangUp(Event, frozen=True, tag="gang_up"):
    """A gang was attached."""

    gang: GangId
    generation: int
    """Of the router that attached it; sequence and step ids contain it."""
    may_prefill: bool
    may_decode: bool
    tp: int
    instances: tuple[InstanceUp, ...]
    """In order: instance `i` is `instance_id(gang, i)`."""
    max_positions: int
    """Longest prompt and answer together."""
    kv_bytes_per_token: int = 0
    """What a rank has of a token's KV, which goes over a link when it moves; 0: nobody knows."""


class GangDown(Event, frozen=True, tag="gang_down"):
    """A gang is gone with all that it held."""

    gang: GangId
    reason: str


class LinkUp(Event, frozen=True, tag="link_up"):
    """KV can go from one gang to the other. An elastic gang is linked to itself by nature."""

    prefill: GangId
    decode: GangId


class LinkDown(Event, frozen=True, tag="link_down"):
    """It cannot any more; both gangs live on."""

    prefill: GangId
    decode: GangId
    reason: str


class Heartbeat(Event, frozen=True, tag="heartbeat"):
    """Instances gave a sign of life. Executors report it about once a second, not every time."""

    instances: tuple[InstanceId, ...]


# --- the scheduler's own -------------------------------------------------------------------


class CostTableUpdated(Event, frozen=True, tag="cost_table_updated"):
    """A new cost table is in force. Tables are kept by digest beside the log."""

    digest: str


class Wake(Event, frozen=True, tag="wake"):
    """The time that `handle` had asked for has come."""


class Drain(Event, frozen=True, tag="drain"):
    """Refuse new requests from now on; those admitted go on."""


AnyEvent = (
    Submitted
    | RequestCancelled
    | FirstToken
    | KvReceived
    | Moved
    | Freed
    | Retained
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
    | Drain
)
