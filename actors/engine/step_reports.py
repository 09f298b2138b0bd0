"""Reports of a rank's steps to the router, and KV transfers that belong to steps.

A step is over when it is computed and all of its KV has been sent to the gang that decodes it.
`ProgressReport` is a periodic heartbeat of a step: one without it counts as hung.
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
from csps.actors.kv_transfer.sender import KvSender
from csps.actors.kv_transfer.transfer_tracker import TransferTracker
from csps.actors.timing.timeline import emit_spans, step_trace
from csps.protocols.core.errors import CspsError, TransferError
from csps.protocols.gang.messages import (
    KvRetained,
    Notify,
    PrefillDone,
    PrefillProgress,
    PromptLogprobs,
    RequestFailed,
    SampledToken,
    SampledTokens,
    SlotsFreed,
)
from csps.protocols.gang.step_messages import PrefillStep
from csps.protocols.rpc.trace_context import asks_for_timeline, attached

_log = logging.getLogger(__name__)


REPORT_S = 1.0
"""Minimum seconds between two reports. Work between two yield points may take longer; the router's
deadline is far above it."""


class ProgressReport:
    """Progress of one step on a rank, or of piggybacked prompts, reported now and then. Any thread
    may call it; two at once may both report, which counts as one."""

    def __init__(self, notify: Notify, *, rank: int, step_id: int | None = None) -> None:
        self._notify = notify
        self._rank, self._step_id = rank, step_id
        self._computed = 0.0
        self._last_report = time.monotonic()  # short steps have nothing to report before their end

    def step(self, computed: float | None = None) -> None:
        """Note progress: a yield point was reached, KV was sent, or a piggybacked chunk was
        computed.

        Args:
            computed: fraction of the step's yield points that were passed; None: as before.
        """
        if computed is not None:
            self._computed = computed
        now = time.monotonic()
        if now - self._last_report >= REPORT_S:
            self._last_report = now
            message = PrefillProgress(
                rank=self._rank, step_id=self._step_id, computed=self._computed
            )
            self._notify("prefill_progress", message)


class StepReports:
    """Notifications of one rank. Any thread may call any method."""

    def __init__(self, notify: Notify, rank: int) -> None:
        self._notify, self._rank = notify, rank

    def report_sampled(self, tokens: Sequence[SampledToken]) -> None:
        """Report the first tokens that a step has sampled."""
        if tokens:
            self._notify("tokens", SampledTokens.of(tokens))

    def report_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Report log-probabilities of some of a prompt's tokens."""
        self._notify("prompt_logprobs", logprobs)

    def failed(self, sequence_id: int, error: CspsError) -> None:
        """Report that a sequence failed."""
        self._notify("failed", RequestFailed.of(sequence_id, self._rank, error))

    def lost(self, step: PrefillStep, why: Exception) -> None:
        """Report that a step's KV did not reach the gang that decodes it."""
        _log.warning("rank %d: KV of step %d was not sent: %s", self._rank, step.step_id, why)
        for chunk in step.chunks:
            message = "the decode gang was lost while KV was being sent"
            self.failed(chunk.sequence_id, TransferError(message))

    def freed(self, sequence_id: int) -> None:
        """Report that nothing of a sequence is left here."""
        self._notify("freed", SlotsFreed(sequence_id=sequence_id, rank=self._rank))

    def retained(self, sequence_id: int, tokens: int) -> None:
        """Report how many tokens of a finished sequence are left here."""
        if tokens:
            self._notify(
                "retained", KvRetained(sequence_id=sequence_id, rank=self._rank, tokens=tokens)
            )
        else:
            self.freed(sequence_id)

    def moved(self, move: MoveRun) -> None:
        """Report that a sequence continues at its new place."""
        self._notify("moved", move.moved())

    def done(self, step: PrefillStep, run: StepRun | None) -> None:
        """Report that a step is over here.

        Args:
            run: the step's run with its costs; None if it never began.
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
                dropped_mass=run.dropped_mass if run is not None else (),
            ),
        )


class OutgoingTransfers:
    """KV transfers of one rank's steps to the decode gang.

    Args:
        on_sent: called with each step whose KV was sent, from any thread.
    """

    def __init__(
        self,
        engine: Engine,
        reports: StepReports,
        *,
        on_sent: Callable[[StepRun], None],
    ) -> None:
        self._engine, self._reports = engine, reports
        self._on_sent = on_sent
        self._sender: KvSender | None = None
        self._unsent: set[StepRun] = set()

    def __len__(self) -> int:
        """Return the number of steps that have begun and are not over."""
        return len(self._unsent)

    def use(self, sender: KvSender | None) -> None:
        """Send KV through this sender from the next step on; None if no decode gang is
        connected."""
        self._sender = sender

    def cancel(self, sequence_id: int) -> None:
        """Stop sending a sequence."""
        if self._sender is not None:
            self._sender.cancel(sequence_id)

    @contextmanager
    def of(self, run: StepRun) -> Iterator[SendKv]:
        """Open the transfer of a step and yield the function that sends its KV, layer by layer."""
        sender = self._sender
        tracker = TransferTracker(
            self._engine.pool.slots,
            lambda failure: self._sent(run, tracker, failure),
            run.progress,
            traced=asks_for_timeline(run.step.trace),
        )
        self._unsent.add(run)
        yield partial(_send, sender, tracker)
        if sender is not None:
            sender.finish(tracker)
        tracker.finish()

    def _sent(self, run: StepRun, tracker: TransferTracker, failure: Exception | None) -> None:
        """Finish a step of which all KV was received, or never will be. Called from any thread."""
        if failure is not None:
            self._reports.lost(run.step, failure)
        self._unsent.discard(run)
        if tracker.timeline.events:
            with attached(step_trace(run.step)):  # after the step's own span, beside it
                emit_spans(tracker.timeline.events, rank=self._engine.rank)
        self._on_sent(run)


def _send(
    sender: KvSender | None,
    tracker: TransferTracker,
    layer: int,
    part: LocalChunk,
    kept_ht: Tensor | None,
) -> None:
    """Send one layer's KV. A lost decode gang fails the step's sequences, not this gang."""
    if sender is None:
        tracker.fail(TransferError("no decode gang is connected"))
    elif not tracker.failed:
        sender.post(tracker, layer, part, kept_ht)
