"""A submitted request: its output stream, its state, and how long it was in each state.

The HTTP layer iterates a `RequestHandle` for tokens and leaves it to cancel. The router reports
progress through the methods in the second half of the class.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.util.types import AttributeValue

from csps.protocols.attention.plan import AttentionPlan
from csps.protocols.core.errors import RequestError
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.messages import DroppedMass, FinishReason, PrefillDone, SampledToken
from csps.protocols.rpc import trace_context
from csps.services.requests.prompt_logprobs import KnownPromptLogprobs
from csps.services.requests.request_spec import RequestSpec

ElasticEventKind = Literal["scale_down", "scale_up", "migrate", "remaster", "merge", "preempt"]


@dataclass(frozen=True, kw_only=True)
class ElasticEvent:
    """One change of a group, as the router observed it. Times are monotonic, in seconds.

    scale_down  a prompt was computed by more instances than store its KV, or a decoding sequence
                moved and left instances of its group without decode work
    scale_up    a joining sequence has answer slots on instances that hold none of its prompt, or a
                decoding sequence moved to instances that decoded nothing before
    migrate     KV of a decoding sequence moved
    remaster    another instance samples a sequence's tokens; no KV moved
    merge       a sequence that joined or moved makes decode groups iterate together
    preempt     a prompt was computed on decoding instances, whose decode iterations ran in between
    """

    kind: ElasticEventKind
    began: float
    ended: float
    seconds: float = 0.0
    """Cost in seconds on the rank where it cost most."""
    sent_bytes: int = 0
    tokens: int = 0
    """Tokens whose KV was moved."""

    @property
    def attributes(self) -> Mapping[str, AttributeValue]:
        """Return the attributes of the event's span."""
        return {
            "csps.elastic.seconds": self.seconds,
            "csps.elastic.bytes": self.sent_bytes,
            "csps.elastic.tokens": self.tokens,
        }


@dataclass(kw_only=True)
class Timings:
    """Seconds that the last attempt spent in each state; None for a state not reached.

    `ttft_s` and `total_s` count from submission, over all attempts.
    """

    queue_s: float | None = None
    """Time until the scheduler placed the request."""
    plan_s: float | None = None
    """Time from placement until the first step was sent, while decode slots were reserved."""
    prefill_s: float | None = None
    """Time from sending the first step until prefill sampled a token."""
    transfer_s: float | None = None
    """Time from that token until all KV was received: the part of the transfer that delays
    decode."""
    transfer_wait_s: float | None = None
    """Longest time that KV waited for a transfer slot of a decode rank."""
    decode_s: float | None = None
    """Time from the hand-over to decode until the last token."""
    ttft_s: float | None = None
    total_s: float | None = None
    rank_queue_s: float = 0.0
    """Queueing on the slowest prefill rank, as the rank reported it; likewise the next fields."""
    compute_s: float = 0.0
    communication_s: float = 0.0
    """Time spent waiting for exchanges inside the prefill group."""
    exchange_s: float = 0.0
    """Time during which exchanges were in progress, whether or not computation hid them."""
    hidden_communication: float | None = None
    """Hidden communication / total communication over all ranks; None without any."""
    rank_transfer_s: float = 0.0
    yielded_s: float = 0.0
    tokens: int = 0
    attempts: int = 0

    def add_figures(self, figures: Sequence[PrefillDone]) -> None:
        """Store what the ranks of a prefill group measured."""
        self.rank_queue_s = max(figure.queue_s for figure in figures)
        self.compute_s = max(figure.compute_s for figure in figures)
        self.communication_s = max(figure.communication_s for figure in figures)
        self.exchange_s = max(figure.exchange_s for figure in figures)
        self.hidden_communication = _hidden(figures)
        self.rank_transfer_s = max(figure.transfer_s for figure in figures)
        self.yielded_s = max(figure.yielded_s for figure in figures)


def _hidden(figures: Sequence[PrefillDone]) -> float | None:
    total_s = sum(figure.exchange_s for figure in figures)
    if not total_s:
        return None
    return max(0.0, 1.0 - sum(figure.communication_s for figure in figures) / total_s)


