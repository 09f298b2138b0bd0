"""What is told of requests, sequences and steps, and what it leads to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from csps.protocols.errors import ProtocolError
from csps.services.scheduling import events as ev
from csps.services.scheduling.gangs import Gangs
from csps.services.scheduling.prefix.index import PrefixIndex
from csps.services.scheduling.requests import Requests
from csps.services.scheduling.retries import Retries
from csps.services.scheduling.sequences import Sequences
from csps.services.scheduling.steps import Steps
from csps.services.scheduling.timers import Timers
from csps.services.scheduling.turn import Turn


class RequestEvents:
    """Handlers by the kind of event. What is told of something that is over is ignored, for it may
    have been on its way when the end was decided."""

    def __init__(
        self,
        *,
        turn: Turn,
        timers: Timers,
        gangs: Gangs,
        requests: Requests,
        sequences: Sequences,
        steps: Steps,
        retries: Retries,
        prefix: PrefixIndex,
    ) -> None:
        self._turn, self._timers, self._gangs = turn, timers, gangs
        self._requests, self._sequences = requests, sequences
        self._steps, self._retries, self._prefix = steps, retries, prefix
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            ev.Submitted: requests.submit,
            ev.Cancelled: self._cancelled,
            ev.FirstToken: self._first_token,
            ev.Landed: self._landed,
            ev.Moved: self._moved,
            ev.Freed: self._freed,
            ev.Kept: self._kept,
            ev.Finished: self._finished,
            ev.Failed: self._failed,
            ev.Progress: self._progress,
            ev.StepDone: self._step_done,
        }

    def _cancelled(self, event: ev.Cancelled) -> None:
        if (request := self._requests.live.get(event.request)) is not None:
            self._requests.end(request)

    def _first_token(self, event: ev.FirstToken) -> None:
        sequence = self._sequences.serving(event.sequence)
        if sequence is None:
            if (closed := self._sequences.closed_now.get(event.sequence)) is not None:
                self._retries.delivered(closed.id, closed.drawn_before + 1)
            return
        self._sequences.first_token(sequence)
        if sequence.unlanded:
            late_ns = self._turn.now_ns + self._retries.landing_deadline_ns(sequence)
            late = partial(self._retries.landing_is_late, sequence)
            sequence.landing_timer = self._timers.at(late_ns, late)

    def _landed(self, event: ev.Landed) -> None:
        self._gangs.hear(event.instance)
        if (sequence := self._sequences.serving(event.sequence)) is not None:
            wrong = self._sequences.landed(sequence, event.instance, event.tokens)
            if wrong is not None:
                self._retries.broken(sequence, ProtocolError(wrong))

    def _moved(self, event: ev.Moved) -> None:
        if (sequence := self._sequences.by_id.get(event.sequence)) is not None:
            self._sequences.moved(sequence)

    def _freed(self, event: ev.Freed) -> None:
        self._gangs.hear(event.instance)
        if (sequence := self._sequences.by_id.get(event.sequence)) is not None:
            self._sequences.freed(sequence, event.instance)

    def _kept(self, event: ev.Kept) -> None:
        self._gangs.hear(event.instance)
        self._prefix.kept(event)

    def _finished(self, event: ev.Finished) -> None:
        if (sequence := self._sequences.serving(event.sequence)) is not None:
            self._sequences.finish(sequence, event.drawn, event.hashes)
            self._requests.end(sequence.request)
        else:
            self._retries.finished_late(event.sequence)

    def _failed(self, event: ev.Failed) -> None:
        self._retries.delivered(event.sequence, event.drawn)
        if (sequence := self._sequences.serving(event.sequence)) is not None:
            self._retries.failed(sequence, event.error, retryable=event.retryable)

    def _progress(self, event: ev.Progress) -> None:
        for number, drawn in event.drawn:
            self._retries.delivered(number, drawn)

    def _step_done(self, event: ev.StepDone) -> None:
        self._gangs.hear(event.instance)
        step = self._steps.by_id.get(event.step)
        if step is None or event.instance not in step.undone:
            return
        instance = self._gangs.instances[event.instance]
        computed, leaving = self._steps.done(step, instance, event.took_ns)
        for sequence in leaving:
            self._sequences.left(sequence)
        for sequence in computed:
            self._sequences.computed(sequence)
            if not sequence.over and sequence.first_token_ns is None:
                # The rank that draws says so before it reports, so no token is on its way.
                error = ProtocolError("a prefill step ended without its first token")
                self._retries.broken(sequence, error)
