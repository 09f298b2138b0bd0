"""A Serve application that only streams: the cost of Serve itself for every chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

CHUNK = (
    b'data: {"id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", '
    b'"created": 1700000000, "model": "wide", "choices": [{"index": 0, "text": " w12345", '
    b'"logprobs": null, "finish_reason": null}]}\n\n'
)
"""A chunk as long as the server's own for one token."""


PATH = "/floor/"
APPLICATION = {
    "name": "floor",
    "route_prefix": "/floor",
    "import_path": "stream_floor:app",
    "runtime_env": {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}},
}
"""The application in a Serve configuration."""


class Floor:
    """The ingress: `GET /?period_s=…&count=…` streams so many chunks, one every period."""

    def __serve_build_asgi_app__(self) -> Starlette:
        """Start the application; Serve calls this once the constructor has returned."""
        return Starlette(routes=[Route("/", _stream)])


async def _stream(request: Request) -> StreamingResponse:
    period_s = float(request.query_params["period_s"])
    count = int(request.query_params["count"])
    return StreamingResponse(_chunks(period_s, count), media_type="text/event-stream")


async def _chunks(period_s: float, count: int) -> AsyncIterator[bytes]:
    clock = asyncio.get_running_loop().time
    due = clock()
    for _ in range(count):
        due += period_s
        await asyncio.sleep(due - clock())
        yield CHUNK


_deployment = serve.deployment(name="Floor", ray_actor_options={"num_cpus": 0.05})
app = _deployment(serve.ingress()(Floor)).bind()
