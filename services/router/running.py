"""One request as the HTTP layer sees it: iterate for tokens, leave to cancel."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from opentelemetry import context as otel_context
from opentelemetry.context import Context

from csps.protocols import trace_context
from csps.protocols.placement import KvShare
from csps.protocols.plans import Plan
from csps.protocols.tokens import FinishReason, TokenDrawn
from csps.services.router.generation import Generation
from csps.services.router.timings import Marks, Timings
from csps.services.telemetry.elastic_metrics import ElasticEvent

State = Literal["queued", "reserving", "prefill", "landing", "decoding", "finished", "failed"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where an attempt runs; what `explain` shows."""

    group: tuple[int, ...]
    """Prefill instances, in the order in which they hold the sequence."""
    bounds: tuple[int, ...]
    """Instance `group[i]` computes tokens [bounds[i], bounds[i+1]) of the job."""
    shares: tuple[KvShare, ...]
    """Decode instances that hold the prompt's KV."""
    master: int
    """Decode instance that draws the tokens."""
    batched_with: int = 0
    """Other requests in the same prefill job."""


class Running:
    """A submitted request: an asynchronous iterator of its tokens.

    Use it as a context manager; leaving early (the client is gone) cancels the work everywhere.
    Iteration ends after the last token, or raises what the request failed with.
    """

    def __init__(
        self, generation: Generation, *, number: int, on_cancel: Callable[[Running], None]
    ) -> None:
        self.generation = generation
        self.number = number
        """Order of admission; a retry keeps it, and with it its place in the queue."""
        self.sequence: int | None = None
        """The last attempt, by the name that ranks know it by."""
        self.state: State = "queued"
        self.plan: Plan | None = None
        """Of the last attempt, once its first step was sent."""
        self.placement: Placement | None = None
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
        self._tokens: deque[TokenDrawn] = deque()
        self._drawn: list[int] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """No more tokens will come; some may still wait to be read."""
        return self.state in ("finished", "failed")

    @property
    def drawn_tokens(self) -> NDArray[np.int32]:
        """Tokens of the answer so far. An attempt after a fault computes them again, as a part of
        its prompt, and goes on with the next one."""
        return np.asarray(self._drawn, np.int32)

    @property
    def answer_hashes(self) -> tuple[bytes, ...]:
        """Of the blocks behind those of the prompt that have KV: the last token has none."""
        generation = self.generation
        if generation.prefix is None:
            return ()
        tokens = np.concatenate((generation.prompt, self.drawn_tokens[:-1]))
        return generation.prefix.hashes(tokens, generation.hashes)

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

    async def __anext__(self) -> TokenDrawn:
        if not self._tokens and not await self._more():
            raise StopAsyncIteration
        return self._tokens.popleft()

    async def pending(self) -> list[TokenDrawn]:
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
            met = self.generation.objective.met(
                ttft_ms + overhead_ns / 1e6, self.plan.predicted_accuracy_loss
            )
            self.plan = replace(self.plan, predicted_ttft_ms=ttft_ms, bounds_met=met)

    def first_token_at(self, now: float) -> None:
        """The first token of the answer was drawn; its KV may still be on the way."""
        self.marks.first_token = now
        self.timings.ttft_s = now - self.marks.submitted

    def prefilled_at(self, now: float) -> None:
        """The attempt's prefill has drawn its token, the first one or one after a fault."""
        self.state = "landing"
        self.marks.prefilled = now
        self.timings.prefill_s = now - (self.marks.launched or now)

    def landed_after(self, waited_s: float) -> None:
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

    def deliver(self, token: TokenDrawn) -> None:
        """Hand a token to the reader."""
        self.timings.tokens += 1
        self._drawn.append(token.token)
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
