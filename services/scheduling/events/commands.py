"""Commands: what the scheduler wants done. Executors carry them out in the order given.

The scheduler's ledgers are authoritative. `Reserve` and `RunStep` of a plan leave together; a rank
that refuses one is a fault (`events.Failed`). A command may name a request that a later event of
the same batch has ended; the executor ignores it then.
"""

from __future__ import annotations

import msgspec

from csps.protocols.gang.messages import (
    EvictKv,
    JoinBatch,
    ReserveKv,
    RestoreKv,
    RetainKv,
    SaveKv,
)
from csps.protocols.gang.step_messages import MoveSequence, PrefillStep
from csps.services.scheduling.events.events import (
    GangId,
    RequestId,
    SequenceId,
    WireError,
)


class Command(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag_field="command", gc=False
):
    """Base of all commands: immutable, one array in the log."""


class Reserve(Command, frozen=True, tag="reserve"):
    """Begin a sequence: reserve KV slots where it is decoded."""

    request_id: RequestId
    message: ReserveKv
    """Reservation as the ranks get it, but for what only the router knows."""
    deadline_ns: int
    """Time by which the ranks have to confirm."""
    piggybacked: bool = False
    """True if `JoinBatch` follows: the master's ranks get the prompt's tokens, because no step
    computes them."""
    cached: int = 0
    """First tokens of the prompt that nothing computes, because their KV is cached."""


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


class ToFiles(Command, frozen=True, tag="to_files"):
    """Have a gang write retained KV to files, or read it back.

    SaveKv     answered by `events.Saved`, or not at all
    RestoreKv  all instances of the gang answer with `events.Restored`
    """

    gang: GangId
    message: SaveKv | RestoreKv


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


AnyCommand = (
    Reserve | RunStep | SetGroup | ToGang | ToFiles | Cancel | Restart | Refuse | Fail | ResetGang
)
