"""The HTTP API as a Starlette application. It knows the request service, and nothing of Ray.

`HttpApi` has the handlers of all routes. `EventStream` sends the events of a streamed answer.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import csps
from csps.protocols.core.errors import ModelNotFound, QueueFull
from csps.protocols.openai.responses import AnswerDelta, ModelCard, ModelList
from csps.services.http.answer import HEARTBEAT, GeneratedResponse
from csps.services.http.body import (
    ByteBudget,
    RequestsBeingRead,
    end_tasks,
    read_body,
    while_connected,
)
from csps.services.http.body_parser import Endpoint, ParsedBody, Question
from csps.services.http.errors import (
    MayNotLook,
    error_response,
    messages_error_response,
    on_http_error,
)
from csps.services.http.parser_pool import SMALL_BODY_BYTES, ParserPool
from csps.services.http.request_parser import RequestMetadata, RequestParser, read_slo
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import ApiKey, RequestSpec, SloBounds
from csps.services.scheduling.deciding.decisions import CapacityCheck
from csps.services.settings.credentials import ApiKeys
from csps.services.settings.settings import AuthSettings
from csps.services.telemetry.metrics import Metrics
from csps.services.telemetry.request_trace import RequestTrace

Handler = Callable[[Request], Awaitable[Response]]
Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]
PAGE = Path(__file__).with_name("ui.html")
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
)
"""The page reaches nobody but this server. Names that clients chose are shown as text, never as
HTML."""
FIRST_TOKEN_GRACE_S = 10.0
EXEMPT_BYTES = 1024 * 1024
"""Bytes of an answer that may always wait to be read."""
CLIENT_GONE = 499
"""Status for access logs; the client is gone and never reads it."""
_SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_STARTED = int(time.time())


class Service(Protocol):
    """Interface of the request service (`services.router.service.RequestService`) to the API."""

    def check_room(self, slo: SloBounds, api_key: ApiKey, *, ahead: int) -> None:
        """Raise `QueueFull` or `RateLimited` if such a request would be refused now.

        Args:
            ahead: requests that are being read, and will be submitted before it.
        """
        ...

    def submit(self, spec: RequestSpec) -> RequestHandle:
        """Admit a request, or raise why not."""
        ...

    @property
    def capacity_check(self) -> CapacityCheck | None:
        """Return what fits the gangs; None before the first ones."""
        ...

    @property
    def ready(self) -> bool:
        """Return whether a request would be served now."""
        ...

    @property
    def trouble(self) -> str:
        """Return why the service is not `ready`, in words that clients may read."""
        ...


@dataclass(frozen=True, kw_only=True)
class HttpApi:
    """The handlers of all routes."""

    parser: RequestParser
    service: Service
    keys: ApiKeys
    metrics: Metrics
    max_body_bytes: int
    parser_pool: ParserPool
    auth: AuthSettings = field(default_factory=AuthSettings)
    being_read: RequestsBeingRead = field(default_factory=RequestsBeingRead)
    answers: ByteBudget = field(
        default_factory=partial(ByteBudget, "long answers wait to be read", exempt=EXEMPT_BYTES)
    )
    """Counts answers that are not streamed, until they are sent."""
    state: Callable[[], bytes] | None = None
    """Function that returns the server's state as JSON (`services.router.cluster_state`); None
    serves neither it nor the page that shows it."""

    def app(self, lifespan: Lifespan | None = None) -> Starlette:
        """Return the ASGI application."""
        routes = [
            Route("/v1/completions", _guarded(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", _guarded(self.chat), methods=["POST"]),
            Route(
                "/v1/messages",
                _guarded(self.messages, messages_error_response),
                methods=["POST"],
            ),
            Route(
                "/v1/messages/count_tokens",
                _guarded(partial(self._question, "count_tokens"), messages_error_response),
                methods=["POST"],
            ),
            Route("/v1/responses", _guarded(self.responses), methods=["POST"]),
            Route("/tokenize", _guarded(partial(self._question, "tokenize")), methods=["POST"]),
            Route("/detokenize", _guarded(partial(self._question, "detokenize")), methods=["POST"]),
            Route("/version", _guarded(self.version), methods=["GET"]),
            Route("/v1/models", _guarded(self.models), methods=["GET"]),
            Route("/v1/models/{model:path}", _guarded(self.model), methods=["GET"]),
            Route("/health", _guarded(self.health), methods=["GET"]),
            Route("/metrics", _guarded(self.scrape), methods=["GET"]),
        ]
        if self.state is not None:
            routes += [
                Route("/v1/csps/state", _guarded(self.show_state), methods=["GET"]),
                Route("/ui", _guarded(self.page), methods=["GET"]),
            ]
        return Starlette(
            routes=routes, lifespan=lifespan, exception_handlers={HTTPException: on_http_error}
        )

    async def completions(self, request: Request) -> Response:
        """Handle `POST /v1/completions`."""
        return await self._generate(request, "completion")

    async def chat(self, request: Request) -> Response:
        """Handle `POST /v1/chat/completions`."""
        return await self._generate(request, "chat")

    async def messages(self, request: Request) -> Response:
        """Handle `POST /v1/messages`."""
        return await self._generate(request, "messages")

    async def responses(self, request: Request) -> Response:
        """Handle `POST /v1/responses`."""
        return await self._generate(request, "responses")

    async def version(self, request: Request) -> Response:
        """Handle `GET /version`."""
        return JSONResponse({"version": csps.__version__})

    async def models(self, request: Request) -> Response:
        """Handle `GET /v1/models`."""
        self.keys.check(authorization_of(request))
        return JSONResponse(ModelList(data=[self._card()]).model_dump())

    async def model(self, request: Request) -> Response:
        """Handle `GET /v1/models/{model}`."""
        self.keys.check(authorization_of(request))
        wanted = request.path_params["model"]
        if wanted != self.parser.model:
            raise ModelNotFound(model=wanted, served=self.parser.model)
        return JSONResponse(self._card().model_dump())

    async def health(self, request: Request) -> Response:
        """Handle `GET /health`: 200 if a request would be served now, else 503 with the reason."""
        if self.service.ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": self.service.trouble}, 503)

    async def scrape(self, request: Request) -> Response:
        """Handle `GET /metrics` in the Prometheus text format."""
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4")

    async def show_state(self, request: Request) -> Response:
        """Handle `GET /v1/csps/state`."""
        api_key = self.keys.check(authorization_of(request))
        if not self.auth.may_diagnose(api_key):
            raise MayNotLook(
                "This API key may not look into the server: auth.diagnostics names those that may."
            )
        assert self.state is not None, "the route is there only with a state"
        headers = {"cache-control": "no-store"}
        return Response(self.state(), media_type="application/json", headers=headers)

    async def page(self, request: Request) -> Response:
        """Handle `GET /ui`: a page without data, which asks for the state with the viewer's key."""
        return Response(
            PAGE.read_bytes(),
            media_type="text/html; charset=utf-8",
            headers={"content-security-policy": PAGE_POLICY, "cache-control": "no-cache"},
        )

    async def _question(self, question: Question, request: Request) -> Response:
        """Answer what needs the tokenizer and no model."""
        api_key = self.keys.check(authorization_of(request))
        asked = read_slo(request.headers)
        self.service.check_room(self.parser.slo(asked), api_key, ahead=self.being_read.count)
        with ExitStack() as counted:
            with self.being_read.place() as place:
                body = await self._read(request, place.grown, asked)
                answer = await while_connected(
                    request.receive, self.parser_pool.answer(question, body)
                )
            counted.enter_context(self.answers.share()).grown(len(answer))
            return WholeAnswer(_slices(answer), close=counted.pop_all().close)

    async def _generate(self, request: Request, endpoint: Endpoint) -> Response:
        began_ns = time.time_ns()
        api_key = self.keys.check(authorization_of(request))
        response, streams = await self._receive(request, endpoint, api_key, began_ns)
        if streams:
            return await _stream(request, response)
        with ExitStack() as counted:
            share = counted.enter_context(self.answers.share())
            pieces = await while_connected(request.receive, response.whole(share.grown))
            return WholeAnswer(pieces, close=counted.pop_all().close)

    async def _receive(
        self, request: Request, endpoint: Endpoint, api_key: ApiKey, began_ns: int
    ) -> tuple[GeneratedResponse, bool]:
        """Read, parse and submit a request; return its response, and whether to stream it."""
        # Headers first: a server without room refuses before it reads a large body.
        client_request_id = client_request_id_of(request)
        asked = read_slo(request.headers)
        self.service.check_room(self.parser.slo(asked), api_key, ahead=self.being_read.count)
        with self.being_read.place() as place:
            body = await self._read(request, place.grown, asked)
            may_diagnose = self.auth.may_diagnose(api_key)
            trace = RequestTrace(
                request.headers,
                operation="text_completion" if endpoint == "completion" else "chat",
                client_request_id=client_request_id,
                began_ns=began_ns,
                may_ask=may_diagnose,
            )
            try:
                with trace:
                    with trace.reading():
                        parsed = await self._parse(request, endpoint, body, api_key)
                    metadata = RequestMetadata(
                        client_request_id=client_request_id,
                        asked=asked,
                        capacity_check=self.service.capacity_check,
                        api_key=api_key,
                        may_explain=may_diagnose,
                    )
                    return self._submit(parsed, metadata, trace)
            except BaseException as error:
                trace.failed(error)
                trace.end()
                raise

    async def _read(
        self, request: Request, grown: Callable[[int], None], asked: SloBounds
    ) -> bytes:
        try:
            return await read_body(
                request, self.max_body_bytes, grown=grown, deadlines=self.parser.deadlines
            )
        except QueueFull as error:  # too many large bodies are being read
            self.metrics.refused(error, self.parser.slo(asked))
            raise

    async def _parse(
        self, request: Request, endpoint: Endpoint, body: bytes, api_key: ApiKey
    ) -> ParsedBody:
        parsing = self.parser_pool.parse(endpoint, body, api_key.digest)
        if len(body) <= SMALL_BODY_BYTES:  # parsed sooner than a client leaves
            return await parsing
        return await while_connected(request.receive, parsing)

    def _submit(
        self, body: ParsedBody, metadata: RequestMetadata, trace: RequestTrace
    ) -> tuple[GeneratedResponse, bool]:
        parsed = self.parser.finish(body, metadata)
        trace.parsed(parsed.specs[0], self.parser.model)
        self.keys.check_again(metadata.api_key)  # reading takes long enough for a revocation
        response = GeneratedResponse(
            parsed,
            self.service.submit,
            model=self.parser.model,
            tokenizer=self.parser.tokenizer,
            trace=trace,
        )
        return response, parsed.answer.stream

    def _card(self) -> ModelCard:
        longest, capacity_check = self.parser.max_positions, self.service.capacity_check
        if capacity_check is not None:
            longest = min(longest, capacity_check.promised)
        return ModelCard(
            id=self.parser.model,
            created=_STARTED,
            max_model_len=longest,
            default_max_tokens=min(longest, self.parser.default_max_tokens(capacity_check)),
        )


