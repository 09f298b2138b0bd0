"""When a request reached which state, and how long it was in each.

One request as the HTTP layer sees it: iterate for tokens, leave to cancel.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from opentelemetry import context as otel_context
from opentelemetry.context import Context

from csps.protocols.attention.plan import AttentionPlan
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.messages import FinishReason, PrefillDone, SampledToken
from csps.protocols.rpc import trace_context
from csps.services.requests.elastic_event import ElasticEvent
from csps.services.requests.request_spec import RequestSpec


@dataclass(kw_only=True)
class Timings:
    """Seconds spent in each state by the last attempt; None for a state that was not reached.

    `ttft_s` and `total_s` count from submission, over all attempts.
    """

    queue_s: float | None = None
    """Waiting for a place."""
    plan_s: float | None = None
    """From the place until the first step was sent: decode slots are reserved meanwhile."""
    prefill_s: float | None = None
    """From the first step's sending to its token."""
    transfer_s: float | None = None
    """From that token until all KV had landed: the part of the transfer that shows."""
    transfer_wait_s: float | None = None
    """The longest that KV has waited for its turn to be sent to a decode rank."""
    decode_s: float | None = None
    """From the hand-over to decode until the last token."""
    ttft_s: float | None = None
    total_s: float | None = None
    rank_queue_s: float = 0.0
    """The slowest prefill rank's figures, as it reported them."""
    compute_s: float = 0.0
    communication_s: float = 0.0
    """Waiting for exchanges inside the prefill group."""
    exchange_s: float = 0.0
    """Such exchanges were under way, hidden behind computing or not."""
    hidden_communication: float | None = None
    """Hidden communication / total communication, over all ranks; None without any."""
    rank_transfer_s: float = 0.0
    yielded_s: float = 0.0
    tokens: int = 0
    attempts: int = 0

    def add_figures(self, figures: Sequence[PrefillDone]) -> None:
        """Take in what the ranks of a prefill group have measured."""
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


@dataclass(slots=True)
class Marks:
    """When (`time.monotonic()`) an attempt reached each state."""

    submitted: float = field(default_factory=time.monotonic)
    queued: float = field(default_factory=time.monotonic)
    """Entered the queue: `submitted`, or the loss of the previous attempt."""
    placed: float | None = None
    """The scheduler has found a place; decode slots are asked for."""
    launched: float | None = None
    """The attempt's first step was sent."""
    prefilled: float | None = None
    """Its prefill has drawn a token."""
    first_token: float | None = None
    """Of the answer, whichever attempt it came from."""
    joined: float | None = None
    """All KV had landed and decode was told to go on."""
    last_token: float | None = None
    ended: float | None = None


State = Literal["queued", "reserving", "prefill", "receiving", "decoding", "finished", "failed"]


@dataclass(frozen=True, kw_only=True)
class AttemptPlacement:
    """Where an attempt runs; what `explain` shows."""

    group: tuple[int, ...]
    """Prefill instances, in the order in which they hold the sequence."""
    bounds: tuple[int, ...]
    """Instance `group[i]` computes tokens [bounds[i], bounds[i+1]) of the job."""
    slices: tuple[KvSlice, ...]
    """Decode instances that hold the prompt's KV."""
    master: int
    """Decode instance that draws the tokens."""
    batched_with: int = 0
    """Other requests in the same prefill job."""


