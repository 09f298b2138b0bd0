"""The HTTP API over a service that only hands out tokens, periodically one for every stream."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ray import serve
from starlette.applications import Starlette

from csps.protocols.gang.messages import SampledToken
from csps.services.app import one_loop
from csps.services.http.api import HttpApi
from csps.services.http.parser_pool import ParserPool
from csps.services.http.request_parser import RequestParser
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import ApiKey, RequestSpec, SloBounds
from csps.services.settings.credentials import ApiKeys
from csps.services.settings.settings import Settings
from csps.services.telemetry.metrics import Metrics


class ScriptedService:
    """Samples for all streams at once, like a decode batch."""

    ready = True
    trouble = ""
    capacity_check = None

    def __init__(self, script: list[int], *, rate: float, streams: int) -> None:
        self._script = script
        self._period_s = streams / rate
        self._handles: dict[int, RequestHandle] = {}
        self._count = 0

    def check_room(self, slo: SloBounds, api_key: ApiKey, *, ahead: int) -> None:
        """Accept every request."""

    def submit(self, spec: RequestSpec) -> RequestHandle:
        """Let a request join from the next tick on."""
        self._count += 1
        handle = RequestHandle(spec, request_id=self._count, on_cancel=self._cancel)
        self._handles[handle.request_id] = handle
        return handle

    def _cancel(self, handle: RequestHandle) -> None:
        self._handles.pop(handle.request_id, None)
        handle.finish("cancelled")

    async def draw(self) -> None:
        """Hand out one token to every stream, every period."""
        clock = asyncio.get_running_loop().time
        due, index = clock(), 0
        while True:
            due += self._period_s
            await asyncio.sleep(due - clock())
            token = SampledToken(
                sequence_id=1, index=index, token=self._script[index % len(self._script)]
            )
            index += 1
            for handle in list(self._handles.values()):
                handle.timings.tokens += 1
                handle.deliver(token)


class ScriptedMetrics(Metrics):
    """The metrics that the API needs."""

    def render(self) -> bytes:
        return str(os.getpid()).encode()


def make_api(*, rate: float, streams: int) -> Starlette:
    """Return the application."""
    parser = RequestParser(Settings())
    text = "The quick brown fox jumps over the lazy dog. " * 4
    script = parser.tokenizer.encode(text, add_special_tokens=False)
    service = ScriptedService(script, rate=rate, streams=streams)
    api = HttpApi(
        parser=parser,
        parser_pool=ParserPool(parser.body_parser),
        service=service,
        keys=ApiKeys([]),
        metrics=ScriptedMetrics("needle"),
        max_body_bytes=1_000_000,
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        drawing = asyncio.create_task(service.draw())
        try:
            yield
        finally:
            drawing.cancel()

    return api.app(lifespan)


class Scripted:
    """The ingress."""

    def __init__(self, rate: float, streams: int) -> None:
        self._rate, self._streams = rate, streams

    def __serve_build_asgi_app__(self) -> Starlette:
        """Start the engine; Serve calls this once the constructor has returned."""
        return make_api(rate=self._rate, streams=self._streams)


def build(args: dict[str, object]) -> serve.Application:
    """Build the application; named by the Serve configuration."""
    options = {"num_cpus": 0.05, **(one_loop() if args["one_loop"] else {})}
    make = serve.deployment(name="Scripted", max_ongoing_requests=1000, ray_actor_options=options)
    return make(serve.ingress()(Scripted)).bind(args["rate"], args["streams"])
