"""The same load through httpx and aiohttp in minimal form: the cost of their streams.

    python benchmarks/plain_clients.py httpx --url http://127.0.0.1:PORT --rate 200 --requests 1000

`load_generator.py` runs it beside `csps bench serve`. It sends evenly spaced requests, times the
chunks of their answers, and prints the processor milliseconds of one request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import httpx
import uvloop

BODY = {"model": "planted", "prompt": " word" * 64, "max_tokens": 16, "stream": True}
Ask = Callable[[], Awaitable[list[int]]]


def take(line: str, stamps: list[int]) -> None:
    """Parse a line of the answer."""
    if line.startswith("data: {"):
        chunk = json.loads(line[6:])
        if chunk["choices"] and chunk["choices"][0]["text"]:
            stamps.append(time.perf_counter_ns())


async def with_httpx(url: str) -> AsyncIterator[Ask]:
    """Send with httpx, with one client for all requests."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client:

        async def ask() -> list[int]:
            stamps: list[int] = []
            async with client.stream("POST", "/v1/completions", json=BODY) as answer:
                async for line in answer.aiter_lines():
                    take(line, stamps)
            return stamps

        yield ask


async def with_aiohttp(url: str) -> AsyncIterator[Ask]:
    """Send with aiohttp, with one session for all requests."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:

        async def ask() -> list[int]:
            stamps: list[int] = []
            async with session.post("/v1/completions", json=BODY) as answer:
                async for line in answer.content:
                    take(line.decode(), stamps)
            return stamps

        yield ask


CLIENTS: dict[str, Any] = {"httpx": with_httpx, "aiohttp": with_aiohttp}


async def load(name: str, url: str, rate: float, requests: int) -> float:
    """Return the processor milliseconds of a request."""
    async for ask in CLIENTS[name](url):
        await ask()
        begin, cpu_s = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for number in range(requests):
                await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
                tasks.append(group.create_task(ask()))
        cpu_s = time.process_time() - cpu_s
        assert all(len(task.result()) == BODY["max_tokens"] for task in tasks)
    return 1000 * cpu_s / requests


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("--url", required=True)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--requests", type=int, default=1000)
    arguments = parser.parse_args()
    print(uvloop.run(load(arguments.client, arguments.url, arguments.rate, arguments.requests)))


if __name__ == "__main__":
    main()
