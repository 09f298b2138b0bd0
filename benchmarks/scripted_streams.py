"""The HTTP API over a service that only hands out tokens: one for every stream, again and again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ray import serve
from starlette.applications import Starlette

from csps.protocols.tokens import TokenDrawn
from csps.services.app import one_loop
from csps.services.http.api import Api
from csps.services.http.request_parser import RequestParser
from csps.services.launch.credentials import ApiKeys
from csps.services.launch.settings import Settings
from csps.services.router.generation import Generation
from csps.services.router.running import Running
from csps.services.router.slo import Slo
from csps.services.telemetry.metrics import Metrics


class ScriptedService:
    """Draws for all streams in one go, as a decode batch does."""

    ready = True
    trouble = ""
    fit = None

    def __init__(self, script: list[int], *, rate: float, streams: int) -> None:
        self._script = script
        self._period_s = streams / rate
        self._running: dict[int, Running] = {}
        self._count = 0

    def check_room(self, slo: Slo) -> None:
        """There always is."""

    def submit(self, generation: Generation) -> Running:
        """Let it join from the next tick on."""
        self._count += 1
        running = Running(generation, number=self._count, on_cancel=self._cancel)
        self._running[running.number] = running
        return running

    def _cancel(self, running: Running) -> None:
        self._running.pop(running.number, None)
        running.finish("cancelled")

    async def draw(self) -> None:
        """One token for everybody, every period."""
        clock = asyncio.get_running_loop().time
        due, index = clock(), 0
        while True:
            due += self._period_s
            await asyncio.sleep(due - clock())
            token = TokenDrawn(rid=1, index=index, token=self._script[index % len(self._script)])
            index += 1
            for running in list(self._running.values()):
                running.timings.tokens += 1
                running.deliver(token)


class ScriptedMetrics(Metrics):
    """Says who to watch."""

    def render(self) -> bytes:
        return str(os.getpid()).encode()


def make_api(*, rate: float, streams: int) -> Starlette:
    """The application."""
    parser = RequestParser(Settings())
    text = "The quick brown fox jumps over the lazy dog. " * 4
    script = parser.tokenizer.encode(text, add_special_tokens=False)
    service = ScriptedService(script, rate=rate, streams=streams)
    api = Api(
        parser=parser,
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
        """Called by Serve once the constructor has returned."""
        return make_api(rate=self._rate, streams=self._streams)


def build(args: dict[str, object]) -> serve.Application:
    """Named by the Serve configuration."""
    options = {"num_cpus": 0.05, **(one_loop() if args["one_loop"] else {})}
    make = serve.deployment(name="Scripted", max_ongoing_requests=1000, ray_actor_options=options)
    return make(serve.ingress()(Scripted)).bind(args["rate"], args["streams"])
