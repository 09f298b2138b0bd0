"""Cost of the router: processor time per token and per request, and added latency.

    python benchmarks/paced/router_cost.py [--seconds 6] [--json FILE] [--profile FOLDER]

Paced ranks answer as fast as configured, so that only the router works. Its processor time is the
operating system's count for its process, all threads; client and ranks are processes of their own.
A rate is sustained when the client has at least 97 % of the tokens of the ranks' pace.

- streams: 64 at once, at rising rates
- whole requests: 200 tokens in, 16 out, not streamed, 16 at once
- one stream: from a rank's message to the client's read, less the time of a driver that speaks RPC
  to the ranks itself; and the first token, less the time of a rejected request
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
import yaml

# Run as a script, the module path starts inside the folder, where `paced` is not a name.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import report

from csps.services.profiling.steps import CpuTime
from paced.driver import Driver
from paced.http_client import Connection
from paced.processes import Served, served, unserved

STREAMS = 64
ITERATIONS_MS = (20.0, 12.0, 9.0, 7.0, 5.5, 4.5)
"""Iteration times; 64 streams of one token an iteration make 3,200 to 14,200 tokens a second."""
SUSTAINED = 0.97
WHOLE_REQUESTS, AT_ONCE = 400, 16
ROUNDS = 40
STEP_MS = 5.0
SETTLE_S = 1.0
"""Time after the begin of the last stream before counting starts."""
WORD = 300
OPTIONS = ("max_batch=512",)


@dataclass(frozen=True)
class Targets:
    """Targets of issue 8."""

    us_per_token: float = 80.0
    tokens_per_s: float = 5000.0
    ms_per_request: float = 3.0
    added_per_token_ms: float = 0.2
    added_first_ms: float = 5.0


def main() -> None:
    arguments = _arguments()
    streams = [_streams(iteration_ms, arguments) for iteration_ms in ITERATIONS_MS]
    sustained = [stream for stream in streams if stream["sustained"]]
    best = max(sustained, key=lambda row: row["tokens_per_s"], default=streams[0])
    whole = _measured(1.0, _whole_requests)
    with _paced(10.0, "--emitted") as server:
        one = uvloop.run(_one_stream(server))
    served_ms = _delay_ms(one.pop("stamps"), server.after["emitted"])
    driver_ms = _driver_delay_ms()
    one |= {
        "token_delay_ms": served_ms,
        "token_delay_of_driver_ms": driver_ms,
        "added_per_token_ms": round(served_ms - driver_ms, 3),
    }
    targets = Targets()
    result = {
        "benchmark": "paced_router_cost",
        "streams": STREAMS,
        "highest_sustained_tokens_per_s": best["tokens_per_s"],
        "us_per_token_there": best["us_per_token"],
        **whole,
        **one,
        "targets": vars(targets),
        "met": {
            "us_per_token": best["us_per_token"] <= targets.us_per_token,
            "tokens_per_s": best["tokens_per_s"] >= targets.tokens_per_s,
            "ms_per_request": whole["ms_per_request"] <= targets.ms_per_request,
            "added_per_token": one["added_per_token_ms"] <= targets.added_per_token_ms,
            "added_first": one["added_first_ms"] <= targets.added_first_ms,
        },
    }
    report.publish(result, streams, arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="of each rate")
    parser.add_argument("--profile", type=Path, help="py-spy's samples of each rate, into a folder")
    return report.with_json_option(parser).parse_args()


# --- servers -----------------------------------------------------------------------------------


@contextmanager
def _cluster_file(iteration_ms: float) -> Iterator[str]:
    """Return a cluster file of two gangs with a fixed iteration time."""
    cluster = {
        "servers": [
            {"instances": 2, "permissions": ["prefill"], "kv_slots": 1_000_000},
            {"instances": 2, "permissions": ["decode"], "kv_slots": 4_000_000},
        ],
        "latency": {
            "steps": {1: [STEP_MS / 1e3, 0.0, 0.0, 0.0]},
            "decode": {2: [iteration_ms / 1e3, 0.0, 0.0]},
        },
        "max_positions": 131072,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(yaml.safe_dump(cluster))
        yield str(path)


@contextmanager
def _paced(iteration_ms: float, *ranks: str) -> Iterator[Served]:
    """Start a router with such gangs."""
    with (
        _cluster_file(iteration_ms) as path,
        served(path, "csps", *OPTIONS, ranks=ranks) as server,
    ):
        yield server


def _measured(
    iteration_ms: float, measure: Callable[[Served], Coroutine[Any, Any, dict[str, Any]]]
) -> dict[str, Any]:
    with _paced(iteration_ms) as server:
        return uvloop.run(measure(server))


def _body(prompt: int, tokens: int, *, stream: bool, model: str = "paced") -> bytes:
    return json.dumps(
        {
            "model": model,
            "prompt": [WORD] * prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
        }
    ).encode()


# --- streams -----------------------------------------------------------------------------------


def _streams(iteration_ms: float, arguments: argparse.Namespace) -> dict[str, Any]:
    async def measure(server: Served) -> dict[str, Any]:
        return await _count(server, iteration_ms, arguments)

    return _measured(iteration_ms, measure)


async def _count(
    server: Served, iteration_ms: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Count tokens and processor time between two moments with all streams under way."""
    seconds: float = arguments.seconds
    tokens = int((seconds + 4 * SETTLE_S) / iteration_ms * 1e3)
    connections = [Connection(server.port) for _ in range(STREAMS)]
    asking = []
    for connection in connections:
        await connection.open()
        asking.append(asyncio.ensure_future(connection.ask_raw(_body(32, tokens, stream=True))))
    await asyncio.sleep(SETTLE_S + 0.5)
    profiler = _profiler(server.router_pid, iteration_ms, arguments)
    cpu, count, begin = _state(server, connections)
    await asyncio.sleep(seconds)
    cpu_after, count_after, end = _state(server, connections)
    if profiler is not None:
        profiler.wait()
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    for connection in connections:
        connection.close()
    rate = (count_after - count) / (end - begin)
    paced = STREAMS / iteration_ms * 1e3
    return {
        "iteration_ms": iteration_ms,
        "paced_tokens_per_s": round(paced),
        "tokens_per_s": round(rate),
        "sustained": rate >= SUSTAINED * paced,
        "us_per_token": round((cpu_after - cpu) / (count_after - count) * 1e6, 1),
        "router_cores": round((cpu_after - cpu) / (end - begin), 2),
    }


