"""What a rank tells the router of its steps.

KV on its way from steps to the gang that decodes it, through whichever sender there is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from csps.actors.attention.base.engine import Engine
from csps.actors.comm.layout import LocalChunk
from csps.actors.engine.move_run import MoveRun
from csps.actors.engine.step_run import SendKv, StepRun
from csps.actors.engine.step_trace import emit_spans
from csps.actors.kv_transfer.sender import KvSender
from csps.actors.kv_transfer.transfer_tracker import TransferTracker
from csps.actors.sampling.notifications import Notify, request_failed
from csps.protocols.core.errors import CspsError, TransferError
from csps.protocols.gang.messages import (
    KvRetained,
    PrefillDone,
    SampledToken,
    SampledTokens,
    SlotsFreed,
)
from csps.protocols.gang.step_messages import PrefillStep
from csps.protocols.rpc.trace_context import asks_for_timeline, attached

_log = logging.getLogger(__name__)


class StepReports:
    """Of one rank. Any thread may call anything."""

    def __init__(self, notify: Notify, rank: int) -> None:
        self._notify, self._rank = notify, rank

    def report_sampled(self, tokens: Sequence[SampledToken]) -> None:
        """A step that is about to end has drawn these."""
        if tokens:
            self._notify("tokens", SampledTokens.of(tokens))

    def failed(self, sequence_id: int, error: CspsError) -> None:
        """A sequence cannot go on."""
        self._notify("failed", request_failed(sequence_id, self._rank, error))

    def lost(self, step: PrefillStep, why: Exception) -> None:
        """A step's KV did not reach the gang that decodes it."""
        _log.warning("KV of step %d was not sent: %s", step.step_id, why)
        for chunk in step.chunks:
            message = "the decode gang was lost while KV was being sent"
            self.failed(chunk.sequence_id, TransferError(message))

    def freed(self, sequence_id: int) -> None:
        """Nothing of a sequence is held here any more."""
        self._notify("freed", SlotsFreed(sequence_id=sequence_id, rank=self._rank))

    def retained(self, sequence_id: int, tokens: int) -> None:
        """How much is left here of a sequence that is over."""
        if tokens:
            self._notify(
                "retained", KvRetained(sequence_id=sequence_id, rank=self._rank, tokens=tokens)
            )
        else:
            self.freed(sequence_id)

    def moved(self, move: MoveRun) -> None:
        """A row goes on at its new place."""
        self._notify("moved", move.moved())

    def done(self, step: PrefillStep, run: StepRun | None) -> None:
        """A step is over here.

        Args:
            run: what it has cost; None if it never began.
        """
        clock = run.clock if run is not None else None
        placing = run.placing if run is not None else None
        self._notify(
            "prefill_done",
            PrefillDone(
                step_id=step.step_id,
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


class OutgoingTransfers:
    """Of the steps of one rank: a step is over when all of its KV has left.

    Args:
        progress: told that KV has landed, or waits for its turn.
        left: told of each step that is over, by whichever thread finds it so.
    """

    def __init__(
        self,
        engine: Engine,
        reports: StepReports,
        *,
        progress: Callable[[], None],
        left: Callable[[StepRun], None],
    ) -> None:
        self._engine, self._reports = engine, reports
        self._progress, self._left = progress, left
        self._sender: KvSender | None = None
        self._leaving: set[StepRun] = set()

    def __len__(self) -> int:
        """Steps that have begun and are not over."""
        return len(self._leaving)

    def use(self, sender: KvSender | None) -> None:
        """Send KV through it from the next step on."""
        self._sender = sender

    def cancel(self, sequence_id: int) -> None:
        """Nobody wants a sequence any more."""
        if self._sender is not None:
            self._sender.cancel(sequence_id)

    @contextmanager
    def of(self, run: StepRun) -> Iterator[SendKv]:
        """Takes what a step computes, all of which is posted inside."""
        sender = self._sender
        tracker = TransferTracker(
            self._engine.pool.slots,
            lambda failure: self._sent(run, tracker, failure),
            self._progress,
            traced=asks_for_timeline(run.step.trace),
        )
        self._leaving.add(run)
        yield partial(_send, sender, tracker)
        if sender is not None:
            sender.finish(tracker)
        tracker.finish()

    def _sent(self, run: StepRun, tracker: TransferTracker, failure: Exception | None) -> None:
        """Any thread: all that a step had to send has landed, or never will."""
        if failure is not None:
            self._reports.lost(run.step, failure)
        self._leaving.discard(run)
        if tracker.timeline.events:
            with attached(run.step.trace):  # after the job's own span, below the request's
                emit_spans(tracker.timeline.events, rank=self._engine.rank)
        self._left(run)


def _send(
    sender: KvSender | None,
    tracker: TransferTracker,
    layer: int,
    part: LocalChunk,
    kept_ht: Tensor | None,
) -> None:
    """A lost decode gang fails the step's sequences, not this gang."""
    if sender is None:
        tracker.fail(TransferError("no decode gang is connected"))
    elif not tracker.failed:
        sender.post(tracker, layer, part, kept_ht)
