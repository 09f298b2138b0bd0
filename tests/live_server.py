"""An ASGI application behind a real HTTP server on a free port of loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

START_DEADLINE_S = 60.0


class _Server(uvicorn.Server):
    """A server that ends immediately when asked; uvicorn's own checks for that ten times a
    second.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.over = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.over.wait()


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    """Serve on the running loop; yield the base URL."""
    server = _Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    task = asyncio.ensure_future(server.serve())
    async with asyncio.timeout(START_DEADLINE_S):
        while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        server.over.set()
        await task
