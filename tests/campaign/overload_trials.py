"""Trials of more load than a server can take: what it serves and refuses, and whom it spares."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from campaign_bench import Bench
from campaign_states import documented
from campaign_trial import SCALE, Outcome, Trial
from deployed_server import MODEL, Deployed, deployed, name_of, slowdown

from csps.services.http.body import MAX_BYTES
from csps.services.http.parser_pool import MEMORY_BYTES
from csps.services.launch.ray_head import session_of

CORES = len(os.sched_getaffinity(0))
SLOTS = 40_000
GANGS: dict[str, Any] = {
    "prefill": {"instances": 2, "kv_slots": SLOTS},
    "decode": {"instances": 2, "kv_slots": SLOTS},
}
PEAK_S, OVERLOAD_S = 30.0 * SCALE, 60.0 * SCALE
TIMES = 10
"""Times the sustainable rate."""
CLIENTS = 8
"""Clients of the sustainable load, each with one request at a time."""
LENGTHS = (2_000, 4_000, 8_000, 16_000)
ANSWER_TOKENS, SHORT_PROMPT, SHORT_EVERY_S = 8, 40, 0.5
ANSWER_S = 120.0
GOODPUT, REFUSAL_SHARE, TTFT_RATIO = 0.9, 0.05, 1.5
GROWTH_BYTES = 512 << 20
BODY_BYTES = MAX_BYTES + MEMORY_BYTES + (128 << 20)
"""What bodies may take (docs/operations.md): those that are read, the parser of a huge one, and the
rest for that one's copies."""
SLOW_CLIENTS, ADDRESSES, SLOW_S = int(10_000 * SCALE), 100, 40.0
LARGE_BYTES, LARGE_CLIENTS, LARGE_S = 30 << 20, 24, 30.0 * SCALE
KEYS = "greedy sk-greedy\nmodest sk-modest\n"
AUTH = {"overrides": {"greedy": {"concurrent_requests": 64}}, "diagnostics": ["modest"]}
"""The greedy key may not fill the queue, which all keys share."""
STATES = ("queue_s", "plan_s", "rank_queue_s", "compute_s", "prefill_s", "ttft_s")
"""Times in which the server explains where the modest key's time has gone."""


@dataclass
class Load:
    """What the clients of a load saw."""

    answered: int = 0
    tokens: int = 0
    """Tokens of prompts and answers of answered requests."""
    refused: int = 0
    undocumented: list[str] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    in_window: int = 0
    """Tokens of requests that were answered while the load went on."""
    ends: float = float("inf")
    timings: list[dict[str, float]] = field(default_factory=list)
    """What the server explains, if the key may ask."""

    def note(self, prompt: int, ttft_s: float) -> None:
        """Count an answered request."""
        self.answered += 1
        self.tokens += prompt + ANSWER_TOKENS
        self.ttft_s.append(ttft_s)
        if time.monotonic() <= self.ends:
            self.in_window += prompt + ANSWER_TOKENS

    def failed(self, failure: str) -> None:
        """Count a request that was refused or failed."""
        if "429" in failure:
            self.refused += 1
        elif not documented(failure):
            self.undocumented.append(failure[:300])

    def p95_s(self) -> float:
        """Return the time to first token that one request in twenty exceeds."""
        return p95(self.ttft_s) if self.ttft_s else ANSWER_S

    def states(self, prefix: str) -> dict[str, float]:
        """Return the time in each state that one request in twenty exceeds."""
        return {
            f"{prefix}_{state}": round(p95([timing[state] or 0.0 for timing in self.timings]), 3)
            for state in STATES
            if self.timings
        }


def p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