class DroppedMassByLayer:
    """Estimated attention mass that an attempt's prefill dropped, chunk by chunk."""

    def __init__(self) -> None:
        self._tokens = 0
        self._layers: dict[int, tuple[float, float]] = {}
        """Sum over chunks of tokens times mean share, and share of the worst KV head, by layer."""

    def add_chunk(self, tokens: int, reports: Sequence[DroppedMass]) -> None:
        """Add a chunk of so many tokens, as the ranks of its group reported it."""
        self._tokens += tokens
        sums: dict[int, dict[int, NDArray[np.float64]]] = defaultdict(dict)
        for report in reports:
            shape = 2, len(report.layers), -1
            masses = np.frombuffer(report.dropped + report.total, np.float32).reshape(shape)
            for layer, of_layer in zip(report.layers, masses.swapaxes(0, 1), strict=True):
                for head, of_head in enumerate(of_layer.T, start=report.first_kv_head):
                    sums[layer][head] = sums[layer].get(head, np.zeros(2)) + of_head
        for layer, of_heads in sums.items():
            shares = [float(dropped / total) for dropped, total in of_heads.values() if total]
            weighted, worst = self._layers.get(layer, (0.0, 0.0))
            mean = sum(shares) / max(1, len(shares))
            self._layers[layer] = weighted + tokens * mean, max(worst, *shares, 0.0)

    def by_layer(self) -> list[dict[str, float]]:
        """Return the share of attention that each layer dropped: the mean over KV heads and chunks,
        and that of the worst KV head of a chunk. Layers that may drop nothing are left out."""
        return [
            {"layer": layer, "mean": weighted / self._tokens, "worst_head": worst}
            for layer, (weighted, worst) in sorted(self._layers.items())
        ]


REPORT_WAIT_S = 2.0
"""Longest time that an answer with `explain` waits for what ranks report of its prefill."""


@dataclass(slots=True)
class Marks:
    """Times (`time.monotonic()`, seconds) at which an attempt reached each state."""

    submitted: float = field(default_factory=time.monotonic)
    queued: float = field(default_factory=time.monotonic)
    """Entry to the queue: `submitted`, or the loss of the previous attempt."""
    placed: float | None = None
    """The scheduler placed the request, and decode slots were requested."""
    launched: float | None = None
    """The attempt's first step was sent."""
    prefilled: float | None = None
    """The attempt's prefill sampled a token."""
    in_step_s: float | None = None
    """Seconds that the step of the whole prompt queued, computed and communicated on the slowest
    rank; None before it ended, and for prompts in several steps."""
    first_token: float | None = None
    """First token of the answer, whichever attempt sampled it."""
    joined: float | None = None
    """All KV was received, and the decode gang was told to decode."""
    last_token: float | None = None
    ended: float | None = None


BATCH_ENTRIES = 512
"""Limit of a batch of tokens: tokens and their alternatives."""
MAX_UNREAD_ENTRIES = 65_536
"""Limit of tokens and alternatives that a client leaves unread: some 18 MiB."""
MAX_UNREAD_TOGETHER = 1_048_576
"""Limit for all clients together, beyond which each may leave only `SPARED_ENTRIES` unread."""
SPARED_ENTRIES = 1_024


class ClientTooSlow(RequestError):
    """The client reads its answer so slowly that too many tokens are unread."""

    status = 408
    code = "client_too_slow"


class UnreadTokens:
    """Counts the unread tokens of all requests, with their alternatives."""

    def __init__(self) -> None:
        self.entries = 0


State = Literal["queued", "reserving", "prefill", "receiving", "decoding", "finished", "failed"]


@dataclass(frozen=True, kw_only=True)
class AttemptPlacement:
    """Instances on which an attempt runs. `explain` shows them."""

    group: tuple[int, ...]
    """Prefill instances, in the order in which they compute the sequence."""
    bounds: tuple[int, ...]
    """Instance `group[i]` computes tokens [bounds[i], bounds[i+1]) of the step."""
    slices: tuple[KvSlice, ...]
    """KV slices of the prompt on the decode gang."""
    master: int
    """Decode instance that samples the tokens."""
    batched_with: int = 0
    """Other requests in the same step."""


