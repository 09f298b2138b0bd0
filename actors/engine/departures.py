"""KV on its way from steps to the gang that decodes it, through whichever sender there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from csps.actors.engine.engine import Engine
from csps.actors.engine.step_reports import StepReports
from csps.actors.engine.step_run import SendKv, StepRun
from csps.actors.kv_transfer.delivery import Delivery
from csps.actors.kv_transfer.sender import KvSender
from csps.actors.layout import LocalPiece
from csps.actors.timeline_export import emit_spans
from csps.protocols.errors import TransferError
from csps.protocols.trace_context import asks_for_timeline, attached


class Departures:
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

    def withdraw(self, rid: int) -> None:
        """Nobody wants a sequence any more."""
        if self._sender is not None:
            self._sender.withdraw(rid)

    @contextmanager
    def of(self, run: StepRun) -> Iterator[SendKv]:
        """Takes what a step computes, all of which is posted inside."""
        sender = self._sender
        delivery = Delivery(
            self._engine.pool.slots,
            lambda failure: self._sent(run, delivery, failure),
            self._progress,
            traced=asks_for_timeline(run.job.trace),
        )
        self._leaving.add(run)
        yield partial(_send, sender, delivery)
        if sender is not None:
            sender.finish(delivery)
        delivery.finish()

    def _sent(self, run: StepRun, delivery: Delivery, failure: Exception | None) -> None:
        """Any thread: all that a step had to send has landed, or never will."""
        if failure is not None:
            self._reports.lost(run.job, failure)
        self._leaving.discard(run)
        if delivery.timeline.events:
            with attached(run.job.trace):  # after the job's own span, below the request's
                emit_spans(delivery.timeline.events, rank=self._engine.rank)
        self._left(run)


def _send(
    sender: KvSender | None,
    delivery: Delivery,
    layer: int,
    part: LocalPiece,
    kept_ht: Tensor | None,
) -> None:
    """A lost decode gang fails the step's sequences, not this gang."""
    if sender is None:
        delivery.fail(TransferError("no decode gang is connected"))
    elif not delivery.failed:
        sender.post(delivery, layer, part, kept_ht)