class Processes:
    """Memory and processor time of the router and what stands before it, while a load goes on."""

    def __init__(self, server: Deployed) -> None:
        (router,) = server.pids("Router")
        self._pids = [router, *_parsers(router)]
        self._pids += [pid for pid in session_of(server.head.pid) if _is_haproxy(pid)]
        self._router, self._over = router, threading.Event()
        self.most_bytes = self.first_bytes = self._bytes()
        self._thread = threading.Thread(target=self._sample, name="sampler")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Sample memory meanwhile."""
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(0.2):
            self.most_bytes = max(self.most_bytes, self._bytes())

    def _bytes(self) -> int:
        return sum(_resident(pid) for pid in self._pids)

    @property
    def grown_bytes(self) -> int:
        """Return the most that they grew by."""
        return self.most_bytes - self.first_bytes

    def cpu_s(self) -> float:
        """Return the processor time that the router has used."""
        fields = Path(f"/proc/{self._router}/stat").read_text().rsplit(") ", 1)[1].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> int:
    with suppress(OSError):  # a parser may have been replaced
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def _parsers(router: int) -> list[int]:
    children = Path(f"/proc/{router}/task/{router}/children").read_text().split()
    return [int(pid) for pid in children]


def _is_haproxy(pid: int) -> bool:
    with suppress(OSError):
        return name_of(pid) == "haproxy"
    return False


# --- clients -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """A request: tokens of its prompt, and its body as it is sent."""

    tokens: int
    body: bytes


async def send(client: httpx.AsyncClient, asked: Ask, load: Load) -> None:
    """Send one request, and note what became of it."""
    began, first = time.monotonic(), None
    try:
        async with client.stream("POST", "/v1/completions", content=asked.body) as answer:
            if not answer.is_success:
                await answer.aread()
                return load.failed(f"{answer.status_code}: {answer.text}")
            async for line in answer.aiter_lines():
                if '"error"' in line:
                    return load.failed(line)
                if '"timings"' in line:
                    load.timings.append(json.loads(line[len("data: ") :])["csps"]["timings"])
                if first is None and line.startswith("data: {"):
                    first = time.monotonic() - began
        return load.note(asked.tokens, first or ANSWER_S)
    except httpx.HTTPError as error:
        return load.failed(repr(error))


@asynccontextmanager
async def clients_of(url: str, key: str = "") -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        base_url=url, timeout=ANSWER_S, limits=limits, headers=headers
    ) as client:
        yield client


class Prompts:
    """Requests with random prompts of the overload's lengths, none of which is cached: each begins
    with ids of its own. The rest is written once by length, because clients share the server's
    processors."""

    def __init__(self, seed: int) -> None:
        self._random, self._numbers = random.Random(seed), itertools.count()
        self._rests: dict[int, bytes] = {}

    def long(self) -> Ask:
        return self.of(self._random.choice(LENGTHS))

    def of(self, length: int) -> Ask:
        if length not in self._rests:
            self._rests[length] = self._rest(length)
        high, low = divmod(next(self._numbers), 256)
        return Ask(length, b'{"prompt": [%d, %d, ' % (high % 256, low) + self._rests[length])

    def _rest(self, length: int) -> bytes:
        ids = ", ".join(str(self._random.randrange(256)) for _ in range(length - 2))
        options = {
            "model": MODEL,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "csps": {"explain": True},
        }
        return f"{ids}], {json.dumps(options)[1:]}".encode()


async def closed_loop(server: Deployed, prompts: Prompts, seconds: float) -> Load:
    """Send requests one after the other from each of a few clients."""
    load = Load()
    load.ends = load.began + seconds

    async def client_loop(client: httpx.AsyncClient) -> None:
        while time.monotonic() < load.ends:
            await send(client, prompts.long(), load)

    async with clients_of(server.url) as client:
        await asyncio.gather(*(client_loop(client) for _ in range(CLIENTS)))
    return load


async def open_loop(
    client: httpx.AsyncClient, prompt: Callable[[], Ask], every_s: float, seconds: float
) -> Load:
    """Send requests at set times, whatever becomes of those before."""
    load = Load()
    load.ends = load.began + seconds
    tasks, number = [], 0
    while (due := load.began + number * every_s) < load.ends:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(send(client, prompt(), load)))
        number += 1
    await asyncio.gather(*tasks)
    return load


async def beside(server: Deployed, work: Coroutine[Any, Any, Any], prompts: Prompts) -> Load:
    """Send short requests while something else goes on; return what became of these."""
    load = Load()

    async def short(client: httpx.AsyncClient) -> None:
        while True:
            await send(client, prompts.of(SHORT_PROMPT), load)
            await asyncio.sleep(SHORT_EVERY_S)

    async with clients_of(server.url) as client:
        task = asyncio.create_task(short(client))
        try:
            await work
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    return load


# --- trials ------------------------------------------------------------------------------------


@contextmanager
def own_server(bench: Bench, **args: Any) -> Iterator[Deployed]:
    """Start a server for one trial, alone on the machine."""
    bench.close()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        if "auth" in args:
            (run_dir / "keys").write_text(KEYS)
            args["api_keys_file"] = str(run_dir / "keys")
        with deployed(bench.model_dir, run_dir, **GANGS, **args) as server:
            yield server


def _judged(outcome: Outcome, name: str, value: float, *, most: float) -> None:
    """Note a figure, and that it is missed if it is above its limit."""
    outcome.measured |= {name: round(value, 4), "scale": SCALE}
    if value > most:
        outcome.missed.append(f"{name} is {value:.3g}, at most {most:.3g} expected")


def _shorts(outcome: Outcome, shorts: Load) -> None:
    outcome.tries += shorts.answered + shorts.refused + len(shorts.undocumented)
    outcome.documented += shorts.refused
    outcome.undocumented += shorts.undocumented[:5]
    outcome.measured |= {
        "short_answered": shorts.answered,
        "short_refused": shorts.refused,
        "short_p95_s": round(shorts.p95_s(), 3),
    }
    if not shorts.answered:
        outcome.missed.append("no short request was served")


def rate_run(bench: Bench, trial: Trial) -> Outcome:
    """Send ten times as many long prompts as the server can compute."""
    outcome, prompts = Outcome(tries=0), Prompts(trial.seed)
    with own_server(bench, deadlines={"request_s": ANSWER_S}) as server:
        processes = Processes(server)
        asyncio.run(closed_loop(server, prompts, 5.0))  # warm-up
        cpu_s, own_s = processes.cpu_s(), time.process_time()
        peak = asyncio.run(closed_loop(server, prompts, PEAK_S))
        took_s = time.monotonic() - peak.began
        peak_share = (processes.cpu_s() - cpu_s) / took_s
        peak_cores = CORES - (time.process_time() - own_s) / took_s
        every_s = PEAK_S / max(1, peak.answered) / TIMES
        found = Load()

        async def overload() -> None:
            nonlocal found
            async with clients_of(server.url) as client:
                found = await open_loop(client, prompts.long, every_s, OVERLOAD_S)

        cpu_s, own_s = processes.cpu_s(), time.process_time()
        with processes.watched():
            shorts = asyncio.run(beside(server, overload(), prompts))
        took_s = time.monotonic() - found.began
        share = (processes.cpu_s() - cpu_s) / took_s
        cores = CORES - (time.process_time() - own_s) / took_s
    outcome.tries = found.answered + found.refused + len(found.undocumented)
    outcome.documented, outcome.undocumented = found.refused, found.undocumented[:5]
    _shorts(outcome, shorts)
    peak_rate, rate = peak.in_window / PEAK_S, found.in_window / OVERLOAD_S
    outcome.measured |= {
        "peak_tokens_per_s": round(peak_rate),
        "tokens_per_s": round(rate),
        "requests_per_s": round(1 / every_s, 2),
        "peak_cores": round(peak_cores, 2),
        "cores": round(cores, 2),
        "answered": found.answered,
        "refused": found.refused,
    }
    # The clients, elsewhere in earnest, take their share of the same processors.
    lost = 1 - rate / cores / max(1.0, peak_rate / peak_cores)
    _judged(outcome, "goodput_lost", lost, most=1 - GOODPUT)
    _judged(outcome, "refusals_cpu_share", share - peak_share, most=REFUSAL_SHARE)
    _judged(outcome, "grew_mib", processes.grown_bytes / 2**20, most=GROWTH_BYTES >> 20)
    return outcome


def slow_run(bench: Bench, trial: Trial) -> Outcome:
    """Hold ten thousand connections that send a byte now and then, from a hundred addresses."""
    return _beside_clients(bench, trial, _slow_clients, most=GROWTH_BYTES)


def large_run(bench: Bench, trial: Trial) -> Outcome:
    """Send bodies nearly as large as the server reads, many at a time."""
    return _beside_clients(bench, trial, _large_bodies, most=BODY_BYTES)


def _beside_clients(
    bench: Bench,
    trial: Trial,
    work: Callable[[Deployed], Coroutine[Any, Any, Counter[str]]],
    *,
    most: int,
) -> Outcome:
    outcome, prompts, seen = Outcome(tries=0), Prompts(trial.seed), Counter[str]()
    with own_server(bench) as server:
        processes = Processes(server)

        async def bother() -> None:
            seen.update(await work(server))

        alone = asyncio.run(beside(server, asyncio.sleep(10.0), prompts))
        with processes.watched():
            shorts = asyncio.run(beside(server, bother(), prompts))
        server.assert_only_cache_left()
    _shorts(outcome, shorts)
    outcome.measured |= {name.replace(" ", "_"): count for name, count in seen.items()}
    outcome.measured["short_p95_alone_s"] = round(alone.p95_s(), 3)
    _judged(outcome, "grew_mib", processes.grown_bytes / 2**20, most=most >> 20)
    return outcome


async def _slow_clients(server: Deployed) -> Counter[str]:
    address, seen = urlsplit(server.url), Counter[str]()
    ends = time.monotonic() + SLOW_S
    head = b"POST /v1/completions HTTP/1.1\r\nhost: slow\r\ncontent-length: 100000\r\n"

    async def one(number: int) -> None:
        source = f"127.0.{1 + number % ADDRESSES}.1"
        await asyncio.sleep(number / SLOW_CLIENTS * 5.0)
        while time.monotonic() < ends:
            try:
                async with asyncio.timeout(SLOW_S):
                    _, writer = await asyncio.open_connection(
                        address.hostname, address.port, local_addr=(source, 0)
                    )
            except (OSError, TimeoutError):
                seen["connections refused"] += 1
                await asyncio.sleep(5.0)
                continue
            seen["connections"] += 1
            try:
                for byte in head:
                    if time.monotonic() >= ends:
                        break
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(2.0)
            except OSError:
                seen["connections ended"] += 1
            finally:
                writer.transport.abort()

    await asyncio.gather(*(one(number) for number in range(SLOW_CLIENTS)))
    return seen


async def _large_bodies(server: Deployed) -> Counter[str]:
    seen, ends = Counter[str](), time.monotonic() + LARGE_S
    bodies = [
        b'{"model": "%s", "prompt": "%s"}' % (MODEL.encode(), b"word " * (LARGE_BYTES // 5)),
        b'{"model": "%s", "prompt": [%s1]}' % (MODEL.encode(), b"1," * (LARGE_BYTES // 2)),
        b'{"model": "%s", "messages": [%s{}]}' % (MODEL.encode(), b"{}," * (LARGE_BYTES // 3)),
    ]

    async def one(number: int, client: httpx.AsyncClient) -> None:
        while time.monotonic() < ends:
            content = bodies[number % len(bodies)]
            path = "/v1/chat/completions" if number % len(bodies) == 2 else "/v1/completions"
            try:
                answer = await client.post(path, content=content)
                seen[f"large {answer.status_code}"] += 1
            except httpx.HTTPError as error:
                seen[f"large {type(error).__name__}"] += 1
            await asyncio.sleep(0.05)

    async with clients_of(server.url) as client:
        await asyncio.gather(*(one(number, client) for number in range(LARGE_CLIENTS)))
    return seen


MODEST_EVERY_S, MODEST_S = 3.0, 120.0 * SCALE
MODEST_SHARE = 0.25
"""Most of all tokens that the modest key may get for the trial to say something: half its half."""


def modest_run(bench: Bench, trial: Trial) -> Outcome:
    """Compare the times to first token of a key that uses under half its share, alone and beside a
    key that sends as much as it can."""
    outcome, prompts = Outcome(tries=0), Prompts(trial.seed)

    async def measure(url: str) -> tuple[Load, float]:
        """Return what the modest key saw, and how late its own process was."""
        late_s: list[float] = []
        async with clients_of(url, "sk-modest") as client:
            watch = asyncio.create_task(_watch_loop(late_s))
            own = await open_loop(client, prompts.long, MODEST_EVERY_S, MODEST_S)
            watch.cancel()
        return own, p95(late_s)

    with own_server(bench, auth=AUTH) as server:
        alone, _ = asyncio.run(measure(server.url))
        with flooded(server.url) as flood:
            beside_it, late_s = asyncio.run(measure(server.url))
    outcome.tries = alone.answered + beside_it.answered + flood.answered + flood.refused
    outcome.undocumented = [*alone.undocumented, *beside_it.undocumented, *flood.undocumented][:5]
    outcome.documented = flood.refused + beside_it.refused
    outcome.measured = {
        "alone_p95_s": round(alone.p95_s(), 3),
        "beside_p95_s": round(beside_it.p95_s(), 3),
        **alone.states("alone"),
        **beside_it.states("beside"),
        "client_late_p95_s": round(late_s, 3),
        "greedy_answered": flood.answered,
        "modest_refused": beside_it.refused,
    }
    served = max(1, beside_it.in_window + flood.in_window)
    _judged(outcome, "modest_share", beside_it.in_window / served, most=MODEST_SHARE)
    ratio = beside_it.p95_s() / alone.p95_s()
    _judged(outcome, "ttft_ratio", ratio, most=TTFT_RATIO * slowdown())
    if beside_it.refused:
        outcome.missed.append(f"{beside_it.refused} requests of the modest key were refused")
    return outcome


async def _watch_loop(late_s: list[float]) -> None:
    """Note how late this process's event loop wakes: time that is not the server's."""
    while True:
        due = time.monotonic() + 0.05
        await asyncio.sleep(0.05)
        late_s.append(time.monotonic() - due)


@contextmanager
def flooded(url: str) -> Iterator[Load]:
    """Flood the server with the greedy key's prompts meanwhile; fill in what that saw afterwards.

    Another process sends them: in the same one, the modest key's requests would wait for them
    before they were sent.
    """
    load, (ours, theirs) = Load(), multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_flood, args=(url, theirs))
    process.start()
    try:
        assert ours.recv() == "flooded"
        yield load
        ours.send("enough")
        assert ours.poll(ANSWER_S), "the flood does not end"
        load.answered, load.refused, load.undocumented, load.in_window = ours.recv()
    finally:
        process.kill()
        process.join()


def _flood(url: str, parent: Connection) -> None:
    """Send as much as the greedy key can, until told to end."""
    load, prompts = Load(), Prompts(2)

    async def send_on(client: httpx.AsyncClient) -> None:
        for number in itertools.count():
            await send(client, prompts.of(2_000 * (1 + number % 2)), load)
            await asyncio.sleep(0.01)

    async def flood() -> None:
        async with clients_of(url, "sk-greedy") as client:
            tasks = [asyncio.create_task(send_on(client)) for _ in range(64)]
            await asyncio.sleep(5.0)
            load.in_window = 0
            parent.send("flooded")
            await asyncio.to_thread(parent.recv)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(flood())
    parent.send((load.answered, load.refused, load.undocumented[:5], load.in_window))


TRIALS = [
    Trial(fault="overload", target=target, seed=1, run=run, about_s=about_s, limit_s=900)
    for target, run, about_s in (
        ("ten times the rate", rate_run, 260.0),
        ("slow clients", slow_run, 130.0),
        ("large bodies", large_run, 120.0),
        ("a modest key", modest_run, 340.0),
    )
]
