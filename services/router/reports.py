"""What ranks tell the router: tokens go to their requests, facts become events of the scheduler.

Tokens bypass the scheduler. A frame of them costs a look-up and an append each; of an answer the
scheduler learns its first token, because KV must land soon after it, and its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from csps.protocols.errors import CspsError, FaultError, ProtocolError
from csps.protocols.errors import from_wire as error_from_wire
from csps.protocols.gang_client import GangClient
from csps.protocols.messages import (
    KvKept,
    KvLanded,
    PrefillDone,
    PrefillProgress,
    RequestFailed,
    SlotsFreed,
)
from csps.protocols.row_move import RowMoved
from csps.protocols.schema import unpack
from csps.protocols.tokens import TokenDrawn, Tokens
from csps.services.router.kept import KeptReports
from csps.services.router.moves import LiveMove, end_move
from csps.services.router.requests import Requests
from csps.services.router.sequences import LiveSequence, Sequences
from csps.services.router.steps import Steps
from csps.services.scheduling.events import (
    AnyEvent,
    Failed,
    Finished,
    FirstToken,
    Freed,
    Heard,
    Landed,
    Moved,
    StepDone,
    WireError,
)
from csps.services.scheduling.ids import GangId, instance_id
from csps.services.scheduling.turn import wire_error

HEARD_S = 1.0
"""Signs of life of an instance that are closer together are one."""

Tell = Callable[[AnyEvent], None]


class Reports:
    """Reads the notifications of all ranks.

    Args:
        tell: takes events for the scheduler.
        on_landed: told when all of a prompt's KV is there.
        on_moved: told when a row goes on elsewhere.
    """

    def __init__(
        self,
        requests: Requests,
        sequences: Sequences,
        steps: Steps,
        tell: Tell,
        *,
        on_landed: Callable[[Sequence[KvLanded]], None],
        on_moved: Callable[[LiveSequence, LiveMove], None],
    ) -> None:
        self._requests, self._sequences, self._steps = requests, sequences, steps
        self._tell, self._on_landed, self._on_moved = tell, on_landed, on_moved
        self.kept = KeptReports(tell)
        self._heard: dict[tuple[GangId, int], float] = {}
        self._readers: dict[str, Callable[[GangId, GangClient, int, Any], None]] = {
            "prefill_progress": self._prefill_progress,
            "prefill_done": self._prefill_done,
            "landed": self._landed,
            "freed": self._freed,
            "kept": self._kept,
            "moved": self._moved,
            "failed": self._failed,
        }

    def read(self, number: GangId, gang: GangClient, rank: int, method: str, payload: Any) -> None:
        """A notification from a rank of an attached gang.

        Raises:
            ProtocolError: it is none that a router knows.
        """
        self._hear(number, gang.instance_of(rank))
        if method == "tokens":  # thousands a second: before everything else
            for token in unpack(Tokens, payload).each():
                self._token(token)
        elif (reader := self._readers.get(method)) is not None:
            reader(number, gang, rank, payload)
        else:
            raise ProtocolError(f"rank {rank} sent {method}, which a router does not know")

    def forget(self, number: GangId) -> None:
        """The gang is gone."""
        self.kept.forget(number)
        self._heard = {key: at for key, at in self._heard.items() if key[0] != number}

    def _hear(self, number: GangId, instance: int) -> None:
        now = time.monotonic()
        if now - self._heard.get((number, instance), 0.0) >= HEARD_S:
            self._heard[number, instance] = now
            self._tell(Heard(instances=(instance_id(number, instance),)))

    # --- tokens --------------------------------------------------------------------------------

    def _token(self, token: TokenDrawn) -> None:
        sequence = self._sequences.serving(token.rid)
        if sequence is None or sequence.running.ended:
            return
        if sequence.move is not None and token.index > sequence.next_index:
            sequence.move.early[token.index] = token
            return
        if token.index != sequence.next_index:
            error = f"token {token.index} arrived where {sequence.next_index} was due"
            self.fail(sequence, ProtocolError(error))
            return
        first = sequence.next_index == sequence.first_index
        sequence.next_index += 1
        sequence.last_token = token.token
        self._requests.deliver(sequence.running, token)
        if token.finish_reason is not None:
            hashes = sequence.running.answer_hashes if sequence.command.stays else ()
            self._tell(Finished(sequence=sequence.id, drawn=sequence.next_index, hashes=hashes))
            self._sequences.end(sequence)
            return
        if first:
            self._tell(FirstToken(sequence=sequence.id))
            if sequence.command.rides:
                self._requests.handed_over(sequence.running)
        if sequence.move is not None and sequence.next_index in sequence.move.early:
            self._token(sequence.move.early.pop(sequence.next_index))

    def fail(self, sequence: LiveSequence, error: Exception) -> None:
        """The sequence cannot go on; the scheduler decides what becomes of its request."""
        self._tell(
            Failed(
                sequence=sequence.id,
                drawn=sequence.next_index,
                error=wire_error(error),
                retryable=isinstance(error, FaultError),
            )
        )
        self._sequences.end(sequence)

    # --- facts ---------------------------------------------------------------------------------

    def _prefill_progress(self, number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        unpack(PrefillProgress, payload)

    def _prefill_done(self, number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        done = unpack(PrefillDone, payload)
        instance = instance_id(number, gang.instance_of(rank))
        took_s = self._steps.rank_done(done, instance)
        if took_s is not None:
            self._tell(StepDone(step=done.job_id, instance=instance, took_ns=int(took_s * 1e9)))

    def _landed(self, number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        landed = unpack(KvLanded, payload)
        sequence = self._sequences.serving(landed.rid)
        instance = instance_id(number, gang.instance_of(rank))
        if sequence is None:
            return
        sequence.landed.append(landed)
        sequence.running.landed_after(landed.waited)
        if sequence.unlanded.reported(instance, rank):
            self._tell(Landed(sequence=sequence.id, instance=instance, tokens=landed.tokens))
            if not sequence.unlanded:
                self._on_landed(sequence.landed)

    def _freed(self, number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        freed = unpack(SlotsFreed, payload)
        if self.kept.answered(number, gang, rank, freed.rid, 0):
            return
        if (sequence := self._sequences.by_id.get(freed.rid)) is not None:
            self.free(sequence, number, rank)

    def _kept(self, number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        kept = unpack(KvKept, payload)
        self.kept.answered(number, gang, rank, kept.rid, kept.tokens)

    def _moved(self, number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        moved = unpack(RowMoved, payload)
        sequence = self._sequences.serving(moved.rid)
        if sequence is None or (move := sequence.move) is None:
            return
        move.told.append(moved)
        move.untold.reported(instance_id(number, gang.instance_of(rank)), rank)
        if not move.untold:
            end_move(sequence, move)
            self._on_moved(sequence, move)
            self._tell(Moved(sequence=sequence.id))

    def free(self, sequence: LiveSequence, number: GangId, rank: int) -> None:
        """A decode rank holds nothing of the sequence."""
        sequence.leaving = True
        instance = instance_id(number, sequence.decode.instance_of(rank))
        if sequence.unfreed.reported(instance, rank):
            self._tell(Freed(sequence=sequence.id, instance=instance))
        self._sequences.settle(sequence)

    def _failed(self, number: GangId, gang: GangClient, rank: int, payload: Any) -> None:
        failed = unpack(RequestFailed, payload)
        if (sequence := self._sequences.serving(failed.rid)) is not None:
            self.fail(sequence, _error_of(failed))


def error_of(wire: WireError) -> CspsError:
    """The exception that the scheduler means."""
    return error_from_wire({"code": wire.code, "message": wire.message, "data": wire.data})


def _error_of(failed: RequestFailed) -> CspsError:
    wire: dict[str, Any] = {"code": failed.code, "message": failed.message}
    if failed.param is not None:
        wire["data"] = {"message": failed.message, "param": failed.param}
    return error_from_wire(wire)
