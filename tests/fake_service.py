"""A stand-in for the request service: answers what a test scripted, when the test lets it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from csps.models.tokenizers.tokenizer import Tokenizer
from csps.protocols.gang.messages import SampledToken, TokenLogprob
from csps.services.http.api import HttpApi, Service
from csps.services.http.parser_pool import ParserPool
from csps.services.http.request_parser import RequestParser
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import ApiKey, RequestSpec, SloBounds
from csps.services.scheduling.deciding.decisions import CapacityCheck
from csps.services.settings.credentials import ApiKeys
from csps.services.telemetry.metrics import Metrics


class FakeService:
    """Draws `answer`'s tokens one after another, then ends with "stop" or at `max_tokens`."""

    def __init__(self, tokenizer: Tokenizer, answer: str) -> None:
        self.script = tokenizer.encode(answer, add_special_tokens=False)
        self.eos = tokenizer.eos_token_ids[0]
        self.specs: list[RequestSpec] = []
        self.handles: list[RequestHandle] = []
        self.submitted = asyncio.Event()
        self.cancelled = asyncio.Event()
        """Event of a cancelled request."""
        self.refusal: Exception | None = None
        """Raised by `submit`."""
        self.failure: Exception | None = None
        """Error of a request after `fail_after` tokens."""
        self.fail_after = 0
        self.gate: asyncio.Event | None = None
        """No token before it is set."""
        self.burst = 1
        """Tokens that come together."""
        self.turns: asyncio.Semaphore | None = None
        """Taken before each burst."""
        self.trouble = ""
        self.capacity_check: CapacityCheck | None = None

    def check_room(self, slo: SloBounds, api_key: ApiKey, *, ahead: int) -> None:
        """Accept every request, unless `submit` fails."""

    def submit(self, spec: RequestSpec) -> RequestHandle:
        if self.refusal is not None:
            raise self.refusal
        handle = RequestHandle(spec, request_id=len(self.handles), on_cancel=self._cancel)
        self.specs.append(spec)
        self.handles.append(handle)
        self.submitted.set()
        self._task = asyncio.ensure_future(self._sample(handle))
        return handle

    @property
    def ready(self) -> bool:
        return not self.trouble

    async def _sample(self, handle: RequestHandle) -> None:
        if self.gate is not None:
            await self.gate.wait()
        for index, token in enumerate(self._tokens(handle.spec)):
            if index % self.burst == 0:
                await self._next_turn()
            if self.failure is not None and index == self.fail_after:
                return handle.fail(self.failure)
            if handle.ended:
                return None
            handle.deliver(token)
            if token.finish_reason is not None:
                return handle.finish(token.finish_reason)
        return None

    async def _next_turn(self) -> None:
        await (asyncio.sleep(0) if self.turns is None else self.turns.acquire())

    def _tokens(self, spec: RequestSpec) -> Sequence[SampledToken]:
        limit = spec.sampling.max_tokens
        ids = [*self.script, self.eos][:limit]
        return [self._sampled(index, ids, spec) for index in range(len(ids))]

    def _sampled(self, index: int, ids: list[int], spec: RequestSpec) -> SampledToken:
        alternatives = spec.sampling.logprobs
        last = index == len(ids) - 1
        return SampledToken(
            sequence_id=1,
            index=index,
            token=ids[index],
            finish_reason=("stop" if ids[index] == self.eos else "length") if last else None,
            logprob=None if alternatives is None else -0.5,
            top_logprobs=tuple(
                TokenLogprob(token=ids[index] + shift, logprob=-0.5 - shift)
                for shift in range(alternatives or 0)
            ),
        )

    def _cancel(self, handle: RequestHandle) -> None:
        handle.finish(handle.finish_reason or "cancelled")
        if handle.finish_reason == "cancelled":
            self.cancelled.set()


def http_api(parser: RequestParser, service: Service, **options: Any) -> HttpApi:
    """Return the HTTP handlers of a service, by default without API keys."""
    defaults: dict[str, Any] = {
        "keys": ApiKeys([]),
        "metrics": Metrics("tiny"),
        "max_body_bytes": 1_000_000,
    }
    if "parser_pool" not in options:
        defaults["parser_pool"] = ParserPool(parser.body_parser)
    return HttpApi(parser=parser, service=service, **{**defaults, **options})