async def _stream(request: Request, response: GeneratedResponse) -> Response:
    """Return a streaming response; wait up to `FIRST_TOKEN_GRACE_S` for the first token.

    An error within that time has a status code of its own. Then the answer begins without a token,
    because proxies cut silent connections.
    """
    deltas = response.deltas()
    first = asyncio.ensure_future(anext(deltas))

    async def close() -> None:
        first.cancel()
        await asyncio.wait({first})
        await deltas.aclose()

    try:
        grace_s = 0.0 if response.progress else FIRST_TOKEN_GRACE_S
        await while_connected(request.receive, _settled(first, grace_s))
    except BaseException:
        await close()
        raise
    return EventStream(response.events(first, deltas), close=close, heartbeat=response.keep_alive)


async def _settled(future: asyncio.Future[list[AnswerDelta]], seconds: float) -> None:
    """Wait up to `seconds` for `future`; raise the error with which it failed."""
    done, _ = await asyncio.wait({future}, timeout=seconds)
    for ended in done:
        ended.result()


def _slices(body: bytes) -> list[bytes]:
    """Cut a body into pieces that are sent one by one."""
    return [body[at : at + WRITE_BYTES] for at in range(0, len(body), WRITE_BYTES)]


def authorization_of(request: Request) -> str | None:
    """Return the header `authorization`, or what Anthropic's clients send instead of it."""
    key = request.headers.get("x-api-key")
    return request.headers.get("authorization") or (None if key is None else f"Bearer {key}")


