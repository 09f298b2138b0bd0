"""The HTTP API as a Starlette application; knows the request service, and nothing of Ray."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from csps.protocols.errors import ModelNotFound, QueueFull
from csps.protocols.openai_responses import ModelCard, ModelList
from csps.services.http.answer import Piece
from csps.services.http.body import read_body, while_connected
from csps.services.http.errors import error_response, on_http_error
from csps.services.http.request_parser import Accepted, Arrival, RequestParser, read_slo
from csps.services.http.response import GeneratedResponse
from csps.services.http.streaming import EventStream
from csps.services.http.tokenizer_pool import TokenizerPool
from csps.services.launch.credentials import ApiKeys, TimelineClients
from csps.services.router.generation import Generation
from csps.services.router.running import Running
from csps.services.router.slo import Slo
from csps.services.scheduling.fit import Fit
from csps.services.telemetry.metrics import Metrics
from csps.services.telemetry.request_trace import RequestTrace

Handler = Callable[[Request], Awaitable[Response]]
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]

FIRST_TOKEN_GRACE_S = 10.0
CLIENT_GONE = 499
"""Nobody reads it; it stands in access logs."""
_SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Service(Protocol):
    """What the API needs of whoever runs requests: `services.router.service.RequestService`."""

    def check_room(self, slo: Slo) -> None:
        """Raise `QueueFull` if any request would be refused now; this one would be held to
        `slo`."""
        ...

    def submit(self, generation: Generation) -> Running:
        """Admit a request, or raise why not."""
        ...

    @property
    def fit(self) -> Fit | None:
        """What fits the gangs; None before there were any."""
        ...

    @property
    def ready(self) -> bool:
        """Requests would be served now."""
        ...

    @property
    def trouble(self) -> str:
        """Why not `ready`, in words that clients may read."""
        ...


class Read(Protocol):
    """`RequestParser.completion` or `RequestParser.chat`."""

    def __call__(self, body: bytes, arrival: Arrival) -> Accepted: ...


@dataclass(frozen=True, kw_only=True)
class Api:
    """The handlers of all routes."""

    parser: RequestParser
    service: Service
    keys: ApiKeys
    metrics: Metrics
    max_body_bytes: int
    timeline_clients: TimelineClients = field(default_factory=TimelineClients)
    lanes: TokenizerPool = field(default_factory=TokenizerPool)

    def app(self, lifespan: Lifespan | None = None) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/v1/completions", _guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", _guarded(self.chat), methods=["POST"]),
            Route("/v1/models", _guarded(self.models), methods=["GET"]),
            Route("/v1/models/{model:path}", _guarded(self.model), methods=["GET"]),
            Route("/health", _guarded(self.health), methods=["GET"]),
            Route("/metrics", _guarded(self.scrape), methods=["GET"]),
        ]
        return Starlette(
            routes=routes, lifespan=lifespan, exception_handlers={HTTPException: on_http_error}
        )

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._generate(request, self.parser.completion, "text_completion")

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._generate(request, self.parser.chat, "chat")

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        self.keys.check(request.headers.get("authorization"))
        return JSONResponse(ModelList(data=[self._card()]).model_dump())

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{model}`."""
        self.keys.check(request.headers.get("authorization"))
        wanted = request.path_params["model"]
        if wanted != self.parser.model:
            raise ModelNotFound(model=wanted, served=self.parser.model)
        return JSONResponse(self._card().model_dump())

    async def health(self, request: Request) -> Response:
        """`GET /health`: 200 when a request would be served now, 503 with the reason otherwise."""
        if self.service.ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": self.service.trouble}, 503)

    async def scrape(self, request: Request) -> Response:
        """`GET /metrics` in the Prometheus text format."""
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4")

    async def _generate(self, request: Request, read: Read, operation: str) -> Response:
        began_ns = time.time_ns()
        owner = self.keys.check(request.headers.get("authorization"))
        exchange, streams = await self._receive(request, read, operation, owner, began_ns)
        if streams:
            return await _stream(request, exchange)
        return JSONResponse(await while_connected(request.receive, exchange.whole()))

    async def _receive(
        self, request: Request, read: Read, operation: str, owner: bytes, began_ns: int
    ) -> tuple[GeneratedResponse, bool]:
        """Nothing but the exchange is left of the body afterwards."""
        request_id = request_id_of(request)
        asked = read_slo(request.headers)
        self.service.check_room(self.parser.slo(asked))
        with self.lanes.holding() as held:
            body = await self._read(request, held.grown, asked)
            arrival = Arrival(request_id=request_id, asked=asked, fit=self.service.fit, owner=owner)
            accept = partial(self.lanes.run, body, partial(read, arrival=arrival), held)
            trace = RequestTrace(
                request.headers,
                operation=operation,
                request_id=request_id,
                began_ns=began_ns,
                may_ask=self.timeline_clients.include(request.headers.get("authorization")),
            )
            try:
                with trace:
                    return await self._submit(accept, trace)
            except BaseException as error:
                trace.failed(error)
                trace.end()
                raise

    async def _read(self, request: Request, grown: Callable[[int], None], asked: Slo) -> bytes:
        try:
            return await read_body(
                request, self.max_body_bytes, grown=grown, deadlines=self.parser.deadlines
            )
        except QueueFull as error:  # too many long bodies are being read
            self.metrics.refused(error, self.parser.slo(asked))
            raise

    async def _submit(
        self, accept: Callable[[], Awaitable[Accepted]], trace: RequestTrace
    ) -> tuple[GeneratedResponse, bool]:
        with trace.reading():
            accepted = await accept()
        trace.accepted(accepted.generation, self.parser.model)
        running = self.service.submit(accepted.generation)
        exchange = GeneratedResponse(
            accepted, running, tokenizer=self.parser.tokenizer, trace=trace
        )
        return exchange, accepted.request.stream

    def _card(self) -> ModelCard:
        longest, fit = self.parser.max_positions, self.service.fit
        if fit is not None:
            longest = min(longest, fit.promised)
        return ModelCard(id=self.parser.model, created=_STARTED, max_model_len=longest)


_STARTED = int(time.time())


async def _stream(request: Request, exchange: GeneratedResponse) -> Response:
    """Waits a while for the first token: what goes wrong until then has a status code of its own.

    After that the answer begins without it, because proxies cut connections that stay silent.
    """
    pieces = exchange.pieces()
    first = asyncio.ensure_future(anext(pieces))

    async def close() -> None:
        first.cancel()
        await asyncio.wait({first})
        await pieces.aclose()

    try:
        await while_connected(request.receive, _settled(first, FIRST_TOKEN_GRACE_S))
    except BaseException:
        await close()
        raise
    return EventStream(exchange.events(first, pieces), close=close)


async def _settled(future: asyncio.Future[list[Piece]], seconds: float) -> None:
    """Wait so long for `future`; raise what it has failed with."""
    done, _ = await asyncio.wait({future}, timeout=seconds)
    for it in done:
        it.result()


def request_id_of(request: Request) -> str:
    """The client's `x-request-id` if it is fit to be logged, otherwise a fresh one.

    Serve echoes the header in the answer, and makes one up where there is none.
    """
    given = request.headers.get("x-request-id", "")
    return given if _SAFE_REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def _guarded(handler: Handler) -> Handler:
    """Turns what a handler raises into an answer.

    Starlette's own handler for `Exception` raises on after having answered, and Serve would log
    every refused request as a crash.
    """

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            return error_response(error)

    return guarded