def _state(server: Served, connections: list[Connection]) -> tuple[float, int, float]:
    cpu_s = CpuTime.of(server.router_pid).process_s
    return cpu_s, sum(connection.events for connection in connections), time.monotonic()


def _profiler(
    pid: int, iteration_ms: float, arguments: argparse.Namespace
) -> subprocess.Popen[bytes] | None:
    if arguments.profile is None:
        return None
    arguments.profile.mkdir(parents=True, exist_ok=True)
    path = arguments.profile / f"streams-{iteration_ms:g}ms.txt"
    seconds = str(max(1, round(arguments.seconds)))
    command = ["py-spy", "record", "--pid", str(pid), "--duration", seconds]
    options = ["--format", "raw", "--output", str(path), "--rate", "200"]
    return subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)


# --- whole requests ----------------------------------------------------------------------------


async def _whole_requests(server: Served) -> dict[str, Any]:
    body = _body(200, 16, stream=False)
    left = iter(range(WHOLE_REQUESTS))

    async def user() -> None:
        connection = Connection(server.port)
        await connection.open()
        for _ in left:
            answer = await connection.ask_raw(body)
            assert answer.status == 200, answer.body
        connection.close()

    warm = Connection(server.port)
    await warm.open()
    for _ in range(20):
        await warm.ask_raw(body)
    warm.close()
    cpu_s, began = CpuTime.of(server.router_pid).process_s, time.monotonic()
    await asyncio.gather(*(user() for _ in range(AT_ONCE)))
    cpu_s = CpuTime.of(server.router_pid).process_s - cpu_s
    return {
        "ms_per_request": round(cpu_s / WHOLE_REQUESTS * 1e3, 3),
        "requests_per_s": round(WHOLE_REQUESTS / (time.monotonic() - began)),
    }


# --- one stream --------------------------------------------------------------------------------


async def _one_stream(server: Served) -> dict[str, Any]:
    """Measure latencies, one request at a time."""
    connection = Connection(server.port)
    await connection.open()
    stream = _body(200, 32, stream=True)
    refused = _body(200, 32, stream=True, model="nobody")
    firsts: list[float] = []
    refusals: list[float] = []
    stamps: list[list[float]] = []
    for _ in range(ROUNDS):
        answer = await connection.ask_raw(stream, stamps=True)
        refusal = await connection.ask_raw(refused)
        assert (answer.status, refusal.status) == (200, 404)
        firsts.append(answer.ttft_s)
        refusals.append(refusal.last - refusal.sent)
        stamps.append(answer.stamps)
    connection.close()
    first, refusal_s = statistics.median(firsts), statistics.median(refusals)
    return {
        "first_token_ms": round(first * 1e3, 2),
        "refused_ms": round(refusal_s * 1e3, 2),
        "added_first_ms": round((first - refusal_s) * 1e3 - STEP_MS, 2),
        "stamps": stamps,
    }


def _driver_delay_ms() -> float:
    """Measure the same without a router: a driver over RPC."""
    with _cluster_file(10.0) as path, unserved(path, "--emitted") as ranks:

        async def ask() -> list[list[float]]:
            driver = Driver(ranks.listing)
            await driver.start()
            stamps = [
                await driver.ask(sequence_id, 200, 32) for sequence_id in range(1, ROUNDS + 1)
            ]
            await driver.close()
            return stamps

        stamps = uvloop.run(ask())
        ranks.end()
    return _delay_ms(stamps, ranks.after["emitted"])


def _delay_ms(stamps: list[list[float]], emitted: list[list[int]]) -> float:
    """Return the median time from a token on a rank to its read.

    One request follows another, so that their ids identify them.
    """
    frames: dict[int, dict[int, float]] = {}
    for sequence_id, index, at_ns in emitted:
        frames.setdefault(sequence_id, {})[index] = at_ns / 1e9
    delays = [
        stamp - frame[index]
        for (_, frame), times in zip(sorted(frames.items()), stamps, strict=True)
        for index, stamp in enumerate(times)
        if index in frame
    ]
    return round(statistics.median(delays) * 1e3, 3)


if __name__ == "__main__":
    main()
