"""States in which faults hit requests: what the streams of a trial are doing when it begins."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Coroutine
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

import openai
from broken_connections import Topology, slow
from deployed_server import DEADLINE_S, Deployed
from tiny_checkpoints import random_tokens
from watched_streams import Talk, client_of

T = TypeVar("T")

STREAMED, STREAM_TOKENS, JUDGED = (60, 500, 1_057, 2_011), 800, 300
"""Prompt lengths of streams that decode, tokens of their answers, and how many of these are
judged."""
LONG, LONG_TOKENS = 12_000, 8
"""A prompt that is long enough to be hit while it is computed."""
PADDING = "u" * 2**17
"""Value of an ignored field, by which a body goes to a parser's process."""
FILLING = 6_000
"""Tokens of an answer that leaves no slots for the long prompt."""
FILLED = 0.7
"""Share of the decode gang's slots that is taken once both of these answers have theirs."""
CODES = re.compile(r"\b(?:408|413|429|503|504)\b|unavailable|timeout|queue_full")
"""Statuses and codes of docs/api.md that the cluster may answer with."""
LOST = ("RemoteProtocolError", "ReadError", "ConnectError", "WriteError", "APIConnectionError")
"""What a client sees of a connection that its process has lost (docs/operations.md)."""


def documented(failure: str) -> bool:
    """Return True if a client may see this failure after a fault."""
    return bool(CODES.search(failure)) or any(kind in failure for kind in LOST)


def played(state: str, seed: int) -> list[tuple[list[int], int]]:
    """Return the prompts of a state, and how many tokens of their answers are judged."""
    streams = [(random_tokens(length, seed=100 * seed + length), JUDGED) for length in STREAMED]
    long = random_tokens(LONG + 64 * seed, seed=seed), LONG_TOKENS
    prompts = {
        "idle": [],
        "decode": streams,
        "prefill": [streams[0], long],
        "transfer": [streams[0], long],
        "piggybacked": [streams[0], long],
        "queued": [*streams[:2], long],
        "parsing": [(prompt, LONG_TOKENS) for prompt, _ in streams],
    }
    return prompts[state or "idle"]


class Scene:
    """Streams that are in a state when the context opens. Their loop has a thread of its own."""

    def __init__(self, server: Deployed, state: str, seed: int) -> None:
        self._server, self._state, self._seed = server, state, seed
        self.talks: list[Talk] = []
        self.left: list[Talk] = []
        """Streams whose client left on purpose."""
        self.known: dict[int, int] = {}
        """Tokens of each stream's answer that are judged, by `id`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scene", daemon=True)
        self._context = client_of(server)
        self._client: openai.AsyncOpenAI | None = None
        self._reading: dict[int, asyncio.Task[None]] = {}
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._begin([prompt for prompt, _ in played(self._state, self._seed)])
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()
        self._run(self._leave())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    def _begin(self, prompts: list[list[int]]) -> None:
        match self._state:
            case "decode":
                talks = [self.ask(prompt, STREAM_TOKENS, known=JUDGED) for prompt in prompts]
                for talk in talks:
                    self.says(talk, 2)
            case "prefill" | "piggybacked":
                self.says(self.ask(prompts[0], STREAM_TOKENS, known=JUDGED), 2)
                self._admitted(prompts[1])
                self._server.wait_zero("num_requests_waiting")
            case "transfer":
                self.says(self.ask(prompts[0], STREAM_TOKENS, known=JUDGED), 2)
                self._undo.enter_context(slow(Topology(self._server), "kv", None))
                # Its prompt is computed, and its KV is on the way.
                self.says(self.ask(prompts[1], LONG_TOKENS), 1)
            case "queued":
                for prompt in prompts[:2]:
                    self.ask(prompt, FILLING, known=JUDGED)
                # Asked of the server: to read so many tokens keeps this process busy, and once the
                # streams have ended nothing has to wait.
                self._server.wait_gauge("kv_cache_usage_perc", FILLED, role="decode")
                self._admitted(prompts[2])
                self._server.wait_gauge("num_requests_waiting", 1)

    def hit(self) -> None:
        """Go on after the fault: the clients of streams that keep another one waiting leave, and
        slowed connections are as before."""
        self._undo.close()
        if self._state == "queued":
            for talk in self.talks[:2]:
                self.leave(talk)
        if self._state == "parsing":
            for prompt, count in played(self._state, self._seed):
                self.ask(prompt, count, user=PADDING)

    def ask(
        self, prompt: list[int], max_tokens: int, *, known: int | None = None, **fields: str
    ) -> Talk:
        """Begin a stream.

        Args:
            known: tokens that are judged, if not all.
            fields: further ones of the request.
        """
        request = {"prompt": prompt, "max_tokens": max_tokens, **fields}
        return self._run(self._ask(request, known or max_tokens))

    def says(self, talk: Talk, tokens: int) -> None:
        """Wait until a stream has so many tokens."""
        self._run(talk.says(tokens))

    def finish(self) -> None:
        """Wait until every stream has ended, but those whose client has left."""
        self._run(self._finish())

    def leave(self, talk: Talk) -> None:
        """Let the client of a stream disconnect."""
        self.left.append(talk)
        self._loop.call_soon_threadsafe(self._reading[id(talk)].cancel)

    def _admitted(self, prompt: list[int]) -> None:
        """Begin a stream; return when the router has its prompt. Other metrics count short
        requests that come at the same time, too."""
        before = self._server.gauge("prompt_tokens_total")
        self.ask(prompt, LONG_TOKENS)
        self._server.wait_gauge("prompt_tokens_total", before + len(prompt))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(3 * DEADLINE_S)

    async def _ask(self, request: dict[str, Any], known: int) -> Talk:
        if self._client is None:
            self._client = await self._context.__aenter__()
        talk = Talk(request)
        self.known[id(talk)] = known
        self.talks.append(talk)
        self._reading[id(talk)] = asyncio.create_task(talk.read(self._client))
        return talk

    async def _finish(self) -> None:
        async with asyncio.timeout(2 * DEADLINE_S):
            await asyncio.gather(*self._reading.values(), return_exceptions=True)

    async def _leave(self) -> None:
        for task in self._reading.values():
            task.cancel()
        await asyncio.gather(*self._reading.values(), return_exceptions=True)
        if self._client is not None:
            await self._context.__aexit__(None, None, None)
