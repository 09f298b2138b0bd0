"""Live requests, from submission to the last token."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator

from csps.protocols.core.errors import CspsError
from csps.protocols.gang.messages import FinishReason, SampledToken
from csps.services.requests.elastic_event import ElasticEvent
from csps.services.requests.request_handle import ClientTooSlow, RequestHandle, UnreadTokens
from csps.services.requests.request_spec import RequestSpec
from csps.services.router.live_sequences import LiveSequence
from csps.services.scheduling.events.events import AnyEvent, RequestCancelled, RequestId, Submitted
from csps.services.telemetry.observer import RequestObserver
from csps.services.telemetry.request_trace import record_spans

_log = logging.getLogger(__name__)


class LiveRequests:
    """Owns every `RequestHandle` from `submit` until the request ends, however it ends.

    Args:
        observer: receives what happens to requests, for metrics.
        post_event: takes events for the scheduler.
        on_first_token: called with the handle at the answer's first token, to learn latencies.
    """

    def __init__(
        self,
        observer: RequestObserver,
        post_event: Callable[[AnyEvent], None],
        on_first_token: Callable[[RequestHandle], None],
    ) -> None:
        self._observer, self._post_event = observer, post_event
        self._on_first_token = on_first_token
        self._live: dict[RequestId, RequestHandle] = {}
        self._unread = UnreadTokens()
        self._request_ids = itertools.count(1)
        self.none_left = asyncio.Event()
        """Set while no request is live."""
        self.none_left.set()

    def __iter__(self) -> Iterator[RequestHandle]:
        return iter(list(self._live.values()))

    def __len__(self) -> int:
        return len(self._live)

    def get(self, request_id: RequestId) -> RequestHandle | None:
        """Return the request, or None once it has ended."""
        return self._live.get(request_id)

    # --- submission ----------------------------------------------------------------------------

    def submit(self, spec: RequestSpec) -> RequestHandle:
        """Register a request and queue it at the scheduler."""
        handle = RequestHandle(
            spec,
            request_id=next(self._request_ids),
            on_cancel=self._cancel,
            unread_by_all=self._unread,
        )
        self._live[handle.request_id] = handle
        self.none_left.clear()
        self._observer.submitted(handle)
        deadline_s = spec.deadline_s
        self._post_event(
            Submitted(
                request_id=handle.request_id,
                prompt_tokens=int(spec.prompt.size),
                output_tokens=spec.sampling.max_tokens,
                cls=spec.cls.key,
                deadline_ns=None
                if deadline_s is None
                else time.monotonic_ns() + int(deadline_s * 1e9),
                hashes=spec.hashes,
            )
        )
        return handle

    # --- progress ------------------------------------------------------------------------------

    def placed(self, handle: RequestHandle) -> None:
        """Record that the scheduler placed the request; decode slots are being reserved."""
        handle.state = "reserving"
        handle.timings.attempts += 1
        handle.marks.placed = time.monotonic()

    def launched(self, handle: RequestHandle) -> None:
        """Record that the request's first step was sent."""
        handle.launched_at(time.monotonic())
        self._observer.started(handle)

    def deliver(self, handle: RequestHandle, token: SampledToken) -> None:
        """Append a token to the answer; one with a `finish_reason` ends it."""
        now, marks = time.monotonic(), handle.marks
        last, marks.last_token = marks.last_token, now
        if handle.state == "prefill":
            handle.prefilled_at(now)
        handle.deliver(token)
        if last is None:
            handle.first_token_at(now)
            self._observer.first_token(handle)
            self._on_first_token(handle)
        else:
            self._observer.token(handle, now - last)
        if token.finish_reason is not None:
            self._finish(handle, token.finish_reason)
        elif handle.too_far_behind:
            # Not here: the caller goes on with the token's sequence.
            asyncio.get_running_loop().call_soon(self._end_slow, handle)

    def handed_over(self, handle: RequestHandle) -> None:
        """Record that all KV was received and the decode gang was told to decode."""
        handle.state = "decoding"
        handle.handed_over_at(time.monotonic())

    def elastic_changed(self, sequence: LiveSequence, event: ElasticEvent) -> None:
        """Record an elastic event of the group that computes or decodes a request."""
        sequence.handle.elastic.append(event)
        self._observer.elastic(event)

    def restart(self, handle: RequestHandle, error: CspsError) -> None:
        """Queue a request again after its attempt was lost."""
        handle.begin_attempt()
        self._observer.retried(handle, error)

    # --- ends ----------------------------------------------------------------------------------

    def refuse(self, handle: RequestHandle, error: CspsError) -> None:
        """End a request that was not admitted: the queue filled up in the same scheduling round."""
        handle.fail(error)
        self._remove(handle)
        self._observer.refused(error, handle.spec.slo)

    def fail(self, handle: RequestHandle, error: CspsError) -> None:
        """End a request with an error, before or within its answer."""
        handle.fail(error)
        self._remove(handle)
        self._observer.failed(handle, error)

    def _end_slow(self, handle: RequestHandle) -> None:
        """End a request whose client reads too slowly; nothing else would bound its tokens."""
        if handle.ended:
            return
        unread = handle.unread_tokens
        _log.warning(
            "request %s is cancelled: its client has left %d tokens unread",
            handle.spec.client_request_id, unread,
        )  # fmt: skip
        handle.drop_unread()
        self._post_event(RequestCancelled(request_id=handle.request_id))
        self.fail(
            handle, ClientTooSlow(f"The answer is read too slowly: {unread} tokens were unread.")
        )

    def _cancel(self, handle: RequestHandle) -> None:
        self._post_event(RequestCancelled(request_id=handle.request_id))
        self._finish(handle, handle.finish_reason or "cancelled")

    def _finish(self, handle: RequestHandle, reason: FinishReason) -> None:
        handle.finish(reason)
        self._remove(handle)
        self._observer.finished(handle, reason)

    def _remove(self, handle: RequestHandle) -> None:
        """Drop an ended request and record its spans."""
        del self._live[handle.request_id]
        handle.close_timings(time.monotonic())
        record_spans(handle)
        if not self._live:
            self.none_left.set()
