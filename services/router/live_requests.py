"""Live requests, from submission to the last token, and the sequences that serve them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator

from csps.protocols.core.errors import CspsError, FaultError, ProtocolError, Unauthorized
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.messages import FinishReason, PromptLogprobs, SampledToken
from csps.services.requests.request_handle import (
    ClientTooSlow,
    ElasticEvent,
    RequestHandle,
    UnreadTokens,
)
from csps.services.requests.request_spec import KEY_REVOKED, RequestSpec
from csps.services.router.key_limits import KeyLimiter
from csps.services.router.live_sequences import (
    LiveSequence,
    Members,
    decode_members,
    join_events,
    live_sequence,
)
from csps.services.scheduling.events.commands import Reserve
from csps.services.scheduling.events.events import (
    AnyEvent,
    Failed,
    Finished,
    FirstToken,
    Freed,
    InstanceId,
    RequestCancelled,
    RequestId,
    SequenceId,
    Submitted,
    TenantId,
)
from csps.services.scheduling.state.state import wire_error
from csps.services.telemetry.observer import RequestObserver
from csps.services.telemetry.request_trace import record_spans

_log = logging.getLogger(__name__)


MOST_EVENTS = 32


class QueueWatch:
    """Follows who waits behind whom, and who passes whom."""

    MOST = 1024
    """Starts that are remembered; a request that was passed by more is said to be passed by these.
    """

    def __init__(self) -> None:
        self._started: list[RequestId] = []
        """The latest requests of those that started, in order of admission."""
        self._last: RequestHandle | None = None

    def comes(self, handle: RequestHandle, live: Collection[RequestHandle]) -> None:
        """Note who is before a new request."""
        waiting = [other for other in live if other.state == "queued"]
        handle.line.ahead = len(waiting)
        before = waiting[-1] if waiting else self._last
        if before is not None and not before.ended:
            own = before.spec.api_key.digest == handle.spec.api_key.digest
            handle.line.behind = before.spec.client_request_id if own else None

    def starts(self, handle: RequestHandle) -> None:
        """Note who has passed a request that starts."""
        at = bisect_right(self._started, handle.request_id)
        handle.line.passed = len(self._started) - at
        self._started.insert(at, handle.request_id)
        del self._started[: -self.MOST]
        self._last = handle


class LiveRequests:
    """Owns every request from `submit` until it ends, and every sequence until its slots are free.

    A `RequestHandle` ends however the request does; a `LiveSequence` may outlive it.

    Args:
        observer: receives what happens to requests, for metrics.
        post_event: takes events for the scheduler.
        limiter: counts what API keys use.
        on_ended: called with each admitted request that has ended.
    """

    def __init__(
        self,
        observer: RequestObserver,
        post_event: Callable[[AnyEvent], None],
        limiter: KeyLimiter,
        on_ended: Callable[[RequestHandle], None] = lambda handle: None,
    ) -> None:
        self._observer, self._post_event, self._on_ended = observer, post_event, on_ended
        self._limiter = limiter
        self._live: dict[RequestId, RequestHandle] = {}
        self._queue = QueueWatch()
        self._unread = UnreadTokens()
        self._request_ids = itertools.count(1)
        self.sequences: dict[SequenceId, LiveSequence] = {}
        self.owners: dict[TenantId, str] = {}
        """Names of the tenants that have sent requests."""
        self.elastic: deque[tuple[RequestHandle, ElasticEvent]] = deque(maxlen=MOST_EVENTS)
        """The latest elastic events, for people who look."""
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
        self.owners[spec.api_key.tenant] = spec.api_key.name
        self._queue.comes(handle, self._live.values())
        self._live[handle.request_id] = handle
        self.none_left.clear()
        self._limiter.begin(spec.api_key, int(spec.prompt.size))
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
                tenant=spec.api_key.tenant,
                kv_permille=self._limiter.kv_permille(spec.api_key),
                priority=spec.priority,
                promise=spec.slo.promise,
            )
        )
        return handle

    # --- sequences -----------------------------------------------------------------------------

    def reserve(self, command: Reserve, decode: GangClient) -> LiveSequence:
        """Begin the sequence of a request that the scheduler placed; no rank was asked anything."""
        handle = self._live.get(command.request_id)
        assert handle is not None, f"Reserve for the finished request_id {command.request_id}"
        known = handle.spec.prompt.size + handle.generated_tokens.size
        assert command.message.prompt_tokens <= known, (
            f"Reserve for {command.message.prompt_tokens} tokens of a request with {known}"
        )
        sequence = live_sequence(command, handle, decode)
        assert sequence.id not in self.sequences, f"sequence_id {sequence.id} was used before"
        self.sequences[sequence.id] = sequence
        if sequence.front:
            handle.front_tokens = command.message.prompt_tokens - command.cached
            return sequence
        handle.sequence_id = sequence.id
        handle.front_tokens = min(handle.front_tokens, command.cached)  # it may have been lost
        handle.cached_tokens = command.cached - handle.front_tokens
        handle.placed()
        self._queue.starts(handle)
        return sequence

    def serving(self, sequence_id: SequenceId) -> LiveSequence | None:
        """Return the sequence, or None if it is over or unknown."""
        sequence = self.sequences.get(sequence_id)
        return None if sequence is None or sequence.over else sequence

    def launched(self, handle: RequestHandle) -> None:
        """Record that the request's first step was sent."""
        # A client may leave while the step waits for reservations. The scheduler cancels the step
        # in its next round; a request that had begun here would end a second time.
        if not handle.ended:
            handle.launched()
            self._observer.started(handle)

    def join(self, sequence: LiveSequence) -> None:
        """Record that the gang is told to decode the sequence."""
        sequence.members = decode_members(sequence.placement)
        if sequence.decode.role == "elastic":
            others = self.decoded_on(sequence.decode, beside=sequence)
            self.note(sequence, join_events(sequence, others))
        sequence.handle.handed_over()

    def decoded_on(self, gang: GangClient, *, beside: LiveSequence | None = None) -> set[Members]:
        """Return the members of the sequences that a gang decodes.

        Args:
            beside: a sequence to leave out.
        """
        return {
            sequence.members
            for sequence in self.sequences.values()
            if sequence.decode is gang and not sequence.over and sequence is not beside
            if sequence.members
        }

    def note(self, sequence: LiveSequence, events: Iterable[ElasticEvent]) -> None:
        """Record elastic events of the group that computes or decodes a request."""
        for event in events:
            self.elastic.append((sequence.handle, event))
            sequence.handle.elastic.append(event)
            self._observer.elastic(event)

    def deliver(self, token: SampledToken) -> None:
        """Append a token to its answer; one with a `finish_reason` ends it."""
        sequence = self.serving(token.sequence_id)
        if sequence is None or sequence.handle.ended:
            return
        if sequence.move is not None and token.index > sequence.next_index:
            sequence.move.early[token.index] = token
            return
        known = sequence.handle.prompt_logprobs
        if known is not None and known.missing:
            # Other ranks may still compute log-probabilities, and nothing would wait for them
            # behind a token that is the answer's last.
            sequence.withheld = token
            return
        if token.index != sequence.next_index:
            error = f"token {token.index} arrived, expected token {sequence.next_index}"
            self.fail_sequence(sequence, ProtocolError(error))
            return
        first = sequence.next_index == sequence.first_index
        sequence.next_index += 1
        sequence.last_token = token.token
        handle = sequence.handle
        if (gap_s := handle.deliver(token)) is None:
            self._observer.first_token(handle)
        else:
            self._observer.token(handle, gap_s)
        if token.finish_reason is not None:
            self._finish(handle, token.finish_reason)
            self._post_event(
                Finished(
                    sequence_id=sequence.id,
                    generated_tokens=sequence.next_index,
                    hashes=_retained_hashes(handle, sequence),
                )
            )
            self.end(sequence)
            return
        if handle.too_far_behind:
            # Not here: what follows goes on with the token's sequence.
            asyncio.get_running_loop().call_soon(self._end_slow, handle)
        if first:
            self._post_event(FirstToken(sequence_id=sequence.id))
            if sequence.command.piggybacked:
                handle.handed_over()
                handle.prefill_over.set()
        if sequence.move is not None and sequence.next_index in sequence.move.early:
            self.deliver(sequence.move.early.pop(sequence.next_index))

    def deliver_prompt_logprobs(self, message: PromptLogprobs) -> None:
        """Add log-probabilities to those of a prompt; the last ones let its first token pass.

        Raises:
            ProtocolError: the message does not fit the prompt.
        """
        sequence = self.serving(message.sequence_id)
        if sequence is None or (known := sequence.handle.prompt_logprobs) is None:
            return
        known.add(message)
        if not known.missing and (token := sequence.withheld) is not None:
            sequence.withheld = None
            self.deliver(token)

    def fail_sequence(self, sequence: LiveSequence, error: Exception) -> None:
        """End a sequence with an error; the scheduler retries or fails its request."""
        _log.debug("sequence_id %d failed: %s", sequence.id, error)
        self._post_event(
            Failed(
                sequence_id=sequence.id,
                generated_tokens=sequence.next_index,
                error=wire_error(error),
                retryable=isinstance(error, FaultError),
            )
        )
        self.end(sequence)

    def end(self, sequence: LiveSequence) -> None:
        """End the sequence's service to its request. Idempotent."""
        sequence.over = True
        self._forget_freed(sequence)

    def free(self, sequence: LiveSequence, instance: InstanceId, rank: int) -> None:
        """Record that a decode rank freed its slots of the sequence."""
        sequence.decode_ended = True
        if sequence.pending_free.reported(instance, rank):
            self._post_event(Freed(sequence_id=sequence.id, instance=instance))
        self._forget_freed(sequence)

    def drop(self, gang: GangClient) -> None:
        """End all sequences of a lost decode gang; nothing of them is left on its ranks."""
        for sequence in [known for known in self.sequences.values() if known.decode is gang]:
            sequence.pending_free.clear()
            self.end(sequence)

    def _forget_freed(self, sequence: LiveSequence) -> None:
        if sequence.over and not sequence.pending_free:
            self.sequences.pop(sequence.id, None)

    # --- ends of requests ----------------------------------------------------------------------

    def restart(self, handle: RequestHandle, error: CspsError) -> None:
        """Queue a request again after its attempt was lost."""
        record_spans(handle)  # before its times are those of the next attempt
        handle.begin_attempt()
        self._observer.retried(handle, error)

    def refuse(self, handle: RequestHandle, error: CspsError) -> None:
        """End a request that was not admitted: the queue filled up in the same scheduling round."""
        handle.fail(error)
        self._remove(handle)
        self._observer.refused(error, handle.spec.slo)

    def fail(self, handle: RequestHandle, error: CspsError) -> None:
        """End a request with an error, before or within its answer."""
        handle.fail(error)
        self._remove(handle)
        self._on_ended(handle)
        self._observer.failed(handle, error)

    def revoke(self, handle: RequestHandle) -> None:
        """End a request whose API key was revoked."""
        self._post_cancelled(handle)
        self.fail(handle, Unauthorized(KEY_REVOKED))

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
        self._post_cancelled(handle)
        self.fail(
            handle, ClientTooSlow(f"The answer is read too slowly: {unread} tokens were unread.")
        )

    def _post_cancelled(self, handle: RequestHandle) -> None:
        """Tell the scheduler that a request was cancelled."""
        sequence = None if handle.sequence_id is None else self.serving(handle.sequence_id)
        self._post_event(
            RequestCancelled(
                request_id=handle.request_id,
                generated_tokens=handle.timings.tokens,
                hashes=_retained_hashes(handle, sequence),
            )
        )

    def _cancel(self, handle: RequestHandle) -> None:
        self._post_cancelled(handle)
        self._finish(handle, handle.finish_reason or "cancelled")

    def _finish(self, handle: RequestHandle, reason: FinishReason) -> None:
        handle.finish(reason)
        self._remove(handle)
        self._on_ended(handle)
        self._observer.finished(handle, reason)

    def _remove(self, handle: RequestHandle) -> None:
        """Drop an ended request and record its spans."""
        del self._live[handle.request_id]
        self._limiter.end(handle.spec.api_key, handle.timings.tokens)
        handle.close_timings(time.monotonic())
        record_spans(handle)
        if not self._live:
            self.none_left.set()


def _retained_hashes(handle: RequestHandle, sequence: LiveSequence | None) -> tuple[bytes, ...]:
    """Return the hashes of the answer's blocks, if the sequence's KV is retained."""
    retained = sequence is not None and sequence.command.message.retain
    return handle.answer_hashes if retained else ()
