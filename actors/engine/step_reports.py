"""What a rank tells the router of its steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from csps.actors.announce import Notify, request_failed
from csps.actors.engine.move_run import MoveRun
from csps.actors.engine.step_run import StepRun
from csps.protocols.errors import CspsError, TransferError
from csps.protocols.messages import KvKept, PrefillDone, SlotsFreed
from csps.protocols.prefill_job import PrefillJob
from csps.protocols.tokens import TokenDrawn, Tokens

_log = logging.getLogger(__name__)


class StepReports:
    """Of one rank. Any thread may call anything."""

    def __init__(self, notify: Notify, rank: int) -> None:
        self._notify, self._rank = notify, rank

    def drawn(self, tokens: Sequence[TokenDrawn]) -> None:
        """A step that is about to end has drawn these."""
        if tokens:
            self._notify("tokens", Tokens.of(tokens))

    def failed(self, rid: int, error: CspsError) -> None:
        """A sequence cannot go on."""
        self._notify("failed", request_failed(rid, self._rank, error))

    def lost(self, job: PrefillJob, why: Exception) -> None:
        """A step's KV did not reach the gang that decodes it."""
        _log.warning("KV of step %d was not sent: %s", job.job_id, why)
        for piece in job.pieces:
            message = "the decode gang was lost while KV was being sent"
            self.failed(piece.rid, TransferError(message))

    def freed(self, rid: int) -> None:
        """Nothing of a sequence is held here any more."""
        self._notify("freed", SlotsFreed(rid=rid, rank=self._rank))

    def held(self, rid: int, tokens: int) -> None:
        """How much is left here of a sequence that is over."""
        if tokens:
            self._notify("kept", KvKept(rid=rid, rank=self._rank, tokens=tokens))
        else:
            self.freed(rid)

    def moved(self, move: MoveRun) -> None:
        """A row goes on at its new place."""
        self._notify("moved", move.moved())

    def done(self, job: PrefillJob, run: StepRun | None) -> None:
        """A step is over here.

        Args:
            run: what it has cost; None if it never began.
        """
        clock = run.clock if run is not None else None
        placing = run.placing if run is not None else None
        self._notify(
            "prefill_done",
            PrefillDone(
                job_id=job.job_id,
                rank=self._rank,
                cancelled=run is None or run.cancelled,
                queue_s=clock.queue_s if clock else 0.0,
                compute_s=clock.compute_s if clock else 0.0,
                communication_s=clock.communication_s if clock else 0.0,
                exchange_s=clock.exchange_s if clock else 0.0,
                transfer_s=time.monotonic() - clock.finished if clock else 0.0,
                yielded_s=clock.yielded_s if clock else 0.0,
                bytes_sent=run.sent.by_rank if run is not None else (),
                placed_bytes=placing.sent_bytes if placing else 0,
                placing_s=placing.seconds if placing else 0.0,
                placing_stored_s=placing.storing.seconds if placing else 0.0,
                placing_waited_s=placing.waiting.seconds if placing else 0.0,
                last_layer_s=clock.last_layer_s if clock else 0.0,
            ),
        )
