"""Rows that are on their way to other instances, from the command until all ranks have told.

A row has two masters in the meantime, and their connections to the router have no common order:
what the next one draws may arrive before the last token of the one before.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from csps.protocols.gang_client import GangClient
from csps.protocols.row_move import MoveRow, RowMoved, RowPlacement
from csps.protocols.tokens import TokenDrawn
from csps.services.router.sequences import InstanceRanks, LiveSequence
from csps.services.router.step_messages import kv_shares
from csps.services.scheduling.commands import MoveKv
from csps.services.scheduling.decode_slots import Placed, decode_slots
from csps.services.scheduling.ids import index_of, instance_id


@dataclass(eq=False, slots=True)
class LiveMove:
    """One row's."""

    command: MoveKv
    before: Placed
    untold: InstanceRanks
    began: float = field(default_factory=time.monotonic)
    told: list[RowMoved] = field(default_factory=list)
    early: dict[int, TokenDrawn] = field(default_factory=dict)
    """By their indices, tokens that came before others."""

    @property
    def tokens(self) -> int:
        """Whose KV has moved; every rank of an instance has its own heads of them."""
        tp = max(1, self.untold.gang.tp)
        return sum(it.tokens for it in self.told) // tp

    @property
    def sent_bytes(self) -> int:
        """Over all ranks."""
        return sum(it.sent_bytes for it in self.told)

    @property
    def seconds(self) -> float:
        """Of the rank that was longest at it."""
        return max((it.seconds for it in self.told), default=0.0)


def begin_move(command: MoveKv, sequence: LiveSequence, gang: GangClient) -> MoveRow:
    """A row is to be moved. Returns the message to every rank of its gang."""
    reserved = sequence.command
    message = MoveRow(
        job_id=command.step,
        rid=sequence.id,
        prompt_length=reserved.prompt_tokens,
        stop=reserved.prompt_tokens + max(0, reserved.output_tokens - 1),
        before=row_placement(sequence.placed),
        after=row_placement(command),
        trace=sequence.running.carrier,
    )
    members = [instance_id(command.gang, it) for it in message.instances]
    sequence.move = LiveMove(command, sequence.placed, InstanceRanks(gang, members))
    # Whichever it comes to tells as well when it holds nothing of it any more.
    known = decode_slots(sequence.placed, 0)
    sequence.unfreed.expect(it for it in members if it not in known)
    return message


def end_move(sequence: LiveSequence, move: LiveMove) -> None:
    """A row goes on where it was moved to. Ranks there may have told already that it has ended."""
    before, after = decode_slots(sequence.placed, 0), decode_slots(move.command, 0)
    sequence.move = None
    sequence.placed = move.command
    sequence.unfreed.forget(it for it in before if it not in after)


def row_placement(placed: Placed) -> RowPlacement:
    """Where a row is decoded, as ranks are told of it."""
    return RowPlacement(
        shares=kv_shares(placed.shares),
        master=index_of(placed.master),
        answer=kv_shares(placed.answer),
    )