@dataclass(slots=True)
class QueuePosition:
    """How a request stood in the queue."""

    ahead: int = 0
    """Requests that waited when it came."""
    behind: str | None = None
    """Client's id of the last of them, or of the one that started last, if the API key is the same;
    nobody learns ids of other clients."""
    passed: int = 0
    """Requests that came later and started first."""


class RequestHandle:
    """Asynchronous iterator over the tokens of a submitted request.

    Use it as a context manager: leaving early, because the client is gone, cancels the work on all
    ranks. Iteration ends after the last token or raises the request's error.
    """

    def __init__(
        self,
        spec: RequestSpec,
        *,
        request_id: int,
        on_cancel: Callable[[RequestHandle], None],
        unread_by_all: UnreadTokens | None = None,
    ) -> None:
        self.spec = spec
        self.request_id = request_id
        """Order of admission; a retry keeps it and with it the place in the queue."""
        self.sequence_id: int | None = None
        """Sequence of the last attempt."""
        self.state: State = "queued"
        self.plan: AttentionPlan | None = None
        """Attention plan of the last attempt, once its first step was sent."""
        self.placement: AttemptPlacement | None = None
        self.computed_tokens = 0
        """Prompt tokens that are computed or were cached, as far as it is known; never fewer than
        before, although another attempt computes them again."""
        self.cached_tokens = 0
        """Prompt tokens that the last attempt found in the prefix cache, without its front's."""
        self.front_tokens = 0
        """Prompt tokens that were computed while files of the rest were read."""
        self.prompt_logprobs: KnownPromptLogprobs | None = None
        """Log-probabilities of the prompt's tokens, if they are wanted; complete before the first
        token."""
        if spec.prompt_logprobs is not None:
            self.prompt_logprobs = KnownPromptLogprobs(spec.prompt, spec.prompt_logprobs)
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.timings = Timings()
        self.dropped_mass = DroppedMassByLayer()
        """Attention mass that the last attempt dropped."""
        self.prefill_reported = asyncio.Event()
        """Set when all ranks have reported the last step of the prompt."""
        self.line = QueuePosition()
        self.marks = Marks()
        self.elastic: list[ElasticEvent] = []
        """Elastic events of the last attempt."""
        self.context: Context = otel_context.get_current()
        """OpenTelemetry context of the submitter: the request's span."""
        self.carrier = trace_context.inject()
        """Trace headers of `context`, for messages to ranks."""
        self._on_cancel = on_cancel
        self._tokens: deque[SampledToken] = deque()
        self._unread = 0
        self._unread_by_all = unread_by_all or UnreadTokens()
        self._generated: list[int] = []
        self.prefill_over = asyncio.Event()
        """Set when ranks have reported the prompt's last step, or none will: from then on the
        prefix cache has what it will have of the prompt before the answer's end."""
        self._waiter: asyncio.Future[None] | None = None
        self._cut = False
        """The last batch left tokens unread."""

    @property
    def ended(self) -> bool:
        """Return whether no more tokens will come; some may still be unread."""
        return self.state in ("finished", "failed")

    @property
    def generated_tokens(self) -> NDArray[np.int32]:
        """Tokens of the answer so far [tokens].

        A new attempt after a fault computes them as part of its prompt and continues with the next.
        """
        return np.asarray(self._generated, np.int32)

    @property
    def answer_hashes(self) -> tuple[bytes, ...]:
        """Hashes of the whole blocks behind the prompt's that have KV; the last token has none."""
        spec = self.spec
        if spec.prefix is None:
            return ()
        tokens = np.concatenate((spec.prompt, self.generated_tokens[:-1]))
        return spec.prefix.hashes(tokens, spec.hashes)

    @property
    def too_far_behind(self) -> bool:
        """Return whether the reader has left more tokens unread than it may."""
        most = MAX_UNREAD_ENTRIES
        if self._unread_by_all.entries > MAX_UNREAD_TOGETHER:
            most = SPARED_ENTRIES
        return self._unread > most

    @property
    def unread_tokens(self) -> int:
        """Return the number of unread tokens."""
        return len(self._tokens)

    def drop_unread(self) -> None:
        """Drop the unread tokens; nobody will read them."""
        self._tokens.clear()
        self._read(self._unread)

    def cancel(self, reason: FinishReason = "cancelled") -> None:
        """Stop the work on all ranks, drop unread tokens and end the iteration.

        Does nothing once the request has ended.

        Args:
            reason: "stop" if the caller found a stop string.
        """
        if not self.ended:
            self.drop_unread()
            self.finish_reason = reason
            self._on_cancel(self)

    # --- used by the HTTP layer ---

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SampledToken:
        if not self._tokens and not await self._more():
            raise StopAsyncIteration
        token = self._tokens.popleft()
        self._read(_entries(token))
        return token

    async def pending(self) -> list[SampledToken]:
        """Return unread tokens; wait for one, and return none after the last.

        A reader that is far behind gets limited batches, between which others have their turn: a
        token with 20 alternatives takes 0.1 ms to encode.
        """
        if self._cut:
            await asyncio.sleep(0)
        if not self._tokens and not await self._more():
            return []
        batch: list[SampledToken] = []
        entries = 0
        while self._tokens and entries < BATCH_ENTRIES:
            batch.append(token := self._tokens.popleft())
            entries += _entries(token)
        self._read(entries)
        self._cut = bool(self._tokens)
        return batch

    async def _more(self) -> bool:
        """Wait for a token; return False if none will come."""
        while not self._tokens:
            if self.error is not None:
                raise self.error
            if self.ended:
                return False
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()
        self.drop_unread()

    def _read(self, entries: int) -> None:
        self._unread -= entries
        self._unread_by_all.entries -= entries

    # --- used by the router ---

    def begin_attempt(self) -> None:
        """Queue the request again, but keep the times that its answer already reached."""
        self.state = "queued"
        self.elastic.clear()
        marks = self.marks
        self.marks = Marks(
            submitted=marks.submitted,
            queued=time.monotonic(),
            first_token=marks.first_token,
            last_token=marks.last_token,
        )

    def placed(self) -> None:
        """Record that the scheduler placed the request; decode slots are being reserved."""
        self.state = "reserving"
        self.prefilled_up_to(self.cached_tokens)
        self.timings.attempts += 1
        self.dropped_mass = DroppedMassByLayer()
        self.marks.placed = time.monotonic()

    def launched(self) -> None:
        """Record that the attempt's first step was sent."""
        self.state = "prefill"
        now, marks = time.monotonic(), self.marks
        marks.launched = now
        placed = marks.placed or now
        self.timings.queue_s = placed - marks.queued
        self.timings.plan_s = now - placed

    def expect_first_token(self, at_ns: int, overhead_ns: int = 0, error: float = 0.0) -> None:
        """Predict the first token from the end of the last step sent so far.

        Args:
            at_ns: predicted end of that step (`time.monotonic_ns()`).
            overhead_ns: time that bounds on TTFT leave room for.
            error: relative error of the time that is left until then.
        """
        if self.plan is not None and self.marks.first_token is None:
            ttft_ms = (at_ns / 1e9 - self.marks.submitted) * 1e3
            met = self.met(at_ns, self.plan.predicted_accuracy_loss, overhead_ns, error)
            self.plan = replace(self.plan, predicted_ttft_ms=ttft_ms, bounds_met=met)

    def met(
        self, at_ns: int, loss: float | None, overhead_ns: int = 0, error: float = 0.0
    ) -> bool | None:
        """Return whether a step meets the bounds (`Objective.met`).

        What the request has waited so far is measured, so only the rest of the prediction errs.

        Args:
            loss: predicted loss of the step's option.
        """
        ttft_ms = (at_ns / 1e9 - self.marks.submitted) * 1e3
        error_ms = error * max(0.0, at_ns / 1e9 - time.monotonic()) * 1e3
        return self.spec.objective.met(ttft_ms + overhead_ns / 1e6, loss, error_ms)

    @property
    def overhead_s(self) -> float | None:
        """Return the part of the time to first token that was neither waiting nor the prompt's
        step; None before both ended, and for prompts in several steps."""
        marks = self.marks
        if marks.placed is None or marks.first_token is None or marks.in_step_s is None:
            return None
        return max(0.0, marks.first_token - marks.placed - marks.in_step_s)

    def prefilled_up_to(self, tokens: float) -> None:
        """Record that ranks have computed so many tokens of the prompt."""
        self.computed_tokens = max(self.computed_tokens, int(tokens))

    def progress(self) -> dict[str, Any]:
        """Return how far the prompt is, in llama.cpp's fields, and when its end is predicted."""
        total = int(self.spec.prompt.size)
        waited_s = time.monotonic() - self.marks.submitted
        plan, left_s = self.plan, None
        if self.marks.first_token is not None:
            left_s = 0.0
        elif plan is not None and plan.predicted_ttft_ms is not None:
            left_s = max(0.0, plan.predicted_ttft_ms / 1e3 - waited_s)
        done = self.marks.first_token is not None
        return {
            "total": total,
            "cache": min(self.cached_tokens, total),
            "processed": total if done else min(self.computed_tokens, total),
            "time_ms": round(1e3 * waited_s),
            "predicted_s": left_s,
        }

    def kv_received_after(self, waited_s: float) -> None:
        """Record that a decode rank received its KV, some of which waited `waited_s` seconds for a
        transfer slot."""
        self.timings.transfer_wait_s = max(waited_s, self.timings.transfer_wait_s or 0.0)

    def handed_over(self) -> None:
        """Record that all KV was received and the decode gang was told to decode."""
        self.state = "decoding"
        now = time.monotonic()
        self.marks.joined = now
        self.timings.transfer_s = now - (self.marks.prefilled or now)

    def close_timings(self, now: float) -> None:
        """Record the end of the request."""
        marks = self.marks
        marks.ended = now
        self.timings.total_s = now - marks.submitted
        if marks.joined is not None:
            self.timings.decode_s = max(0.0, (marks.last_token or now) - marks.joined)

    def deliver(self, token: SampledToken) -> float | None:
        """Append a token for the reader; return the seconds since the answer's token before."""
        now, marks = time.monotonic(), self.marks
        last, marks.last_token = marks.last_token, now
        if self.state == "prefill":  # the first token, or the next one after a fault
            self.state = "receiving"
            marks.prefilled = now
            self.timings.prefill_s = now - (marks.launched or now)
        if last is None:  # its KV may still be in transfer
            marks.first_token = now
            self.timings.ttft_s = now - marks.submitted
        self.timings.tokens += 1
        self._generated.append(token.token)
        self._tokens.append(token)
        self._read(-_entries(token))
        self._wake()
        return None if last is None else now - last

    def finish(self, reason: FinishReason) -> None:
        """End the iteration: the answer is complete or was cancelled."""
        self.state, self.finish_reason = "finished", reason
        self.prefill_over.set()
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the iteration with an error, before or within the answer."""
        self.state, self.error = "failed", error
        self.prefill_over.set()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait_for_dropped_mass(self) -> None:
        """Wait until it is known what the prefill dropped, if it dropped anything.

        A short answer ends before the last KV is sent, and ranks report a step when it is.
        """
        plan = self.plan
        if plan is not None and plan.csa is not None and not plan.csa.lossless:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.prefill_reported.wait(), REPORT_WAIT_S)

    def explain(self) -> dict[str, Any]:
        """Return the extension field `csps.explain`: plan, placement, timings, dropped mass."""
        return {
            "plan": asdict(self.plan) if self.plan else None,
            "placement": _explained_placement(self.placement) if self.placement else None,
            "timings": asdict(self.timings),
            "dropped_mass": self.dropped_mass.by_layer(),
        }


def _entries(token: SampledToken) -> int:
    return 1 + len(token.top_logprobs)


def _explained_placement(placement: AttemptPlacement) -> dict[str, Any]:
    # Not `asdict`: clients read these keys, so they must not follow a renamed field.
    return {
        "group": placement.group,
        "bounds": placement.bounds,
        "shares": [
            {
                "instance": kv_slice.instance,
                "span": asdict(kv_slice.span),
                "origin": kv_slice.source or None,
            }
            for kv_slice in placement.slices
        ],
        "master": placement.master,
        "batched_with": placement.batched_with,
    }
