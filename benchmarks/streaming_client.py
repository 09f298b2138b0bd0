"""Streamed answers over HTTP with the time of every chunk."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

REQUEST_S = 600.0
"""Time limit of a whole answer."""


@dataclass(frozen=True)
class Timed:
    """One answer: seconds from sending to each chunk that carries text."""

    chunk_s: tuple[float, ...]
    usage: dict[str, Any]
    extra: dict[str, Any]
    """The `csps` object in which the server explains its choice."""

    @property
    def ttft_s(self) -> float:
        """Return the time to the first text."""
        return self.chunk_s[0]


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> Timed:
    """Send a streaming request and time its chunks."""
    stamps: list[float] = []
    usage: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    begin = time.perf_counter()
    with client.stream("POST", path, json={**body, "stream": True}, timeout=REQUEST_S) as response:
        if response.status_code != 200:
            response.read()
            raise RuntimeError(f"{response.status_code}: {response.text[:400]}")
        for event in _events(response):
            if event.get("choices") and _text(event["choices"][0]):
                stamps.append(time.perf_counter() - begin)
            usage = event.get("usage") or usage
            extra = event.get("csps") or extra
    return Timed(tuple(stamps), usage, extra)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data:") and not line.endswith("[DONE]"):
            yield json.loads(line[5:])


def _text(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""
