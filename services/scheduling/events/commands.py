"""What the scheduler wants done. An executor carries commands out in the order given.

The ledger is authoritative: `Reserve` and `RunStep` of a plan leave together, a rank that refuses
one is a fault (`events.Failed`). A command may name a request that a later event of the same batch
has ended; there is nothing to do for it then.
"""

from __future__ import annotations

import msgspec

from csps.protocols.core.placement import Span
from csps.services.scheduling.events.events import (
    GangId,
    InstanceId,
    RequestId,
    SequenceId,
    StepId,
    WireError,
)


class Command(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag_field="command", gc=False
):
    """Base of all commands: immutable, and one array in the log."""


class PlacedSlice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Positions start, start + step, … below stop of a sequence lie, or are to lie, on an
    instance."""

    instance: InstanceId
    start: int
    stop: int
    step: int = 1
    source: SequenceId = 0
    """Another sequence, which has computed them: its KV is read where it lies. 0 is the sequence
    itself."""

    @classmethod
    def of(cls, instance: InstanceId, span: Span, source: SequenceId = 0) -> PlacedSlice:
        """The positions of a span."""
        return cls(instance, span.start, span.stop, span.step, source)

    def cut(self, span: Span) -> PlacedSlice:
        """Some of them."""
        return PlacedSlice(self.instance, span.start, span.stop, span.step, self.source)

    @property
    def span(self) -> Span:
        """Its positions."""
        return Span(self.start, self.stop, self.step)

    @property
    def tokens(self) -> int:
        """How many they are."""
        return -(-(self.stop - self.start) // self.step)


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Positions [start, start + length) of a sequence, computed by one step."""

    sequence_id: SequenceId
    start: int
    length: int
    rows: tuple[PlacedSlice, ...] = ()
    """Who computes what, of all pieces of a step or of none; empty cuts at the step's bounds."""
    placement: tuple[PlacedSlice, ...] = ()
    """Who keeps the chunk's KV from this step on, and which of the KV before it moves; empty: who
    computes it, and none."""
    retain: bool = False
    """What the sequence computes is not freed when it has landed, but stays until `Evict` or
    `Cancel`; of all pieces of a sequence or of none."""


class Reserve(Command, frozen=True, tag="reserve"):
    """Set KV slots aside on decode instances and expect a sequence's KV there, or a rider. Where no
    KV is to go there, because one token is all that may be drawn, there is nobody to ask."""

    request_id: RequestId
    sequence_id: SequenceId
    prompt_tokens: int
    """To be prefilled: the client's prompt, and what was drawn before a fault."""
    output_tokens: int
    """Tokens that may still be drawn."""
    slices: tuple[PlacedSlice, ...]
    """Of the prompt's KV: each position once. Empty if nothing is decoded behind it."""
    master: InstanceId
    """Draws the tokens that no step draws."""
    deadline_ns: int
    """For the instances to say yes."""
    piggybacked: bool = False
    """A `Piggyback` follows: the master's ranks get the prompt's tokens, because no step computes it."""
    answer: tuple[PlacedSlice, ...] = ()
    """Who keeps the KV of which of the answer's positions; empty: the master."""
    cached: int = 0
    """Tokens that the prompt begins with and nothing computes, because their KV was kept."""
    retain: bool = False
    """Nothing is freed when the answer ends, until `Retain` says what stays, or `Cancel`."""


class RunStep(Command, frozen=True, tag="run_step"):
    """Compute pieces on a group of instances of one gang."""

    step_id: StepId
    group: tuple[InstanceId, ...]
    bounds: tuple[int, ...]
    """The pieces are laid end to end; `group[i]` computes tokens [bounds[i], bounds[i+1]), or as
    many of all pieces, where these have `rows`."""
    chunks: tuple[Chunk, ...]
    history: tuple[tuple[PlacedSlice, ...], ...]
    """Of each piece: where the KV of its sequence's earlier chunks lies."""
    strategy: str
    """By the engine's names (`actors/attention/choice.py`)."""
    cls: str
    """Of all pieces; the executor elaborates levels and micro-partitions for this very group."""
    high_priority: bool
    """May run inside a step that is not urgent."""
    ends_ns: int
    """When it will have been computed, as predicted at its launch."""


class SetGroup(Command, frozen=True, tag="set_group"):
    """Change the rows of a decode group: all KV of these sequences has landed."""

    gang: GangId
    joined: tuple[SequenceId, ...]


class Piggyback(Command, frozen=True, tag="piggyback"):
    """Let a sequence join the stream of a gang with nothing computed: iterations compute its prompt
    beside the rows that decode (`protocols.iteration`), and draw its tokens."""

    gang: GangId
    sequence_id: SequenceId
    budget: int
    """Tokens that an iteration of the stream may compute on each master from now on."""


class Retain(Command, frozen=True, tag="retain"):
    """A sequence of a gang is over, and of its KV these positions stay; they are among those that
    it has computed itself. All instances of the gang answer with what they have left (`Kept`)."""

    gang: GangId
    sequence_id: SequenceId
    start: int
    stop: int


class Evict(Command, frozen=True, tag="evict"):
    """Some of what stayed of a sequence goes. Answered as `Retain`."""

    gang: GangId
    sequence_id: SequenceId
    start: int
    stop: int


class MoveKv(Command, frozen=True, tag="move_kv"):
    """Move KV of a sequence that is decoded to other instances of its gang; `events.Moved` when it
    is there, the sequence goes on with it, and what it left is free."""

    gang: GangId
    step_id: StepId
    """That moves it, of which there is no `events.StepDone`."""
    sequence_id: SequenceId
    slices: tuple[PlacedSlice, ...]
    """Of the prompt's KV, from then on."""
    master: InstanceId
    answer: tuple[PlacedSlice, ...]


class Cancel(Command, frozen=True, tag="cancel"):
    """Stop working for a sequence and free what it holds on these gangs."""

    sequence_id: SequenceId
    gangs: tuple[GangId, ...]


class Restart(Command, frozen=True, tag="restart"):
    """A sequence is over, its request waits again. Tokens that still come for it are dropped; the
    next sequence computes prompt and delivered tokens again and goes on with the next one."""

    request_id: RequestId
    sequence_id: SequenceId
    error: WireError


class Refuse(Command, frozen=True, tag="refuse"):
    """The request is not admitted."""

    request_id: RequestId
    error: WireError


class Fail(Command, frozen=True, tag="fail"):
    """The request ends without its whole answer."""

    request_id: RequestId
    error: WireError


class ResetGang(Command, frozen=True, tag="reset_gang"):
    """A gang owes an answer and is silent: hang up on it, which ends what it does."""

    gang: GangId
    reason: str


AnyCommand = (
    Reserve
    | RunStep
    | SetGroup
    | Piggyback
    | Retain
    | Evict
    | MoveKv
    | Cancel
    | Restart
    | Refuse
    | Fail
    | ResetGang
)