def client_request_id_of(request: Request) -> str:
    """Return the client's `x-request-id` if it is safe to log, else a fresh one.

    Serve echoes the header in the answer, and makes one up if there is none.
    """
    given = request.headers.get("x-request-id", "")
    return given if _SAFE_REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def _guarded(
    handler: Handler, respond: Callable[[Exception], Response] = error_response
) -> Handler:
    """Return a handler that turns exceptions into answers.

    Starlette's own handler for `Exception` raises again after its answer, so Serve would log every
    refused request as a crash.
    """

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            return respond(error)

    return guarded


WRITE_BYTES = 64 * 1024


class WholeAnswer(Response):
    """Sends a body in pieces, each when the client has taken the one before; then calls `close`."""

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes], *, close: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self._pieces = pieces
        self._close = close
        self.init_headers({"content-length": str(sum(map(len, pieces)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all pieces."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            waiting: list[bytes] = []
            for piece in self._pieces:
                waiting.append(piece)
                if sum(map(len, waiting)) >= WRITE_BYTES:
                    body = b"".join(waiting)
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    waiting.clear()
                    await asyncio.sleep(0)  # others' turn: `send` waits only for a slow client
            body = b"".join(waiting)
            await send({"type": "http.response.body", "body": body, "more_body": False})
        finally:
            self._close()


HEARTBEAT_S = 15.0
"""Pause between comment lines on a silent stream; proxies cut silent connections at 30-60 s."""


class EventStream(Response):
    """Sends what an asynchronous generator yields, then calls `close`, however it ends.

    Starlette's streaming response leaves closing the generator to the garbage collector, and with
    it freeing the slots of a request whose client is gone.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        close: Callable[[], Awaitable[None]],
        heartbeat: Callable[[], bytes] = lambda: HEARTBEAT,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._close = close
        self._heartbeat, self._heartbeat_s = heartbeat, heartbeat_s
        self._sent = 0
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the last one, or until the client disconnects."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(ClientDisconnect):
                await while_connected(receive, self._send_all(send))
        finally:
            await self._events.aclose()
            await self._close()

    async def _send_all(self, send: Send) -> None:
        """Send events, and heartbeats between them; an error of either ends the stream."""
        events = asyncio.ensure_future(self._send_events(send))
        heartbeats = asyncio.ensure_future(self._send_heartbeats(send))
        try:
            done, _ = await asyncio.wait({events, heartbeats}, return_when="FIRST_COMPLETED")
            for ended in done:
                ended.result()
        finally:
            await end_tasks(events, heartbeats)

    async def _send_events(self, send: Send) -> None:
        async for event in self._events:
            self._sent += 1
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_heartbeats(self, send: Send) -> None:
        while True:
            before = self._sent
            await asyncio.sleep(self._heartbeat_s)
            if self._sent == before:
                body = self._heartbeat()
                await send({"type": "http.response.body", "body": body, "more_body": True})
