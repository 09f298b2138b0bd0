"""Streams of a deployed server that tests look into while they go on, and compare with others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import openai
from deployed_server import DEADLINE_S, MODEL, Deployed

TIE = 1e-4


@dataclass
class Talk:
    """A stream that is read until a test has received enough."""

    fields: dict[str, Any]
    received: dict[str, list[Any]] = field(
        default_factory=lambda: {"tokens": [], "top_logprobs": []}
    )
    news: asyncio.Event = field(default_factory=asyncio.Event)
    over: BaseException | bool = False
    """Reason why nothing more comes."""

    async def read(self, client: openai.AsyncOpenAI) -> None:
        """Read to the end of the stream."""
        try:
            await self._read(client)
        except BaseException as error:
            self.over = error
            raise
        finally:
            self.over = self.over or True
            self.news.set()

    async def _read(self, client: openai.AsyncOpenAI) -> None:
        stream = await client.completions.create(
            model=MODEL,
            temperature=0,
            logprobs=2,
            stream=True,
            extra_body={"ignore_eos": True},
            **self.fields,
        )
        async for chunk in stream:
            if (of := chunk.choices[0].logprobs) is not None:
                self.received["tokens"] += of.tokens or []
                self.received["top_logprobs"] += of.top_logprobs or []
            self.news.set()
            # What came at once is all read before the loop does anything else, which takes seconds
            # on a busy machine: a server disconnects clients that connect and send nothing.
            await asyncio.sleep(0)

    @property
    def tokens(self) -> int:
        return len(self.received["tokens"])

    async def says(self, tokens: int) -> None:
        """Wait until it has said so many."""
        async with asyncio.timeout(2 * DEADLINE_S):
            while self.tokens < tokens:
                assert not self.over, f"it ends with {self.tokens} tokens: {self.over!r}"
                self.news.clear()
                await self.news.wait()

    def check(self, expected: Talk) -> None:
        """Compare as far as both streams go."""
        known = min(self.tokens, expected.tokens)
        ours, theirs = (
            {k: token_ids[:known] for k, token_ids in of.received.items()}
            for of in (self, expected)
        )
        check_same(ours, theirs)


@asynccontextmanager
async def client_of(server: Deployed) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=4 * DEADLINE_S, max_retries=0
    ) as client:
        yield client


def check_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Check for equal tokens. The first different ones must both be among the two likeliest, which
    are close together.
    """
    for at, (one, other) in enumerate(zip(ours["tokens"], theirs["tokens"], strict=True)):
        if one != other:
            for likeliest in (ours["top_logprobs"][at], theirs["top_logprobs"][at]):
                apart = f"token {at}: {one!r}, not {other!r}, of {likeliest}"
                assert {one, other} <= likeliest.keys(), apart
                assert abs(likeliest[one] - likeliest[other]) <= TIE, apart
            return