class RequestHandle:
    """A submitted request: an asynchronous iterator of its tokens.

    Use it as a context manager; leaving early (the client is gone) cancels the work everywhere.
    Iteration ends after the last token, or raises what the request failed with.
    """

    def __init__(
        self, spec: RequestSpec, *, request_id: int, on_cancel: Callable[[RequestHandle], None]
    ) -> None:
        self.spec = spec
        self.request_id = request_id
        """Order of admission; a retry keeps it, and with it its place in the queue."""
        self.sequence_id: int | None = None
        """The last attempt, by the name that ranks know it by."""
        self.state: State = "queued"
        self.plan: AttentionPlan | None = None
        """Of the last attempt, once its first step was sent."""
        self.placement: AttemptPlacement | None = None
        self.cached_tokens = 0
        """Of the prompt, that the last attempt found computed."""
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.timings = Timings()
        self.marks = Marks()
        self.elastic: list[ElasticEvent] = []
        """Of the last attempt."""
        self.context: Context = otel_context.get_current()
        """OpenTelemetry context of the submitter: the request's span."""
        self.carrier = trace_context.inject()
        """The same, as it travels."""
        self._on_cancel = on_cancel
        self._tokens: deque[SampledToken] = deque()
        self._generated: list[int] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """No more tokens will come; some may still wait to be read."""
        return self.state in ("finished", "failed")

    @property
    def generated_tokens(self) -> NDArray[np.int32]:
        """Tokens of the answer so far. An attempt after a fault computes them again, as a part of
        its prompt, and goes on with the next one."""
        return np.asarray(self._generated, np.int32)

    @property
    def answer_hashes(self) -> tuple[bytes, ...]:
        """Of the blocks behind those of the prompt that have KV: the last token has none."""
        spec = self.spec
        if spec.prefix is None:
            return ()
        tokens = np.concatenate((spec.prompt, self.generated_tokens[:-1]))
        return spec.prefix.hashes(tokens, spec.hashes)

    def cancel(self, reason: FinishReason = "cancelled") -> None:
        """Stop the work everywhere. `reason` "stop": the caller found a stop string.

        Tokens not yet read are dropped; iteration ends. Does nothing once the request has ended.
        """
        if not self.ended:
            self._tokens.clear()
            self.finish_reason = reason
            self._on_cancel(self)

    # --- the reader's side ---

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SampledToken:
        if not self._tokens and not await self._more():
            raise StopAsyncIteration
        return self._tokens.popleft()

    async def pending(self) -> list[SampledToken]:
        """All tokens that have not been read; waits for one, and is empty after the last."""
        if not self._tokens and not await self._more():
            return []
        tokens = list(self._tokens)
        self._tokens.clear()
        return tokens

    async def _more(self) -> bool:
        """Wait for a token; False if none will come."""
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

    # --- the router's side ---

    def begin_attempt(self) -> None:
        """Wait for a place again; times of what the answer has already reached stay."""
        self.state = "queued"
        self.elastic.clear()
        marks = self.marks
        self.marks = Marks(
            submitted=marks.submitted,
            queued=time.monotonic(),
            first_token=marks.first_token,
            last_token=marks.last_token,
        )

    def launched_at(self, now: float) -> None:
        """The attempt's first step was sent."""
        self.state = "prefill"
        marks = self.marks
        marks.launched = now
        placed = marks.placed or now
        self.timings.queue_s = placed - marks.queued
        self.timings.plan_s = now - placed

    def expect_first_token(self, at_ns: int, overhead_ns: int = 0) -> None:
        """The last step that was sent so far will have ended then (`time.monotonic_ns()`).

        Args:
            overhead_ns: what bounds on TTFT leave room for.
        """
        if self.plan is not None and self.marks.first_token is None:
            ttft_ms = (at_ns / 1e9 - self.marks.submitted) * 1e3
            met = self.spec.objective.met(
                ttft_ms + overhead_ns / 1e6, self.plan.predicted_accuracy_loss
            )
            self.plan = replace(self.plan, predicted_ttft_ms=ttft_ms, bounds_met=met)

    def first_token_at(self, now: float) -> None:
        """The first token of the answer was drawn; its KV may still be on the way."""
        self.marks.first_token = now
        self.timings.ttft_s = now - self.marks.submitted

    def prefilled_at(self, now: float) -> None:
        """The attempt's prefill has drawn its token, the first one or one after a fault."""
        self.state = "receiving"
        self.marks.prefilled = now
        self.timings.prefill_s = now - (self.marks.launched or now)

    def kv_received_after(self, waited_s: float) -> None:
        """A decode rank has its share of the KV, some of which waited so long for its turn."""
        self.timings.transfer_wait_s = max(waited_s, self.timings.transfer_wait_s or 0.0)

    def handed_over_at(self, now: float) -> None:
        """All KV has landed, and decode was told."""
        self.marks.joined = now
        self.timings.transfer_s = now - (self.marks.prefilled or now)

    def close_timings(self, now: float) -> None:
        """The request has ended."""
        marks = self.marks
        marks.ended = now
        self.timings.total_s = now - marks.submitted
        if marks.joined is not None:
            self.timings.decode_s = max(0.0, (marks.last_token or now) - marks.joined)

    def deliver(self, token: SampledToken) -> None:
        """Hand a token to the reader."""
        self.timings.tokens += 1
        self._generated.append(token.token)
        self._tokens.append(token)
        self._wake()

    def finish(self, reason: FinishReason) -> None:
        """The answer is complete, or was withdrawn."""
        self.state, self.finish_reason = "finished", reason
        self._wake()

    def fail(self, error: Exception) -> None:
        """There will be no answer, or no rest of it."""
        self.state, self.error = "failed", error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def explain(self) -> dict[str, Any]:
        """What the extension field `csps.explain` answers: plan, placement, timings."""
        return {
            "plan": asdict(self.plan) if self.plan else None,
            "placement": asdict(self.placement) if self.placement else None,
            "timings": asdict(self.timings),
        }
