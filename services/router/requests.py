"""The live requests: from their submission to their last token, as the HTTP layer sees them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator

from csps.protocols.errors import CspsError
from csps.protocols.tokens import FinishReason, TokenDrawn
from csps.services.router.generation import Generation
from csps.services.router.running import Running
from csps.services.router.sequences import LiveSequence
from csps.services.scheduling.events import AnyEvent, Cancelled, Submitted
from csps.services.scheduling.ids import RequestId
from csps.services.telemetry.elastic_metrics import ElasticEvent
from csps.services.telemetry.observer import Observer
from csps.services.telemetry.request_spans import record_spans


class Requests:
    """Owns every `Running` from `submit` until it has ended, in whichever way.

    Args:
        tell: takes events for the scheduler.
        answered: is told of first tokens, for what they teach about times.
    """

    def __init__(
        self,
        observer: Observer,
        tell: Callable[[AnyEvent], None],
        answered: Callable[[Running], None],
    ) -> None:
        self._observer, self._tell, self._answered = observer, tell, answered
        self._live: dict[RequestId, Running] = {}
        self._numbers = itertools.count(1)
        self.none_left = asyncio.Event()
        """Set while there is no live request."""
        self.none_left.set()

    def __iter__(self) -> Iterator[Running]:
        return iter(list(self._live.values()))

    def __len__(self) -> int:
        return len(self._live)

    def get(self, number: RequestId) -> Running | None:
        """The request, unless it has ended."""
        return self._live.get(number)

    # --- their beginning -----------------------------------------------------------------------

    def submit(self, generation: Generation) -> Running:
        """Admit a request; its tokens come by iterating over what is returned."""
        running = Running(generation, number=next(self._numbers), on_cancel=self._cancel)
        self._live[running.number] = running
        self.none_left.clear()
        self._observer.submitted(running)
        deadline_s = generation.deadline_s
        self._tell(
            Submitted(
                request=running.number,
                prompt_tokens=int(generation.prompt.size),
                output_tokens=generation.sampling.max_tokens,
                cls=generation.cls.key,
                deadline_ns=None
                if deadline_s is None
                else time.monotonic_ns() + int(deadline_s * 1e9),
                hashes=generation.hashes,
            )
        )
        return running

    # --- on their way --------------------------------------------------------------------------

    def placed(self, running: Running) -> None:
        """The scheduler has found a place; slots are being reserved."""
        running.state = "reserving"
        running.timings.attempts += 1
        running.marks.placed = time.monotonic()

    def launched(self, running: Running) -> None:
        """The first step was sent."""
        running.launched_at(time.monotonic())
        self._observer.started(running)

    def deliver(self, running: Running, token: TokenDrawn) -> None:
        """Hand a token to the reader; with a `finish_reason`, the last."""
        now, marks = time.monotonic(), running.marks
        last, marks.last_token = marks.last_token, now
        if running.state == "prefill":
            running.prefilled_at(now)
        running.deliver(token)
        if last is None:
            running.first_token_at(now)
            self._observer.first_token(running)
            self._answered(running)
        else:
            self._observer.token(running, now - last)
        if token.finish_reason is not None:
            self._finish(running, token.finish_reason)

    def handed_over(self, running: Running) -> None:
        """All KV is where it decodes, and decode goes on from here."""
        running.state = "decoding"
        running.handed_over_at(time.monotonic())

    def changed(self, sequence: LiveSequence, event: ElasticEvent) -> None:
        """Something has happened to the group that computes or decodes a request."""
        sequence.running.elastic.append(event)
        self._observer.elastic(event)

    def restart(self, running: Running, error: CspsError) -> None:
        """An attempt was lost, the request waits again."""
        running.begin_attempt()
        self._observer.retried(running, error)

    # --- their ends ----------------------------------------------------------------------------

    def refuse(self, running: Running, error: CspsError) -> None:
        """It was not admitted after all: the line has filled up within this turn of the loop."""
        running.fail(error)
        self._leave(running)
        self._observer.refused(error, running.generation.slo)

    def fail(self, running: Running, error: CspsError) -> None:
        """There will be no answer, or no rest of it."""
        running.fail(error)
        self._leave(running)
        self._observer.failed(running, error)

    def _cancel(self, running: Running) -> None:
        self._tell(Cancelled(request=running.number))
        self._finish(running, running.finish_reason or "cancelled")

    def _finish(self, running: Running, reason: FinishReason) -> None:
        running.finish(reason)
        self._leave(running)
        self._observer.finished(running, reason)

    def _leave(self, running: Running) -> None:
        """The request has ended: nothing of it may stay behind here."""
        del self._live[running.number]
        running.close_timings(time.monotonic())
        record_spans(running)
        if not self._live:
            self.none_left.set()
