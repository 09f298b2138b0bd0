"""Mixed load on a deployed server: conversations, streams that end early, long prompts, broken
connections, and processes that are killed now and then."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
from campaign_states import documented
from deployed_server import DEADLINE_S, MODEL, Deployed

TALKERS, STREAMS, LONG, RUDE = 3, 3, 1, 1
TURNS, TURN_TOKENS, ANSWER_TOKENS = 6, 150, 20
LONGEST = 6_000
RANKS = ("PrefillGang", "DecodeGang", "ElasticGang")
LATE_S = 2 * DEADLINE_S
"""Time for any answer: longer hangs."""
SHOWN = 20


@dataclass
class Soaked:
    """What clients saw, and what was killed."""

    requests: Counter[str] = field(default_factory=Counter)
    """Requests by what they were and how they ended."""
    killed: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    undocumented: list[str] = field(default_factory=list)

    def failed(self, failure: str) -> None:
        """Count a request that ended with an error."""
        if documented(failure):
            self.requests["documented"] += 1
        elif len(self.undocumented) < SHOWN:
            self.undocumented.append(failure[:300])


class SoakLoad:
    """Clients of one server, who go on until they are stopped."""

    def __init__(
        self, server: Deployed, *, seed: int, probe: list[int], expected: str, probe_tokens: int
    ) -> None:
        self._server, self._random = server, random.Random(seed)
        self._probe, self._expected, self._probe_tokens = probe, expected, probe_tokens
        self.found = Soaked()
        self._over = asyncio.Event()

    async def run(self, seconds: float, kill_every_s: tuple[float, float] | None = None) -> None:
        """Load the server for so long.

        Args:
            kill_every_s: least and longest pause between two kills; None: nobody is killed.
        """
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=4)
        async with httpx.AsyncClient(
            base_url=self._server.url, timeout=LATE_S, limits=limits
        ) as client:
            work = [self._talk] * TALKERS + [self._stream] * STREAMS
            work += [self._long] * LONG + [self._ask_probe]
            tasks = [asyncio.create_task(self._repeat(each, client)) for each in work]
            tasks += [asyncio.create_task(self._repeat(self._be_rude, client))] * RUDE
            if kill_every_s is not None:
                tasks.append(asyncio.create_task(self._kill_now_and_then(kill_every_s)))
            await asyncio.sleep(seconds)
            self._over.set()
            await asyncio.wait_for(asyncio.gather(*tasks), LATE_S + DEADLINE_S)

    async def _repeat(
        self, work: Callable[[httpx.AsyncClient], Awaitable[str]], client: httpx.AsyncClient
    ) -> None:
        while not self._over.is_set():
            try:
                async with asyncio.timeout(LATE_S):
                    self.found.requests[await work(client)] += 1
            except TimeoutError:
                self.found.undocumented.append(f"{work.__name__}: no end after {LATE_S:.0f} s")
            except (httpx.HTTPError, OSError) as error:
                self.found.failed(repr(error))
                await asyncio.sleep(0.2)  # as a client that tries again

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(256) for _ in range(count)]

    # --- clients ---------------------------------------------------------------------------

    async def _talk(self, client: httpx.AsyncClient) -> str:
        """Hold a conversation, whose turns begin with all of the one before."""
        text = self._tokens(self._random.randint(50, 400))
        for _ in range(self._random.randint(1, TURNS)):
            if self._over.is_set():
                break
            await self._whole(client, text, ANSWER_TOKENS)
            text += self._tokens(TURN_TOKENS)
        return "conversations"

    async def _whole(self, client: httpx.AsyncClient, prompt: list[int], tokens: int) -> str:
        answer = await client.post("/v1/completions", json=_body(prompt, tokens))
        if answer.is_success:
            text: str = answer.json()["choices"][0]["text"]
            return text
        self.found.failed(f"{answer.status_code}: {answer.text}")
        await asyncio.sleep(0.1)
        return ""

    async def _stream(self, client: httpx.AsyncClient) -> str:
        """Read a stream; one in three is left somewhere in the middle."""
        prompt = self._tokens(self._random.choice([5, 60, 500, 2_000]))
        tokens = self._random.randint(5, 200)
        leaves = self._random.randint(0, tokens) if self._random.random() < 0.34 else None
        seen = 0
        async for line in self._lines(client, prompt, tokens):
            seen += 1
            if seen == leaves:
                return "streams left"
            if "error" in line:
                self.found.failed(line)
        return "streams"

    async def _lines(
        self, client: httpx.AsyncClient, prompt: list[int], tokens: int
    ) -> AsyncIterator[str]:
        body = {**_body(prompt, tokens), "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if not answer.is_success:
                await answer.aread()
                self.found.failed(f"{answer.status_code}: {answer.text}")
                return
            async for line in answer.aiter_lines():
                if line:
                    yield line

    async def _long(self, client: httpx.AsyncClient) -> str:
        """Send a long prompt; half of the clients leave after some time."""
        prompt = self._tokens(self._random.randint(3_000, LONGEST))
        whole = asyncio.create_task(self._whole(client, prompt, ANSWER_TOKENS))
        if self._random.random() < 0.5:
            done, _ = await asyncio.wait({whole}, timeout=self._random.random() * 3)
            if not done:
                whole.cancel()
                with suppress(asyncio.CancelledError):
                    await whole
                return "long prompts left"
        await whole
        return "long prompts"

    async def _ask_probe(self, client: httpx.AsyncClient) -> str:
        """Ask what the right answer is known of."""
        text = await self._whole(client, self._probe, self._probe_tokens)
        self.found.wrong += text not in ("", self._expected)
        await asyncio.sleep(0.25)
        return "probes"

    async def _be_rude(self, client: httpx.AsyncClient) -> str:
        """Disconnect in the middle of a head, of a body, or before the answer."""
        address = urlsplit(self._server.url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        body = json.dumps(_body(self._tokens(300), ANSWER_TOKENS)).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: soak\r\ncontent-length: %d\r\n\r\n"
        wire = head % len(body) + body
        writer.write(wire[: self._random.choice([7, 60, len(wire) - 9, len(wire)])])
        await asyncio.sleep(self._random.random() * 0.2)
        writer.transport.abort()
        return "disconnected"

    # --- faults ----------------------------------------------------------------------------

    async def _kill_now_and_then(self, every_s: tuple[float, float]) -> None:
        """Kill a rank, or the router once in five times, and wait until the server is ready."""
        while not self._over.is_set():
            with suppress(TimeoutError):
                pause_s = self._random.uniform(*every_s)
                await asyncio.wait_for(self._over.wait(), pause_s)
            if self._over.is_set():
                return
            router = self._random.random() < 0.2
            await asyncio.to_thread(self._kill, ("Router",) if router else RANKS)

    def _kill(self, deployments: tuple[str, ...]) -> None:
        found = [(name, pid) for name in deployments for pid in sorted(_pids(self._server, name))]
        if not found:
            return
        name, pid = self._random.choice(found)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.found.killed[name] += 1
        self._server.wait_ready()


def _body(prompt: list[int], tokens: int) -> dict[str, object]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def _pids(server: Deployed, deployment: str) -> set[int]:
    """Return the running processes of a deployment, which this server may not have."""
    with suppress(KeyError):
        return server.pids(deployment)
    return set()


# --- what processes hold -----------------------------------------------------------------------

DEPLOYMENTS = ("Router", "Registry", "Configurator", *RANKS)
MORE_THREADS, MORE_DESCRIPTORS, MORE_BYTES, MORE_FILES = 4, 16, 96 << 20, 4
"""What a process may have more at the end: pools of libraries grow up to their own limits."""
SETTLES_S = 60.0


@dataclass(frozen=True)
class Held:
    """What the processes of a deployment hold at most."""

    processes: int
    threads: int
    descriptors: int
    resident_bytes: int


def holdings(server: Deployed) -> dict[str, Held]:
    """Return what the processes of each deployment hold."""
    held = {}
    for name in DEPLOYMENTS:
        if pids := _pids(server, name):
            each = [_of_process(pid) for pid in pids]
            held[name] = Held(len(pids), *map(max, zip(*each, strict=True)))
    return held


def _of_process(pid: int) -> tuple[int, int, int]:
    with open(f"/proc/{pid}/status") as status:
        fields = dict(line.split(":", 1) for line in status if ":" in line)
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return int(fields["Threads"]), descriptors, int(fields["RssAnon"].split()[0]) * 1024


def files_of(server: Deployed) -> int:
    """Return the number of files beside the logs that the server has made."""
    shared = len(os.listdir("/dev/shm"))
    made = (path for path in server.run_dir.rglob("*") if "traces" not in path.parts)
    return shared + sum(path.suffix != ".log" for path in made)


def leaks(before: dict[str, Held], files: int, server: Deployed) -> list[str]:
    """Return what the server holds more than before, once nothing of it goes away any more."""
    deadline = time.monotonic() + SETTLES_S
    while (found := list(_leaks(before, files, server))) and time.monotonic() < deadline:
        time.sleep(1.0)
    return found


def _leaks(before: dict[str, Held], files: int, server: Deployed) -> list[str]:
    found = []
    after = holdings(server)
    for name, had in before.items():
        has = after.get(name, Held(0, 0, 0, 0))
        more = (
            ("processes", has.processes, had.processes, 0),
            ("threads", has.threads, had.threads, MORE_THREADS),
            ("descriptors", has.descriptors, had.descriptors, MORE_DESCRIPTORS),
            ("MiB", has.resident_bytes >> 20, had.resident_bytes >> 20, MORE_BYTES >> 20),
        )
        found += [f"{name}: {now} {what}, before {then}" for what, now, then, slack in more
                  if now > then + slack]  # fmt: skip
    if (now_files := files_of(server)) > files + MORE_FILES:
        found.append(f"{now_files} files, before {files}")
    return found
