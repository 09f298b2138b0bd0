"""Commands: what the scheduler wants done. Executors carry them out in the order given.

The scheduler's ledgers are authoritative. `Reserve` and `RunStep` of a plan leave together; a rank
that refuses one is a fault (`events.Failed`). A command may name a request that a later event of
the same batch has ended; the executor ignores it then.
"""

from __future__ import annotations

import msgspec

from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.messages import EvictKv, JoinBatch, RetainKv
from csps.protocols.gang.step_messages import MoveSequence, PrefillStep
from csps.services.scheduling.events.events import (
    GangId,
    InstanceId,
    RequestId,
    SequenceId,
    WireError,
)


class Command(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag_field="command", gc=False
):
    """Base of all commands: immutable, one array in the log."""


class Reserve(Command, frozen=True, tag="reserve"):
    """Reserve KV slots on decode instances for a sequence's KV, or for a piggybacked sequence. If
    the answer may have one token only, no KV goes there and nobody is asked."""

    request_id: RequestId
    sequence_id: SequenceId
    prompt_tokens: int
    """Tokens to prefill: the client's prompt, and tokens generated before a fault."""
    output_tokens: int
    """Most tokens that may still be generated."""
    slices: tuple[KvSlice, ...]
    """Placement of the prompt's KV: each position once. Empty if nothing is decoded."""
    master: InstanceId
    """Instance that samples the tokens that no step samples."""
    deadline_ns: int
    """Time by which the instances have to confirm."""
    piggybacked: bool = False
    """True if `JoinBatch` follows: the master's ranks get the prompt's tokens, because no step
    computes them."""
    answer: tuple[KvSlice, ...] = ()
    """Placement of the answer's KV; empty: the master."""
    cached: int = 0
    """First tokens of the prompt that nothing computes, because their KV is cached."""
    retain: bool = False
    """True if all KV stays when the answer ends, until `RetainKv` names what stays, or `Cancel`."""


class RunStep(Command, frozen=True, tag="run_step"):
    """Compute chunks on a group of instances of one gang."""

    step: PrefillStep
    """Step as the ranks get it, but for what only the router knows. Its strategy names an option,
    whose levels and micro-partitions the executor lowers for this group."""
    cls: str
    """Request class of all chunks."""
    ends_ns: int
    """Predicted end, at launch."""


class SetGroup(Command, frozen=True, tag="set_group"):
    """Add sequences to a decode group: all their KV has been received."""

    gang: GangId
    joined: tuple[SequenceId, ...]


class ToGang(Command, frozen=True, tag="to_gang"):
    """Send a gang a message.

    JoinBatch     add a sequence to the decode batch before its prefill: iterations compute its
                  prompt beside the sequences that decode (piggybacked), and sample its tokens
    RetainKv, EvictKv
                  all instances of the gang answer with what they have left (`events.Retained`)
    MoveSequence  after `events.Moved` the sequence decodes at its new placement, and the slots that
                  it left are free; the step that moves it has no `events.StepDone`
    """

    gang: GangId
    message: JoinBatch | RetainKv | EvictKv | MoveSequence


class Cancel(Command, frozen=True, tag="cancel"):
    """Stop all work for a sequence on these gangs and free its slots."""

    sequence_id: SequenceId
    gangs: tuple[GangId, ...]


class Restart(Command, frozen=True, tag="restart"):
    """Note that a sequence is over and its request waits again. Tokens that still arrive for it are
    dropped. The next sequence computes prompt and delivered tokens again and goes on from there."""

    request_id: RequestId
    sequence_id: SequenceId
    error: WireError


class Refuse(Command, frozen=True, tag="refuse"):
    """Refuse to admit a request."""

    request_id: RequestId
    error: WireError


class Fail(Command, frozen=True, tag="fail"):
    """End a request without its whole answer."""

    request_id: RequestId
    error: WireError


class ResetGang(Command, frozen=True, tag="reset_gang"):
    """Disconnect from a gang that owes an answer and is silent, which ends all its work."""

    gang: GangId
    reason: str


AnyCommand = Reserve | RunStep | SetGroup | ToGang | Cancel | Restart | Refuse | Fail | ResetGang
